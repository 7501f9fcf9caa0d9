"""The errors of the exporters, below `ExporterError`. Each message is one sentence for the user."""

from __future__ import annotations

import torch

from optimize_export.errors import ExporterError, StructureError

# Exported again; the other errors are defined here.
__all__ = ["ExporterError", "StructureError"]


class UnknownFormat(ExporterError):
    """There is no exporter with that name."""


class UnknownOpset(ExporterError):
    """No file can be written with that opset, or no requested format has an opset."""


class MetadataError(ExporterError):
    """A file can't hold a metadata key or text, or its metadata can't be read."""


class RouteRefused(ExporterError):
    """One route to a format failed to produce a right file; the exporter tries the next one."""

    def __init__(self, message: str, *, size: str = "") -> None:
        super().__init__(message)
        # The name of the open size that causes the problem, such as "batch"; "" if it is something else.
        self.size = size


class WrongFile(RouteRefused):
    """The file of one route computes something else than the model, or raises where the model doesn't."""

    def __init__(self, message: str, inputs: tuple[torch.Tensor, ...], *, size: str = "") -> None:
        super().__init__(message, size=size)
        # The file's inputs that show this.
        self.inputs = inputs


class RuntimeCrashed(RouteRefused):
    """The runtime crashes, hangs or is killed on the file of one route; this happened in a child process."""


class ExportError(ExporterError):
    """Every route to a format failed; the message names each route with its reason, and `reasons` has these alone."""

    def __init__(self, message: str, reasons: str = "") -> None:
        super().__init__(message)
        self.reasons = reasons


class ProviderFallback(ExporterError):
    """Nodes of an ONNX session run on the CPU although the GPU was requested."""


class QuantizationError(ExporterError):
    """A file can't be quantized as requested."""


class NothingToQuantize(QuantizationError):
    """The file has no nodes, or too few weights, that this kind of quantization applies to."""


class OtherMachine(ExporterError):
    """A file made for one device and processor was loaded on another."""
