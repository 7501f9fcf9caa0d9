"""What all artifacts of one export are compared by, and what is told of one that fails."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exporters.base import Artifact, Exporter, LoadedArtifact
from optimizer.locating import Located, fault_of_runtime, located, named_first
from optimizer.parity import Flatten, Measurement, ParityReport, Reference, Rows, Tolerance, golden_entry, judge
from optimizer.reproducing import write_reproduction
from optimizer.verify import file_digest

Measured = tuple[Measurement, Mapping[str, int] | None]
"""What a file gives beside the original, and on which providers its nodes ran."""


@dataclass(frozen=True, kw_only=True)
class ArtifactParity:
    """Runs artifacts beside the original, and judges all of them alike.

    Attributes:
        flatten: the arguments of a call -> the tensors that the files take.
        device: where artifacts are run.
        atol, rtol, factor, names: as for `judge`.
    """

    reference: Reference
    flatten: Flatten
    device: torch.device
    atol: Tolerance
    rtol: Tolerance
    factor: float
    names: Mapping[str, str]

    def judged(self, measurement: Measurement) -> ParityReport:
        return judge(measurement, atol=self.atol, rtol=self.rtol, factor=self.factor, names=self.names)

    def measured(self, artifact: Artifact, rows: Rows | None = None) -> Measured:
        """What the artifact gives beside the original, and on which providers its nodes ran."""
        # A session whose nodes aren't where they are to be raises here.
        return self.measured_of(artifact.load(self.device.type), rows)

    def measured_of(self, loaded: LoadedArtifact, rows: Rows | None) -> Measured:
        """The same of a file that is ready to run where files are to be run."""
        measurement = self.reference.compare(loaded, flatten=self._flatten_there, rows=rows)
        if torch.device(measurement.device).type != self.device.type:
            measurement = replace(measurement, device=self.device.type, reference_device=measurement.device)
        measurement = replace(measurement, settings={**measurement.settings, **loaded.settings})
        placement = loaded.placement
        # A session maps the file: it must be closed before the folder is moved.
        del loaded
        gc.collect()
        return measurement, placement

    def is_wrong(self, module: nn.Module) -> bool:
        """Whether a module that runs where the original does computes something else."""
        return self.judged(self.reference.compare(module)).verdict == "failed"

    def is_right(self, artifact: Artifact) -> bool:
        return self.judged(self.measured(artifact)[0]).verdict != "failed"

    def _flatten_there(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[torch.Tensor]:
        # The calls are where the original is.
        return [tensor.to(self.device) for tensor in self.flatten(args, kwargs)]


@dataclass
class FileProof:
    """What an exporter proves its files by: the comparison that they are judged by afterwards, so that it is made once."""

    by: ArtifactParity
    rows: Rows | None
    # Of the last file that was compared: the hashes of its parts, and what it gave.
    _hashes: list[str] = field(default_factory=list)
    _found: Measured | None = None

    def __call__(self, loaded: LoadedArtifact, files: Sequence[Path]) -> bool:
        """As `ExportRequest.proof`."""
        self._found = None
        if torch.device(loaded.device).type != self.by.device.type or not files:
            return False
        self._hashes, self._found = list(map(file_digest, files)), self.by.measured_of(loaded, self.rows)
        return self.by.judged(self._found[0]).verdict != "failed"

    def measured(self, artifact: Artifact, exporter: Exporter) -> Measured:
        """What an artifact gives beside the original, as it is known or by runs of it.

        An exporter may write to its file once more after the proof, or have it loaded otherwise.
        """
        is_known = artifact.loader == exporter.load and self._hashes == list(map(file_digest, artifact.files))
        return self._found if self._found and is_known else self.by.measured(artifact, self.rows)


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Finds out about artifacts that compute something else.

    Attributes:
        exported: the module that was exported.
        pass_to_blame: a sentence on the pass that made that module wrong, or "".
        debug_dir: where a folder for each of them is written that shows it, or None.
    """

    parity: ArtifactParity
    exported: nn.Module
    pass_to_blame: Callable[[], str]
    debug_dir: Path | None

    def explained(self, artifact: Artifact, measurement: Measurement, report: ParityReport) -> tuple[Located, str]:
        """Where the artifact first differs, and all that is to be told of it, in sentences."""
        by = self.parity
        found = located(artifact, by.reference, measurement, self.exported, by.flatten, by.device.type)
        # First of all, as the rest takes longer and may be interrupted.
        written = (
            "" if self.debug_dir is None else self._reproduced(artifact, measurement, report, found, self.debug_dir)
        )
        told = (str(found), fault_of_runtime(artifact, by.is_right), self.pass_to_blame(), self._draws(), written)
        return found, " ".join(filter(None, told))

    def _draws(self) -> str:
        if not self.parity.reference.draws_random_numbers:
            return ""
        return (
            "The model draws random numbers, and a file that draws others can't give the same: take them as an input."
        )

    def _reproduced(
        self, artifact: Artifact, measurement: Measurement, report: ParityReport, found: Located, folder: Path
    ) -> str:
        """Write the folder that shows what is wrong; a sentence on it."""
        reference = self.parity.reference
        where = named_first(reference, measurement)[0] if found.divergence is None else found.divergence.where
        golden = golden_entry(reference, where)
        inputs = self.parity.flatten(golden.call.args, golden.call.kwargs)
        return write_reproduction(folder, artifact, inputs, golden, where, report, found)
