"""Padding in front of a maximum, as onnxruntime leaves it alone."""

from __future__ import annotations

import onnx_ir as ir

from exporters.errors import RouteRefused

# From this operator set on a Pad may name its axes.
_WITH_AXES = 18
# From this one on the value to pad with is an input, and before that an attribute.
_WITH_VALUE = 11
_NAME = "axes_of_pads"


def keep_pads(model: ir.Model) -> None:
    """Have each Pad in front of a MaxPool name all its axes, which changes nothing.

    onnxruntime makes a Pad with zeros a padding of the MaxPool behind it, which is one with minus infinity: where all numbers
    of a window are negative, the maximum is another. Of a Pad that names its axes it doesn't. Where the operator set has no
    axes, it is the zero that is left out, by an empty name: that is zero by default, and is left alone, too.

    Raises:
        RouteRefused: there is neither, and nothing else keeps it.
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
            f"onnxruntime takes zeros in front of a maximum for minus infinity in opset {opset}: give {_WITH_AXES} or more"
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
