"""Padding in front of a maximum, as onnxruntime leaves it alone."""

from __future__ import annotations

import onnx_ir as ir

# From this operator set on a Pad may name its axes.
_WITH_AXES = 18
_NAME = "axes_of_pads"


def keep_pads(model: ir.Model) -> None:
    """Have each Pad in front of a MaxPool name all its axes, which changes nothing.

    onnxruntime makes a Pad with zeros a padding of the MaxPool behind it, which is one with minus infinity: where all numbers
    of a window are negative, the maximum is another. Of a Pad that names its axes it doesn't.
    """
    if (model.opset_imports.get("") or 0) < _WITH_AXES:
        return
    for node in model.graph.all_nodes():
        if node.op_type == "Pad" and _feeds_a_maximum(node) and (len(node.inputs) < 4 or node.inputs[3] is None):
            rank = _rank(node)
            if rank is not None:
                node.resize_inputs(4)
                node.replace_input_with(3, _axes(model.graph, rank))


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
