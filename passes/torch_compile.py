"""torch.compile of the whole module, in place of its call."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch

from passes.base import Context, Pass, PassResult
from passes.errors import RequirementNotMet
from passes.graph.program import Program
from passes.graph.rewriter import Rewriter


@dataclass(frozen=True)
class TorchCompile(Pass):
    """Compile the module's call with torch.compile.

    The module stays what it is, keys of its state_dict included: `Module.compile()` sets a compiled call on the
    instance. The compiled code isn't copied or exported: exporters take the module before it.

    Attributes:
        mode: as for torch.compile.
        fullgraph: raise at a graph break instead of compiling in parts.
        dynamic: true for one kernel for all sizes, false for one for each, none to decide at the second size.
        backend: a torch.compile backend.
    """

    name: ClassVar[str] = "torch-compile"
    needs_graph: ClassVar[bool] = False
    is_barrier: ClassVar[bool] = True

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str = "inductor"

    def check(self, context: Context) -> None:
        """See that there is a compiler for the device.

        Raises:
            RequirementNotMet: there is none, or no backend of that name.
        """
        super().check(context)
        known = torch.compiler.list_backends(exclude_tags=())
        if self.backend not in known:
            raise RequirementNotMet(f"torch-compile has no backend {self.backend!r}: use one of {', '.join(known)}.")
        if self.backend != "inductor" and self.mode != "default":
            raise RequirementNotMet(
                f"torch-compile:mode={self.mode} is for inductor: leave it out for backend={self.backend}."
            )
        if self.backend == "inductor" and (missing := _missing_compiler(context.device)):
            raise RequirementNotMet(f"torch-compile can't be had here: {missing}.")

    def run(self, program: Program, context: Context) -> PassResult:
        """Set the compiled call on the root; the code is made at the first call."""
        rewriter = Rewriter(program)
        root = program.root
        if root.__dict__.get("_compiled_call_impl") is not None:
            rewriter.skip_module("", "its call is compiled already")
            return PassResult((), tuple(rewriter.skips), rewriter)
        compiled = torch.compile(
            root._call_impl, mode=self.mode, fullgraph=self.fullgraph, dynamic=self.dynamic, backend=self.backend
        )
        with rewriter.change("", f"compiled by {self.backend}") as change:
            rewriter.set_attribute(change, root, "_compiled_call_impl", compiled)
        return PassResult(tuple(rewriter.changes), (), rewriter)


def _missing_compiler(device: torch.device) -> str | None:
    if device.type == "cuda":
        found = importlib.util.find_spec("triton") is not None
        return None if found else "inductor needs triton to make GPU kernels: pip install triton"
    if device.type != "cpu":
        return None
    # Inductor looks for this one compiler and no other.
    usual = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    compiler = os.environ.get("CXX", usual)
    if shutil.which(compiler) is None:
        return f"inductor needs a C++ compiler for the CPU, and there is no {compiler!r}: install one or set CXX"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        return f"inductor needs the headers of Python to make CPU kernels, and there is no {header}"
    return None
