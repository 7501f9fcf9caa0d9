"""Golden data: stored inputs and reference outputs, which judge the artifacts without the original model.

`golden.safetensors` contains one tensor per input and output of each call, such as `call0/input/x` and
`call0/output/logits`. `call0/tied/ids` is a mask of the elements that aren't compared. The manifest has the order of
the inputs and outputs, because a safetensors file has no order. It also has the noise of each output.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file

from optimize_export.errors import BundleError
from optimize_export.manifest import GOLDEN, SCHEMA_NAME, number, parse_json, read_checked
from optimize_export.wording import dtype_name
from optimizer.bundle.manifest import describe_device
from optimizer.model import Call
from optimizer.parity import GoldenEntry, OutputNoise, Tolerance

Flatten = Callable[[tuple[Any, ...], Mapping[str, Any]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class GoldenCall:
    """One stored call: flat inputs and outputs by name, in the order of the artifacts, on the CPU."""

    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]
    """The reference outputs, in the dtypes that an artifact must return."""
    tied: Mapping[str, torch.Tensor]
    """Bool masks, True for elements that aren't compared because rounding or equal scores decide them in the original.
    Only outputs with such elements have a mask."""
    batch_size: int | None
    draw: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Of open dims other than the batch, by name, where they differ from the example inputs."""
    seed: int | None = None
    """Of torch's random numbers; None if the original draws none."""

    @property
    def entry(self) -> GoldenEntry:
        """The call without its inputs, which a judgement doesn't use."""
        sizes = tuple(self.sizes.items())
        return GoldenEntry(self.batch_size, self.draw, Call((), {}), dict(self.outputs), dict(self.tied), sizes)


def write_golden(
    folder: Path,
    entries: Sequence[GoldenEntry],
    noises: Mapping[str, OutputNoise],
    *,
    flatten: Flatten,
    input_names: Sequence[str],
    output_names: Sequence[str],
    device: str | torch.device = "cpu",
    atol: Tolerance = None,
    rtol: Tolerance = None,
    precision: str = "",
) -> dict[str, Any]:
    """Write `golden.safetensors` into a folder and return the manifest's `golden`.

    Args:
        entries, noises: the calls and noises of the reference, with the reference's output names.
        flatten: maps an entry's args and kwargs to its tensors, in the order of `input_names`.
        input_names, output_names: the names in the artifacts.
        device: where the noise was measured.
        atol, rtol: the user's tolerances that replace the noise, by the reference's output names.
        precision: "bfloat16" or "float16" if the noise is the original's error at that precision; "" for rounding.
    """
    if not entries:
        raise ValueError("golden data needs at least one call")
    own_names = list(entries[0].outputs)
    renamed = dict(zip(own_names, output_names, strict=False))
    tensors: dict[str, torch.Tensor] = {}
    complex_names: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, entry in enumerate(entries):
        flat = flatten(entry.call.args, entry.call.kwargs)
        if len(flat) != len(input_names) or len(own_names) != len(output_names) or list(entry.outputs) != own_names:
            raise ValueError(
                f"a call has {len(flat)} inputs and the outputs {list(entry.outputs)}; "
                f"the names are {list(input_names)} and {list(output_names)}"
            )
        inputs = dict(zip(input_names, flat, strict=True))
        outputs = {renamed[name]: tensor for name, tensor in entry.outputs.items()}
        tied = {renamed[name]: tensor for name, tensor in entry.tied.items()}
        for side, values in (("input", inputs), ("output", outputs), ("tied", tied)):
            for name, tensor in values.items():
                key = f"call{index}/{side}/{name}"
                if tensor.is_complex():
                    complex_names.append(key)
                tensors[key] = _storable(tensor)
        calls.append(
            {
                "name": f"call{index}",
                "batch_size": entry.batch_size,
                "draw": entry.draw,
                **({"sizes": dict(entry.sizes)} if entry.sizes else {}),
                **({} if entry.seed is None else {"seed": entry.seed}),
                "inputs": list(inputs),
                "outputs": list(outputs),
                "tied": list(tied),
            }
        )
    # One metadata entry only, because safetensors writes several entries in a different order each time.
    save_file(tensors, folder / GOLDEN, metadata={SCHEMA_NAME: json.dumps({"complex": complex_names})})
    return {
        "path": GOLDEN,
        "device": describe_device(device),
        "precision": precision,
        "calls": calls,
        "outputs": [
            {**replace(noises[own], name=name).to_json(), "atol": _of(atol, own), "rtol": _of(rtol, own)}
            for own, name in renamed.items()
        ],
    }


