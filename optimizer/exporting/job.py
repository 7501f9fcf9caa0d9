"""The arguments of one export, with devices, samples and exporters resolved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exporters.base import Exporter
from optimizer.model import Dynamic, OpenDims, Samples
from optimizer.options import AccuracyBudget, Effort
from optimizer.parity import Tolerance
from optimizer.pipeline import Provenance
from optimizer.report import Progress, ProgressFunction


@dataclass(frozen=True, kw_only=True)
class ExportJob:
    """The arguments of one export.

    Attributes:
        model: the user's model.
        provenance: of the model, if it is a result of `optimize`; None otherwise.
        inputs: the user's example inputs, as keyword arguments of `optimize`.
        samples: makes the calls.
        dims: the open dims that `dynamic` declares.
        output: the folder of the bundle.
        debug_dir: the folder for reproductions of wrong files.
        target: the device of the artifacts.
        home: the device of the original.
        effort: "quick", "normal" or "thorough".
        source: the origin of the model, for the manifest; None for the module of its class.
        bench: whether to time the files.
        tune: whether to try runtimes, precisions and settings, for about `tune_seconds`.
        accuracy: what a lossy route may cost.
        tell: receives the progress.
    """

    model: nn.Module
    provenance: Provenance | None
    inputs: Mapping[str, Any]
    samples: Samples
    dims: OpenDims
    exporters: Sequence[Exporter]
    output: Path
    debug_dir: Path | None
    target: torch.device
    home: torch.device
    batch_sizes: Sequence[int] | None
    static_batch: bool
    dynamic: Dynamic | None
    input_names: Sequence[str] | None
    output_names: Sequence[str] | None
    opset: int | None
    metadata: Mapping[str, str]
    strict: bool
    atol: Tolerance
    rtol: Tolerance
    row_independence: bool
    effort: Effort
    seed: int
    source: str | None
    bench: bool
    tune: bool
    tune_seconds: float
    accuracy: AccuracyBudget
    finite_inputs: bool
    tell: ProgressFunction

    def progress(self, stage: str, done: int, total: int, text: str, name: str = "") -> None:
        """Report progress."""
        self.tell(Progress(stage, done, total, text, name))
