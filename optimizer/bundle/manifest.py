"""The manifest's entries about the machine and the weights; and the README, a model card made from a manifest.

docs/bundle.md explains every field.
"""

import hashlib
import json
import keyword
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from optimize_export.errors import BundleError, printable, printable_lines
from optimize_export.manifest import PROGRAM, SUMS, plain
from optimize_export.runtime import processor
from optimize_export.wording import dtype_name
from optimizer.bundle.report import Summary, summary_of
from optimizer.showing import count_text, number_text, percent_text, seconds_text, size_text

_CHUNK = 1 << 24
# A processor of the same kind has other vector widths and kernels. Another kind also blocks and splits sums, fuses
# multiplications with additions, and fuses kernels, which changes where values are rounded to half precision.
_SAME_KIND, _OTHER_KIND = 2.0, 4.0


# ---------------------------------------------------------------------------------------------------------- the content


def creation_time() -> str:
    """The current time in UTC, or the time of SOURCE_DATE_EPOCH for a reproducible bundle, in ISO 8601."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if epoch is None:
        seconds = int(time.time())
    elif re.fullmatch(r"\d{1,11}", epoch):
        seconds = int(epoch)
    else:
        raise BundleError(f"SOURCE_DATE_EPOCH must be a whole number of seconds since 1970, not {epoch!r}.")
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def describe_device(device: str | torch.device) -> dict[str, str]:
    """The manifest's `device`: its type ("cpu", "cuda") and the name of the processor."""
    kind = torch.device(device)
    name = torch.cuda.get_device_name(kind) if kind.type == "cuda" else processor()
    return {"type": kind.type, "name": name}


def factor_between(measured: Mapping[str, str], here: Mapping[str, str]) -> float:
    """The factor by which an error may be larger here than on the device where the noise was measured.

    Another device sums in a different order and fuses different instructions, so its rounding errors are a different
    sample of the same distribution. The factor multiplies parity's own. It assumes that both devices accumulate half
    precision in float32 and that TF32 is off on both.
    """
    if measured["type"] != here["type"]:
        return _OTHER_KIND
    return 1.0 if measured["name"] == here["name"] else _SAME_KIND


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
            for piece in _pieces(value.detach()):
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


# Facts that only the user knows. The card has those that were given as metadata of the files.
_GIVEN = ("license", "base_model", "pipeline_tag", "language")


def usage_text(manifest: Mapping[str, Any]) -> str:
    """The README for the receiver of a bundle, in Markdown: how to run the artifacts, also without this program.

    It is a model card: the Hugging Face Hub reads the YAML at its start, and shows the rest.
    """
    model, parity, benchmark = manifest["model"], manifest["parity"], manifest.get("benchmark")
    summary = summary_of(manifest)
    lines = [
        *_front_matter(manifest),
        f"# {printable(model['class'])}",
        "",
        f"Written by {manifest['program']['name']} {manifest['program']['version']} on {manifest['created']}.",
        printable(f"Parity with the original model: {parity['verdict']}. {parity['reason']}").rstrip(),
        *([printable(f"Recommendation: {benchmark['reason']}.")] if benchmark else []),
        "",
        *_files(summary),
        "## Run it",
        "",
        "`load` runs the recommended file, with the original's arguments and outputs:",
        "",
        "```py",
        "from optimize_export import load",
        "",
        'run = load(".")',
        "outputs = run(x)",
        "```",
        "",
        *(_latency(manifest, benchmark) if benchmark else []),
        "## Check it",
        "",
        f"`{PROGRAM} verify .` checks every file and runs the artifacts on the inputs of `{manifest['golden']['path']}`.",
        f"`sha256sum -c {SUMS}` checks the files alone. A model file is a program: load or verify it only if you trust its"
        f" builder. `--expect SHA256` checks that the bundle is the builder's, by the SHA-256 of `{SUMS}` that the builder"
        " told you; `--no-run` loads no model file.",
        "",
    ]
    compared = ", ".join(map(str, sorted(summary.batch_sizes)))
    notes = [*([f"compared at batch {compared}"] if compared else []), *notes_on_missing(manifest)]
    if notes := [*notes, *manifest.get("notes", ())]:
        lines += ["## Limits", "", *(f"- {printable(' '.join(note.split()))}" for note in notes), ""]
    for artifact in manifest["artifacts"]:
        sized = {**artifact, "example_sizes": manifest.get("example_sizes", {})}
        lines += [f"## {artifact['path']} ({artifact['format']})", "", *_accuracy(artifact), *_table(artifact), ""]
        lines += [*_example(sized), ""]
    lines += _origin(manifest)
    return printable_lines("\n".join(lines).rstrip() + "\n")


def _front_matter(manifest: Mapping[str, Any]) -> list[str]:
    """The metadata in YAML. A printable text in JSON's quotes is one in YAML too."""
    artifacts = manifest["artifacts"]
    metadata: dict[str, str] = next((each["metadata"] for each in artifacts if each.get("metadata")), {})
    fields = {"library_name": PROGRAM, **{name: metadata[name] for name in _GIVEN if metadata.get(name)}}
    tags = [PROGRAM, *dict.fromkeys(artifact["format"] for artifact in artifacts)]
    lines = [f"{name}: {_quoted(value)}" for name, value in fields.items()]
    return ["---", *lines, "tags:", *(f"- {_quoted(tag)}" for tag in tags), "---", ""]


