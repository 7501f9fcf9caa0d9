"""`manifest.json`: its schema, its writing and its reading. docs/bundle.md explains every field.

The manifest is strict JSON. Numbers that JSON doesn't have are the strings "NaN", "Infinity" and "-Infinity".
"""

import hashlib
import json
import keyword
import math
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from optimizer.bundle.regular_files import read_text_bytes
from optimizer.errors import BundleError, printable
from optimizer.wording import dtype_name
from passes.program.weights import bare

MANIFEST = "manifest.json"
SUMS = "SHA256SUMS"
README = "README.md"
GOLDEN = "golden.safetensors"
SCHEMA_NAME = "optimize-export-bundle"
SCHEMA_VERSION = 1

_PROGRAM = "optimize-export"
_LIBRARIES = ("torch", "numpy", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "safetensors", "transformers")
_CHUNK = 1 << 24
_NOT_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

# ----------------------------------------------------------------------------------------------------------- the schema

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
    if isinstance(value, str) and value in _NOT_NUMBERS:
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


def _count(value: object, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _wrong(where, "a whole number", value)


def _seed(value: object, where: str) -> None:
    _count(value, where)
    if isinstance(value, int) and value >= 2**64:
        raise _wrong(where, "a seed below 2**64", value)


def _dimension(value: object, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | str):
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

_tensor = _record({"name": _text, "dtype": _text, "shape": _each(_dimension)})
_file = _record({"path": _path, "sha256": _digest, "bytes": _count})
_parity = _record({"ok": _flag, "verdict": _text, "reason": _text}, {"effort": _text})


def _counts(value: object, where: str) -> None:
    _object(value, where)
    assert isinstance(value, dict)
    for name, count in value.items():
        _count(count, f"{where}.{name}")


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
_manifest = _record(
    {
        "schema": _record({"name": _text, "version": _count}),
        "created": _text,
        "program": _record({"name": _text, "version": _text}),
        "environment": _record({"python": _text, "platform": _text, "libraries": _object}),
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
    {"coverage": _or_null(_object), "notes": _texts, "example_sizes": _counts, "missing": _texts_by_key},
)


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


# -------------------------------------------------------------------------------------------------- writing and reading


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
    return _NOT_NUMBERS[value] if isinstance(value, str) else float(value)


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


def local_roots(*more: Path) -> tuple[str, ...]:
    """The folders of this machine whose paths must not appear in a bundle, the longest first."""
    names = [os.getcwd(), os.path.expanduser("~"), sys.prefix, sys.base_prefix, tempfile.gettempdir()]
    folders = [*more, *(Path(name) for name in names if os.path.isabs(name))]
    both = {str(path) for folder in folders for path in (folder, folder.resolve())}
    return tuple(sorted((text for text in both if len(Path(text).parts) > 1), key=len, reverse=True))


def without_local_paths(value: Any, roots: tuple[str, ...]) -> Any:
    """Cut the folders of this machine from every text in `value`: `/home/me/work/net.py:3` becomes `net.py:3`."""
    if isinstance(value, str):
        for root in roots:
            end = rf"(?:{re.escape(os.sep)}|(?![\w.-]))"
            value = re.sub(
                rf"(?<![\w.-]){re.escape(root)}{end}", lambda found: "" if found[0].endswith(os.sep) else ".", value
            )
        return value
    if isinstance(value, Mapping):
        return {key: without_local_paths(item, roots) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_local_paths(item, roots) for item in value]
    return value


# ---------------------------------------------------------------------------------------------------------- the content


def is_to_be_repeated() -> bool:
    """Whether SOURCE_DATE_EPOCH asks for byte-for-byte reproducible bundles, as it does for builds."""
    return "SOURCE_DATE_EPOCH" in os.environ


def creation_time() -> str:
    """The current time in UTC, or the time of SOURCE_DATE_EPOCH for a reproducible bundle, in ISO 8601.

    Raises:
        BundleError: SOURCE_DATE_EPOCH isn't a whole number of seconds since 1970.
    """
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if epoch is None:
        seconds = int(time.time())
    elif re.fullmatch(r"\d{1,11}", epoch):
        seconds = int(epoch)
    else:
        raise BundleError(f"SOURCE_DATE_EPOCH must be a whole number of seconds since 1970, not {epoch!r}.")
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def describe_program() -> dict[str, str]:
    """The manifest's `program`."""
    return {"name": _PROGRAM, "version": _version_of(_PROGRAM) or "unknown"}


def describe_environment() -> dict[str, Any]:
    """The manifest's `environment`: the platform, and the versions of Python and of the installed libraries."""
    libraries = {name: version for name in _LIBRARIES if (version := _version_of(name))}
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}",
        "libraries": libraries,
    }


