"""The work of the command on finished bundles, and the list of passes. Each function returns a JSON document."""

from dataclasses import MISSING, asdict
from pathlib import Path

from optimize_export.errors import BundleError, ParityError
from optimize_export.manifest import plain
from optimizer.bundle import VerifyReport, rejudge_bundle, verify_bundle, write_triton_model
from optimizer.command.build import Document, chosen_device
from optimizer.command.own_errors import own_errors
from optimizer.options import BenchOptions, ListOptions, RejudgeOptions, TritonOptions, VerifyOptions
from optimizer.tuning import bench_bundle
from passes.registry import describe_passes


def verify(options: VerifyOptions) -> Document:
    """Verify a bundle again.

    The `exit_code` is 8 if files are damaged, and 6 if an artifact isn't proven correct.
    """
    with own_errors():
        report = verify_bundle(
            options.bundle,
            device=options.device,
            require_gpu=options.require_gpu,
            expect=options.expect,
            run=options.run,
        )
    return _checked(options.bundle, report)


def bench(options: BenchOptions) -> Document:
    """Time the files of a bundle on this machine."""
    device = chosen_device(options.device, require_gpu=False)
    with own_errors():
        found = bench_bundle(options.bundle, device=device)
    return dict(plain({"ok": True, "exit_code": 0, "bundle": str(options.bundle), "benchmark": found.to_json()}))


def rejudge(options: RejudgeOptions) -> Document:
    """Judge the measurements of a bundle again.

    The `exit_code` is 8 if the manifest is damaged, and 6 if an error is larger than allowed.
    """
    with own_errors():
        report = rejudge_bundle(options.bundle, atol=options.atol, rtol=options.rtol, factor=options.factor)
    return _checked(options.bundle, report)


def lay_out(options: TritonOptions) -> Document:
    """Write an artifact of a bundle into a model repository."""
    with own_errors():
        folder = write_triton_model(options.bundle, options.output, options.format)
    model = str(options.output / folder.name)
    return {"ok": True, "exit_code": 0, "bundle": str(options.bundle), "triton_model": model}


def _checked(bundle: Path, report: VerifyReport) -> Document:
    code = 0 if report.ok else ParityError.exit_code if report.intact else BundleError.exit_code
    return {"ok": report.ok, "exit_code": code, "bundle": str(bundle), **report.to_json()}


def list_passes(_: ListOptions) -> Document:
    """List the installed passes with their names, summaries and options."""
    with own_errors():
        known = [asdict(description) for description in describe_passes()]
    for each in known:
        each["options"] = {name: _default(value) for name, value in each["options"].items()}
    return {"ok": True, "exit_code": 0, "available_passes": known}


def _default(value: object) -> str | int | float | None:
    if value is MISSING:
        return "required"
    return value if value is None or isinstance(value, str | int | float) else str(value)
