"""The errors of the exporters, below `ExporterError`. Each message is one sentence for the user."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from optimize_export.errors import ExporterError, StructureError
from optimize_export.wording import first_clause

__all__ = [
    "CalibrationError",
    "ExportError",
    "ExporterError",
    "MetadataError",
    "NothingToQuantize",
    "OtherMachine",
    "ProviderFallback",
    "QuantizationError",
    "RouteRefused",
    "RuntimeCrashed",
    "StructureError",
    "UnknownFormat",
    "UnknownOpset",
    "WrongFile",
    "one_line",
    "refusing",
]

_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM})


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

    def __init__(self, message: str, inputs: tuple[torch.Tensor, ...], output: str = "", *, size: str = "") -> None:
        super().__init__(message, size=size)
        # The file's inputs that show this.
        self.inputs = inputs
        # The name of the wrong output; "" if the file raises or returns another number of outputs.
        self.output = output


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


class CalibrationError(QuantizationError):
    """The calibration calls are missing or don't fit the file's inputs."""


class OtherMachine(ExporterError):
    """A file made for one device and processor was loaded on another."""


@contextmanager
def refusing(what: str | None = None) -> Iterator[None]:
    """Turn any exception raised inside into RouteRefused: third-party capture code can raise anything.

    Exceptions that don't concern the route pass through: out of memory, a full disk, and non-Exceptions such as an
    interrupt.
    """
    try:
        yield
    except (RouteRefused, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            raise
        reason = one_line(error)
        raise RouteRefused(f"{what}: {reason}" if what else reason) from error


def one_line(error: BaseException, limit: int = 200) -> str:
    """The first line of the root cause's message, without paths of this machine and addresses."""
    while error.__cause__ is not None and not isinstance(error, ExporterError):
        error = error.__cause__
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    line = first_clause(lines)
    if " " not in line:  # the message of a KeyError is only the key
        line = f"{type(error).__name__}: {line}"
    line = re.sub(r"<([\w.]+) object at 0x\w+>", r"\1", line)
    line = re.sub(r"(?:[A-Za-z]:)?(?:[\\/][\w.\-+@]+){2,}[\\/]([\w.\-+@]+)", r"\1", line).rstrip(".:; ")
    return line if len(line) <= limit else f"{line[: limit - 1].rstrip()}…"
