"""The errors of the exporters.

ExporterError
├── UnknownFormat        no exporter of that name
├── UnknownOpset         an operator set that no file can be written in, or no file that has one
├── MetadataError        a key or text that a file can't say of itself, or that can't be read
├── StructureError       a call whose arguments or outputs don't have the structure that was exported
├── RouteRefused         one route to a format didn't give a right file; the exporter goes on with the next one
│   └── WrongFile        the file that it gave computes something else than the model, or raises where that doesn't
├── ExportError          every route to a format failed; the message names each route with its reason
├── OtherMachine         a file made for one device and processor was loaded on another
└── ProviderFallback     nodes of an ONNX session run on the CPU where the GPU was asked for
"""

import torch


class ExporterError(Exception):
    """Base of the errors of the exporters; the message is one sentence for the user."""


class UnknownFormat(ExporterError):
    """No exporter of that name."""


class UnknownOpset(ExporterError):
    """An operator set that no file can be written in, or no file that has one."""


class MetadataError(ExporterError):
    """A key or text that a file can't say of itself, or that can't be read."""


class StructureError(ExporterError):
    """A call whose arguments or outputs don't have the structure that was exported."""


class RouteRefused(ExporterError):
    """One route to a format didn't give a right file.

    `size` is the name of the open size that is in the way, such as "batch"; "" where it is something else.
    """

    def __init__(self, message: str, *, size: str = "") -> None:
        super().__init__(message)
        self.size = size


class WrongFile(RouteRefused):
    """The file that one route gave computes something else than the model, or raises where that doesn't.

    Attributes:
        inputs: the file's inputs at which it does.
        output: the name of the output that is wrong; "" where the file raises, or gives another number of them.
    """

    def __init__(self, message: str, inputs: tuple[torch.Tensor, ...], output: str = "", *, size: str = "") -> None:
        super().__init__(message, size=size)
        self.inputs = inputs
        self.output = output


class ExportError(ExporterError):
    """Every route to a format failed.

    Attributes:
        reasons: what was refused on each route; the message says more.
    """

    def __init__(self, message: str, reasons: str = "") -> None:
        super().__init__(message)
        self.reasons = reasons


class ProviderFallback(ExporterError):
    """Nodes of an ONNX session run on the CPU where the GPU was asked for."""


class OtherMachine(ExporterError):
    """A file made for one device and processor was loaded on another."""