def describe_device(device: str | torch.device) -> dict[str, str]:
    """The manifest's `device`: its type ("cpu", "cuda") and the name of the processor."""
    kind = torch.device(device)
    name = torch.cuda.get_device_name(kind) if kind.type == "cuda" else _processor()
    return {"type": kind.type, "name": name}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def weights_hash(state_dict: Mapping[str, Any]) -> str:
    """SHA-256 over the names, dtypes, shapes, layouts and bytes of a state dict, sorted by name.

    The device, strides and shared storage have no effect. Tensors go to the CPU in pieces. Only a tensor that isn't
    contiguous is copied, and at most one at a time. An entry that isn't a tensor contributes its name, and its content
    if it is `bytes` or JSON data; otherwise its type.

    Raises:
        BundleError: the bytes of a tensor can't be read.
    """
    digest = hashlib.sha256()
    for name in sorted(state_dict):
        value = state_dict[name]
        if not isinstance(value, torch.Tensor):
            _hash_extra(digest, name, value)
            continue
        _hash_line(digest, [name, dtype_name(value.dtype), list(value.shape), str(value.layout)])
        try:
            for piece in _pieces(bare(value)):
                digest.update(piece)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            kind = type(value).__name__
            raise BundleError(f"the weight {name} is a {kind} whose bytes can't be read: {error}") from error
    return digest.hexdigest()


def _hash_line(digest: Any, header: Any) -> None:
    digest.update(json.dumps(header).encode("ascii") + b"\n")


