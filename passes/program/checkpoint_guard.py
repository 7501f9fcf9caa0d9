"""Weights from before a fold would meet those that took them in: modules that gave tensors away refuse to load them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def refuse_checkpoint(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """A hook of a module that has given parameters away; `load_state_dict` calls it, and raises what it notes."""
    registered = {**module._parameters, **module._buffers}
    found = next(
        (prefix + name for name, held in registered.items() if held is None and prefix + name in state_dict), None
    )
    if found is not None:
        error_msgs.append(
            f"{found} was folded into another weight when the model was optimized: load the weights into the original"
            " model and optimize it again."
        )
