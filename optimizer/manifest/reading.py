"""Write and read strict JSON, and read a manifest."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimizer.errors import BundleError
from optimizer.manifest.regular_files import read_text_bytes
from optimizer.manifest.schema import MANIFEST, NOT_NUMBERS, check_manifest


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


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check the manifest of a folder.

    Raises:
        BundleError: there is no manifest, or it can't be read, or it is broken; one sentence.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(read_text_bytes(path).decode("utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError:
        if not os.path.lexists(folder):
            raise BundleError(f"There is no bundle at {folder}: no such folder.") from None
        raise BundleError(f"{folder} is not a bundle: it has no {MANIFEST}.") from None
    except OSError as error:
        raise BundleError(f"{path} can't be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is broken: it is not valid JSON ({error}).") from error
    try:
        check_manifest(manifest)
    except BundleError as error:
        raise BundleError(f"{folder} can't be used: {error}") from error
    return dict(manifest)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
