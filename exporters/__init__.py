"""What can be written to disk."""

from exporters.base import Adapter, Artifact, Exporter, ExportRequest, LoadedArtifact, TensorSpec
from exporters.errors import (
    ExporterError,
    ExportError,
    ProviderFallback,
    RouteRefused,
    StructureError,
    UnknownFormat,
)
from exporters.onnx import OnnxExporter
from exporters.registry import exporter_named, exporter_names, load_artifact
from exporters.torchscript import TorchScriptExporter

__all__ = [
    "Adapter",
    "Artifact",
    "ExportError",
    "ExportRequest",
    "Exporter",
    "ExporterError",
    "LoadedArtifact",
    "OnnxExporter",
    "ProviderFallback",
    "RouteRefused",
    "StructureError",
    "TensorSpec",
    "TorchScriptExporter",
    "UnknownFormat",
    "exporter_named",
    "exporter_names",
    "load_artifact",
]
