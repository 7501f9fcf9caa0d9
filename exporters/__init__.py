"""Export models to files: formats, requests, artifacts and errors.

A format of another package is a subclass of `Exporter`. Its `export` gathers the evidence of the request (`gather`)
and takes the shared capture (`captured`). It writes and proves its files in routes (`Route`, `refusing`, `prove_file`),
and `first_right` returns the first route whose files are right. `examples/openvino_exporter` is a complete example.
"""

from exporters.aoti import AotiExporter
from exporters.base import Adapter, Artifact, Exporter, ExportRequest, LoadedArtifact, TensorSpec
from exporters.errors import (
    ExporterError,
    ExportError,
    MetadataError,
    OtherMachine,
    ProviderFallback,
    RouteRefused,
    StructureError,
    UnknownFormat,
    UnknownOpset,
    WrongFile,
    refusing,
)
from exporters.evidence import Evidence, gather
from exporters.exported_program import captured, conditions_of_program
from exporters.isolation import silent
from exporters.onnx import OnnxExporter
from exporters.proof import prove_file
from exporters.pt2 import Pt2Exporter
from exporters.registry import exporter_named, exporter_names, load_artifact
from exporters.routes import Route, first_right
from exporters.torchscript import TorchScriptExporter

__all__ = [
    "Adapter",
    "AotiExporter",
    "Artifact",
    "Evidence",
    "ExportError",
    "ExportRequest",
    "Exporter",
    "ExporterError",
    "LoadedArtifact",
    "MetadataError",
    "OnnxExporter",
    "OtherMachine",
    "ProviderFallback",
    "Pt2Exporter",
    "Route",
    "RouteRefused",
    "StructureError",
    "TensorSpec",
    "TorchScriptExporter",
    "UnknownFormat",
    "UnknownOpset",
    "WrongFile",
    "captured",
    "conditions_of_program",
    "exporter_named",
    "exporter_names",
    "first_right",
    "gather",
    "load_artifact",
    "prove_file",
    "refusing",
    "silent",
]
