"""Find the pass that made an exported module wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from optimizer.exporting.copies import exportable, optimized_again
from optimizer.exporting.job import ExportJob
from optimizer.faults import pass_to_blame
from optimizer.model import on_device
from passes.base import Pass


def blamed(job: ExportJob, exported: nn.Module, is_wrong: Callable[[nn.Module], bool]) -> str:
    """A sentence about the pass that made the exported module wrong; "" if none did, or if the passes can't run again.

    Args:
        job: the export.
        exported: the module that was exported.
        is_wrong: whether a module on the original's device is wrong.
    """
    provenance = job.provenance
    if provenance is None or provenance.original is None:
        return ""
    exported = on_device(exported, job.home)

    def is_wrong_with(passes: Sequence[Pass] | None) -> bool:
        if passes is None:
            return is_wrong(exported)
        return is_wrong(exportable(optimized_again(job, passes, job.home), job.home))

    return pass_to_blame(provenance.applied, is_wrong_with)
