"""Quantize an ONNX file with onnxruntime: to 8-bit arithmetic, or to 4-bit weights.

    kind           weights                            activations            nodes
    int8-maps      int8 (7 bits), one scale/channel   uint8, calibrated      as int8-static; every Conv, and what is
                                                                             computed from its maps, see below
    int8-inputs    int8 (7 bits), one scale/channel   uint8, calibrated      every Conv, MatMul, Gemm
    int8-dense     int8 (7 bits), one scale/channel   uint8, calibrated      as int8-inputs, without depthwise Conv
    int8-static    int8 (7 bits), one scale/channel   uint8, calibrated      Conv, MatMul, Gemm; Relu, Clip after a Conv
    int8-dynamic   int8 (7 bits), one scale/channel   uint8, at every call   MatMul, Gemm
    uint8-dynamic  uint8, one scale/channel           uint8, at every call   MatMul, Gemm
    int4-weights   int4, one scale per 32 inputs      float                  MatMul, Gemm

The integer kinds quantize only nodes with a constant float32 weight. int8-static leaves these in float, as measured on
AVX2:
- products of two activations (attention), and the outputs of MatMul and Gemm: quantized, they cost accuracy and gain no
  time;
- additions: a vision transformer loses nine times as much cosine, for 4 % of speed; a ResNet gains nothing;
- depthwise convolutions: with so few products per output, the conversions cost more time than they save.

Where a network has depthwise convolutions, its maps are converted, and copied to another layout and back, around each of
the others, so int8-static is no faster than float. int8-maps keeps them as uint8 from the first convolution to the last:
it also quantizes depthwise convolutions, Add, Mul, Sigmoid and poolings of maps. Means over a map become a pooling, and
hard-swish and hard-sigmoid x and clip(x + 3, 0, 6) / 6, for which onnxruntime has integer kernels. Other networks don't
gain from it.

OpenVINO computes activations in float inside the convolution before them, and rounds their result there. It is quickest
with int8-inputs or int8-dense, which round what a convolution or product reads, and nothing else. Which of the two
is quicker depends on the network and the processor. Speed-ups over float32 in onnxruntime on an AMD EPYC, one thread;
networks of 224 × 224 have batch 1 and random weights, those of benchmarks/trained.py batch 8:

                             with AVX-512 VNNI                     with AVX-512 hidden
                             int8-inputs int8-dense int8-maps (*)  int8-inputs int8-dense int8-maps (*)
    EfficientNet-B0          1.61        1.58       1.34           1.12        1.15       1.20
    MobileNetV3-large        2.21        2.22       1.33           1.30        1.38       1.08
    MobileNetV2              2.60        2.27       2.17           1.41        1.41       1.41
    MobileNetV3-like         1.66        1.74       1.08           1.12        1.29       0.96
    EfficientNet-like        1.36        1.47       1.13           1.01        1.12       1.06
    (*) in onnxruntime

onnxruntime has no kernels for these two: there int8-inputs is a quarter as fast as float32. Without depthwise convolutions,
they are no faster than int8-static.

int8 weights use 7 of the 8 bits, because the file must run on any processor. Without VNNI, a processor adds two products
of uint8 and int8 in 16 bits, which saturates with 8-bit weights and gives wrong results. uint8 weights don't have that
problem: they lose only 40 % as much cosine (GPT-2, BERT, a vision transformer), but take 15 to 20 % longer on AVX2, and
onnxruntime doesn't use VNNI for them. Activations are asymmetric uint8: with int8, onnxruntime is two to four times as
slow on AVX2. The range of an activation is the minimum and maximum over the calibration calls: that takes no memory for
histograms.

Also measured on the trained networks of benchmarks/trained.py, and left out: percentiles of 99.999 (the signal-to-noise
ratio of the outputs gains 0.7 to 0.9 dB, top-1 nothing that 2,560 examples show, and calibration takes twice as long),
entropy (loses 0.9 dB), and bias correction (gains 0.3 dB).

4-bit weights save memory, not time: onnxruntime converts them back for each call. HQQ rounds them better (36.3 dB instead
of 35.0 on a text classifier), but its zero points make the file 16 % slower.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

from exporters.errors import NothingToQuantize, QuantizationError
from exporters.isolation import silent
from exporters.onnx import save
from optimize_export.onnx_runtime import quantization

Kind = Literal["int8-maps", "int8-static", "int8-inputs", "int8-dense", "int8-dynamic", "uint8-dynamic", "int4-weights"]
"""How a file is quantized."""

Calibration = Sequence[Mapping[str, np.ndarray]]
"""Calls: each has one array for every input of the file, by name."""

_PRODUCTS = ("MatMul", "Gemm")
_TYPES: dict[Kind, tuple[str, ...]] = {
    "int8-maps": ("Conv", *_PRODUCTS),
    "int8-static": ("Conv", *_PRODUCTS),
    "int8-inputs": ("Conv", *_PRODUCTS),
    "int8-dense": ("Conv", *_PRODUCTS),
    "int8-dynamic": _PRODUCTS,
    "uint8-dynamic": _PRODUCTS,
    "int4-weights": _PRODUCTS,
}
# Those that round only what a convolution or product reads.
_OF_INPUTS: tuple[Kind, ...] = ("int8-inputs", "int8-dense")
_STATIC: tuple[Kind, ...] = ("int8-maps", "int8-static", *_OF_INPUTS)
# Those that quantize depthwise convolutions, and those that are fastest for networks that have some.
_WITH_DEPTHWISE: tuple[Kind, ...] = ("int8-maps", "int8-inputs")
_FOR_DEPTHWISE: tuple[Kind, ...] = ("int8-maps", *_OF_INPUTS)
# After a convolution with a static range, clamping to that range computes these too.
_FUSED_ACTIVATIONS = ("Relu", "Clip")
_ON_MAPS = ("Add", "Mul", "Sigmoid", "GlobalAveragePool", "AveragePool", "MaxPool")

# Of 32, 64 and 128, 32 was the most accurate, at the same speed. The scales add 1 bit per weight.
_BLOCK = 32

# The share of a file's weights that must be in matrix products for the kinds that quantize nothing else. A classifier
# of images has up to a quarter in its last layer, and gains nothing from that alone.
_SHARE_IN_PRODUCTS = 1 / 3

KINDS: Mapping[str, tuple[Kind, ...]] = {
    "onnx-int8": ("int8-maps", "int8-static"),
    "onnx-int8-dense": ("int8-dense",),
    "onnx-int8-inputs": ("int8-inputs",),
    "onnx-int8-dynamic": ("int8-dynamic", "uint8-dynamic"),
    "onnx-int4": ("int4-weights",),
}
"""How the file of each quantized format may be made, the fastest way first; `kinds` has those that a file gains from."""


def kinds(format: str, source: Path) -> tuple[Kind, ...]:
    """The ways of `KINDS` to make a quantized format from the float32 file `source`, without those that can't be faster."""
    has_depthwise = any(node.op_type == "Conv" and _is_depthwise(node) for node in ir.load(source).graph)
    return tuple(kind for kind in KINDS[format] if kind not in _FOR_DEPTHWISE or has_depthwise)


