"""Read the inputs of the first golden call, with numpy alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy

from optimize_export.errors import BundleError
from optimize_export.manifest import SCHEMA_NAME, parse_json, read_checked

# The names of dtypes in safetensors files that numpy has too.
_DTYPES = {
    **{"BOOL": "bool", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "F16": "float16"},
    **{"U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "F32": "float32", "F64": "float64"},
}


def first_inputs(folder: Path, manifest: Mapping[str, Any]) -> list[Any] | None:
    """The inputs of the first golden call, in the file's order; None if one is complex or numpy lacks its dtype.

    Raises:
        BundleError: the file was changed or can't be read.
    """
    golden = manifest["golden"]
    call = golden["calls"][0]
    try:
        data = read_checked(folder, manifest, golden["path"])
    except BundleError as error:
        raise BundleError(f"{error} Pass warm_up=False to do without it.") from error
    try:
        size = int.from_bytes(data[:8], "little")
        header, content = parse_json(data[8 : 8 + size]), memoryview(data)[8 + size :]
        # Complex tensors are stored as pairs of real numbers.
        complex_names = parse_json(header["__metadata__"][SCHEMA_NAME].encode("utf-8"))["complex"]
        keys = [f"{call['name']}/input/{name}" for name in call["inputs"]]
        if any(key in complex_names or header[key]["dtype"] not in _DTYPES for key in keys):
            return None
        return [_array(header[key], content) for key in keys]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        path, reason = folder / golden["path"], f"{type(error).__name__} {error}"
        raise BundleError(f"{path} can't be read: {reason}. Pass warm_up=False to do without it.") from error


def _array(entry: Mapping[str, Any], content: memoryview) -> Any:
    """A tensor of the file; raise ValueError if its bytes don't have its shape."""
    begin, end = entry["data_offsets"]
    shape, dtype = entry["shape"], numpy.dtype(_DTYPES[entry["dtype"]])
    count = math.prod(shape)
    if min((begin, *shape)) < 0 or end - begin != count * dtype.itemsize or end > len(content):
        raise ValueError(f"a tensor of shape {shape} doesn't have {end - begin} bytes")
    # A copy, because the array must be aligned, and a runtime may write to its inputs.
    return numpy.frombuffer(content[begin:end], dtype).reshape(shape).copy() if count else numpy.empty(shape, dtype)
