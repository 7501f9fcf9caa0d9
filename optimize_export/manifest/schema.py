"""The schema of `manifest.json`: the fields with their kinds, and how fields depend on each other.

The manifest is strict JSON. Numbers that JSON doesn't have are the strings "NaN", "Infinity" and "-Infinity".
docs/bundle.md explains every field.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from optimize_export.errors import BundleError

MANIFEST = "manifest.json"
SUMS = "SHA256SUMS"
README = "README.md"
GOLDEN = "golden.safetensors"
REPORT = "report.json"
REPORT_PAGE = "report.html"
SCHEMA_NAME = "optimize-export-bundle"
SCHEMA_VERSION = 1

# More than any machine has: a runtime starts each of them.
MOST_THREADS = 4096

_NOT_FINITE = ("NaN", "Infinity", "-Infinity")


# --------------------------------------------------------------------------------------------------- kinds of values


@dataclass(frozen=True)
class _Kind:
    """Which values a field may have, for a message and as a test."""

    expected: str
    allows: Callable[[Any], bool]


def is_inside_path(text: str) -> bool:
    """Whether a text is a normalized relative path with forward slashes that can't leave its folder."""
    if not text or re.search(r"[\x00-\x1f\x7f\\:]", text):
        return False
    path = PurePosixPath(text)
    return not path.is_absolute() and ".." not in path.parts and path.as_posix() == text and text != "."


def _is_whole(value: Any, end: int = 2**63) -> bool:
    # In JSON, true isn't a number; in Python, bool is a subclass of int.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < end


def _is_finite(value: Any) -> bool:
    # A JSON integer may be too large for a float, and JSON's 1e999 is read as infinity.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_number(value: Any) -> bool:
    return _is_finite(value) or value in _NOT_FINITE


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


_ANYTHING = _Kind("anything", lambda value: True)
_TEXT = _Kind("a text", lambda value: isinstance(value, str))
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
_OBJECT = _Kind("an object", lambda value: isinstance(value, dict))
_NUMBER = _Kind("a number", _is_number)
_FINITE = _Kind("a finite number", _is_finite)
_SIZE = _Kind("a number of 0 or more", lambda value: value == "Infinity" or (_is_finite(value) and value >= 0))
_TOLERANCE = _Kind("a finite number of 0 or more", lambda value: _is_finite(value) and value >= 0)
_POSITIVE = _Kind("a finite number above 0", lambda value: _is_finite(value) and value > 0)
_COUNT = _Kind("a whole number", _is_whole)
_SEED = _Kind("a whole number below 2**64", lambda value: _is_whole(value, 2**64))
_THREADS = _Kind(
    f"a number of threads from 1 to {MOST_THREADS}", lambda value: _is_whole(value, MOST_THREADS + 1) and value > 0
)
_FROM_ONE = _Kind("a whole number from 1", lambda value: _is_whole(value) and value > 0)
_WAIT = _Kind("a number of seconds from 0 to 60", lambda value: _is_finite(value) and 0 <= value < 60)
_DIMENSION = _Kind(
    "a whole number or the name of a dimension",
    lambda value: bool(value) if isinstance(value, str) else _is_whole(value),
)
_DIGEST = _Kind("a SHA-256 of 64 hexadecimal digits", _is_digest)
_PATH = _Kind("the path of a file inside the bundle", lambda value: isinstance(value, str) and is_inside_path(value))
_POINT = _Kind("two numbers", lambda value: isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)))
_EXAMPLE = _Kind(
    "a whole number and two finite numbers",
    lambda value: isinstance(value, list) and len(value) == 3 and _is_whole(value[0]) and all(map(_is_finite, value)),
)


# ------------------------------------------------------------------------------------------------------------ fields
# A dict is an object with these fields; "name?" may be missing. {str: kind} is an object with any keys, [kind] is a
# list, [kind, ...] a list that isn't empty, and (kind, None) may be null.


def _all(kind: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, kind)


