"""Export models to files: formats, requests, artifacts and errors.

A format of another package is a subclass of `Exporter`. Its `export` gathers the evidence of the request (`gather`)
and takes the shared capture (`captured`). It writes and proves its files in routes (`Route`, `refusing`, `prove_file`),
and `first_right` returns the first route whose files are right. `examples/openvino_exporter` is a complete example.

The names below are imported when they are first used, because a machine that only runs ONNX files has no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from exporters.evidence import Evidence, gather
    from exporters.exported_program import captured, conditions_of_program
    from exporters.isolation import refusing, silent
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

_NAMES = {
    "exporters.aoti": "AotiExporter",
    "exporters.base": "Adapter Artifact Exporter ExportRequest LoadedArtifact TensorSpec",
    "exporters.errors": "ExporterError ExportError MetadataError OtherMachine ProviderFallback RouteRefused StructureError UnknownFormat UnknownOpset WrongFile",
    "exporters.evidence": "Evidence gather",
    "exporters.exported_program": "captured conditions_of_program",
    "exporters.isolation": "refusing silent",
    "exporters.onnx": "OnnxExporter",
    "exporters.proof": "prove_file",
    "exporters.pt2": "Pt2Exporter",
    "exporters.registry": "exporter_named exporter_names load_artifact",
    "exporters.routes": "Route first_right",
    "exporters.torchscript": "TorchScriptExporter",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
