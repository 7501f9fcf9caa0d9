"""The errors of the program, and the exit code that each one ends the command with.

    OptimizeExportError                 1  a defect of the program itself
    ├── UsageError                      2  an option or a combination of options that makes no sense
    ├── LoadError                       3  the model, its weights or its inputs couldn't be loaded
    ├── ExportFailed                    4  a requested format is missing: it couldn't be exported, or its file isn't proven
    ├── DeviceError                     5  the required device is missing
    ├── ParityError                     6  the result isn't proven to compute what the original computes
    ├── OptimizeFailed                  7  a pass failed or was rolled back under `strict`
    ├── BundleError                     8  the bundle couldn't be written, read or verified
    └── VacuousError                    9  the model's outputs carry no signal, so nothing could be proven

Each message is one sentence that says what is wrong, where, and what to do.
`passes.errors` and `exporters.errors` hold the errors of those packages; the functions of `optimizer.api` raise them as
they are, and `optimizer.cli` gives them the exit codes 2, 4 or 7 by their class.

`Terminated` is no error of the program: it stands for SIGTERM, and nothing but the command catches it.
"""

from collections.abc import Mapping
from typing import Any, ClassVar


class OptimizeExportError(Exception):
    """Base of all errors that are reported to the user as one sentence."""

    exit_code: ClassVar[int] = 1


class UsageError(OptimizeExportError):
    """An option, or a combination of options, that makes no sense."""

    exit_code = 2


class LoadError(OptimizeExportError):
    """The model, its weights or its inputs couldn't be loaded."""

    exit_code = 3


class ExportFailed(OptimizeExportError):
    """A requested format is missing from the bundle: it couldn't be exported, or its file isn't proven."""

    exit_code = 4


class DeviceError(OptimizeExportError):
    """The required device is missing."""

    exit_code = 5


class ParityError(OptimizeExportError):
    """The result doesn't compute what the original computes; nothing was published.

    Attributes:
        figures: what was measured, in the form of the command's JSON document.
    """

    exit_code = 6

    def __init__(self, message: str, figures: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.figures = dict(figures or {})


class OptimizeFailed(OptimizeExportError):
    """A pass failed or was rolled back and `strict` was asked for."""

    exit_code = 7


class BundleError(OptimizeExportError):
    """The bundle couldn't be written, read or verified."""

    exit_code = 8


class VacuousError(OptimizeExportError):
    """The model's outputs carry no signal (zeros, the same for every input), so nothing could be proven of any file."""

    exit_code = 9


class Terminated(BaseException):
    """SIGTERM, as an exception, so that staging folders are taken away."""
