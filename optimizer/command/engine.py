"""The work of the command after its options are parsed. Each public function returns a JSON document.

`cli` imports this module late, because it imports torch. Everything that can be checked without the user's code is checked
before that code runs.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import MISSING, asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from exporters.metadata import refuse_metadata
from exporters.onnx import refuse_opset
from exporters.registry import exporter_named
from optimize_export.errors import (
    BundleError,
    DeviceError,
    ExportFailed,
    FindingsFound,
    LoadError,
    ParityError,
    failure_document,
)
from optimize_export.manifest import REPORT_PAGE, plain
from optimize_export.runtime import require_runtime
from optimize_export.wording import described, listed, type_name
from optimizer.api import export, optimize_to_export, report_of
from optimizer.bundle import Bundle, VerifyReport, check_target, rejudge_bundle, verify_bundle, write_triton_model
from optimizer.command.early_checks import library_of
from optimizer.command.errors import errors_of_user_code, own_errors
from optimizer.command.inputs import misfit, parse_input
from optimizer.command.loading import Loaded, Training, load
from optimizer.command.up_to_date import inputs_of, opened_files
from optimizer.command.user_code import names_restored
from optimizer.comparing import compare_bundles, verify_with
from optimizer.diagnosis import RULES, Diagnosis, diagnose
from optimizer.exporting import opened
from optimizer.hub import push
from optimizer.model import Call, Runs, batch_of, called, eager_only, in_turn, leaves_of, random_state
from optimizer.options import (
    LOAD_STAGE,
    BenchOptions,
    CompareOptions,
    DiagnoseOptions,
    ExportOptions,
    ListOptions,
    PushOptions,
    RejudgeOptions,
    TritonOptions,
    TuneTrainingOptions,
    VerifyOptions,
)
from optimizer.report import Progress, ProgressFunction
from optimizer.training import tune_training
from optimizer.tuning import bench_bundle, bench_throughput, read_choices, soak_bundle
from passes.base import Pass
from passes.registry import describe_passes, make_passes, parse_passes

Document = dict[str, Any]


@in_turn
def export_model(options: ExportOptions, progress: ProgressFunction) -> Document:
    """Make the bundle.

    If the bundle lacks a requested format, the document says so with `exit_code` 4. If a `ParityError` leaves nothing
    to publish, the document has the measurements and `exit_code` 6. Any other error is raised.
    """
    try:
        with own_errors(), names_restored():
            return _make(options, progress)
    except ParityError as error:
        told = failure_document(error.exit_code, type(error).__name__, str(error))
        return dict(plain({**told, **error.figures}))


def _make(options: ExportOptions, progress: ProgressFunction) -> Document:
    started = time.perf_counter()
    passes = _checked_passes(options)
    shown, options = options.output, _with_absolute_paths(options)
    options = replace(options, device=_chosen_device(options.device, require_gpu=options.require_gpu))
    if options.reference_device == "cuda" and not torch.cuda.is_available():
        raise DeviceError("--reference-device cuda needs a GPU, but torch finds none here.")
    if options.choices is not None:
        read_choices(options.choices, options.formats, options.budget)
    loaded = load_and_run(options, progress)
    if options.dynamic is None and not options.static_batch and options.input_names is None:
        options = replace(options, dynamic=loaded.dynamic)
    opened(loaded.model, loaded.samples(options.seed), options)
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
        evaluate=loaded.evaluate,
        aggregate=loaded.aggregate,
        source=loaded.source,
        build=loaded.build,
    )
    report = report_of(fast).to_json()
    seconds = round(time.perf_counter() - started, 3)
    document = _exported(shown, bundle, report, loaded, seconds)
    return {**document, "profile": bundle.profile} if bundle.profile else document


def _checked_passes(options: ExportOptions) -> list[Pass]:
    """Make the passes that the options name, and check all options that can be checked without the model.

    The passes are made before the user's modules can take the names of our packages.
    """
    passes = make_passes(None if options.passes is None else parse_passes(options.passes), "inference")
    for name in options.formats:
        exporter_named(name)
    if "onnx" in options.formats:
        require_runtime("onnxruntime")
    refuse_opset(options.opset, options.formats)
    refuse_metadata(options.metadata or {})
    for text in options.inputs:
        parse_input(text)
    check_target(options.output, force=options.force)
    return passes


def _with_absolute_paths(options: ExportOptions) -> ExportOptions:
    """Make all paths absolute, because the user's code may change the current folder."""
    absolute: dict[str, Any] = {
        each.name: path.absolute() for each in fields(options) if isinstance(path := getattr(options, each.name), Path)
    }
    return replace(options, **absolute, input_files=tuple(path.absolute() for path in options.input_files))


