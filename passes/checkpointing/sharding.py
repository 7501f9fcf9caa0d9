"""Models that FSDP2 shards: `torch.distributed.fsdp.fully_shard` on a module that trains under a plan.

A unit holds its whole parameters from before its forward until after it, and again from before its backward pass until
after that. In between, their memory is freed. If a call is recomputed for the backward pass of another unit, it runs in
between. Then the unit gathers its parameters for the call, and frees them afterwards. All ranks have the same plan, so
they gather the same units in the same order. A plan that is told of the units keeps the values that go from one unit to
another. Then no unit gathers parameters for another one.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from passes.checkpointing.calls import UNWATCHED
from passes.checkpointing.plan import Plan
from passes.errors import PlansDiffer
from passes.torch_private import has_composed_modules


class Units:
    """The units of a root in one forward."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._homes: dict[int, nn.Module] = {}
        self._all = _units_in(root)
        for unit in self._all:
            for hooks in (unit._forward_pre_hooks, unit._forward_hooks):
                _take(hooks, unit, self._homes)

    def __bool__(self) -> bool:
        return bool(self._all)

    def agree(self, plan: Plan) -> None:
        """Check that all ranks have the same plan.

        Otherwise the ranks would gather different units, and each would wait for the others forever.

        Raises:
            PlansDiffer: the ranks have different plans.
        """
        import torch.distributed as dist
        from torch.distributed.tensor import DTensor

        digest = hashlib.sha256(repr(plan).encode()).hexdigest()
        meshes = {parameter.device_mesh for parameter in self._root.parameters() if isinstance(parameter, DTensor)}
        with UNWATCHED.entered():
            for group in (group for mesh in meshes for group in mesh.get_all_groups()):
                digests: list[Any] = [None] * dist.get_world_size(group)
                dist.all_gather_object(digests, digest, group)
                if len(set(digests)) > 1:
                    raise PlansDiffer(
                        "the ranks train with different checkpoints: call optimize() with the same passes and with "
                        "example inputs of the same shapes on each rank."
                    )

    def home(self, tensor: Tensor) -> nn.Module | None:
        """The unit that gathered a tensor as one of its whole parameters; None for any other tensor."""
        return self._homes.get(id(tensor))


class Gathered:
    """The units that gathered their parameters for a recomputation: a few at a time, in the order of the forward."""

    def __init__(self) -> None:
        self._units: list[Any] = []
        self._used: list[Any] = []

    def gather(self, tensor: Tensor, unit: nn.Module | None) -> None:
        """Restore the memory of a parameter for the next call, if its unit has freed it."""
        if unit is None:
            return
        self._used.append(unit)
        if tensor.numel() and not tensor.untyped_storage().size():
            self._units.append(unit)
            with UNWATCHED.entered():
                unit.unshard()  # type: ignore[operator]

    def called(self) -> None:
        """Free the parameters of the units that the last call didn't use."""
        if self._used:
            self._give_back([unit for unit in self._units if unit not in self._used])
            self._used.clear()

    def over(self) -> None:
        """Free the parameters of all units, after the last call."""
        self._give_back(list(self._units))

    def _give_back(self, units: list[Any]) -> None:
        for unit in units:
            self._units.remove(unit)
            with UNWATCHED.entered():
                unit.reshard()


def _units_in(root: nn.Module) -> list[nn.Module]:
    # Every step asks, and walking the modules takes longer than many of their calls.
    fsdp = sys.modules.get("torch.distributed.fsdp") if has_composed_modules() else None
    return [] if fsdp is None else [module for module in root.modules() if isinstance(module, fsdp.FSDPModule)]


def _take(hooks: dict[int, Any], unit: nn.Module, homes: dict[int, nn.Module]) -> None:
    """Wrap the hooks by which torch gathers and shards a unit, so that they report the gathered parameters."""
    for key, hook in hooks.items():
        if isinstance(hook, _Hook):
            hook.homes = homes
        elif getattr(hook, "__module__", "").startswith("torch.distributed."):
            hooks[key] = _Hook(hook, unit, homes)


class _Hook:
    """Wraps a hook of torch on a unit: hides its calls from the tape, and records the unit of its parameters."""

    def __init__(self, hook: Callable[..., Any], unit: nn.Module, homes: dict[int, nn.Module]) -> None:
        self.hook = hook
        self.unit = unit
        self.homes = homes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with UNWATCHED.entered():
            result = self.hook(*args, **kwargs)
        self.homes.update((id(parameter), self.unit) for parameter in _own_parameters(self.unit))
        return result


def _own_parameters(unit: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a unit, without those of the units inside it."""
    inner = {id(module) for other in _units_in(unit) if other is not unit for module in other.modules()}
    for module in unit.modules():
        if id(module) not in inner:
            yield from module.parameters(recurse=False)
