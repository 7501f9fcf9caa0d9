"""Read the calls of torch functions that a TorchFunctionMode intercepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# The tensor classes whose stored values torch's operations use unchanged.
PLAIN_TENSORS: frozenset[type[torch.Tensor]] = frozenset({torch.Tensor, nn.Parameter})
# Attributes and methods that don't read the values of a tensor.
METADATA = frozenset({
    "shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_floating_point",
    "is_complex", "size", "dim", "ndimension", "numel", "nelement", "element_size", "itemsize", "nbytes", "get_device",
    "is_meta", "is_mkldnn", "is_nested", "requires_grad", "is_leaf", "stride", "is_contiguous", "__len__", "is_mps",
    "is_xpu", "names", "has_names", "is_tensor", "is_same_size", "grad_fn",
})  # fmt: skip


def name_of(func: Callable[..., Any]) -> str:
    """The name of a torch function, without its overload."""
    name = getattr(func, "__name__", "")
    # An overload in `torch.ops` is named, for example, `add.Tensor`.
    return name.split(".", 1)[0] if isinstance(name, str) else ""


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str, default: Any) -> Any:
    """An argument given by name or by position."""
    return kwargs.get(name, args[index] if len(args) > index else default)


def moved_statistics(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The running statistics that a call of `batch_norm` or `instance_norm` updates in place."""
    flags = {"batch_norm": ("training", False), "instance_norm": ("use_input_stats", True)}
    if (flag := flags.get(name_of(func))) is None or not argument(args, kwargs, 5, *flag):
        return []
    # The statistics come after weight and bias in the functions of `torch`, and before them in those of
    # torch.nn.functional.
    first = 1 if getattr(func, "__module__", None) == "torch.nn.functional" else 3
    found = (argument(args, kwargs, first + i, name, None) for i, name in enumerate(("running_mean", "running_var")))
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]
