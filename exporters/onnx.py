"""ONNX: a file for onnxruntime and every other ONNX runtime.

Three routes, in order: torch's exporter, the same without its optimizer, and the old exporter based on TorchScript. A
file is accepted if the ONNX checker passes, its open dims are those that change in the model, and onnxruntime
reproduces the model's values at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import onnx
import onnx_ir as ir
import torch
import torch.onnx
from google.protobuf.message import DecodeError
from onnx_ir.passes.common import NameFixPass

from exporters.base import Artifact, Exporter, ExportRequest, Limit, LoadedArtifact, TensorSpec, clones
from exporters.conditions import Condition
from exporters.errors import MetadataError, RouteRefused, UnknownOpset, refusing
from exporters.evidence import Evidence, gather
from exporters.exported_program import conditions_of_program, named_dims, shared_program
from exporters.file_values import FileValues, Program
from exporters.isolation import silent
from exporters.onnx_operators import keep_pads, translations
from exporters.onnx_session import LoadedOnnx, OnnxValues, on_cpu, session_for_proof
from exporters.proof import prove_file
from exporters.routes import Route, first_right
from exporters.torch_private import with_kept_onnx_registry, without_onnx_log
from exporters.trace_conditions import watched
from optimize_export.onnx_runtime import ort
from optimize_export.structure import unique

# Operators whose number of output rows depends on the data. Equal sizes at all calls don't prove that the size is
# constant.
_DATA_DEPENDENT = frozenset({"NonZero", "Unique", "Compress", "NonMaxSuppression"})

# The first IR version that supports functions.
_IR_WITH_FUNCTIONS = 8

# Bytes of weights from which they are saved as external data. Protobuf can't hold more than 2 GiB, and long before that
# its readers keep three copies of a file. External data is read tensor by tensor.
EXTERNAL_DATA_FROM = 2**25

# Not a public API. If a version of torch has it elsewhere, its exporters themselves report what they can't write.
limits: Any = getattr(torch.onnx, "_constants", None)

Captured = tuple[ir.Model, Sequence[Condition], Program | None]
"""The model in the file, the conditions on the batch, and the program it was made from, where there is one."""


class OnnxExporter(Exporter):
    """The exporter to `model.onnx`, with large weights in `model.onnx.data` next to it."""

    name: ClassVar[str] = "onnx"
    file_name: ClassVar[str] = "model.onnx"

    def export(self, request: ExportRequest, directory: Path) -> Artifact:
        evidence = gather(request)
        programs: dict[str, Program | None] = {}
        limits: list[Limit] = []
        captures: dict[str, Callable[[Path], Captured]] = {
            "dynamo": lambda _: by_dynamo(evidence, request.opset, optimize=True),
            "dynamo-unoptimized": lambda _: by_dynamo(evidence, request.opset, optimize=False),
            "torchscript": lambda folder: by_torchscript(evidence, request.opset, folder),
        }

        def route(name: str) -> Route:
            def write(folder: Path) -> tuple[Path, ...]:
                limits.clear()
                return self._write_proven(name, captures[name], request, evidence, folder, programs, limits)

            return Route(name, write)

        def known(artifact: Artifact) -> Artifact:
            header = onnx.load(artifact.path, load_external_data=False)
            inputs, outputs = _read_specs(header.graph, evidence)
            return replace(
                artifact,
                inputs=inputs,
                outputs=outputs,
                opset=_opset(header),
                program=programs[artifact.route],
                limits=tuple(limits),
                values=self.values,
                unoptimized=self.load_unoptimized,
            )

        return first_right(self, request, evidence, [route(name) for name in captures], directory, known)

    @staticmethod
    def load(path: Path, device: str) -> LoadedArtifact:
        return LoadedOnnx(path, torch.device(device))

    @staticmethod
    def load_unoptimized(path: Path, device: str) -> LoadedArtifact:
        """Load the file with onnxruntime's graph optimizations off."""
        if device == "cpu":
            return on_cpu(path, optimize=False)
        return LoadedOnnx(path, torch.device(device), optimize=False)

    @staticmethod
    def read_metadata(path: Path) -> Mapping[str, str]:
        try:
            header = onnx.load(path, load_external_data=False)
        except DecodeError as error:
            raise MetadataError(f"The metadata of {path.name} can't be read: it isn't an ONNX file.") from error
        return {entry.key: entry.value for entry in header.metadata_props}

    @staticmethod
    def values(path: Path, device: str, names: Collection[str] | None) -> FileValues:
        """Load the file so that it returns the values with these names; None means all."""
        return OnnxValues(path, torch.device(device), names)

    def _write_proven(
        self,
        route: str,
        capture: Callable[[Path], Captured],
        request: ExportRequest,
        evidence: Evidence,
        folder: Path,
        programs: dict[str, Program | None],
        limits: list[Limit],
    ) -> tuple[Path, ...]:
        _refuse_what_no_runtime_gives(evidence)
        with evidence.undisturbed(), refusing(), silent():
            model, conditions, program = capture(folder)
            programs[route] = program
            _strip(model)
            keep_pads(model)
            _name_open_dims(model, evidence)
            model.metadata_props.update(evidence.metadata)
            if request.opset is not None:
                model.ir_version = min(model.ir_version, _oldest_ir(model, request.opset))
        with refusing("the file can't be written"):
            files = save(model, folder / self.file_name)
        _check_header(onnx.load(files[0], load_external_data=False), request.opset, evidence)
        with refusing("the ONNX checker rejects the file"), silent():
            onnx.checker.check_model(str(files[0]), full_check=True)
        prove_file(evidence, session_for_proof(files[0]), files, conditions, limits)
        return files


