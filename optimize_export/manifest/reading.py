"""Read files that may come from a stranger: regular files of a limited size, strict JSON, and manifests."""

import io
import json
import math
import os
import re
import stat
from array import array
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from optimize_export.errors import BundleError
from optimize_export.manifest.schema import MANIFEST, NOT_NUMBERS, check_manifest

# ----------------------------------------------------------------------------------------------------- regular files

# The manifest of a model in three formats has about 40 kB. A file of several gigabytes would fill the memory.
LARGEST_TEXT = 64 << 20

# The flags that this operating system supports.
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOCTTY", 0)
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


def open_regular(path: Path, *, follow: bool = False) -> io.BufferedReader:
    """Open a regular file for reading.

    The type is checked twice: before opening, because opening a device may already have an effect, and again on the
    open file, because another process may have replaced the file in between.

    Args:
        follow: accept a link to a regular file. The files of a bundle are never links; files that the user names may be.

    Raises:
        OSError: the path isn't a regular file (but a FIFO, a device, a socket, a folder), or it can't be read.
    """
    _refuse_irregular(path, os.stat(path, follow_symlinks=follow))
    descriptor = os.open(path, os.O_RDONLY | (_FLAGS if follow else _FLAGS | _NO_LINKS))
    try:
        _refuse_irregular(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_text_bytes(path: Path, *, follow: bool = False) -> bytes:
    """Read a regular file of at most `LARGEST_TEXT` bytes.

    Raises:
        OSError: as for `open_regular`, or the file is larger.
    """
    with open_regular(path, follow=follow) as file:
        data = file.read(LARGEST_TEXT + 1)
    if len(data) > LARGEST_TEXT:
        raise OSError(0, f"it has more than {LARGEST_TEXT >> 20} MiB", str(path))
    return data


def _refuse_irregular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, "it is not a regular file", str(path))


# -------------------------------------------------------------------------------------------------------------- JSON

# Deeper than any manifest: each level of an argument's structure takes three levels of JSON.
DEEPEST = 300

# A text in JSON, which may lack its end, and the step that each bracket makes.
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def plain(value: Any) -> Any:
    """Convert a value to strict JSON: tuples to lists, NaN and the infinities to their names.

    Raises:
        TypeError: the value contains a key or an object that JSON doesn't have.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        if strange := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"the key {strange[0]!r} is not a string")
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"a {type(value).__name__} can't be written as JSON")


def number(value: float | str) -> float:
    """Convert a number of the manifest, which may be "NaN", "Infinity" or "-Infinity", to a float."""
    return NOT_NUMBERS[value] if isinstance(value, str) else float(value)


def to_json_text(value: Any) -> str:
    """Write a value as strict JSON text, with unsorted keys and a newline at the end.

    Raises:
        TypeError: as for `plain`.
    """
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def parse_json(data: bytes) -> Any:
    """Parse strict JSON from an untrusted source.

    Raises:
        ValueError: it isn't UTF-8 or JSON, is nested too deeply, has a key twice, or has a number or a text that other
            programs can't read: NaN, an infinity, more than a float64 can hold, half a surrogate pair.
    """
    if _depth(data) > DEEPEST:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep")
    value = json.loads(
        data.decode("utf-8"),
        parse_constant=_refuse_constant,
        parse_int=_whole,
        parse_float=_real,
        object_pairs_hook=_without_repetition,
    )
    # Only an escape can give half a surrogate pair, and this program writes no such escapes.
    if re.search(rb"\\u[dD][89a-fA-F]", data):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("a text contains half a surrogate pair") from None
    return value


def read_json(path: Path, *, follow: bool = False) -> Any:
    """Read a regular file with `parse_json`.

    Args:
        follow: accept a link to a regular file.

    Raises:
        OSError: the file isn't regular, is too large or can't be read.
        ValueError: as for `parse_json`.
    """
    return parse_json(read_text_bytes(path, follow=follow))


def _depth(data: bytes) -> int:
    """How deeply brackets are nested, found without recursion: a deep nesting may end the process while it is parsed."""
    brackets = _TEXT.sub(b"", data).translate(_STEPS, delete=_NO_BRACKETS)
    return max(accumulate(array("b", brackets)), default=0)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _whole(text: str) -> int:
    # The largest float64 has 309 digits.
    if len(text) > 309 or math.isinf(float(text)):
        raise ValueError(f"the number {text[:20]}... is too large")
    return int(text)


def _real(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (key, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r} occurs twice")
    return found


# ---------------------------------------------------------------------------------------------------------- manifests


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check the manifest of a folder.

    Raises:
        BundleError: there is no manifest, or it can't be read, or it is broken; one sentence.
    """
    path = folder / MANIFEST
    if folder.is_file():
        raise BundleError(f"{folder} is a file, not a bundle: {_folder_of(folder)}.")
    try:
        manifest = read_json(path)
    except FileNotFoundError:
        if not os.path.lexists(folder):
            raise BundleError(f"There is no bundle at {folder}: no such folder.") from None
        raise BundleError(f"{folder} is not a bundle: it has no {MANIFEST}.") from None
    except OSError as error:
        raise BundleError(f"{path} can't be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise BundleError(f"{path} is broken: it is not valid JSON ({error}).") from error
    try:
        check_manifest(manifest)
    except BundleError as error:
        raise BundleError(f"{folder} can't be used: {error}") from error
    return dict(manifest)


def _folder_of(file: Path) -> str:
    if (file.parent / MANIFEST).is_file():
        return f"use the folder of its bundle, {file.parent}"
    return f"a bundle is a folder with a {MANIFEST}, as export wrote it"
