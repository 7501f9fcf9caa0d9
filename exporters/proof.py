"""Compare an exported file with the model at every call: the loose check that chooses between routes.

It detects wrong captures (a frozen batch size or branch, a missing output), so that the next route is tried. It does
not judge numerical accuracy.
"""

from __future__ import annotations

import errno
import itertools
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch

from exporters.base import (
    Adapter,
    Artifact,
    Captures,
    Exporter,
    ExportRequest,
    LoadedArtifact,
    Proof,
    TensorSpec,
    clones,
)
from exporters.conditions import Condition, Line, breaks, line_through
from exporters.draws import place_of_draws
from exporters.errors import ExporterError, ExportError, RouteRefused, StructureError, WrongFile
from exporters.isolation import silent, undisturbed
from exporters.lists import lists_as_long_as_a_size
from exporters.metadata import metadata_of

# Largest error that rounding could explain, relative to the largest value of the output.
_ROUNDING = {torch.float16: 2e-2, torch.bfloat16: 6e-2}
_ROUNDING_ELSEWHERE = 1e-3

# Largest error allowed at other batches, as a multiple of the error at the calls. A larger error means a different
# computation, even if the values are close (tanh GELU instead of erf GELU).
_ROUNDING_VARIES_BY = 64
# Every file is allowed this error at the calls, in ulps, when the bound for other batches is computed.
_LEAST_UNITS = 4

# Once the model has raised at more breaking batches than this, assume that it raises at all of them.
_MOST_RAISED = 4

# Maximum number of conditions to add from captures at other batches. The first ones already expose a wrong path.
_MOST_FURTHER = 16

# Only this many open sizes are combined when two or more sizes are set to 1.
_MOST_AT_ONE = 4

# Maximum bytes of one input that is built only to try a batch outside the calls.
LARGEST_TRIAL = 64 * 2**20

# Maximum bytes of a wrong file to keep until its first wrong operation is located. The other routes may need the disk
# space of a larger one.
_LARGEST_KEPT = 2**30

_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM})


class _TooLarge(RouteRefused):
    """The inputs for a batch would be too large to build."""


# The shapes of all inputs in one call.
Shapes = list[tuple[int, ...]]

# Default name for the size of dim 0.
BATCH = "batch"


