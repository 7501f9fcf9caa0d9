"""The model's inputs and outputs at every call, with which each exporter proves its files, and which of their dims are open."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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

# Stands for all sizes where they grow together.
TOGETHER = "all sizes"

Place = tuple[int, int]
"""An input and one of its dims."""

OpenDims = dict[Place, tuple[str, tuple[int, ...]]]
"""The name and the size in each call of each open dim."""

Sizes = Mapping[str, int]
"""Sizes that differ from those of the first call, by name; with `TOGETHER`, the number of the step."""

# Maximum bytes of one input that is built only to try a batch outside the calls.
_LARGEST_INPUT = 64 * 2**20

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of all inputs in one call."""


@dataclass(frozen=True)
class Line:
    """A dim as a function of the size that it follows: `slope` * size + `start`."""

    slope: int
    start: int

    def at(self, size: int) -> int:
        return self.slope * size + self.start


def line_through(sizes: Sequence[int], dims: Sequence[int]) -> Line | None:
    """The line with integer slope and start through the dims at these sizes; None if there is none."""
    if len(set(dims)) == 1:
        return Line(0, dims[0])
    points = list(zip(sizes, dims, strict=True))
    # The first open dim may keep its size where another one changes.
    other = next((point for point in points if point[0] != sizes[0]), None)
    if other is None:
        return None
    slope, rest = divmod(other[1] - dims[0], other[0] - sizes[0])
    line = Line(slope, dims[0] - slope * sizes[0])
    fits = not rest and all(line.at(size) == dim for size, dim in points)
    return line if fits else None


class TooLarge(RouteRefused):
    """The inputs at some sizes would be too large to build."""


@dataclass(frozen=True)
class Size:
    """An open size, or all of them together (`TOGETHER`)."""

    name: str
    # Indices of the calls in which it alone changes, after call 0, and its value in each of these. Where all sizes grow
    # together, that is the number of the step, starting at 1.
    calls: tuple[int, ...]
    values: tuple[int, ...]
    # The dims that follow it; None where the dim isn't a linear function of the size.
    lines: Mapping[Place, Line | None]


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
    # The dims of inputs that change between calls.
    open_dims: tuple[Place, ...]
    input_specs: tuple[TensorSpec, ...]
    output_specs: tuple[TensorSpec, ...]
    # All metadata to write into the file.
    metadata: Mapping[str, str] = field(default_factory=dict)
    # Those `open_dims` that the request names.
    declared: frozenset[Place] = frozenset()
    # The sizes that change independently, then `TOGETHER` if there are calls in which several do.
    sizes: tuple[Size, ...] = ()
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

    def at(self, sizes: Sizes) -> str:
        """Sizes as a phrase for a message."""
        named = self.named(sizes)
        if list(named) == [BATCH]:
            return f"batch size {named[BATCH]}"
        return join_words([f"{name} = {size}" for name, size in named.items()])

    def named(self, sizes: Sizes) -> dict[str, int]:
        """The sizes by name, also where all grow together."""
        shapes = self.shapes_at(sizes)
        named: dict[str, int] = {}
        for size in self._in_order(sizes):
            if size.name == TOGETHER:
                named |= {str(self.input_specs[index].shape[dim]): shapes[index][dim] for index, dim in size.lines}
            else:
                named[size.name] = sizes[size.name]
        return named

    def _in_order(self, sizes: Sizes) -> list[Size]:
        known = {size.name: size for size in self.sizes}
        return [known[name] for name in sizes]

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

    def shapes_at(self, sizes: Sizes) -> Shapes:
        """The shapes of the inputs at other sizes; a dim that isn't a linear function keeps its size."""
        shapes = [list(tensor.shape) for tensor in self.inputs[0]]
        # Sizes that are given override those that grow together.
        for size in sorted(self._in_order(sizes), key=lambda size: size.name != TOGETHER):
            for (index, dim), line in size.lines.items():
                shapes[index][dim] = shapes[index][dim] if line is None else max(0, line.at(sizes[size.name]))
        return tuple(map(tuple, shapes))

    def inputs_at(self, sizes: Sizes) -> tuple[torch.Tensor, ...]:
        """Inputs at other sizes, built by repeating rows of the calls.

        Raises:
            TooLarge: that would take too much memory.
            RouteRefused: a dim isn't a linear function of its size.
        """
        made, shapes = list(self.inputs[0]), self.shapes_at(sizes)
        for tensor, shape in zip(made, shapes, strict=True):
            if math.prod(shape) > max(tensor.numel(), _LARGEST_INPUT // tensor.element_size()):
                raise TooLarge("the inputs would be too large for a comparison")
        for size in self._in_order(sizes):
            for (index, dim), line in size.lines.items():
                if line is None:
                    raise RouteRefused(
                        f"dim {dim} of input `{self.adapter.input_names[index]}` isn't a linear function of "
                        f"{'the batch' if size.name == BATCH else f'`{size.name}`'}"
                    )
                rows = made[index]
                if sum(other == index for other, _ in size.lines) == 1:
                    rest = _without(rows.shape, dim)
                    further = (tensors[index] for tensors in self.inputs[1:])
                    rows = torch.cat([rows, *(each for each in further if _without(each.shape, dim) == rest)], dim)
                repeated = torch.arange(shapes[index][dim], device=rows.device) % rows.shape[dim]
                made[index] = rows.index_select(dim, repeated)
        return tuple(made)

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence per check that wasn't possible."""
        names = [f"`{self.adapter.output_names[index]}`" for index in sorted(self.unstable)]
        return tuple(
            f"Output {name} differs between two runs of the model; only its shape and dtype were checked."
            for name in names
        )


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


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
    sizes = _sizes_of(open_dims, named)
    outputs, unstable = request.outputs or (), frozenset[int]()
    given = bool(outputs) and all(len(flat) == len(adapter.output_names) for flat in outputs)
    if not given:
        outputs, unstable = _run_at_each(adapter, inputs, request.open_dims)
    draws = place_of_draws(adapter, inputs[0]) if unstable else ""
    symbols = {sizes: name for (_, _), (name, sizes) in open_dims.items()}
    return Evidence(
        request if request.proof is not None else replace(request, undecided={}),
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
        sizes,
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
    found: OpenDims = {}
    sizes_of: dict[str, tuple[int, ...]] = {}
    # Those of the declared inputs come first, because others take their names.
    for index, name in sorted(enumerate(names), key=lambda each: each[1] not in declared):
        shapes = [tensors[index].shape for tensors in inputs]
        if len({tensors[index].dtype for tensors in inputs}) > 1:
            raise StructureError(f"Input `{name}` changes its dtype between the calls.")
        if len({len(shape) for shape in shapes}) > 1:
            raise StructureError(f"Input `{name}` changes its number of dims between the calls.")
        for dim, sizes in enumerate(zip(*shapes, strict=True)):
            changes, symbol = len(set(sizes)) > 1, declared.get(name, {}).get(dim)
            if symbol is not None and not changes:
                raise StructureError(f"Dim {dim} of input `{name}` is open, but has the same size in all calls.")
            if not changes:
                continue
            if name in declared and symbol is None:
                raise StructureError(f"Input `{name}` changes dim {dim} between the calls, but that dim isn't open.")
            if name not in declared and dim:
                raise StructureError(f"Input `{name}` changes more than its first dim between the calls.")
            if name not in declared and not dynamic:
                raise StructureError(f"Input `{name}` changes its shape between the calls of a static export.")
            if sizes[0] < 2:
                raise StructureError(
                    f"Dim {dim} of input `{name}` has the size {sizes[0]} in the first call; tracing needs two or more."
                )
            if symbol is None:
                known = {own: other for other, own in sizes_of.items()}
                symbol = known.get(sizes, f"{name}_batch" if BATCH in sizes_of else BATCH)
            if sizes_of.setdefault(symbol, sizes) != sizes:
                raise StructureError(f"Dims named {symbol} have different sizes in the same call.")
            found[index, dim] = (symbol, sizes)
    return dict(sorted(found.items()))


def _sizes_of(open_dims: OpenDims, named: Collection[str]) -> tuple[Size, ...]:
    """The sizes that change independently, then all together. Sizes without a declared name change with the batch.

    Raises:
        StructureError: a size doesn't change by itself in any call.
    """
    places: dict[str, list[Place]] = {}
    for place, (symbol, _) in open_dims.items():
        places.setdefault(symbol if symbol in named else BATCH, []).append(place)

    def changing(calls: Iterable[int], dims: Sequence[Place], name: str = "") -> Size:
        chosen = (0, *sorted(calls))
        sizes = {place: [open_dims[place][1][call] for call in chosen] for place in dims}
        values = tuple(range(1, len(chosen) + 1)) if name else tuple(sizes[dims[0]])
        lines = {place: line_through(values, own) for place, own in sizes.items()}
        return Size(name or open_dims[dims[0]][0], chosen, values, lines)

    changed: dict[str, frozenset[int]] = {}
    for name, dims in places.items():
        own = [open_dims[place][1] for place in dims]
        changed[name] = frozenset(call for each in own for call, size in enumerate(each) if size != each[0])
    found = []
    for name, calls in changed.items():
        alone = calls.difference(*(changed[other] for other in changed if other != name))
        if not alone:
            raise StructureError(f"No call changes the size {name} alone.")
        found.append(changing(alone, places[name]))
    shared = frozenset(call for one, other in itertools.combinations(changed.values(), 2) for call in one & other)
    if shared:
        together = [place for name, dims in places.items() if shared <= changed[name] for place in dims]
        found.append(changing(shared, together, TOGETHER))
    return tuple(found)


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
