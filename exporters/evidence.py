"""The model's inputs and outputs at every call, with which each exporter proves its files, and which of their dims are open."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch

from exporters.base import Adapter, Captures, ExportRequest, TensorSpec
from exporters.eager_runs import dims_that_change, place_of_draws
from exporters.errors import RouteRefused, StructureError
from exporters.isolation import silent, undisturbed
from exporters.metadata import metadata_of
from optimize_export.wording import dtype_name

# Default name for the size of dim 0.
BATCH = "batch"

OpenDims = dict[tuple[int, int], tuple[str, tuple[int, ...]]]
"""Name and size in each call of an open dim, by (input, dim)."""

# Maximum bytes of one input that is built only to try a batch outside the calls.
_LARGEST_INPUT = 64 * 2**20

# The shapes of all inputs in one call.
Shapes = list[tuple[int, ...]]


@dataclass(frozen=True)
class Line:
    """A size as a function of the batch: `slope` * batch + `start`.

    "Batch" means any size that grows: that of another open dim, or the step number when all sizes grow together.
    """

    slope: int
    start: int

    def at(self, batch: int) -> int:
        return self.slope * batch + self.start


def line_through(batches: Sequence[int], sizes: Sequence[int]) -> Line | None:
    """The line with integer slope and start through the sizes at these batches; None if there is none."""
    if len(set(sizes)) == 1:
        return Line(0, sizes[0])
    points = list(zip(batches, sizes, strict=False))
    # The first open dim may keep its size where another one changes.
    other = next((point for point in points if point[0] != batches[0]), None)
    if other is None:
        return None
    slope, rest = divmod(other[1] - sizes[0], other[0] - batches[0])
    line = Line(slope, sizes[0] - slope * batches[0])
    fits = not rest and all(line.at(batch) == size for batch, size in points)
    return line if fits else None


class TooLarge(RouteRefused):
    """The inputs for a batch would be too large to build."""


@dataclass(frozen=True)
class Direction:
    """Calls in which certain open dims change while the others keep their size."""

    # Indices of the calls; the first one is always call 0.
    calls: tuple[int, ...]
    # The (input, dim) pairs that change.
    dims: tuple[tuple[int, int], ...]
    # Where several sizes grow together, the step number of each call, starting at 1; otherwise empty.
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """The model's inputs and outputs at every call, and the open dims of both."""

    # Without a proof of its own, it has no undecided outputs either.
    request: ExportRequest
    adapter: Adapter
    inputs: tuple[tuple[torch.Tensor, ...], ...]
    outputs: tuple[tuple[torch.Tensor, ...], ...]
    # Indices of outputs that differ between two runs on the same inputs; only their shapes and dtypes can be compared.
    unstable: frozenset[int]
    # The (input, dim) pairs that change between calls.
    open_dims: tuple[tuple[int, int], ...]
    input_specs: tuple[TensorSpec, ...]
    output_specs: tuple[TensorSpec, ...]
    # All metadata to write into the file.
    metadata: Mapping[str, str] = field(default_factory=dict)
    # Those `open_dims` that the request names.
    declared: frozenset[tuple[int, int]] = frozenset()
    # The ways in which the sizes change, where there are several; and the `steps` of the one of a single view.
    directions: tuple[Direction, ...] = ()
    steps: tuple[int, ...] = ()
    # The names and values of sizes that the calls change, but that are fixed here at others.
    fixed: tuple[tuple[str, int], ...] = ()
    # The line where the model draws the random numbers that make outputs unstable; "" if there is none.
    draws: str = ""
    # Whether the caller supplied the outputs, so that the model wasn't run for them.
    outputs_given: bool = False
    # The largest number of terms that a format's loops add sequentially, where torch sums pairwise.
    in_a_row: int = 1
    # Those of the request, or new ones of the adapter.
    captures: Captures = field(kw_only=True)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Run the model, or a program captured from it, without lasting effects on the buffers of both."""
        with ExitStack() as stack:
            for adapter in dict.fromkeys((self.adapter, self.captures.adapter)):
                stack.enter_context(undisturbed(adapter))
            yield

    @property
    def along(self) -> tuple[Evidence, ...]:
        """One evidence per size that changes by itself, and one for all that grow together.

        Conditions are functions of one number, so each needs a single direction.
        """
        return tuple(
            replace(
                self,
                inputs=tuple(self.inputs[call] for call in direction.calls),
                outputs=tuple(self.outputs[call] for call in direction.calls),
                open_dims=direction.dims,
                directions=(),
                steps=direction.steps,
            )
            for direction in self.directions
        ) or (self,)

    def fixing(self, view: Evidence, batch: int) -> Evidence | None:
        """The evidence from one size outside the calls on, where only the others change; None if no others change.

        That size is the one of `view`, out of `along`, and is `batch` there.
        """
        others = [each for each in self.directions if not (each.steps or set(each.dims) & set(view.open_dims))]
        if view.steps or not others:
            return None
        dims = tuple(place for each in others for place in each.dims)
        together = [
            replace(each, dims=tuple(place for place in each.dims if place in dims))
            for each in self.directions
            if each.steps and len(others) > 1
        ]
        return replace(
            self,
            inputs=(view.inputs_at(batch), *self.inputs[1:]),
            open_dims=dims,
            directions=(*others, *together),
            fixed=(*self.fixed, (view.size, batch)),
        )

    @property
    def size(self) -> str:
        """The name of the size that changes; the first name where several grow together."""
        return next((str(self.input_specs[index].shape[dim]) for index, dim in self.open_dims), BATCH)

    @property
    def growing(self) -> str:
        """The growing sizes as a phrase for a message."""
        if self.steps:
            sizes = dict.fromkeys(str(self.input_specs[index].shape[dim]) for index, dim in self.open_dims)
            return join_words(list(sizes))
        return f"the {self.size}" if self.size == BATCH else f"`{self.size}`"

    def at(self, batch: int) -> str:
        """The sizes at a batch as a phrase for a message."""
        sizes = {**dict(self.fixed), self.size: batch}
        if self.steps:
            shapes = self.shapes_at(batch)
            sizes |= {str(self.input_specs[index].shape[dim]): shapes[index][dim] for index, dim in self.open_dims}
        if list(sizes) == [BATCH]:
            return f"batch size {batch}"
        return join_words([f"{name} = {size}" for name, size in sizes.items()])

    def way_out(self, size: str) -> str:
        """Advice for a size that can't be open, given by name; empty if no input has a dim with that name."""
        dims = [
            (index, dim)
            for index, spec in enumerate(self.input_specs)
            for dim, name in enumerate(spec.shape)
            if name == size
        ]
        if not dims or not self.declared.issuperset(dims):
            return " Fixing the batch size with `static_batch=True` may help: that wasn't tried." if dims else ""
        named = join_words([f"dim {dim} of `{self.input_specs[index].name}`" for index, dim in dims])
        return f" Leaving {named} out of `dynamic=…` may help: that wasn't tried."

    @property
    def half(self) -> torch.dtype | None:
        """The half precision that the model computes in or that one of its tensors has; None if there is none."""
        adapter = self.adapter
        tensors = (*adapter.parameters(), *adapter.buffers(), *self.inputs[0], *self.outputs[0])
        held = {self.request.computes_in, *(tensor.dtype for tensor in tensors)}
        return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in held), None)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        tensors = (*self.adapter.parameters(), *self.adapter.buffers(), *self.inputs[0])
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch of each call: the size of the first open dim, or `steps`; empty where no dim is open."""
        return self.steps or tuple(
            tensors[index].shape[dim] for tensors in self.inputs for index, dim in self.open_dims[:1]
        )

    def line(self, index: int, dim: int) -> Line | None:
        """The size of an open dim as a linear function of the batch; None where it isn't one."""
        return line_through(self.batches, [tensors[index].shape[dim] for tensors in self.inputs])

    def shapes_at(self, batch: int) -> list[tuple[int, ...]]:
        """The shapes of the inputs at another batch; RouteRefused if an open dim isn't a linear function of the batch."""
        shapes = [list(tensor.shape) for tensor in self.inputs[0]]
        for index, dim in self.open_dims:
            line = self.line(index, dim)
            if line is None:
                raise RouteRefused(
                    f"dim {dim} of input `{self.adapter.input_names[index]}` isn't a linear function of {self.growing}",
                    size=self.size,
                )
            shapes[index][dim] = line.at(batch)
        return [tuple(shape) for shape in shapes]

    def inputs_at(self, batch: int) -> tuple[torch.Tensor, ...]:
        """Inputs at another batch, built by repeating rows of the calls; TooLarge if that would take too much memory."""
        made = list(self.inputs[0])
        shapes = self.shapes_at(batch)
        for index in {index for index, _ in self.open_dims}:
            if made[index].element_size() * math.prod(shapes[index]) > _LARGEST_INPUT:
                raise TooLarge("the inputs would be too large for a comparison", size=self.size)
        for index, dim in self.open_dims:
            rows = made[index]
            if sum(other == index for other, _ in self.open_dims) == 1:
                # Where other sizes are fixed, those of the further calls differ.
                rest = rows.select(dim, 0).shape
                fitting = (tensors[index] for tensors in self.inputs)
                rows = torch.cat([each for each in fitting if each.select(dim, 0).shape == rest], dim)
            size = shapes[index][dim]
            made[index] = rows.index_select(dim, torch.arange(size, device=rows.device) % rows.shape[dim])
        return tuple(made)

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence per check that wasn't possible."""
        names = [f"`{self.adapter.output_names[index]}`" for index in sorted(self.unstable)]
        return tuple(
            f"Output {name} differs between two runs of the model; only its shape and dtype were checked."
            for name in names
        )


