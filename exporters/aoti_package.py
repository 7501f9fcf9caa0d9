"""Write an AOTInductor package with the metadata that its loader needs, and load it on a machine that can run it."""

from __future__ import annotations

import io
import json
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from exporters.base import TensorSpec, captured_names
from exporters.errors import OtherMachine
from exporters.evidence import Evidence
from exporters.guards import guard_holds
from exporters.input_checks import refuse_unfit
from exporters.metadata import extra_files
from exporters.torch_private import compute_capability, package_loader, package_writer, vector_flags
from exporters.writing import write_archive

# The name of the model in the package.
MODEL = "model"
# The key of our entry in the package's metadata.
_OURS = "optimize_export"
# Alignment in bytes that vector loads of GPU kernels need.
_ALIGNMENT = 16


def write_package(files: Sequence[Path], evidence: Evidence, guards: Sequence[str], path: Path) -> None:
    """Write the package, including the metadata that its loader needs.

    Raises:
        OSError: the file can't be written, for example because the disk is full.
    """
    ours = {
        "inputs": [asdict(spec) for spec in evidence.input_specs],
        "parameters": captured_names(evidence.adapter.input_names),
        "guards": list(guards),
        "needs": _needs(),
        "device": _device_name(evidence.device),
        "torch": torch.__version__,
    }
    for file in files:
        if file.name.endswith("_metadata.json"):
            metadata = {**json.loads(file.read_text()), _OURS: json.dumps(ours)}
            file.write_text(json.dumps(metadata))
    names: list[Any] = [str(file) for file in files]
    package = partial(package_writer(), aoti_files=names, extra_files=extra_files(evidence.metadata))
    size = sum(file.stat().st_size for file in files)

    def in_memory() -> bytes:
        buffer = io.BytesIO()
        package(buffer)
        return buffer.getvalue()

    write_archive(path, size, in_memory, package)


def _needs() -> list[str]:
    """The CPU features that the vector code needs, by their names in `torch.cpu` without underscores."""
    found = re.findall(r"-m(?!arch|cpu)([\w-]+)|\+(\w+)", vector_flags())
    names = {(option or extension).replace("-", "") for option, extension in found}
    return sorted({"fma": "fma3"}.get(name, name) for name in names)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def package_metadata(path: Path) -> dict[str, Any]:
    """The package's metadata, with our entry parsed.

    Raises:
        OtherMachine: it isn't a package of this program.
    """
    found: Mapping[str, str] = package_loader().load_metadata_from_package(str(path), MODEL)
    if _OURS not in found:
        raise OtherMachine(
            f"{path.name} isn't a package of this program: it doesn't say which machine it was compiled for."
        )
    return {**found, _OURS: json.loads(found[_OURS])}


def made_for(metadata: Mapping[str, Any]) -> str:
    """The device, the kind of processor and the versions that a package was compiled for, in words."""
    ours = metadata[_OURS]
    if metadata["AOTI_DEVICE_KEY"] == "cuda":
        kind = f"{ours['device']} (compute capability {metadata['AOTI_COMPUTE_CAPABILITY']})"
    else:
        needs = f" processors with {', '.join(ours['needs'])}" if ours["needs"] else ""
        kind = f"{metadata['AOTI_MACHINE']}{needs}"
    return f"{metadata['AOTI_DEVICE_KEY']}: {kind}, {metadata['AOTI_PLATFORM']}, torch {ours['torch']}"


def _refuse_other_machine(name: str, metadata: Mapping[str, Any], device: torch.device) -> None:
    here = {"AOTI_DEVICE_KEY": device.type, "AOTI_PLATFORM": sys.platform, "AOTI_MACHINE": platform.machine()}
    if device.type == "cuda" and metadata["AOTI_DEVICE_KEY"] == "cuda":
        here["AOTI_COMPUTE_CAPABILITY"] = str(compute_capability())
    able = {capability.replace("_", "") for capability, has in torch.cpu.get_capabilities().items() if has is True}
    lacking = [need for need in metadata[_OURS]["needs"] if need not in able]
    other = [value for key, value in here.items() if metadata[key] != value]
    if other or lacking:
        what = f"the target here is {', '.join(other)}" if other else f"the processor here has no {', '.join(lacking)}"
        raise OtherMachine(
            f"{name} was compiled for {made_for(metadata)}, but {what}: export it on the machine where it will run."
        )


class LoadedPackage:
    """A loaded package, which is called like any loaded artifact."""

    placement: dict[str, int] | None = None

    def __init__(self, path: Path, device: torch.device) -> None:
        self.device = device.type
        # The precision was fixed at compile time.
        self.settings: dict[str, str] = {}
        self._target = device
        metadata = package_metadata(path)
        _refuse_other_machine(path.name, metadata, device)
        ours = metadata[_OURS]
        self._inputs = tuple(TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in ours["inputs"])
        self._parameters: list[str] = ours["parameters"]
        self._guards: list[str] = ours["guards"]
        index = -1 if device.index is None else device.index
        self._loader = package_loader()(str(path), MODEL, False, 1, index)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Compiled code checks nothing: it would read past the end of a tensor that is too small.
        refuse_unfit(self._inputs, tensors)
        sizes = dict(zip(self._parameters, (tensor.shape for tensor in tensors), strict=True))
        for guard in self._guards:
            if not guard_holds(guard, sizes):
                raise ValueError(f"The file wasn't compiled for inputs of these sizes: {guard} doesn't hold.")
        held = [_laid_out(tensor.detach().to(self._target)) for tensor in tensors]
        with torch.no_grad():
            outputs = self._loader.boxed_run(held)
        # An output may be a constant in the library, whose memory is freed with the loader.
        return tuple(output.clone() for output in outputs)


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the layout that the code was compiled for: contiguous, at an aligned address."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor
