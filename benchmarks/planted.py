"""Faults that are planted in ONNX files, in TorchScript files and in passes, each at a known place."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx
from onnx import helper, numpy_helper

from passes.base import Context, TensorRef
from passes.graph.module_pass import ModulePass, ModuleRewriter

SCALE = 1.01

_COMPUTING = frozenset({"Conv", "Gemm", "MatMul", "Add", "Mul", "Relu", "Gelu", "Erf", "Tanh", "Softmax", "LayerNormalization",
                        "MaxPool", "GlobalAveragePool", "ReduceMean", "Transpose", "Reshape", "BatchNormalization"})  # fmt: skip


@dataclass
class File:
    """A correct file, and the shapes and dtypes of its values.

    Attributes:
        shapes: the shapes of the outputs of its operations, at batch size 2.
        floats: the names of the outputs that are float32.
    """

    model: onnx.ModelProto
    shapes: dict[str, tuple[int, ...]]
    floats: frozenset[str]

    def copy(self) -> File:
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        return File(model, self.shapes, self.floats)

    def weights(self) -> dict[str, onnx.TensorProto]:
        return {each.name: each for each in self.model.graph.initializer if each.data_type == onnx.TensorProto.FLOAT}

    def candidates(self) -> list[int]:
        """The numbers of the operations that compute with floats."""
        nodes = enumerate(self.model.graph.node)
        return [number for number, node in nodes if node.op_type in _COMPUTING and node.output[0] in self.floats]


Plant = Callable[[File, int, random.Random], bool]
"""Plant a fault in the operation with that number; return False if the fault doesn't fit it."""


def scaled_weight(file: File, number: int, random: random.Random) -> bool:
    """Make one weight 1 % larger."""
    return _changed_weight(file, number, random, lambda values: values * np.float32(SCALE))


def perturbed_initializer(file: File, number: int, random: random.Random) -> bool:
    """Add a weight's largest absolute value to one of its elements."""

    def perturb(values: np.ndarray) -> np.ndarray:
        values = values.copy()
        values.flat[random.randrange(values.size)] += np.abs(values).max()
        return values

    return _changed_weight(file, number, random, perturb)


def changed_attribute(file: File, number: int, random: random.Random) -> bool:
    """Change an attribute of the operation.

    Padding moves to the end of each dim; without padding, the stride is doubled. An epsilon becomes 0.1, the axis of a
    Softmax 1, and the alpha of a Gemm 1.01. A Gelu becomes its tanh approximation. A Transpose swaps the last two dims.
    """
    node = file.model.graph.node[number]
    given = {attribute.name: attribute for attribute in node.attribute}
    if node.op_type in ("Conv", "MaxPool"):
        pads = list(given["pads"].ints) if "pads" in given else []
        if any(pads):
            given["pads"].ints[:] = [0, 0, *(2 * pad for pad in pads[2:])]
        else:
            _set(node, "strides", [2 * stride for stride in given["strides"].ints] if "strides" in given else [2, 2])
    elif node.op_type in ("LayerNormalization", "BatchNormalization"):
        _set(node, "epsilon", 0.1)
    elif node.op_type == "Softmax":
        _set(node, "axis", 1)
    elif node.op_type == "Gelu":
        _set(node, "approximate", "tanh")
    elif node.op_type == "Gemm":
        _set(node, "alpha", 1.01)
    elif node.op_type == "Transpose":
        order = list(given["perm"].ints)
        order[-1], order[-2] = order[-2], order[-1]
        _set(node, "perm", order)
    else:
        return False
    return True


def lower_dtype(file: File, number: int, random: random.Random) -> bool:
    """Round the operation's float inputs and its output to float16.

    onnxruntime has few float16 kernels on a CPU, so the operation itself stays in float32. onnxruntime also removes
    casts that follow each other directly. So there is an operation between them that changes nothing.
    """
    nodes, node = file.model.graph.node, file.model.graph.node[number]
    if node.op_type in ("Transpose", "Reshape", "MaxPool", "Relu"):
        return False
    known = file.floats | file.weights().keys()
    for index, name in enumerate(node.input):
        if name in known:
            node.input[index] = f"planted_{index}_of_{node.output[0]}"
            _insert(nodes, number, _rounded(name, node.input[index]))
    at = next(at for at, each in enumerate(nodes) if node.output[0] in each.output)
    output = nodes[at].output[0]
    nodes[at].output[0] = f"planted_{output}"
    _insert(nodes, at + 1, _rounded(f"planted_{output}", output))
    return True


