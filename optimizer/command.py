"""What the command does once its options are read: load, optimize, export, verify; each returns a JSON document.

The one module that `cli` imports late. Whatever can be known before work is checked before the user's code runs.
"""

import errno
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, replace
from pathlib import Path
from typing import Any

import torch

from exporters.errors import (
    ExporterError,
    MetadataError,
    ProviderFallback,
    StructureError,
    UnknownFormat,
    UnknownOpset,
)
from exporters.metadata import refuse_metadata
from exporters.opset import refuse_opset
from exporters.registry import exporter_named
from optimizer.api import check_dynamic, export, optimize_to_export, report_of
from optimizer.bundle import Bundle, VerifyReport, check_target, rejudge_bundle, verify_bundle
from optimizer.early_checks import check_early
from optimizer.errors import (
    BundleError,
    DeviceError,
    ExportFailed,
    LoadError,
    OptimizeExportError,
    OptimizeFailed,
    ParityError,
    UsageError,
)
from optimizer.input_spec import parse_input
from optimizer.loading import Loaded, load
from optimizer.manifest import plain
from optimizer.options import LOAD_STAGE, ExportOptions, RejudgeOptions, VerifyOptions
from optimizer.report import Progress
from optimizer.sentences import exit_call, one_line
from optimizer.trial import check_runs
from optimizer.user_code import hard_exits_raise, names_restored
from passes.base import Pass
from passes.errors import (
    DuplicatePass,
    PassesError,
    PassOptionError,
    PassOrderError,
    UnknownPass,
)
from passes.registry import describe_passes, make_passes, parse_passes

Document = dict[str, Any]

_USAGE = (
    UnknownPass,
    DuplicatePass,
    PassOptionError,
    PassOrderError,
    UnknownFormat,
    UnknownOpset,
    MetadataError,
    StructureError,
)
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def export_model(options: ExportOptions, progress: Callable[[Progress], None]) -> Document:
    """Make the bundle. Raises the errors of `optimizer.errors`, and none of those of the other packages.

    Where a format is missing from the bundle the document says so with `exit_code` 4. Where no file is left, and one of them
    computes something else, nothing is published, and the document has the figures and `exit_code` 6.
    """
    try:
        with _own_errors(), names_restored(), hard_exits_raise(), _unlogged():
            return _make(options, progress)
    except ParityError as error:
        return _parity_failed(error)


def verify(options: VerifyOptions) -> Document:
    """Check a bundle again; `exit_code` is 8 where files are damaged, 6 where an artifact isn't proven to be right."""
    with _own_errors():
        report = verify_bundle(
            options.bundle,
            device=options.device,
            require_gpu=options.require_gpu,
            expect=options.expect,
            run=options.run,
        )
    return _checked(options.bundle, report)


def rejudge(options: RejudgeOptions) -> Document:
    """Judge a bundle's measurements again; `exit_code` is 8 where the manifest is damaged and 6 where one is off by more."""
    with _own_errors():
        report = rejudge_bundle(options.bundle, atol=options.atol, rtol=options.rtol, factor=options.factor)
    return _checked(options.bundle, report)


def _checked(bundle: Path, report: VerifyReport) -> Document:
    code = 0 if report.ok else ParityError.exit_code if report.intact else BundleError.exit_code
    return {"ok": report.ok, "exit_code": code, "bundle": str(bundle), **report.to_json()}


def list_passes() -> Document:
    """Names, summaries and options of the passes that are installed."""
    with _own_errors():
        known = [asdict(description) for description in describe_passes()]
    for each in known:
        each["options"] = {name: _default(value) for name, value in each["options"].items()}
    return {"ok": True, "exit_code": 0, "available_passes": known}


def _make(options: ExportOptions, progress: Callable[[Progress], None]) -> Document:
    started = time.perf_counter()
    passes = _check(options)
    shown, options = options.output, _with_absolute_paths(options)
    device = _device(options.device, require_gpu=options.require_gpu)
    if options.reference_device == "cuda" and not torch.cuda.is_available():
        raise DeviceError("There is no GPU that torch can use here, and --reference-device cuda asks for one.")
    loaded = _load(options, progress)
    if options.dynamic is not None:
        check_dynamic(
            loaded.model,
            loaded.samples(options.seed),
            options.dynamic,
            input_names=options.input_names,
            static_batch=options.static_batch,
        )
    fast = optimize_to_export(
        loaded.model,
        passes,
        example_inputs=loaded.example_inputs,
        example_kwargs=loaded.example_kwargs,
        further_inputs=loaded.further_inputs,
        device=device,
        reference_device=options.reference_device,
        strict=options.strict,
        batch_sizes=options.batch_sizes,
        static_batch=options.static_batch,
        dynamic=options.dynamic,
        input_names=options.input_names,
        seed=options.seed,
        progress=progress,
    )
    bundle = export(
        fast,
        example_inputs=loaded.example_inputs,
        example_kwargs=loaded.example_kwargs,
        further_inputs=loaded.further_inputs,
        output=options.output,
        formats=options.formats,
        batch_sizes=options.batch_sizes,
        static_batch=options.static_batch,
        dynamic=options.dynamic,
        input_names=options.input_names,
        output_names=options.output_names,
        opset=options.opset,
        metadata=options.metadata,
        device=device,
        reference_device=options.reference_device,
        require_gpu=options.require_gpu,
        force=options.force,
        strict=options.strict,
        atol=options.atol,
        rtol=options.rtol,
        row_independence=options.row_independence,
        seed=options.seed,
        source=loaded.source,
        debug_dir=options.debug_dir,
        progress=progress,
    )
    report = report_of(fast).to_json()
    seconds = round(time.perf_counter() - started, 3)
    return _exported(shown, bundle, report, loaded, seconds)