@dataclass(frozen=True)
class QuantizedFile:
    """A quantized ONNX file."""

    # The file, and its external data if it is large.
    files: tuple[Path, ...]
    kind: Kind
    # Names of nodes of the float file: those that were left in float on request, and those that were quantized.
    kept: tuple[str, ...]
    quantized: tuple[str, ...]


def quantized(
    source: Path, target: Path, kind: Kind, calibration: Calibration = (), *, keep: Collection[str] = ()
) -> QuantizedFile:
    """Write the quantized copy of the float32 file `source` to `target`, large weights to `<target>.data`.

    Inputs, outputs and metadata stay the same. The same arguments give the same bytes.

    Args:
        calibration: calls with typical inputs; only the static kinds need them.
        keep: names of nodes to leave in float. They compute in float, but with these two they may read an activation
            that was rounded for another node: a second copy costs time and gains no accuracy.

    Raises:
        NothingToQuantize: the file has nothing to quantize, or `keep` names all of it.
        QuantizationError: a static kind has no calibration calls, or `keep` names a node that the file doesn't have.
    """
    with prepared(source, target.parent, kind, calibration) as quantizer:
        return quantizer.write(target, keep)


@contextmanager
def prepared(source: Path, folder: Path, kind: Kind, calibration: Calibration) -> Iterator[Quantizer]:
    """A quantizer of the file `source`, with temporary files in `folder`. It calibrates once for all files it writes."""
    model = ir.load(source)
    NameFixPass()(model)
    names = {node.name or "" for node in model.graph}
    _transpose_weights(model)
    chosen = _quantizable(model, kind)
    if kind == "int8-maps":
        _use_integer_kernels(model)
    if kind in _STATIC:
        if not calibration:
            raise QuantizationError("Quantizing activations needs calibration calls: pass some typical inputs.")
        _separate_weights(model, chosen)
    else:
        _split_gemms(model, chosen)
    with TemporaryDirectory(dir=folder, prefix=".quantization-") as work:
        yield Quantizer(model, kind, chosen, names, calibration, Path(work))


@dataclass
class Quantizer:
    """Quantizes one float file, each time with other nodes left in float."""

    _model: ir.Model
    kind: Kind
    quantizable: tuple[str, ...]
    _names: Collection[str]
    _calibration: Calibration
    _work: Path

    def __post_init__(self) -> None:
        self._float = self._work / "float.onnx"
        self._shapes = [value.shape for value in (*self._model.graph.inputs, *self._model.graph.outputs)]
        ir.save(self._model, self._float, external_data="float.onnx.data")

    def write(self, target: Path, keep: Collection[str]) -> QuantizedFile:
        """Write the quantized file to `target`; see `quantized`."""
        if unknown := sorted(set(keep) - set(self._names)):
            raise QuantizationError(f"The file has no node `{unknown[0]}` to leave in float.")
        chosen = tuple(name for name in self.quantizable if name not in keep)
        if not chosen:
            raise NothingToQuantize("All nodes that could be quantized are to be left in float.")
        writers: Mapping[Kind, Callable[[tuple[str, ...]], onnx.ModelProto]] = {
            "int8-maps": self._static,
            "int8-static": self._static,
            "int8-inputs": self._static,
            "int8-dense": self._static,
            "int8-dynamic": self._dynamic,
            "uint8-dynamic": self._dynamic,
            "int4-weights": self._int4,
        }
        with silent():
            model = ir.from_proto(writers[self.kind](chosen))
        model.graph.sort()
        # The header of the float file.
        model.metadata_props.clear()
        model.metadata_props.update(self._model.metadata_props)
        model.doc_string = self._model.doc_string
        model.producer_name, model.producer_version = self._model.producer_name, self._model.producer_version
        for value, shape in zip((*model.graph.inputs, *model.graph.outputs), self._shapes, strict=True):
            value.shape = shape
        folder = self._work / "result"
        folder.mkdir(exist_ok=True)
        target.with_name(f"{target.name}.data").unlink(missing_ok=True)
        files = tuple(path.replace(target.with_name(path.name)) for path in reversed(save(model, folder / target.name)))
        kept = tuple(name for name in self.quantizable if name in keep)
        return QuantizedFile(files[::-1], self.kind, kept, chosen)

    def _static(self, chosen: tuple[str, ...]) -> onnx.ModelProto:
        package, _ = quantization()
        model = onnx.load(self._float)
        convolutions = [node for node in model.graph.node if node.name in chosen and node.op_type == "Conv"]
        maps = {node.output[0] for node in convolutions}
        others = []
        for node in model.graph.node:
            if node.op_type in self._others and not maps.isdisjoint(node.input):
                others.append(node.name)
                if self.kind == "int8-maps":
                    maps.add(node.output[0])
        quantizer = package.QDQQuantizer(
            model,
            True,  # one scale per channel
            True,  # 7 bits
            package.QuantType.QInt8,
            package.QuantType.QUInt8,
            self._ranges,
            [*chosen, *others],
            [],
            [*_TYPES[self.kind], *self._others],
            {"OpTypesToExcludeOutputQuantization": _TYPES[self.kind] if self.kind in _OF_INPUTS else _PRODUCTS},
        )
        quantizer.quantize_model()
        return quantizer.model.model

    @property
    def _others(self) -> tuple[str, ...]:
        """The types of nodes without a weight that are quantized where they read a map."""
        if self.kind in _OF_INPUTS:
            return ()
        return (*_FUSED_ACTIVATIONS, *_ON_MAPS) if self.kind == "int8-maps" else _FUSED_ACTIVATIONS

    @cached_property
    def _ranges(self) -> Any:
        """The range of each activation over the calibration calls."""
        package, _ = quantization()
        calibrator = package.create_calibrator(
            self._float,
            [*_TYPES[self.kind], *self._others],
            augmented_model_path=str(self._work / "augmented.onnx"),
            calibrate_method=package.CalibrationMethod.MinMax,
            use_external_data_format=True,
        )
        for call in self._calibration:
            # `collect_data` keeps all values until it has merged their ranges, so one call at a time takes least memory.
            calibrator.collect_data(_Calls([call]))
        found = calibrator.compute_data()
        for name, data in found.items():
            if not (np.isfinite(data.lowest).all() and np.isfinite(data.highest).all()):
                raise QuantizationError(f"`{name}` is NaN or infinite in a calibration call.")
        return found

    def _dynamic(self, chosen: tuple[str, ...]) -> onnx.ModelProto:
        package, _ = quantization()
        path = self._work / "dynamic.onnx"
        signed = self.kind == "int8-dynamic"
        package.quantize_dynamic(
            self._float,
            path,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            reduce_range=signed,
            weight_type=package.QuantType.QInt8 if signed else package.QuantType.QUInt8,
            nodes_to_quantize=list(chosen),
            use_external_data_format=True,
        )
        return onnx.load(path)

    def _int4(self, chosen: tuple[str, ...]) -> onnx.ModelProto:
        package, blocks = quantization()
        config = blocks.DefaultWeightOnlyQuantConfig(
            block_size=_BLOCK,
            is_symmetric=True,
            quant_format=package.QuantFormat.QOperator,
            op_types_to_quantize=("MatMul",),
        )
        products = {node.name for node in self._model.graph.all_nodes() if node.op_type == "MatMul"}
        quantizer = blocks.MatMulNBitsQuantizer(
            onnx.load(self._float), nodes_to_exclude=sorted(products - set(chosen)), algo_config=config
        )
        quantizer.process()
        return quantizer.model.model


class _Calls:
    """The calibration calls as onnxruntime reads them."""

    def __init__(self, calls: Calibration) -> None:
        self._calls = iter(calls)

    def get_next(self) -> dict[str, np.ndarray] | None:
        call = next(self._calls, None)
        return None if call is None else dict(call)


def _quantizable(model: ir.Model, kind: Kind) -> tuple[str, ...]:
    """The names of the nodes to quantize; NothingToQuantize if there are none, or they hold few of the weights."""
    nodes = [node for node in model.graph if node.op_type in _TYPES[kind] and _is_quantizable(node, kind)]
    if not nodes:
        raise NothingToQuantize(f"The file has no {' or '.join(_TYPES[kind])} with a constant float32 weight.")
    if kind not in _STATIC:
        weights = {value.name: value.const_value for node in nodes if (value := node.inputs[1]) is not None}
        inside = sum(tensor.nbytes for tensor in weights.values() if tensor is not None)
        everything = (value.const_value for value in model.graph.initializers.values())
        share = inside / sum(tensor.nbytes for tensor in everything if tensor is not None)
        if share < _SHARE_IN_PRODUCTS:
            raise NothingToQuantize(f"Only {share:.0%} of the file's weights are in matrix products.")
    return tuple(node.name or "" for node in nodes)


def _is_depthwise(node: ir.Node) -> bool:
    tensor = _constant(node.inputs[1])
    return node.attributes.get_int("group", 1) > 1 and tensor is not None and tensor.shape[1] == 1


def _is_quantizable(node: ir.Node, kind: Kind) -> bool:
    tensor = _constant(node.inputs[1])
    if node.domain or tensor is None or tensor.dtype != ir.DataType.FLOAT or len(tensor.shape) < 2:
        return False
    if node.op_type == "Conv":
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        return (kind in _WITH_DEPTHWISE or not _is_depthwise(node)) and (bias is None or bias.is_initializer())
    if node.op_type == "Gemm":
        get = node.attributes
        plain = not get.get_int("transA", 0) and get.get_float("alpha", 1.0) == get.get_float("beta", 1.0) == 1.0
        return plain and all(value is None or value.is_initializer() for value in node.inputs[2:])
    return len(tensor.shape) == 2


def _use_integer_kernels(model: ir.Model) -> None:
    """Write means of maps and hard activations as nodes for which onnxruntime has integer kernels.

    ReduceMean(x, (2, 3))  →  GlobalAveragePool(x)
    HardSigmoid(x)         →  Clip(x + 3, 0, 6) · 1/6, if its slope is 1/6 and its offset 1/2
    HardSwish(x)           →  x · (Clip(x + 3, 0, 6) · 1/6)
    """
    graph = model.graph
    for node in list(graph):
        x = node.inputs[0] if node.inputs else None
        if x is None or x.dtype != ir.DataType.FLOAT:
            continue
        if node.op_type == "ReduceMean" and _is_mean_of_maps(node):
            new = [ir.node("GlobalAveragePool", [x], name=node.name)]
        elif node.op_type == "HardSwish" or (node.op_type == "HardSigmoid" and _is_hard_sigmoid(node)):
            three, zero, six, sixth = (
                _initializer(graph, f"{node.name}_{name}", np.array(value, np.float32))
                for name, value in (("three", 3.0), ("zero", 0.0), ("six", 6.0), ("sixth", 1 / 6))
            )
            new = [ir.node("Add", [x, three], name=f"{node.name}_add")]
            new.append(ir.node("Clip", [new[-1].outputs[0], zero, six], name=f"{node.name}_clip"))
            new.append(ir.node("Mul", [new[-1].outputs[0], sixth], name=f"{node.name}_sixth"))
            if node.op_type == "HardSwish":
                new.append(ir.node("Mul", [x, new[-1].outputs[0]], name=node.name))
        else:
            continue
        for part in new[:-1]:
            part.outputs[0].name = _free_name(graph, f"{part.name}_output")
            part.outputs[0].type, part.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
        ir.convenience.replace_nodes_and_values(graph, node, [node], new, node.outputs, new[-1].outputs)


