"""Whether inductor can compile on this machine, and a record of what a compiler got."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from passes.torch_private import load_inductor


def import_inductor() -> None:
    """Import inductor, without the deprecation warnings of its own dependencies."""
    with warnings.catch_warnings():
        # Inductor imports deprecated parts of TorchScript, which are not used here.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        load_inductor()


def missing_compiler(device: torch.device) -> str | None:
    """The tool that inductor lacks for the device, as a clause that says how to get it; None if it has all."""
    if device.type == "cuda":
        found = importlib.util.find_spec("triton") is not None
        return None if found else "inductor needs triton to make GPU kernels: pip install triton"
    if device.type != "cpu":
        return None
    # Inductor looks for this compiler only.
    usual = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    compiler = os.environ.get("CXX", usual)
    if shutil.which(compiler) is None:
        return f"inductor needs a C++ compiler for the CPU, and there is no {compiler!r}: install one or set CXX"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        return f"inductor needs the headers of Python to make CPU kernels, and there is no {header}"
    return None


# The user can't fix frames in these packages.
_OURS = Path(__file__).resolve().parents[1]
_TORCH = Path(torch.__file__).resolve().parent
_SHOWN = 5
Compiler = Callable[[Any, Sequence[Any]], Any]
# Plain words for reasons that the compiler gives in internal terms.
_PLAINLY = {"generic_jump": "Data-dependent branching"}


@dataclass(frozen=True)
class GraphBreak:
    """A place at which one compiled program ends and the next begins."""

    where: str  # file and line of the user's code, or the line of a graph
    line: str  # the source code of that line; "" if it can't be read
    reason: str  # a sentence from the compiler

    @classmethod
    def of(cls, reason: str, stack: Sequence[traceback.FrameSummary]) -> GraphBreak:
        """Make the record for the innermost line of the user's code.

        Args:
            reason: the compiler's message; its first line is used.
            stack: the compiled frames, the innermost one last.
        """
        frame = next((one for one in reversed(stack) if not _is_inner(one.filename)), stack[-1] if stack else None)
        lines = reason.strip().splitlines() or ["the compiler gives no reason"]
        sentence = next((text for word, text in _PLAINLY.items() if lines[0].startswith(word)), lines[0].strip(" ."))
        if frame is None:
            return cls("an unknown place", "", sentence)
        return cls(f"{frame.filename}:{frame.lineno}", (frame.line or "").strip(), sentence)


@dataclass
class CompileRecord:
    """The record of all compilations of a module, at the first call and at later calls with other shapes."""

    # The paths of the blocks that share code, by group; empty if the whole model is compiled at once
    blocks: tuple[tuple[str, ...], ...] = ()
    programs: int = 0  # the number of programs given to the compiler
    # The number of times that a program ended at each place
    breaks: Counter[GraphBreak] = field(default_factory=Counter)

    @property
    def regions(self) -> str:
        """The compiled regions: "whole" or "blocks"."""
        return "blocks" if self.blocks else "whole"

    def add(self, reason: Any) -> None:
        """Count one program; `reason` says why it ended, None if that isn't known."""
        self.programs += 1
        if reason is not None and reason.graph_break:
            self.breaks[GraphBreak.of(reason.reason, reason.user_stack)] += 1

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON-serializable data."""
        return {
            "regions": self.regions,
            "blocks": [list(group) for group in self.blocks],
            "programs": self.programs,
            "graph_breaks": [
                {"where": each.where, "line": each.line, "reason": each.reason, "count": count}
                for each, count in self.breaks.items()
            ],
        }

    def __str__(self) -> str:
        lines = [f"  {self._regions()}: {self.programs} programs, {self.breaks.total()} graph breaks"]
        for each, count in self.breaks.most_common(_SHOWN):
            times = f" ({count} times)" if count > 1 else ""
            lines.append(f"  graph break at {each.where}{times}: {each.reason}")
            lines += [f"    {each.line}"] if each.line else []
        if len(self.breaks) > _SHOWN:
            lines.append(f"  {len(self.breaks) - _SHOWN} more such places are in the report")
        return "\n".join(lines)

    def _regions(self) -> str:
        if not self.blocks:
            return "compiled as a whole"
        groups = " and ".join(f"{len(group)} blocks ({group[0]} to {group[-1]})" for group in self.blocks)
        return f"compiled by {groups}"


class RecordingBackend:
    """A torch.compile backend that records each graph and passes it on to another backend.

    Args:
        name: the name of the other backend in torch.compile.
        compile: makes a callable from a graph and example inputs.
        record: the record to write to.
        see: is called with each graph; None for no call.
    """

    def __init__(
        self, name: str, compile: Compiler, record: CompileRecord, see: Callable[[Any], None] | None = None
    ) -> None:
        # Some code checks the name of a backend to find out what it supports.
        self.__name__ = self.compiler_name = name
        self.compile = compile
        self.record = record
        self.see = see

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Any:
        if self.see is not None:
            self.see(graph)
        self.record.add(getattr(graph, "compile_subgraph_reason", None))
        return self.compile(graph, inputs)


def _is_inner(file: str) -> bool:
    path = Path(file)
    return path.is_relative_to(_OURS) or path.is_relative_to(_TORCH)
