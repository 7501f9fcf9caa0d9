"""The schema of `manifest.json`: the type of each field, and how fields depend on each other.

The manifest is strict JSON. Numbers that JSON doesn't have are the strings "NaN", "Infinity" and "-Infinity".
"""

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
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

NOT_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Check = Callable[[object, str], None]


def _wrong(where: str, expected: str, value: object) -> BundleError:
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return BundleError(f"{MANIFEST} is broken: `{where}` must be {expected}, not {shown}.")


def _kind(expected: str, *types: type) -> Check:
    def check(value: object, where: str) -> None:
        # In JSON, true isn't a number; in Python, bool is a subclass of int.
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise _wrong(where, expected, value)

    return check


def _record(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    def check(value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(where or MANIFEST, "an object", value)
        prefix = f"{where}." if where else ""
        for name, inner in required.items():
            if name not in value:
                raise BundleError(f"{MANIFEST} is broken: the field `{prefix}{name}` is missing.")
            inner(value[name], prefix + name)
        for name, inner in (optional or {}).items():
            if name in value:
                inner(value[name], prefix + name)

    return check


def _each(inner: Check, *, at_least: int = 0) -> Check:
    def check(value: object, where: str) -> None:
        if not isinstance(value, list) or len(value) < at_least:
            raise _wrong(where, f"a list of at least {at_least}" if at_least else "a list", value)
        for index, item in enumerate(value):
            inner(item, f"{where}[{index}]")

    return check


def _or_null(inner: Check) -> Check:
    def check(value: object, where: str) -> None:
        if value is not None:
            inner(value, where)

    return check


def _number(value: object, where: str) -> None:
    if isinstance(value, str) and value in NOT_NUMBERS:
        return
    # Python reads JSON's 1e999 as infinity, and a JSON integer may be too large for a float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise _wrong(where, "a number", value)


def _size(value: object, where: str) -> None:
    _number(value, where)
    if value == "NaN" or value == "-Infinity" or (isinstance(value, int | float) and value < 0):
        raise _wrong(where, "a number of 0 or more", value)


def _tolerance(value: object, where: str) -> None:
    _size(value, where)
    if value == "Infinity":
        raise _wrong(where, "a finite number", value)


def _positive(value: object, where: str) -> None:
    """A measured time, or a quotient of two."""
    _number(value, where)
    if isinstance(value, str) or not (isinstance(value, int | float) and value > 0):
        raise _wrong(where, "a finite number above 0", value)


def _finite(value: object, where: str) -> None:
    _number(value, where)
    if isinstance(value, str):
        raise _wrong(where, "a finite number", value)


def _count(value: object, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise _wrong(where, "a whole number", value)


def _threads(value: object, where: str) -> None:
    _count(value, where)
    if isinstance(value, int) and not 1 <= value <= MOST_THREADS:
        raise _wrong(where, f"a number of threads from 1 to {MOST_THREADS}", value)


def _seed(value: object, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise _wrong(where, "a whole number below 2**64", value)


def _dimension(value: object, where: str) -> None:
    if isinstance(value, str) and value:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise _wrong(where, "a whole number or the name of a dimension", value)


def _digest(value: object, where: str) -> None:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}", value):
        raise _wrong(where, "a SHA-256 of 64 hexadecimal digits", value)


def _pair(value: object, where: str) -> None:
    if not isinstance(value, list) or len(value) != 2:
        raise _wrong(where, "two numbers", value)
    for index, item in enumerate(value):
        _number(item, f"{where}[{index}]")


def is_inside_path(text: str) -> bool:
    """Whether a text is a normalized relative path with forward slashes that can't leave its folder."""
    if not text or re.search(r"[\x00-\x1f\x7f\\:]", text):
        return False
    path = PurePosixPath(text)
    return not path.is_absolute() and ".." not in path.parts and path.as_posix() == text and text != "."


def _path(value: object, where: str) -> None:
    if not isinstance(value, str) or not is_inside_path(value):
        raise _wrong(where, "the path of a file inside the bundle", value)


_text = _kind("a text", str)
_flag = _kind("true or false", bool)
_object = _kind("an object", dict)
_texts = _each(_text)


def _digests_by_key(value: object, where: str) -> None:
    _object(value, where)
    assert isinstance(value, dict)
    for key, digest in value.items():
        if "\0" in key:
            raise _wrong(where, "digests by the names of files", key)
        _or_null(_digest)(digest, f"{where}.{key}")


_tensor = _record({"name": _text, "dtype": _text, "shape": _each(_dimension)})
_file = _record({"path": _path, "sha256": _digest, "bytes": _count})


def _counts(value: object, where: str) -> None:
    _object(value, where)
    assert isinstance(value, dict)
    for name, count in value.items():
        _count(count, f"{where}.{name}")


def _versions(value: object, where: str) -> None:
    _texts_by_key(value, where)
    assert isinstance(value, dict)
    for name, version in value.items():
        if not name.strip() or not version.strip():
            raise _wrong(where, "versions by the names of packages", value)


def _texts_by_key(value: object, where: str) -> None:
    _object(value, where)
    assert isinstance(value, dict)
    for key, text in value.items():
        _text(text, f"{where}.{key}")


_noise: dict[str, Check] = {
    "name": _text,
    "kind": _text,
    "dtype": _text,
    "scale": _number,
    "rms": _number,
    "own_error": _number,
    "own_error_rms": _number,
    "response": _number,
    "response_rms": _number,
    "noise": _size,
    "noise_rms": _size,
    "signal": _or_null(_text),
    "deterministic": _flag,
    "tied": _count,
}
_declared: dict[str, Check] = {"declared": _size}
_call = _record(
    {"batch_size": _or_null(_count), "draw": _count},
    {
        **dict.fromkeys(("max_error", "mean_error", "p999_error", "cosine", "agreement"), _or_null(_number)),
        "undecided": _count,
        "sizes": _counts,
    },
)
_parity = _record(
    {"ok": _flag, "verdict": _text, "reason": _text},
    {
        "effort": _text,
        "factor": _positive,
        "outputs": _each(
            _record(
                {"name": _text, "tolerance": _or_null(_size)},
                {
                    **dict.fromkeys(("ratio", "slice_ratio"), _or_null(_number)),
                    **dict.fromkeys(("judged", "by_user"), _flag),
                    "calls": _each(_call),
                },
            )
        ),
    },
)
_difference = _record(
    {
        "noise": _record(_noise, _declared),
        "max_error": _number,
        "rms_error": _number,
        "mismatches": _count,
        "problems": _texts,
        "where": _text,
        "frontier": _each(_pair),
    },
    {"slice": _text, "slice_error": _number, "slice_noise": _number, "calls": _each(_call)},
)
_rows = _record(
    {
        "outputs": _each(
            _record(
                {
                    "name": _text,
                    "max_difference": _number,
                    "rms_difference": _number,
                    "mismatches": _count,
                    "batch_size": _count,
                    "row": _count,
                    "how": _text,
                    "frontier": _each(_pair),
                }
            )
        ),
        "batch_sizes": _each(_count),
        "alone": _flag,
        "without_rows": _texts,
        "problem": _or_null(_text),
    }
)
_measurement = _record(
    {
        "outputs": _each(_difference, at_least=1),
        "problems": _texts,
        "notes": _texts,
        "reference": _text,
        "reference_reason": _text,
        "mode": _text,
        "device": _text,
        "batch_sizes": _each(_count),
        "draws": _count,
        "seed": _seed,
        "settings": _texts_by_key,
    },
    {"precision": _text, "rows": _or_null(_rows), "reference_device": _text},
)
_accuracy_figures: dict[str, Check] = {
    **dict.fromkeys(("cosine", "top1", "equal", "snr"), _or_null(_finite)),
    "max_error": _or_null(_size),
    "calls": _count,
    "problem": _or_null(_text),
}
_accuracy = _record({"budget": _record({"cosine": _or_null(_finite), "top1": _or_null(_finite)}), **_accuracy_figures})
_artifact = _record(
    {
        "format": _text,
        "path": _path,
        "files": _each(_path, at_least=1),
        "sha256": _digest,
        "bytes": _count,
        "route": _text,
        "refused": _each(_record({"route": _text, "reason": _text})),
        "inputs": _each(_tensor),
        "outputs": _each(_tensor, at_least=1),
        "notes": _texts,
        "parity": _or_null(_parity),
    },
    {
        "measurement": _or_null(_measurement),
        "placement": _or_null(_counts),
        "opset": _or_null(_count),
        "metadata": _texts_by_key,
        "accuracy": _accuracy,
        "quantization": _record({"kind": _text, "kept": _texts}),
        "limits": _each(_record({"condition": _text, "size": _text, "largest": _count})),
        "without_passes": _each(_record({"name": _text, "reason": _text})),
    },
)
_pass = _record(
    {"name": _text, "options": _object, "status": _text}, {"max_error": _or_null(_number), "error": _or_null(_number)}
)
_golden = _record(
    {
        "path": _path,
        "device": _record({"type": _text, "name": _text}),
        "calls": _each(
            _record(
                {
                    "name": _text,
                    "batch_size": _or_null(_count),
                    "draw": _count,
                    "inputs": _texts,
                    "outputs": _texts,
                    "tied": _texts,
                },
                {"sizes": _counts, "seed": _seed},
            ),
            at_least=1,
        ),
        "outputs": _each(
            _record({**_noise, "atol": _or_null(_tolerance), "rtol": _or_null(_tolerance)}, _declared),
            at_least=1,
        ),
    },
    {"precision": _text},
)
_route = _record({"format": _text, "runtime": _text, "settings": _object})
_ratio = _record({**dict.fromkeys(("median", "low", "high"), _positive), "rounds": _count})
_benchmark = _record(
    {},
    {
        "batch_sizes": _each(_count),
        "threads": _threads,
        "rounds": _count,
        "figures": _each(
            _record(
                {
                    "name": _text,
                    "route": _or_null(_route),
                    "bytes": _or_null(_count),
                    "memory": _or_null(_count),
                    "seconds": _or_null(_positive),
                    "p95": _or_null(_positive),
                    "speed_up": _or_null(_ratio),
                    "accuracy": _or_null(_record(_accuracy_figures)),
                    "dropped": _or_null(_text),
                }
            )
        ),
        "recommended": _or_null(_route),
        "reason": _text,
        "notes": _texts,
    },
)
_build = _record(
    {"options": _object, "files": _digests_by_key, "versions": _versions},
    # Bundles of earlier versions lack it.
    {"program": _digest},
)
_manifest = _record(
    {
        "schema": _record({"name": _text, "version": _count}),
        "created": _text,
        "program": _record({"name": _text, "version": _text}),
        "environment": _record({"python": _text, "platform": _text, "libraries": _versions}),
        "device": _record({"type": _text, "name": _text}),
        "mode": _text,
        "seed": _seed,
        "model": _record(
            {"class": _text, "source": _text, "parameters": _count, "bytes": _count, "weights_sha256": _digest}
        ),
        "passes": _each(_pass),
        "artifacts": _each(_artifact, at_least=1),
        "parity": _parity,
        "golden": _golden,
        "files": _each(_file, at_least=1),
    },
    {
        "coverage": _or_null(_object),
        "positional": _texts,
        "benchmark": _or_null(_benchmark),
        "build": _build,
        "notes": _texts,
        "example_sizes": _counts,
        "missing": _texts_by_key,
    },
)


def check_benchmark(benchmark: Any) -> None:
    """Check a benchmark against the schema; raise `BundleError` if it doesn't match."""
    _benchmark(benchmark, "benchmark")


def check_manifest(manifest: Any) -> None:
    """Check a manifest against the schema, and its fields against each other.

    Raises:
        BundleError: the manifest doesn't match the schema or contradicts itself. One sentence that names the field.
    """
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
    _manifest(manifest, "")
    for problem in _contradictions(manifest):
        raise BundleError(f"{MANIFEST} contradicts itself: {problem}.")


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
