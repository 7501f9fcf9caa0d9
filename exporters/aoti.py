"""AOTI: the program that torch.export captures, compiled to machine code for one device and one kind of processor.

AOTInductor compiles it, `torch._inductor.aoti_load_package` and libtorch run it: without Python, and without a compiler.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from exporters.base import Artifact, Exporter, ExportRequest, LoadedArtifact, TensorSpec, parameter_names
from exporters.decisions import conditions_at
from exporters.errors import ExportError, OtherMachine, RouteRefused
from exporters.exported_program import captured, conditions_of_program, guards_in_force, take_guards
from exporters.guards import guard_holds
from exporters.input_checks import refuse_unfit
from exporters.isolation import silent, undisturbed
from exporters.metadata import extra_files, read_extra_file
from exporters.program_values import ProgramValues
from exporters.proof import Evidence, Route, first_right, gather, prove_beyond, prove_early, prove_written, refusing
from exporters.writing import write_archive

_MODEL = "model"

# The compiler's loops add up so many numbers one after another at most, where torch adds in pairs.
_IN_A_ROW = 4096

# Our part of the package's metadata.
_OURS = "optimize_export"

# Vector loads of GPU kernels need it.
_ALIGNMENT = 16


class AotiExporter(Exporter):
    """`model.aoti.pt2`."""

    name: ClassVar[str] = "aoti"
    file_name: ClassVar[str] = "model.aoti.pt2"

    def export(self, request: ExportRequest, directory: Path) -> Artifact:
        if (lacking := missing_compiler()) is not None:
            raise ExportError(f"The model can't be exported to aoti: {lacking}.")
        evidence = replace(gather(request), in_a_row=_IN_A_ROW)
        programs: list[torch.export.ExportedProgram] = []

        def compiled(folder: Path, *, strict: bool) -> tuple[Path, ...]:
            if programs:
                # Compiling takes minutes, and a file that was wrong for the one program is wrong for the other.
                raise RouteRefused("the model was captured without it")
            programs.append(captured(evidence, strict=strict)[0])
            return self._compiled(programs[0], evidence, folder)

        routes = (
            Route("aotinductor", partial(compiled, strict=False)),
            Route("aotinductor-strict", partial(compiled, strict=True)),
        )

        def known(artifact: Artifact) -> Artifact:
            notes = (*artifact.notes, f"Made for {_place(_metadata(artifact.path))}.")
            return replace(artifact, notes=notes, source=partial(ProgramValues, programs[0]))

        return first_right(self, request, evidence, routes, directory, known)

    @staticmethod
    def load(path: Path, device: str) -> LoadedArtifact:
        return _LoadedPackage(path, torch.device(device))

    @staticmethod
    def read_metadata(path: Path) -> Mapping[str, str]:
        return read_extra_file(path)

    def _compiled(self, program: torch.export.ExportedProgram, evidence: Evidence, folder: Path) -> tuple[Path, ...]:
        guards = take_guards(program)
        path = folder / self.file_name
        with _private_cache(folder):
            with undisturbed(evidence.adapter), refusing("it can't be compiled"), silent():
                files = _compile(program, folder)
            # Compiling takes some more for granted.
            conditions = conditions_of_program(program, evidence)
            loaded = self._packaged(files, evidence, (), path)
            with undisturbed(evidence.adapter), silent():
                errors = prove_early(evidence, loaded)
                agreed = prove_beyond(evidence, loaded, conditions, conditions_at, errors)
            if kept := guards_in_force(guards, evidence, agreed):
                del loaded
                loaded = self._packaged(files, evidence, kept, path)
            with undisturbed(evidence.adapter), silent():
                prove_written(evidence, loaded, [path])
        return (path,)

    def _packaged(self, files: Sequence[Path], evidence: Evidence, guards: Sequence[str], path: Path) -> LoadedArtifact:
        """The package of these files, loaded."""
        with refusing("the package can't be written"), silent():
            _package(files, evidence, guards, path)
        with refusing("the package can't be loaded"):
            return self.load(path, str(evidence.device))


@contextmanager
def _private_cache(folder: Path) -> Iterator[None]:
    """What is compiled inside goes into a folder of its own, which is removed: the user's cache is neither read nor written."""
    with silent():
        # Slow to import, and only this needs it.
        from torch._inductor.utils import fresh_cache

        with fresh_cache(dir=str(folder)):
            yield


def missing_compiler() -> str | None:
    """What AOTInductor lacks to compile, a clause with the way to get it; None for nothing.

    The passes have a like for torch.compile: neither package imports the other.
    """
    # Inductor looks for this one compiler and no other.
    usual = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    compiler = os.environ.get("CXX", usual)
    if shutil.which(compiler) is None:
        return f"AOTInductor needs a C++ compiler, and there is no {compiler!r}: install one or set CXX"
    return None


