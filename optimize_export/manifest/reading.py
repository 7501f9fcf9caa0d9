"""Read files that may come from a stranger: regular files of a limited size, strict JSON, manifests, and the hashes of files."""

import hashlib
import io
import json
import math
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimize_export.errors import BundleError
from optimize_export.manifest.schema import MANIFEST, SUMS, check_manifest

# ----------------------------------------------------------------------------------------------------- regular files

# The manifest of a model in three formats has about 40 kB. A file of several gigabytes would fill the memory.
LARGEST_TEXT = 64 << 20

# The flags that this operating system supports.
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOCTTY", 0)
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)


def open_regular(path: Path, *, follow: bool = False) -> io.BufferedReader:
    """Open a regular file for reading; OSError for a FIFO, a device, a socket or a folder.

    The type is checked twice: before opening, because opening a device may already have an effect, and again on the
    open file, because another process may have replaced the file in between. Links are followed only where the user
    names the file: those of a bundle are never links, except in the cache of the Hugging Face Hub.
    """
    path = path if follow else _in_cache(path)
    _refuse_irregular(path, os.stat(path, follow_symlinks=follow))
    descriptor = os.open(path, os.O_RDONLY | (_FLAGS if follow else _FLAGS | _NO_LINKS))
    try:
        _refuse_irregular(path, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def _in_cache(path: Path) -> Path:
    """The file to which a link of the Hugging Face Hub's cache leads; the path itself for any other path or link.

    The cache keeps each file once: `snapshots/REVISION/model.onnx` is a link to a file in `blobs`, next to `snapshots`.
    """
    if path.is_symlink():
        real = Path(os.path.realpath(path))
        for folder in Path(os.path.realpath(path.parent), path.name).parents:
            if folder.parent.name == "snapshots" and real.parent == folder.parents[1] / "blobs":
                return real
    return path


def read_text_bytes(path: Path, *, follow: bool = False) -> bytes:
    """Read a regular file of at most `LARGEST_TEXT` bytes; OSError for a larger one, and as `open_regular`."""
    with open_regular(path, follow=follow) as file:
        data = file.read(LARGEST_TEXT + 1)
    if len(data) > LARGEST_TEXT:
        raise OSError(0, f"it has more than {LARGEST_TEXT >> 20} MiB", str(path))
    return data


def _refuse_irregular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, "it is not a regular file", str(path))


# -------------------------------------------------------------------------------------------------------------- JSON


def plain(value: Any) -> Any:
    """Convert a value to strict JSON: tuples to lists, NaN and the infinities to their names; else TypeError."""
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
    return float(value)


def to_json_text(value: Any) -> str:
    """Write a value as strict JSON text, with unsorted keys and a newline at the end."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def replace_file(target: Path, data: bytes) -> None:
    """Write a file next to the target, and rename it in one step; nothing is left of a failed one. OSError if it can't."""
    staged = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        staged.write_bytes(data)
        staged.replace(target)
    finally:
        staged.unlink(missing_ok=True)


def parse_json(data: bytes) -> Any:
    """Parse strict JSON from an untrusted source; ValueError if it isn't UTF-8 or JSON, or is nested too deeply."""
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def read_json(path: Path, *, follow: bool = False) -> Any:
    """Read a regular file with `read_text_bytes` and `parse_json`, which raise OSError and ValueError."""
    return parse_json(read_text_bytes(path, follow=follow))


# ---------------------------------------------------------------------------------------------------------- manifests


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check the manifest of a folder; raise `BundleError` if there is none, or it is broken."""
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


# ------------------------------------------------------------------------------------------------------------- hashes


def file_digest(path: Path) -> str:
    """The SHA-256 of a regular file, read in pieces."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sums_text(digests: Mapping[str, str]) -> str:
    """The text of SHA256SUMS, in the format of `sha256sum -c`."""
    return "".join(f"{digests[path]}  {path}\n" for path in sorted(digests))


def entries_below(folder: Path) -> dict[str, os.stat_result]:
    """The status of every entry below a folder, by its relative path with forward slashes; links aren't followed."""
    found: dict[str, os.stat_result] = {}
    for root, folders, files in os.walk(folder, onerror=_raise):
        for name in (*folders, *files):
            path = Path(root, name)
            found[path.relative_to(folder).as_posix()] = path.lstat()
    return found


def _raise(error: OSError) -> None:
    raise error