_DEVICE = _all(_TEXT, "type", "name")
_TENSOR = {**_all(_TEXT, "name", "dtype"), "shape": [_DIMENSION]}
_NOISE = {
    **_all(_TEXT, "name", "kind", "dtype"),
    **_all(_NUMBER, "scale", "rms", "own_error", "own_error_rms", "response", "response_rms"),
    **_all(_SIZE, "noise", "noise_rms", "declared?"),
    "signal": (_TEXT, None),
    "deterministic": _FLAG,
    "tied": _COUNT,
}
_CALL = {
    "batch_size": (_COUNT, None),
    **_all((_NUMBER, None), "max_error?", "mean_error?", "p999_error?", "cosine?", "agreement?"),
    **_all(_COUNT, "draw", "undecided?"),
    "sizes?": {str: _COUNT},
}
_OUTPUT = {
    "name": _TEXT,
    "tolerance": (_SIZE, None),
    **_all((_NUMBER, None), "ratio?", "slice_ratio?"),
    **_all(_FLAG, "judged?", "by_user?"),
    "calls?": [_CALL],
}
_PARITY = {
    "ok": _FLAG,
    **_all(_TEXT, "verdict", "reason", "effort?"),
    "factor?": _POSITIVE,
    "outputs?": [_OUTPUT],
}
_DIFFERENCE = {
    "noise": _NOISE,
    **_all(_NUMBER, "max_error", "rms_error", "slice_error?", "slice_noise?"),
    "mismatches": _COUNT,
    "problems": [_TEXT],
    **_all(_TEXT, "where", "slice?"),
    "frontier": [_POINT],
    "calls?": [_CALL],
}
_ROW = {
    **_all(_TEXT, "name", "how"),
    **_all(_NUMBER, "max_difference", "rms_difference"),
    **_all(_COUNT, "mismatches", "batch_size", "row"),
    "frontier": [_POINT],
}
_ROWS = {
    "outputs": [_ROW],
    "batch_sizes": [_COUNT],
    "alone": _FLAG,
    "without_rows": [_TEXT],
    "problem": (_TEXT, None),
}
_MEASUREMENT = {
    "outputs": [_DIFFERENCE, ...],
    **_all([_TEXT], "problems", "notes"),
    **_all(_TEXT, "reference", "reference_reason", "mode", "device", "precision?", "reference_device?"),
    "batch_sizes": [_COUNT],
    "draws": _COUNT,
    "seed": _SEED,
    "settings": {str: _TEXT},
    "rows?": (_ROWS, None),
}
_BUDGET = {**_all((_FINITE, None), "cosine", "top1", "drop?", "confidence?"), "percent?": _FLAG}
_METRIC = {
    **_all(_FINITE, "score", "drop", "upper", "confidence", "budget"),
    "percent": _FLAG,
    "examples": _COUNT,
    **_all((_COUNT, None), "of", "needed"),
    **_all(_TEXT, "verdict", "part"),
    "changed?": [_EXAMPLE],
    "changed_count?": (_COUNT, None),
}
_ACCURACY = {
    **_all((_FINITE, None), "cosine", "top1", "equal", "snr", "other_cosine?"),
    "max_error": (_SIZE, None),
    "calls": _COUNT,
    "problem": (_TEXT, None),
    "metric?": (_METRIC, None),
    "orders?": [
        {
            "by": _TEXT,
            **_all(_COUNT, "dim", "column"),
            **_all([_TEXT], "names", "unjudged"),
            "scores": (_TEXT, None),
            "descending": _FLAG,
        }
    ],
}
_ARTIFACT = {
    **_all(_TEXT, "format", "route"),
    "path": _PATH,
    "files": [_PATH, ...],
    "sha256": _DIGEST,
    "bytes": _COUNT,
    "refused": [_all(_TEXT, "route", "reason")],
    "inputs": [_TENSOR],
    "outputs": [_TENSOR, ...],
    "notes": [_TEXT],
    "parity": (_PARITY, None),
    "measurement?": (_MEASUREMENT, None),
    "placement?": ({str: _COUNT}, None),
    "opset?": (_COUNT, None),
    "metadata?": {str: _TEXT},
    "accuracy?": {"budget": _BUDGET, **_ACCURACY},
    "quantization?": {"kind": _TEXT, **_all([_TEXT], "kept", "why?")},
    "limits?": [{**_all(_TEXT, "condition", "size"), "largest": _COUNT}],
    "without_passes?": [_all(_TEXT, "name", "reason")],
}
_PASS = {**_all(_TEXT, "name", "status"), "options": _OBJECT, **_all((_NUMBER, None), "max_error?", "error?")}
_GOLDEN_CALL = {
    "name": _TEXT,
    "batch_size": (_COUNT, None),
    "draw": _COUNT,
    **_all([_TEXT], "inputs", "outputs", "tied"),
    "sizes?": {str: _COUNT},
    "seed?": _SEED,
}
_GOLDEN = {
    "path": _PATH,
    "device": _DEVICE,
    "calls": [_GOLDEN_CALL, ...],
    "outputs": [{**_NOISE, **_all((_TOLERANCE, None), "atol", "rtol")}, ...],
    "precision?": _TEXT,
}
_ROUTE = {**_all(_TEXT, "format", "runtime"), "settings": _OBJECT}
_FIGURE = {
    "name": _TEXT,
    "route": (_ROUTE, None),
    **_all((_COUNT, None), "bytes", "memory"),
    **_all((_POSITIVE, None), "seconds", "p95"),
    "speed_up": ({**_all(_POSITIVE, "median", "low", "high"), "rounds": _COUNT}, None),
    "accuracy": (_ACCURACY, None),
    "dropped": (_TEXT, None),
}
_BENCHMARK = {
    "batch_sizes?": [_COUNT],
    "threads?": _THREADS,
    "rounds?": _COUNT,
    "figures?": [_FIGURE],
    "recommended?": (_ROUTE, None),
    "reason?": _TEXT,
    "notes?": [_TEXT],
}
_SERVICE = {
    **_all(_THREADS, "instances", "threads"),
    "max_batch": _FROM_ONE,
    "max_wait": _WAIT,
    "cpus": _FROM_ONE,
    "processor": _TEXT,
    **_all(_POSITIVE, "rate", "p95"),
    "target": (_POSITIVE, None),
}
# In the order in which the fields are written.
_MANIFEST = {
    "schema": {"name": _TEXT, "version": _COUNT},
    "created": _TEXT,
    "program": _all(_TEXT, "name", "version"),
    "environment": {**_all(_TEXT, "python", "platform"), "libraries": {str: _TEXT}},
    "device": _DEVICE,
    "mode": _TEXT,
    "seed": _SEED,
    "model": {**_all(_TEXT, "class", "source"), **_all(_COUNT, "parameters", "bytes"), "weights_sha256": _DIGEST},
    # Bundles of earlier versions lack `build.program`.
    "build?": {"options": _OBJECT, "files": {str: (_DIGEST, None)}, "versions": {str: _TEXT}, "program?": _DIGEST},
    "input_structure?": _ANYTHING,
    "positional?": [_TEXT],
    "output_structure?": _ANYTHING,
    "example_sizes?": {str: _COUNT},
    "artifacts": [_ARTIFACT, ...],
    "missing?": {str: _TEXT},
    "parity": _PARITY,
    "golden": _GOLDEN,
    "benchmark?": (_BENCHMARK, None),
    "service?": _SERVICE,
    "coverage?": (_OBJECT, None),
    "passes": [_PASS],
    "notes?": [_TEXT],
    "files": [{"path": _PATH, "sha256": _DIGEST, "bytes": _COUNT}, ...],
}
FIELDS = tuple(name.removesuffix("?") for name in _MANIFEST)
"""The fields of a manifest. Others may come before the last one, `files`."""