def gather(request: ExportRequest) -> Evidence:
    """Collect the evidence for a request; run the model where the request has no outputs.

    Raises:
        StructureError: the calls don't match each other, or can't be left open as the request asks.
        MetadataError: a file can't hold the metadata.
    """
    args, kwargs = request.calls[0]
    adapter = Adapter(
        request.model,
        args,
        kwargs,
        input_names=request.input_names,
        output_names=request.output_names,
        outputs=request.output_structure,
    )
    inputs = tuple(adapter.flatten_inputs(*call) for call in request.calls)
    open_dims = _open_inputs(adapter.input_names, inputs, request.dynamic_batch, request.open_dims)
    named = {symbol for dims in request.open_dims.values() for symbol in dims.values()}
    directions = _directions_of(open_dims, named)
    outputs, unstable = request.outputs or (), frozenset[int]()
    given = bool(outputs) and all(len(flat) == len(adapter.output_names) for flat in outputs)
    if not given:
        outputs, unstable = _run_at_each(adapter, inputs, request.open_dims)
    draws = place_of_draws(adapter, inputs[0]) if unstable else ""
    symbols = {sizes: name for (_, _), (name, sizes) in open_dims.items()}
    return Evidence(
        request if request.proof is not None else by_place(request),
        adapter,
        inputs,
        outputs,
        unstable,
        tuple(open_dims),
        tuple(
            TensorSpec(
                name,
                dtype_name(tensor.dtype),
                tuple(open_dims.get((index, dim), (size, ()))[0] for dim, size in enumerate(tensor.shape)),
            )
            for index, (name, tensor) in enumerate(zip(adapter.input_names, inputs[0], strict=True))
        ),
        _output_specs(adapter, inputs, outputs, symbols, request.varying),
        metadata_of(request.model, adapter.input_names, adapter.output_names, request.metadata),
        frozenset((index, dim) for index, dim in open_dims if adapter.input_names[index] in request.open_dims),
        directions,
        draws=draws,
        outputs_given=given,
        captures=request.captures or Captures(adapter),
    )