def by_dynamo(evidence: Evidence, opset: int | None, *, optimize: bool) -> Captured:
    # These only name the dims: they are open in the capture.
    names = tuple(named_dims(spec) or None for spec in evidence.input_specs)
    with with_kept_onnx_registry():
        program = torch.onnx.export(
            shared_program(evidence),
            opset_version=opset,
            dynamo=True,
            dynamic_shapes=names if any(names) else None,
            custom_translation_table=translations(),
            optimize=optimize,
            verbose=False,
        )
    if program is None or program.exported_program is None:
        raise RouteRefused("torch.onnx.export returned no program")
    exported = program.exported_program
    renamed = _name_ends(program.model, evidence.adapter.input_names, evidence.adapter.output_names)
    known = Program.of(exported, evidence.adapter.model, renamed)
    return program.model, conditions_of_program(exported, evidence), known


def _name_ends(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> dict[str, str]:
    """Name the inputs and outputs of a file, and rename the values inside that have one of these names.

    torch's exporter renames only the ends, although it names the values inside after operations: `mean`, `relu`.

    Returns:
        The new names by torch's names.
    """
    graph = model.graph
    seen = {*graph.inputs, *graph.initializers.values()}
    for index, value in enumerate(graph.outputs):
        # A value with another name of its own, such as an input that is returned, gets the second one from a node.
        if value in seen:
            copy = ir.Value(name=f"{value.name}_output_{index}", type=value.type, shape=value.shape)
            graph.append(ir.Node("", "Identity", [value], outputs=[copy]))
            graph.outputs[index] = copy
        seen.add(graph.outputs[index])
    ends = dict(zip((*graph.inputs, *graph.outputs), (*inputs, *outputs), strict=True))
    inside = [
        *(value for each in (graph, *graph.subgraphs()) for value in (*each.initializers.values(), *each.inputs)),
        *(value for node in graph.all_nodes() for value in node.outputs),
    ]
    inside = [value for value in dict.fromkeys(inside) if value not in ends and value.name]
    kept = [value.name for value in inside if value.name not in ends.values()]
    changed = [value for value in inside if value.name in ends.values()]
    free = unique([value.name for value in changed], {*ends.values(), *kept})
    renamed = {value.name: name for value, name in zip((*changed, *ends), (*free, *ends.values()), strict=True)}
    for value, name in zip((*changed, *ends), (*free, *ends.values()), strict=True):
        value.name = name
    return renamed


def by_torchscript(evidence: Evidence, opset: int | None, folder: Path) -> Captured:
    adapter = evidence.adapter
    axes = {spec.name: named_dims(spec) for spec in (*evidence.input_specs, *evidence.output_specs)}
    # Export to a file: above 2 GiB this exporter writes the weights next to it. The folder is removed after the export.
    raw = folder / "raw"
    raw.mkdir()
    # By default the exporter switches a module in training mode to eval.
    mode: dict[str, Any] = {"training": torch.onnx.TrainingMode.PRESERVE} if adapter.training else {}
    with without_onnx_log(), watched(evidence) as conditions:
        torch.onnx.export(
            adapter,
            clones(evidence.inputs[0]),
            str(raw / "model.onnx"),
            input_names=list(adapter.input_names),
            output_names=list(adapter.output_names),
            opset_version=opset,
            dynamo=False,
            dynamic_axes={name: dims for name, dims in axes.items() if dims},
            verbose=False,
            **mode,
        )
    return ir.load(raw / "model.onnx"), conditions(), None


def _refuse_what_no_runtime_gives(evidence: Evidence) -> None:
    for side, specs in (("input", evidence.input_specs), ("output", evidence.output_specs)):
        for spec in specs:
            if spec.dtype.startswith("complex"):
                raise RouteRefused(
                    f"{side} `{spec.name}` is {spec.dtype}, which ONNX runtimes don't support: use its real and "
                    "imaginary parts in the model, as torch.view_as_real returns them, or export to torchscript or "
                    "pt2"
                )
    if evidence.draws:
        raise RouteRefused(
            f"the model draws random numbers at {evidence.draws}, and an ONNX runtime draws different ones: make "
            "them an input, or export to torchscript or pt2, which draw the same as torch"
        )


def _strip(model: ir.Model) -> None:
    """Remove details of the build machine and of the model's source, and name every node."""
    # onnx_ir's ClearMetadataAndDocStringPass leaves those of the model and of values.
    graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    nodes = [node for graph in graphs for node in graph.all_nodes()]
    values = [value for owner in (*graphs, *nodes) for value in (*owner.inputs, *owner.outputs) if value is not None]
    for each in (model, *graphs, *nodes, *values, *model.graph.initializers.values()):
        each.doc_string = None
        each.metadata_props.clear()
    NameFixPass()(model)


def _name_open_dims(model: ir.Model, evidence: Evidence) -> None:
    """Set the output dims to the sizes and names seen in the model. These are only labels; the values prove them.

    The old exporter loses sizes and invents names for them. A fixed dim that must be open stays fixed: it reveals a
    batch that was baked in.
    """
    data_dependent = any(node.op_type in _DATA_DEPENDENT for node in model.graph.all_nodes())
    symbols = {size for spec in evidence.input_specs for size in spec.shape if isinstance(size, str)}
    for value, spec in zip(model.graph.outputs, evidence.output_specs, strict=True):
        shape = value.shape
        if shape is None or len(shape) != len(spec.shape):
            value.shape = ir.Shape(spec.shape)
            continue
        dims: list[int | str] = []
        for dim, (found, size) in enumerate(zip(shape, spec.shape, strict=True)):
            if isinstance(found, int):
                dims.append(found)
            elif size in symbols or (isinstance(size, int) and not data_dependent):
                dims.append(size)
            else:
                dims.append(found.value or f"{spec.name}_dim_{dim}")
        value.shape = ir.Shape(dims)


def _oldest_ir(model: ir.Model, opset: int) -> int:
    """The lowest IR version that supports the opset and the model's functions.

    A runtime that knows no newer opset can't read a newer IR version.
    """
    oldest = int(onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)]))
    return max(oldest, _IR_WITH_FUNCTIONS) if model.functions else oldest


