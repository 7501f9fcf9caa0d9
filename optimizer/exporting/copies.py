"""Copy the module for the exporters."""

from __future__ import annotations

import torch
from torch import nn

from optimizer.model import working_copy
from optimizer.pipeline import detach


def exportable(model: nn.Module, device: torch.device, written: frozenset[str] = frozenset()) -> nn.Module:
    """Copy a module for export: without compiled calls and provenance, in eval mode, on the device.

    Args:
        model: the module.
        device: of the copy.
        written: names of parameters that forward writes to; the copy has its own memory for these.
    """
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    copy = working_copy(model, "inference", private=own & written).root
    detach(copy)
    return copy.eval().to(device)