def _chosen_device(asked: str, *, require_gpu: bool) -> str:
    available = torch.cuda.is_available()
    if available:
        return "cpu" if asked == "cpu" else "cuda"
    if require_gpu or asked == "cuda":
        option = "--require-gpu" if require_gpu else "--device cuda"
        raise DeviceError(f"{option} needs a GPU, but torch finds none here.")
    return "cpu"


def _exported(output: Path, bundle: Bundle, report: Document, loaded: Loaded, seconds: float) -> Document:
    manifest = bundle.manifest
    outcome: Document = {"ok": True, "exit_code": 0}
    if bundle.missing:
        outcome = failure_document(ExportFailed.exit_code, ExportFailed.__name__, bundle.missing_text(output))
    document = {
        **outcome,
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


# The first run of the model ------------------------------------------------------------------------------------------


def load_and_run(options: ExportOptions, progress: ProgressFunction, *, trains: bool = False) -> Loaded:
    """Load the model with its weights and inputs, run it once, and record what the bundle is built from.

    With `trains`, its training step is read too. The paths in the options are absolute.
    """
    progress(Progress(LOAD_STAGE, 0, 2, options.model))
    inputs, before, started = inputs_of(options), dict(sys.modules), time.time()
    with opened_files() as files:
        loaded = load(
            options.model,
            name=options.name,
            inputs=options.inputs,
            input_files=options.input_files,
            weights=options.weights,
            calibration=options.calibration,
            calibrates=not options.budget.is_exact,
            evaluates=options.budget.drop is not None,
            trains=trains,
            seed=options.seed,
        )
        progress(Progress(LOAD_STAGE, 1, 2, f"{loaded.source} runs on its inputs"))
        check_runs(loaded, seed=options.seed)
    loaded.build = inputs.record(before, files.data(), started)
    progress(Progress(LOAD_STAGE, 2, 2, loaded.source))
    return loaded


def check_runs(loaded: Loaded, *, seed: int = 0) -> None:
    """Run a copy of the model once on each call of its inputs, in eval mode and without gradients.

    The random state of torch, numpy and Python is restored. Lazy modules get their parameters here and keep them.
    """
    model = loaded.model
    device = next((tensor.device for tensor in _tensors_of(model)), None)
    samples = loaded.samples(seed, device)
    call = samples.given
    with random_state(), eager_only():
        if any(is_lazy(tensor) for tensor in _tensors_of(model)):
            _initialize(loaded, call)
            loaded.notes += ("Lazy modules got their parameters from a run on the example inputs.",)
        runs = Runs(model, in_eval=True)
        outputs = runs.first(lambda module: _run(loaded, module, call))
        for batch_size, draw in samples.further:
            further = samples.at(batch_size, draw)
            runs.first(partial(_run, loaded, call=further))
    leaves = leaves_of(outputs).values
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        what = type_name(leaves[0]) if leaves else type_name(outputs)
        raise LoadError(
            f"forward of {loaded.source} returned {what} instead of tensors; it must return tensors, also in "
            "tuples, lists, dicts or dataclasses."
        )


def _initialize(loaded: Loaded, call: Call) -> None:
    """Run the model itself in eval mode, because lazy modules take their shapes from their first inputs."""
    flags = [(module, module.training) for module in loaded.model.modules()]
    try:
        _run(loaded, loaded.model.eval(), call)
    finally:
        for module, training in flags:
            module.training = training


def _run(loaded: Loaded, model: Callable[..., Any], call: Call) -> Any:
    tensors = leaves_of((call.args, call.kwargs)).tensors()
    shapes = listed([described(tensor) for _, tensor in tensors])
    try:
        with torch.no_grad(), errors_of_user_code(f"{loaded.source} failed on its inputs ({shapes})", loaded.folder):
            return called(model, call)
    except LoadError as error:
        why = misfit(loaded.model, call) if isinstance(error.__cause__, TypeError) else None
        if why is None:
            raise
        raise LoadError(f"The inputs don't fit forward of {loaded.source}: {why}.") from error.__cause__


def _tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


# Diagnosis -----------------------------------------------------------------------------------------------------------


@in_turn
def diagnose_model(options: DiagnoseOptions, progress: ProgressFunction) -> Document:
    """Diagnose a model. With `fail_on`, the `exit_code` is 10 if there is a finding of that level or a higher one."""
    with own_errors(), names_restored():
        load = options.load
        device = _chosen_device(load.device, require_gpu=load.require_gpu)
        loaded = load_and_run(_with_absolute_paths(load), progress, trains=True)
        training, notes = loaded.training, list(loaded.notes)
        if training is not None and training.misfit:
            notes.append(f"The training step was left out: {training.misfit}.")
            training = None
        progress(Progress("diagnose", 0, 1, loaded.source))
        found = diagnose(
            loaded.model,
            loaded.example_inputs,
            example_kwargs=loaded.example_kwargs,
            training_step=None if training is None else training.step,
            batch=None if training is None else training.batch,
            loader=None if training is None else training.loader,
            optimizer=None if training is None else training.optimizer,
            device=device,
        )
        progress(Progress("diagnose", 1, 1, loaded.source))
    rules = [{"name": each.name, "level": each.level, "description": each.description} for each in RULES]
    return {**_failing(found, options.fail_on), "diagnosis": found.to_json(), "rules": rules, "notes": notes}


def _failing(found: Diagnosis, fail_on: Any) -> Document:
    failing = () if fail_on is None else found.at_least(fail_on)
    if not failing:
        return {"ok": True, "exit_code": 0}
    count = len(failing)
    level = f"level {fail_on}" if fail_on == "error" else f"level {fail_on} or higher"
    message = f"The diagnosis has {count} finding{'s' if count > 1 else ''} of {level}: fix them, or change --fail-on."
    return failure_document(FindingsFound.exit_code, FindingsFound.__name__, message)


# Training ------------------------------------------------------------------------------------------------------------


@in_turn
def tune_training_step(options: TuneTrainingOptions, progress: ProgressFunction) -> Document:
    """Tune the training step of the user's file, and write the result if there is an output."""
    output = None if options.output is None else options.output.absolute()
    with own_errors(), names_restored():
        load = options.load
        if output is not None:
            check_target(output)
        device = _chosen_device(load.device, require_gpu=load.require_gpu)
        loaded = load_and_run(_with_absolute_paths(load), progress, trains=True)
        training = _comparable(loaded, load.model)
        batch = training.batch
        if batch is None and training.loader is None:
            batch = batch_of(loaded.first_call(load.seed))
        found = tune_training(
            loaded.model,
            training.step,
            batch,
            loader=training.loader,
            optimizer=training.optimizer,
            memory=options.memory,
            batch_size=options.batch_size,
            tune_seconds=options.tune_seconds,
            steps=options.steps,
            curve=options.curve,
            device=device,
            progress=progress,
        )
        if output is not None:
            found.save(output)
    document: Document = {"ok": True, "exit_code": 0, "model": loaded.source, "training": found.to_json()}
    document |= {"code": found.code, "notes": list(loaded.notes)}
    return dict(plain(document if output is None else {**document, "output": str(options.output)}))


def _comparable(loaded: Loaded, model: str) -> Training:
    """What the file says about training, if its step can be run in several ways."""
    training, where = loaded.training, loaded.source.partition(":")[0]
    how = (
        "`def training_step(model, batch)`, which returns the loss and leaves backward and the optimizer to its caller"
    )
    if training is None and library_of(model) is not None:
        raise LoadError(f"{model} has no training_step: write a Python file with it as `model`, and add {how}.")
    if training is None:
        raise LoadError(f"{where} has no training_step: add {how}.")
    if training.misfit:
        raise LoadError(f"{where}: {training.misfit}; write {how}.")
    if not training.takes_batch:
        raise LoadError(
            f"{where}: training_step takes no arguments, so it draws its own batch and changes the weights itself, and "
            f"nothing could be compared; write {how}."
        )
    return training


# Finished bundles, and the list of passes ----------------------------------------------------------------------------


def verify(options: VerifyOptions) -> Document:
    """Verify a bundle again. The `exit_code` is 8 if files are damaged, and 6 if an artifact isn't proven correct.

    With sets of other versions, it is the highest of theirs.
    """
    if options.sets:
        return _upgraded(options)
    with own_errors():
        report = verify_bundle(
            options.bundle,
            device=_chosen_device(options.device, require_gpu=options.require_gpu),
            expect=options.expect,
            run=options.run,
        )
    return _checked(options.bundle, report)


def _upgraded(options: VerifyOptions) -> Document:
    with own_errors():
        found = verify_with(options.bundle, options.sets, expect=options.expect, seconds=options.seconds or 10.0)
    if not found.checked.ok:
        return _checked(options.bundle, found.checked)
    document = {"ok": not found.exit_code, "exit_code": found.exit_code, "bundle": str(options.bundle)}
    told = {"problems": found.problems, "upgrade": found.to_json()}
    return dict(plain({**document, **told}))


def compare(options: CompareOptions) -> Document:
    """Compare two bundles."""
    with own_errors():
        found = compare_bundles(options.bundle, options.other, seconds=options.seconds or 5.0)
    notes = found.pop("notes")
    return {"ok": True, "exit_code": 0, "comparison": found, "notes": notes}


def bench(options: BenchOptions) -> Document:
    """Time the files of a bundle on this machine, find how to serve it, or call one of them for long.

    Then a leak has an `exit_code`.
    """
    if options.throughput:
        return _throughput(options)
    device = _chosen_device(options.device, require_gpu=False)
    if options.soak is not None:
        return _soak(options.bundle, options.soak, device)
    with own_errors():
        found = bench_bundle(options.bundle, device=device, seconds=options.seconds or 5.0)
    return dict(plain({"ok": True, "exit_code": 0, "bundle": str(options.bundle), "benchmark": found.to_json()}))


def _soak(bundle: Path, seconds: float, device: str) -> Document:
    with own_errors():
        run, found = soak_bundle(bundle, seconds, device)
    document: Document = {"ok": True, "exit_code": 0}
    if found.leaks:
        message = f"{bundle} leaks in {run.route}: over {found.calls:,} calls, {found.growth()}."
        document = failure_document(FindingsFound.exit_code, FindingsFound.__name__, message)
    told = {"bundle": str(bundle), "route": str(run.route), "soak": found.to_json()}
    told["notes"] = [found.sentence(), *(["The GPU's memory wasn't read."] if run.device == "cuda" else [])]
    return dict(plain({**document, **told}))


def _throughput(options: BenchOptions) -> Document:
    with own_errors():
        found, sums = bench_throughput(
            options.bundle, target=options.p95, seconds=options.seconds or 60.0, save=options.save
        )
    document: Document = {"ok": True, "exit_code": 0, "bundle": str(options.bundle), "service": found.to_json()}
    return dict(plain(document if sums is None else {**document, "sha256sums": sums}))


def rejudge(options: RejudgeOptions) -> Document:
    """Judge the measurements of a bundle again; the `exit_code` is as for `verify`."""
    with own_errors():
        report = rejudge_bundle(options.bundle, atol=options.atol, rtol=options.rtol, factor=options.factor)
    return _checked(options.bundle, report)


def lay_out(options: TritonOptions) -> Document:
    """Write an artifact of a bundle into a model repository."""
    with own_errors():
        folder = write_triton_model(options.bundle, options.output, options.format)
    model = str(options.output / folder.name)
    return {"ok": True, "exit_code": 0, "bundle": str(options.bundle), "triton_model": model}


def push_bundle(options: PushOptions) -> Document:
    """Push a bundle to the Hugging Face Hub."""
    with own_errors():
        pushed = push(options.bundle, options.repo_id, private=options.private, revision=options.revision)
    return {"ok": True, "exit_code": 0, "bundle": str(options.bundle), **pushed.to_json()}


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
