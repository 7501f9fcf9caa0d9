"""Compile a captured program by AOTInductor: in this process, or in a child process that is ended when the time is up.

Inductor, the C++ compiler and Triton can't be interrupted from within. So with a time limit, the program goes to a child
process as a file. The child has a session of its own, and ending it ends the compilers and workers that it started. It may
start before the program is needed.
"""

from __future__ import annotations

import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from exporters.child_process import can_start, end_session, how_it_ended
from exporters.errors import RouteRefused
from exporters.evidence import Place
from exporters.exported_program import Assumptions, assumptions_of, nodes_of
from exporters.isolation import refusing, silent
from exporters.metadata import write_archive
from exporters.torch_private import (
    OpOverload,
    aot_compile,
    gemm_templates_share_their_work,
    inductor_cache,
    vector_flags,
    without_line_info,
)
from optimize_export.gpu_settings import GpuSettings
from optimize_export.manifest import is_reproducible_build
from optimize_export.runtime import usable_cpus

# The name of the model in the package.
MODEL = "model"

# As inductor's own default: each worker imports torch and Triton.
_MOST_WORKERS = 32

# Names of files in the folder of a child process.
_PROGRAM, _RESULT = "program.pt2", "result.pickle"
_NAME_IT = "to compile it in this process, without a time limit, name aoti among the formats"


@dataclass(frozen=True)
class Compiled:
    """A compiled program."""

    # The library, its metadata, and the kernels for a GPU.
    files: tuple[Path, ...]
    # The CPU features that the vector code needs, by their names in `torch.cpu` without underscores.
    needs: tuple[str, ...]
    # Those of the capture, and those that compiling added.
    assumptions: Assumptions


def compile_here(
    program: torch.export.ExportedProgram, open_dims: Iterable[Place], folder: Path, *, workers: int = 1
) -> Compiled:
    """Compile the program in this process, and write the files into the folder.

    Args:
        open_dims: the dims of inputs whose assumptions are returned.
        workers: the number of processes that compile. Only a process that compiles nothing else may have several: they
            keep the cache with which they were started.

    Raises:
        RouteRefused: it can't be compiled.
    """
    # The user's cache is neither read nor written, and kernels hold no line information.
    with refusing("it can't be compiled"), silent(), inductor_cache(folder), without_line_info():
        files = _files(program, folder, workers)
        return Compiled(tuple(files), _needs(), assumptions_of(program, open_dims))


class Compilation:
    """A program that a child process compiles as `compile_here` does, while this process goes on.

    Args:
        open_dims: as for `compile_here`.
        folder: holds the files of the child, and afterwards the compiled ones.

    Raises:
        RouteRefused: the program can't be handed to another process.
    """

    def __init__(self, program: torch.export.ExportedProgram, open_dims: Iterable[Place], folder: Path) -> None:
        # What this process assumed; the file doesn't have all of it.
        self._assumed = assumptions_of(program, open_dims)
        self._folder = folder
        self._started = time.monotonic()
        if not can_start():
            raise RouteRefused(f"no child process can be started here: {_NAME_IT}")
        with refusing(f"it can't be handed to another process ({_NAME_IT})"), silent():
            weights = sum(tensor.nbytes for tensor in program.state_dict.values())
            write_archive(folder / _PROGRAM, weights, partial(torch.export.save, program))
        targets = {node.target for node in nodes_of(program.graph_module)}
        operators = sorted(str(target) for target in targets if isinstance(target, OpOverload))
        request = folder, operators, tuple(open_dims), GpuSettings.now(), torch.get_num_threads()
        # -P: the current folder isn't searched. Ours comes before those of the user, which may hold packages of our names.
        paths = [str(Path(__file__).parent.parent), *sys.path]
        code = f"import sys; sys.path += {paths!r}; from exporters.aoti_compile import child; child()"
        # Also the compilers' temporary files are removed with the folder.
        environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(pickle.dumps(request))
            self._process.stdin.flush()

    def wait(self, end: float) -> Compiled:
        """The compiled program; `end` is the time of `time.monotonic` to give up at.

        Raises:
            RouteRefused: it can't be compiled, or the time is up.
        """
        try:
            code_of_exit = self._process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            left = max(0.0, end - self._started)
            raise RouteRefused(f"compiling takes longer than the {left:.0f} s that were left for it") from None
        finally:
            self.close()
        try:
            result = pickle.loads((self._folder / _RESULT).read_bytes())
        except FileNotFoundError:
            raise RouteRefused(f"AOTInductor {how_it_ended(code_of_exit)}") from None
        if isinstance(result, str):
            raise RouteRefused(result)
        return Compiled(result.files, result.needs, self._assumed.joined(result.assumptions))

    def close(self) -> None:
        """End the child and everything that it started."""
        end_session(self._process)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()


