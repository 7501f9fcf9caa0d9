"""AOTI: the program captured by torch.export, compiled to machine code for one device and one kind of processor.

AOTInductor compiles it; `torch._inductor.aoti_load_package` and libtorch run it. Running it needs no Python and no
compiler.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from exporters.aoti_compile import MODEL, Compilation, Compiled, compile_here
from exporters.base import (
    Artifact,
    Exporter,
    ExportRequest,
    Limit,
    LoadedArtifact,
    TensorSpec,
    captured_names,
    refuse_unfit,
)
from exporters.errors import ExportError, OtherMachine, RouteRefused
from exporters.evidence import Evidence, gather
from exporters.exported_program import captured, conditions_of, guard_holds, guards_in_force, take_guards
from exporters.isolation import refusing, silent
from exporters.metadata import extra_files, read_extra_file, write_archive
from exporters.places import Program
from exporters.proof import prove_at_calls, prove_beyond
from exporters.routes import Route, first_right
from exporters.torch_private import compute_capability, package_loader, package_writer

# Maximum number of terms that the compiled loops add sequentially; torch sums pairwise.
_IN_A_ROW = 4096

# The key of a compilation in the captures.
_BEGUN = "compilation"
# The key of our entry in the package's metadata.
_OURS = "optimize_export"
# Alignment in bytes that vector loads of GPU kernels need.
_ALIGNMENT = 16


class AotiExporter(Exporter):
    """The exporter to `model.aoti.pt2`."""

    name: ClassVar[str] = "aoti"
    file_name: ClassVar[str] = "model.aoti.pt2"
    # The time of `time.monotonic` at which compiling is given up; None for no limit. With a limit, the program is compiled in
    # a child process.
    until: float | None = None

    def export(self, request: ExportRequest, directory: Path) -> Artifact:
        if (lacking := missing_compiler()) is not None:
            raise ExportError(f"The model can't be exported to aoti: {lacking}.")
        evidence = _gathered(request)
        programs: list[Program] = []
        limits: list[Limit] = []

        def compiled(folder: Path, *, strict: bool) -> tuple[Path, ...]:
            if programs:
                # Compiling takes minutes, and what fails for one program fails for the other.
                raise RouteRefused("not tried, because the model can be captured without strict mode")
            program, placed = captured(evidence, strict=strict)
            programs.append(placed)
            guards = take_guards(program)
            path = folder / self.file_name
            with evidence.undisturbed():
                if self.until is None:
                    done = compile_here(program, evidence.open_dims, folder)
                else:
                    begun = evidence.captures.known(_BEGUN) or Compilation(program, evidence.open_dims, folder)
                    done = begun.wait(self.until)
            loaded = self._package(done, evidence, (), path)
            agreed = prove_beyond(evidence, loaded, conditions_of(done.assumptions, evidence), guards, limits)
            if kept := guards_in_force(guards, evidence, agreed):
                del loaded
                loaded = self._package(done, evidence, kept, path)
            prove_at_calls(evidence, loaded, [path])
            return (path,)

        routes = (
            Route("aotinductor", partial(compiled, strict=False)),
            Route("aotinductor-strict", partial(compiled, strict=True)),
        )

        def known(artifact: Artifact) -> Artifact:
            notes = (*artifact.notes, f"Made for {made_for(package_metadata(artifact.path))}.")
            return replace(artifact, notes=notes, limits=tuple(limits))

        return first_right(self, request, evidence, routes, directory, known)

    @staticmethod
    def begin(request: ExportRequest, folder: Path) -> Compilation:
        """Start to compile in a child process what an export with a limit and the same captures will then wait for.

        Args:
            folder: an empty one, which must stay until then.

        Raises:
            RouteRefused: the model can't be captured, or can't be handed to another process.
        """
        evidence = _gathered(request)

        def started() -> Compilation:
            program, _ = captured(evidence, strict=False)
            take_guards(program)
            return Compilation(program, evidence.open_dims, folder)

        return evidence.captures.once(_BEGUN, started)

    @staticmethod
    def load(path: Path, device: str) -> LoadedArtifact:
        return LoadedPackage(path, torch.device(device))

    @staticmethod
    def for_graphs(path: Path, device: str) -> LoadedArtifact:
        """Load the file for runs in CUDA graphs, by one thread at a time.

        By default, a run asks the GPU whether the last one has finished, which isn't allowed while a graph is captured.
        """
        return LoadedPackage(path, torch.device(device), single_threaded=True)

    @staticmethod
    def read_metadata(path: Path) -> Mapping[str, str]:
        return read_extra_file(path)

    def _package(self, done: Compiled, evidence: Evidence, guards: Sequence[str], path: Path) -> LoadedArtifact:
        """Package the files of a compiled program and load the package."""
        with refusing("the package can't be written"), silent():
            write_package(done, evidence, guards, path)
        with refusing("the package can't be loaded"):
            return self.load(path, str(evidence.device))


def _gathered(request: ExportRequest) -> Evidence:
    return replace(gather(request), in_a_row=_IN_A_ROW)


def missing_compiler() -> str | None:
    """A clause that says what AOTInductor needs in order to compile, and how to get it; None if nothing is missing.

    The passes have a similar check for torch.compile, since neither package imports the other.
    """
    # Inductor only looks for this compiler.
    usual = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    compiler = os.environ.get("CXX", usual)
    if shutil.which(compiler) is None:
        return f"AOTInductor needs a C++ compiler, and there is no {compiler!r}: install one or set CXX"
    return None


def write_package(done: Compiled, evidence: Evidence, guards: Sequence[str], path: Path) -> None:
    """Write the package, including the metadata that its loader needs."""
    device = evidence.device
    ours = {
        "inputs": [asdict(spec) for spec in evidence.input_specs],
        "parameters": captured_names(evidence.adapter.input_names),
        "guards": list(guards),
        "needs": list(done.needs),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
    }
    for file in done.files:
        if file.name.endswith("_metadata.json"):
            metadata = {**json.loads(file.read_text()), _OURS: json.dumps(ours)}
            file.write_text(json.dumps(metadata))
    names = [str(file) for file in done.files]
    size = sum(file.stat().st_size for file in done.files)
    write_archive(path, size, partial(package_writer(), aoti_files=names, extra_files=extra_files(evidence.metadata)))


def package_metadata(path: Path) -> dict[str, Any]:
    """The package's metadata, with our entry parsed; OtherMachine if it isn't a package of this program."""
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
    cuda = f", CUDA {ours['cuda']}" if ours.get("cuda") else ""
    return f"{metadata['AOTI_DEVICE_KEY']}: {kind}, {metadata['AOTI_PLATFORM']}, torch {ours['torch']}{cuda}"


def _refuse_other_machine(name: str, metadata: Mapping[str, Any], device: torch.device) -> None:
    here = {"AOTI_DEVICE_KEY": device.type, "AOTI_PLATFORM": sys.platform, "AOTI_MACHINE": platform.machine()}
    if device.type == "cuda" and metadata["AOTI_DEVICE_KEY"] == "cuda":
        here["AOTI_COMPUTE_CAPABILITY"] = str(compute_capability())
    able = {capability.replace("_", "") for capability, has in torch.cpu.get_capabilities().items() if has is True}
    lacking = [need for need in metadata[_OURS]["needs"] if need not in able]
    other = [value for key, value in here.items() if metadata[key] != value]
    # torch calls AOTInductor a prototype without compatibility between releases. Also, the weights that oneDNN packed are
    # only read by the oneDNN that packed them.
    if _release(metadata[_OURS]["torch"]) != _release(torch.__version__):
        other.append(f"torch {torch.__version__}")
    if other or lacking:
        what = f"the target here is {', '.join(other)}" if other else f"the processor here has no {', '.join(lacking)}"
        raise OtherMachine(
            f"{name} was compiled for {made_for(metadata)}, but {what}: export it on the machine where it will run."
        )


def _release(version: str) -> list[str]:
    """The major and minor number of a version of torch."""
    return version.split(".")[:2]


class LoadedPackage:
    """A loaded package, which is called like any loaded artifact."""

    placement: dict[str, int] | None = None

    def __init__(self, path: Path, device: torch.device, *, single_threaded: bool = False) -> None:
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
        # The dtypes and shapes of the last call.
        self._checked: list[tuple[torch.dtype, torch.Size]] | None = None
        index = -1 if device.index is None else device.index
        self._loader = package_loader()(str(path), MODEL, single_threaded, 1, index)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = [(tensor.dtype, tensor.shape) for tensor in tensors]
        # A service calls with the same shapes again and again.
        if given != self._checked:
            self._check(tensors)
            self._checked = given
        held = list(map(self._placed, tensors))
        # The loader empties the list.
        taken = {tensor.untyped_storage().data_ptr() for tensor in held}
        # The code runs without gradients by itself.
        outputs = self._loader.boxed_run(held)
        return tuple([self._own(output, taken) for output in outputs])

    def _check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise ValueError if the file isn't made for such inputs. Compiled code would read past the end of a tensor."""
        refuse_unfit(self._inputs, tensors)
        for spec, tensor in zip(self._inputs, tensors, strict=True):
            # Inductor's own matrix products divide by the number of rows, which ends the process.
            if any(size == 0 and isinstance(named, str) for named, size in zip(spec.shape, tensor.shape, strict=True)):
                raise ValueError(
                    f"Input `{spec.name}` has the shape {list(tensor.shape)}: compiled code needs elements."
                )
        sizes = dict(zip(self._parameters, (tensor.shape for tensor in tensors), strict=True))
        for guard in self._guards:
            if not guard_holds(guard, sizes):
                raise ValueError(f"The file wasn't compiled for inputs of these sizes: {guard} doesn't hold.")

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the code reads it: on its device, contiguous, and aligned for vector loads."""
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.device != self._target:
            tensor = tensor.to(self._target)
        # The code reads the memory, which doesn't hold the values of a lazily negated or conjugated tensor.
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
        return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor

    def _own(self, output: torch.Tensor, taken: set[int]) -> torch.Tensor:
        """The output in memory that nothing else has: it may be an input, a constant, or another output."""
        storage = output.untyped_storage()
        # Constants are views of the library's memory, which is freed with the loader.
        if not storage.resizable() or storage.data_ptr() in taken:
            return output.clone()
        taken.add(storage.data_ptr())
        return output