@dataclass(frozen=True)
class Direction:
    """Calls in which certain open dims change while the others keep their size.

    Attributes:
        calls: indices of the calls; the first one is always call 0.
        dims: the (input, dim) pairs that change.
        steps: where several sizes grow together, the step number of each call, starting at 1; otherwise empty.
    """

    calls: tuple[int, ...]
    dims: tuple[tuple[int, int], ...]
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """The model's inputs and outputs at every call, and the open dims of both.

    Attributes:
        unstable: indices of outputs that differ between two runs on the same inputs; only their shapes and dtypes can
            be compared.
        open_dims: the (input, dim) pairs that change between calls.
        computes_in: the half precision that the model computes in, whatever the dtypes of its outputs; None if there is
            none.
        metadata: all metadata to write into the file.
        declared: those `open_dims` that the request names.
        directions: the ways in which the sizes change, where there are several.
        steps: the `steps` of the direction, in the evidence for a single direction.
        draws: the source location where the model draws the random numbers that make outputs unstable; "" if there is
            none.
        outputs_given: whether the caller supplied the outputs, so that the model wasn't run for them.
        proof: the `proof` of the request.
        captures: the `captures` of the request, or new ones of the adapter.
        in_a_row: the largest number of terms that a format's loops add sequentially, where torch sums pairwise.
    """

    adapter: Adapter
    inputs: tuple[tuple[torch.Tensor, ...], ...]
    outputs: tuple[tuple[torch.Tensor, ...], ...]
    unstable: frozenset[int]
    open_dims: tuple[tuple[int, int], ...]
    input_specs: tuple[TensorSpec, ...]
    output_specs: tuple[TensorSpec, ...]
    computes_in: torch.dtype | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    declared: frozenset[tuple[int, int]] = frozenset()
    directions: tuple[Direction, ...] = ()
    steps: tuple[int, ...] = ()
    draws: str = ""
    outputs_given: bool = False
    proof: Proof | None = None
    in_a_row: int = 1
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

    @property
    def size(self) -> str:
        """The name of the size that changes; the first name where several grow together."""
        return next((str(self.input_specs[index].shape[dim]) for index, dim in self.open_dims), BATCH)

    @property
    def growing(self) -> str:
        """The growing sizes as a phrase for a message."""
        if self.steps:
            sizes = dict.fromkeys(str(self.input_specs[index].shape[dim]) for index, dim in self.open_dims)
            return _listed(list(sizes))
        return f"the {self.size}" if self.size == BATCH else f"`{self.size}`"

    def at(self, batch: int) -> str:
        """The sizes at a batch as a phrase for a message."""
        if not self.steps:
            return f"batch size {batch}" if self.size == BATCH else f"{self.size} = {batch}"
        shapes = self.shapes_at(batch)
        sizes = {self.input_specs[index].shape[dim]: shapes[index][dim] for index, dim in self.open_dims}
        return _listed([f"{name} = {size}" for name, size in sizes.items()])

    def way_out(self, size: str) -> str:
        """Advice for a size that can't be open; empty where no dim has that size."""
        dims = [
            (index, dim)
            for index, spec in enumerate(self.input_specs)
            for dim, name in enumerate(spec.shape)
            if name == size
        ]
        if not dims or not self.declared.issuperset(dims):
            return " Fix the batch size with --static-batch (static_batch=True)." if dims else ""
        named = _listed([f"dim {dim} of `{self.input_specs[index].name}`" for index, dim in dims])
        return f" Leave {named} out of --dynamic (dynamic=…)."

    def rounding(self, dtype: torch.dtype) -> float:
        """The largest error of an output of this dtype that rounding could explain, relative to its largest value."""
        own = _ROUNDING.get(dtype, _ROUNDING_ELSEWHERE)
        return own if self.computes_in is None else max(own, _ROUNDING[self.computes_in])

    def unit(self, dtype: torch.dtype) -> float:
        """The machine epsilon of the precision in which an output of this dtype is computed."""
        eps = torch.finfo(dtype).eps
        return eps if self.computes_in is None else max(eps, torch.finfo(self.computes_in).eps)

    @property
    def half(self) -> torch.dtype | None:
        """The half precision that the model computes in or that one of its tensors has; None if there is none."""
        adapter = self.adapter
        tensors = (*adapter.parameters(), *adapter.buffers(), *self.inputs[0], *self.outputs[0])
        held = {self.computes_in, *(tensor.dtype for tensor in tensors)}
        return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in held), None)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        tensors = (*self.adapter.parameters(), *self.adapter.buffers(), *self.inputs[0])
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch of each call: the size of the first open dim, or `steps` where several sizes grow together.

        Empty where no dim is open.
        """
        return self.steps or tuple(
            tensors[index].shape[dim] for tensors in self.inputs for index, dim in self.open_dims[:1]
        )

    def line(self, index: int, dim: int) -> Line | None:
        """The size of an open dim as a linear function of the batch; None where it isn't one."""
        return line_through(self.batches, [tensors[index].shape[dim] for tensors in self.inputs])

    def shapes_at(self, batch: int) -> list[tuple[int, ...]]:
        """The shapes of the inputs at another batch.

        Raises:
            RouteRefused: an open dim isn't a linear function of the batch.
        """
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
        """Inputs at another batch, built by repeating rows of the calls.

        Raises:
            RouteRefused: they would be too large, or an open dim isn't a linear function of the batch.
        """
        made = list(self.inputs[0])
        shapes = self.shapes_at(batch)
        for index in {index for index, _ in self.open_dims}:
            if made[index].element_size() * math.prod(shapes[index]) > LARGEST_TRIAL:
                raise _TooLarge("the inputs would be too large for a comparison", size=self.size)
        for index, dim in self.open_dims:
            rows = made[index]
            if sum(other == index for other, _ in self.open_dims) == 1:
                rows = torch.cat([tensors[index] for tensors in self.inputs], dim)
            size = shapes[index][dim]
            made[index] = rows.index_select(dim, torch.arange(size, device=rows.device) % rows.shape[dim])
        return tuple(made)

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence per check that wasn't possible."""
        names = [f"`{self.adapter.output_names[index]}`" for index in sorted(self.unstable)]
        return tuple(
            f"Output {name} differs between two runs of the model; only its shape was checked." for name in names
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
    directions = _directions(open_dims, named)
    outputs, unstable = request.outputs or (), frozenset[int]()
    given = bool(outputs) and all(len(flat) == len(adapter.output_names) for flat in outputs)
    if not given:
        outputs, unstable = _run_at_each(adapter, inputs)
    draws = ""
    if unstable:
        with undisturbed(adapter), silent():
            draws = place_of_draws(adapter, inputs[0])
    symbols = {sizes: name for (_, _), (name, sizes) in open_dims.items()}
    return Evidence(
        adapter,
        inputs,
        outputs,
        unstable,
        tuple(open_dims),
        tuple(
            TensorSpec(
                name,
                dtype_name(tensor),
                tuple(open_dims.get((index, dim), (size, ()))[0] for dim, size in enumerate(tensor.shape)),
            )
            for index, (name, tensor) in enumerate(zip(adapter.input_names, inputs[0], strict=True))
        ),
        _output_specs(adapter.output_names, outputs, symbols),
        request.computes_in,
        metadata_of(request.model, adapter.input_names, adapter.output_names, request.metadata),
        frozenset((index, dim) for index, dim in open_dims if adapter.input_names[index] in request.open_dims),
        directions,
        draws=draws,
        outputs_given=given,
        proof=request.proof,
        captures=request.captures or Captures(adapter),
    )


def _run_at_each(
    adapter: Adapter, inputs: Sequence[tuple[torch.Tensor, ...]]
) -> tuple[tuple[tuple[torch.Tensor, ...], ...], frozenset[int]]:
    """Run the model at each call; also return the indices of outputs that differ when the first call is run again."""
    with undisturbed(adapter), silent():
        outputs = tuple(adapter.run(tensors) for tensors in inputs)
        again = adapter.run(inputs[0])
    unstable = (
        index
        for index, (first, second) in enumerate(zip(outputs[0], again, strict=True))
        if first.shape != second.shape or not torch.equal(torch.nan_to_num(first), torch.nan_to_num(second))
    )
    return outputs, frozenset(unstable)


def prove(evidence: Evidence, loaded: LoadedArtifact, files: Sequence[Path] = ()) -> tuple[float, ...] | None:
    """Prove a loaded file by the request's own proof; if there is none, or it refuses, run the file at every call.

    Args:
        loaded: the artifact, loaded from `files`.

    Returns:
        Each output's error, relative to its largest value; None if the request's own proof accepts the file.

    Raises:
        RouteRefused: the file fails, or its shapes, dtypes or values differ from the model's.
    """
    if evidence.proof is not None and evidence.proof(loaded, files):
        return None
    return _proven_at(evidence, loaded, range(len(evidence.inputs)))


def prove_early(evidence: Evidence, loaded: LoadedArtifact) -> tuple[float, ...]:
    """Like `prove`, for the program from which the file will be written.

    Only the smallest call is run if the request has its own proof: `prove` applies that to the file itself.
    """
    calls = range(len(evidence.inputs)) if evidence.proof is None else [_smallest(evidence)]
    return _proven_at(evidence, loaded, calls)


def _smallest(evidence: Evidence) -> int:
    return min(range(len(evidence.inputs)), key=lambda call: sum(each.numel() for each in evidence.inputs[call]))


def _proven_at(evidence: Evidence, loaded: LoadedArtifact, calls: Iterable[int]) -> tuple[float, ...]:
    errors = []
    for inputs, expected in ((evidence.inputs[call], evidence.outputs[call]) for call in calls):
        try:
            outputs = _compare(evidence, loaded, inputs, expected)
        except WrongFile:
            if not evidence.outputs_given:
                raise
            # The caller's outputs may come from the model before a pass damaged it. Then the route is right.
            with undisturbed(evidence.adapter), silent():
                expected = evidence.adapter.run(inputs)
            outputs = _compare(evidence, loaded, inputs, expected)
        errors.append([_relative_error(*pair) for pair in zip(expected, outputs, strict=True)])
    return tuple(map(max, zip(*errors, strict=True)))


def prove_beyond(
    evidence: Evidence,
    loaded: LoadedArtifact,
    conditions: Sequence[Condition],
    decided_at: Callable[[Evidence, int], Sequence[Condition]],
    errors: Sequence[float] | None,
) -> tuple[Shapes, ...]:
    """Compare file and model at batches that break each condition of the capture.

    Two batches per condition are compared: the first that the model accepts, and one at least twice as large. Return
    the input shapes at which they agree, including those of the calls.

    Where the model raises, the file can't be wrong, and the next batch is tried. Where they agree, the model still took
    another path. That path may depend on conditions that the capture hasn't seen, so these are checked too.

    Args:
        conditions: the conditions of each view in `evidence.along`; `Condition.along` is the index of the view.
        decided_at: returns the conditions of the model's path at a batch of such a view.
        errors: the error of each output at the calls, from which the error bound here is derived; None to run the
            smallest call for it where it is needed.

    Raises:
        RouteRefused: the outputs differ, or the batch is too large to try. Errors of `decided_at` pass through.
    """

    @cache
    def known() -> Sequence[float]:
        return _proven_at(evidence, loaded, [_smallest(evidence)]) if errors is None else errors

    agreed: list[Shapes] = [[tuple(tensor.shape) for tensor in tensors] for tensors in evidence.inputs]
    for number, view in enumerate(evidence.along):
        own = [condition for condition in conditions if condition.along == number]
        agreed += map(view.shapes_at, _proven_along(view, loaded, own, decided_at, known))
    for inputs in _several_at_one(evidence):
        if _proven_on(evidence, loaded, inputs, known()):
            agreed.append([tuple(tensor.shape) for tensor in inputs])
    return tuple(agreed)


def _several_at_one(evidence: Evidence) -> Iterator[tuple[torch.Tensor, ...]]:
    """Inputs in which two or more sizes are 1 and the others are those of the first call.

    Some conditions change only there, such as whether a feature map has more than one position.
    """
    views = [view for view in evidence.along if not view.steps and all(view.line(*place) for place in view.open_dims)]
    views = views[:_MOST_AT_ONE]
    for count in range(2, len(views) + 1):
        for chosen in itertools.combinations(views, count):
            made = list(evidence.inputs[0])
            for view in chosen:
                shapes = view.shapes_at(1)
                for index, dim in view.open_dims:
                    made[index] = made[index].narrow(dim, 0, min(max(shapes[index][dim], 0), made[index].shape[dim]))
            yield tuple(made)


def _proven_along(
    evidence: Evidence,
    loaded: LoadedArtifact,
    conditions: Sequence[Condition],
    decided_at: Callable[[Evidence, int], Sequence[Condition]],
    errors: Callable[[], Sequence[float]],
) -> list[int]:
    """The batches outside the calls at which file and model agree."""
    tried = set(evidence.batches)
    agreed: list[int] = []
    waiting = list(conditions)
    known = {(condition.what, condition.hints) for condition in conditions}
    for condition in waiting:  # grows inside the loop
        for batch in _proven_where_it_breaks(evidence, loaded, condition, tried, errors):
            agreed.append(batch)
            for further in decided_at(evidence, batch):
                key = (further.what, further.hints)
                if key not in known and len(waiting) < len(conditions) + _MOST_FURTHER:
                    known.add(key)
                    waiting.append(further)
    return agreed


def _proven_where_it_breaks(
    evidence: Evidence,
    loaded: LoadedArtifact,
    condition: Condition,
    tried: set[int],
    errors: Callable[[], Sequence[float]],
) -> list[int]:
    """The batches that break the condition, with file and model compared at each; adds all tried batches to `tried`."""
    answered: list[int] = []
    raised = 0
    for batch in breaks(condition):
        if batch in tried or (answered and batch < 2 * answered[0]):
            continue
        tried.add(batch)
        try:
            answers = _proven_on(evidence, loaded, evidence.inputs_at(batch), errors())
        except RouteRefused as refusal:
            if evidence.steps and isinstance(refusal, _TooLarge):
                # Sizes that grow together soon need too much memory. Each of them was checked by itself.
                break
            reason = (
                f"at {evidence.at(batch)} the model takes a different path than the captured one, because of "
                f"{condition.what}: {refusal}"
            )
            if isinstance(refusal, WrongFile):
                raise WrongFile(reason, refusal.inputs, refusal.output, size=evidence.size) from refusal
            raise RouteRefused(reason, size=evidence.size) from refusal
        if answers:
            answered.append(batch)
        else:
            raised += 1
        if raised > _MOST_RAISED or len(answered) == 2:
            break
    return answered


def _proven_on(
    evidence: Evidence, loaded: LoadedArtifact, inputs: tuple[torch.Tensor, ...], errors: Sequence[float]
) -> bool:
    """Compare file and model on inputs outside the calls; return False where the model raises."""
    expected = _answers(evidence.adapter, inputs)
    if expected is not None:
        _compare(evidence, loaded, inputs, expected, errors)
    return expected is not None


def _answers(adapter: Adapter, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
    """Run the model; return None where it raises on these inputs."""
    try:
        with undisturbed(adapter), silent():
            return adapter.run(inputs)
    except Exception as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError | StructureError) or "allocate memory" in str(error):
            raise
        return None


def _compare(
    evidence: Evidence,
    loaded: LoadedArtifact,
    inputs: tuple[torch.Tensor, ...],
    expected: tuple[torch.Tensor, ...],
    errors: Sequence[float] | None = None,
) -> Sequence[torch.Tensor]:
    """Run the file and check its outputs against the model's; `errors` are the errors of the outputs at the calls.

    Raises:
        WrongFile: the file fails, or an output differs in shape, dtype or values.
    """
    sizes = ", ".join(str(list(tensor.shape)) for tensor in inputs)
    try:
        with refusing(f"the file fails on inputs of {sizes}"):
            outputs = loaded(*clones(inputs))
    except RouteRefused as refusal:
        raise WrongFile(str(refusal), inputs) from refusal
    if len(outputs) != len(expected):
        raise WrongFile(f"the file returns {len(outputs)} outputs, the model {len(expected)}", inputs)
    for index, (name, ours, theirs) in enumerate(zip(evidence.adapter.output_names, expected, outputs, strict=True)):
        allowed = evidence.rounding(ours.dtype)
        if errors is not None:
            allowed = _allowed_beyond(evidence, inputs, ours.dtype, errors[index])
        if problem := difference(ours, theirs, values=index not in evidence.unstable, allowed=allowed):
            raise WrongFile(f"output `{name}` is wrong on inputs of {sizes}: {problem}", inputs, name)
    return outputs


def _allowed_beyond(evidence: Evidence, inputs: tuple[torch.Tensor, ...], dtype: torch.dtype, error: float) -> float:
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    least = _LEAST_UNITS * evidence.unit(dtype)
    # Each addition has an error of at most half an ulp of the partial sum (Higham, Accuracy and Stability of Numerical
    # Algorithms, 4.2).
    summing = _longest_sum(evidence, inputs) * evidence.unit(dtype) / 2
    return min(evidence.rounding(dtype), max(_ROUNDING_VARIES_BY * max(error, least), summing))


def _longest_sum(evidence: Evidence, inputs: tuple[torch.Tensor, ...]) -> int:
    """The number of terms added sequentially over open dims: positions of a sequence or feature map, not rows."""
    places = {index: 1 for index, _ in evidence.open_dims}
    for index, dim in evidence.open_dims:
        # Open dims that the request doesn't name are rows.
        if (index, dim) in evidence.declared and evidence.input_specs[index].shape[dim] != BATCH:
            places[index] *= inputs[index].shape[dim]
    return min(evidence.in_a_row, max(places.values(), default=1))


def _relative_error(expected: torch.Tensor, got: torch.Tensor) -> float:
    if expected.shape != got.shape or not (expected.is_floating_point() or expected.is_complex()):
        return 0.0
    left, right = (_as_float64(tensor) for tensor in (expected, got))
    error, scale = _largest(left, right, torch.isfinite(left))
    return error / scale if scale else 0.0


def _largest(expected: torch.Tensor, got: torch.Tensor, where: torch.Tensor) -> tuple[float, float]:
    """The largest error and the largest expected value of float64 tensors under a bool mask; 0 for an empty mask."""
    if not where.any():
        return 0.0, 0.0
    left, right = expected[where], got[where]
    return (left - right).abs().max().item(), left.abs().max().item()


def difference(
    expected: torch.Tensor, got: torch.Tensor, *, values: bool = True, allowed: float | None = None
) -> str | None:
    """Describe how `got` differs from `expected` beyond rounding; None if it doesn't.

    Args:
        values: whether to compare values, and not only shape and dtype.
        allowed: the largest error of floats, relative to the largest value; None for the loose bound of the dtype.
    """
    if got.shape != expected.shape:
        return f"its shape is {list(got.shape)} instead of {list(expected.shape)}"
    if got.dtype != expected.dtype:
        return f"its dtype is {dtype_name(got)} instead of {dtype_name(expected)}"
    if not values or expected.numel() == 0:
        return None
    if not (expected.is_floating_point() or expected.is_complex()):
        wrong = int((expected.cpu() != got.cpu()).sum())
        # Rounding can flip ties, which changes single elements of an argmax. A wrong capture changes many.
        return f"{wrong} of {expected.numel()} elements differ" if wrong > expected.numel() // 100 else None
    left, right = (_as_float64(tensor) for tensor in (expected, got))
    finite = torch.isfinite(left)
    if not torch.equal(torch.nan_to_num(left[~finite]), torch.nan_to_num(right[~finite])):
        return "NaN or infinity occur in different places"
    error, scale = _largest(left, right, finite)
    allowed = _ROUNDING.get(expected.dtype, _ROUNDING_ELSEWHERE) if allowed is None else allowed
    # Written so that NaN fails the comparison.
    within = error <= allowed * scale + 1e-30
    return None if within else f"its values are off by {error:.2g} where the largest is {scale:.2g}"


def dtype_name(tensor: torch.Tensor) -> str:
    """The name of a tensor's dtype: `float32` for torch.float32."""
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Route:
    """One way to produce a format.

    Attributes:
        write: writes the files into an empty folder, proves them, and returns them, main file first. Raises
            RouteRefused if the result isn't right.
    """

    name: str
    write: Callable[[Path], tuple[Path, ...]]


def first_right(
    exporter: Exporter,
    request: ExportRequest,
    evidence: Evidence,
    routes: Sequence[Route],
    directory: Path,
    known: Callable[[Artifact], Artifact] = lambda artifact: artifact,
) -> Artifact:
    """The artifact of the first route that isn't refused; its proven files are moved into `directory`.

    Args:
        known: adds exporter-specific fields to an artifact, also to one whose route was refused.

    Raises:
        ExportError: every route was refused.
        OSError: a file couldn't be written.
    """
    refused: list[tuple[str, RouteRefused]] = []

    def made(route: Route, files: Sequence[Path]) -> Artifact:
        reasons = tuple((name, str(refusal)) for name, refusal in refused)
        specs = (evidence.input_specs, evidence.output_specs)
        artifact = Artifact(
            exporter.name, files[0], tuple(files), route.name, reasons, *specs, evidence.notes, loader=exporter.load
        )
        return known(artifact)

    with ExitStack() as until_told:
        wrong: tuple[Artifact, WrongFile] | None = None
        for route in routes:
            with ExitStack() as stack:
                staging = stack.enter_context(_staging(directory))
                try:
                    written = route.write(staging)
                except RouteRefused as refusal:
                    if wrong is None and isinstance(refusal, WrongFile) and _size(staging) <= _LARGEST_KEPT:
                        wrong = made(route, [staging / exporter.file_name]), refusal
                        until_told.push(stack.pop_all())
                    refused.append((route.name, refusal))
                    continue
                files = [path.replace(directory / path.name) for path in written]
            return made(route, files)
        place = _place(request, *wrong) if wrong is not None else ""
    lists = list(lists_as_long_as_a_size(evidence))
    reasons = _reasons(refused, [clause for _, clause in lists])
    hint = _hint(evidence, [*(refusal.size for _, refusal in refused), *(size for size, _ in lists)])
    message = f"The model can't be exported to {exporter.name} ({reasons}).{_shared(refused)}{place}{hint}"
    raise ExportError(message, reasons)


def _reasons(refused: Sequence[tuple[str, RouteRefused]], clauses: Iterable[str]) -> str:
    routes_by_reason: dict[str, list[str]] = {}
    for tried, refusal in refused:
        routes_by_reason.setdefault(str(refusal), []).append(tried)
    for clause in clauses:
        routes_by_reason.setdefault(clause, [])
    return "; ".join(
        f"{' and '.join(tried)}: {reason}" if tried else reason for reason, tried in routes_by_reason.items()
    )


def _place(request: ExportRequest, artifact: Artifact, refusal: WrongFile) -> str:
    """A sentence that locates the first difference of a wrong file; "" where it is unknown."""
    place = "" if request.place_of is None else request.place_of(artifact, refusal.inputs)
    return f" The file of the route {artifact.route!r} {place}." if place else ""


def _shared(refused: Sequence[tuple[str, RouteRefused]]) -> str:
    """A sentence naming the one output that every route gets wrong, if their reasons differ."""
    outputs = {refusal.output if isinstance(refusal, WrongFile) else "" for _, refusal in refused}
    several = len({str(refusal) for _, refusal in refused}) > 1
    return (
        f" Each route gets a different `{outputs.pop()}`." if several and len(outputs) == 1 and outputs != {""} else ""
    )


def _hint(evidence: Evidence, sizes: Iterable[str]) -> str:
    """Advice for the user; each sentence starts with a space."""
    hint = ""
    if (half := evidence.half) is not None:
        word = str(half).removeprefix("torch.")
        others = " in float16, or" if half is torch.bfloat16 else ""
        hint = (
            f" It computes in {word}, which not every operator of a format and not every runtime supports: export "
            f"it{others} in float32."
        )
    return hint + "".join(dict.fromkeys(map(evidence.way_out, sizes)))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def refusing(what: str | None = None) -> Iterator[None]:
    """Turn any exception raised inside into RouteRefused: third-party capture code can raise anything.

    Exceptions that don't concern the route pass through: out of memory, a full disk, and non-Exceptions such as an
    interrupt.
    """
    try:
        yield
    except (RouteRefused, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            raise
        reason = one_line(error)
        raise RouteRefused(f"{what}: {reason}" if what else reason) from error


def one_line(error: BaseException, limit: int = 200) -> str:
    """The first line of the root cause's message, without paths of this machine."""
    while error.__cause__ is not None and not isinstance(error, ExporterError):
        error = error.__cause__
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    line = lines[0] if lines else ""
    if line.startswith("The following operation failed in the TorchScript interpreter"):
        line = lines[-1]
    elif line.endswith(":") and len(lines) > 1:
        line = f"{line} {lines[1]}"
    elif " " not in line:  # the message of a KeyError is only the key
        line = f"{type(error).__name__}: {line}"
    line = re.sub(r"(?:[A-Za-z]:)?(?:[\\/][\w.\-+@]+){2,}[\\/]([\w.\-+@]+)", r"\1", line).rstrip(".:; ")
    return line if len(line) <= limit else f"{line[: limit - 1].rstrip()}…"


@contextmanager
def _staging(directory: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir=directory, prefix=".export-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


_OpenDims = dict[tuple[int, int], tuple[str, tuple[int, ...]]]
"""Name and size in each call of an open dim, by (input, dim)."""


def _open_inputs(
    names: tuple[str, ...],
    inputs: tuple[tuple[torch.Tensor, ...], ...],
    dynamic: bool,
    declared: Mapping[str, Mapping[int, str]],
) -> _OpenDims:
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
) -> _OpenDims:
    found: _OpenDims = {}
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


def _directions(open_dims: _OpenDims, named: Collection[str]) -> tuple[Direction, ...]:
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


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def _output_specs(
    names: tuple[str, ...], outputs: tuple[tuple[torch.Tensor, ...], ...], symbols: dict[tuple[int, ...], str]
) -> tuple[TensorSpec, ...]:
    specs = []
    for index, name in enumerate(names):
        tensors = [flat[index] for flat in outputs]
        if len({tensor.dim() for tensor in tensors}) > 1:
            raise StructureError(f"Output `{name}` changes its number of dims between the calls.")
        shape: list[int | str] = []
        for dim, sizes in enumerate(zip(*(tensor.shape for tensor in tensors), strict=True)):
            constant = len(set(sizes)) == 1
            shape.append(sizes[0] if constant else symbols.get(sizes, f"{name}_dim_{dim}"))
        specs.append(TensorSpec(name, dtype_name(tensors[0]), tuple(shape)))
    return tuple(specs)


def _as_float64(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        return torch.view_as_real(tensor.to(torch.complex128))
    return tensor.to(torch.float64)