def _open_inputs(
    names: tuple[str, ...],
    inputs: tuple[tuple[torch.Tensor, ...], ...],
    dynamic: bool,
    declared: Mapping[str, Mapping[int, str]],
) -> OpenDims:
    """The open dims; undeclared ones share a name where their sizes are equal in all calls."""
    found = _declared_inputs(names, inputs, declared)
    symbols = {sizes: symbol for symbol, sizes in found.values()}
    for index, name in enumerate(names):
        shapes = [tensors[index].shape for tensors in inputs]
        if len({tensors[index].dtype for tensors in inputs}) > 1:
            raise StructureError(f"Input `{name}` changes its dtype between the calls.")
        if name in declared:
            continue
        if len({len(shape) for shape in shapes}) > 1 or len({shape[1:] for shape in shapes}) > 1:
            raise StructureError(f"Input `{name}` changes more than its first dim between the calls.")
        if len(set(shapes)) == 1:
            continue
        if not dynamic:
            raise StructureError(f"Input `{name}` changes its shape between the calls of a static export.")
        sizes = tuple(shape[0] for shape in shapes)
        if sizes[0] < 2:
            raise StructureError(
                f"Input `{name}` has batch size {sizes[0]} in the first call; tracing needs two rows or more."
            )
        symbol = symbols.setdefault(sizes, f"{name}_batch" if BATCH in symbols.values() else BATCH)
        found[index, 0] = (symbol, sizes)
    return dict(sorted(found.items()))


