"""`optimize` and `export`: what the user calls."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exporters.base import Adapter, Artifact, Exporter, ExportRequest, named_inputs
from exporters.errors import ExporterError, ExportError, MetadataError, StructureError
from exporters.metadata import refuse_metadata
from exporters.opset import refuse_opset
from exporters.registry import exporter_named
from optimizer.artifact_parity import ArtifactParity, Failures, FileProof
from optimizer.bundle import (
    Bundle,
    artifact_entry,
    check_target,
    describe_device,
    weights_hash,
    write_bundle,
    write_golden,
)
from optimizer.carried_state import refuse_carried_state
from optimizer.collection import rare_collection
from optimizer.dynamic import Dynamic, OpenDims, open_dims
from optimizer.early_checks import check_debug_folder
from optimizer.errors import DeviceError, ExportFailed, ParityError, UsageError
from optimizer.fixed_dims import note_on_fixed_dims
from optimizer.graph_files import GraphFiles, remove
from optimizer.inputs import ExampleInputs, FurtherInputs, Samples
from optimizer.locating import place_in_refused
from optimizer.manifest import is_to_be_repeated, plain, to_json_text
from optimizer.module_tree import unregistered_modules
from optimizer.options import check_numbers
from optimizer.parity import (
    BATCH_SIZES,
    FACTOR,
    OriginalOutputs,
    ParityReport,
    Reference,
    Tolerance,
    by_output,
    golden_entries,
    independent_rows,
    measure_reference,
)
from optimizer.pipeline import Pipeline, check_requirements, coverage_record, size_of
from optimizer.preserve import in_turn, one_at_a_time, outside_inference_mode
from optimizer.provenance import Provenance, attach, detach, provenance_of, report_of
from optimizer.report import Progress, ProgressFunction, Report, no_progress
from optimizer.sentences import listed
from optimizer.vacuous import is_vacuous, refuse_vacuous
from optimizer.verify import factor_between
from optimizer.weights import refuse_circular_modules, refuse_lazy_modules, refuse_unmade_module, refuse_unrunnable
from optimizer.working_copy import Mode, WorkingCopy, working_copy
from optimizer.written_parameters import Source
from optimizer.wrong_pass import pass_to_blame
from passes.base import Context, Pass, device_of
from passes.program.forwards import dtype_inside
from passes.program.interception import is_compiled
from passes.program.moved_bias import moved_biases
from passes.program.weights import ComparedExports
from passes.registry import make_passes

__all__ = ["export", "optimize", "report_of"]

logger = logging.getLogger(__name__)

FORMATS = ("torchscript", "onnx")
# Bytes of outputs of the original that a result keeps for its export.
_LARGEST_KEPT = 64 * 2**20
REPORT = "report.json"

# At most so many numbers that are fixed in the files, or modules, are named in a note.
_NUMBERS_TOLD = 4
_NAMES_TOLD = 4


def optimize(
    model: nn.Module,
    passes: Sequence[Pass | str] | None = None,
    *,
    example_inputs: ExampleInputs | None = None,
    example_kwargs: dict[str, Any] | None = None,
    further_inputs: FurtherInputs = (),
    mode: Mode = "inference",
    device: torch.device | str | None = None,
    strict: bool = False,
    batch_sizes: Sequence[int] | None = None,
    seed: int = 0,
    progress: ProgressFunction | None = None,
) -> nn.Module:
    """The same function, faster.

    The result is an instance of the model's class with its attributes, methods and tree. The caller's module isn't
    changed, and its weights aren't copied: what no pass changed is shared. In inference the result is in eval, whatever
    mode the caller's module is in.

    With example inputs every pass is checked: each change where it was made, and the whole against the original at two
    batch sizes. A pass that makes a difference beyond the rounding of the original is rolled back, one that raises is
    left out; `result.report` (or `report_of(result)`) tells. Without example inputs nothing is run and nothing verified.

    Args:
        model: any module.
        passes: names, instances or both, run in this order; None is the preset of the mode: all that is exact,
            exportable and free of compile time.
        example_inputs: the positional arguments of one call, a tuple; a single tensor; or a function
            `f(batch_size, generator) -> tuple`.
        example_kwargs: the keyword arguments of that call.
        further_inputs: more calls of your own, each a pair (args, kwargs) that nothing but its rows tells apart from the
            first: they are compared as they are, beside the calls that are drawn.
        mode: "inference" or "training".
        device: where the result is to run; by default where the model is. Another device takes a copy of the weights.
        strict: raise where a pass fails or is rolled back.
        batch_sizes: of these, the first other than 1 and that of the example inputs is the second one that everything is
            compared at. In inference the result is run at the others, and at 1, to see that what was folded together
            stays together there.
        seed: of the further example inputs that are drawn.
        progress: is told what is being done.

    Raises:
        UsageError: an argument that makes no sense.
        PassesError: a pass that isn't known, can't stand where it stands, or can't be had here.
        LoadError: the model can't be copied, raises on the example inputs, has a lazy module that was never run, or is to
            be run and has tensors without values (device meta); or the function that makes the example inputs raises.
        OptimizeFailed: a pass failed or was rolled back, with `strict` or where its class is a guarantee (insert-checkpoints);
            always where a pass wrote to the caller's weights.
        ParityError: a copy of the model doesn't compute what the model does, whatever the passes.
    """
    with one_at_a_time, rare_collection(), outside_inference_mode():
        return _optimized(
            model,
            passes,
            example_inputs=example_inputs,
            example_kwargs=example_kwargs,
            further_inputs=further_inputs,
            mode=mode,
            device=device,
            strict=strict,
            batch_sizes=batch_sizes,
            seed=seed,
            progress=progress or no_progress,
        )


def optimize_to_export(
    model: nn.Module,
    passes: Sequence[Pass | str] | None = None,
    *,
    example_inputs: ExampleInputs | None,
    example_kwargs: dict[str, Any] | None,
    further_inputs: FurtherInputs,
    device: str,
    reference_device: str | None,
    strict: bool,
    batch_sizes: Sequence[int],
    static_batch: bool,
    dynamic: Dynamic | None,
    input_names: Sequence[str] | None,
    seed: int,
    progress: ProgressFunction,
) -> nn.Module:
    """As `optimize`; but a model that `export` would refuse, as its outputs carry no signal, is refused before any pass runs.

    Raises:
        VacuousError: as `export`.
    """

    def refuse(reference: Reference) -> None:
        if not is_vacuous(reference):
            return
        # Other batch sizes may show what two don't: export decides.
        home = _resolved(reference_device or device, require_gpu=False)
        samples = _samples(example_inputs, example_kwargs, further_inputs, seed, home)
        assert samples is not None
        samples, _ = _opened(model, samples, dynamic, input_names, static_batch)
        _measured(_on_device(model, home), samples, _sizes(samples, batch_sizes, static=static_batch))

    with one_at_a_time, rare_collection(), outside_inference_mode():
        return _optimized(
            model,
            passes,
            example_inputs=example_inputs,
            example_kwargs=example_kwargs,
            further_inputs=further_inputs,
            mode="inference",
            device=device,
            strict=strict,
            batch_sizes=None if static_batch else batch_sizes,
            seed=seed,
            progress=progress,
            measured=refuse,
        )


def _optimized(
    model: nn.Module,
    passes: Sequence[Pass | str] | None,
    *,
    example_inputs: ExampleInputs | None,
    example_kwargs: dict[str, Any] | None,
    further_inputs: FurtherInputs,
    mode: Mode,
    device: torch.device | str | None,
    strict: bool,
    batch_sizes: Sequence[int] | None,
    seed: int,
    progress: ProgressFunction,
    measured: Callable[[Reference], None] | None = None,
) -> nn.Module:
    started = time.perf_counter()
    _check_model(model, runs=example_inputs is not None or bool(example_kwargs))
    check_numbers(seed, batch_sizes)
    if mode not in ("inference", "training"):
        raise UsageError(f"mode is 'inference' or 'training', not {mode!r}.")
    chosen = make_passes(passes, mode)
    target = device_of(model) if device is None else _resolved(str(device), require_gpu=False)
    samples = _samples(example_inputs, example_kwargs, further_inputs, seed, target)
    calls = () if samples is None else ((samples.given.args, samples.given.kwargs),)
    check_requirements(chosen, Context(mode, target, calls))
    original = _on_device(model, target)
    copy = _copy_of(original, mode)
    pipeline = Pipeline(copy, original, samples, target, strict, batch_sizes, progress)
    stages: dict[str, float] = {}
    with _timed(stages, "original"):
        ran = pipeline.run_original()
    if measured is not None and ran is not None:
        with _timed(stages, "comparison"):
            measured(ran.reference())
    with _timed(stages, "original"):
        tree = pipeline.record()
    context = pipeline.context()
    before, coverage = size_of(tree, context), coverage_record(tree, context)
    with _timed(stages, "passes"):
        pipeline.run(tree, chosen)
        # Before the result is verified: the passes are tried on it, and taken back.
        could_apply = pipeline.could_apply(tree)
    with _timed(stages, "comparison"):
        parity = pipeline.verify(tree)
    report = Report(
        model=type(model).__name__,
        mode=mode,
        device=str(target),
        torch=torch.__version__,
        coverage=coverage,
        passes=pipeline.records,
        parity=parity,
        before=before,
        after=size_of(tree, context),
        notes=[*copy.notes, *pipeline.notes],
        could_apply=could_apply,
        stages=stages,
    )
    _note_what_was_seen(report, model, copy.root, mode, parity)
    sources = _sources(copy, pipeline)
    report.seconds = time.perf_counter() - started
    sizes = None if batch_sizes is None else tuple(batch_sizes)
    if ran is not None and (mode == "training" or ran.kept_bytes > _LARGEST_KEPT):
        # Exports are of inference.
        ran = None
    attach(copy.root, Provenance(original, report, sources, pipeline.precisions, tuple(chosen), sizes, ran))
    if mode == "inference":
        copy.root.__dict__["train"] = StaysInEval(copy.root)
    return copy.root


@contextmanager
def _timed(stages: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds that the block takes to those of a stage."""
    started = time.perf_counter()
    yield
    stages[name] = stages.get(name, 0.0) + time.perf_counter() - started


