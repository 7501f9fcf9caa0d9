"""Classify calls of torch functions: by name, whether a plan counts them, and whether they can be repeated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from passes.checkpointing.tensors import tensors_of_call

# Queries about a tensor, and hooks on it, aren't counted, because code that observes a forward makes them too.
UNCOUNTED = frozenset(
    {
        "__get__", "__set__", "__delete__", "__len__", "__hash__", "__repr__", "__format__", "data_ptr", "device", "dim", "dim_order",
        "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "is_nonzero", "is_same_size",
        "is_set_to", "is_signed", "is_storage", "is_tensor", "nbytes", "ndimension", "nelement", "numel",
        "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size", "storage",
        "storage_offset", "storage_type", "stride", "untyped_storage", "_set_grad_enabled", "is_grad_enabled",
    }
)  # fmt: skip
# Functions whose results depend on the autograd graph, not only on the values of their arguments.
_OF_THE_GRAPH = frozenset({"grad", "backward", "jacobian", "hessian"})
# Operators that also write to running statistics or to a saved tensor, without a new version of that tensor.
_WRITES_SILENTLY = frozenset(
    {
        "native_batch_norm", "_batch_norm_impl_index", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats",
        "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts", "rrelu", "rrelu_", "rrelu_with_noise",
        "rrelu_with_noise_",
    }
)  # fmt: skip
# Functions that draw random numbers for some arguments only, like all kinds of dropout.
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_MAY_DRAW = _RECURRENT | {"multi_head_attention_forward", "scaled_dot_product_attention"}
# For each norm, the name and the default of the flag that selects batch statistics.
_BATCH_STATISTICS = {"batch_norm": ("training", False), "instance_norm": ("use_input_stats", True)}


def name_of(func: Callable[..., Any]) -> str:
    """The name of a torch function, without its overload."""
    name = getattr(func, "__name__", "")
    if not isinstance(name, str):
        return ""
    # An overload in `torch.ops` is named, for example, `add.Tensor`.
    return name.split(".", 1)[0] if "." in name else name


def may_draw(name: str) -> bool:
    """Whether a function of that name draws random numbers for some arguments and none for others."""
    return name in _MAY_DRAW or "dropout" in name


def moved_statistics(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """The running statistics that a call of `batch_norm` or `instance_norm` updates in place."""
    if (flag := _BATCH_STATISTICS.get(name)) is None or not _argument(args, kwargs, 5, *flag):
        return []
    # torch.batch_norm takes weight and bias before the statistics, torch.nn.functional.batch_norm after them.
    first = 1 if getattr(func, "__module__", None) == "torch.nn.functional" else 3
    found = (_argument(args, kwargs, first + i, name, None) for i, name in enumerate(("running_mean", "running_var")))
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str, default: Any) -> Any:
    return kwargs.get(name, args[index] if len(args) > index else default)


def is_repeatable(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call gives the same result again for the same arguments and the same ambient state."""
    if name in _OF_THE_GRAPH or name in _WRITES_SILENTLY:
        return False
    if name in _RECURRENT and any(isinstance(item, float) and item > 0 for item in (*args, *kwargs.values())):
        # On a GPU, their dropout has its own random state.
        return not any(tensor.is_cuda for tensor in tensors_of_call(args, kwargs))
    # The state of a user's own generator isn't recorded.
    return torch.Generator not in map(type, args) and torch.Generator not in map(type, kwargs.values())


def has_no_versions(tensors: Sequence[Tensor]) -> bool:
    """Whether writes to the tensors of a call can't be noticed, because of inference mode."""
    return torch.is_inference_mode_enabled() or any(map(Tensor.is_inference, tensors))


class _Unwatched(threading.local):
    """Whether this thread's current calls are not the forward's own, but recomputation or the gathering of shards."""

    on = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        before, self.on = self.on, True
        try:
            yield
        finally:
            self.on = before


UNWATCHED = _Unwatched()
