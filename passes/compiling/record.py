"""Record the programs that torch.compile made of a module, and its graph breaks."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# The user can't fix frames in these packages.
_OURS = Path(__file__).resolve().parents[1]
_TORCH = Path(torch.__file__).resolve().parent
_SHOWN = 5
Compiler = Callable[[Any, Sequence[Any]], Any]
# Plain words for reasons that the compiler gives in internal terms.
_PLAINLY = {"generic_jump": "Data-dependent branching"}


@dataclass(frozen=True)
class GraphBreak:
    """A place at which one compiled program ends and the next begins.

    Attributes:
        where: file and line of the user's code, or the line of a graph.
        line: the source code of that line; "" if it can't be read.
        reason: a sentence from the compiler.
    """

    where: str
    line: str
    reason: str

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
    """The record of all compilations of a module, at the first call and at later calls with other shapes.

    Attributes:
        blocks: the paths of the blocks that share code, by group; empty if the whole model is compiled at once.
        programs: the number of programs given to the compiler.
        breaks: the number of times that a program ended at each place.
    """

    blocks: tuple[tuple[str, ...], ...] = ()
    programs: int = 0
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
