"""One `optimize`, in stages: run the original, record, run the passes, verify the result, and see whether it pays."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from optimizer.model import (
    Mode,
    Runs,
    RunsOfCopy,
    Samples,
    WorkingCopy,
    is_plain,
    is_script,
    reachable_modules,
    two_batch_sizes,
)
from optimizer.options import is_to_be_timed
from optimizer.parity import OriginalOutputs, ParityReport, RecordedRuns
from optimizer.pipeline.copy_runs import CopyRuns
from optimizer.pipeline.transactions import Comparer, Lowered, Transactions, lowered_by, verify_and_roll_back
from optimizer.report import PassRecord, Progress, ProgressFunction
from passes.base import Context, Pass, PassResult
from passes.graph.backend import GraphCall, compilation_of, without_graph_call
from passes.graph.model_tree import ModelTree
from passes.graph.recording import recorded_runs
from passes.torch_private import COMPILED_CALL

# What the graphs of a model with slower calls cost doesn't count: of one graph, and of several, in seconds.
_SLOWEST, _SLOWEST_SPLIT = 5e-3, 0.1
_ROUNDS = 9
# A result may be slower by this factor, which is the noise of such a measurement.
_NOISE = 1.05


class Pipeline:
    """Turns the working copy into the verified result; without samples nothing is run or verified.

    Call the stages in this order: `run_original`, `record`, `run`, `verify`.

    Attributes:
        tree: the working copy as passes see it.
        notes: sentences for the report.
    """

    def __init__(
        self,
        copy: WorkingCopy,
        original: nn.Module,
        samples: Samples | None,
        device: torch.device,
        *,
        strict: bool,
        explain: bool,
        batch_sizes: Sequence[int] | None,
        progress: ProgressFunction,
    ) -> None:
        self.tree = ModelTree(copy.root, copy.unregistered())
        self.notes: list[str] = []
        self._copy = copy
        self._original = original
        self._samples = samples
        self._batch_sizes = batch_sizes
        self._progress = progress
        self._transactions = Transactions(
            copy, original, self.tree, device, strict=strict, explain=explain, progress=progress
        )

    @property
    def mode(self) -> Mode:
        """ "inference" or "training"."""
        return self._copy.mode

    @property
    def records(self) -> list[PassRecord]:
        """The records of the passes."""
        return self._transactions.records

    @property
    def precisions(self) -> tuple[Lowered, ...]:
        """The reasons why the result is less precise than the original."""
        return lowered_by(self._transactions.applied)

    @property
    def kept(self) -> list[PassResult]:
        """The results of the passes that stay."""
        return [done.result for done in self._transactions.applied]

    def context(self) -> Context:
        """The context of passes."""
        return self._transactions.context()

    def run_original(self) -> OriginalOutputs | None:
        """Run the original at the calls at which results are compared; None without samples.

        These are the given batch size, another one if the batch can change, and the further inputs. In inference mode,
        these runs are recorded for the passes.

        Raises:
            LoadError: the original raises on the example inputs.
        """
        samples = self._samples
        if samples is None:
            return None
        self._tell("capture", 0, 3, "running the original")
        sizes = two_batch_sizes(samples, self.mode, self._batch_sizes)
        given: list[int | None] = [samples.batch_size]
        keys = [(size, 0) for size in sizes or given] + list(samples.further)
        recorded = None
        if self.mode == "inference":
            recorded = RecordedRuns(RunsOfCopy(self._original, self._copy.root), self.tree, keys)
        outputs = OriginalOutputs.run(
            self._original,
            samples,
            batch_sizes=sizes,
            # A BatchNorm over the few rows of the example inputs rounds differently from draw to draw.
            draws=2 if self.mode == "training" else None,
            mode=self.mode,
            measured_sizes=2 if self.mode == "training" else 1,
            recorded=recorded,
            or_larger=self._batch_sizes is None,
        )
        self._copy.own_parameters(outputs.written)
        # Passes get all of these calls, so that they see a branch that only one of them takes before they rewrite it.
        larger = [(size, 0) for size in outputs.batch_sizes if size not in (sizes or given)]
        keys = [(size, draw) for size, draw in keys if size in outputs.batch_sizes or not outputs.batch_sizes]
        keys = list(dict.fromkeys((*keys, *larger)))
        calls = [samples.at(size, draw) for size, draw in keys]
        seeds = [outputs.seed_of(*key) for key in keys]
        self._transactions.runs = CopyRuns(self._copy.root, calls, seeds, outputs.written)
        if len(calls) < 2:
            self.notes.append(
                "only one batch size could be run, so constants that depend on the batch size can't be detected"
            )
        if recorded is not None:
            self.tree.runs = recorded.as_runs(keys)
        self._transactions.comparer = Comparer(
            outputs, self._original, self._copy.root, samples, self.mode, sizes, self.notes
        )
        return outputs

    def record(self) -> None:
        """Record runs of the working copy, unless those of the original were recorded."""
        self._tell("capture", 1, 2, "recording a run")
        recorded = recorded_runs(self.tree, self.context())
        if recorded is not None and recorded.failure:
            self.notes.append(f"no run could be recorded, so passes that need one change nothing: {recorded.failure}")
        self._tell("capture", 2, 2, "")

    def run(self, passes: Sequence[Pass]) -> None:
        """Run the passes in order; each is kept or rolled back.

        Raises:
            OptimizeFailed: a pass fails or is rolled back, with `strict` or if it is a guarantee.
        """
        transactions = self._transactions
        transactions.passes = passes
        if transactions.comparer is not None and not all(map(is_own, passes)):
            # A pass of another package may write to the caller's weights, so measure the reference before it runs.
            transactions.comparer.outputs.reference()
        transactions.run_from(0)
        self._tell("optimize", len(passes), len(passes) + 1, "comparing the result with the original")

    def verify(self) -> ParityReport | None:
        """Compare the result with the original, and roll back wrong passes until it is right.

        Raises:
            OptimizeFailed: a pass is rolled back, with `strict` or if it is a guarantee.
            ParityError: the result is wrong without any pass.
        """
        comparer = self._transactions.comparer
        if comparer is None or self._samples is None:
            return None
        if not self._may_differ():
            return comparer.outputs.unchanged("No pass changed the model: there was nothing to compare.")
        return verify_and_roll_back(self._transactions, comparer)

    def use_if_faster(self) -> None:
        """Let an inference result run as written if it is slower by its rewritten graphs."""
        if self.mode == "inference":
            note = run_as_written_if_faster(self._copy.root, self._transactions.runs)
            self.notes += [note] if note else []

    def _may_differ(self) -> bool:
        """Whether the result may differ from the model.

        Passes of other packages may have changed it without reporting that. A model that defines its own copying, or
        that runs itself instead of a copy, may differ without any pass.
        """
        return (
            any(record.status != "unchanged" for record in self.records)
            or not all(map(is_own, self._transactions.passes))
            or not all(is_plain(module) or is_script(module) for module in reachable_modules(self._original))
            or Runs(self._original, in_eval=True).is_run_itself
        )

    def _tell(self, stage: str, done: int, total: int, text: str, name: str = "") -> None:
        self._progress(Progress(stage, done, total, text, name))


def run_as_written_if_faster(root: nn.Module, runs: CopyRuns) -> str:
    """Let a result run as written if it is slower by its rewritten graphs, which stay for files; return a note or "".

    At every call, torch.compile checks its guards, and each graph its derived tensors: some 30 microseconds for a small
    model, in each of its graphs. Such a model may lose more than its passes gain. Nothing is timed where the environment variable OPTIMIZE_EXPORT_NO_BENCH is set.
    """
    call = root.__dict__.get(COMPILED_CALL)
    if not isinstance(call, GraphCall) or not runs.calls or not is_to_be_timed(None):
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
