"""One export: its settings, with devices, samples and exporters resolved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from exporters.base import Exporter
from optimizer.model import OpenDims, Samples
from optimizer.options import ExportSettings
from optimizer.pipeline import Provenance
from optimizer.report import Progress, ProgressFunction


@dataclass(frozen=True, kw_only=True)
class ExportJob(ExportSettings):
    """The settings of one export, with absolute paths, and `bench` and `tune` decided."""

    model: nn.Module
    provenance: Provenance | None
    """Of the model, if it is a result of `optimize`."""
    inputs: Mapping[str, Any]
    """The user's example inputs, as keyword arguments of `optimize`."""
    samples: Samples
    """Makes the calls."""
    dims: OpenDims
    """The open dims that `dynamic` declares."""
    exporters: Sequence[Exporter]
    target: torch.device
    """The device of the artifacts."""
    home: torch.device
    """The device of the original."""
    source: str | None
    """The origin of the model, for the manifest; None for the module of its class."""
    tell: ProgressFunction
    """Receives the progress."""

    def progress(self, stage: str, done: int, total: int, text: str, name: str = "") -> None:
        """Report progress."""
        self.tell(Progress(stage, done, total, text, name))
