"""The errors of the exporters.

ExporterError
├── UnknownFormat        no exporter of that name
├── StructureError       a call whose arguments or outputs don't have the structure that was exported
├── RouteRefused         one route to a format didn't give a right file; the exporter goes on with the next one
│   └── WrongFile        the file that it gave computes something else than the model, or raises where that doesn't
├── ExportError          every route to a format failed; the message names each route with its reason
├── UnsafeFile           a file holds what could run code of whoever made it, beside what it computes
├── OtherMachine         a file made for one device and processor was loaded on another
└── ProviderFallback     nodes of an ONNX session run on the CPU where the GPU was asked for
"""

import torch


class ExporterError(Exception):
    """Base of the errors of the exporters; the message is one sentence for the user."""


class UnknownFormat(ExporterError):
    """No exporter of that name."""


class StructureError(ExporterError):
    """A call whose arguments or outputs don't have the structure that was exported."""


class RouteRefused(ExporterError):
    """One route to a format didn't give a right file."""


class WrongFile(RouteRefused):
    """The file that one route gave computes something else than the model, or raises where that doesn't.

    Attributes:
        inputs: the file's inputs at which it does.
        output: the name of the output that is wrong; "" where the file raises, or gives another number of them.
    """

    def __init__(self, message: str, inputs: tuple[torch.Tensor, ...], output: str = "") -> None:
        super().__init__(message)
        self.inputs = inputs
        self.output = output


class ExportError(ExporterError):
    """Every route to a format failed."""


class ProviderFallback(ExporterError):
    """Nodes of an ONNX session run on the CPU where the GPU was asked for."""


class UnsafeFile(ExporterError):
    """A file holds what could run code of whoever made it, beside what it computes."""


class OtherMachine(ExporterError):
    """A file made for one device and processor was loaded on another."""