def _declared_inputs(
    names: tuple[str, ...], inputs: tuple[tuple[torch.Tensor, ...], ...], declared: Mapping[str, Mapping[int, str]]
) -> OpenDims:
    found: OpenDims = {}
    sizes_of: dict[str, tuple[int, ...]] = {}
    for index, name in enumerate(names):
        if name not in declared:
            continue
        shapes = [tensors[index].shape for tensors in inputs]
        if len({len(shape) for shape in shapes}) > 1:
            raise StructureError(f"Input `{name}` changes its number of dims between the calls.")
        for dim, sizes in enumerate(zip(*shapes, strict=True)):
            symbol = declared[name].get(dim)
            if symbol is None and len(set(sizes)) > 1:
                raise StructureError(f"Input `{name}` changes dim {dim} between the calls, but that dim isn't open.")
            if symbol is None:
                continue
            if len(set(sizes)) == 1:
                raise StructureError(f"Dim {dim} of input `{name}` is open, but has the same size in all calls.")
            if sizes[0] < 2:
                raise StructureError(
                    f"Dim {dim} of input `{name}` has the size {sizes[0]} in the first call; tracing needs two or more."
                )
            if sizes_of.setdefault(symbol, sizes) != sizes:
                raise StructureError(f"Dims named {symbol} have different sizes in the same call.")
            found[index, dim] = (symbol, sizes)
    return found


def _directions_of(open_dims: OpenDims, named: Collection[str]) -> tuple[Direction, ...]:
    """The ways in which sizes change from the first call: each by itself, then all together.

    Empty where only one size changes. Sizes without a declared name change with the batch.

    Raises:
        StructureError: a size doesn't change by itself in any call.
    """
    dims_of: dict[str, list[tuple[int, int]]] = {}
    for place, (symbol, _) in open_dims.items():
        dims_of.setdefault(symbol if symbol in named else BATCH, []).append(place)
    if len(dims_of) < 2:
        return ()
    changed: dict[str, frozenset[int]] = {}
    for name, dims in dims_of.items():
        sizes = [open_dims[place][1] for place in dims]
        changed[name] = frozenset(call for each in sizes for call, size in enumerate(each) if size != each[0])
    found = []
    for name, calls in changed.items():
        alone = calls.difference(*(changed[other] for other in changed if other != name))
        if not alone:
            raise StructureError(f"No call changes the size {name} alone.")
        found.append(Direction((0, *sorted(alone)), tuple(dims_of[name])))
    shared = frozenset(call for one, other in itertools.combinations(changed.values(), 2) for call in one & other)
    if shared:
        together = tuple(place for name, dims in dims_of.items() if shared <= changed[name] for place in dims)
        found.append(Direction((0, *sorted(shared)), together, tuple(range(1, len(shared) + 2))))
    return tuple(found)


def by_place(request: ExportRequest) -> ExportRequest:
    """The request without outputs that equal scores order or choose: all are compared by place."""
    return replace(request, undecided=frozenset(), chosen={})


def _run_at_each(
    adapter: Adapter, inputs: Sequence[tuple[torch.Tensor, ...]], declared: Collection[str]
) -> tuple[tuple[tuple[torch.Tensor, ...], ...], frozenset[int]]:
    """Run the model at each call; also return the indices of outputs that differ when the first call is run again."""
    with undisturbed(adapter), silent():
        outputs = tuple(_run_at(adapter, call, inputs, declared) for call in range(len(inputs)))
        again = adapter.run(inputs[0])
    unstable = (
        index
        for index, (first, second) in enumerate(zip(outputs[0], again, strict=True))
        if first.shape != second.shape or not torch.equal(torch.nan_to_num(first), torch.nan_to_num(second))
    )
    return outputs, frozenset(unstable)