# ---------------------------------------------------------------------------------------------------------- checking


def check_benchmark(benchmark: Any) -> None:
    """Check a benchmark against the schema; raise `BundleError` if it doesn't match."""
    _check(_BENCHMARK, benchmark, "benchmark")


def check_manifest(manifest: Any) -> None:
    """Check a manifest against the schema, and its fields against each other; `BundleError` names the field."""
    if not isinstance(manifest, dict):
        raise _wrong(MANIFEST, "an object", manifest)
    schema = manifest.get("schema")
    if not isinstance(schema, dict) or schema.get("name") != SCHEMA_NAME:
        raise BundleError(
            f"{MANIFEST} is not the manifest of a bundle of this program: its `schema` is missing or has another name."
        )
    version = schema.get("version")
    if version != SCHEMA_VERSION:
        raise BundleError(
            f"{MANIFEST} has schema version {version!r}, but this program reads version {SCHEMA_VERSION}: use the "
            "version of the program that wrote the bundle."
        )
    _check(_MANIFEST, manifest, "")
    for problem in _contradictions(manifest):
        raise BundleError(f"{MANIFEST} contradicts itself: {problem}.")


def _check(kind: Any, value: Any, where: str) -> None:
    match kind:
        case _Kind():
            if not kind.allows(value):
                raise _wrong(where, kind.expected, value)
        case (inner, None):
            if value is not None:
                _check(inner, value, where)
        case [inner, *more]:
            if not isinstance(value, list) or not (value or not more):
                raise _wrong(where, "a list of at least 1" if more else "a list", value)
            for index, item in enumerate(value):
                _check(inner, item, f"{where}[{index}]")
        case dict() if not isinstance(value, dict):
            raise _wrong(where, "an object", value)
        case dict() if str in kind:
            for key, item in value.items():
                _check(kind[str], item, f"{where}.{key}")
        case _:
            for key, inner in kind.items():
                name = key.removesuffix("?")
                place = f"{where}.{name}" if where else name
                if name in value:
                    _check(inner, value[name], place)
                elif name == key:
                    raise BundleError(f"{MANIFEST} is broken: the field `{place}` is missing.")


