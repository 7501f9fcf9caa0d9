"""Convert the errors of the user's code, and those of the other packages, to classes that have exit codes."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exporters.errors import (
    ExporterError,
    MetadataError,
    ProviderFallback,
    StructureError,
    UnknownFormat,
    UnknownOpset,
)
from optimize_export.errors import (
    BundleError,
    ExportFailed,
    LoadError,
    OptimizeExportError,
    OptimizeFailed,
    ParityError,
    Terminated,
    UsageError,
)
from optimize_export.shadowing import OWN_PACKAGES, ROOT
from optimize_export.wording import one_line, quote
from passes.errors import (
    DuplicatePass,
    PassesError,
    PassOptionError,
    PassOrderError,
    UnknownPass,
)

# The user's code -----------------------------------------------------------------------------------------------------

_OURS = tuple(str(ROOT / name) + os.sep for name in OWN_PACKAGES)


@contextmanager
def errors_of_user_code(what: str, folder: Path) -> Iterator[None]:
    """Convert an error in the user's code to a `LoadError`.

    The message has `what`, the error and its place in the user's files. `LoadError`, `KeyboardInterrupt` and
    `Terminated` pass through.
    """
    try:
        yield
    except (LoadError, KeyboardInterrupt, Terminated):
        raise
    except SystemExit as error:
        raise LoadError(f"{what}: it called sys.exit({'' if error.code is None else repr(error.code)}).") from error
    except SyntaxError as error:
        place = f"{_short(error.filename, folder)} line {error.lineno}" if error.filename else "the file"
        raise LoadError(f"{what}: {place} has a syntax error: {error.msg}.") from error
    except ImportError as error:
        raise LoadError(f"{what}: {_import_sentence(error)}{_place(error, folder)}.") from error
    except BaseException as error:
        # Some errors, such as that of pytest.skip(), aren't an `Exception`, but they also end the user's code.
        raise LoadError(f"{what}: {quote(error, with_type=True)}{_place(error, folder)}.") from error


def _import_sentence(error: ImportError) -> str:
    message = quote(error)
    if "relative import" in message:
        return f"{message}; for a file of a package use package.module:NAME from the folder above the package"
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return message
    top = error.name.partition(".")[0]
    if top in sys.modules:
        return f"there is no module {error.name}"
    return f"there is no module {error.name} (the folder of the file is on the path; if it is a package: pip install {top})"


def _place(error: BaseException, folder: Path) -> str:
    """The innermost line in the user's own files of the traceback, in parentheses."""
    root = str(folder.resolve()) + os.sep
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(root)]
    theirs = [frame for frame in frames if "site-packages" not in frame.filename.removeprefix(root)]
    theirs = [frame for frame in theirs if not frame.filename.startswith(_OURS)]
    return f" ({_short(theirs[-1].filename, folder)} line {theirs[-1].lineno})" if theirs else ""


def _short(filename: str, folder: Path) -> str:
    return filename.removeprefix(str(folder.resolve()) + os.sep)


# The other packages --------------------------------------------------------------------------------------------------

_USAGE = (
    UnknownPass,
    DuplicatePass,
    PassOptionError,
    PassOrderError,
    UnknownFormat,
    UnknownOpset,
    MetadataError,
    StructureError,
)
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


@contextmanager
def own_errors() -> Iterator[None]:
    """Convert every error that the user should read to a class that has an exit code."""
    try:
        yield
    except OptimizeExportError:
        raise
    except _USAGE as error:
        raise UsageError(one_line(error)) from error
    except PassesError as error:
        raise OptimizeFailed(one_line(error)) from error
    except ProviderFallback as error:
        raise ParityError(one_line(error)) from error
    except ExporterError as error:
        raise ExportFailed(one_line(error)) from error
    except SystemExit as error:
        # The program never exits here. The model does, on an input that its first run didn't have.
        raise LoadError(f"The model called sys.exit({error.code!r}) while it ran: remove the call.") from error
    except OSError as error:
        if error.errno not in _DISK:
            raise
        raise BundleError(f"The bundle couldn't be written: {error.strerror}.") from error
