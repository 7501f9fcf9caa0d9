"""Checkpoints of whole modules, for programs that `torch.compile` makes of a module with a plan.

A tape can't follow a compiled program, which is not a sequence of calls. The compiler supports
`torch.utils.checkpoint`, whose regions are functions of the forward. So the same simulation selects submodules of the
root, and their forwards become such regions in compiled code. The compiler itself decides what it keeps of the rest, so
no peak is guaranteed there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from passes.checkpointing.choice import Choice, possible
from passes.checkpointing.profile import Profile
from passes.checkpointing.simulation import Simulation
from passes.graph.forwards import AroundForward
from passes.torch_private import compiler_of_now


def _plainly(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward(*args, **kwargs)


@cache
def _as_checkpoint_in_graphs() -> None:
    """Make the compiler replace `_plainly` by a checkpoint.

    The compiler finds out only while it compiles whether a region fits into one graph. If it doesn't, the call runs in
    eager code. A checkpoint there would update the statistics of a BatchNorm twice, so eager code runs `_plainly`
    itself.
    """

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def draws_again() -> bool:
        # A backend that runs a graph as it is draws other random numbers when it runs a region again.
        name = getattr(compiler_of_now(), "__name__", "")
        return name == "inductor" or name.startswith("aot_")

    @torch.compiler.substitute_in_graph(_plainly)
    def checkpointed(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not draws_again():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)


class CompiledCheckpoint(AroundForward):
    """A module's forward that is a checkpoint in compiled training code, and unchanged everywhere else."""

    def __init__(self, owner: nn.Module, inner: Any) -> None:
        self.owner = owner
        self.inner = inner
        _as_checkpoint_in_graphs()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _as_checkpoint_in_graphs()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and torch.is_grad_enabled() and self.owner.training:
            return _plainly(self._inner_forward, args, kwargs)
        return self._inner_forward(*args, **kwargs)


def modules_for(profile: Profile, simulation: Simulation, budget: int) -> tuple[str, ...]:
    """Select the modules whose inner results aren't kept.

    The result is the cheapest selection found within the budget, or else the one with the lowest peak. A selection
    consists of the first modules at one depth of the tree, because the values that are made first are held longest.

    Args:
        budget: in bytes.
    """
    found: list[tuple[bool, float, tuple[str, ...]]] = []
    for siblings in _by_depth(profile):
        low, high = 1, len(siblings)
        while low < high:
            middle = (low + high) // 2
            if simulation.run(_again(profile, siblings[:middle])).peak <= budget:
                high = middle
            else:
                low = middle + 1
        outcome = simulation.run(_again(profile, siblings[:low]))
        over = outcome.peak > budget
        found.append((over, outcome.peak if over else outcome.cost, tuple(siblings[:low])))
    return min(found)[-1] if found else ()


def _by_depth(profile: Profile) -> list[list[str]]:
    """For each depth of the tree, the paths of modules that make several calls in one go, in forward order."""
    places: dict[str, list[int]] = {}
    for index, call in enumerate(profile.calls):
        names = call.path.split(".") if call.path else []
        for depth in range(1, len(names) + 1):
            places.setdefault(".".join(names[:depth]), []).append(index)
    in_one_go = [path for path, calls in places.items() if 1 < len(calls) == calls[-1] - calls[0] + 1]
    depths = sorted({path.count(".") for path in in_one_go})
    return [[path for path in in_one_go if path.count(".") == depth] for depth in depths]


def _again(profile: Profile, paths: list[str]) -> Choice:
    """The choice that recomputes everything inside the modules at these paths; values that leave a module are kept."""
    owner: list[int | None] = [None] * len(profile.calls)
    for number, path in enumerate(paths):
        for index, call in enumerate(profile.calls):
            if call.path == path or call.path.startswith(f"{path}."):
                owner[index] = number
    wanted = [home is not None for home in owner]
    for index, call in enumerate(profile.calls):
        for value in call.args:
            maker = profile.values[value].call
            wanted[maker] &= owner[maker] == owner[index]
    return Choice(possible(profile, wanted), tuple((home or 0,) for home in owner))