def _compile(program: torch.export.ExportedProgram, folder: Path) -> list[Path]:
    """The library, its metadata, and kernels for a GPU."""
    import torch._inductor

    module = program.module(check_guards=False)
    options: dict[str, Any] = {
        "aot_inductor.package": True,
        "aot_inductor.model_name_for_generated_files": _MODEL,
        "aot_inductor.output_path": str(folder / "library"),
        "aot_inductor.precompile_headers": False,
        "aot_inductor.enable_line_tables": False,
        # Its own check of inputs, for who sets AOTI_RUNTIME_CHECK_INPUTS, would refuse a batch of 1.
        "aot_inductor.check_lowerbound": False,
        # Random numbers are those that torch draws.
        "fallback_random": True,
        "cpp.dynamic_threads": True,
        # Only what the vector instructions that were chosen ask for: whatever else this processor has is left.
        "cpp.march": "",
        "cpp.enable_unsafe_math_opt_flag": False,
        "cpp.enable_floating_point_contract_flag": "off",
        "cpp.cxx": (_compiler(folder),),
        # No clock decides, and no process that was started with another cache compiles.
        "max_autotune": False,
        "compile_threads": 1,
        "freezing": False,
    }
    args, kwargs = program.example_inputs
    written: Any = torch._inductor.aot_compile(module, args, kwargs, options=options)
    # The sources stay behind: nothing reads them, and they tell of the machine that they were compiled on.
    files = [Path(file) for file in written if isinstance(file, str)]
    return [
        path for path in files if path.suffix not in (".cpp", ".h", ".S", ".o") and "kernel_metadata" not in path.name
    ]


def _compiler(folder: Path) -> str:
    """A script that calls the compiler and has the last word on its flags.

    Inductor asks for code that takes -0.0 for 0.0; what is compiled here keeps them apart, as eager does. Macros and
    assertions write down the files that they stand in, and nothing of this machine may be in a package.
    """
    compiler = shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))
    if compiler is None or sys.platform == "win32":
        return compiler or "cl"
    # The last one that fits counts.
    roots = {
        sys.base_prefix: "python",
        sys.prefix: "python",
        os.path.dirname(torch.__file__): "torch",
        str(folder): ".",
    }
    flags = ["-fsigned-zeros", "-g0", *(f"-ffile-prefix-map={old}={new}" for old, new in roots.items())]
    script = folder / os.path.basename(compiler)
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(compiler)} "$@" {shlex.join(flags)}\n')
    script.chmod(0o700)
    return str(script)


def _package(files: Sequence[Path], evidence: Evidence, guards: Sequence[str], path: Path) -> None:
    """Write the package with what its loader has to know.

    Raises:
        OSError: the disk is full, or the like.
    """
    from torch.export.pt2_archive._package import package_pt2

    ours = {
        "inputs": [asdict(spec) for spec in evidence.input_specs],
        "parameters": parameter_names(evidence.adapter.input_names),
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
    package = partial(package_pt2, aoti_files=names, extra_files=extra_files(evidence.metadata))
    size = sum(file.stat().st_size for file in files)

    def in_memory() -> bytes:
        buffer = io.BytesIO()
        package(buffer)
        return buffer.getvalue()

    write_archive(path, size, in_memory, package)


def _needs() -> list[str]:
    """The instructions that the vector code uses, as `torch.cpu` names them without underscores."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    flags = pick_vec_isa().build_arch_flags()
    found = re.findall(r"-m(?!arch|cpu)([\w-]+)|\+(\w+)", flags)
    names = {(option or extension).replace("-", "") for option, extension in found}
    return sorted({"fma": "fma3"}.get(name, name) for name in names)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def _metadata(path: Path) -> dict[str, Any]:
    """The package's metadata, ours read.

    Raises:
        OtherMachine: it isn't a package of this program.
    """
    loader: Any = torch._C._aoti.AOTIModelPackageLoader
    found: Mapping[str, str] = loader.load_metadata_from_package(str(path), _MODEL)
    if _OURS not in found:
        raise OtherMachine(f"{path.name} isn't a package of this program: it doesn't say what it was made for.")
    return {**found, _OURS: json.loads(found[_OURS])}


def _place(metadata: Mapping[str, Any]) -> str:
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
        here["AOTI_COMPUTE_CAPABILITY"] = str(_compute_capability())
    able = {capability.replace("_", "") for capability, has in torch.cpu.get_capabilities().items() if has is True}
    lacking = [need for need in metadata[_OURS]["needs"] if need not in able]
    other = [value for key, value in here.items() if metadata[key] != value]
    if other or lacking:
        what = f"it is {', '.join(other)} here" if other else f"the processor here has no {', '.join(lacking)}"
        raise OtherMachine(f"{name} was made for {_place(metadata)}, and {what}: export it where it is to run.")


def _compute_capability() -> Any:
    from torch._dynamo.device_interface import get_interface_for_device

    return get_interface_for_device("cuda").get_compute_capability()


class _LoadedPackage:
    placement: dict[str, int] | None = None

    def __init__(self, path: Path, device: torch.device) -> None:
        self.device = device.type
        # How it computes was settled when it was compiled.
        self.settings: dict[str, str] = {}
        self._target = device
        metadata = _metadata(path)
        _refuse_other_machine(path.name, metadata, device)
        ours = metadata[_OURS]
        self._inputs = tuple(TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in ours["inputs"])
        self._parameters: list[str] = ours["parameters"]
        self._guards: list[str] = ours["guards"]
        index = -1 if device.index is None else device.index
        self._loader = torch._C._aoti.AOTIModelPackageLoader(str(path), _MODEL, False, 1, index)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Machine code looks at nothing: it would read what lies behind a tensor that is too small.
        refuse_unfit(self._inputs, tensors)
        sizes = dict(zip(self._parameters, (tensor.shape for tensor in tensors), strict=True))
        for guard in self._guards:
            if not guard_holds(guard, sizes):
                raise ValueError(f"The file wasn't made for inputs of such sizes: {guard} doesn't hold.")
        held = [_laid_out(tensor.detach().to(self._target)) for tensor in tensors]
        with torch.no_grad():
            outputs = self._loader.boxed_run(held)
        # A constant among them lies in the library, which goes with the loader.
        return tuple(output.clone() for output in outputs)


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as the code was compiled for it: contiguous, from an aligned address on."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor
