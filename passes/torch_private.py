"""Every private name of torch that the passes use, each with the reason and the versions it was seen in.

Where a name is missing, importing this file raises an ImportError that names it.
"""

from __future__ import annotations

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

without_torch_function = DisableTorchFunction
without_subclasses = DisableTorchFunctionSubclass
is_tracing = _is_tracing
AnyBatchNorm = _BatchNorm
AnyConvolution = _ConvNd
