"""What torch.compile made of a module: programs, and where it had to leave Python run by itself."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# Frames of these packages are none that a user could mend.
_OURS = Path(__file__).resolve().parents[1]
_TORCH = Path(torch.__file__).resolve().parent
_SHOWN = 5
Compiler = Callable[[Any, Sequence[Any]], Any]
# Reasons that the compiler gives in words of its own workings.
_PLAINLY = {"generic_jump": "Data-dependent branching"}


@dataclass(frozen=True)
class GraphBreak:
    """A place where one program ends and another begins.

    Attributes:
        where: file and line of the user's code, or the line of a graph.
        line: the source there; "" where it can't be read.
        reason: the compiler's, a sentence.
    """

    where: str
    line: str
    reason: str

    @classmethod
    def of(cls, reason: str, stack: Sequence[traceback.FrameSummary]) -> GraphBreak:
        """The break at the innermost line of the user's.

        Args:
            reason: what the compiler says, of which the first line is taken.
            stack: the frames that were compiled, the innermost one last.
        """
        frame = next((one for one in reversed(stack) if not _is_inner(one.filename)), stack[-1] if stack else None)
        lines = reason.strip().splitlines() or ["the compiler doesn't say why"]
        sentence = next((text for word, text in _PLAINLY.items() if lines[0].startswith(word)), lines[0].strip(" ."))
        if frame is None:
            return cls("an unknown place", "", sentence)
        return cls(f"{frame.filename}:{frame.lineno}", (frame.line or "").strip(), sentence)


@dataclass
class CompileRecord:
    """It is written while code is made, at the first call and at calls of other shapes.

    Attributes:
        blocks: the paths of the blocks that share their code, group by group; empty where the whole is compiled.
        programs: how many programs the compiler was given.
        breaks: how often a program ended at each place, of those it was given.
    """

    blocks: tuple[tuple[str, ...], ...] = ()
    programs: int = 0
    breaks: Counter[GraphBreak] = field(default_factory=Counter)

    @property
    def regions(self) -> str:
        """ "whole" or "blocks"."""
        return "blocks" if self.blocks else "whole"

    def add(self, reason: Any) -> None:
        """A program was made, which ends for this reason; None where it isn't known."""
        self.programs += 1
        if reason is not None and reason.graph_break:
            self.breaks[GraphBreak.of(reason.reason, reason.user_stack)] += 1

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
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
    """A backend of torch.compile that notes what it is given, and passes it on.

    Args:
        name: as torch.compile knows the backend.
        compile: makes a callable of a graph and examples of its inputs.
        see: is given each graph too; None for nobody.
    """

    def __init__(
        self, name: str, compile: Compiler, record: CompileRecord, see: Callable[[Any], None] | None = None
    ) -> None:
        # Some look at a backend's name to know what it can do.
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
