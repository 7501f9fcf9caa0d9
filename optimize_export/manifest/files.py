"""Check the files of a bundle by their hashes."""

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimize_export.errors import BundleError
from optimize_export.manifest.reading import open_regular, parse_json, read_text_bytes
from optimize_export.manifest.schema import MANIFEST, SUMS


def file_digest(path: Path) -> str:
    """The SHA-256 of a regular file, read in pieces.

    Raises:
        OSError: the path isn't a regular file, or it can't be read.
    """
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


def read_checked(folder: Path, manifest: Mapping[str, Any], path: str) -> bytes:
    """Read a file of a bundle whole, and return its bytes only if they have the size and the hash in the manifest.

    The bytes that are hashed are those that are returned, so another process can't change the file in between.

    Raises:
        BundleError: the file is missing, was changed or can't be read.
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

    Each file is read once, and the manifest is compared with the one on disk: both may change while this runs.

    Args:
        expect: the SHA-256 that SHA256SUMS must have.
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
    """The SHA-256 of SHA256SUMS, which represents all files of a bundle.

    Raises:
        OSError: it isn't a regular file, is too large, or can't be read.
    """
    return hashlib.sha256(read_text_bytes(folder / SUMS)).hexdigest()


def changed_files(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """The files of a bundle that were changed after the bundle was written. Missing files aren't included."""
    there = [file for file in manifest["files"] if os.path.lexists(folder / file["path"])]
    changed = [file["path"] for file in there if file_problem(folder, file)]
    return [*changed, f"{MANIFEST} or {SUMS}"] if sums_problem(folder, manifest) else changed


def damage_of(
    folder: Path, manifest: Mapping[str, Any], *, hashed: bool = True, expect: str | None = None
) -> dict[str, str]:
    """A sentence for each file of a bundle that is missing, changed or not listed, by its path.

    Args:
        hashed: compare the listed files by their hashes, which reads them; otherwise only by their sizes. The manifest
            is compared by its hash in any case.
        expect: the SHA-256 that SHA256SUMS must have.
    """
    problems = {SUMS: problem} if (problem := sums_problem(folder, manifest, expect)) else {}
    found = {file["path"]: file_problem(folder, file, hashed=hashed) for file in manifest["files"]}
    problems |= {path: problem for path, problem in found.items() if problem}
    try:
        extra = unlisted(folder, manifest)
    except OSError as error:
        return {**problems, ".": f"{folder} can't be read: {error.strerror or error}."}
    return {**problems, **{path: f"{path} is not listed in {MANIFEST}." for path in extra}}
