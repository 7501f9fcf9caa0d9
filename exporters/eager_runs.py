"""Find lines of a model that no file can hold, by watching its calls of torch in an eager run.

These draw random numbers, return another number of dims at another size, or split a tensor into as many tensors as an
open size: `for row in x`, `x.unbind(1)`, `x.split(1)`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


class _Draws(Observer):
    """Find the first call that changes the state of the CPU's generator or, if CUDA is in use, of a GPU's."""

    place = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _states() if not self.place else []
        value = func(*args, **(kwargs or {}))
        if not self.place and _states() != before:
            self.place = self.line(sys._getframe(1))[1]
        return value


def place_of_draws(adapter: Adapter, tensors: tuple[torch.Tensor, ...]) -> str:
    """The line that first draws a random number from torch's generators, with its module; "" if there is none."""
    with undisturbed(adapter), silent(), eager_only(), _Draws(adapter) as seen:
        adapter.run(tensors)
    return seen.place


def _states() -> list[bytes]:
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if used else ())]
    return [state.numpy().tobytes() for state in states]


class _Ranks(Observer):
    """Record each call that returns a tensor: its function, the number of dims, and the line."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter)
        self.calls: list[tuple[str, int, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        if isinstance(value, torch.Tensor):
            self.calls.append((getattr(func, "__name__", ""), value.dim(), self.line(sys._getframe(1))[1]))
        return value


def dims_that_change(
    adapter: Adapter, odd: tuple[torch.Tensor, ...], usual: tuple[torch.Tensor, ...]
) -> tuple[str, str]:
    """The first function whose result has another number of dims for `odd` than for `usual`, and its line.

    Both are empty if the two runs call different functions before that.
    """
    recorded = []
    with undisturbed(adapter), silent():
        for tensors in (odd, usual):
            with _Ranks(adapter) as seen:
                adapter.run(tensors)
            recorded.append(seen.calls)
    for (name, dims, place), (other, other_dims, _) in zip(*recorded, strict=False):
        if name != other:
            break
        if dims != other_dims:
            return name, place
    return "", ""


@dataclass(frozen=True)
class _Split:
    """A call that splits a tensor."""

    place: str
    count: int
    # The size of the dim that it splits; for rare functions all sizes of the tensor.
    size: tuple[int, ...]


class _Pieces(Observer):
    """Record each call that splits a tensor."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter)
        self.seen: list[_Split] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (count := number_of_pieces(func, args, result)) is not None:
            size = _split_size(getattr(func, "__name__", ""), args, kwargs or {}, count)
            self.seen.append(_Split(self.line(sys._getframe(1))[1], count, size))
        return result


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


def _split_size(name: str, args: Any, kwargs: Any, count: int) -> tuple[int, ...]:
    if name in ("__iter__", "unbind"):
        return (count,)
    shape = tuple(next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)).shape)
    return (shape[kwargs.get("dim", args[2] if len(args) > 2 else 0)],) if name in _SPLITTING else shape


def lists_as_long_as_a_size(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """For each open size that determines a number of tensors: its name, and a clause with the first place.

    Every capture freezes the number that it saw. It fails at other sizes without naming the line.
    """
    for view in evidence.along:
        if len(view.inputs) < 2:
            continue
        for one, other in zip(_splits_in(view, 0), _splits_in(view, 1), strict=False):
            if one.place != other.place:
                break
            if one.count != other.count:
                first, second = (view.at(batch) for batch in view.batches[:2])
                many = f"{one.count} tensors at {first} and {other.count} at {second}"
                yield view.size, f"the model splits a tensor at {one.place}, into {many}"
                break


def splits_an_open_dim(evidence: Evidence) -> bool:
    """Whether the size of a dim that the model splits changes between the calls."""
    return any(_splits_in(view, 0) != _splits_in(view, 1) for view in evidence.along)


def _splits_in(evidence: Evidence, call: int) -> Sequence[_Split]:
    with undisturbed(evidence.adapter), silent(), eager_only(), _Pieces(evidence.adapter) as seen:
        evidence.adapter.run(evidence.inputs[call])
    return seen.seen