def _with_absolute_paths(options: ExportOptions) -> ExportOptions:
    """The options with paths that stay the same when the user's code changes the current folder."""
    return replace(
        options,
        output=options.output.absolute(),
        input_files=tuple(path.absolute() for path in options.input_files),
        weights=None if options.weights is None else options.weights.absolute(),
        debug_dir=None if options.debug_dir is None else options.debug_dir.absolute(),
    )


def _default(value: object) -> str | int | float | None:
    if value is MISSING:
        return "required"
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _check(options: ExportOptions) -> list[Pass]:
    """See to what can be known from the options alone, and make the passes, as long as all names are ours."""
    passes = make_passes(None if options.passes is None else parse_passes(options.passes), "inference")
    for name in options.formats:
        exporter_named(name)
    refuse_opset(options.opset, options.formats)
    refuse_metadata(options.metadata)
    for text in options.inputs:
        parse_input(text)
    check_early(options)
    check_target(options.output, force=options.force)
    return passes


def _device(asked: str, *, require_gpu: bool) -> str:
    available = torch.cuda.is_available()
    if available:
        return "cpu" if asked == "cpu" else "cuda"
    if require_gpu or asked == "cuda":
        option = "--require-gpu" if require_gpu else "--device cuda"
        raise DeviceError(f"There is no GPU that torch can use here, and {option} asks for one.")
    return "cpu"


def _load(options: ExportOptions, progress: Callable[[Progress], None]) -> Loaded:
    progress(Progress(LOAD_STAGE, 0, 2, options.model))
    loaded = load(
        options.model,
        name=options.name,
        inputs=options.inputs,
        input_files=options.input_files,
        weights=options.weights,
        seed=options.seed,
    )
    progress(Progress(LOAD_STAGE, 1, 2, f"{loaded.source} runs on its inputs"))
    check_runs(loaded, seed=options.seed)
    progress(Progress(LOAD_STAGE, 2, 2, loaded.source))
    return loaded


def _exported(output: Path, bundle: Bundle, report: Document, loaded: Loaded, seconds: float) -> Document:
    manifest = bundle.manifest
    document = {
        **_outcome(output, bundle),
        "bundle": str(output),
        "sha256sums": bundle.sha256sums,
        "model": manifest["model"],
        "device": manifest["device"],
        "passes": report["passes"],
        "coverage": report["coverage"],
        # What was measured is in the manifest: nobody reads thousands of its lines here.
        "artifacts": [{**artifact, "measurement": None} for artifact in manifest["artifacts"]],
        "missing": bundle.missing,
        "unproven": bundle.unproven,
        "parity": manifest["parity"],
        "report": report,
        "notes": list(dict.fromkeys([*loaded.notes, *report["notes"], *manifest.get("notes", ())])),
        "seconds": seconds,
    }
    return dict(plain(document))


def _outcome(output: Path, bundle: Bundle) -> Document:
    if not bundle.missing:
        return {"ok": True, "exit_code": 0}
    code = ExportFailed.exit_code
    told = {"code": code, "kind": ExportFailed.__name__, "message": bundle.what_is_missing(output)}
    return {"ok": False, "exit_code": code, "error": told}


def _parity_failed(error: ParityError) -> Document:
    told = {"code": error.exit_code, "kind": type(error).__name__, "message": str(error)}
    return dict(plain({"ok": False, "exit_code": error.exit_code, "error": told, **error.figures}))


@contextmanager
def _unlogged() -> Iterator[None]:
    """What the library logs isn't printed by Python besides: the command says it itself."""
    library, nobody = logging.getLogger("optimizer"), logging.NullHandler()
    library.addHandler(nobody)
    try:
        yield
    finally:
        library.removeHandler(nobody)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Give every error that the user is to read the class that has its exit code."""
    try:
        yield
    except OptimizeExportError:
        raise
    except _USAGE as error:
        raise UsageError(one_line(error)) from error
    except PassesError as error:
        raise OptimizeFailed(one_line(error)) from error
    except ProviderFallback as error:
        raise ParityError(one_line(error)) from error
    except ExporterError as error:
        raise ExportFailed(one_line(error)) from error
    except SystemExit as error:
        # The program itself never exits here: it is the model, at an input that its first run hadn't.
        raise LoadError(f"The model called {exit_call(error)} while it ran: take the call out of it.") from error
    except OSError as error:
        if error.errno not in _DISK:
            raise
        raise BundleError(f"The bundle couldn't be written: {error.strerror}.") from error
