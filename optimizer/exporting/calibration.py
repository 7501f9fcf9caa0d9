"""Calibration inputs for static quantization, and inputs held out to judge its result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exporters.base import Adapter, ExportRequest
from exporters.errors import StructureError
from optimize_export.errors import UsageError
from optimize_export.wording import dtype_name
from optimizer.model import Call, Samples

CalibrationCall = torch.Tensor | tuple[Any, ...] | Mapping[str, Any] | Call
"""One call: a tensor, a tuple of positional arguments, a dict of keyword arguments, or a `Call` of both.

A call with more rows than the example inputs is split.
"""

# The number of random calls to calibrate with; each has the batch size of the example inputs.
_RANDOM = 8
# The draws from this number on are used for nothing else.
_FIRST_DRAW = 1000
# One of this many calls is held out.
_KEPT_APART = 4


@dataclass(frozen=True)
class Calibration:
    """Flat inputs of the files, on the CPU.

    Attributes:
        used: calls to calibrate with.
        apart: calls to judge the result with, in addition to the golden calls.
        random: whether they were drawn at random, because the user has given none.
    """

    used: tuple[tuple[torch.Tensor, ...], ...]
    apart: tuple[tuple[torch.Tensor, ...], ...]
    random: bool


def calibration_of(
    given: Iterable[CalibrationCall] | None, samples: Samples, adapter: Adapter, request: ExportRequest
) -> Calibration:
    """Take the user's calibration calls, or draw random ones. Every fourth call is held out.

    Raises:
        UsageError: a call doesn't have the structure, the dtypes or the fixed sizes of the example inputs, has no rows, or
            has NaN or infinity where the example inputs have none.
    """
    if given is None:
        calls = [samples.at(samples.batch_size, _FIRST_DRAW + number) for number in range(_RANDOM)]
        flat = [adapter.flatten_inputs(call.args, call.kwargs) for call in calls]
    else:
        example = adapter.flatten_inputs(samples.given.args, samples.given.kwargs)
        flat = []
        for number, call in enumerate(given):
            named = call.file if isinstance(call, Call) and call.file else f"Calibration call {number}"
            whole = _flat(call, named, adapter)
            parts = _split(whole, example, open_batch=request.dynamic_batch)
            if _rows(whole) == 0 and _rows(example):
                raise UsageError(f"{named} has a batch of no rows: use at least one row.")
            for name, tensor, part, other in zip(adapter.input_names, whole, parts[0], example, strict=True):
                _refuse_misfit(f"{named}: `{name}`", tensor, part, other, _free_dims(name, other, example, request))
            flat += parts
    if not flat:
        raise UsageError("calibration is empty: pass at least one call.")
    flat = [tuple(tensor.detach().cpu() for tensor in call) for call in flat]
    apart = flat[_KEPT_APART - 1 :: _KEPT_APART]
    used = [call for number, call in enumerate(flat) if number % _KEPT_APART != _KEPT_APART - 1]
    return Calibration(tuple(used), tuple(apart), given is None)


def _flat(call: CalibrationCall, named: str, adapter: Adapter) -> tuple[torch.Tensor, ...]:
    if not isinstance(call, Call):
        call = Call((), dict(call)) if isinstance(call, Mapping) else Call(_positional(call, named))
    try:
        return adapter.flatten_inputs(call.args, call.kwargs)
    except StructureError as error:
        raise UsageError(f"{named} doesn't fit the model: {error}") from error


def _free_dims(
    name: str, tensor: torch.Tensor, example: Sequence[torch.Tensor], request: ExportRequest
) -> frozenset[int]:
    """The dims of an example input that may have any size."""
    has_batch = request.dynamic_batch and tensor.dim() and tensor.shape[0] == _rows(example)
    return frozenset({*request.open_dims.get(name, ()), *([0] if has_batch else [])})


def _refuse_misfit(
    named: str, whole: torch.Tensor, part: torch.Tensor, other: torch.Tensor, free: frozenset[int]
) -> None:
    """Compare the first part of a calibration input with the example input."""
    sizes = zip(part.shape, other.shape, strict=False)
    fits = part.dim() == other.dim() and all(a == b or dim in free for dim, (a, b) in enumerate(sizes))
    if part.dtype != other.dtype or not fits:
        raise UsageError(f"{named} is {_described(whole)}, but the example input is {_described(other)}.")
    # A mask may contain infinity.
    if bool(other.isfinite().all()) and not bool(whole.isfinite().all()):
        raise UsageError(f"{named} contains NaN or infinity: leave out this call.")


def _described(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def _positional(call: object, named: str) -> tuple[Any, ...]:
    if isinstance(call, torch.Tensor):
        return (call,)
    if not isinstance(call, tuple | list):
        raise UsageError(
            f"{named} is of type {type(call).__name__}: pass a tensor, a tuple of arguments or a dict "
            "of keyword arguments."
        )
    return tuple(call)


def _rows(call: Sequence[torch.Tensor]) -> int | None:
    return next((tensor.shape[0] for tensor in call if tensor.dim()), None)


def _split(
    call: tuple[torch.Tensor, ...], example: Sequence[torch.Tensor], *, open_batch: bool
) -> list[tuple[torch.Tensor, ...]]:
    """Split a call with more rows than the example into calls with as many.

    The last one has fewer rows; it is left out if the batch size is fixed.
    """
    rows, batch = _rows(call), _rows(example)
    if not batch or rows is None or rows <= batch:
        return [call]
    starts = range(0, rows if open_batch else rows - batch + 1, batch)
    return [
        tuple(each[start : start + batch] if each.dim() and each.shape[0] == rows else each for each in call)
        for start in starts
    ]
