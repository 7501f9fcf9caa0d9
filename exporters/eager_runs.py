"""Find lines of a model that no file can hold, by watching its calls of torch in an eager run.

These draw random numbers, return another number of dims at another size, or split a tensor into as many tensors as an
open size: `for row in x`, `x.unbind(1)`, `x.split(1)`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import length_hint
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from exporters.base import Adapter
from exporters.isolation import eager_only, silent, undisturbed
from exporters.places import paths_of, place_of, user_frame

if TYPE_CHECKING:
    from exporters.evidence import Evidence

# Functions that split the dim that is their third argument, by default the first one.
_SPLITTING = frozenset({"split", "chunk", "tensor_split"})


class Observer(TorchFunctionMode):
    """The base of modes that see each call of torch in a model's code, but not those inside torch's own functions."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self._paths = paths_of(adapter.model)

    def line(self, innermost: FrameType) -> tuple[FrameType | None, str]:
        """The user's frame that makes the current call, and its line as text."""
        frame = user_frame(innermost)
        return frame, place_of(frame, frame.f_lineno if frame else 0, self._paths)


Noted = Callable[[Any, Any, Any, Any], Any]
"""What is noted about a call: a function of torch's function, its arguments by position and by name, and its result."""


class _Recorder(Observer):
    def __init__(self, adapter: Adapter, noted: Noted) -> None:
        super().__init__(adapter)
        self.found: list[tuple[Any, str]] = []
        self._noted = noted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (note := self._noted(func, args, kwargs or {}, result)) is not None:
            self.found.append((note, self.line(sys._getframe(1))[1]))
        return result


def calls_in(adapter: Adapter, tensors: Sequence[torch.Tensor], noted: Noted) -> list[tuple[Any, str]]:
    """The notes on the calls of torch in an eager run, each with the user's line, without the notes None."""
    with undisturbed(adapter), silent(), eager_only(), _Recorder(adapter, noted) as seen:
        adapter.run(tensors)
    return seen.found


def place_of_draws(adapter: Adapter, tensors: Sequence[torch.Tensor]) -> str:
    """The line that first draws a random number from torch's generators, with its module; "" if there is none.

    That is the first call that changes the state of the CPU's generator or, if CUDA is in use, of a GPU's.
    """
    before: list[bytes] = []

    def draws(*_: Any) -> bool | None:
        used = torch.cuda.is_available() and torch.cuda.is_initialized()
        states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if used else ())]
        now = [state.numpy().tobytes() for state in states]
        changed = now != before
        before[:] = now
        return changed or None

    draws()
    return next((place for _, place in calls_in(adapter, tensors, draws)), "")


def dims_that_change(adapter: Adapter, odd: Sequence[torch.Tensor], usual: Sequence[torch.Tensor]) -> tuple[str, str]:
    """The first function whose result has another number of dims for `odd` than for `usual`, and its line.

    Both are empty if the two runs call different functions before that.
    """

    def dims(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[str, int] | None:
        return (getattr(func, "__name__", ""), result.dim()) if isinstance(result, torch.Tensor) else None

    runs = [calls_in(adapter, tensors, dims) for tensors in (odd, usual)]
    for ((name, count), place), ((other, other_count), _) in zip(*runs, strict=False):
        if name != other:
            break
        if count != other_count:
            return name, place
    return "", ""


def number_of_pieces(func: Any, args: Any, result: Any) -> int | None:
    """The number of tensors into which a call splits its first argument; None for any other call."""
    name = getattr(func, "__name__", "")
    if name == "__iter__":
        # `len` of the tensor would be recorded in the trace.
        return length_hint(result) if isinstance(args[0], torch.Tensor) else None
    return len(result) if _splits(name) and type(result) in (list, tuple) else None


@lru_cache(maxsize=1024)
def _splits(name: str) -> bool:
    packet = None if name.startswith("_") else getattr(torch.ops.aten, name, None)
    schemas = [] if packet is None else [getattr(packet, each)._schema for each in packet.overloads()]
    return any(
        [str(returned.type) for returned in schema.returns] == ["List[Tensor]"]
        and [str(taken.type) for taken in schema.arguments[:1]] == ["Tensor"]
        for schema in schemas
    )


def lists_as_long_as_a_size(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """For each open size that determines a number of tensors: its name, and a clause with the first place.

    Every capture freezes the number that it saw. It fails at other sizes without naming the line.
    """
    for size in evidence.sizes:
        splits = [_splits_in(evidence, call) for call in size.calls[:2]]
        for ((one, _), place), ((other, _), other_place) in zip(*splits, strict=False):
            if place != other_place:
                break
            if one != other:
                first, second = (evidence.at({size.name: value}) for value in size.values[:2])
                many = f"{one} tensors at {first} and {other} at {second}"
                yield size.name, f"the model splits a tensor at {place}, into {many}"
                break


def _splits_in(evidence: Evidence, call: int) -> list[tuple[Any, str]]:
    """The calls that split a tensor: the number of pieces and the size of the dim, with the line."""

    def split(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, tuple[int, ...]] | None:
        count = number_of_pieces(func, args, result)
        name = getattr(func, "__name__", "")
        if count is None or name in ("__iter__", "unbind"):
            return None if count is None else (count, (count,))
        shape = tuple(next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)).shape)
        # For rare functions all sizes of the tensor.
        return count, (shape[kwargs.get("dim", args[2] if len(args) > 2 else 0)],) if name in _SPLITTING else shape

    return calls_in(evidence.adapter, evidence.inputs[call], split)
