"""Optimize a model again with one more pass, or without one, to find by timing whether the pass pays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from optimizer.exporting.copies import optimized_again
from optimizer.exporting.job import ExportJob
from optimizer.pipeline import report_of
from optimizer.tuning import Refused
from passes.base import Pass
from passes.registry import parse_pass

# Exact passes that make some models faster on some devices, and others slower.
_OPTIONAL = ("channels-last", "merge-linears", "pad-channels", "jit-fusion")


@dataclass(frozen=True)
class OtherPasses:
    """The passes of the export with one more, or without one.

    Attributes:
        changed: the name of that pass.
        more: whether it was added; otherwise it was left out.
        passes: the resulting passes, in order.
    """

    changed: str
    more: bool
    passes: tuple[Pass, ...]

    @property
    def name(self) -> str:
        return f"the module {'with' if self.more else 'without'} {self.changed}"

    def made(self, job: ExportJob) -> nn.Module:
        """Optimize the original with these passes; each change is proven.

        Raises:
            Refused: the pass doesn't change the model.
        """
        module = optimized_again(job, self.passes, job.target)
        record = next((each for each in report_of(module).passes if each.name == self.changed), None)
        if record is not None and record.status != "applied":
            reasons = [record.reason, *(skip.text for skip in record.skips), "it finds nothing to change"]
            raise Refused(f"the pass is {record.status}: {next(filter(None, reasons))}")
        return module


def with_other_passes(job: ExportJob) -> Iterator[OtherPasses]:
    """Each optional pass added to those of the export, or left out if the module has it already."""
    provenance = job.provenance
    if provenance is not None and (provenance.original is None or provenance.report.mode != "inference"):
        return
    used, applied = ((), ()) if provenance is None else (provenance.passes, provenance.applied)
    exported = {item.name for item in applied}
    for name in _OPTIONAL:
        if name in exported:
            yield OtherPasses(name, False, tuple(item for item in used if item.name != name))
        elif all(item.name != name for item in used):
            tail = next((index for index, item in enumerate(used) if item.is_barrier), len(used))
            yield OtherPasses(name, True, (*used[:tail], parse_pass(name), *used[tail:]))
