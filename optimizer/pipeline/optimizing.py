"""One `optimize` from the user's arguments to the result with its report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from optimize_export.errors import UsageError
from optimize_export.wording import listed
from optimizer.model import (
    ExampleInputs,
    FurtherInputs,
    Mode,
    Runs,
    RunsOfCopy,
    Samples,
    Source,
    WorkingCopy,
    check_model,
    check_numbers,
    in_turn,
    is_plain,
    is_script,
    on_device,
    outside_inference_mode,
    rare_collection,
    reachable_modules,
    release_memory,
    resolved_device,
    samples_of,
    two_batch_sizes,
    unregistered_modules,
    working_copy,
)
from optimizer.options import NO_BENCH
from optimizer.parity import OriginalOutputs, ParityReport, RecordedRuns
from optimizer.pipeline.results import Provenance, attach, detach, remove_hooks, share_until_loading
from optimizer.pipeline.transactions import Comparer, CopyRuns, Transactions, lowered_by, verify_and_roll_back
from optimizer.report import CoverageRecord, Progress, ProgressFunction, Report, Size
from passes.base import Context, ModelTree, Pass, PassResult, device_of
from passes.graph.backend import GraphCall, compilation_of, without_graph_call
from passes.graph.recording import Runs as RecordedCalls
from passes.graph.recording import call_of, operation_name, recorded_runs, tensor_of
from passes.registry import make_passes
from passes.torch_private import COMPILED_CALL, AnyNorm

# Bytes of the original's outputs that a result keeps for its export.
_LARGEST_KEPT = 64 * 2**20
# What the graphs of a model with slower calls cost doesn't count: of one graph, and of several, in seconds.
_SLOWEST, _SLOWEST_SPLIT = 5e-3, 0.1
_ROUNDS = 9
# A result may be slower by this factor, which is the noise of such a measurement.
_NOISE = 1.05
# Maximum number of modules that a note names.
_NAMES_TOLD = 4


@in_turn
def optimize_model(
    model: nn.Module,
    passes: Sequence[Pass | str] | None,
    *,
    example_inputs: ExampleInputs | None,
    example_kwargs: dict[str, Any] | None,
    further_inputs: FurtherInputs,
    mode: Mode,
    device: torch.device | str | None,
    strict: bool,
    explain: bool = False,
    batch_sizes: Sequence[int] | None,
    seed: int,
    progress: ProgressFunction,
    with_open_batch: Callable[[Samples], Samples] | None = None,
    is_called: bool = True,
) -> nn.Module:
    """As `optimizer.optimize`.

    Args:
        with_open_batch: makes the samples whose batch size varies in the declared dims.
        is_called: whether the result is called, and not only exported: its calls are then timed.
    """
    with rare_collection(), outside_inference_mode():
        started = time.perf_counter()
        check_model(model, runs=example_inputs is not None or bool(example_kwargs))
        check_numbers(seed, batch_sizes)
        if mode not in ("inference", "training"):
            raise UsageError(f"mode must be 'inference' or 'training', not {mode!r}.")
        chosen = make_passes(passes, mode)
        target = device_of(model) if device is None else resolved_device(str(device), require_gpu=False)
        samples = samples_of(example_inputs, example_kwargs, further_inputs, seed, target)
        if samples is not None and with_open_batch is not None:
            samples = with_open_batch(samples)
        calls = () if samples is None else ((samples.given.args, samples.given.kwargs),)
        for item in chosen:
            item.check(Context(mode, target, calls))
        original = on_device(model, target)
        copy = _copy_of(original, mode)
        if mode == "inference" and not any(item.lowers_precision for item in chosen):
            _freeze(copy, original)
        tree = ModelTree(copy.root, copy.unregistered())
        transactions = Transactions(
            copy, original, tree, target, chosen, strict=strict, explain=explain, progress=progress
        )
        report, outputs, operations = _run_stages(transactions, samples, batch_sizes, model, is_called=is_called)
        report.notes[:0] = copy.notes
        if mode == "inference":
            report.warnings, notes = notes_on_modes(model, copy.root, "the result is in eval mode and was")
            report.notes += [*report.warnings, *notes]
        told = _notes_on_verification(copy.root, mode, report.parity)
        report.notes.extend(note for note in told if note not in report.notes)
        applied = transactions.applied
        sources = _sources(copy, original, [done.result for done in applied])
        report.seconds = time.perf_counter() - started
        sizes = None if batch_sizes is None else tuple(batch_sizes)
        if outputs is not None and (mode == "training" or outputs.kept_bytes > _LARGEST_KEPT):
            # Exports compute in inference mode, and large outputs would take too much memory.
            outputs = None
        provenance = Provenance(
            original, report, sources, lowered_by(applied), tuple(chosen), sizes, outputs, operations
        )
        attach(copy.root, provenance, samples, stays_in_eval=mode == "inference")
        if mode == "inference":
            share_until_loading(copy.root, original)
        release_memory()
        return copy.root


def _run_stages(
    transactions: Transactions,
    samples: Samples | None,
    batch_sizes: Sequence[int] | None,
    model: nn.Module,
    *,
    is_called: bool,
) -> tuple[Report, OriginalOutputs | None, tuple[tuple[str, str], ...]]:
    """Run the original, the passes and the comparison; the report has the seconds of each stage.

    Without samples nothing is run or verified. The last result are the operations of the original.
    """
    tree, mode, progress, passes = transactions.tree, transactions.copy.mode, transactions.progress, transactions.passes
    stages: dict[str, float] = {}
    notes: list[str] = []
    with _timed(stages, "original"):
        if samples is not None:
            _run_original(transactions, samples, batch_sizes, notes)
        progress(Progress("capture", 1, 2, "recording a run", ""))
        context = transactions.context()
        # Runs of the working copy, unless those of the original were recorded.
        recorded = recorded_runs(tree, context)
        if recorded is not None and recorded.failure:
            notes.append(f"no run could be recorded, so passes that need one change nothing: {recorded.failure}")
        progress(Progress("capture", 2, 2, "", ""))
    comparer = transactions.comparer
    before, coverage = size_of(tree), coverage_record(tree, recorded)
    operations = recorded_operations(tree, recorded)
    with _timed(stages, "passes"):
        if comparer is not None and not all(map(is_own, passes)):
            # A pass of another package may write to the caller's weights, so measure the reference before it runs.
            comparer.outputs.reference()
        transactions.run_all()
        progress(Progress("optimize", len(passes), len(passes) + 1, "comparing the result with the original", ""))
    with _timed(stages, "comparison"):
        parity = None
        if comparer is not None and _may_differ(transactions):
            parity = verify_and_roll_back(transactions, comparer)
        elif comparer is not None:
            parity = comparer.outputs.unchanged("No pass changed the model: there was nothing to compare.")
        if is_called and mode == "inference":
            note = _run_as_written_if_faster(tree.root, transactions.runs)
            notes += [note] if note else []
    report = Report(
        model=type(model).__name__,
        mode=mode,
        device=str(context.device),
        torch=torch.__version__,
        coverage=coverage,
        passes=transactions.records,
        parity=parity,
        before=before,
        after=size_of(tree),
        notes=notes,
        stages=stages,
    )
    return report, None if comparer is None else comparer.outputs, operations


@contextmanager
def _timed(stages: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    stages[name] = stages.get(name, 0.0) + time.perf_counter() - started


def _run_original(
    transactions: Transactions, samples: Samples, batch_sizes: Sequence[int] | None, notes: list[str]
) -> None:
    """Run the original at the calls at which results are compared.

    These are the given batch size, another one if the batch can change, and the further inputs. In inference mode,
    these runs are recorded for the passes.
    """
    copy, mode, target = transactions.copy, transactions.copy.mode, transactions.original
    transactions.progress(Progress("capture", 0, 3, "running the original", ""))
    sizes = two_batch_sizes(samples, mode, batch_sizes)
    given: list[int | None] = [samples.batch_size]
    keys = [(size, 0) for size in sizes or given] + list(samples.further)
    recorded = None
    if mode == "inference":
        recorded = RecordedRuns(RunsOfCopy(target, copy.root), transactions.tree, keys)
    outputs = OriginalOutputs(
        target,
        samples,
        batch_sizes=sizes,
        # A BatchNorm over the few rows of the example inputs rounds differently from draw to draw.
        draws=2 if mode == "training" else None,
        mode=mode,
        measured_sizes=2 if mode == "training" else 1,
        recorded=recorded,
        or_larger=batch_sizes is None,
    )
    original = outputs.original
    copy.own_parameters(original.runs.written)
    # Passes get all of these calls, so that they see a branch that only one of them takes before they rewrite it.
    worked = original.batch_sizes
    larger = [(size, 0) for size in worked if size not in (sizes or given)]
    keys = [(size, draw) for size, draw in keys if size in worked or not worked]
    keys = list(dict.fromkeys((*keys, *larger)))
    calls = [samples.at(size, draw) for size, draw in keys]
    seeds = [original.seed_of(*key) for key in keys]
    transactions.runs = CopyRuns(copy.root, calls, seeds, original.runs.written)
    if len(calls) < 2:
        notes.append("only one batch size could be run, so constants that depend on the batch size can't be detected")
    if recorded is not None:
        transactions.tree.runs = recorded.as_runs(keys)
    transactions.comparer = Comparer(outputs, target, copy.root, samples, mode, sizes, notes)


def _may_differ(transactions: Transactions) -> bool:
    """Whether the result may differ from the model.

    Passes of other packages may have changed it without reporting that. A model that defines its own copying, or that
    runs itself instead of a copy, may differ without any pass.
    """
    original = transactions.original
    return (
        any(record.status != "unchanged" for record in transactions.records)
        or not all(map(is_own, transactions.passes))
        or not all(is_plain(module) or is_script(module) for module in reachable_modules(original))
        or Runs(original, in_eval=True).is_run_itself
    )


def _run_as_written_if_faster(root: nn.Module, runs: CopyRuns) -> str:
    """Let a result run as written if it is slower by its rewritten graphs, which stay for files; return a note or "".

    At every call, torch.compile checks its guards, and each graph its derived tensors: some 30 microseconds for a small
    model, in each of its graphs. Such a model may lose more than its passes gain.
    Nothing is timed where the environment variable OPTIMIZE_EXPORT_NO_BENCH is set.
    """
    call = root.__dict__.get(COMPILED_CALL)
    if not isinstance(call, GraphCall) or not runs.calls or os.environ.get(NO_BENCH):
        # Without a run, or under another compiler.
        return ""
    is_split = compilation_of(call).compiled.is_split

    def as_written() -> AbstractContextManager[Any]:
        return without_graph_call(root)

    if runs.seconds([as_written], 1)[0] > (_SLOWEST_SPLIT if is_split else _SLOWEST):
        return ""
    written, rewritten = runs.seconds([as_written, nullcontext], _ROUNDS)
    if rewritten <= _NOISE * written:
        return ""
    call.is_for_files = True
    times = f"{1e3 * written:.2f} ms instead of {1e3 * rewritten:.2f} ms by the rewritten graph"
    note = f"calls of the result run as written, which takes {times}"
    if is_split:
        return f"{note}s; files hold its changes if torch.export traces the forward as one graph"
    return f"{note}; files hold the rewritten graph"


def is_own(item: Pass) -> bool:
    """Whether a pass belongs to this project, and not to another package."""
    return type(item).__module__.partition(".")[0] == "passes"


def _copy_of(model: nn.Module, mode: Mode) -> WorkingCopy:
    copy = working_copy(model, mode)
    detach(copy.root)
    remove_hooks(copy.root)
    if mode == "inference":
        copy.root.eval()
    return copy


def _freeze(copy: WorkingCopy, original: nn.Module) -> None:
    """Let the result's own parameters require no gradients, so that a call without `no_grad` is as fast as one with it.

    The parameters of scripted modules are the caller's, and stay as they are. With a lower precision all stay: autocast
    keeps the cast of a weight for its next use only if the weight requires gradients.
    """
    modules = [copy.root, *(module for _, module in copy.unregistered())]
    callers = {id(parameter) for parameter in original.parameters()}
    for parameter in (one for module in modules for one in module.parameters()):
        if parameter.requires_grad and id(parameter) not in callers:
            parameter.requires_grad_(False)


def notes_on_modes(model: nn.Module, result: nn.Module, made: str) -> tuple[list[str], list[str]]:
    """Warnings and notes on modules that are in training mode in the model and in eval mode in the result.

    Args:
        made: the start of the sentence on the result, which ends with "compared with the model in eval mode".
    """
    now = {path: module.training for path, module in result.named_modules()}
    left = [path for path, module in model.named_modules() if module.training and not now.get(path, True)]
    norms = []
    if not model.training:
        modules = {path: model.get_submodule(path) for path in left}
        norms = [path for path, one in modules.items() if isinstance(one, AnyNorm) and one.running_mean is not None]
        left = [path for path in left if path not in norms]
    notes = []
    if left:
        more = f" and {len(left) - 1} more are" if left[1:] else " is"
        named = (
            "the model is in training mode"
            if left[0] == ""
            else f"{left[0]}{more} in training mode inside a model in eval mode"
        )
        notes.append(f"{named}; {made} compared with the model in eval mode")
    if not norms:
        return [], notes
    warning = (
        f"{listed(norms, _NAMES_TOLD)} {'are' if norms[1:] else 'is'} in training mode inside a model in eval mode: the "
        "model normalizes with the statistics of each batch, the result with the running statistics, so their outputs "
        "differ. Call model.eval() first if that isn't intended"
    )
    return [warning], notes


def _notes_on_verification(result: nn.Module, mode: Mode, parity: ParityReport | None) -> list[str]:
    notes = []
    if parity is not None and any(isinstance(m, nn.SyncBatchNorm) and m.training for m in result.modules()):
        notes.append(
            "the comparison ran in one process, where a SyncBatchNorm uses the statistics of its own batch, as a "
            "BatchNorm does; with several processes it uses the statistics of all of them"
        )
    return [*notes, *(["nothing was verified: pass example inputs to optimize()"] if parity is None else parity.notes)]


def _sources(copy: WorkingCopy, original: nn.Module, kept: Sequence[PassResult]) -> tuple[Source, ...]:
    """The caller's tensors that the result holds converted copies of."""
    places = (*unregistered_modules(original), *original.named_modules())
    paths = {id(module): path for path, module in places}
    found: dict[int, Source] = {}
    for result in kept:
        for ref in (ref for change in result.changes for ref in change.sources):
            owner = copy.originals.get(id(ref.owner))
            tensor = getattr(owner, ref.name, None)
            if isinstance(tensor, torch.Tensor):
                found[id(tensor)] = Source.of(f"{paths.get(id(owner), '')}.{ref.name}".lstrip("."), tensor)
    return tuple(found.values())


