"""The errors of the program, and the exit code of the command for each.

Each message is one sentence: what is wrong, where, and what to do. The docstrings stand in the command's help.

`passes.errors` and `exporters.errors` define the errors of those packages. The functions of `optimizer.api` raise them
unchanged. `optimizer.command.errors` converts them to the classes with exit codes 2, 4, 6 and 7.
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any, ClassVar

# All characters but those of ASCII that can be printed, line breaks and tabs.
_UNUSUAL = re.compile(r"[^ -~\n\t]")


class OptimizeExportError(Exception):
    """Base of all errors that the user gets as one sentence."""

    exit_code: ClassVar[int] = 1


class UsageError(OptimizeExportError):
    """An option, or a combination of options, is invalid."""

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
    """The files aren't proven to compute the same as the original; an export publishes nothing."""

    exit_code = 6

    def __init__(self, message: str, figures: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        # The measurements, in the form of the command's JSON document.
        self.figures = dict(figures or {})


class OptimizeFailed(OptimizeExportError):
    """A pass failed or was rolled back under --strict, isn't available, or wrote to the caller's weights."""

    exit_code = 7


class BundleError(OptimizeExportError):
    """The bundle couldn't be written, read or verified."""

    exit_code = 8


class VacuousError(OptimizeExportError):
    """The model's outputs carry no signal (zeros, or equal for every input), so nothing could be proven."""

    exit_code = 9


class FindingsFound(OptimizeExportError):
    """diagnose has findings of the level of --fail-on, or of a higher one; or bench --soak found a leak."""

    exit_code = 10


class ExporterError(Exception):
    """Base class of the exporters' errors; the others are in `exporters.errors`."""


class StructureError(ExporterError):
    """The structure of a call's arguments or outputs differs from the exported one."""


def missing_package(error: ModuleNotFoundError, caller: str = "The command") -> str | None:
    """The sentence for a package that this program requires and that isn't installed; None for any other module.

    A serving image needs only numpy and a runtime, for `load`; the command needs everything. `caller` is what needs the
    package.
    """
    name = (error.name or "").partition(".")[0]
    try:
        required = metadata.requires("optimize-export") or ()
    except metadata.PackageNotFoundError:
        return None
    names = {re.split(r"[^\w.-]", each)[0].replace("-", "_") for each in required if "extra ==" not in each}
    if name not in names:
        return None
    lack = f"{caller} needs the package {name}, which isn't installed here"
    if caller.endswith(".load"):
        return f"{lack}: pip install {name}."
    return (
        f"{lack}: install optimize-export with its dependencies (pip install without --no-deps). Without them, only "
        "optimize_export.load works, which needs numpy and a runtime."
    )


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that led to it."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def failure_document(code: int, kind: str, message: str) -> dict[str, Any]:
    """The JSON document of a failure: its exit code, the name of its error, and a sentence."""
    return {"ok": False, "exit_code": code, "error": {"code": code, "kind": kind, "message": message}}


class Terminated(BaseException):
    """SIGTERM as an exception, so that staging folders are removed."""


def printable(text: str) -> str:
    """Escape every character that isn't printable, such as ESC, which becomes `\\x1b`.

    Others are line breaks and the marks for text direction.
    """
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def printable_lines(text: str) -> str:
    """As `printable`, but line breaks, tabs and spaces of any width stay: for pages and texts of several lines."""
    return _UNUSUAL.sub(lambda found: found[0] if unicodedata.category(found[0]) == "Zs" else printable(found[0]), text)


def all_printable(value: Any) -> Any:
    """Make every text in a JSON document printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(str(key)): all_printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [all_printable(item) for item in value]
    return value
