"""The forward of a module that trains under a plan."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from passes.checkpointing.plan import Plan
from passes.checkpointing.sharding import Units
from passes.checkpointing.tape import Tape
from passes.graph.guards import AroundForward

logger = logging.getLogger(__name__)


class CheckpointedForward(AroundForward):
    """The forward of a root, whose backward pass computes again what its plan doesn't keep.

    It is as without a plan where no gradient is asked for, in eval, and where the forward is traced into another program.

    Attributes:
        plan: what is kept in training, and what is computed again.
    """

    def __init__(self, owner: nn.Module, plan: Plan, inner: Any) -> None:
        self.owner = owner
        self.plan = plan
        self.inner = inner
        self._agreed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # torch.compile and the exporters make programs of their own, which take no function mode.
        is_traced = torch.compiler.is_compiling() or torch._C._is_tracing()
        if is_traced or not torch.is_grad_enabled() or not self.owner.training:
            return self._inner_forward(*args, **kwargs)
        units = Units(self.owner)
        if units and not self._agreed:
            units.agree(self.plan)
            self._agreed = True
        with Tape(self.plan, units) as tape:
            outputs = self._inner_forward(*args, **kwargs)
        if tape.missed is not None:
            logger.warning(
                "the forward took another way than the one that its checkpoints were planned for: the call of %s didn't "
                "come, and what is behind it was kept for the backward pass", tape.missed,
            )  # fmt: skip
        return outputs