def _wrong(where: str, expected: str, value: object) -> BundleError:
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return BundleError(f"{MANIFEST} is broken: `{where}` must be {expected}, not {shown}.")


def _contradictions(manifest: dict[str, Any]) -> Iterator[str]:
    files = {file["path"]: file for file in manifest["files"]}
    if len(files) != len(manifest["files"]):
        yield "a path occurs twice in `files`"
    if MANIFEST in files or SUMS in files:
        yield f"`files` can't contain {MANIFEST} or {SUMS}"
    golden = manifest["golden"]
    if golden["path"] not in files:
        yield f"{golden['path']} is not in `files`"
    outputs = [output["name"] for output in golden["outputs"]]
    for call in golden["calls"]:
        if call["outputs"] != outputs:
            yield f"the outputs of {call['name']} are not those of `golden.outputs`"
    formats = [artifact["format"] for artifact in manifest["artifacts"]]
    if len(set(formats)) != len(formats):
        yield "a format occurs twice in `artifacts`"
    recommended = (manifest.get("benchmark") or {}).get("recommended")
    if recommended is not None and recommended["format"] not in formats:
        yield f"`benchmark` recommends {recommended['format']}, which isn't in `artifacts`"
    if both := set(formats) & set(manifest.get("missing", {})):
        yield f"{min(both)} is in `artifacts` and in `missing`"
    for artifact in manifest["artifacts"]:
        for path in artifact["files"]:
            if path not in files:
                yield f"{path} of the artifact {artifact['format']} is not in `files`"
        if artifact["path"] not in artifact["files"]:
            yield f"{artifact['path']} is not one of the files of the artifact {artifact['format']}"
        elif files[artifact["path"]]["sha256"] != artifact["sha256"]:
            yield f"the SHA-256 of {artifact['path']} in `artifacts` is not the one in `files`"
        if [tensor["name"] for tensor in artifact["outputs"]] != outputs:
            yield f"the outputs of the artifact {artifact['format']} are not those of `golden.outputs`"
        if (measurement := artifact.get("measurement")) and len(measurement["outputs"]) != len(outputs):
            yield f"the measurement of the artifact {artifact['format']} doesn't have the artifact's outputs"
