"""Every private name of torch that the passes use, each with the reason and the versions it was seen in.

Where a name is missing, importing this file raises an ImportError that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import (
    # Torch's own way to run without `__torch_function__`: of subclasses, and of modes too. In its docs on extending torch,
    # and without a public name. Seen in 2.13.
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    # Whether torch.jit.trace is running: `torch.jit.is_tracing` asks the same after a check for scripts. Seen in 2.13.
    _is_tracing,
)
from torch.nn.modules.batchnorm import (
    _BatchNorm,
)  # The base of torch's BatchNorms, SyncBatchNorm among them. Seen in 2.13.
from torch.nn.modules.conv import _ConvNd  # The base of torch's convolutions. Seen in 2.13.
from torch.utils._device import (
    # A device that is the default for a block is a function mode, which changes no results. Seen in 2.13.
    DeviceContext,
    # The functions that create a tensor on the default device. Seen in 2.13.
    _device_constructors,
)

without_torch_function = DisableTorchFunction
without_subclasses = DisableTorchFunctionSubclass
is_tracing = _is_tracing
AnyBatchNorm = _BatchNorm
AnyConvolution = _ConvNd

# torch.autograd.graph can set and disable hooks on saved tensors, but not tell whether there are any. Seen in 2.13.
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
saved_tensors_hooks_enabled: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
# The innermost transform of torch.func that runs (vmap, grad), which allows no hooks on saved tensors. Seen in 2.13.
active_transforms: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
DefaultDevice = DeviceContext
device_constructors = _device_constructors
# Flags that choose among kernels which round differently, and may hold in a part of a forward only (`sdpa_kernel`). The
# public functions can't set each of them without a context manager. Seen in 2.13.
KERNEL_SWITCHES: tuple[tuple[Callable[[], bool], Callable[[bool], object]], ...] = (
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
)


def top_saved_tensors_hooks() -> Any:
    """The innermost hooks on saved tensors that are set; None where there are none."""
    return _top_hooks(False)


def active_function_modes() -> list[Any]:
    """The function modes that are active, the innermost last; torch has no public name for it. Seen in 2.13."""
    return torch.overrides._get_current_function_mode_stack()


def is_in_forward_mode() -> bool:
    """Whether gradients are asked for in forward mode, which `torch.autograd.forward_ad` doesn't tell. Seen in 2.13."""
    return torch.autograd.forward_ad._current_level >= 0
