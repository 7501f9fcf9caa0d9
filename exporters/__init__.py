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

_HOMES = {
    "AotiExporter": "exporters.aoti",
    "Adapter": "exporters.base",
    "Artifact": "exporters.base",
    "Exporter": "exporters.base",
    "ExportRequest": "exporters.base",
    "LoadedArtifact": "exporters.base",
    "TensorSpec": "exporters.base",
    "ExporterError": "exporters.errors",
    "ExportError": "exporters.errors",
    "MetadataError": "exporters.errors",
    "OtherMachine": "exporters.errors",
    "ProviderFallback": "exporters.errors",
    "RouteRefused": "exporters.errors",
    "StructureError": "exporters.errors",
    "UnknownFormat": "exporters.errors",
    "UnknownOpset": "exporters.errors",
    "WrongFile": "exporters.errors",
    "refusing": "exporters.errors",
    "Evidence": "exporters.evidence",
    "gather": "exporters.evidence",
    "captured": "exporters.exported_program",
    "conditions_of_program": "exporters.exported_program",
    "silent": "exporters.isolation",
    "OnnxExporter": "exporters.onnx",
    "prove_file": "exporters.proof",
    "Pt2Exporter": "exporters.pt2",
    "exporter_named": "exporters.registry",
    "exporter_names": "exporters.registry",
    "load_artifact": "exporters.registry",
    "Route": "exporters.routes",
    "first_right": "exporters.routes",
    "TorchScriptExporter": "exporters.torchscript",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