def child() -> None:
    """The child process of a `Compilation`: write the `Compiled`, or a sentence that says why there is none."""
    folder, operators, open_dims, settings, threads = pickle.load(os.fdopen(os.dup(0), "rb"))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    settings.put_in_force()
    torch.set_num_threads(threads)
    result: Compiled | str
    try:
        for operator in operators:
            namespace, name, _ = operator.split(".")
            if not hasattr(getattr(torch.ops, namespace), name):
                raise RouteRefused(f"another process doesn't know its operator {namespace}::{name}: {_NAME_IT}")
        with refusing(f"it can't be handed to another process ({_NAME_IT})"), silent():
            program = torch.export.load(folder / _PROGRAM)
        with torch.no_grad():
            result = compile_here(program, open_dims, folder, workers=min(_MOST_WORKERS, usable_cpus()))
    except RouteRefused as refusal:
        result = str(refusal)
    unfinished = folder / f"{_RESULT}.tmp"
    unfinished.write_bytes(pickle.dumps(result))
    unfinished.replace(folder / _RESULT)
    # Without waiting for the workers, which the parent ends.
    os._exit(0)


def _end_with_parent() -> None:
    # The parent writes nothing more: its pipe ends when it does.
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


def _files(program: torch.export.ExportedProgram, folder: Path, workers: int) -> list[Path]:
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
        # Compile for the chosen vector instructions, not for everything that this processor supports: of a ResNet-18 and
        # a ViT, -march=native changed the time of a call by 2 % at most, less than the measurement's spread.
        "cpp.march": "",
        "cpp.enable_unsafe_math_opt_flag": False,
        "cpp.enable_floating_point_contract_flag": "off",
        "cpp.cxx": (_compiler(folder),),
        "compile_threads": workers,
        # The weights are constants, in the layout in which their kernels are fastest.
        "freezing": True,
        **_for_speed(program),
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


def _for_speed(program: torch.export.ExportedProgram) -> dict[str, Any]:
    """The options that make the code for the program's device fast."""
    weights = [tensor for tensor in program.state_dict.values() if tensor.is_floating_point()]
    if any(tensor.is_cuda for tensor in weights):
        # cuDNN computes half precision in channels_last, and converts each convolution's input and output from another
        # layout. Inductor only changes the layout by itself where the batch is fixed. Nothing is tuned (max_autotune,
        # coordinate descent): a product has some 20 configurations in Triton, each of which is compiled and run, where
        # cuBLAS and cuDNN choose by rules. Fusing epilogues is on by default.
        half = any(tensor.dim() == 4 and tensor.dtype in (torch.float16, torch.bfloat16) for tensor in weights)
        return {"force_layout_optimization": half}
    # Time inductor's own code for each matrix product next to MKL's: on an AMD EPYC, a call of a ViT took 0.70 times as
    # long, and 0.80 times with code for two threads on one. The processor decides which is faster, so two builds may
    # differ. The code splits its work into as many parts as torch has threads now.
    is_timed = gemm_templates_share_their_work() and not is_reproducible_build()
    return {"max_autotune_gemm": is_timed}


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
    # Messages of the wrapper print functions of inductor with their addresses.
    without_addresses = 'case "$1" in *.wrapper.cpp) sed -i.old \'s/ at 0x[0-9a-f]*>/>/g\' "$1";; esac'
    call = f'exec {shlex.quote(compiler)} "$@" {shlex.join(flags)}'
    script.write_text(f"#!/bin/sh\n{without_addresses}\n{without_native}\n{call}\n")
    script.chmod(0o700)
    return str(script)


def _needs() -> tuple[str, ...]:
    """The CPU features that the vector code needs, by their names in `torch.cpu` without underscores."""
    found = re.findall(r"-m(?!arch|cpu)([\w-]+)|\+(\w+)", vector_flags())
    names = {(option or extension).replace("-", "") for option, extension in found}
    return tuple(sorted({"fma": "fma3"}.get(name, name) for name in names))