def _check_header(header: onnx.ModelProto, opset: int | None, evidence: Evidence) -> None:
    """Refuse a file with another opset than requested, or with wrong dims.

    torch silently keeps its own opset where it can't convert the model to the requested one.
    """
    if opset is not None and (written := _opset(header)) != opset:
        raise RouteRefused(f"torch's exporter writes opset {written} instead of {opset}")
    _check_dims(header.graph, evidence)


def _opset(header: onnx.ModelProto) -> int | None:
    return next((entry.version for entry in header.opset_import if entry.domain in ("", "ai.onnx")), None)


def _check_dims(graph: onnx.GraphProto, evidence: Evidence) -> None:
    """Refuse a file whose open dims aren't those that change in the model."""
    for side, values, specs in (
        ("input", graph.input, evidence.input_specs),
        ("output", graph.output, evidence.output_specs),
    ):
        names = [value.name for value in values]
        if names != [spec.name for spec in specs]:
            raise RouteRefused(f"the file's {side}s are {', '.join(names)}")
        for value, spec in zip(values, specs, strict=True):
            dims = _dims(value)
            if len(dims) != len(spec.shape):
                raise RouteRefused(f"{side} `{spec.name}` has {len(dims)} dims instead of {len(spec.shape)}")
            for dim, (found, expected) in enumerate(zip(dims, spec.shape, strict=True)):
                if isinstance(expected, str) and isinstance(found, int):
                    raise RouteRefused(f"dim {dim} of {side} `{spec.name}` is fixed to {found}, but must be open")
                if isinstance(expected, int) and isinstance(found, int) and found != expected:
                    raise RouteRefused(f"dim {dim} of {side} `{spec.name}` is {found} instead of {expected}")


