"""Export models to files: formats, requests, artifacts and errors."""

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
)
from exporters.onnx import OnnxExporter
from exporters.pt2 import Pt2Exporter
from exporters.registry import exporter_named, exporter_names, load_artifact
from exporters.torchscript import TorchScriptExporter

__all__ = [
    "Adapter",
    "AotiExporter",
    "Artifact",
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
    "RouteRefused",
    "StructureError",
    "TensorSpec",
    "TorchScriptExporter",
    "UnknownFormat",
    "UnknownOpset",
    "WrongFile",
    "exporter_named",
    "exporter_names",
    "load_artifact",
]
