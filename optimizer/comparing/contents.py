"""The weights and operations of a file, and the differences between two files of the same format."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import onnx
import torch

from exporters.isolation import silent, torchscript_allowed
from exporters.registry import exported_format
from optimize_export.wording import dtype_name


@dataclass(frozen=True)
class Contents:
    """The weights and operations of a file."""

    weights: Mapping[str, tuple[str, Any]]
    """By name: the dtype, and the values as a numpy array."""
    operations: Counter[str]
    """Of ONNX files with their attributes, such as `Conv(group=1, strides=[2, 2])`; of torch's files the names alone."""
    about: Mapping[str, str]
    """The operator sets and the producer, where the format has them."""

    def counts(self) -> Counter[str]:
        """The number of each operation, whatever its attributes."""
        found: Counter[str] = Counter()
        for text, count in self.operations.items():
            found[text.partition("(")[0]] += count
        return found


def contents_of(format: str, path: Path) -> Contents | None:
    """Read a file whose hash was checked; None for compiled files, and for formats of other packages."""
    reader = {"onnx": _of_onnx, "torchscript": _of_torchscript, "pt2": _of_pt2}.get(exported_format(format))
    return None if reader is None else reader(path)


# ONNX -----------------------------------------------------------------------------------------------------------------


def _of_onnx(path: Path) -> Contents:
    model = onnx.load(path)
    weights, operations = {}, Counter[str]()
    for graph in _graphs(model.graph):
        for each in graph.initializer:
            weights[each.name] = (
                onnx.TensorProto.DataType.Name(each.data_type).lower(),
                onnx.numpy_helper.to_array(each),
            )
        operations.update(map(_node_text, graph.node))
    sets = ", ".join(f"{each.domain or 'ai.onnx'} {each.version}" for each in model.opset_import)
    about = {"operator sets": sets, "producer": f"{model.producer_name} {model.producer_version}".strip()}
    return Contents(weights, operations, about)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph, and those of its branches and loops."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                yield from _graphs(inner)


def _node_text(node: onnx.NodeProto) -> str:
    name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    return f"{name}({', '.join(sorted(map(_attribute_text, node.attribute)))})"


def _attribute_text(attribute: onnx.AttributeProto) -> str:
    text = onnx.helper.printable_attribute(attribute)
    # Of a tensor, only its shape is printed.
    return (
        f"{text} {hashlib.sha256(attribute.t.SerializeToString()).hexdigest()[:8]}" if attribute.HasField("t") else text
    )


# Files of torch -------------------------------------------------------------------------------------------------------


def _of_torchscript(path: Path) -> Contents:
    with torchscript_allowed():
        module = torch.jit.load(str(path), map_location="cpu")
    weights = _arrays(module.state_dict())
    return Contents(weights, Counter(_kinds(module.inlined_graph)), {})


def _kinds(block: Any) -> Iterator[str]:
    """The operations of a graph with those of its branches and loops, without access to attributes and constants."""
    for node in block.nodes():
        if not node.kind().startswith("prim::"):
            yield node.kind()
        for inner in node.blocks():
            yield from _kinds(inner)


def _of_pt2(path: Path) -> Contents:
    with silent():
        program = torch.export.load(str(path))
    constants = {name: value for name, value in program.constants.items() if isinstance(value, torch.Tensor)}
    operations = Counter(str(node.target) for node in program.graph.nodes if node.op == "call_function")
    return Contents(_arrays({**program.state_dict, **constants}), operations, {})


def _arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, Any]]:
    """Convert to numpy arrays. A float dtype that numpy lacks becomes float32, which has all its values."""
    found = {}
    for name, tensor in tensors.items():
        held = tensor.detach().cpu()
        lacks = held.dtype.is_floating_point and held.dtype not in (torch.float16, torch.float32, torch.float64)
        found[name] = dtype_name(tensor.dtype), (held.float() if lacks else held).numpy()
    return found


# Differences ----------------------------------------------------------------------------------------------------------


def weights_between(first: Contents, second: Contents) -> dict[str, Any]:
    """The differing weights: removed, added and renamed ones, those of other shapes or dtypes, and changed values."""
    one, two = first.weights, second.weights
    removed, added = ([name for name in of if name not in to] for of, to in ((one, two), (two, one)))
    # Unchanged weights with another name, such as a renumbered one.
    places = {_digest(two[name]): name for name in reversed(added)}
    renamed = [(name, places.pop(digest)) for name in removed if (digest := _digest(one[name])) in places]
    changed = [
        _changed(name, one[name], two[name]) for name in one if name in two and _digest(one[name]) != _digest(two[name])
    ]
    return {
        "number": [len(one), len(two)],
        "removed": [name for name in removed if name not in dict(renamed)],
        "added": [name for name in added if name not in {new for _, new in renamed}],
        "renamed": [list(pair) for pair in renamed],
        "changed": changed,
    }


def _digest(weight: tuple[str, Any]) -> str:
    dtype, values = weight
    return hashlib.sha256(repr((dtype, values.shape)).encode() + values.tobytes()).hexdigest()


def _changed(name: str, one: tuple[str, Any], two: tuple[str, Any]) -> dict[str, Any]:
    kinds = [f"{dtype}{list(values.shape)}" for dtype, values in (one, two)]
    found: dict[str, Any] = {"name": name, "kinds": kinds, "max_difference": None, "largest": None}
    if one[1].shape == two[1].shape:
        before, after = (values.astype(complex if values.dtype.kind == "c" else float) for _, values in (one, two))
        found["max_difference"] = float(numpy.abs(after - before).max(initial=0.0))
        found["largest"] = float(numpy.abs(before).max(initial=0.0))
    return found


def operations_between(first: Contents, second: Contents) -> dict[str, Any]:
    """`pairs` that differ (operator sets, producer, the number of all operations and of each kind), and the operations that
    were `removed` and `added`, with their attributes."""
    one, two = first.counts(), second.counts()
    pairs: dict[str, list[Any]] = {name: [first.about[name], second.about[name]] for name in first.about}
    pairs["operations"] = [one.total(), two.total()]
    pairs |= {name: [one[name], two[name]] for name in sorted({*one, *two})}
    return {
        "pairs": {name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
        "removed": sorted((first.operations - second.operations).elements()),
        "added": sorted((second.operations - first.operations).elements()),
    }
