"""The user's data for lossy files: calls to calibrate with, and those of `evaluate`, checked against the example inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy
import torch

from exporters.base import Adapter, ExportRequest
from exporters.errors import StructureError
from exporters.places import line_of_error
from optimize_export.errors import LoadError, OptimizeExportError, UsageError
from optimize_export.wording import a_type, described, error_summary
from optimizer.accuracy import Aggregate, Evaluate, EvaluateError, Evaluation, RowDims, Task
from optimizer.exporting import ExportJob, MeasuredExport, copy_for_export
from optimizer.model import Call, Samples, leaves_of, random_state

CalibrationCall = torch.Tensor | tuple[Any, ...] | Mapping[str, Any] | Call
"""One call: a tensor, a tuple of positional arguments, a dict of keyword arguments, or a `Call` of both.

A call with more rows than the example inputs is split; one without the batch dim is one row. A tuple may have more, such as
a label, after the arguments of the example inputs, and a dict may have more keys.
"""


class Dataset(Protocol):
    """Calls by number, as of torch's and Hugging Face's datasets."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Any: ...


CalibrationCalls = Iterable[CalibrationCall] | Dataset | Callable[[], Iterable[CalibrationCall]]
"""Calls to calibrate with. A list is used as a whole; of other data about 256 rows are read."""

# The rows that are read of data that aren't a list.
_ENOUGH = 256
# The number of random calls to calibrate with; each has the batch size of the example inputs.
_RANDOM = 8
# The draws from this number on are used for nothing else.
_FIRST_DRAW = 1000
# One of this many calls is held out.
_HELD_OUT = 4


@dataclass(frozen=True)
class Calibration:
    """Flat inputs of the files, on the CPU."""

    used: tuple[tuple[torch.Tensor, ...], ...]
    """Calls to calibrate with."""
    held_out: tuple[tuple[torch.Tensor, ...], ...]
    """Calls to judge the result with, in addition to the golden calls."""
    random: bool
    """Whether they were drawn at random, because the user has given none."""


def some_of(
    given: CalibrationCalls,
    example: torch.Tensor | None,
    named: str = "calibration",
    refused: type[OptimizeExportError] = UsageError,
) -> list[Any]:
    """The calls of a list; of other data, about 256 rows: evenly spaced by number if there is a length, else the first.

    Args:
        example: the first tensor with dims of the example inputs; a tensor with as many dims is a batch.
        refused: raised if it isn't a collection of calls.
    """
    source: Any = given() if callable(given) and not isinstance(given, Iterable) else given
    if isinstance(source, list | tuple):
        return list(source)
    has_numbers = hasattr(type(source), "__len__") and hasattr(type(source), "__getitem__")
    is_one = isinstance(source, torch.Tensor | numpy.ndarray | str | bytes | Mapping | Call)
    if is_one or not (has_numbers or isinstance(source, Iterable)):
        more = " If this is one call, put it in a list; of several data sets, choose one."
        raise refused(
            f"{named} is {a_type(source)}; it must be a list of calls, a data loader or a data set. A call is a tensor, a tuple "
            f"of arguments or a dict of keyword arguments.{more * isinstance(source, Mapping)}"
        )
    if has_numbers:
        return [source[number] for number in spread(len(source), rows_in(source[0], example) if len(source) else 1)]
    found: list[Any] = []
    read = 0
    for item in source:
        found.append(item)
        if (read := read + rows_in(item, example)) >= _ENOUGH:
            break
    return found


def rows_in(item: Any, example: torch.Tensor | None) -> int:
    """About how many rows a call has."""
    tensors = leaves_of((item.args, item.kwargs) if isinstance(item, Call) else item).tensors()
    return max((t.shape[0] for _, t in tensors if example is not None and t.dim() == example.dim()), default=1)


