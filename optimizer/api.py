"""`optimize` and `export`, the functions that the user calls."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exporters.base import Exporter
from exporters.child_process import one_child
from optimize_export.errors import UsageError
from optimizer.accuracy import Aggregate, Evaluate, check_evaluate
from optimizer.bundle import Bundle, write_bundle
from optimizer.exporting import (
    ExportJob,
    WrittenFiles,
    add_report,
    exporters_of,
    measure,
    opened,
    profiled,
    with_checked_folders,
    write_data,
    write_files,
)
from optimizer.model import (
    Dynamic,
    ExampleInputs,
    FurtherInputs,
    Mode,
    Samples,
    check_model,
    check_numbers,
    in_turn,
    resolved_device,
    samples_of,
)
from optimizer.options import Effort, ExportSettings, is_to_be_timed
from optimizer.parity import Tolerance
from optimizer.pipeline import optimize_model, provenance_of, report_of
from optimizer.report import ProgressFunction, no_progress
from optimizer.training import TrainingTuning, left_to_the_loop, read_setup
from optimizer.tuning import Benchmark, CalibrationCalls, calibration_of, choose, evaluation_of, read_choices
from passes.base import Pass

__all__ = ["export", "optimize", "report_of"]

logger = logging.getLogger(__name__)


def optimize(
    model: nn.Module,
    passes: Sequence[Pass | str] | None = None,
    *,
    example_inputs: ExampleInputs | None = None,
    example_kwargs: dict[str, Any] | None = None,
    further_inputs: FurtherInputs = (),
    mode: Mode = "inference",
    choices: str | Path | TrainingTuning | None = None,
    device: torch.device | str | None = None,
    strict: bool = False,
    explain: bool = False,
    batch_sizes: Sequence[int] | None = None,
    seed: int = 0,
    progress: ProgressFunction | None = None,
) -> nn.Module:
    """Make a module faster without changing the function it computes.

    The result is an instance of the model's class with its attributes, methods and tree. The caller's module isn't
    changed. The weights aren't copied: the result shares those that no pass changed. In inference mode the result is in
    eval mode, whatever mode the caller's module is in.

    With example inputs, every pass is checked: each change at its own place, and the whole model against the original
    at two batch sizes. A pass is rolled back if its error exceeds the rounding noise of the original. A pass that
    raises is left out. `result.report` (or `report_of(result)`) has the details. Without example inputs, nothing runs
    and nothing is verified.

    Args:
        model: any module.
        passes: names, instances or both, which run in this order. None means the preset of the mode: all passes that
            are exact, exportable and need no compiler.
        example_inputs: the positional arguments of one call as a tuple; a single tensor; or a function
            `f(batch_size, generator) -> tuple`.
        example_kwargs: the keyword arguments of that call.
        further_inputs: more calls, each a pair (args, kwargs) that differs from the first call only in its rows. They
            are compared unchanged, in addition to the calls with drawn inputs.
        mode: "inference" or "training".
        choices: what `tune_training` returned, or a training.toml that `TrainingTuning.save` or the command
            tune-training wrote: its passes run, with mode "training". Notes of the report say what it leaves to the
            training loop, such as autocast.
        device: the device of the result; by default the model's. For another device, the weights are copied.
        strict: raise if a pass fails or is rolled back.
        explain: record among the skips of a graph pass also why its pattern doesn't match at a candidate, and give the
            file and line of each skip.
        batch_sizes: the first of these that differs from 1 and from the batch size of the example inputs is the second
            batch size of all comparisons.
        seed: the seed of the drawn inputs.
        progress: a function `f(step) -> None`, which is called at each step of the work. `step` has the texts `stage`,
            `text` and `name` (of the pass or format; may be ""), and the numbers `done` and `total` of the stage's steps.

    Raises:
        UsageError: an argument is invalid.
        DeviceError: the device is a GPU, and torch finds none.
        PassesError: a pass is unknown, is in the wrong place or isn't available.
        LoadError: the model can't be copied, raises on the example inputs, has a lazy module that never ran, or has to
            run and has tensors without values (device meta); or the function that makes the example inputs raises.
        OptimizeFailed: a pass failed or was rolled back, with `strict` or if its class is a guarantee
            (insert-checkpoints); always if a pass wrote to the caller's weights.
        ParityError: a copy of the model computes something different, even without any pass.
    """
    notes: list[str] = []
    if choices is not None:
        if mode != "training":
            raise UsageError('choices are those of a training loop: pass mode="training".')
        if passes is not None:
            raise UsageError("passes and choices contradict each other: the choices have the passes.")
        if isinstance(choices, TrainingTuning):
            setup, source = choices.recommended, "tune_training"
        else:
            setup, source = read_setup(choices), Path(choices).name
        passes, notes = setup.passes, left_to_the_loop(setup, source)
    made = optimize_model(
        model,
        passes,
        example_inputs=example_inputs,
        example_kwargs=example_kwargs,
        further_inputs=further_inputs,
        mode=mode,
        device=device,
        strict=strict,
        explain=explain,
        batch_sizes=batch_sizes,
        seed=seed,
        progress=progress or no_progress,
    )
    report_of(made).notes += notes
    return made


@in_turn
@one_child()
def export(
    model: nn.Module,
    example_inputs: ExampleInputs | None = None,
    *,
    example_kwargs: dict[str, Any] | None = None,
    further_inputs: FurtherInputs = (),
    output: str | Path,
    formats: Sequence[str] = ("torchscript", "onnx"),
    exporters: Sequence[Exporter] = (),
    batch_sizes: Sequence[int] | None = None,
    static_batch: bool = False,
    dynamic: Dynamic | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset: int | None = None,
    metadata: Mapping[str, str] | None = None,
    device: str = "auto",
    reference_device: str | None = None,
    require_gpu: bool = False,
    force: bool = False,
    strict: bool = False,
    atol: Tolerance = None,
    rtol: Tolerance = None,
    row_independence: bool = False,
    effort: Effort = "normal",
    bench: bool | None = None,
    tune: bool | None = None,
    tune_seconds: float = 120.0,
    accuracy: str | float = "exact",
    confidence: str | float = "95%",
    finite_inputs: bool = False,
    calibration: CalibrationCalls | None = None,
    evaluate: Evaluate | None = None,
    aggregate: Aggregate | None = None,
    choices: str | Path | None = None,
    seed: int = 0,
    source: str | None = None,
    build: Mapping[str, Any] | None = None,
    debug_dir: str | Path | None = None,
    profile_dir: str | Path | None = None,
    progress: ProgressFunction | None = None,
) -> Bundle:
    """Write the model into a bundle of artifacts, each proven to compute the same as the original.

    Passes that leave no graph (torch-compile) aren't exported. A file contains the changes of graph passes (simplify)
    if torch.compile's front end captures the forward as one graph, and the file made from it is proven. Otherwise it
    contains the forward without them, and a note says why. In the manifest, `without_passes` of each artifact lists the
    passes that it doesn't contain. The original is the module that was given to `optimize`. A module that isn't a
    result of `optimize` is itself the original.

    A format is missing from the bundle if its export fails or its file isn't proven. `bundle.missing` has the reason
    for each, and a warning is logged.

    Args:
        model: a result of `optimize`, or any module; it is exported in eval mode.
        example_inputs, example_kwargs, further_inputs: as for `optimize`; the further calls become golden data of the
            bundle.
        output: the folder of the bundle, which is written as a whole or not at all.
        formats: names from `exporters.registry.exporter_names()`.
        exporters: exporters of your own for further formats, such as [Mine()], where no package with an entry point
            brings them. Their formats stay known in this process; another one can't load or verify their files.
        batch_sizes: the batch sizes at which every artifact is compared with the original, in addition to that of the
            example inputs. None for 1, 2, 3, 5 and 8, or 1, 2 and 3 where a row of an input has more than 100,000
            elements, as an image of 224 x 224 has; with effort "thorough" always the former.
        static_batch: fix the batch size in the files to that of the example inputs.
        dynamic: the open dims of each input, by its name in the files: {"x": (0, 2)}, or with names,
            {"x": {0: "batch", 2: "time"}}. Dims with the same name have the same size. For the inputs that it names, it
            replaces the default, dim 0. Sizes vary independently: the original and the artifacts are compared at
            several sizes of each, and at sizes that all grow together.
        input_names, output_names: one name per tensor, instead of those from forward's signature and from the output's
            keys.
        opset: version of the operator set of the ONNX file; None means the exporter's default.
        metadata: texts by key to write into every file, in addition to this program's own (its version, torch's, the
            model's class, the names of inputs and outputs).
        device: "auto", "cpu" or "cuda": where the artifacts run and are compared.
        reference_device: where the original runs, with its float64 truth and its noise: "cpu" or "cuda"; by default the
            device of the artifacts. On different devices, the allowed error is larger, by the factor that
            `verify_bundle` uses.
        require_gpu: raise if there is no GPU.
        force: replace an existing bundle at `output`.
        strict: raise if a format would be missing; nothing is written then.
        atol, rtol: tolerances instead of the measured noise: a number, or a dict by the names of the outputs in the
            files (or in the model, if those differ).
        row_independence: also check, in the original and in every artifact, that each row of the outputs is the same
            whatever the other rows of its batch are.
        effort: "normal"; "quick" compares files at two batch sizes and measures rounding noise at one; "thorough"
            compares them with three samples of the inputs at each batch size and measures noise at all of them. The
            manifest records it.
        bench: whether to time the files next to the original, and to recommend one. None means yes, unless the
            environment variable OPTIMIZE_EXPORT_NO_BENCH is set.
        tune: try every installed runtime, settings, and lossy precisions within `accuracy`, and recommend the best.
            None means yes if `accuracy` allows a loss and there are no `choices`.
        tune_seconds: about how long tuning may take, in seconds.
        accuracy: "exact" allows only rounding. A number such as 0.999 is the least cosine of any output at any call;
            "top1=0.99" is the least share of rows with the same largest score. "drop<=0.5%" is the largest drop of the
            metric that `evaluate` computes, in points of its mean score (0.5% is 0.005). "0.99,drop<=0.5%" combines parts.
            Nothing lossy is made without it.
        confidence: how sure the bound of the drop must be, such as "95%" or 0.95: the chance that a file which drops more
            is shipped is at most the rest.
        finite_inputs: inputs never have NaN or infinity, so a route that turns them into finite numbers, or finite numbers
            into them, may be recommended; a note says which. Without it, none is, except of files in integers.
        calibration: calls for static quantization, in a list, a data loader, a data set, an iterable or a function that
            returns one of these. A call is a tensor, a tuple or a dict of keyword arguments, as the example inputs; labels
            may follow. A list is used as a whole; of other data about 256 rows are read. Every fourth call is kept apart to
            judge the result. None takes inputs of `evaluate`, or draws random ones, and a note says so.
        evaluate: a function of `run`, which it calls as the model. It yields a score for each example, the higher the
            better: a number, a bool or a tensor without dims; a tensor, array or list of one dim has the scores of several
            examples; a pair is (score, weight). Each time it is called, it must give the same inputs in the same order.
            If that is random, set `evaluate.shuffled = True`: then the final test ends as soon as it is sure.
        aggregate: a function that makes the metric of a list of what `evaluate` yields, such as an F1 score: one
            statistic of any type for each example. None for the mean of scores.
        choices: a bundle that was tuned, or its manifest: its recommended route is proven again, and nothing is timed.
        seed: the seed of the drawn example inputs.
        source: the origin of the model, for the manifest.
        build: what the bundle is built from, for the manifest; the command compares it under `--if-changed`.
        debug_dir: a folder that doesn't exist yet. For each artifact that computes something different, a folder in it
            gets a self-contained reproduction: the file, inputs, expected outputs and a program that compares them.
        profile_dir: a folder that doesn't exist yet, for the profiles of the original, the model and the ONNX file; the
            report shows them too.
        progress: a function `f(step) -> None`, which is called at each step of the work. `step` has the texts `stage`,
            `text` and `name` (of the pass or format; may be ""), and the numbers `done` and `total` of the stage's steps.

    Raises:
        UsageError, LoadError: as for `optimize`; LoadError also for what is wrong with `evaluate`.
        ExporterError: a format or opset is unknown, no file can hold the metadata, or no format could be exported (with
            `strict`: one couldn't). The message has the reasons.
        ExportFailed: the original was changed after `optimize`, its answer to a call depends on earlier calls, or it
            accepts only one size of a dim that should be open.
        DeviceError: a GPU is required, and there is none.
        VacuousError: no output of the original carries a signal, so no file could be proven.
        ParityError: no file is proven (with `strict`: one isn't), and one of them computes something different; or,
            with `row_independence`, rows of the original depend on each other. Nothing is written.
        BundleError: the folder can't be written.
    """
    given = locals()
    settings = ExportSettings(**{each.name: given[each.name] for each in fields(ExportSettings)})
    check_model(model, runs=True)
    check_numbers(seed, batch_sizes)
    settings.check(calibration)
    if (evaluate, aggregate, settings.budget.drop) != (None, None, None):
        check_evaluate(evaluate, aggregate, settings.budget)
    # Before any of the user's code runs, because it may change the current folder.
    settings = with_checked_folders(settings)
    used = exporters_of(formats, exporters, opset, {} if metadata is None else metadata)
    names = [exporter.name for exporter in used]
    chosen = None if choices is None else read_choices(choices, names, settings.budget)
    target = resolved_device(device, require_gpu=require_gpu)
    home = target if reference_device is None else resolved_device(reference_device, require_gpu=False)
    provenance = provenance_of(model)
    if provenance is not None:
        provenance.check_sources()
    samples = samples_of(example_inputs, example_kwargs, further_inputs, seed, target)
    if samples is None:
        raise UsageError("export() needs example_inputs (or example_kwargs): the tensors of one call of the model.")
    samples, dims = opened(model, samples, settings)
    decided: dict[str, Any] = {"bench": is_to_be_timed(bench), "tune": settings.tunes}
    job = ExportJob(
        **{**vars(settings), **decided},
        model=model,
        provenance=provenance,
        inputs={"example_inputs": example_inputs, "example_kwargs": example_kwargs, "further_inputs": further_inputs},
        samples=samples,
        dims=dims,
        exporters=used,
        target=target,
        home=home,
        source=source,
        tell=progress or no_progress,
    )
    measured = measure(job)
    evaluation = None if evaluate is None else evaluation_of(job, measured, evaluate, aggregate)
    calls = None
    written: list[WrittenFiles] = []
    benchmarks: list[Benchmark | None] = []
    profiles: dict[str, Any] = {}

    def fill(folder: Path) -> Mapping[str, Any]:
        written.append(write_files(job, measured, folder))
        benchmark = choose(job, measured, calls, written[0], folder, chosen, evaluation)
        benchmarks.append(benchmark)
        lossy = {} if benchmark is None else benchmark.lossy_choice()
        body = write_data(job, measured, written[0], folder, lossy)
        body |= {} if benchmark is None else benchmark.in_manifest()
        if job.profile_dir is not None:
            profiles.update(profiled(job, measured, written[0], folder, job.profile_dir))
        return {**body, "build": build} if build else body

    def report(folder: Path, manifest: Mapping[str, Any]) -> None:
        add_report(job, measured, written[0], profiles, folder, manifest)

    with nullcontext() if evaluation is None else closing(evaluation):
        if evaluation is not None:
            evaluation.start()
        if not job.budget.is_exact:
            calls = calibration_of(calibration, samples, measured.adapter, measured.request, evaluation)
        bundle = write_bundle(job.output, fill, report=report, force=force)
    missing = {name: str(error) for name, error in written[0].missing.items()}
    # The messages of this run, because those in the manifest name no folder of this machine.
    timed = None if benchmarks[0] is None else benchmarks[0].to_json()
    bundle = replace(bundle, missing=missing, unproven=tuple(written[0].unproven), benchmark=timed, profile=profiles)
    job.progress("bundle", 1, 1, str(job.output))
    if bundle.missing:
        logger.warning("%s", bundle.missing_text(job.output))
    return bundle


def optimize_to_export(
    model: nn.Module,
    passes: Sequence[Pass | str] | None,
    settings: ExportSettings,
    *,
    example_inputs: ExampleInputs | None,
    example_kwargs: dict[str, Any] | None,
    further_inputs: FurtherInputs,
    progress: ProgressFunction,
) -> nn.Module:
    """Run `optimize` with the settings of an export; the result isn't called."""

    def with_open_batch(samples: Samples) -> Samples:
        declared, dims = opened(model, samples, settings)
        return declared.with_open_batch_only() if dims.places(dims.batch) else samples

    return optimize_model(
        model,
        passes,
        example_inputs=example_inputs,
        example_kwargs=example_kwargs,
        further_inputs=further_inputs,
        mode="inference",
        device=settings.device,
        strict=settings.strict,
        batch_sizes=None if settings.static_batch else settings.batch_sizes,
        seed=settings.seed,
        progress=progress,
        with_open_batch=with_open_batch,
        is_called=False,
    )
