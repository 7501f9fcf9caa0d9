"""Find the nodes that quantization harms most, and leave them in float until the file is accurate enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

from exporters.errors import QuantizationError
from exporters.onnx_plain import session_options
from exporters.onnx_quantization import Calibration, Kind, QuantizedFile, prepared
from optimize_export.onnx_runtime import ort

# Each call takes a run of the file per node, so one row of two calls must do.
_CALLS = 2
_SWITCHES = "quantization_switches"
# The part of the nodes from which a quantized file is no longer worth its while.
_MOST_KEPT = 1 / 4


@dataclass(frozen=True)
class Search:
    """The outcome of `within_budget`."""

    # The first accepted file; None if none was.
    accepted: QuantizedFile | None
    # The last file written, with the most nodes in float. It is the one on disk.
    last: QuantizedFile
    # How many files were written.
    tried: int
    # By node, the error at the file's outputs if only that node is quantized, as in `sensitivities`; empty if the first
    # file was accepted.
    errors: Mapping[str, float] = field(default_factory=dict)


def within_budget(
    source: Path,
    target: Path,
    kind: Kind,
    calibration: Calibration,
    accept: Callable[[Path], bool],
    *,
    check: Callable[[], None] = lambda: None,
) -> Search:
    """Quantize `source` to `target` with as few nodes in float as `accept` allows.

    Each refused file is replaced by one with more of its most sensitive nodes in float: 1, 2, 4, 8, … and at last a
    quarter of the nodes.

    Args:
        calibration: calls with typical inputs, for the ranges of activations and for the errors of nodes.
        accept: judges the file at the path it gets, which is `target`.
        check: is called between the steps; what it raises ends the search.

    Raises:
        QuantizationError: as `quantized`; also without calibration calls, if the first file is refused.
    """
    with prepared(source, target.parent, kind, calibration) as quantizer:
        record = quantizer.write(target, ())
        if accept(target):
            return Search(record, record, 1)
        errors = dict(sensitivities(source, record, calibration, check))
        worst = list(errors)
        tried = 1
        most = min(max(1, int(len(worst) * _MOST_KEPT)), len(worst) - 1)
        for count in sorted({min(2**step, most) for step in range(most)}):
            record, tried = quantizer.write(target, worst[:count]), tried + 1
            if accept(target):
                return Search(record, record, tried, errors)
        return Search(None, record, tried, errors)


def sensitivities(
    float_file: Path, quantized_file: QuantizedFile, calibration: Calibration, check: Callable[[], None] = lambda: None
) -> list[tuple[str, float]]:
    """The quantized nodes with the error at the file's outputs if only that node is quantized, worst first.

    The error is Σ (y - q)² / Σ y², summed over the calls and the float outputs; -10 log10 of it is the signal-to-noise
    ratio in dB. This takes about two runs of the file per node. The errors at the nodes' own outputs would take one for
    all nodes, but an error there may vanish or grow on its way to the outputs.
    """
    exact, rounded = ir.load(float_file), ir.load(quantized_file.files[0])
    NameFixPass()(exact)
    if not calibration:
        raise QuantizationError("Measuring the errors of nodes needs calibration calls: pass some typical inputs.")
    calls = [_first_row(exact, call) for call in calibration[:_CALLS]]
    _add_switches(exact, rounded, quantized_file.quantized)
    with TemporaryDirectory(dir=quantized_file.files[0].parent, prefix=".sensitivity-") as work:
        path = Path(work) / "switches.onnx"
        ir.save(exact, path, external_data="switches.onnx.data")
        session = ort.InferenceSession(str(path), session_options(), providers=["CPUExecutionProvider"])
    errors = np.zeros(len(quantized_file.quantized))
    for call in calls:
        reference = session.run(None, {**call, _SWITCHES: np.zeros(len(errors), bool)})
        for index in range(len(errors)):
            check()
            outputs = session.run(None, {**call, _SWITCHES: np.arange(len(errors)) == index})
            errors[index] += sum(map(_relative_power, outputs, reference))
    pairs = zip(quantized_file.quantized, errors.tolist(), strict=True)
    return sorted(pairs, key=lambda pair: -pair[1])


def _first_row(model: ir.Model, call: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """The first row of a call if all inputs have the same open batch, otherwise the whole call."""
    firsts = {value.shape[0] if value.shape else None for value in model.graph.inputs}
    is_open = len(firsts) == 1 and isinstance(next(iter(firsts)), ir.SymbolicDim)
    return {name: value[:1] for name, value in call.items()} if is_open else call


def _relative_power(output: np.ndarray, reference: np.ndarray) -> float:
    """Σ (output - reference)² / Σ reference² of finite values; infinite if one is NaN where the other isn't."""
    if not np.issubdtype(reference.dtype, np.floating):
        return 0.0
    finite = np.isfinite(reference)
    if not np.isfinite(output[finite]).all():
        return float("inf")
    y, q = reference[finite].astype(float), output[finite].astype(float)
    power = float(np.sum(y**2))
    return float(np.sum((q - y) ** 2)) / power if power else 0.0


def _add_switches(exact: ir.Model, rounded: ir.Model, names: tuple[str, ...]) -> None:
    """Add an input of bools to `exact`, one for each node: whether the node's quantized form is used.

    y = node(x)    becomes    y = Where(switch, quantized node(x), node(x))
    """
    graph = exact.graph
    exact.opset_imports.update(rounded.opset_imports)
    exact.ir_version = max(exact.ir_version, rounded.ir_version)
    copier = _Copier(exact, rounded)
    switches = ir.Value(name=_SWITCHES, shape=ir.Shape([len(names)]), type=ir.TensorType(ir.DataType.BOOL))
    graph.inputs.append(switches)
    for index, name in enumerate(names):
        y, q = copier.pair(name)
        place = ir.Value(name=f"{_SWITCHES}_{index}", const_value=ir.tensor(np.array(index, np.int64)))
        graph.register_initializer(place)
        switch = ir.node("Gather", [switches, place])
        choice = ir.node("Where", [switch.outputs[0], q, y])
        graph.extend([switch, choice])
        chosen = choice.outputs[0]
        chosen.type = ir.TensorType(ir.DataType.FLOAT)
        ir.convenience.replace_all_uses_with(y, chosen, replace_graph_outputs=True)
        choice.replace_input_with(2, y)
        copier.replace(y, chosen)
    graph.sort()


class _Copier:
    """Copies the quantized form of nodes from one graph to the float graph, where they read the float values."""

    def __init__(self, exact: ir.Model, rounded: ir.Model) -> None:
        self._graph = exact.graph
        self._outputs = {node.name: node.outputs[0].name for node in exact.graph}
        self._exact = dict(exact.graph.initializers)
        self._exact |= {value.name or "": value for value in exact.graph.inputs}
        self._exact |= {value.name or "": value for node in exact.graph for value in node.outputs}
        self._nodes = {node.name: node for node in rounded.graph}
        self._rounded = {value.name: value for node in rounded.graph for value in node.outputs}
        self._copies: dict[ir.Value, ir.Value] = {}
        self._suffix = ""

    def pair(self, name: str) -> tuple[ir.Value, ir.Value]:
        """The exact output of a node, and the output of its quantized copy.

        With static ranges, the node has the same name in both files. The output of a convolution may be that of a Relu
        which the range replaces, and it is rounded by a pair of QuantizeLinear and DequantizeLinear. Such a pair after
        a MatMul belongs to the next node.
        """
        node = self._nodes.get(name)
        if node is None or node.op_type not in ("Conv", "MatMul", "Gemm"):
            value = end = self._rounded[self._outputs[name]]
        else:
            value = node.outputs[0]
            end = _dequantized(value) if node.op_type == "Conv" else value
        own = {value.name, end.name, self._outputs[name]}
        exact = next(self._exact[found.name] for found in (value, end) if found.name in self._exact)
        # A copy isn't shared by nodes: a pair that rounds the output of one is also the input of the next.
        self._copies, self._suffix = {}, f"_copy_for_{name}"
        return exact, self._copy(end, own)

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        self._exact[old.name or ""] = new

    def _copy(self, value: ir.Value, own: set[str | None]) -> ir.Value:
        if value.name in self._exact and value.name not in own:
            return self._exact[value.name]
        if value in self._copies:
            return self._copies[value]
        node = value.producer()
        if node is None:
            copy = ir.Value(name=f"{value.name}{self._suffix}", const_value=value.const_value)
            self._graph.register_initializer(copy)
            self._copies[value] = copy
            return copy
        inputs = [None if used is None else self._copy(used, own) for used in node.inputs]
        outputs = [ir.Value(name=f"{made.name}{self._suffix}") for made in node.outputs]
        self._graph.append(ir.Node(node.domain, node.op_type, inputs, node.attributes.values(), outputs=outputs))
        self._copies.update(zip(node.outputs, outputs, strict=True))
        return self._copies[value]


def _dequantized(value: ir.Value) -> ir.Value:
    """The value after it was rounded by QuantizeLinear and DequantizeLinear; the value itself if it isn't."""
    for use in value.uses():
        if use.node.op_type == "QuantizeLinear":
            for back in use.node.outputs[0].uses():
                return back.node.outputs[0]
    return value
