"""Compare the artifacts of an export with the original, and explain why one is wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exporters.base import Artifact, Exporter, LoadedArtifact
from optimize_export.manifest import file_digest
from optimize_export.wording import quote
from optimizer.bundle import describe_device, factor_between
from optimizer.exporting.copies import copy_for_export, optimize_again
from optimizer.exporting.job import ExportJob
from optimizer.faults import Located, fault_of_runtime, locate_in_file, suspect_calls, write_reproduction
from optimizer.model import on_device
from optimizer.parity import FACTOR, Flatten, Measurement, ParityReport, Reference, Rows, Tolerance, golden_entry, judge
from passes.base import Pass

logger = logging.getLogger(__name__)

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
        measurement = self.reference.compare(loaded, flatten=self._flatten_there, rows=rows)
        if torch.device(measurement.device).type != self.device.type:
            measurement = replace(measurement, device=self.device.type, reference_device=measurement.device)
        measurement = replace(measurement, settings={**measurement.settings, **loaded.settings})
        placement = loaded.placement
        # A session maps the file into memory, so it must be closed before the folder is moved.
        del loaded
        return measurement, placement

    def is_wrong(self, module: nn.Module) -> bool:
        """Whether the outputs of a module on the original's device are wrong."""
        return self.judge(self.reference.compare(module)).verdict == "failed"

    def is_right(self, artifact: Artifact) -> bool:
        return self.judge(self.measure(artifact)[0]).verdict != "failed"

    def _flatten_there(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[torch.Tensor]:
        # The calls are on the original's device.
        return [tensor.to(self.device) for tensor in self.flatten(args, kwargs)]


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
        told = (str(found), fault_of_runtime(artifact, by.is_right), self._pass_to_blame, self._draws(), written)
        return found, " ".join(filter(None, told))

    @cached_property
    def _pass_to_blame(self) -> str:
        """A sentence about the pass that made the exported module wrong; "" if none did, or if none can run again."""
        job, provenance = self.job, self.job.provenance
        if provenance is None or provenance.original is None:
            return ""
        exported = on_device(self.exported, job.home)

        def is_wrong_with(passes: Sequence[Pass] | None) -> bool:
            again = exported if passes is None else copy_for_export(optimize_again(job, passes, job.home), job.home)
            return self.parity.is_wrong(again)

        return pass_to_blame(provenance.applied, is_wrong_with)

    def _draws(self) -> str:
        if not self.parity.reference.draws_random_numbers:
            return ""
        return (
            "The model draws random numbers, and a file that draws different numbers can't match it: make them an "
            "input."
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
    """The allowed error of artifacts in units of the noise, with a note if different devices make it larger.

    Args:
        home: the device of the original.
        target: the device of the artifacts.
    """
    measured, here = describe_device(home), describe_device(target)
    factor = FACTOR * factor_between(measured, here)
    if factor == FACTOR:
        return factor, []
    return factor, [
        f"the original ran on {measured['name']} ({measured['type']}): artifacts on {here['name']} ({here['type']}) "
        f"may have errors of {factor:g} times its noise"
    ]


def pass_to_blame(passes: Sequence[Pass], is_wrong_with: Callable[[Sequence[Pass] | None], bool]) -> str:
    """Find the pass that makes a result wrong, by bisection.

    `optimize` compares at two batch sizes, and rolls back a pass that is wrong there. Files are compared at more calls, so
    a file may show an error that a pass causes at another size. The first passes of the list run again from the original,
    and each result is compared at every call at which files are compared.

    An exception in the search goes into the sentence and isn't raised, because it would hide the original failure.

    Args:
        passes: the passes that changed something, in order.
        is_wrong_with: runs the given passes alone on the original, and returns whether the result is wrong at any call.
            For None it judges the existing result.

    Returns:
        A sentence about the pass; "" if the result is right or no pass changed anything.
    """
    try:
        return _bisect(passes, is_wrong_with)
    except Exception as error:  # the search runs foreign code, whose error must not hide the failure
        logger.debug("the search for the pass raised", exc_info=True)
        return f"The pass that causes it is unknown: the search raised {type(error).__name__}: {quote(error)}."


def _bisect(passes: Sequence[Pass], is_wrong_with: Callable[[Sequence[Pass] | None], bool]) -> str:
    if not passes or not is_wrong_with(None):
        return ""
    if not is_wrong_with(passes):
        return "The same passes, run again, give a correct result: this one was modified after optimize() made it."
    # Invariant: the first `low` passes are right or low is 0, and the first `high` passes are wrong.
    low, high = 0, len(passes)
    while high - low > 1:
        middle = (low + high) // 2
        if is_wrong_with(passes[:middle]):
            high = middle
        else:
            low = middle
    if high <= 1 and is_wrong_with(()):
        return "It is wrong even without any pass."
    return (
        f"The pass {passes[high - 1].name} causes it: without it and the later passes, the result is correct at "
        "every call."
    )
