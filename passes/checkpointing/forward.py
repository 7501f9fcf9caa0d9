"""The forward of a module that trains under a plan."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from passes.checkpointing.plan import Plan
from passes.checkpointing.sharding import Units
from passes.checkpointing.tape import Tape
from passes.graph.forwards import AroundForward
from passes.torch_private import (
    DefaultDevice,
    active_function_modes,
    is_in_forward_mode,
    is_tracing,
    saved_tensors_hooks_enabled,
    top_saved_tensors_hooks,
)

logger = logging.getLogger(__name__)


class CheckpointedForward(AroundForward):
    """The forward of a root whose backward pass recomputes the values that its plan doesn't keep.

    The plan isn't used without gradients, in eval, or while the forward is traced into another program. It also isn't
    used inside a context that affects what is saved or computed, because the context isn't active in the backward pass.
    This case is logged.

    Attributes:
        plan: the values that are kept in training, and those that are recomputed.
    """

    watches_training = True

    def __init__(self, owner: nn.Module, plan: Plan, inner: Any) -> None:
        self.owner = owner
        self.plan = plan
        self.inner = inner
        self._agreed = False
        self._told: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # torch.compile and the exporters make their own programs, which support no function mode.
        is_traced = torch.compiler.is_compiling() or is_tracing()
        if is_traced or not torch.is_grad_enabled() or not self.owner.training:
            return self._inner_forward(*args, **kwargs)
        modes = [mode for mode in active_function_modes() if not isinstance(mode, DefaultDevice)]
        if any(isinstance(mode, Tape) for mode in modes):
            # The module is part of a step that is planned as a whole.
            return self._inner_forward(*args, **kwargs)
        if modes:
            # They may not be active in the backward pass, where calls run again. Code that compares models uses such
            # modes.
            self._tell(logging.INFO, f"the function mode {type(modes[0]).__name__} is active around the forward")
            return self._inner_forward(*args, **kwargs)
        if reason := _why_not():
            self._tell(logging.WARNING, reason)
            return self._inner_forward(*args, **kwargs)
        units = Units(self.owner)
        if units and not self._agreed:
            units.agree(self.plan)
            self._agreed = True
        with Tape(self.plan, units) as tape:
            outputs = self._inner_forward(*args, **kwargs)
        if tape.missed is not None:
            logger.warning(
                "the forward took a different path than the one that its checkpoints were planned for: the call of %s didn't"
                " come, and everything after it was kept for the backward pass",
                tape.missed,
            )
        return outputs

    def _tell(self, level: int, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            logger.log(level, "everything is kept for the backward pass, despite the plan: %s", reason)


def _why_not() -> str | None:
    """The reason why a plan can't control what is kept or recomputed here, as a clause; None if it can."""
    if top_saved_tensors_hooks() is not None:
        return "hooks on saved tensors are active around the forward"
    if not saved_tensors_hooks_enabled():
        return "hooks on saved tensors are disabled around the forward"
    return "gradients are requested in forward mode" if is_in_forward_mode() else None