def spread(calls: int, rows: int) -> list[int]:
    """The numbers of evenly spaced calls with about 256 rows, if each has as many rows."""
    count = min(calls, math.ceil(_ENOUGH / max(1, rows)))
    return [number * calls // count for number in range(count)]


def evaluation_of(
    job: ExportJob, measured: MeasuredExport, evaluate: Evaluate, aggregate: Aggregate | None
) -> Evaluation:
    """The user's metric of the original of an export."""
    adapter, samples = measured.adapter, job.samples
    expected = _Expected(samples, adapter, measured.request)

    def refuse(tensors: Sequence[torch.Tensor]) -> None:
        for name, tensor, other, free in zip(
            adapter.input_names, tensors, expected.example, expected.free, strict=True
        ):
            if not _fits(tensor, other, free):
                raise EvaluateError(f"evaluate calls run with `{name}` as {_other_than(tensor, other)}")

    original = Adapter(
        copy_for_export(measured.original, job.target, measured.reference.written),
        samples.given.args,
        samples.given.kwargs,
        input_names=adapter.input_names,
        output_names=adapter.output_names,
        outputs=adapter.outputs,
    )
    whole = not measured.request.dynamic_batch
    return Evaluation(Task(evaluate, aggregate, original, job.target, refuse, expected.rows, whole))


def calibration_of(
    given: CalibrationCalls | None,
    samples: Samples,
    adapter: Adapter,
    request: ExportRequest,
    evaluation: Evaluation | None = None,
) -> Calibration:
    """Take the user's calibration calls, or inputs of the evaluation, or draw random ones. Every fourth call is held out.

    The evaluation leaves out these inputs from now on.
    """
    if given is None and evaluation is not None:
        given = evaluation.calibration() or None
    if given is None:
        calls = [samples.at(samples.batch_size, _FIRST_DRAW + number) for number in range(_RANDOM)]
        flat = [adapter.flatten_inputs(call.args, call.kwargs) for call in calls]
    else:
        expected = _Expected(samples, adapter, request)
        flat = [part for number, item in enumerate(_read(given, samples)) for part in expected.parts(item, number)]
    if not flat:
        raise UsageError("calibration is empty: pass at least one call.")
    flat = [tuple(tensor.detach().cpu() for tensor in call) for call in flat]
    held_out = flat[_HELD_OUT - 1 :: _HELD_OUT]
    used = [call for number, call in enumerate(flat) if number % _HELD_OUT != _HELD_OUT - 1]
    if evaluation is not None:
        evaluation.exclude([*used, *held_out])
    return Calibration(tuple(used), tuple(held_out), given is None)


def _read(given: CalibrationCalls, samples: Samples) -> list[Any]:
    try:
        with random_state():
            return some_of(given, samples.first)
    except OptimizeExportError:
        raise
    except Exception as error:  # the user's code
        place = line_of_error(error)
        told = f"calibration raises: {error_summary(error)}"
        raise LoadError(f"{told} ({place})." if place else f"{told}.") from error


class _Expected:
    """The example inputs, with which the user's calls are compared."""

    def __init__(self, samples: Samples, adapter: Adapter, request: ExportRequest) -> None:
        self.adapter, self._given, self._open_batch = adapter, samples.given, request.dynamic_batch
        self.example = adapter.flatten_inputs(samples.given.args, samples.given.kwargs)
        self.rows = RowDims.of(samples, adapter)
        self.free: list[Collection[int]] = [
            (*request.open_dims.get(name, ()), *([dim] if dim is not None and self._open_batch else []))
            for name, dim in zip(adapter.input_names, self.rows.dims, strict=True)
        ]
        """Of each input, the dims that may have any size."""

    def parts(self, item: Any, number: int) -> list[tuple[torch.Tensor, ...]]:
        """The flat inputs of a calibration call, in parts of at most the example's rows.

        The last one has fewer rows; it is left out if the batch size is fixed.
        """
        named = item.file if isinstance(item, Call) and item.file else f"Calibration call {number}"
        given = self._flat(item, named)
        call = self._batched(given)
        rows, batch = self.rows.count(call), self.rows.count(self.example)
        if not rows:
            raise UsageError(f"{named} has a batch of no rows: use at least one row.")
        starts = range(0, rows if self._open_batch else max(1, rows - batch + 1), batch)
        parts = [self.rows.taken(call, slice(start, start + batch)) for start in starts] if rows > batch else [call]
        expected = zip(self.adapter.input_names, given, parts[0], self.example, self.free, strict=True)
        for name, whole, part, other, free in expected:
            if not _fits(part, other, free):
                raise UsageError(f"{named}: `{name}` is {_other_than(whole, other)}")
            # A mask may contain infinity.
            if bool(other.isfinite().all()) and not bool(whole.isfinite().all()):
                raise UsageError(f"{named}: `{name}` contains NaN or infinity: leave out this call.")
        return parts

    def _flat(self, item: Any, named: str) -> tuple[torch.Tensor, ...]:
        if not isinstance(item, torch.Tensor | tuple | list | Mapping | Call):
            raise UsageError(
                f"{named} is of type {type(item).__name__}: pass a tensor, a tuple of arguments or a dict "
                "of keyword arguments."
            )
        first: StructureError | None = None
        for call in self._calls(item):
            try:
                return self.adapter.flatten_inputs(call.args, call.kwargs)
            except StructureError as error:
                first = first or error
        raise UsageError(
            f"{named} doesn't fit the model: {str(first).rstrip('.')}; pass the arguments of the example inputs, as tensors."
        ) from first

    def _calls(self, item: Any) -> Iterator[Call]:
        """The call, without what a data set may add to the arguments of the example inputs, such as a label."""
        if isinstance(item, Call):
            yield item
        elif isinstance(item, torch.Tensor):
            yield Call((item,))
        elif isinstance(item, Mapping):
            constants = {name: each for name, each in self._given.kwargs.items() if not leaves_of(each).tensors()}
            names = [*self.adapter.positional_names[: len(self._given.args)], *self._given.kwargs]
            given = {**constants, **item}
            yield Call((), {name: given[name] for name in names} if given.keys() >= set(names) else dict(item))
        else:
            yield Call(tuple(item[: len(self._given.args)]) if self._given.args else tuple(item))
            # A pair of the arguments and a label.
            if item and isinstance(item[0], torch.Tensor | tuple | list | Mapping):
                yield from self._calls(item[0])

    def _batched(self, call: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """A call of one row, if each tensor lacks its batch dim."""
        lacks = [
            tensor.dim() == other.dim() - (dim is not None)
            for tensor, other, dim in zip(call, self.example, self.rows.dims, strict=True)
        ]
        if not all(lacks):
            return call
        return tuple(t if dim is None else t.unsqueeze(dim) for t, dim in zip(call, self.rows.dims, strict=True))


def _fits(tensor: torch.Tensor, other: torch.Tensor, free: Collection[int]) -> bool:
    sizes = zip(tensor.shape, other.shape, strict=False)
    fits = tensor.dim() == other.dim() and all(a == b or dim in free for dim, (a, b) in enumerate(sizes))
    return tensor.dtype == other.dtype and fits


def _other_than(tensor: torch.Tensor, other: torch.Tensor) -> str:
    is_converted = tensor.dtype != other.dtype or tensor.dim() != other.dim()
    what_to_do = "convert it" if is_converted else "resize it, or open the dim by `dynamic`"
    return f"{described(tensor)}, but the example input is {described(other)}: {what_to_do}."