def transposed_axis(file: File, number: int, random: random.Random) -> bool:
    """Swap the last two dims of the operation's output."""
    nodes, node = file.model.graph.node, file.model.graph.node[number]
    output = node.output[0]
    dims = len(file.shapes[output])
    if dims < 2:
        return False
    node.output[0] = f"planted_{output}"
    order = [*range(dims - 2), dims - 1, dims - 2]
    _insert(nodes, number + 1, [helper.make_node("Transpose", [node.output[0]], [output], perm=order)])
    return True


def baked_batch(file: File, number: int, random: random.Random) -> bool:
    """Freeze a batch size of 2: reshape the output to its shape there, or cut it to its first two rows."""
    nodes, node = file.model.graph.node, file.model.graph.node[number]
    output = node.output[0]
    shape = file.shapes[output]
    if not shape or shape[0] != 2:
        return False
    node.output[0] = f"planted_{output}"
    if random.random() < 0.5:
        sizes = _constant(file, f"planted_sizes_{output}", list(shape))
        made = [helper.make_node("Reshape", [node.output[0], sizes], [output], name="planted")]
    else:
        ends = [
            _constant(file, f"planted_{end}_{output}", [value]) for end, value in (("from", 0), ("to", 2), ("dim", 0))
        ]
        made = [helper.make_node("Slice", [node.output[0], *ends], [output], name="planted")]
    _insert(nodes, number + 1, made)
    return True


KINDS: dict[str, Plant] = {
    "weight off by 1 %": scaled_weight,
    "perturbed initializer": perturbed_initializer,
    "changed attribute": changed_attribute,
    "lower dtype": lower_dtype,
    "transposed axis": transposed_axis,
    "baked batch": baked_batch,
}


@dataclass(frozen=True)
class ScaleWeight(ModulePass):
    """A wrong pass: it scales the weight of one layer, and names no region that could be compared."""

    name: ClassVar[str] = "scale-weight"
    layer: str = ""

    def rewrite(self, graph: ModuleRewriter, context: Context) -> None:
        module = graph.tree.root.get_submodule(self.layer)
        if module._parameters.get("weight") is None:
            graph.skip(self.layer, "it has no weight any more")
            return
        with graph.change(self.layer, "scaled"):
            graph.set_tensor(TensorRef(module, "weight"), module.weight.detach() * SCALE)


def _changed_weight(file: File, number: int, random: random.Random, change: Callable[[np.ndarray], np.ndarray]) -> bool:
    """Give the operation its own, changed copy of a weight; other operations that share it keep the original."""
    node, weights = file.model.graph.node[number], file.weights()
    places = [index for index, name in enumerate(node.input) if name in weights]
    if not places:
        return False
    index = random.choice(places)
    name = f"planted_{node.input[index]}"
    values = change(numpy_helper.to_array(weights[node.input[index]]))
    file.model.graph.initializer.append(numpy_helper.from_array(values, name))
    node.input[index] = name
    return True


def _rounded(name: str, into: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("Cast", [name], [f"{into}_low"], to=onnx.TensorProto.FLOAT16),
        helper.make_node("Concat", [f"{into}_low"], [f"{into}_kept"], axis=0),
        helper.make_node("Cast", [f"{into}_kept"], [into], to=onnx.TensorProto.FLOAT),
    ]


def _constant(file: File, name: str, values: list[int]) -> str:
    file.model.graph.initializer.append(helper.make_tensor(name, onnx.TensorProto.INT64, [len(values)], values))
    return name


def _insert(nodes, at: int, made: list[onnx.NodeProto]) -> None:  # type: ignore[no-untyped-def]
    for node in reversed(made):
        nodes.insert(at, node)


def _set(node: onnx.NodeProto, name: str, value: object) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])
