"""ONNX: a file for onnxruntime and every other ONNX runtime.

Three routes, in order: torch's exporter, the same without its optimizer, and the old exporter based on TorchScript. A
file is accepted if the ONNX checker passes, its open dims are those that change in the model, and onnxruntime
reproduces the model's values at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import onnx
import onnx_ir as ir
import torch
from google.protobuf.message import DecodeError

from exporters.base import Artifact, Exporter, ExportRequest, Limit, LoadedArtifact, TensorSpec
from exporters.errors import MetadataError, RouteRefused, refusing
from exporters.evidence import Evidence, gather
from exporters.file_values import FileValues, Program
from exporters.isolation import silent
from exporters.onnx_captures import Captured, by_dynamo, by_torchscript
from exporters.onnx_files import save
from exporters.onnx_pads import keep_pads
from exporters.onnx_session import LoadedOnnx, on_cpu, session_for_proof
from exporters.onnx_values import OnnxValues
from exporters.proof import prove_file
from exporters.routes import Route, first_right

# Operators whose number of output rows depends on the data. Equal sizes at all calls don't prove that the size is
# constant.
_DATA_DEPENDENT = frozenset({"NonZero", "Unique", "Compress", "NonMaxSuppression"})

# The first IR version that supports functions.
_IR_WITH_FUNCTIONS = 8


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
                return self._proven(name, captures[name], request, evidence, folder, programs, limits)

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

    def _proven(
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
    model.doc_string = None
    model.metadata_props.clear()
    graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for graph in graphs:
        graph.doc_string = None
        graph.metadata_props.clear()
        for value in graph.inputs:
            _strip_value(value)
        for index, node in enumerate(graph.all_nodes()):
            node.doc_string = None
            node.metadata_props.clear()
            node.name = node.name or f"{node.op_type}_{index}"
            for value in node.outputs:
                _strip_value(value)
    for initializer in model.graph.initializers.values():
        _strip_value(initializer)


def _strip_value(value: ir.Value) -> None:
    value.doc_string = None
    value.metadata_props.clear()


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
