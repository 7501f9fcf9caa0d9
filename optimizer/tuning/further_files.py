"""The files that tuning adds to those of an export: in half precision, and compiled for this machine.

The precision is decided on the module: `cast-precision` runs its layers in the dtype, and keeps those in float32 that
lose too much. Every format is exported from that module, by the exporters and with the proof of any result that computes
in half precision. The inputs and outputs of the files stay in float32.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, closing
from copy import copy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from exporters.aoti import AotiExporter
from exporters.errors import ExporterError, ExportError
from exporters.registry import exported_format, exporter_named, half_of
from optimize_export.errors import OptimizeExportError
from optimizer.exporting import ExportJob, MeasuredExport, measure, optimize_again, write_files
from optimizer.parity import ParityReport
from optimizer.pipeline import provenance_of, report_of
from optimizer.report import no_progress
from optimizer.tuning.benchmark import Refused
from passes.base import Pass, Precision
from passes.cast_precision import CastPrecision
from passes.channels_last import ChannelsLast


class FurtherFiles:
    """Makes the module of one export in each half precision once, and further files."""

    def __init__(self, job: ExportJob, measured: MeasuredExport) -> None:
        self._job = job
        quiet = self._quiet(job)
        # A refused file must not change what is told of those of the export.
        graph, failures = replace(measured.graph, refused={}), replace(measured.failures, job=quiet)
        self._exact = quiet, replace(measured, graph=graph, failures=failures)
        # By dtype: the module as an export of its own, or why there is none.
        self._measured: dict[str, tuple[ExportJob, MeasuredExport] | Refused] = {}
        # Those that compile in the background.
        self._begun = ExitStack()
        self.reports: dict[str, ParityReport] = {}
        """By format, the judgement of each exact file that was written."""

    def write(self, format: str, folder: Path, seconds: float | None = None) -> dict[str, Any]:
        """Write the file of a format, such as `model.float16.onnx` of "onnx-float16"; return its entry for the manifest.

        In half precision, `quantization` of the entry has the paths of the layers that stay in float32.

        Args:
            seconds: how long compiling may take; None for no limit.

        Raises:
            Refused: the module can't compute in the dtype, or no file of it is proven. No file is left then.
        """
        dtype = half_of(format)
        job, measured = self._exact if dtype is None else self._made(dtype)
        exporter = copy(exporter_named(exported_format(format)))
        if isinstance(exporter, AotiExporter):
            exporter.until = None if seconds is None else time.monotonic() + seconds
        if dtype is not None:
            # Such as "model.float16.onnx".
            stem, dot, ending = exporter.file_name.partition(".")
            vars(exporter)["file_name"] = f"{stem}.{dtype}{dot}{ending}"
        try:
            written = write_files(replace(job, exporters=[exporter]), measured, folder)
        except ExportError as error:
            # Without the advice for who asks for the format.
            raise Refused(error.reasons or _clause(error)) from error
        except (OptimizeExportError, ExporterError) as error:
            raise Refused(_clause(error)) from error
        (entry,) = written.entries
        size = sum((folder / path).stat().st_size for path in entry["files"])
        entry |= {"bytes": size, "notes": [*entry["notes"], *written.notes]}
        if dtype is None:
            self.reports |= written.reports
            return entry
        assert job.provenance is not None
        cast = next(each for each in reversed(job.provenance.precisions) if isinstance(each, Precision))
        made: dict[str, Any] = {"kind": dtype, "kept": list(cast.kept)}
        if cast.kept:
            told = _why_kept(job.model)
            made["why"] = [told.get(path, "") for path in cast.kept]
        return entry | {"format": format, "quantization": made}

    def begin(self, format: str) -> None:
        """Start to compile the file of a format, "aoti" or "aoti-float16", while this process goes on.

        Raises:
            Refused: as `write`.
        """
        dtype = half_of(format)
        _, measured = self._exact if dtype is None else self._made(dtype)
        plain = measured.request
        request = measured.graph.request(plain) or replace(plain, model=measured.fresh())
        folder = Path(self._begun.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)))
        try:
            self._begun.enter_context(closing(AotiExporter.begin(request, folder)))
        except ExporterError as error:
            raise Refused(_clause(error)) from error

    def close(self) -> None:
        """End what compiles in the background."""
        self._begun.close()

    def _made(self, dtype: str) -> tuple[ExportJob, MeasuredExport]:
        if dtype not in self._measured:
            try:
                self._measured[dtype] = self._measure(dtype)
            except (OptimizeExportError, ExporterError, Refused) as error:
                self._measured[dtype] = Refused(_clause(error))
        made = self._measured[dtype]
        if isinstance(made, Refused):
            raise Refused(str(made))
        return made

    def _measure(self, dtype: str) -> tuple[ExportJob, MeasuredExport]:
        module = optimize_again(self._job, self._passes(dtype), self._job.target)
        if (why := why_not_applied(module, CastPrecision.name)) is not None:
            raise Refused(f"{CastPrecision.name} is {why}")
        job = replace(
            self._quiet(self._job),
            model=module,
            provenance=provenance_of(module),
            # The budget judges the files, and before that the error of the dtype: not tolerances for exact files.
            atol=None,
            rtol=None,
            row_independence=False,
        )
        return job, measure(job)

    @staticmethod
    def _quiet(job: ExportJob) -> ExportJob:
        """The job without what is for the files that the user asked for."""
        return replace(job, debug_dir=None, tell=no_progress)

    def _passes(self, dtype: str) -> list[Pass]:
        """The passes of the export and cast-precision, before those that leave no graph; on a GPU also channels-last.

        Raises:
            Refused: the original is gone, or the model is for training or computes in lower precision already.
        """
        provenance = self._job.provenance
        if provenance is not None and provenance.original is None:
            raise Refused("the original of the model isn't known: export what optimize returned")
        if provenance is not None and provenance.report.mode != "inference":
            raise Refused("the model was optimized for training")
        used = [] if provenance is None else list(provenance.passes)
        if lowered := next((item.name for item in used if item.lowers_precision), None):
            raise Refused(f"the pass {lowered} has lowered the precision already")
        head = [item for item in used if not item.is_barrier]
        # Tensor cores compute convolutions in channels-last.
        if self._job.target.type == "cuda" and all(item.name != ChannelsLast.name for item in head):
            head.append(ChannelsLast())
        return [*head, CastPrecision(dtype, "weights", error=self._error)]  # type: ignore[arg-type]

    @property
    def _error(self) -> float | None:
        """The error of an output, as a share of it, at which its cosine is that of the budget; None for 16 units."""
        least = self._job.budget.cosine
        return None if least is None else math.sqrt(2 * (1 - least))


def _why_kept(module: nn.Module) -> dict[str, str]:
    """By the path of a layer that cast-precision keeps in float32, what it would lose."""
    record = next(each for each in report_of(module).passes if each.name == CastPrecision.name)
    found = (change.text.partition("kept in float32") for change in record.changes)
    places = zip(record.changes, found, strict=True)
    return {change.where.partition(" ")[0]: rest.lstrip(":, ") for change, (_, kept, rest) in places if kept}


def why_not_applied(module: nn.Module, name: str) -> str | None:
    """The status of a pass that didn't change a result of `optimize`, with the reason; None if it did, or wasn't run."""
    record = next((each for each in report_of(module).passes if each.name == name), None)
    if record is None or record.status == "applied":
        return None
    reasons = [record.reason, *(skip.text for skip in record.skips), "it finds nothing to change"]
    return f"{record.status}: {next(filter(None, reasons))}"


def _clause(error: Exception) -> str:
    return str(error).rstrip(".")
