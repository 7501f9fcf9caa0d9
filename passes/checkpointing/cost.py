"""Estimate the time of operators from FLOPs and bytes by one constant, so that all runs and ranks make the same plan.

The unit is the time of one FLOP of a matmul. Costs measured for each kernel would be closer to the real time, but
change little. On a CPU, a BatchNorm in training takes twice its estimate, a max pooling ten times, and an addition a
third. Plans for measured costs recompute more matmuls. A step in half of the memory then takes 1 to 3 % less time, or
no less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

# The number of float32 operations that CPUs and GPUs compute in the time in which they read or write one byte.
FLOPS_PER_BYTE = 10


def _of_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


# torch counts the FLOPs of attention on every device except this one.
_FLOPS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _of_attention,
}


def flops_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """The FLOPs of a matmul, convolution or attention; 0 for other operators."""
    counted = flop_registry.get(operator) or _FLOPS.get(operator)
    return 0 if counted is None else int(counted(*args, **kwargs, out_val=result))
