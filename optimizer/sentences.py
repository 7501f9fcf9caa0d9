"""What is said of errors in the user's files, in one sentence that names the place."""

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from optimizer.errors import LoadError, Terminated
from optimizer.user_code import OWN_PACKAGES, ROOT, HardExit

_OURS = tuple(str(ROOT / name) + os.sep for name in OWN_PACKAGES)
_MOST_NAMED = 5
_LONGEST_QUOTE = 400
# What torch's allocator says on the CPU; its sizes are bytes.
_NO_MEMORY = re.compile(r"(?:can't allocate memory|not enough memory): you tried to allocate (\d+) bytes")


@contextlib.contextmanager
def errors_of_user_code(what: str, folder: Path) -> Iterator[None]:
    """Turn whatever the user's code raises into a `LoadError`: `what`, the error and its place in the user's files."""
    try:
        yield
    except (LoadError, KeyboardInterrupt, Terminated):
        raise
    except SystemExit as error:
        raise LoadError(f"{what}: it called {exit_call(error)}.") from error
    except SyntaxError as error:
        place = f"{_short(error.filename, folder)} line {error.lineno}" if error.filename else "the file"
        raise LoadError(f"{what}: {place} has a syntax error: {error.msg}.") from error
    except ImportError as error:
        raise LoadError(f"{what}: {_import_sentence(error)}{_place(error, folder)}.") from error
    except BaseException as error:
        # Also what isn't an Exception, as pytest.skip() raises: the user's code ends here, whatever it raises.
        raise LoadError(f"{what}: {quote(error, with_type=True)}{_place(error, folder)}.") from error


def _import_sentence(error: ImportError) -> str:
    message = quote(error)
    if "relative import" in message:
        return f"{message}; for a file of a package give package.module:NAME from the folder above the package"
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return message
    top = error.name.partition(".")[0]
    if top in sys.modules:
        return f"there is no module {error.name}"
    return f"there is no module {error.name} (the folder of the file is on the path; if it is a package: pip install {top})"


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its type; of a lack of memory what could help."""
    if lack := lack_of_memory(error):
        return lack
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def error_summary(error: BaseException) -> str:
    """The type of an error and its first line; what could help where memory ran out."""
    if lack := lack_of_memory(error):
        return lack
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # TorchScript says what happened in the last line, after its own trace.
    line = lines[-1] if "TorchScript interpreter" in lines[0] else lines[0]
    return f"{type(error).__name__}: {line.rstrip('.')}"


def _place(error: BaseException, folder: Path) -> str:
    """The innermost line of the user's own files in the traceback."""
    root = str(folder.resolve()) + os.sep
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(root)]
    theirs = [frame for frame in frames if "site-packages" not in frame.filename.removeprefix(root)]
    theirs = [frame for frame in theirs if not frame.filename.startswith(_OURS)]
    return f" ({_short(theirs[-1].filename, folder)} line {theirs[-1].lineno})" if theirs else ""


def _short(filename: str, folder: Path) -> str:
    return filename.removeprefix(str(folder.resolve()) + os.sep)


def exit_call(error: SystemExit) -> str:
    """The call that raised it: `sys.exit(3)`."""
    if isinstance(error, HardExit):
        return f"os._exit({error.code!r})"
    return f"sys.exit({'' if error.code is None else repr(error.code)})"


def one_line(error: BaseException) -> str:
    """The whole message, without line breaks."""
    return " ".join(str(error).split())


def quote(error: BaseException, *, with_type: bool = False) -> str:
    """The message on one line, without its last full stop and not longer than a screen can bear.

    Where memory ran out it is that, and how much was asked for.
    """
    if lack := lack_of_memory(error):
        return lack
    text = " ".join(_message(error).split()).rstrip(".")
    if len(text) > _LONGEST_QUOTE:
        text = text[:_LONGEST_QUOTE].rstrip() + "…"
    if with_type:
        return f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text or type(error).__name__


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an error of the user's own may not be able to say what it is
        return ""


def lack_of_memory(error: BaseException) -> str:
    """Said of an error that memory ran out, and how much was asked for; empty where it is another one."""
    if isinstance(error, torch.OutOfMemoryError):
        return "the memory of the GPU isn't enough"
    asked = _NO_MEMORY.search(_message(error)) if isinstance(error, RuntimeError) else None
    if asked is not None:
        return f"the memory of this machine isn't enough: {int(asked[1]) / 2**30:,.1f} GiB were asked for at once"
    return "the memory of this machine isn't enough" if isinstance(error, MemoryError) else ""


def listed(names: Sequence[str], most: int = _MOST_NAMED) -> str:
    """The first of them, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def type_name(value: object) -> str:
    return "None" if value is None else type(value).__name__


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