def unlisted(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """The paths in a bundle's folder that the manifest doesn't list, sorted.

    A folder is one of them if the manifest lists nothing below it; only the folder itself is named then.
    """
    listed = {file["path"] for file in manifest["files"]} | {MANIFEST, SUMS}
    parents = {parent.as_posix() for path in listed for parent in Path(path).parents}
    entries = entries_below(folder)
    extra = [
        path
        for path, status in entries.items()
        if path not in listed and not (path in parents and stat.S_ISDIR(status.st_mode))
    ]
    # Name an unlisted folder, but not its contents.
    return sorted(path for path in extra if not any(parent.as_posix() in extra for parent in Path(path).parents))


def file_problem(folder: Path, file: Mapping[str, Any], *, hashed: bool = True) -> str | None:
    """A sentence if a file of a bundle is missing or changed; without `hashed`, only its size is compared."""
    try:
        with open_regular(folder / file["path"]) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != file["bytes"]:
                return f"{file['path']} was changed: it has {size} bytes, and {file['bytes']} were written."
            if hashed and hashlib.file_digest(opened, "sha256").hexdigest() != file["sha256"]:
                return f"{file['path']} was changed: its SHA-256 is not the one in {MANIFEST}."
    except (FileNotFoundError, NotADirectoryError):
        return f"{file['path']} is missing."
    except OSError as error:
        return f"{file['path']} can't be read: {error.strerror or error}."
    return None


def refuse_changed(folder: Path, manifest: Mapping[str, Any], artifact: Mapping[str, Any]) -> None:
    """Raise `BundleError` if a file of an artifact is missing or changed."""
    for file in manifest["files"]:
        if file["path"] in artifact["files"] and (problem := file_problem(folder, file)):
            raise BundleError(f"{folder} is damaged: {problem}")


def read_checked(folder: Path, manifest: Mapping[str, Any], path: str) -> bytes:
    """Read a file of a bundle whole, and return its bytes only if they have the size and the hash in the manifest.

    The bytes that are hashed are those that are returned, so another process can't change the file in between.
    """
    file = next(each for each in manifest["files"] if each["path"] == path)
    # The size first: a file of another size isn't read.
    if problem := file_problem(folder, file, hashed=False):
        raise BundleError(f"{folder} is damaged: {problem}")
    try:
        with open_regular(folder / path) as opened:
            data = opened.read(file["bytes"] + 1)
    except OSError as error:
        raise BundleError(f"{folder} is damaged: {path} can't be read: {error.strerror or error}.") from error
    if hashlib.sha256(data).hexdigest() != file["sha256"]:
        raise BundleError(f"{folder} is damaged: {path} was changed: its SHA-256 is not the one in {MANIFEST}.")
    return data


def sums_problem(folder: Path, manifest: Mapping[str, Any], expect: str | None = None) -> str | None:
    """A sentence if SHA256SUMS doesn't match the manifest and its file hashes; None if it does.

    Each file is read once, and the manifest is compared with the one on disk: both may change while this runs. `expect` is
    the SHA-256 that SHA256SUMS must have.
    """
    digests = {file["path"]: file["sha256"] for file in manifest["files"]}
    try:
        written = read_text_bytes(folder / SUMS)
        data = read_text_bytes(folder / MANIFEST)
    except FileNotFoundError:
        return f"{SUMS} is missing."
    except OSError as error:
        return f"{Path(error.filename or folder).name} can't be read: {error.strerror or error}."
    found = hashlib.sha256(written).hexdigest()
    if expect not in (None, found):
        return f"This is not the expected bundle: the SHA-256 of its {SUMS} is {found}, not {expect}."
    digests[MANIFEST] = hashlib.sha256(data).hexdigest()
    try:
        agree = written == sums_text(digests).encode("utf-8") and parse_json(data) == manifest
    except ValueError:
        agree = False
    return None if agree else f"{MANIFEST} or {SUMS} was changed: they don't agree."


def sums_digest(folder: Path) -> str:
    """The SHA-256 of SHA256SUMS, which represents all files of a bundle."""
    return hashlib.sha256(read_text_bytes(folder / SUMS)).hexdigest()


def changed_files(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """The files of a bundle that were changed after the bundle was written. Missing files aren't included."""
    there = [file for file in manifest["files"] if os.path.lexists(folder / file["path"])]
    changed = [file["path"] for file in there if file_problem(folder, file)]
    return [*changed, f"{MANIFEST} or {SUMS}"] if sums_problem(folder, manifest) else changed


# What git and a download from the Hugging Face Hub add to a folder. `verify` refuses an ONNX file that reads these.
_DOWNLOADED = (".cache", ".git", ".gitattributes")


def damage_of(
    folder: Path, manifest: Mapping[str, Any], *, hashed: bool = True, expect: str | None = None
) -> dict[str, str]:
    """A sentence for each file of a bundle that is missing, changed or not listed, by its path.

    Without `hashed`, the listed files are compared only by their sizes; the manifest is compared by its hash in any case.
    `expect` is the SHA-256 that SHA256SUMS must have.
    """
    problems = {SUMS: problem} if (problem := sums_problem(folder, manifest, expect)) else {}
    found = {file["path"]: file_problem(folder, file, hashed=hashed) for file in manifest["files"]}
    problems |= {path: problem for path, problem in found.items() if problem}
    try:
        extra = unlisted(folder, manifest)
    except OSError as error:
        return {**problems, ".": f"{folder} can't be read: {error.strerror or error}."}
    return {**problems, **{path: f"{path} is not listed in {MANIFEST}." for path in extra if path not in _DOWNLOADED}}