def _run_at(
    adapter: Adapter, call: int, inputs: Sequence[tuple[torch.Tensor, ...]], declared: Collection[str]
) -> tuple[torch.Tensor, ...]:
    try:
        return adapter.run(inputs[call])
    except StructureError as error:
        # The structure is that of the call with the fewest rows, and calls before this one have it too.
        right = inputs[0] if call else min(inputs, key=lambda tensors: [tensor.shape[:1] for tensor in tensors])
        varied = [
            (name, dim)
            for name, tensor, other in zip(adapter.input_names, inputs[call], right, strict=True)
            for dim, (size, usual) in enumerate(zip(tensor.shape, other.shape, strict=True))
            if size != usual
        ]
        if not varied:
            raise
        shapes = dict(zip(adapter.input_names, inputs[call], strict=True))
        sizes = ", ".join(f"dim {dim} of {name} is {shapes[name].shape[dim]}" for name, dim in varied)
        named = join_words([f"dim {dim} of `{name}`" for name, dim in varied if name in declared])
        remedies = [
            f"leaving {named} out of `dynamic=…`" if named else "",
            "`static_batch=True`" if any(not dim for _, dim in varied) else "",
        ]
        raise StructureError(
            f"The structure of the output follows the sizes of the inputs: where {sizes}, {str(error).rstrip('.')}. A file "
            "has a fixed number of outputs and fixed constants: fix the sizes that it follows, by "
            f"{' and '.join(filter(None, remedies))}, or return stacked tensors."
        ) from error


def _output_specs(
    adapter: Adapter,
    inputs: tuple[tuple[torch.Tensor, ...], ...],
    outputs: tuple[tuple[torch.Tensor, ...], ...],
    symbols: dict[tuple[int, ...], str],
    varying: frozenset[tuple[int, int]],
) -> tuple[TensorSpec, ...]:
    specs = []
    for index, name in enumerate(adapter.output_names):
        tensors = [flat[index] for flat in outputs]
        if len({tensor.dim() for tensor in tensors}) > 1:
            raise StructureError(_change_of_dims(adapter, inputs, [tuple(tensor.shape) for tensor in tensors], name))
        shape: list[int | str] = []
        for dim, sizes in enumerate(zip(*(tensor.shape for tensor in tensors), strict=True)):
            if (index, dim) in varying:
                shape.append(f"{name}_dim_{dim}")
                continue
            constant = len(set(sizes)) == 1
            shape.append(sizes[0] if constant else symbols.get(sizes, f"{name}_dim_{dim}"))
        specs.append(TensorSpec(name, dtype_name(tensors[0].dtype), tuple(shape)))
    return tuple(specs)


def _change_of_dims(
    adapter: Adapter, inputs: Sequence[tuple[torch.Tensor, ...]], shapes: Sequence[tuple[int, ...]], name: str
) -> str:
    """The message on an output whose number of dims isn't the same in all calls: where it changes, and the remedies."""
    odd = next(call for call, shape in enumerate(shapes) if len(shape) != len(shapes[0]))
    # The call in which a dim is missing is the odd one.
    odd, usual = (odd, 0) if len(shapes[odd]) < len(shapes[0]) else (0, odd)
    index = next(i for i, (a, b) in enumerate(zip(inputs[odd], inputs[usual], strict=True)) if a.shape != b.shape)
    given = [tuple(inputs[call][index].shape) for call in (odd, usual)]
    function, place = dims_that_change(adapter, inputs[odd], inputs[usual])
    message = (
        f"Output `{name}` has shape {shapes[odd]} where `{adapter.input_names[index]}` has {given[0]}, and "
        f"{shapes[usual]} where that has {given[1]}"
    )
    if function == "squeeze":
        message += f": {place} also removes the dim that changes. Name the dims to remove, as in `squeeze(-1)`, or use `flatten(1)`"
    else:
        message += f"{': ' * bool(place)}{place}. Return the same number of dims at all sizes"
    if given[0][0] == 1 != given[1][0]:
        message += ", or leave batch size 1 out, as in `batch_sizes=(2, 3, 5)`"
    return f"{message}."


def join_words(words: Sequence[str]) -> str:
    """The words with commas, and "and" before the last one."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
