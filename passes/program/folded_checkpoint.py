"""Save and load folded tensors: a state dict holds plain tensors, and only `load_state_dict` may write to folded ones."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from passes.program.weights import admit, bare, is_folded, like_folded


def save_plain(module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, metadata: Any) -> None:
    """Put plain tensors over the same memory into a state dict; a `state_dict` post-hook.

    With `keep_vars=True` the tensors stay as the module holds them.
    """
    for name, held in _tensors_of(module).items():
        saved = state_dict.get(prefix + name)
        if isinstance(saved, torch.Tensor) and is_folded(saved) and saved is not held:
            state_dict[prefix + name] = bare(saved)


def admit_checkpoint(
    module: nn.Module,
    state_dict: MutableMapping[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Let `load_state_dict` write to the module's folded tensors, or replace them; a `load_state_dict` pre-hook."""
    for name, held in _tensors_of(module).items():
        given = state_dict.get(prefix + name)
        if not is_folded(held) or not isinstance(given, torch.Tensor):
            continue
        if local_metadata.get("assign_to_params_buffers", False):
            state_dict[prefix + name] = like_folded(held, given)
        else:
            admit(held, given)


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: held for name, held in (*module._parameters.items(), *module._buffers.items()) if held is not None}
