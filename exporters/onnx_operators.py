"""Translations to ONNX for operators that torch translates wrongly or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The table for `torch.onnx.export(custom_translation_table=…)`."""
    return {
        torch.ops.aten.scaled_dot_product_attention.default: _attention,
        torch.ops.aten._is_all_true.default: _all_true,
        torch.ops.aten.as_strided.default: _as_strided,
    }


def _all_true(x: Any) -> Any:
    """Whether a bool tensor is all true, as a bool of shape (): the condition in `torch._check_tensor_all`."""
    from onnxscript import opset18 as op

    return op.Cast(op.ReduceMin(op.Cast(x, to=ir.DataType.INT32), keepdims=0), to=ir.DataType.BOOL)


def _as_strided(x: Any, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None) -> Any:
    """A view of a tensor's storage; the tensor itself if the view has its sizes in row-major order.

    torch captures an average over whole channels-last images as a mean and such a view. torch's translation gathers the
    elements by indices from a Range over the batch. With a Range over an open size, OpenVINO 2026.4 drops the bias of
    the first quantized convolution.

    Args:
        size, stride: ints, or values in the file where a size is open.
    """
    from onnxscript import opset18 as op
    from onnxscript.function_libs.torch_lib.ops.core import aten_as_strided

    offset = 0 if storage_offset is None else storage_offset
    if isinstance(offset, int) and offset == 0 and _is_whole(x, size, stride):
        return op.Identity(x)
    return aten_as_strided(x, size, stride, offset)


def _is_whole(x: Any, size: Sequence[Any], stride: Sequence[Any]) -> bool:
    """Whether a view has the sizes of `x` in row-major order. Open sizes are assumed to be equal, which the proof checks."""
    if x.shape is None or len(x.shape) != len(size):
        return False
    expected: int | None = 1
    for own, length, step in reversed(list(zip(x.shape, size, stride, strict=True))):
        if isinstance(own, int) != isinstance(length, int) or (isinstance(own, int) and own != length):
            return False
        if own == 1:
            continue
        if not isinstance(step, int) or step != expected:
            return False
        # Strides of dims before an open one would be open too.
        expected = expected * length if isinstance(length, int) else None
    return True


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention that returns zeros for a query that can attend to no key, such as a padded position.

    For such a query, torch's translation returns the mean of all values if the mask is bool, and NaN if it is -inf, but
    `torch.nn.functional.scaled_dot_product_attention` returns zeros.

    Args:
        query: (batch, heads, queries, width).
        key, value: (batch, heads, keys, width).
        attn_mask: bool or float, broadcastable to (batch, heads, queries, keys).
    """
    # The import is slow, and only captures with this operator need it.
    from onnxscript import opset18 as op
    from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention

    output = aten_scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if attn_mask is None:
        return output
    allowed = attn_mask
    if attn_mask.dtype != ir.DataType.BOOL:
        allowed = op.Greater(op.Cast(attn_mask, to=ir.DataType.FLOAT), op.Constant(value_float=float("-inf")))
    # A sum, not a maximum: onnxruntime's symbolic shape inference can't infer the shape of a ReduceMax.
    some_key = op.Cast(op.ReduceSum(op.Cast(allowed, to=ir.DataType.INT32), [-1]), to=ir.DataType.BOOL)
    return op.Where(some_key, output, op.CastLike(op.Constant(value_float=0.0), output))
