"""AOTI: the program captured by torch.export, compiled to machine code for one device and one kind of processor.

AOTInductor compiles it; `torch._inductor.aoti_load_package` and libtorch run it. Running it needs no Python and no
compiler.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

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
from exporters.exported_program import captured, conditions_of_program, guard_holds, guards_in_force, take_guards
from exporters.isolation import refusing, silent
from exporters.metadata import extra_files, read_extra_file, write_archive
from exporters.places import Program
from exporters.proof import prove_at_calls, prove_beyond
from exporters.routes import Route, first_right
from exporters.torch_private import (
    aot_compile,
    compute_capability,
    inductor_cache,
    package_loader,
    package_writer,
    vector_flags,
    without_line_info,
)

# Maximum number of terms that the compiled loops add sequentially; torch sums pairwise.
_IN_A_ROW = 4096

# The name of the model in the package.
MODEL = "model"
# The key of our entry in the package's metadata.
_OURS = "optimize_export"
# Alignment in bytes that vector loads of GPU kernels need.
_ALIGNMENT = 16


class AotiExporter(Exporter):
    """The exporter to `model.aoti.pt2`."""

    name: ClassVar[str] = "aoti"
    file_name: ClassVar[str] = "model.aoti.pt2"
    # How long compiling may take; None for no limit.
    seconds: float | None = None

    def export(self, request: ExportRequest, directory: Path) -> Artifact:
        if (lacking := missing_compiler()) is not None:
            raise ExportError(f"The model can't be exported to aoti: {lacking}.")
        evidence = replace(gather(request), in_a_row=_IN_A_ROW)
        programs: list[Program] = []
        limits: list[Limit] = []

        def compiled(folder: Path, *, strict: bool) -> tuple[Path, ...]:
            if programs:
                # Compiling takes minutes, and a file that is wrong for one program is wrong for the other.
                raise RouteRefused(
                    "the model was captured without strict mode already, and the file of that capture is wrong"
                )
            program, placed = captured(evidence, strict=strict)
            programs.append(placed)
            guards = take_guards(program)
            path = folder / self.file_name
            # Without line information, and with a temporary cache: the user's is neither read nor written.
            with silent(), inductor_cache(folder), without_line_info():
                with evidence.undisturbed(), refusing("it can't be compiled"), silent():
                    files = _compile(program, folder)
                # Compiling adds further conditions.
                conditions = conditions_of_program(program, evidence)
                loaded = self._package(files, evidence, (), path)
                agreed = prove_beyond(evidence, loaded, conditions, guards, limits)
                if kept := guards_in_force(guards, evidence, agreed):
                    del loaded
                    loaded = self._package(files, evidence, kept, path)
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

    def _package(self, files: Sequence[Path], evidence: Evidence, guards: Sequence[str], path: Path) -> LoadedArtifact:
        """Package these files and load the package."""
        with refusing("the package can't be written"), silent():
            write_package(files, evidence, guards, path)
        with refusing("the package can't be loaded"):
            return self.load(path, str(evidence.device))


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


def _compile(program: torch.export.ExportedProgram, folder: Path) -> list[Path]:
    """Compile the program; return the library, its metadata, and the kernels for a GPU."""
    module = program.module(check_guards=False)
    options: dict[str, Any] = {
        "aot_inductor.package": True,
        "aot_inductor.model_name_for_generated_files": MODEL,
        "aot_inductor.output_path": str(folder / "library"),
        "aot_inductor.precompile_headers": False,
        "aot_inductor.enable_line_tables": False,
        # Inductor's own input check, which AOTI_RUNTIME_CHECK_INPUTS enables, would refuse a batch of 1.
        "aot_inductor.check_lowerbound": False,
        # Draw the same random numbers as torch.
        "fallback_random": True,
        "cpp.dynamic_threads": True,
        # Compile for the chosen vector instructions, not for everything that this processor supports.
        "cpp.march": "",
        "cpp.enable_unsafe_math_opt_flag": False,
        "cpp.enable_floating_point_contract_flag": "off",
        "cpp.cxx": (_compiler(folder),),
        # No choice by timing, and no compile workers: they may have been started with another cache.
        "max_autotune": False,
        "compile_threads": 1,
        # The weights are constants, in the layout in which their kernels are fastest.
        "freezing": True,
    }
    args, kwargs = program.example_inputs
    written = aot_compile(module, args, kwargs, options)
    # Leave the sources out: nothing reads them, and they contain details of this machine. The loader of torch 2.11 finds
    # the metadata by the name of this source, so keep it, emptied.
    files = [Path(file) for file in written if isinstance(file, str)]
    named = [path for path in files if path.name == f"{MODEL}.wrapper.cpp"]
    for path in named:
        path.write_text("")
    # The code holds the path of each GPU kernel, of which the loader of a package reads only the file name.
    here = str(folder).encode()
    for path in files:
        if path.suffix == ".so" and here in (code := path.read_bytes()):
            path.write_bytes(code.replace(here, b"/" * len(here)))
    return named + [
        path for path in files if path.suffix not in (".cpp", ".h", ".S", ".o") and "kernel_metadata" not in path.name
    ]


def _compiler(folder: Path) -> str:
    """Write a script that calls the compiler without -march=native and with our flags, which override earlier ones.

    torch 2.11 and 2.12 have no option that leaves -march=native out. Inductor asks for code that doesn't distinguish
    -0.0 from 0.0. Our code distinguishes them, as eager does. Macros and assertions record source paths, and a package
    must contain no path of this machine.
    """
    compiler = shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))
    if compiler is None or sys.platform == "win32":
        return compiler or "cl"
    # If several prefixes match, the last one wins.
    roots = {
        sys.base_prefix: "python",
        sys.prefix: "python",
        os.path.dirname(torch.__file__): "torch",
        str(folder): ".",
    }
    flags = ["-fsigned-zeros", "-g0", *(f"-ffile-prefix-map={old}={new}" for old, new in roots.items())]
    script = folder / os.path.basename(compiler)
    without_native = 'for flag do shift; [ "$flag" = -march=native ] || set -- "$@" "$flag"; done'
    script.write_text(f'#!/bin/sh\n{without_native}\nexec {shlex.quote(compiler)} "$@" {shlex.join(flags)}\n')
    script.chmod(0o700)
    return str(script)


def write_package(files: Sequence[Path], evidence: Evidence, guards: Sequence[str], path: Path) -> None:
    """Write the package, including the metadata that its loader needs."""
    device = evidence.device
    ours = {
        "inputs": [asdict(spec) for spec in evidence.input_specs],
        "parameters": captured_names(evidence.adapter.input_names),
        "guards": list(guards),
        "needs": _needs(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
    }
    for file in files:
        if file.name.endswith("_metadata.json"):
            metadata = {**json.loads(file.read_text()), _OURS: json.dumps(ours)}
            file.write_text(json.dumps(metadata))
    names = [str(file) for file in files]
    size = sum(file.stat().st_size for file in files)
    write_archive(path, size, partial(package_writer(), aoti_files=names, extra_files=extra_files(evidence.metadata)))


def _needs() -> list[str]:
    """The CPU features that the vector code needs, by their names in `torch.cpu` without underscores."""
    found = re.findall(r"-m(?!arch|cpu)([\w-]+)|\+(\w+)", vector_flags())
    names = {(option or extension).replace("-", "") for option, extension in found}
    return sorted({"fma": "fma3"}.get(name, name) for name in names)


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
        index = -1 if device.index is None else device.index
        self._loader = package_loader()(str(path), MODEL, single_threaded, 1, index)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Compiled code checks nothing: it would read past the end of a tensor that is too small.
        refuse_unfit(self._inputs, tensors)
        sizes = dict(zip(self._parameters, (tensor.shape for tensor in tensors), strict=True))
        for guard in self._guards:
            if not guard_holds(guard, sizes):
                raise ValueError(f"The file wasn't compiled for inputs of these sizes: {guard} doesn't hold.")
        held = [tensor.detach().to(self._target).contiguous() for tensor in tensors]
        held = [tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor for tensor in held]
        with torch.no_grad():
            outputs = self._loader.boxed_run(held)
        # An output may be a constant in the library, whose memory is freed with the loader.
        return tuple(output.clone() for output in outputs)