def _is_mean_of_maps(node: ir.Node) -> bool:
    x, axes = node.inputs[0], _constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if x is None or x.shape is None or len(x.shape) != 4 or axes is None:
        return False
    return bool(node.attributes.get_int("keepdims", 1)) and sorted(axes.numpy() % 4) == [2, 3]


def _is_hard_sigmoid(node: ir.Node) -> bool:
    slope, offset = node.attributes.get_float("alpha", 0.2), node.attributes.get_float("beta", 0.5)
    return abs(slope - 1 / 6) < 1e-6 and offset == 0.5


def _transpose_weights(model: ir.Model) -> None:
    """MatMul(x, Transpose(W)) → MatMul(x, Wᵀ), with a weight of its own.

    A language model's embedding is also the weight of its last layer, which can have a third of all products.
    """
    graph = model.graph
    for node in list(graph):
        if node.op_type != "Transpose" or list(node.attributes.get_ints("perm", (1, 0))) != [1, 0]:
            continue
        tensor = _constant(weight := node.inputs[0])
        readers = [use for use in node.outputs[0].uses() if use.node.op_type == "MatMul" and use.idx == 1]
        if not readers or weight is None or tensor is None or len(tensor.shape) != 2:
            continue
        transposed = _transposed(graph, weight)
        for use in readers:
            use.node.replace_input_with(1, transposed)
        if not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            graph.remove(node, safe=True)


def _separate_weights(model: ir.Model, chosen: Collection[str]) -> None:
    """Give each of these nodes a weight that no other node reads.

    onnxruntime quantizes a weight for all its readers, along the channels of one of them. The scales are then wrong for
    a MatMul that shares the weight of a transposed Gemm, and a node left in float would read rounded values.
    """
    for node in model.graph:
        if node.name in chosen and (weight := node.inputs[1]) is not None and len(weight.uses()) > 1:
            assert weight.const_value is not None
            node.replace_input_with(1, _initializer(model.graph, f"{weight.name}_copy", weight.const_value.numpy()))


def _split_gemms(model: ir.Model, chosen: Collection[str]) -> None:
    """Gemm(x, W, b) → Add(MatMul(x, W), b), where W is transposed if the Gemm does so; the MatMul keeps the name.

    onnxruntime quantizes the weights of a MatMul only. Its own rewrite also changes a transposed weight for the other
    nodes that read it.
    """
    graph = model.graph
    for node in list(graph):
        if node.op_type != "Gemm" or node.name not in chosen:
            continue
        x, weight, *bias = node.inputs
        assert weight is not None
        if node.attributes.get_int("transB", 0):
            weight = _transposed(graph, weight)
        output = node.outputs[0]
        product = ir.node("MatMul", [x, weight], name=node.name)
        product.outputs[0].name = _free_name(graph, f"{output.name}_product")
        new = [product]
        if bias and bias[0] is not None:
            new.append(ir.node("Add", [product.outputs[0], bias[0]], name=f"{node.name}_bias"))
        result = new[-1].outputs[0]
        ir.convenience.replace_nodes_and_values(graph, node, [node], new, [output], [result])


def _constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initializer that a caller can't replace."""
    return None if value is None or not value.is_initializer() or value.is_graph_input() else value.const_value


def _transposed(graph: ir.Graph, weight: ir.Value) -> ir.Value:
    assert weight.const_value is not None
    return _initializer(graph, f"{weight.name}_transposed", weight.const_value.numpy().T)


def _initializer(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    value = ir.Value(name=_free_name(graph, name))
    value.const_value = ir.tensor(np.ascontiguousarray(array), name=value.name)
    graph.register_initializer(value)
    return value


def _free_name(graph: ir.Graph, name: str) -> str:
    taken = {value.name for node in graph for value in node.outputs} | set(graph.initializers)
    while name in taken:
        name += "_"
    return name
