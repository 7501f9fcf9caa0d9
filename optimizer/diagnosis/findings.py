"""The findings of a diagnosis as data, as text and as HTML, and the rules that make them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from optimize_export.errors import printable_lines
from optimize_export.wording import listed
from optimizer.diagnosis.evidence import Evidence, Seen
from optimizer.showing import fragment

Level = Literal["error", "warning", "note"]
"""An "error" makes results wrong, a "warning" costs time or memory, a "note" does so on some hardware only."""

LEVELS: tuple[Level, ...] = get_args(Level)
_NAMES_SHOWN = 2


@dataclass(frozen=True)
class Finding:
    """One line of the model's code that good practice would change."""

    rule: str
    """The name of the rule that found it."""
    level: Level
    modules: tuple[str, ...]
    """The paths of the modules that run the line, "" for the model itself; empty outside of the model."""
    # The innermost line outside of torch; "" and 0 if there is none.
    file: str
    line: int
    reason: str
    """What the code does, as a sentence without the full stop."""
    effect: str
    """What it costs, or what a change gains, measured where that is cheap."""
    remedy: str
    """The edit, or the pass, that fixes it."""

    @property
    def module(self) -> str:
        return self.modules[0] if self.modules else ""

    @property
    def where(self) -> str:
        """The line and the modules for people: "net.py:17, in blocks.0 and 3 more"."""
        line = f"{Path(self.file).name}:{self.line}" if self.file else ""
        names = [path or "the model itself" for path in self.modules]
        modules = f"in {listed(names, _NAMES_SHOWN)}" if names else ""
        return ", ".join(filter(None, (line, modules)))

    @property
    def sentence(self) -> str:
        """The reason, the effect and the remedy."""
        return f"{self.reason}: {self.effect}; {self.remedy}."

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        derived = {"module": self.module, "where": self.where, "sentence": self.sentence}
        return {**asdict(self), "modules": list(self.modules), **derived}


@dataclass(frozen=True)
class Diagnosis:
    """The findings of one model, those of the highest level first."""

    model: str
    """The name of the model's class."""
    device: str
    """The device of the runs."""
    findings: tuple[Finding, ...]

    def at_least(self, level: Level) -> tuple[Finding, ...]:
        """The findings of this level or a higher one."""
        return tuple(each for each in self.findings if LEVELS.index(each.level) <= LEVELS.index(level))

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        return {
            "model": self.model,
            "device": self.device,
            "levels": {level: sum(each.level == level for each in self.findings) for level in LEVELS},
            "findings": [each.to_json() for each in self.findings],
        }

    def __str__(self) -> str:
        return printable_lines("\n".join(diagnosis_lines(self.to_json())))

    def _repr_html_(self) -> str:
        return fragment("diagnosis", diagnosis=self.to_json())


def diagnosis_lines(diagnosis: Mapping[str, Any]) -> Iterator[str]:
    """The findings of a diagnosis in its JSON form, two lines each."""
    if not diagnosis["findings"]:
        yield "No findings."
    for each in diagnosis["findings"]:
        yield f"{each['level']:<7}  {each['rule']}  {each['where']}"
        yield f"         {each['sentence']}"


# ---------------------------------------------------------------------------------------------------------------- rules

Find = Callable[[Evidence], Iterator[Seen]]


@dataclass(frozen=True)
class Rule:
    """A rule; its name is that of its function with hyphens, and its description the function's docstring."""

    level: Level
    find: Find

    @property
    def name(self) -> str:
        """The name, such as "data-dependent-branch"."""
        return self.find.__name__.replace("_", "-")

    @property
    def description(self) -> str:
        return inspect.cleandoc(self.find.__doc__ or "")

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        for seen in self.find(evidence):
            yield Finding(self.name, self.level, seen.modules, *seen.place, seen.reason, seen.effect, seen.remedy)


def rule(level: Level) -> Callable[[Find], Rule]:
    return lambda find: Rule(level, find)
