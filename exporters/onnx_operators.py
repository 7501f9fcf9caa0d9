"""Operators that torch translates wrongly to ONNX or not at all, or that onnxruntime fuses wrongly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from exporters.errors import RouteRefused

# From this opset on, a Pad can name its axes.
_WITH_AXES = 18
# From this opset on, the pad value is an input; before, it is an attribute.
_WITH_VALUE = 11
_NAME = "axes_of_pads"


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


def keep_pads(model: ir.Model) -> None:
    """Rewrite each Pad before a MaxPool so that onnxruntime doesn't fuse the two; the results stay the same.

    onnxruntime turns a Pad with zeros into the padding of the following MaxPool, which pads with minus infinity. This
    changes the maximum of a window whose values are all negative. A Pad that names its axes isn't fused, so each Pad
    gets all its axes. In opsets without axes, the pad value zero is omitted by an empty input name. Zero is the
    default, and such a Pad isn't fused either.

    Raises:
        RouteRefused: the opset supports neither, or the pad value isn't a constant.
    """
    opset = model.opset_imports.get("") or 0
    for node in model.graph.all_nodes():
        if node.op_type != "Pad" or not _feeds_a_maximum(node):
            continue
        if opset < _WITH_AXES:
            _leave_out_zero(node, opset)
        elif (len(node.inputs) < 4 or node.inputs[3] is None) and (rank := _rank(node)) is not None:
            node.resize_inputs(4)
            node.replace_input_with(3, _axes(model.graph, rank))


def _leave_out_zero(node: ir.Node, opset: int) -> None:
    if node.attributes.get_string("mode", "constant") != "constant" or node.attributes.get_float("value", 0.0):
        return
    value = node.inputs[2] if len(node.inputs) > 2 else None
    number = None if value is None else ir.convenience.get_const_tensor(value)
    if opset < _WITH_VALUE or (value is not None and number is None):
        raise RouteRefused(
            f"onnxruntime treats zero padding before a maximum as minus infinity in opset {opset}: use {_WITH_AXES} "
            "or later"
        )
    if number is None or not number.numpy().any():
        node.resize_inputs(3)
        node.replace_input_with(2, None)


def _feeds_a_maximum(node: ir.Node) -> bool:
    return any(use.node.op_type == "MaxPool" for use in node.outputs[0].uses())


def _rank(node: ir.Node) -> int | None:
    for value in (node.inputs[0], node.outputs[0]):
        if value is not None and value.shape is not None:
            return len(value.shape)
    return None


def _axes(graph: ir.Graph, rank: int) -> ir.Value:
    name = f"{_NAME}_{rank}"
    if name not in graph.initializers:
        tensor = ir.tensor(list(range(rank)), dtype=ir.DataType.INT64, name=name)
        graph.register_initializer(ir.Value(name=name, const_value=tensor, type=ir.TensorType(ir.DataType.INT64)))
    return graph.initializers[name]
