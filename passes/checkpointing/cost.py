"""The time that operators take, told from their FLOPs and bytes by one constant: every run and every rank plans the same.

The unit is the time of one FLOP of a matmul. Prices measured for each kernel would be nearer to the time, and change little:
on a CPU a BatchNorm in training takes twice its price, a max pooling ten times, an addition a third. Plans for these prices
compute more matmuls again; a step in half of the memory takes 1 to 3 % less time, or no less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

# What CPUs and GPUs compute in float32 while they read or write a byte.
FLOPS_PER_BYTE = 10


def _of_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


# torch counts the attention of every device but this one.
_FLOPS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _of_attention,
}


def flops_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """The FLOPs of a matmul, convolution or attention; 0 for other operators."""
    counted = flop_registry.get(operator) or _FLOPS.get(operator)
    return 0 if counted is None else int(counted(*args, **kwargs, out_val=result))
