"""Read the inputs of the first golden call, with numpy alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy

from optimizer.errors import BundleError
from optimizer.manifest import LARGEST_TEXT, SCHEMA_NAME, open_regular

# The names of dtypes in safetensors files that numpy has too.
_DTYPES = {
    **{"BOOL": "bool", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "F16": "float16"},
    **{"U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64", "F32": "float32", "F64": "float64"},
}


def first_inputs(folder: Path, manifest: Mapping[str, Any]) -> list[Any] | None:
    """The inputs of the first golden call, in the file's order; None if one is complex or numpy lacks its dtype.

    Raises:
        BundleError: the file can't be read.
    """
    golden = manifest["golden"]
    call = golden["calls"][0]
    path = folder / golden["path"]
    try:
        with open_regular(path) as file:
            size = int.from_bytes(file.read(8), "little")
            if size > LARGEST_TEXT:
                raise ValueError("its header is too long")
            header = json.loads(file.read(size))
            # Complex tensors are stored as pairs of real numbers.
            complex_names = json.loads(header["__metadata__"][SCHEMA_NAME])["complex"]
            keys = [f"{call['name']}/input/{name}" for name in call["inputs"]]
            if any(key in complex_names or header[key]["dtype"] not in _DTYPES for key in keys):
                return None
            arrays = []
            for key in keys:
                shape, dtype = header[key]["shape"], numpy.dtype(_DTYPES[header[key]["dtype"]])
                file.seek(8 + size + header[key]["data_offsets"][0])
                array = numpy.fromfile(file, dtype, math.prod(shape))
                arrays.append(array.reshape(shape))
    except (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__} {error}"
        raise BundleError(f"{path} can't be read: {reason}. Pass warm_up=False to do without it.") from error
    return arrays