def _hash_extra(digest: Any, name: str, value: Any) -> None:
    if isinstance(value, bytes):
        _hash_line(digest, [name, "bytes", len(value)])
        digest.update(value)
        return
    try:
        _hash_line(digest, [name, plain(value)])
    except TypeError:
        _hash_line(digest, [name, type(value).__qualname__])


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    if tensor.is_meta:
        return
    if tensor.layout == torch.sparse_coo:
        whole = tensor.coalesce()
        yield from _pieces(whole.indices())
        yield from _pieces(whole.values())
        return
    if tensor.is_quantized:
        yield from _pieces(tensor.dequantize())
        return
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    step = max(1, _CHUNK // max(1, tensor.element_size()))
    for piece in flat.split(step):
        if piece.numel():
            yield memoryview(piece.cpu().contiguous().view(torch.uint8).numpy())


# ----------------------------------------------------------------------------------------------------------- the README


def usage_text(manifest: Mapping[str, Any]) -> str:
    """The README for the receiver of a bundle, in Markdown: how to run the artifacts without this program."""
    model, parity = manifest["model"], manifest["parity"]
    lines = [
        f"# {printable(model['class'])}",
        "",
        f"Written by {manifest['program']['name']} {manifest['program']['version']} on {manifest['created']}.",
        printable(f"Parity with the original model: {parity['verdict']}. {parity['reason']}").rstrip(),
        "",
        f"`{_PROGRAM} --verify .` checks every file and runs the artifacts on the inputs of `{manifest['golden']['path']}`.",
        f"`sha256sum -c {SUMS}` checks the files alone. A model file is a program: load or verify it only if you trust its"
        f" builder. `--expect SHA256` checks that the bundle is the builder's, by the SHA-256 of `{SUMS}` that the builder"
        " told you; `--no-run` loads no model file.",
        "",
    ]
    if notes := [*lacks(manifest), *manifest.get("notes", ())]:
        lines += [*(f"- {printable(' '.join(note.split()))}" for note in notes), ""]
    for artifact in manifest["artifacts"]:
        sized = {**artifact, "example_sizes": manifest.get("example_sizes", {})}
        lines += [f"## {artifact['path']} ({artifact['format']})", "", *_table(artifact), "", *_example(sized), ""]
    return "\n".join(lines).rstrip() + "\n"


def lacks(manifest: Mapping[str, Any]) -> list[str]:
    """A note for each requested format that the bundle lacks."""
    return [f"the format {name} is missing: {reason}" for name, reason in manifest.get("missing", {}).items()]


def _shape(tensor: Mapping[str, Any]) -> str:
    return "[" + ", ".join(str(size) for size in tensor["shape"]) + "]"


def _table(artifact: Mapping[str, Any]) -> list[str]:
    rows = ["| | name | dtype | shape |", "|---|---|---|---|"]
    for side in ("inputs", "outputs"):
        rows += [f"| {side[:-1]} | `{_cell(t['name'])}` | {t['dtype']} | `{_shape(t)}` |" for t in artifact[side]]
    return rows


def _cell(name: str) -> str:
    """Escape a name for backquotes in a Markdown table."""
    return printable(name).replace("`", "'").replace("|", "\\|")


def _example(artifact: Mapping[str, Any]) -> list[str]:
    examples = {
        "onnx": _onnx_example,
        "torchscript": _torchscript_example,
        "pt2": _pt2_example,
        "aoti": _aoti_example,
    }
    write = examples.get(artifact["format"])
    return ["```python", *write(artifact), "```"] if write else []


def _sizes(tensor: Mapping[str, Any], artifact: Mapping[str, Any]) -> str:
    """A shape that the artifact accepts: open dims as in the example inputs, and a batch of 2 rows."""
    sizes = [artifact["example_sizes"].get(size, 2) if isinstance(size, str) else size for size in tensor["shape"]]
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"


# The dtypes that numpy has. Inputs of other dtypes are left as comments in the ONNX example.
_NUMPY = frozenset(
    ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
)


# The names that the example code uses itself.
_TAKEN = frozenset({"model", "os", "outputs", "torch"})


def _onnx_example(artifact: Mapping[str, Any]) -> list[str]:
    feeds = [
        f"    {json.dumps(t['name'], ensure_ascii=False)}: numpy.zeros({_sizes(t, artifact)}, dtype=numpy.{t['dtype'] + ('_' if t['dtype'] == 'bool' else '')}),"
        for t in artifact["inputs"]
        if t["dtype"] in _NUMPY
    ]
    others = [
        f"    # {printable(t['name'])}: an onnxruntime.OrtValue of {t['dtype']}, {_shape(t)}"
        for t in artifact["inputs"]
        if t["dtype"] not in _NUMPY
    ]
    return [
        "import numpy",
        "import onnxruntime",
        "",
        f'session = onnxruntime.InferenceSession("{artifact["path"]}", providers=["CPUExecutionProvider"])',
        "outputs = session.run(None, {",
        *feeds,
        *others,
        "})",
    ]


def _torchscript_example(artifact: Mapping[str, Any]) -> list[str]:
    return _torch_example(artifact, f'model = torch.jit.load("{artifact["path"]}").eval()')


def _pt2_example(artifact: Mapping[str, Any]) -> list[str]:
    return _torch_example(artifact, f'model = torch.export.load("{artifact["path"]}").module()')


def _aoti_example(artifact: Mapping[str, Any]) -> list[str]:
    return _torch_example(
        artifact,
        "# Made for one device and kind of processor; without this variable the sizes and dtypes of inputs aren't "
        "checked.",
        'os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"',
        f'model = torch._inductor.aoti_load_package("{artifact["path"]}")',
    )


def _torch_example(artifact: Mapping[str, Any], *load: str) -> list[str]:
    made = {t["name"]: f"torch.zeros({_sizes(t, artifact)}, dtype=torch.{t['dtype']})" for t in artifact["inputs"]}
    if all(name.isidentifier() and not keyword.iskeyword(name) and name not in _TAKEN for name in made):
        inputs, given = [f"{name} = {value}" for name, value in made.items()], ", ".join(made)
    else:
        inputs = ["inputs = [", *(f"    {value},  # {printable(name)}" for name, value in made.items()), "]"]
        given = "*inputs"
    return [
        *(["import os"] if any("os." in line for line in load) else []),
        "import torch",
        "",
        *load,
        *inputs,
        "with torch.inference_mode():",
        f"    outputs = model({given})",
    ]
