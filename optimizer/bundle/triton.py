"""Write an artifact of a bundle into a model repository of NVIDIA's Triton Inference Server.

    REPOSITORY/NAME/config.pbtxt    the configuration of the model
    REPOSITORY/NAME/1/model.onnx    the artifact, with its external data; files keep their names

The configuration is the text form of `ModelConfig` in Triton's `model_config.proto`. The names of the inputs of
TorchScript files, and what each backend takes, are those of Triton's onnxruntime_backend and pytorch_backend.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from optimize_export.errors import BundleError, UsageError
from optimize_export.manifest import MANIFEST, file_problem, sums_problem
from optimize_export.runtime import Route, is_batched, own_routes
from optimizer.bundle.bundle import new_folder, open_bundle
from optimizer.bundle.exchange import absolute
from optimizer.parity import WITHIN_BUDGET, accuracy_text

_VERSION = "1"
# The types that both backends take, and those of onnxruntime_backend alone.
_TYPES = {
    **{"bool": "TYPE_BOOL", "uint8": "TYPE_UINT8", "int8": "TYPE_INT8", "int16": "TYPE_INT16", "int32": "TYPE_INT32"},
    **{"int64": "TYPE_INT64", "float16": "TYPE_FP16", "float32": "TYPE_FP32", "float64": "TYPE_FP64"},
}
_ONNX_TYPES = {"uint16": "TYPE_UINT16", "uint32": "TYPE_UINT32", "uint64": "TYPE_UINT64", "bfloat16": "TYPE_BF16"}


def write_triton_model(bundle: str | Path, repository: str | Path, format: str | None = None) -> Path:
    """Write an artifact and its `config.pbtxt` into a model repository, as a model with the name of the bundle's folder.

    Args:
        format: of the artifact. The default is the recommended one if it is ONNX or TorchScript, otherwise ONNX, then
            TorchScript.

    Returns:
        The new folder of the model in the repository.

    Raises:
        BundleError: the bundle or its artifact is damaged, or the repository has a model of this name.
        UsageError: the bundle has no such artifact, or Triton can't serve it.
    """
    opened = open_bundle(bundle)
    folder, manifest = opened.path, opened.manifest
    if problem := sums_problem(folder, manifest):
        raise BundleError(f"{folder} is damaged: {problem}")
    artifact = _artifact(manifest, format)
    config = "\n".join(_config(folder.name, manifest, artifact)) + "\n"
    target = absolute(repository) / folder.name
    if (target / MANIFEST).is_file():
        raise BundleError(f"{target} is a bundle, which is not replaced: choose another repository.")
    with new_folder(target) as staging:
        (staging / "config.pbtxt").write_text(config, encoding="utf-8", newline="\n")
        for file in (file for file in manifest["files"] if file["path"] in artifact["files"]):
            if problem := file_problem(folder, file):
                raise BundleError(f"{folder} is damaged: {problem}")
            copy = staging / _VERSION / file["path"]
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / file["path"], copy)
            # Another process may have changed the file since it was checked.
            if problem := file_problem(staging / _VERSION, file):
                raise BundleError(f"{folder} is damaged: {problem}")
    return target


def _artifact(manifest: Mapping[str, Any], format: str | None) -> Mapping[str, Any]:
    artifacts = {each["format"]: each for each in manifest["artifacts"]}
    if format is not None and format not in artifacts:
        raise UsageError(f"The bundle has no {format!r} artifact; it has {', '.join(artifacts)}.")
    recommended = ((manifest.get("benchmark") or {}).get("recommended") or {}).get("format")
    routes = own_routes(artifacts)
    # Not those that only OpenVINO is fast with.
    served = {route.format for route in routes if route.runtime == "onnxruntime" or route.format == "torchscript"}
    wanted = [recommended, *(route.format for route in routes)] if format is None else [format]
    found = next((each for each in wanted if each in served), None)
    if found is None:
        raise UsageError(f"Triton serves onnx and torchscript here, not {format or ', '.join(artifacts)}.")
    return artifacts[found]


def _is_onnx(format: str) -> bool:
    return format.startswith("onnx")


def _config(name: str, manifest: Mapping[str, Any], artifact: Mapping[str, Any]) -> Iterator[str]:
    """The lines of `config.pbtxt`.

    Raises:
        UsageError: Triton doesn't take the dtype of a tensor, or a scalar.
    """
    onnx = _is_onnx(artifact["format"])
    batched = is_batched(manifest, artifact)
    yield f"name: {_quoted(name)}"
    yield 'backend: "onnxruntime"' if onnx else 'backend: "pytorch"\nplatform: "pytorch_libtorch"'
    yield f"default_model_filename: {_quoted(artifact['path'])}"
    if artifact.get("accuracy"):
        yield f"# {WITHIN_BUDGET}, which allows more than rounding: {accuracy_text(artifact['accuracy'])}"
    recommended = (manifest.get("benchmark") or {}).get("recommended")
    route = None if recommended is None else Route.from_json(recommended)
    # What was measured in OpenVINO says nothing about onnxruntime.
    settings = route.settings if route and (route.format, route.runtime) == _triton_runs(artifact["format"]) else None
    on_gpu = manifest["device"]["type"] == "cuda"
    # It is measured on the CPU.
    service = manifest.get("service") if batched and settings is not None and not on_gpu else None
    if batched:
        # Raising it needs no new file, but larger batches weren't compared.
        compared = max(manifest["parity"].get("batch_sizes") or [1])
        most, told = (
            (compared, "compared with the original") if service is None else (service["max_batch"], "measured as best")
        )
        yield f"# the largest batch that was {told}\nmax_batch_size: {most}"
        if not (artifact.get("measurement") or {}).get("rows"):
            yield "# not checked: that no row depends on the others of its batch (build with --row-independence)"
        wait = round(1e6 * service["max_wait"]) if service else 0
        yield f"dynamic_batching {{ max_queue_delay_microseconds: {wait} }}" if wait else "dynamic_batching { }"
    else:
        yield "max_batch_size: 0"
    # pytorch_backend knows the inputs and outputs of a file by their positions.
    for kind, tensors in (("input", artifact["inputs"]), ("output", artifact["outputs"])):
        for index, tensor in enumerate(tensors):
            own = tensor["name"] if onnx else f"{kind.upper()}__{index}"
            yield from _tensor(kind, own, tensor, batched=batched, types=_TYPES | (_ONNX_TYPES if onnx else {}))
    count = 1 if service is None else service["instances"]
    yield f"instance_group [ {{ count: {count} kind: {'KIND_GPU' if on_gpu else 'KIND_CPU'} }} ]"
    if threads := (service or settings or {}).get("threads"):
        key = "intra_op_thread_count" if onnx else "INTRA_OP_THREAD_COUNT"
        yield f'parameters {{ key: "{key}" value {{ string_value: "{threads}" }} }}'


def _triton_runs(format: str) -> tuple[str, str]:
    """A format with the runtime of Triton's backend for it."""
    return format, "onnxruntime" if _is_onnx(format) else "torch"


def _tensor(
    kind: str, name: str, tensor: Mapping[str, Any], *, batched: bool, types: Mapping[str, str]
) -> Iterator[str]:
    if tensor["dtype"] not in types:
        raise UsageError(f"Triton can't serve this file: its {kind} {tensor['name']} is {tensor['dtype']}.")
    if not tensor["shape"]:
        raise UsageError(f"Triton can't serve this file: its {kind} {tensor['name']} is a scalar; give it a dim.")
    dims = [size if isinstance(size, int) else -1 for size in tensor["shape"][batched:]]
    yield f"{kind} [ {{"
    yield f"  name: {_quoted(name)}  data_type: {types[tensor['dtype']]}  dims: {dims or [1]}"
    # A configuration has at least one dim per tensor, and only a batch may be reshaped to none.
    if not dims:
        yield "  reshape { shape: [ ] }"
    yield "} ]"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
