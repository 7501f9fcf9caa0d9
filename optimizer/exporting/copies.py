"""Copy the module for the exporters, and make it again with other passes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from optimizer.exporting.job import ExportJob
from optimizer.model import working_copy
from optimizer.pipeline import detach, optimized
from optimizer.report import no_progress
from passes.base import Pass


def exportable(model: nn.Module, device: torch.device, written: frozenset[str] = frozenset()) -> nn.Module:
    """Copy a module for export: without compiled calls and provenance, in eval mode, on the device.

    Args:
        model: the module.
        device: of the copy.
        written: names of parameters that forward writes to; the copy has its own memory for these.
    """
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    copy = working_copy(model, "inference", private=own & written).root
    detach(copy)
    return copy.eval().to(device)


def optimized_again(job: ExportJob, passes: Sequence[Pass], device: torch.device) -> nn.Module:
    """Optimize the original of an export with other passes."""
    provenance = job.provenance
    original = job.model if provenance is None else provenance.original
    assert original is not None
    with warnings.catch_warnings():
        # The first run of the passes has already shown their warnings.
        warnings.simplefilter("ignore")
        return optimized(
            original,
            passes,
            **job.inputs,
            mode="inference" if provenance is None else provenance.report.mode,
            device=device,
            strict=False,
            batch_sizes=None if provenance is None else provenance.batch_sizes,
            seed=job.seed,
            progress=no_progress,
        )
