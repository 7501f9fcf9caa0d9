"""torch.compile of the whole module, in place of its call."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from passes.base import Context, Pass, PassResult
from passes.errors import RequirementNotMet
from passes.graph.edits import AttributeEdit
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
            raise RequirementNotMet(
                f"torch-compile: there is no backend {self.backend!r}: use one of {', '.join(known)}"
            )
        if self.backend == "inductor" and (missing := _missing_compiler(context.device)):
            raise RequirementNotMet(f"torch-compile: {missing}")

    def run(self, program: Program, context: Context) -> PassResult:
        """Set the compiled call on the root; the code is made at the first call."""
        rewriter = Rewriter(program)
        root = program.root
        compiled = torch.compile(
            root._call_impl, mode=self.mode, fullgraph=self.fullgraph, dynamic=self.dynamic, backend=self.backend
        )
        with rewriter.change("", f"compiled by {self.backend}") as change:
            edit = AttributeEdit(root, "_compiled_call_impl", compiled)
            edit.apply()
            change.edits.append(edit)
        return PassResult(tuple(rewriter.changes), (), rewriter)


def _missing_compiler(device: torch.device) -> str | None:
    if device.type == "cuda":
        found = importlib.util.find_spec("triton") is not None
        return None if found else "inductor needs triton to make GPU kernels: pip install triton"
    if device.type != "cpu":
        return None
    asked = os.environ.get("CXX")
    candidates = [asked] if asked else ["cl"] if sys.platform == "win32" else ["g++", "clang++", "c++"]
    if any(shutil.which(name) for name in candidates):
        return None
    return (
        f"inductor needs a C++ compiler for the CPU and finds none of {', '.join(candidates)}: install one or set CXX"
    )


def is_compiled(module: nn.Module) -> bool:
    """Whether some call in the tree is compiled."""
    return any(inner.__dict__.get("_compiled_call_impl") is not None for inner in module.modules())