def _of(tolerance: Tolerance, name: str) -> float | None:
    return tolerance.get(name) if isinstance(tolerance, Mapping) else tolerance


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to dense CPU memory of its own, because safetensors refuses tensors that share storage."""
    tensor = tensor.detach().resolve_conj().resolve_neg().to("cpu")
    if tensor.is_complex():
        # safetensors has no complex128, and its older versions no complex64. So store pairs of real numbers.
        tensor = torch.view_as_real(tensor)
    return tensor.clone(memory_format=torch.contiguous_format)


def read_golden(folder: Path, manifest: Mapping[str, Any]) -> tuple[GoldenCall, ...]:
    """Read the golden calls of a bundle, on the CPU.

    Raises:
        BundleError: the file was changed, or the calls can't be read, lack a tensor, or differ from the manifest in a
            dtype.
    """
    golden = manifest["golden"]
    path = folder / golden["path"]
    data = read_checked(folder, manifest, golden["path"])
    try:
        # It checks that all tensors lie inside the file.
        tensors = load_tensors(data)
        header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
        written = header.get("__metadata__", {}).get(SCHEMA_NAME)
        if written is None:
            raise ValueError(f"its metadata lack {SCHEMA_NAME}, which this program writes")
        complex_names = frozenset(parse_json(written.encode("utf-8"))["complex"])
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise BundleError(f"{path} can't be read: {error}.") from error
    for key in complex_names & tensors.keys():
        try:
            tensors[key] = torch.view_as_complex(tensors[key])
        except RuntimeError as error:
            raise BundleError(f"{path} can't be read: {key} isn't made of pairs of real numbers.") from error
    dtypes = {
        "input": {each["name"]: each["dtype"] for artifact in manifest["artifacts"] for each in artifact["inputs"]},
        "output": {each["name"]: each["dtype"] for each in golden["outputs"]},
        "tied": {each["name"]: "bool" for each in golden["outputs"]},
    }

    def tensors_of(call: Mapping[str, Any], kind: str, names: str) -> dict[str, torch.Tensor]:
        found = {name: tensors[f"{call['name']}/{kind}/{name}"] for name in call[names]}
        for name, tensor in found.items():
            key, dtype, wanted = f"{call['name']}/{kind}/{name}", dtype_name(tensor.dtype), dtypes[kind].get(name)
            if wanted not in (None, dtype):
                raise BundleError(f"{path} can't be used: {key} has dtype {dtype}, and the manifest says {wanted}.")
            if kind == "tied" and tensor.shape != tensors[f"{call['name']}/output/{name}"].shape:
                raise BundleError(f"{path} can't be used: {key} doesn't have the shape of its output.")
        return found

    try:
        return tuple(
            GoldenCall(
                tensors_of(call, "input", "inputs"),
                tensors_of(call, "output", "outputs"),
                tensors_of(call, "tied", "tied"),
                call["batch_size"],
                call["draw"],
                call.get("sizes", {}),
                call.get("seed"),
            )
            for call in golden["calls"]
        )
    except KeyError as error:
        raise BundleError(f"{path} lacks the tensor {error}, which the manifest names.") from error


def stored_noises(golden: Mapping[str, Any]) -> dict[str, OutputNoise]:
    """The noise of each output in a manifest's `golden`."""
    return {entry["name"]: OutputNoise.from_json(entry) for entry in golden["outputs"]}


def stored_tolerances(golden: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The user's `atol` and `rtol` by output name; a kind without any tolerance is left out."""
    found = {
        kind: {entry["name"]: number(entry[kind]) for entry in golden["outputs"] if entry.get(kind) is not None}
        for kind in ("atol", "rtol")
    }
    return {kind: values for kind, values in found.items() if values}
