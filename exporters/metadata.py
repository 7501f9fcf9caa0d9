"""What a file says of itself: texts by key, those of the user and those that this program writes.

Each format has its own place for them (`Exporter.read_metadata` finds it). Nothing of the machine, of who builds and of
when is among those of this program, so that two builds of one input are the same.
"""

from __future__ import annotations

import json
import unicodedata
import zipfile
from collections.abc import Mapping
from importlib import metadata as distributions
from pathlib import Path

import torch
from torch import nn

from exporters.errors import MetadataError

# All keys that begin with it are this program's.
OURS = "optimize_export"

# The record that holds them in archives that torch writes, as JSON.
EXTRA_FILE = "metadata.json"


def refuse_metadata(metadata: object) -> None:
    """Raise MetadataError for what can't be the user's part: a dict of texts by keys in one line, none of them ours."""
    if not isinstance(metadata, Mapping):
        raise MetadataError(f"Metadata are a dict of texts, such as {{'author': 'Jane'}}, not {metadata!r}.")
    for key, value in metadata.items():
        if not isinstance(key, str):
            raise MetadataError(f"The metadata key {key!r} is no text.")
        if not key.strip():
            raise MetadataError(f"The metadata key {key!r} is empty: give it a name.")
        if any(unicodedata.category(character) == "Cc" for character in key):
            raise MetadataError(f"The metadata key {key!r} holds a newline, NUL or the like: write it in one line.")
        if key == OURS or key.startswith(f"{OURS}."):
            raise MetadataError(f"The metadata key {key!r} is written by this program: choose one without {OURS}.")
        if not isinstance(value, str):
            raise MetadataError(f"The metadata value of {key!r} is no text but {value!r}: write it as one.")
        if "\0" in value:
            raise MetadataError(f"The metadata value of {key!r} holds NUL, where readers would cut it off.")
        if not (_is_unicode(key) and _is_unicode(value)):
            raise MetadataError(f"The metadata of {key!r} aren't Unicode: they hold half a character.")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def metadata_of(
    model: nn.Module, inputs: tuple[str, ...], outputs: tuple[str, ...], own: Mapping[str, str]
) -> dict[str, str]:
    """All that a file says of itself, in the order of the keys: `own` is the user's part.

    Raises:
        MetadataError: that part is none.
    """
    refuse_metadata(own)
    ours = {
        "program": f"optimize-export {_version()}",
        "torch": torch.__version__,
        "model": type(model).__name__,
        "inputs": json.dumps(inputs),
        "outputs": json.dumps(outputs),
    }
    return dict(sorted({**{f"{OURS}.{name}": text for name, text in ours.items()}, **own}.items()))


def _version() -> str:
    try:
        return distributions.version("optimize-export")
    except distributions.PackageNotFoundError:
        return "unknown"


def extra_files(metadata: Mapping[str, str]) -> dict[str, str]:
    """The metadata for the functions of torch that write archives with extra files."""
    return {EXTRA_FILE: json.dumps(metadata, indent=1)}


def read_extra_file(path: Path) -> dict[str, str]:
    """The metadata of an archive of torch, of which nothing is loaded; empty where it has none.

    Raises:
        MetadataError: it is no archive, or what it holds there is something else.
        OSError: it can't be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            record = next(
                (name for name in archive.namelist() if name.partition("/")[2] == f"extra/{EXTRA_FILE}"), None
            )
            found = {} if record is None else json.loads(archive.read(record))
    except (zipfile.BadZipFile, ValueError, RecursionError) as error:
        raise MetadataError(f"The metadata of {path.name} can't be read: {error}.") from error
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise MetadataError(f"The metadata of {path.name} aren't texts by key.")
    return found