def _read_specs(graph: onnx.GraphProto, evidence: Evidence) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The signature in the file; an open dim may be an expression such as "2*batch"."""
    inputs, outputs = (
        tuple(replace(spec, shape=_dims(value)) for value, spec in zip(values, specs, strict=True))
        for values, specs in ((graph.input, evidence.input_specs), (graph.output, evidence.output_specs))
    )
    return inputs, outputs


def _dims(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    dims = value.type.tensor_type.shape.dim
    return tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in dims)


def save(model: ir.Model, path: Path) -> tuple[Path, ...]:
    """Write `model` to `path`, large weights to `<path>.data`; return the files.

    The shapes of weights are removed from `model`, also from its list of shapes in the file. The weights themselves
    hold them, and tools change a weight without that list: `onnxruntime.quantization` transposes the weight of a Gemm
    and then fails, since the list still has the old shape.
    """
    size = 0
    for graph in model.graphs():
        for value in graph.initializers.values():
            size += 0 if value.const_value is None else value.const_value.nbytes
            if not value.is_graph_input():
                value.shape = value.type = None
    if size < EXTERNAL_DATA_FROM:
        ir.save(model, path)
        return (path,)
    weights = path.with_name(f"{path.name}.data")
    ir.save(model, path, external_data=weights.name)
    return (path, weights)


def refuse_opset(opset: object, formats: Sequence[str]) -> None:
    """Raise UnknownOpset if no file can be written with that opset, or if no requested format has an opset.

    Args:
        opset: the user's choice; None means the exporter's default and is always valid.
        formats: the names of the requested formats.
    """
    if opset is None:
        return
    if not isinstance(opset, int) or isinstance(opset, bool):
        raise UnknownOpset(f"The opset must be a whole number, not {opset!r}.")
    if "onnx" not in formats:
        raise UnknownOpset(
            f"opset applies to ONNX files only, but the formats are {', '.join(formats)}: add onnx, or leave out opset."
        )
    known = opsets()
    if opset not in known:
        raise UnknownOpset(
            f"Opset {opset} isn't available here: torch's exporters write, and onnxruntime {ort.__version__} reads, "
            f"opsets {known[0]} to {known[-1]}."
        )


@cache
def opsets() -> range:
    """The opsets that torch's exporters write and the installed onnxruntime reads."""
    # onnxruntime doesn't report its newest opset, so try to load a file.
    known = getattr(limits, "ONNX_MAX_OPSET", onnx.defs.onnx_opset_version())
    newest = next(opset for opset in range(known, 0, -1) if is_read(opset))
    # Below the base opset, the weights are inputs of the file.
    return range(getattr(limits, "ONNX_BASE_OPSET", 9), newest + 1)


def is_read(opset: int) -> bool:
    """Whether the installed onnxruntime loads a file with an opset."""
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["y"])],
        "probe",
        [value("x", onnx.TensorProto.FLOAT, [1])],
        [value("y", onnx.TensorProto.FLOAT, [1])],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=8)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except ort.capi.onnxruntime_pybind11_state.Fail:
        return False
    return True
