"""A rule: a function that finds something in the evidence, with a level and a docstring."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from optimizer.diagnosis.evidence import Evidence, Seen
from optimizer.diagnosis.findings import Finding, Level

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
        """The docstring of the function."""
        return inspect.cleandoc(self.find.__doc__ or "")

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        """The findings of this rule."""
        for seen in self.find(evidence):
            yield Finding(self.name, self.level, seen.modules, *seen.place, seen.reason, seen.effect, seen.remedy)


def rule(level: Level) -> Callable[[Find], Rule]:
    """Make a rule of a function."""
    return lambda find: Rule(level, find)
