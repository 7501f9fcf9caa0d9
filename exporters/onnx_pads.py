"""Keep onnxruntime from fusing a Pad into a following MaxPool."""

from __future__ import annotations

import onnx_ir as ir

from exporters.errors import RouteRefused

# From this opset on, a Pad can name its axes.
_WITH_AXES = 18
# From this opset on, the pad value is an input; before, it is an attribute.
_WITH_VALUE = 11
_NAME = "axes_of_pads"


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