def size_of(tree: ModelTree) -> Size:
    parameters = [parameter for parameter in tree.root.parameters() if not is_lazy(parameter)]
    return Size(
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.numel() * parameter.element_size() for parameter in parameters),
    )


def coverage_record(tree: ModelTree, recorded: RecordedCalls | None) -> CoverageRecord:
    """The share of modules with parameters that the example calls reach."""
    owners = [module for module in tree.modules() if any(p is not None for p in module._parameters.values())]
    if recorded is None:
        return CoverageRecord(0, len(owners))
    nodes = (node for run in recorded.runs for node in run.recording.nodes())
    read = {id(ref.value) for node in nodes if (ref := tensor_of(node)) is not None}
    unreached = [module for module in owners if not any(id(p) in read for p in module._parameters.values())]
    return CoverageRecord(len(owners) - len(unreached), len(owners), tuple(map(tree.path, unreached)))


def recorded_operations(tree: ModelTree, recorded: RecordedCalls | None) -> tuple[tuple[str, str], ...]:
    """The path of the module and the name of each operation of the first recorded run, in order."""
    nodes = recorded.runs[0].recording.nodes() if recorded is not None and recorded.runs else []
    calls = [node for node in nodes if node.op == "call_function" and not node.meta["asks"]]
    return tuple((tree.path(call_of(node).module), operation_name(node)) for node in calls)
