"""Find the modules whose tensors fill the memory at the peak of a training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from exporters.places import paths_of
from passes.checkpointing.live_bytes import LiveBytes
from passes.checkpointing.profile import there_before
from passes.graph.forwards import intercepted_calls


@dataclass(frozen=True)
class ModuleBytes:
    """The bytes that one module holds at the peak; `module` is its path, "" for the root."""

    module: str
    bytes: int


@dataclass(frozen=True)
class PeakMemory:
    """The memory at the peak of a training step, without parameters, buffers, inputs and older gradients.

    Each storage counts once, and belongs to the innermost module whose forward made it: mostly to be saved for the
    backward pass. The temporary memory of kernels isn't included, nor what an allocator adds when it rounds up.
    """

    bytes: int
    """The bytes of all tensors that are alive at the peak."""
    modules: tuple[ModuleBytes, ...]
    """The modules that hold some of them, the largest first."""
    outside: int
    """The bytes that belong to no module: the loss, and the gradients."""

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        return {"bytes": self.bytes, "modules": [asdict(each) for each in self.modules], "outside": self.outside}


def peak_memory_of(
    root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], step: Callable[[], object]
) -> PeakMemory:
    """Run one training step, and attribute the tensors that are alive at its peak.

    Args:
        root, args, kwargs: the call of the step; their tensors aren't counted.
        step: runs forward and backward pass.

    Hooks on saved tensors would tell which module saves a tensor. But insert-checkpoints keeps everything if there are
    any, so that this would be another step.
    """
    owners = _Owners(root)
    live = LiveBytes(without=there_before(root, args, kwargs))
    live.when_made, live.when_gone = owners.made, owners.gone
    try:
        with intercepted_calls(root, owners.around), live:
            step()
    finally:
        live.when_made = live.when_gone = None
    return owners.at_peak(live.sizes)


class _Owners:
    """Records when each storage is made and freed, and the module that makes it."""

    def __init__(self, root: nn.Module) -> None:
        self._paths = paths_of(root)
        self._running: list[str] = []
        # By the number of a storage; None outside of the modules.
        self._makers: list[str | None] = []
        # The numbers of the storages that are made, and the complements (~number) of those that are freed.
        self._events: list[int] = []

    def around(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._running.append(self._paths[id(module)])
        try:
            return forward(*args, **kwargs)
        finally:
            self._running.pop()

    def made(self, number: int) -> None:
        self._makers.append(self._running[-1] if self._running else None)
        self._events.append(number)

    def gone(self, number: int) -> None:
        self._events.append(~number)

    def at_peak(self, sizes: list[int]) -> PeakMemory:
        total = peak = end = 0
        for position, event in enumerate(self._events, 1):
            total += sizes[event] if event >= 0 else -sizes[~event]
            if total > peak:
                peak, end = total, position
        alive = Counter(event if event >= 0 else ~event for event in self._events[:end])
        held: Counter[str] = Counter()
        outside = 0
        for number, events in alive.items():
            owner = self._makers[number]
            if events == 2:
                continue  # made and freed
            if owner is None:
                outside += sizes[number]
            else:
                held[owner] += sizes[number]
        modules = tuple(ModuleBytes(module, size) for module, size in held.most_common() if size)
        return PeakMemory(peak, modules, outside)
