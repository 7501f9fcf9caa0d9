"""The work of the command after its options are parsed: load, optimize, export, verify.

Each public function returns a JSON document. `cli` imports this module late, because it imports torch. Everything that
can be checked without the user's code is checked before that code runs.
"""

import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from optimize_export.errors import (
    DeviceError,
    ExportFailed,
    ParityError,
    failure_document,
)
from optimize_export.manifest import REPORT_PAGE, plain
from optimizer.api import check_choices, check_dynamic, export, optimize_to_export, report_of
from optimizer.bundle import Bundle
from optimizer.command.checks import checked_passes
from optimizer.command.first_run import load_and_run
from optimizer.command.loading import Loaded
from optimizer.command.own_errors import own_errors, unlogged
from optimizer.command.user_code import hard_exits_raise, names_restored
from optimizer.model import in_turn
from optimizer.options import ExportOptions
from optimizer.report import Progress

Document = dict[str, Any]


@in_turn
def export_model(options: ExportOptions, progress: Callable[[Progress], None]) -> Document:
    """Make the bundle.

    If the bundle lacks a requested format, the document says so with `exit_code` 4. If a `ParityError` leaves nothing
    to publish, the document has the measurements and `exit_code` 6.

    Raises:
        OptimizeExportError: any other error; errors of the packages `passes` and `exporters` are converted.
    """
    try:
        with own_errors(), names_restored(), hard_exits_raise(), unlogged():
            return _make(options, progress)
    except ParityError as error:
        return _parity_failed(error)


def _make(options: ExportOptions, progress: Callable[[Progress], None]) -> Document:
    started = time.perf_counter()
    passes = checked_passes(options)
    shown, options = options.output, _with_absolute_paths(options)
    options = replace(options, device=chosen_device(options.device, require_gpu=options.require_gpu))
    if options.reference_device == "cuda" and not torch.cuda.is_available():
        raise DeviceError("--reference-device cuda needs a GPU, but torch finds none here.")
    check_choices(options)
    loaded = load_and_run(options, progress)
    if options.dynamic is None and not options.static_batch and options.input_names is None:
        options = replace(options, dynamic=loaded.dynamic)
    check_dynamic(loaded.model, loaded.samples(options.seed), options)
    inputs: dict[str, Any] = {
        "example_inputs": loaded.example_inputs,
        "example_kwargs": loaded.example_kwargs,
        "further_inputs": loaded.further_inputs,
        "progress": progress,
    }
    fast = optimize_to_export(loaded.model, passes, options, **inputs)
    bundle = export(
        fast,
        **inputs,
        **options.settings(),
        calibration=loaded.calibration,
        source=loaded.source,
        build=loaded.build,
    )
    report = report_of(fast).to_json()
    seconds = round(time.perf_counter() - started, 3)
    document = _exported(shown, bundle, report, loaded, seconds)
    return {**document, "profile": bundle.profile} if bundle.profile else document


def _with_absolute_paths(options: ExportOptions) -> ExportOptions:
    """Make all paths absolute, because the user's code may change the current folder."""
    absolute: dict[str, Any] = {
        each.name: path.absolute() for each in fields(options) if isinstance(path := getattr(options, each.name), Path)
    }
    return replace(options, **absolute, input_files=tuple(path.absolute() for path in options.input_files))


def chosen_device(asked: str, *, require_gpu: bool) -> str:
    available = torch.cuda.is_available()
    if available:
        return "cpu" if asked == "cpu" else "cuda"
    if require_gpu or asked == "cuda":
        option = "--require-gpu" if require_gpu else "--device cuda"
        raise DeviceError(f"{option} needs a GPU, but torch finds none here.")
    return "cpu"


def _exported(output: Path, bundle: Bundle, report: Document, loaded: Loaded, seconds: float) -> Document:
    manifest = bundle.manifest
    document = {
        **_outcome(output, bundle),
        "bundle": str(output),
        "report_page": str(output / REPORT_PAGE),
        "sha256sums": bundle.sha256sums,
        "model": manifest["model"],
        "device": manifest["device"],
        "passes": report["passes"],
        "coverage": report["coverage"],
        # The manifest has the measurements: thousands of lines that nobody reads here.
        "artifacts": [{**artifact, "measurement": None} for artifact in manifest["artifacts"]],
        "missing": bundle.missing,
        "unproven": bundle.unproven,
        "parity": manifest["parity"],
        "benchmark": bundle.benchmark,
        "report": report,
        "notes": list(dict.fromkeys([*loaded.notes, *report["notes"], *manifest.get("notes", ())])),
        "seconds": seconds,
    }
    return dict(plain(document))


def _outcome(output: Path, bundle: Bundle) -> Document:
    if not bundle.missing:
        return {"ok": True, "exit_code": 0}
    return failure_document(ExportFailed.exit_code, ExportFailed.__name__, bundle.what_is_missing(output))


def _parity_failed(error: ParityError) -> Document:
    told = failure_document(error.exit_code, type(error).__name__, str(error))
    return dict(plain({**told, **error.figures}))
