"""Refuse checkpoints for weights that were folded: the loaded values would meet weights that already contain them."""

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
    """Report an error for each load of a tensor that was folded away; a `load_state_dict` pre-hook.

    `load_state_dict` calls it and raises the messages in `error_msgs`.
    """
    registered = {**module._parameters, **module._buffers}
    found = next(
        (prefix + name for name, held in registered.items() if held is None and prefix + name in state_dict), None
    )
    if found is not None:
        error_msgs.append(
            f"{found} was folded into another weight when the model was optimized: load the weights into the original"
            " model and optimize it again."
        )
