"""Compare the artifacts of an export with the original, and explain why one is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exporters.base import Artifact, Exporter, LoadedArtifact, outputs_of
from optimize_export.manifest import file_digest
from optimize_export.wording import listed
from optimizer.bundle import describe_device, factor_between
from optimizer.exporting.job import ExportJob
from optimizer.faults import Located, fault_of_runtime, locate_in_file, suspect_calls, write_reproduction
from optimizer.model import on_device
from optimizer.parity import FACTOR, Flatten, Measurement, ParityReport, Reference, Rows, Tolerance, golden_entry, judge

Measured = tuple[Measurement, Mapping[str, int] | None]
"""The measurement of a file against the original, and the number of its nodes that ran on each provider."""


@dataclass(frozen=True, kw_only=True)
class ArtifactParity:
    """Compares artifacts with the original, and judges all of them by the same rule."""

    reference: Reference
    flatten: Flatten
    """Maps the arguments of a call to the input tensors of the files."""
    device: torch.device
    """Where artifacts are run."""
    atol: Tolerance
    rtol: Tolerance
    factor: float
    names: Mapping[str, str]
    """This and the three before are as for `judge`."""

    def judge(self, measurement: Measurement) -> ParityReport:
        return judge(measurement, atol=self.atol, rtol=self.rtol, factor=self.factor, names=self.names)

    def measure(self, artifact: Artifact, rows: Rows | None = None) -> Measured:
        """Load an artifact and compare it with the original."""
        # Loading raises if the session places nodes on another provider than requested.
        return self.measure_loaded(artifact.load(self.device.type), rows)

    def measure_loaded(self, loaded: LoadedArtifact, rows: Rows | None) -> Measured:
        """Compare a file that is already loaded on `device` with the original."""

        def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[torch.Tensor]:
            # The calls are on the original's device.
            return [tensor.to(self.device) for tensor in self.flatten(args, kwargs)]

        measurement = self.reference.compare(partial(outputs_of, loaded), flatten=flatten, rows=rows)
        if torch.device(measurement.device).type != self.device.type:
            measurement = replace(measurement, device=self.device.type, reference_device=measurement.device)
        measurement = replace(measurement, settings={**measurement.settings, **loaded.settings})
        placement = loaded.placement
        # A session maps the file into memory, so it must be closed before the folder is moved.
        del loaded
        return measurement, placement

    def is_right(self, artifact: Artifact) -> bool:
        return self.judge(self.measure(artifact)[0]).verdict != "failed"


@dataclass
class FileProof:
    """The proof that an exporter calls for its files. Its comparison is reused for the judgement of the last file."""

    by: ArtifactParity
    rows: Rows | None
    # The hashes of the last compared artifact's files, and its measurement.
    _hashes: list[str] = field(default_factory=list)
    _found: Measured | None = None

    def __call__(self, loaded: LoadedArtifact, files: Sequence[Path]) -> bool:
        """As `ExportRequest.proof`."""
        self._found = None
        if torch.device(loaded.device).type != self.by.device.type or not files:
            return False
        self._hashes, self._found = list(map(file_digest, files)), self.by.measure_loaded(loaded, self.rows)
        return self.by.judge(self._found[0]).verdict != "failed"

    def measure(self, artifact: Artifact, exporter: Exporter) -> Measured:
        """The measurement of an artifact: the one of the proof if it is still valid, or a new one.

        The proof is invalid if the exporter has changed a file since, or if the artifact has another loader.
        """
        is_known = artifact.loader == exporter.load and self._hashes == list(map(file_digest, artifact.files))
        return self._found if self._found and is_known else self.by.measure(artifact, self.rows)


@dataclass(kw_only=True)
class Failures:
    """Explains why artifacts are wrong."""

    parity: ArtifactParity
    job: ExportJob
    exported: nn.Module
    """The module that was exported."""

    def explain(self, artifact: Artifact, measurement: Measurement, report: ParityReport) -> tuple[Located, str]:
        """Find where the artifact first diverges, and explain it in sentences."""
        by = self.parity
        found = locate_in_file(artifact, by.reference, measurement, self.exported, by.flatten, by.device.type)
        # Write the reproduction now, because the rest takes longer and may be interrupted.
        folder = self.job.debug_dir
        written = "" if folder is None else self._reproduced(artifact, measurement, report, found, folder)
        draws = "The model draws random numbers, and a file that draws different numbers can't match it: make them an input."
        told = (
            str(found),
            fault_of_runtime(artifact, by.is_right),
            self._passes_to_blame,
            draws if by.reference.draws_random_numbers else "",
            written,
        )
        return found, " ".join(filter(None, told))

    @cached_property
    def _passes_to_blame(self) -> str:
        """A sentence about the passes if the exported module is wrong itself; "" if it is right.

        `optimize` compares at two batch sizes, and rolls back a pass that is wrong there. Files are compared at more
        calls, so a file may show an error of a pass at another size.
        """
        provenance, reference = self.job.provenance, self.parity.reference
        if provenance is None or provenance.original is None or not provenance.applied:
            return ""
        report = self.parity.judge(reference.compare(on_device(self.exported, self.job.home)))
        if report.verdict != "failed":
            return ""
        names = listed(list(dict.fromkeys(each.name for each in provenance.applied)))
        return (
            f"The optimized module is wrong there too: one of its passes ({names}) causes it, or it was modified after "
            "optimize() made it. Optimize with fewer passes to find out."
        )

    def _reproduced(
        self, artifact: Artifact, measurement: Measurement, report: ParityReport, found: Located, folder: Path
    ) -> str:
        """Write the reproduction of a wrong artifact, and return a sentence about it."""
        reference = self.parity.reference
        where = suspect_calls(reference, measurement)[0] if found.divergence is None else found.divergence.where
        golden = golden_entry(reference, where)
        inputs = self.parity.flatten(golden.call.args, golden.call.kwargs)
        return write_reproduction(folder, artifact, inputs, golden, where, report, found)


def factor_between_devices(home: torch.device, target: torch.device) -> tuple[float, list[str]]:
    """The allowed error of artifacts on `target` in units of the noise, with a note if the original's device is another."""
    measured, here = describe_device(home), describe_device(target)
    factor = FACTOR * factor_between(measured, here)
    if factor == FACTOR:
        return factor, []
    return factor, [
        f"the original ran on {measured['name']} ({measured['type']}): artifacts on {here['name']} ({here['type']}) "
        f"may have errors of {factor:g} times its noise"
    ]