class StaysInEval:
    """Stands in the `__dict__` of an inference result as its `train`: the result stays in eval, and says so once."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner
        self.warned = False

    def __call__(self, mode: bool = True) -> nn.Module:
        if mode and not self.warned:
            self.warned = True
            warnings.warn(
                f"this {type(self.owner).__name__} was optimized for inference and stays in eval: train the original, or"
                " use optimize(model, mode='training')",
                UserWarning,
                stacklevel=2,
            )
        return self.owner


@in_turn
def export(
    model: nn.Module,
    *,
    example_inputs: ExampleInputs | None = None,
    example_kwargs: dict[str, Any] | None = None,
    further_inputs: FurtherInputs = (),
    output: str | Path,
    formats: Sequence[str] = FORMATS,
    batch_sizes: Sequence[int] = BATCH_SIZES,
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
    seed: int = 0,
    source: str | None = None,
    debug_dir: str | Path | None = None,
    progress: ProgressFunction | None = None,
) -> Bundle:
    """Write the model into a bundle of artifacts, each of them proven to compute what the original computes.

    What is exported is the model as it stood before any pass that leaves no graph (torch-compile). A file holds what graph
    passes did (simplify) where the forward is one graph of torch.compile's front end, and the file made of that is proven;
    else it holds the forward without them, and a note says why. `without_passes` of the manifest's artifacts has, for each,
    the passes that it doesn't hold. The original is the module that was given to `optimize`; for a module that doesn't come from there it is the module itself.

    A format that can't be exported, or whose file isn't proven, is missing from the bundle: `bundle.missing` has the reason
    of each, and a warning is logged.

    Args:
        model: a result of `optimize`, or any module; it is exported in eval.
        example_inputs, example_kwargs, further_inputs: as for `optimize`; the further ones are golden data of the bundle.
        output: the folder of the bundle; written as a whole or not at all.
        formats: of `exporters.registry.exporter_names()`.
        batch_sizes: at which every artifact is compared with the original, beside that of the example inputs.
        static_batch: fix the batch size of the example inputs in the files.
        dynamic: by the name of an input in the files, its open dims, {"x": (0, 2)}, or their names too, {"x": {0: "batch",
            2: "time"}}: dims of one name have one size. It holds in the place of dim 0 for the inputs that it names. Each size
            is one of its own: original and artifacts are compared at several of each, and where all grow together.
        input_names, output_names: one per tensor, in place of those of the forward's signature and of the output's keys.
        opset: version of the operator set of the ONNX file; None is the exporter's default.
        metadata: texts by key that are put into every file, beside what this program writes (its version, torch's, the
            model's class, the names of inputs and outputs).
        device: "auto", "cpu" or "cuda": where the artifacts are run and compared.
        reference_device: where the original is run, with its float64 truth and its noise: "cpu" or "cuda", by default where
            the artifacts are. On another device these may be off by more, by the factor that `verify_bundle` goes by.
        require_gpu: raise where there is none.
        force: replace a bundle that stands at `output`.
        strict: raise if a format would be missing; nothing is written then.
        atol, rtol: tolerances in place of the measured noise; a number, or a dict by the names of the outputs in the files
            (or in the model, where those differ).
        row_independence: see, too, that each row of the outputs is the same whatever the other rows of its batch are, in the
            original and in every artifact.
        seed: of the further example inputs that are drawn.
        source: where the model comes from, for the manifest.
        debug_dir: a folder that isn't there yet. For each artifact that computes something else, a folder with all that it
            takes to see that is written into it: the file, inputs, expected outputs and a program that compares.
        progress: is told what is being done.

    Raises:
        UsageError, LoadError: as for `optimize`.
        ExporterError: an unknown format or opset, metadata that no file can hold, or no format could be exported (with
            `strict`: one couldn't); the message names the reasons.
        ExportFailed: the original was changed after `optimize`, or answers a call otherwise after others.
        DeviceError: there is no GPU where one is required.
        VacuousError: no output of the original carries a signal, so nothing could be proven of any file.
        ParityError: no file is proven (with `strict`: one isn't), and one of them computes something else; or rows of the
            original depend on each other where they mustn't. Nothing is written.
        BundleError: the folder can't be written.
    """
    _check_model(model, runs=True)
    check_numbers(seed, batch_sizes)
    # Before any of the user's code runs, which may change the current folder.
    output, debug_dir = _check_folders(output, debug_dir, force=force)
    own = {} if metadata is None else metadata
    exporters = _exporters(formats, opset, own)
    target = _resolved(device, require_gpu=require_gpu)
    home = target if reference_device is None else _resolved(reference_device, require_gpu=False)
    provenance = provenance_of(model)
    if provenance is not None:
        provenance.check_sources()
    tell = progress or no_progress
    samples = _samples(example_inputs, example_kwargs, further_inputs, seed, target)
    if samples is None:
        raise UsageError("export() needs example_inputs (or example_kwargs): the tensors of one call of the model.")
    samples, dims = _opened(model, samples, dynamic, input_names, static_batch)
    exported = _exportable(model, target)
    original = exported if provenance is None or provenance.original is None else provenance.original
    notes = [] if original is not exported else ["the artifacts are compared with the exported module itself"]
    original = _on_device(_in_step(original, exported), home)
    tell(Progress("parity", 0, len(exporters) + 1, "running the original"))
    sizes = _sizes(samples, batch_sizes, static=static_batch)
    there = samples if home.type == target.type else samples.to(home)
    known = None if provenance is None else provenance.ran
    reference = rounding = _measured(original, there, sizes, known)
    refuse_carried_state(original, reference)
    for precision in () if provenance is None or provenance.original is None else provenance.precisions:
        reference = reference.less_precise(precision)
        refuse_vacuous(reference)
    _refuse_sizes_not_taken(dims, samples, reference)
    notes += _note_on_fixed_batch(samples, reference, static=static_batch)
    request = replace(
        _request(exported, samples, reference, static_batch, dims, input_names, output_names), opset=opset, metadata=own
    )
    if reference is not rounding or home.type != target.type:
        # A result that is less precise, or on another device, gives other outputs than the original.
        request = replace(request, outputs=None)
    fresh = partial(_exportable, model, target, reference.written)
    adapter = Adapter(fresh(), *request.calls[0], input_names=input_names, output_names=output_names)
    notes += _note_on_numbers(adapter)
    if dynamic is None:
        call = there.given
        given = named_inputs(original, call.args, call.kwargs, input_names=input_names)
        notes += note_on_fixed_dims(given, there, reference, open_batch=request.dynamic_batch)
    flatten = adapter.flatten_inputs
    place_of = partial(place_in_refused, reference=reference, exported=exported, flatten=flatten, device=target.type)
    request = replace(request, place_of=place_of, output_structure=adapter.outputs)
    names = _names_in_files(reference, adapter)
    absolute, relative = by_output("atol", atol, names), by_output("rtol", rtol, names)
    factor, apart = _factor(reference, home, target)
    notes += apart
    rows = independent_rows(rounding, atol=absolute, rtol=relative) if row_independence else None
    by = ArtifactParity(
        reference=reference, flatten=flatten, device=target, atol=atol, rtol=rtol, factor=factor, names=names
    )
    inputs = {"example_inputs": example_inputs, "example_kwargs": example_kwargs, "further_inputs": further_inputs}
    failures = Failures(
        parity=by,
        exported=exported,
        pass_to_blame=cache(partial(_blamed, provenance, exported, home, by.is_wrong, seed, inputs)),
        debug_dir=debug_dir,
    )

    # What keeps a format out of the bundle, and the figures of the files that were written and aren't proven.
    missing: dict[str, Exception] = {}
    unproven: list[dict[str, Any]] = []

    graph = GraphFiles.of(model, fresh, adapter, request)
    # What allows for more than rounding would allow an exporter's faults too.
    is_exact = request.outputs is not None and atol is None and rtol is None

    @ComparedExports()
    def fill(folder: Path) -> Mapping[str, Any]:
        entries = []
        reports: dict[str, ParityReport] = {}
        for number, exporter in enumerate(exporters):
            tell(Progress("export", number, len(exporters), exporter.name, exporter.name))
            before = set(folder.iterdir())
            proof = FileProof(by, rows)
            asked = replace(request, proof=proof if is_exact else None)
            rewritten = graph.measured(exporter, asked, folder, proof)
            try:
                # An exporter runs the model.
                artifact = rewritten[0] if rewritten else exporter.export(replace(asked, model=fresh()), folder)
            except (StructureError, MetadataError):
                # Nothing that another format could mend.
                raise
            except ExporterError as error:
                missing[exporter.name] = error
                # An exporter of another package may leave half of a file behind.
                remove(set(folder.iterdir()) - before)
                continue
            artifact = replace(artifact, metadata=exporter.read_metadata(artifact.path))
            tell(Progress("parity", number + 1, len(exporters) + 1, exporter.name))
            try:
                measurement, placement = rewritten[1:] if rewritten else proof.measured(artifact, exporter)
            except ExporterError as error:
                missing[exporter.name] = error
                remove(artifact.files)
                continue
            parity = by.judged(measurement)
            entry = artifact_entry(artifact, folder, parity.to_json(), measurement.to_json(), placement)
            entry["without_passes"] = graph.without(exporter.name, provenance)
            if not parity.ok:
                remark = ""
                if parity.verdict == "failed":
                    found, remark = failures.explained(artifact, measurement, parity)
                    entry |= found.to_json()
                missing[exporter.name] = _not_proven(parity, exporter.name, remark)
                unproven.append(plain({**entry, "measurement": None}))
                remove(artifact.files)
                continue
            notes.extend(_without_metadata(artifact, own))
            reports[exporter.name] = parity
            entries.append(entry)
        tell(Progress("export", len(exporters), len(exporters), ""))
        notes.extend(graph.notes(missing))
        if missing and (strict or not entries):
            _raise_missing(missing, [*(plain({**entry, "measurement": None}) for entry in entries), *unproven])
        tell(Progress("bundle", 0, 1, str(output)))
        golden = write_golden(
            folder,
            golden_entries(reference),
            reference.noises,
            flatten=flatten,
            input_names=adapter.input_names,
            output_names=adapter.output_names,
            device=home,
            atol=absolute,
            rtol=relative,
            precision=reference.precision,
        )
        report = None if provenance is None else provenance.report
        told = None if report is None else _told(report)
        if told is not None:
            (folder / REPORT).write_text(to_json_text(plain(told)), encoding="utf-8")
        return {
            "device": describe_device(target),
            "mode": "inference",
            "seed": seed,
            "model": _describe(original, source),
            "input_structure": adapter.input_structure,
            "output_structure": adapter.output_structure,
            **({"example_sizes": dict(dims.given)} if dims.given else {}),
            "artifacts": entries,
            "missing": {name: str(error) for name, error in missing.items()},
            "parity": {**_overall(reports, reference), "reference_device": describe_device(home)},
            "golden": golden,
            "coverage": None if report is None else report.coverage.to_json(),
            "passes": [] if told is None else told["passes"],
            "notes": _all_notes(notes, reports),
        }

    bundle = write_bundle(output, fill, force=force)
    # As they are said here: the manifest names no folder of this machine.
    bundle = replace(bundle, missing={name: str(error) for name, error in missing.items()}, unproven=tuple(unproven))
    tell(Progress("bundle", 1, 1, str(output)))
    if bundle.missing:
        logger.warning("%s", bundle.what_is_missing(output))
    return bundle


def _measured(
    original: nn.Module, samples: Samples, batch_sizes: Sequence[int] | None, known: OriginalOutputs | None = None
) -> Reference:
    """The original as all files are compared with it; VacuousError where that would prove nothing."""
    reference = measure_reference(original, samples, batch_sizes=batch_sizes, known=known)
    refuse_vacuous(reference)
    return reference


def _check_model(model: object, *, runs: bool) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"The model must be an nn.Module, not {type(model).__name__}.")
    if is_compiled(model):
        raise UsageError(
            "The model is a wrapper that torch.compile(module) made: give the module itself, and torch-compile as the last"
            " pass."
        )
    if runs:
        refuse_unrunnable(model)
    else:
        refuse_unmade_module(model)
        refuse_circular_modules(model)
        refuse_lazy_modules(model)
    _refuse_distributed(model)


def _refuse_distributed(model: nn.Module) -> None:
    """A step of these waits for other processes, which may not run one, and what shards can't be copied."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UsageError(
            "The model is wrapped in DistributedDataParallel: give its .module, and wrap the result of optimize()."
        )
    # Who shards nothing hasn't loaded what does it.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    for path, module in model.named_modules():
        if isinstance(module, kinds):
            where = f"{path} of the model" if path else "The model"
            raise UsageError(f"{where} is sharded by FSDP: call optimize() first, and shard its result.")


def _samples(
    example_inputs: ExampleInputs | None,
    example_kwargs: dict[str, Any] | None,
    further_inputs: FurtherInputs,
    seed: int,
    device: torch.device,
) -> Samples | None:
    if example_inputs is None and not example_kwargs:
        if further_inputs:
            raise UsageError("further_inputs are calls beside that of example_inputs: give the first one there.")
        return None
    first = () if example_inputs is None else example_inputs
    return Samples(first, example_kwargs, further_inputs=further_inputs, seed=seed, device=device)


def _resolved(device: str, *, require_gpu: bool) -> torch.device:
    available = torch.cuda.is_available()
    if device == "auto":
        device = "cuda" if available else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError:
        resolved = None
    if resolved is None or resolved.type not in ("cpu", "cuda"):
        raise UsageError(f"There is no device {device!r}: it is auto, cpu or cuda.")
    if (require_gpu or resolved.type == "cuda") and not available:
        raise DeviceError("A GPU is required, and torch finds none here: use device='cpu', or a machine that has one.")
    if require_gpu and resolved.type != "cuda":
        raise DeviceError(f"A GPU is required, and the device asked for is {resolved}: use device='cuda'.")
    return resolved


def _on_device(model: nn.Module, device: torch.device) -> nn.Module:
    if device_of(model).type == device.type:
        return model
    return working_copy(model, "inference").root.to(device)


def _copy_of(model: nn.Module, mode: Mode) -> WorkingCopy:
    copy = working_copy(model, mode)
    _strip(copy.root)
    if mode == "inference":
        copy.root.eval()
    return copy


def _exportable(model: nn.Module, device: torch.device, written: Collection[str] = ()) -> nn.Module:
    """The module before any compiled call, without what `optimize` attached, in eval, on the device.

    Args:
        written: names of parameters that forward writes to, those of them that the module has.
    """
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    copy = working_copy(model, "inference", private=own.intersection(written)).root
    _strip(copy)
    return copy.eval().to(device)


def _in_step(original: nn.Module, result: nn.Module) -> nn.Module:
    """The original as it would be had it been trained in the place of the result.

    Both have the same weights. But a running mean that a bias was moved into is the result's own: the original's stays
    behind when the result is trained.
    """
    moved = list(moved_biases(result))
    if original is result or not moved:
        return original
    twin = working_copy(original, "inference").root
    trained = dict(result.named_buffers())
    for bias_path, mean_path in moved:
        owner, name = _owner_of(twin, bias_path)
        # An original that is a result itself has no bias there either.
        if (bias := owner._parameters.get(name)) is not None:
            owner._parameters[name] = nn.Parameter(torch.zeros_like(bias), requires_grad=False)
        if mean_path is not None:
            owner, name = _owner_of(twin, mean_path)
            owner._buffers[name] = trained[mean_path]
    return twin


def _owner_of(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    owner, _, name = path.rpartition(".")
    return root.get_submodule(owner), name


def _strip(root: nn.Module) -> None:
    detach(root)
    if isinstance(root.__dict__.get("train"), StaysInEval):
        del root.__dict__["train"]


def _note_what_was_seen(
    report: Report, model: nn.Module, result: nn.Module, mode: Mode, parity: ParityReport | None
) -> None:
    now = {path: module.training for path, module in result.named_modules()}
    left = [path for path, module in model.named_modules() if module.training and not now.get(path, True)]
    if mode == "inference" and not model.training:
        norms = [path for path in left if _takes_batch_statistics(model.get_submodule(path))]
        left = [path for path in left if path not in norms]
        report.warnings += _warning_on_norms(norms)
        report.notes += report.warnings
    if left and mode == "inference":
        more = f" and {len(left) - 1} more are" if left[1:] else " is"
        named = (
            "the model is in training mode" if left[0] == "" else f"{left[0]}{more} in training mode, the model in eval"
        )
        report.notes.append(f"{named}; the result, and what it was compared with, is in eval")
    means = [mean for _, mean in moved_biases(result) if mean is not None] if mode == "training" else []
    if means:
        more = f" ({len(means) - 1} more likewise)" if len(means) > 1 else ""
        report.notes.append(
            f"{means[0]} is the result's own{more}, and the model's stays behind when the result is trained: load the"
            " result's state_dict into the model afterwards"
        )
    if parity is not None and any(isinstance(m, nn.SyncBatchNorm) and m.training for m in result.modules()):
        report.notes.append(
            "what was compared is one process: there a SyncBatchNorm takes the statistics of its own batch, as a BatchNorm"
            " does, and among several those of all"
        )
    if parity is None:
        report.notes.append("nothing was verified: give optimize() example inputs")
    else:
        report.notes.extend(note for note in parity.notes if note not in report.notes)


def _takes_batch_statistics(module: nn.Module) -> bool:
    """Whether a normalization would compute something else in eval."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None


def _warning_on_norms(paths: Sequence[str]) -> list[str]:
    if not paths:
        return []
    one = len(paths) == 1
    return [
        f"{listed(paths, _NAMES_TOLD)} {'is' if one else 'are'} in training mode inside a model in eval mode: the model"
        " normalizes with the statistics of each batch, the result with the running statistics, so their outputs differ."
        " Call model.eval() first if that isn't intended"
    ]


def _sources(copy: WorkingCopy, pipeline: Pipeline) -> tuple[Source, ...]:
    places = (*unregistered_modules(pipeline.original), *pipeline.original.named_modules())
    paths = {id(module): path for path, module in places}
    found: dict[int, Source] = {}
    for result in pipeline.kept:
        for ref in (ref for change in result.changes for ref in change.sources):
            reference = copy.source_of(ref.owner, ref.name)
            tensor = None if reference is None else reference()
            if tensor is not None:
                path = paths.get(id(copy.originals[id(ref.owner)]), "")
                found[id(tensor)] = Source.of(f"{path}.{ref.name}".lstrip("."), tensor)
    return tuple(found.values())


def _exporters(formats: Sequence[str], opset: int | None, metadata: Mapping[str, str]) -> list[Exporter]:
    names = [formats] if isinstance(formats, str) else list(formats or ())
    if not names:
        raise UsageError("formats names no format: give one at least, such as 'onnx'.")
    exporters = [exporter_named(name) for name in dict.fromkeys(names)]
    refuse_opset(opset, [exporter.name for exporter in exporters])
    refuse_metadata(metadata)
    return exporters


def _check_folders(output: str | Path, debug_dir: str | Path | None, *, force: bool) -> tuple[Path, Path | None]:
    """The two folders as absolute paths, once it is seen that they can be written."""
    if not isinstance(output, str | os.PathLike) or not str(output).strip():
        raise UsageError(f"output names the folder of the bundle, such as 'dist/net'; it is {output!r}.")
    check_target(output, force=force)
    check_debug_folder(debug_dir)
    if debug_dir is not None and os.path.realpath(debug_dir) == os.path.realpath(output):
        raise UsageError(f"{debug_dir} is the folder of the bundle: name another one for debugging.")
    return Path(output).absolute(), None if debug_dir is None else Path(debug_dir).absolute()


def check_dynamic(
    model: nn.Module,
    samples: Samples,
    dynamic: Dynamic,
    *,
    input_names: Sequence[str] | None = None,
    static_batch: bool = False,
) -> None:
    """Raise UsageError where `export` would do so for `dynamic`; nothing is run."""
    _opened(model, samples, dynamic, input_names, static_batch)


def _opened(
    model: nn.Module,
    samples: Samples,
    dynamic: Dynamic | None,
    input_names: Sequence[str] | None,
    static_batch: bool,
) -> tuple[Samples, OpenDims]:
    """The samples with the open dims that are declared."""
    if dynamic is None:
        return samples, OpenDims()
    call = samples.given
    inputs = named_inputs(model, call.args, call.kwargs, input_names=input_names)
    dims = open_dims(dynamic, inputs, first=samples.first, static_batch=static_batch)
    return samples.opened(dims, inputs), dims


def _refuse_sizes_not_taken(dims: OpenDims, samples: Samples, reference: Reference) -> None:
    """Raise where the original itself takes one size alone of a dim that is to be open."""
    fixed = [name for name, sizes in reference.taken.alone.items() if not sizes]
    if samples.dynamic and dims.places(dims.batch) and len(reference.batch_sizes) < 2:
        fixed.append(dims.batch)
    for name in fixed:
        where = dims.places(name)
        why = reference.why_not(None if name == dims.batch else name)
        if why is None:
            raise UsageError(
                f"dynamic opens {where}, and batch_sizes names no size of it beside that of the example inputs."
            )
        raise ExportFailed(
            f"dynamic opens {where}, and the model raises at every other size of it that was tried ({why}): leave {where}"
            " out, or change that line."
        )


def _note_on_fixed_batch(samples: Samples, reference: Reference, *, static: bool) -> list[str]:
    """Why the files take one batch size alone where that wasn't asked for."""
    if static or not samples.dynamic or len(reference.batch_sizes) > 1:
        return []
    why = reference.why_not(None)
    raised = why and f"the model raises at the other sizes that were tried ({why})"
    alone = "batch_sizes names no size beside that of the example inputs"
    return [f"the batch is fixed, as by static_batch: {raised or alone}"]


def _note_on_numbers(adapter: Adapter) -> list[str]:
    """Which numbers of the example inputs no call of the files can change."""
    told = [f"{where} = {number}" for where, number in adapter.inputs.numbers()]
    return [f"fixed in the files, as the example inputs have them: {listed(told, _NUMBERS_TOLD)}"] if told else []


def _sizes(samples: Samples, batch_sizes: Sequence[int], *, static: bool) -> list[int] | None:
    if static and (others := [size for size, _ in samples.further if size != samples.batch_size]):
        raise UsageError(
            f"static_batch fixes the batch at {samples.batch_size} rows, and there are further inputs of {others[0]}."
        )
    if static or not samples.dynamic:
        return None if samples.batch_size is None else [samples.batch_size]
    own = [samples.batch_size] if samples.batch_size is not None else []
    return list(dict.fromkeys([*own, *batch_sizes]))


def _request(
    model: nn.Module,
    samples: Samples,
    reference: Reference,
    static: bool,
    dims: OpenDims,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
) -> ExportRequest:
    worked, taken = list(reference.batch_sizes), reference.taken
    own, bases = samples.batch_size, taken.bases()
    batches = [own]
    if not static and len(worked) > 1:
        # The first call is traced: not at one row, which is special to every tracer. Two further sizes show the rest.
        larger = sorted(size for size in worked if size > 1)
        own = samples.batch_size if samples.batch_size in larger else larger[0]
        others = [size for size in (*larger, *worked) if size != own]
        batches = list(dict.fromkeys([own, *others[:2], *([1] if 1 in worked else [])]))
    asked = [(size, bases) for size in batches]
    asked += [(own, tuple({**dict(bases), name: size}.items())) for name in taken.given for size in taken.others(name)]
    asked += taken.together
    calls = [samples.at(size, sizes=sizes) for size, sizes in asked]
    known = [(size, tuple(one for one in sizes if one not in samples.sizes.items())) for size, sizes in asked]
    return ExportRequest(
        model=model,
        calls=tuple((call.args, call.kwargs) for call in calls),
        outputs=reference.outputs_at(known),
        dynamic_batch=len(batches) > 1,
        open_dims=dims.of,
        input_names=None if input_names is None else tuple(input_names),
        output_names=None if output_names is None else tuple(output_names),
        computes_in=dtype_inside(model),
    )


def _names_in_files(reference: Reference, adapter: Adapter) -> dict[str, str]:
    """The reference's own name of each output -> that in the files."""
    own = reference.output_names
    # Other numbers of outputs are a difference, which the comparison tells of.
    shown = adapter.output_names if len(adapter.output_names) == len(own) else own
    return dict(zip(own, shown, strict=True))


def _factor(reference: Reference, home: torch.device, target: torch.device) -> tuple[float, list[str]]:
    """How many times its noise an artifact may be off, and a note where that is more than on one device."""
    measured, here = describe_device(home), describe_device(target)
    factor = FACTOR * factor_between(measured, here, (noise.dtype for noise in reference.noises.values()))
    if factor == FACTOR:
        return factor, []
    return factor, [
        f"the original was run on {measured['name']} ({measured['type']}): artifacts on {here['name']} ({here['type']}) may be"
        f" off by {factor:g} times its noise"
    ]


def _blamed(
    provenance: Provenance | None,
    exported: nn.Module,
    device: torch.device,
    is_wrong: Callable[[nn.Module], bool],
    seed: int,
    inputs: Mapping[str, Any],
) -> str:
    """A sentence on the pass that made the exported module wrong; "" where none did.

    Args:
        device: where the passes are run again, and what they give is compared.
    """
    if provenance is None or (original := provenance.original) is None:
        return ""
    exported = _on_device(exported, device)

    def is_wrong_with(passes: Sequence[Pass] | None) -> bool:
        if passes is None:
            return is_wrong(exported)
        with warnings.catch_warnings():
            # They were given when it was made.
            warnings.simplefilter("ignore")
            made = optimize(
                original,
                passes,
                **inputs,
                mode=provenance.report.mode,
                device=device,
                batch_sizes=provenance.batch_sizes,
                seed=seed,
            )
        return is_wrong(_exportable(made, device))

    return pass_to_blame(provenance.applied, is_wrong_with)


def _without_metadata(artifact: Artifact, own: Mapping[str, str]) -> Sequence[str]:
    """A note where a file doesn't hold what the user has it say: exporters of other packages may know of none."""
    lacking = [key for key, text in own.items() if artifact.metadata.get(key) != text]
    if not lacking:
        return ()
    return [f"the {artifact.format} file doesn't hold the metadata {', '.join(lacking)}: its exporter writes none"]


def _all_notes(own: Sequence[str], reports: Mapping[str, ParityReport]) -> list[str]:
    """What there is to be told of the export, and of what its artifacts were compared at: each of it once."""
    return list(dict.fromkeys([*own, *(note for report in reports.values() for note in report.notes)]))


def _not_proven(parity: ParityReport, name: str, remark: str) -> ParityError:
    where = f" {remark}" if remark else ""
    return ParityError(
        f"The {name} artifact isn't shown to compute what the original does: {parity.reason}{where}",
        {"notes": _all_notes((), {name: parity})},
    )


def _raise_missing(missing: Mapping[str, Exception], entries: Sequence[dict[str, Any]]) -> None:
    """Raise what withholds all formats; a file that computes something else comes before one that couldn't be made.

    Args:
        entries: the figures of all files that were run.
    """
    errors = list(missing.values())
    if wrong := next((error for error in errors if isinstance(error, ParityError)), None):
        raise ParityError(str(wrong), {"artifacts": entries, **wrong.figures})
    if len(errors) == 1:
        raise errors[0]
    raise ExportError(" ".join(map(str, errors))) from errors[0]


def _overall(reports: Mapping[str, ParityReport], reference: Reference) -> dict[str, Any]:
    worst = max(reports.values(), key=lambda report: report.ratio)
    return {
        "ok": all(report.ok for report in reports.values()),
        "verdict": worst.verdict,
        "reason": worst.reason,
        "reference": worst.reference,
        "precision": worst.precision,
        "batch_sizes": list(reference.batch_sizes),
        "draws": worst.draws,
        "factor": worst.factor,
        "settings": dict(item for report in reports.values() for item in report.settings.items()),
    }


def _told(report: Report) -> dict[str, Any]:
    """The report as it goes into a bundle: without how long anything took where the bundle is to be made again."""
    told = report.to_json()
    if not is_to_be_repeated():
        return told
    return {**told, "seconds": None, "stages": None, "passes": [{**each, "seconds": None} for each in told["passes"]]}


def _describe(model: nn.Module, source: str | None) -> dict[str, Any]:
    state = model.state_dict()
    return {
        "class": type(model).__name__,
        "source": source or type(model).__module__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": sum(t.numel() * t.element_size() for t in state.values() if isinstance(t, torch.Tensor)),
        "weights_sha256": weights_hash(state),
    }
