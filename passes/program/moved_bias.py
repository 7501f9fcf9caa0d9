"""Keep a bias that was moved into a running mean compatible with checkpoints.

A convolution and the following BatchNorm with (bias, mean) compute the same as with (0, mean - bias). A result without
the bias therefore saves `bias = 0` in its `state_dict`, which is correct in the original too. When a checkpoint with a
nonzero bias is loaded, the mean becomes mean - bias.

A load hook sees only the keys of its module's subtree, and the bias and the mean may be in different subtrees. So the
hook is on the innermost module that contains both. A checkpoint with only one of the two doesn't determine the new
mean, and is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from passes.program.arithmetic import float64
from passes.program.weights import bare

# A string key, because torch numbers its own hooks, and a pickled module may meet equal numbers in another process.
_KEY = "optimize_export.moved_bias"


class MovedBias:
    """One removed bias, and the running mean that contains it.

    Attributes:
        bias_path, mean_path: the paths of the two from the root. `mean_path` is None if the bias was simply dropped,
            because the BatchNorm subtracts the batch mean anyway.
        holder_path: the path of the innermost module that contains both.
        bias_owner, mean_owner: the modules that register them; `mean_owner` is None without a mean.
        weight_owner, weight: the module and name of the convolution's weight, which has the dtype and device of the
            bias.
        value: the bias that was subtracted from the mean: (out,). Loading a checkpoint replaces it.
        before: the names of the parameters that precede the bias in its owner.
    """

    def __init__(
        self,
        bias: tuple[str, nn.Module, str],
        mean: tuple[str, nn.Module, str] | None,
        weight: tuple[nn.Module, str],
        value: torch.Tensor,
    ) -> None:
        self.mean_owner: nn.Module | None
        owner_path, self.bias_owner, self.bias = bias
        self.bias_path = _joined(owner_path, self.bias)
        mean_owner_path, self.mean_owner, self.mean = (owner_path, None, "") if mean is None else mean
        self.mean_path = None if mean is None else _joined(mean_owner_path, self.mean)
        self.holder_path = common_path(owner_path, mean_owner_path)
        self.weight_owner, self.weight = weight
        self.value = value
        self.size = value.numel()
        names = list(self.bias_owner._parameters)
        self.before = frozenset(names[: names.index(self.bias)])
        # The new mean, on its way from the hook that computed it to the owner that loads it.
        self.made: torch.Tensor | None = None

    @property
    def key(self) -> str:
        """The key under which its hooks are stored."""
        return f"{_KEY}:{self.bias_path}"

    @property
    def is_gone(self) -> bool:
        """Whether the bias is still removed and in the mean; a later pass may have given the convolution a new bias."""
        has_mean = self.mean_owner is None or self.mean_owner._buffers.get(self.mean) is not None
        return self.bias_owner._parameters.get(self.bias) is None and has_mean

    def hooks(self) -> Iterator[tuple[str, str, Any]]:
        """Yield (path of a module, name of its hook dict, hook) for all hooks that the moved bias needs."""
        loaded = "_load_state_dict_pre_hooks"
        owner_path = self.bias_path.rpartition(".")[0]
        yield owner_path, "_state_dict_hooks", SaveAsZero(self)
        yield self.holder_path, loaded, LoadIntoMean(self)
        if self.holder_path != owner_path:
            yield owner_path, loaded, RefuseBiasAlone(self)
        if self.mean_path is not None and (mean_owner_path := self.mean_path.rpartition(".")[0]) != self.holder_path:
            yield mean_owner_path, loaded, RefuseMeanAlone(self)

    def zero(self) -> torch.Tensor:
        """The bias for a checkpoint: zeros of shape (out,)."""
        weight = self.weight_owner._parameters.get(self.weight)
        like = torch.empty(0) if weight is None else bare(weight)
        return torch.zeros(self.size, dtype=like.dtype, device=like.device)

    def alone(self, given: str, lacking: str) -> str:
        """The error message for a checkpoint with only one of the two."""
        return (
            f"{given} comes without {lacking}, but {self.bias_path} was moved into {self.mean_path} when the model "
            f"was optimized: load both together, into {self.holder_path or 'the whole model'}, or load them into "
            "the original model and optimize it again."
        )


class _Hook:
    """Base of the hooks; copied and pickled with the modules that hold them."""

    def __init__(self, moved: MovedBias) -> None:
        self.moved = moved


class SaveAsZero(_Hook):
    """Adds the bias, as zeros, to the state dict of its owner, at its original position."""

    # torch sets this mark on public state-dict hooks; it then doesn't use the hook's return value as the state dict.
    _from_public_api = True

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        moved = self.moved
        key = prefix + moved.bias
        if not moved.is_gone or key in state_dict:
            return
        before = {prefix + name for name in moved.before}
        behind = []
        for other in reversed(state_dict):
            if other in before or not other.startswith(prefix):
                break
            behind.append(other)
        state_dict[key] = moved.zero()
        for other in reversed(behind):
            state_dict[other] = state_dict.pop(other)


class LoadIntoMean(_Hook):
    """Removes the bias from the loaded state dict, and replaces the mean by mean - bias."""

    def __call__(
        self,
        state_dict: MutableMapping[str, Any],
        prefix: str,
        metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        moved = self.moved
        if not moved.is_gone:
            return
        bias_key = prefix + _within(moved.holder_path, moved.bias_path)
        mean_key = None if moved.mean_path is None else prefix + _within(moved.holder_path, moved.mean_path)
        bias = state_dict.pop(bias_key, None)
        if bias is None and strict:
            missing_keys.append(bias_key)
        if mean_key is None:
            return
        mean = state_dict.get(mean_key)
        if bias is None and mean is None:
            return
        if bias is None or mean is None:
            # The mean can't be computed, so it isn't loaded either.
            state_dict.pop(mean_key, None)
            error_msgs.append(moved.alone(*((bias_key, mean_key) if mean is None else (mean_key, bias_key))))
            return
        if not _are_tensors(bias, mean) or bias.shape != (moved.size,):
            shape = tuple(bias.shape) if isinstance(bias, torch.Tensor) else type(bias).__name__
            error_msgs.append(f"size mismatch for {bias_key}: {shape} in the checkpoint, ({moved.size},) in the model.")
        elif mean.shape == bias.shape:
            mean = state_dict[mean_key] = mean_without(mean, bias)
            moved.value = bare(bias).clone()
        moved.made = mean


class RefuseBiasAlone(_Hook):
    """Refuses a bias that is loaded into its owner directly; `LoadIntoMean` would have removed it."""

    def __call__(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        moved = self.moved
        if moved.is_gone and prefix + moved.bias in state_dict:
            error_msgs.append(moved.alone(prefix + moved.bias, str(moved.mean_path)))


class RefuseMeanAlone(_Hook):
    """Refuses a mean that is loaded into its owner directly, instead of through the module that contains both."""

    def __call__(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        moved = self.moved
        made, moved.made = moved.made, None
        key = prefix + moved.mean
        if moved.is_gone and key in state_dict and state_dict[key] is not made:
            error_msgs.append(moved.alone(key, moved.bias_path))


class ResetWithBias:
    """Replaces `reset_running_stats` of a BatchNorm whose running mean contains a bias, also in `reset_parameters`.

    The bias is added back to the mean, the class's own method runs, and the bias is subtracted again.
    """

    def __init__(self, owner: nn.Module, moved: MovedBias) -> None:
        self.owner = owner
        self.moved = moved

    def __call__(self) -> None:
        owner: Any = self.owner
        moved = self.moved
        self._move_mean(-moved.value)
        type(owner).reset_running_stats(owner)
        self._move_mean(moved.value)

    def _move_mean(self, bias: torch.Tensor) -> None:
        mean = self.owner._buffers.get(self.moved.mean)
        if mean is not None and self.moved.is_gone:
            mean.copy_(mean_without(mean, bias))


def mean_without(mean: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """mean - bias, both (channels,), without gradients.

    It is computed in float64, and has the dtype and device of the mean.
    """
    wide = float64(mean)
    return (wide - float64(bias).to(wide.device)).to(mean)


def moved_biases(root: nn.Module) -> Iterator[tuple[str, str | None]]:
    """Yield the path of each removed bias, and that of the running mean that contains it; None if it was dropped."""
    for path, module in root.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for hook in module._load_state_dict_pre_hooks.values():
            if isinstance(hook, LoadIntoMean) and hook.moved.is_gone:
                moved = hook.moved
                inside = _within(moved.holder_path, moved.bias_path)
                mean = None if moved.mean_path is None else _within(moved.holder_path, moved.mean_path)
                yield _joined(path, inside), None if mean is None else _joined(path, mean)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def common_path(first: str, second: str) -> str:
    """The path of the innermost module that contains both."""
    both = zip(first.split("."), second.split("."), strict=False)
    return ".".join(part for part, _ in itertools.takewhile(lambda parts: parts[0] == parts[1], both))


def _within(holder: str, path: str) -> str:
    return path.removeprefix(f"{holder}.") if holder else path


def _are_tensors(*values: Any) -> bool:
    return all(isinstance(value, torch.Tensor) for value in values)
