"""The metadata in a file, and the archives of torch that hold it as an extra file.

Metadata are texts by key, from the user and from this program. Each format stores them in its own way, and
`Exporter.read_metadata` reads them. This program's entries don't depend on the machine, the user or the time, so that two
builds from one input are identical.
"""

from __future__ import annotations

import io
import json
import os
import unicodedata
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exporters.errors import MetadataError
from optimize_export.manifest import describe_program

# Keys with this prefix are reserved for this program.
OURS = "optimize_export"

# The record that holds the metadata as JSON, in archives written by torch.
EXTRA_FILE = "metadata.json"

# Maximum bytes of weights to write through memory.
WRITTEN_THROUGH_MEMORY = 100_000_000


def refuse_metadata(metadata: object) -> None:
    """Raise MetadataError unless this is a dict of texts whose keys are single lines without our prefix."""
    if not isinstance(metadata, Mapping):
        raise MetadataError(f"Metadata must be a dict of strings, such as {{'author': 'Jane'}}, not {metadata!r}.")
    for key, value in metadata.items():
        if not isinstance(key, str):
            raise MetadataError(f"The metadata key {key!r} is not a string.")
        if not key.strip():
            raise MetadataError(f"The metadata key {key!r} is empty: use a name.")
        if any(unicodedata.category(character) == "Cc" for character in key):
            raise MetadataError(
                f"The metadata key {key!r} contains a newline, NUL or a similar character: use a single line."
            )
        if key == OURS or key.startswith(f"{OURS}."):
            raise MetadataError(f"The metadata key {key!r} is reserved for this program: use a key without {OURS}.")
        if not isinstance(value, str):
            raise MetadataError(f"The metadata value of {key!r} must be a string, not {value!r}.")
        if "\0" in value:
            raise MetadataError(f"The metadata value of {key!r} contains NUL, where readers would cut it off.")
        if any(unicodedata.category(character) == "Cs" for character in key + value):
            raise MetadataError(f"The metadata of {key!r} aren't valid Unicode: they contain half a surrogate pair.")


def metadata_of(
    model: nn.Module, inputs: tuple[str, ...], outputs: tuple[str, ...], own: Mapping[str, str]
) -> dict[str, str]:
    """All metadata for a file, sorted by key; `own` is the user's part. MetadataError if that is invalid."""
    refuse_metadata(own)
    ours = {
        "program": " ".join(describe_program().values()),
        "torch": torch.__version__,
        "model": type(model).__name__,
        "inputs": json.dumps(inputs),
        "outputs": json.dumps(outputs),
    }
    return dict(sorted({**{f"{OURS}.{name}": text for name, text in ours.items()}, **own}.items()))


def extra_files(metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata as extra files, for torch's functions that write archives."""
    return {EXTRA_FILE: json.dumps(metadata, indent=1)}


def read_extra_file(path: Path) -> dict[str, str]:
    """Read the metadata from an archive written by torch, without loading anything else; empty if it has none."""
    try:
        with zipfile.ZipFile(path) as archive:
            record = next(
                (name for name in archive.namelist() if name.partition("/")[2] == f"extra/{EXTRA_FILE}"), None
            )
            found = {} if record is None else json.loads(archive.read(record))
    except (zipfile.BadZipFile, ValueError, RecursionError) as error:
        raise MetadataError(f"The metadata of {path.name} can't be read: {error}.") from error
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise MetadataError(f"The metadata of {path.name} aren't strings by key.")
    return found


def write_archive(path: Path, weights: int, write: Callable[[Any], object]) -> None:
    """Let `write` write an archive with this many bytes of weights to `path`; it takes a path or a buffer.

    torch's own writer ends the process when the disk is full. So a small archive is written to memory first, which
    briefly takes three times the memory of the weights. A large one is written by torch, after its disk space was
    reserved.

    Raises:
        OSError: the file can't be written, for example because the disk is full.
    """
    if weights <= WRITTEN_THROUGH_MEMORY:
        buffer = io.BytesIO()
        write(buffer)
        path.write_bytes(buffer.getvalue())
        return
    if hasattr(os, "posix_fallocate"):
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, weights + weights // 8)
        path.unlink()
    write(str(path))
