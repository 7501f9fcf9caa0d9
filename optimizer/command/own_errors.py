"""Convert errors of the other packages to the classes of `optimize_export.errors`, which have exit codes."""

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager

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
    UsageError,
)
from optimize_export.wording import one_line
from optimizer.command.user_errors import exit_call
from passes.errors import (
    DuplicatePass,
    PassesError,
    PassOptionError,
    PassOrderError,
    UnknownPass,
)

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
        raise LoadError(f"The model called {exit_call(error)} while it ran: remove the call.") from error
    except OSError as error:
        if error.errno not in _DISK:
            raise
        raise BundleError(f"The bundle couldn't be written: {error.strerror}.") from error


@contextmanager
def unlogged() -> Iterator[None]:
    """Keep Python from printing what the library logs, because the command prints it itself."""
    library, nobody = logging.getLogger("optimizer"), logging.NullHandler()
    library.addHandler(nobody)
    try:
        yield
    finally:
        library.removeHandler(nobody)