def _quoted(text: str) -> str:
    return json.dumps(printable(text), ensure_ascii=False)


def _files(summary: Summary) -> list[str]:
    rows = ["| file | format | size | proof |", "|---|---|---|---|"]
    for file in summary.files:
        said = file.said or ("" if file.share is None else f"{percent_text(file.share)} of the allowed error")
        proof = printable(": ".join(filter(None, (file.verdict, said)))).replace("|", "\\|")
        rows.append(f"| `{_cell(file.path)}` | {file.format} | {size_text(file.bytes)} | {proof} |")
    return ["## Files", "", *rows, ""]


def _latency(manifest: Mapping[str, Any], benchmark: Mapping[str, Any]) -> list[str]:
    timed = [each for each in benchmark.get("figures", ()) if each["seconds"] is not None and not each["dropped"]]
    if not timed:
        return []
    batches, threads = ", ".join(map(str, benchmark["batch_sizes"])), count_text(benchmark["threads"], "thread")
    rows = ["| way to run it | median | p95 | speed-up |", "|---|---|---|---|"]
    for each in timed:
        gain = each["speed_up"]
        speed = "" if gain is None else f"{gain['median']:.2f} ({gain['low']:.2f} to {gain['high']:.2f})"
        times = f"{seconds_text(each['seconds'])} | {seconds_text(each['p95'])}"
        rows.append(f"| {_cell(each['name'])} | {times} | {speed} |")
    where = f"Of a call at batch {batches}, on {printable(manifest['device']['name'])} with {threads} of torch:"
    return ["## Latency", "", where, "", *rows, ""]


def _origin(manifest: Mapping[str, Any]) -> list[str]:
    model, environment = manifest["model"], manifest["environment"]
    applied = [each["name"] for each in manifest.get("passes", ()) if each["status"] == "applied"]
    versions = {"Python": environment["python"], **environment["libraries"]}
    lines = [
        f"from `{_cell(model['source'])}`, with {count_text(model['parameters'], 'parameter')}",
        f"passes that changed it: {', '.join(applied) or 'none'}",
        f"versions: {', '.join(f'{name} {version}' for name, version in versions.items())}, on {environment['platform']}",
        f"SHA-256 of the weights: {model['weights_sha256']}",
    ]
    return ["## How it was made", "", *(f"- {printable(line)}" for line in lines), ""]


def notes_on_missing(manifest: Mapping[str, Any]) -> list[str]:
    """A note for each requested format that the bundle lacks."""
    return [f"the format {name} is missing: {reason}" for name, reason in manifest.get("missing", {}).items()]


def _shape(tensor: Mapping[str, Any]) -> str:
    return "[" + ", ".join(str(size) for size in tensor["shape"]) + "]"


def _table(artifact: Mapping[str, Any]) -> list[str]:
    rows = ["| | name | dtype | shape |", "|---|---|---|---|"]
    for side in ("inputs", "outputs"):
        rows += [f"| {side[:-1]} | `{_cell(t['name'])}` | {t['dtype']} | `{_shape(t)}` |" for t in artifact[side]]
    return rows


def _accuracy(artifact: Mapping[str, Any]) -> list[str]:
    """What a lossy file may differ by, and how far each output differs; nothing for an exact file."""
    if not artifact.get("accuracy"):
        return []
    parity = artifact["parity"]
    rows = ["| output | largest error | cosine | same top-1 or equal |", "|---|---|---|---|"]
    for output in parity["outputs"]:
        cosine, share = ("-" if value is None else f"{value:.6f}" for value in (output["cosine"], output["agreement"]))
        rows.append(f"| `{_cell(output['name'])}` | {number_text(output['max_error'])} | {cosine} | {share} |")
    said = f"Within the accuracy budget, with other outputs than the original's: {printable(parity['reason'])}."
    return [said, "The worst figures over all calls:", "", *rows, ""]


def _cell(name: str) -> str:
    """Escape a name for backquotes in a Markdown table."""
    return printable(name).replace("`", "'").replace("|", "\\|")


# How torch loads each of its formats.
_LOADS = {
    "torchscript": ('model = torch.jit.load("{path}").eval()',),
    "pt2": ('model = torch.export.load("{path}").module()',),
    "aoti": (
        "# Made for one device and kind of processor; without this variable the sizes and dtypes of inputs aren't checked.",
        'os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"',
        'model = torch._inductor.aoti_load_package("{path}")',
    ),
}


def _example(artifact: Mapping[str, Any]) -> list[str]:
    if artifact["format"].startswith("onnx"):
        return ["```python", *_onnx_example(artifact), "```"]
    load = [line.format(path=artifact["path"]) for line in _LOADS.get(artifact["format"], ())]
    return ["```python", *_torch_example(artifact, load), "```"] if load else []


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


def _torch_example(artifact: Mapping[str, Any], load: Sequence[str]) -> list[str]:
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
