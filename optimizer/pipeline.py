"""Passes as transactions: run, checked where they changed something, checked as a whole, kept or taken back."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from optimizer.errors import LoadError, OptimizeFailed, ParityError
from optimizer.inputs import Call, Samples
from optimizer.locating import located_module
from optimizer.module_tree import is_script, reachable_modules
from optimizer.parity import (
    OriginalOutputs,
    ParityReport,
    RecordedRuns,
    Reference,
    RegionParity,
    check_change,
    judge,
    measure_reference,
)
from optimizer.preserve import eager_only, pinned_settings, random_state, seed_torch
from optimizer.report import CoverageRecord, PassRecord, PlaceRecord, Progress, ProgressFunction, Size
from optimizer.runs import Runs, RunsOfCopy
from optimizer.sentences import first_line
from optimizer.working_copy import Mode, WorkingCopy, is_plain, private_state
from optimizer.written_parameters import Source
from passes.base import Context, DeclaredError, Pass, PassResult, Precision, rows_of
from passes.casting.forwards import AutocastForward, root_cast
from passes.errors import PassesError, UnseenCall
from passes.program.changes import Change, Place
from passes.program.edits import taken_back
from passes.program.model_tree import ModelTree
from passes.program.recording import Node, Recorder, shape_of, tensor_of
from passes.program.runs import recorded_runs
from passes.program.storage import same_values
from passes.program.weights import bare
from passes.registry import pass_named, pass_names

logger = logging.getLogger(__name__)

# A pass is run again where some of its changes are to be left alone, which may give way to others.
_MOST_TRIES = 8
# Of the pairs that a run doesn't keep together, each is found by a run of its own: a pass leaves so many changes alone for
# that, and goes as a whole where there are more.
_MOST_PARTED = 8

# What makes a result less precise than the original, and is allowed for.
Lowered = Precision | DeclaredError


class _TreeState:
    """The attributes, tensors and children of every module, by reference."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.kept = [
            (holder, dict(holder))
            for module in modules
            if not is_script(module)
            for holder in (module.__dict__, module._parameters, module._buffers, module._modules)
        ]

    def restore(self) -> None:
        """Put everything back."""
        for holder, before in self.kept:
            holder.clear()
            holder.update(before)


@dataclass
class _Done:
    """A pass that stays so far."""

    number: int
    record: PassRecord
    result: PassResult
    declared: DeclaredError | None = None

    @property
    def lowered(self) -> tuple[Lowered, ...]:
        """What makes the result of the pass less precise."""
        return tuple(one for one in (self.declared, self.result.precision) if one is not None)


@dataclass
class _Checked:
    """What the changes of one pass were found to be.

    Attributes:
        worst: the largest error of a change, in units of the noise there; None where none was compared.
        error: the same as a share of the largest magnitude there.
        wrong: the sentence about a change that computes something else.
        imprecise: the changes that lose too much to rounding, each with the reason.
    """

    worst: float | None = None
    error: float | None = None
    wrong: str | None = None
    imprecise: dict[Place, str] = field(default_factory=dict)

    def add(self, change: Change, algebra: RegionParity, rounding: RegionParity | None) -> None:
        """Take in what was found of one change."""
        self.worst = max(self.worst or 0.0, algebra.ratio)
        self.error = max(self.error or 0.0, algebra.error / algebra.scale if algebra.scale else 0.0)
        if not algebra.ok:
            self.wrong = f"{change.where or 'the root'} ({change.what}): {algebra.reason}"
        elif rounding is not None and not rounding.ok:
            self.imprecise[change.place] = (
                f"{change.what}, it loses too much to rounding: {rounding.reason.rstrip('.')}"
            )
        elif rounding is not None:
            self.worst = max(self.worst, rounding.ratio)


@dataclass
class Pipeline:
    """One `optimize`: from the working copy to the verified result.

    Attributes:
        copy: what is rewritten.
        original: the caller's module, on the device that is optimized for.
        samples: None where there are no example inputs: then nothing is run and nothing verified.
    """

    copy: WorkingCopy
    original: nn.Module
    samples: Samples | None
    device: torch.device
    strict: bool
    batch_sizes: Sequence[int] | None
    progress: ProgressFunction
    notes: list[str] = field(default_factory=list)
    records: list[PassRecord] = field(default_factory=list)
    _ran: OriginalOutputs | None = None
    # Of a training result: the original in eval; False where it doesn't run so.
    _reference_in_eval: Reference | Literal[False] | None = None
    # Those in kind, by the one that they are made of and what they are in.
    _in_kind: dict[tuple[int, tuple[Lowered, ...]], Reference] = field(default_factory=dict)
    _calls: list[Call] = field(default_factory=list)
    # What the random numbers of these start from, by their numbers.
    _seeds: dict[int, int] = field(default_factory=dict)
    _passes: Sequence[Pass] = ()
    _done: list[_Done] = field(default_factory=list)
    # What the pass of this number is told to leave alone from the start.
    _left_alone: dict[int, dict[Place, str]] = field(default_factory=dict)
    # The passes of these numbers are taken back whatever they do, each for the reason.
    _wrong: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tree = ModelTree(self.copy.root, self.copy.unregistered())

    @property
    def mode(self) -> Mode:
        """ "inference" or "training"."""
        return self.copy.mode

    def run_original(self) -> OriginalOutputs | None:
        """Run the original at two batch sizes or more, which all results are compared with; None without inputs.

        In inference these runs are recorded for the passes.

        Raises:
            LoadError: it raises on the example inputs.
        """
        if self.samples is None:
            return None
        self._tell("capture", 0, 3, "running the original")
        sizes = self._two_sizes(self.samples)
        # A BatchNorm over the few rows of the example inputs rounds otherwise from draw to draw.
        draws = 2 if self.mode == "training" else None
        given: list[int | None] = [self.samples.batch_size]
        calls = [(size, 0) for size in sizes or given] + list(self.samples.further)
        recorded = None
        if self.mode == "inference":
            recorded = RecordedRuns(RunsOfCopy(self.original, self.copy.root), self.tree, calls)
        self._ran = OriginalOutputs.run(
            self.original,
            self.samples,
            batch_sizes=sizes,
            draws=draws,
            mode=self.mode,
            measured_sizes=2 if self.mode == "training" else 1,
            recorded=recorded,
        )
        self.copy.own_parameters(self._ran.written)
        # A branch that only one of them takes is to be seen before anything is rewritten.
        calls = [(size, draw) for size, draw in calls if size in self._ran.batch_sizes or not self._ran.batch_sizes]
        self._calls = [self.samples.at(size, draw) for size, draw in calls]
        self._seeds = {number: self._ran.seed_of(*call) for number, call in enumerate(calls)}
        if len(self._calls) < 2:
            self.notes.append("only one batch size could be run, so that constants of the batch size aren't found")
        if recorded is not None:
            self.tree.runs = self.tree.earlier_runs = recorded.as_runs(calls)
        return self._ran

    def _two_sizes(self, samples: Samples) -> list[int] | None:
        if not samples.dynamic or samples.batch_size is None:
            return None
        asked = [size for size in self.batch_sizes or () if size != samples.batch_size]
        # A batch of one is special to many models: it isn't taken for the second size. In training neither is one of two:
        # a BatchNorm over two rows gives plus and minus one, and gradients that are little but rounding.
        default = samples.batch_size + 1 if self.mode == "training" else 2 if samples.batch_size != 2 else 3
        other = next((size for size in asked if size > 1), default)
        return [samples.batch_size, other]

    def record(self) -> ModelTree:
        """The working copy as passes see it, with what runs of it do."""
        self._tell("capture", 1, 2, "recording what it does")
        tree = self.tree
        recorded = recorded_runs(tree, self.context())
        if recorded is not None and recorded.failure:
            self.notes.append(f"its runs show nothing to the passes: {recorded.failure}")
        self._tell("capture", 2, 2, "")
        return tree

    def _fresh_calls(self) -> list[Call]:
        """Copies of the calls, as a forward may write to its inputs."""
        return [_fresh(call) for call in self._calls]

    @contextmanager
    def _quiet(self, seed: int = 0) -> Iterator[None]:
        """Run the working copy eagerly and leave no trace of it: its modules are told by identity, so none is copied."""
        with ExitStack() as stack:
            stack.enter_context(random_state(seed))
            stack.enter_context(pinned_settings())
            stack.enter_context(eager_only())
            stack.enter_context(torch.no_grad())
            stack.enter_context(self._private_state())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            yield

    def _private_state(self) -> AbstractContextManager[None]:
        root, ran = self.copy.root, self._ran
        own = {name for name, _ in root.named_parameters(remove_duplicate=False)}
        return private_state(root, () if ran is None else ran.written & own)

    def _outputs(self, calls: Sequence[Call] | None = None, *, tolerate: bool = False) -> list[Any]:
        outputs: list[Any] = []
        for number, call in enumerate(self._fresh_calls() if calls is None else calls):
            seed_torch(number)
            try:
                outputs.append(self.copy.root(*call.args, **call.kwargs))
            except Exception as error:
                if not tolerate:
                    raise
                outputs.append(error)
        return outputs

    def run(self, tree: ModelTree, passes: Sequence[Pass]) -> None:
        """Run the passes in order; each is kept or taken back.

        Raises:
            OptimizeFailed: a pass fails or is rolled back, with `strict` or where it is a guarantee.
        """
        self._passes = passes
        if self._ran is not None and not all(map(_is_own, passes)):
            # Such a pass may write to the caller's weights, which is seen by what the model gave before.
            self._ran.reference()
        self._run_from(tree, 0)
        self._tell("optimize", len(passes), len(passes) + 1, "comparing the result with the original")

    def _run_from(self, tree: ModelTree, first: int) -> None:
        context = self.context()
        for number, item in enumerate(self._passes[first:], first):
            if _is_lossy(item):
                self._find_wrong_behind(tree, number, context)
            self._run_numbered(tree, number, context)

    def _run_numbered(self, tree: ModelTree, number: int, context: Context) -> None:
        item = self._passes[number]
        self._tell("optimize", number, len(self._passes) + 1, item.name, item.name)
        context = replace(context, left_alone=self._left_alone.get(number, {}))
        if context.example_calls:
            context = replace(context, judge=partial(self._judge, item.declared_error))
        self._run_one(tree, number, item, context)

    def _find_wrong_behind(self, tree: ModelTree, number: int, context: Context) -> None:
        """Find the passes behind one that is less precise which are wrong, by runs of them without it.

        Judged by what that one allows, an error of some hundredths of theirs would be taken for rounding. What compiles does
        so for the dtypes that it meets: in others it makes other code, which shows nothing of this.
        """
        behind = [
            later
            for later, item in enumerate(self._passes[number:], number)
            if not (_is_lossy(item) or item.is_barrier or later in self._wrong)
        ]
        if self._ran is None or not behind:
            return
        before = sum(1 for done in self._done if done.result.changes)
        while True:
            for later in behind:
                self._run_numbered(tree, later, context)
                if self.records[-1].status == "rolled-back":
                    self._wrong[later] = self.records[-1].reason
            found = self._wrong_behind(before)
            self._take_back_from(number)
            if found is None:
                return
            culprit, reason = found
            self._wrong[culprit.number] = reason
            behind.remove(culprit.number)

    def _wrong_behind(self, before: int) -> tuple[_Done, str] | None:
        """The first of the applied passes that makes the result wrong, where it is right with so many of them."""
        applied = [done for done in self._done if done.result.changes]
        if len(applied) == before or (report := self._compare()).verdict != "failed":
            return None
        if before:
            with taken_back([edit for done in applied[before:] for edit in done.result.rewriter.edits]):
                if self._compare(applied[:before]).verdict == "failed":
                    # It is wrong by what is in front of these: that is found, and taken back, with the whole.
                    return None
        return self._culprit(applied, report.reason, right=before)

    def context(self) -> Context:
        """What the passes may know."""
        calls = tuple((call.args, call.kwargs) for call in self._calls)
        context = Context(self.mode, self.device, calls)
        if not calls:
            return context
        return replace(
            context,
            run_inside=self._run_inside,
            run_each=self._run_inside,
            run_compiled=self._run_compiled,
            apart=self._apart,
        )

    def _run_inside(self, watch: AbstractContextManager[Any], number: int = 0) -> str | None:
        """As `Context.run_inside` and `Context.run_each`."""
        call, root = _fresh(self._calls[number]), self.copy.root
        try:
            with self._quiet(self._seeds.get(number, 0)), watch:
                root(*call.args, **call.kwargs)
        except Exception as error:  # noqa: BLE001 - a run of foreign code under watch may raise anything
            return f"{type(error).__name__}: {first_line(error)}"
        return None

    def _run_compiled(self, watch: AbstractContextManager[Any]) -> str | None:
        """As `Context.run_compiled`."""
        try:
            with ExitStack() as stack:
                for kept in (random_state(0), pinned_settings(), torch.no_grad(), self._private_state()):
                    stack.enter_context(kept)
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                stack.enter_context(watch)
                self._outputs()
        except Exception as error:  # noqa: BLE001 - a compiler may raise anything on foreign code
            return f"{type(error).__name__}: {first_line(error)}"
        return None

    @contextmanager
    def _apart(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """As `Context.apart`."""
        call, root = _fresh(self._calls[0]), self.copy.root
        parameters = list(root.parameters())
        gradients = [parameter.grad for parameter in parameters]
        try:
            with self._quiet(), torch.enable_grad():
                for parameter in parameters:
                    parameter.grad = None
                yield call.args, call.kwargs
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    def _run_one(self, tree: ModelTree, number: int, item: Pass, context: Context) -> None:
        for tries_left in reversed(range(_MOST_TRIES)):
            ran = self._attempt(tree, item, context)
            if ran is None:
                return
            record, result = ran
            if (reason := self._wrong.get(number)) is not None and result.changes:
                self.records.append(record)
                self._roll_back(item, record, result, reason)
                return
            found = self._found_of(record, result)
            if found.wrong is None and not found.imprecise:
                self.records.append(record)
                self._done.append(_Done(number, record, result, item.declared_error))
                return
            new = {place: reason for place, reason in found.imprecise.items() if place not in context.left_alone}
            if found.wrong is not None or not new or not tries_left:
                # A pass that doesn't leave alone what it is told to, or finds ever new words for it, goes as a whole.
                self.records.append(record)
                self._roll_back(item, record, result, found.wrong or next(iter(found.imprecise.values())))
                return
            result.rewriter.roll_back()
            context = replace(context, left_alone={**context.left_alone, **new})

    def _attempt(self, tree: ModelTree, item: Pass, context: Context) -> tuple[PassRecord, PassResult] | None:
        """Run the pass; None where it raises, which is recorded.

        Raises:
            OptimizeFailed: with `strict`, or of a guarantee, where it raises; always where it wrote to the caller's weights.
        """
        started = time.perf_counter()
        before = _TreeState(tree.modules())
        sources = self._sources(tree)
        try:
            result = item.run(tree, context)
        except PassesError:
            raise
        except Exception as error:
            # The passes of this project take back what they did; of any other one the tree as it was is known.
            before.restore()
            tree.refresh()
            self._refuse_writes(item, sources)
            reason = f"{type(error).__name__}: {first_line(error)}"
            self.records.append(PassRecord(item.name, item.options, "failed", reason, seconds=_since(started)))
            if self.strict or item.is_guarantee:
                raise OptimizeFailed(f"{item.name} failed ({reason}).") from error
            return None
        self._refuse_writes(item, sources)
        record = PassRecord(
            item.name,
            item.options,
            "applied" if result.changes else "unchanged",
            max_error=item.max_error,
            changes=tuple(PlaceRecord(change.where, change.what) for change in result.changes),
            skips=tuple(PlaceRecord(skip.where, skip.reason) for skip in result.skips),
            remarks=tuple(PlaceRecord(remark.where, remark.text) for remark in result.remarks),
            detail=result.detail,
            seconds=_since(started),
        )
        return record, result

    def _sources(self, tree: ModelTree) -> list[tuple[Source, torch.Tensor | None]]:
        """The caller's tensors, and the values of those that a run writes to and puts back, which moves their versions."""
        named = [*self.original.named_parameters(), *self.original.named_buffers()]
        for path, module in tree.unregistered:
            own = self.copy.originals[id(module)]
            tensors = (*own.named_parameters(recurse=False), *own.named_buffers(recurse=False))
            named += ((f"{path}.{name}", tensor) for name, tensor in tensors)
        scripted = (module for module in reachable_modules(self.copy.root) if is_script(module))
        put_back = {id(tensor) for module in scripted for tensor in module.buffers(recurse=False)}
        return [
            (Source.of(name, tensor), bare(tensor).clone() if id(tensor) in put_back else None)
            for name, tensor in named
            if not is_lazy(tensor)
        ]

    def _refuse_writes(self, item: Pass, before: list[tuple[Source, torch.Tensor | None]]) -> None:
        """See that the pass wrote to no tensor of the caller's model, which can't be taken back."""
        written = [
            source.path
            for source, values in before
            if not source.unchanged and (values is None or not same_values(source.tensor, values))
        ]
        if written:
            raise OptimizeFailed(
                f"The pass {item.name} wrote in place to {written[0]}, which belongs to the caller's model: a pass has to"
                " make a new tensor, so leave it out and load the model's weights again."
            )

    def _found_of(self, record: PassRecord, result: PassResult) -> _Checked:
        """What the pass found of its changes, up to the first that computes something else."""
        found = _Checked()
        for change, pairs in result.checked:
            for algebra, rounding in pairs:
                found.add(change, algebra, rounding)
                record.parity, record.error = found.worst, found.error
                if found.wrong is not None:
                    return found
        return found

    def _autocast(self) -> torch.dtype | None:
        """The dtype of an autocast around the whole; None for none."""
        cast = root_cast(self.copy.root)
        return cast.dtype if isinstance(cast, AutocastForward) else None

    def _judge(
        self,
        declared: DeclaredError | None,
        old: Callable[..., Any],
        new: Callable[..., Any],
        values: tuple[Any, ...],
    ) -> list[tuple[RegionParity, RegionParity | None]]:
        """As `Context.judge`."""
        return check_change(old, new, values, declared=declared, autocast=self._autocast())

    def _roll_back(self, item: Pass, record: PassRecord, result: PassResult, reason: str) -> None:
        result.rewriter.roll_back()
        record.status, record.reason, record.remarks, record.detail = "rolled-back", reason, (), None
        if self.strict or item.is_guarantee:
            raise OptimizeFailed(f"{record.name} was rolled back: {reason}")

    def verify(self, tree: ModelTree) -> ParityReport | None:
        """Compare the whole with the original; take back the pass that makes it wrong, as often as there is one.

        Raises:
            OptimizeFailed: a pass is rolled back, with `strict` or where it is a guarantee.
            ParityError: the result is wrong without any pass: it can't be given to the caller.
        """
        if self._ran is None:
            return None
        if not self._is_changed():
            return self._ran.unchanged("No pass changed the model: there was nothing to compare.")
        while True:
            report = self._compare()
            if report.verdict != "failed" and (wrong := self._wrong_before_a_cast()) is not None:
                self._take_back_culprit(tree, *wrong)
                continue
            if report.verdict != "failed":
                if self._leave_what_parts_elsewhere_alone(tree):
                    continue
                return report
            if not any(done.result.changes for done in self._done):
                raise ParityError(
                    f"Without any pass the result doesn't compute what the model did ({report.reason}): the model, or a pass,"
                    " writes to its weights."
                )
            if not self._leave_what_parts_alone(tree):
                self._take_back_culprit(tree, report)

    def _is_changed(self) -> bool:
        """Whether the result may differ from the model.

        Of passes that aren't this project's the report isn't believed, nor a class that copies its modules itself.
        """
        return (
            any(record.status != "unchanged" for record in self.records)
            or not all(map(_is_own, self._passes))
            or not all(is_plain(module) or is_script(module) for module in reachable_modules(self.original))
            or Runs(self.original, in_eval=True).is_run_itself
        )

    def could_apply(self, tree: ModelTree) -> list[str]:
        """The passes that weren't named and would change something, where the named ones changed nothing.

        Of graph passes the first graph of the forward tells.
        """
        if self.mode != "inference" or not self._passes or any(record.status == "applied" for record in self.records):
            return []
        named = {item.name for item in self._passes}
        return [name for name in pass_names() if name not in named and self._would_apply(tree, name)]

    def _would_apply(self, tree: ModelTree, name: str) -> bool:
        before = _TreeState(tree.modules())
        try:
            item, context = pass_named(name).made_with({}), self.context()
            if self.mode not in item.modes:
                return False
            item.check(context)
            return item.would_apply(tree, context)
        except Exception as error:  # noqa: BLE001 - the user didn't ask for this pass: one that raises isn't named
            logger.debug("%s can't be tried: %s", name, error)
            before.restore()
            tree.refresh()
            return False

    def _compare(self, done: Sequence[_Done] | None = None) -> ParityReport:
        """The result beside the original; in training in eval too, which is shown where it isn't right there.

        Args:
            done: the passes that stand now, where those are not all.
        """
        assert self._ran is not None
        done = self._done if done is None else done
        precisions = _precisions(done)
        report = judge(self._judging(self._ran.reference(), precisions).compare(self.copy.root))
        if self.mode != "training" or report.verdict == "failed" or not any(one.result.changes for one in done):
            return report
        in_eval = self._compare_in_eval(precisions)
        return in_eval if in_eval is not None and in_eval.verdict == "failed" else report

    def _judging(self, reference: Reference, precisions: tuple[Lowered, ...]) -> Reference:
        """The reference for a result that is less precise by these."""
        if not precisions:
            return reference
        key = id(reference), precisions
        if key not in self._in_kind:
            *before, last = precisions
            self._in_kind[key] = self._judging(reference, tuple(before)).less_precise(last)
        return self._in_kind[key]

    def _compare_in_eval(self, precisions: tuple[Lowered, ...]) -> ParityReport | None:
        """A training result beside the original where both are in eval; None where the original doesn't run so."""
        if self._reference_in_eval is None:
            assert self.samples is not None
            sizes = self._two_sizes(self.samples)
            try:
                self._reference_in_eval = measure_reference(self.original, self.samples, batch_sizes=sizes)
            except LoadError as error:
                self.notes.append(f"the result wasn't compared in eval: {first_line(error).rstrip('.')}")
                self._reference_in_eval = False
        if self._reference_in_eval is False:
            return None
        report = judge(self._judging(self._reference_in_eval, precisions).compare(self.copy.root))
        return replace(report, reason=f"In eval: {report.reason}")

    def _leave_what_parts_alone(self, tree: ModelTree) -> bool:
        """Run a pass again without the pair that the calls don't keep together; whether there is one.

        What the first of a pair gives out may be used on the way to the second by what no recording shows, as by an
        autograd function of the user's.
        """
        with self._quiet(), torch.set_grad_enabled(self.mode == "training"):
            outputs = self._outputs(tolerate=True)
        return any(self._leave_alone(tree, output, "") for output in outputs)

    def _leave_what_parts_elsewhere_alone(self, tree: ModelTree) -> bool:
        """The same for what inference is likely to meet beside the calls: a batch of one row, and gradients that are on."""
        if self.mode == "training" or not any(done.result.changes for done in self._done):
            return False
        return any(
            self._leave_alone(tree, self._output_at(call, gradients=gradients), when)
            for call, gradients, when in self._further_calls()
        )

    def _output_at(self, call: Call, *, gradients: bool) -> Any:
        """What the result gives at one call, or what it raises."""
        with ExitStack() as stack:
            stack.enter_context(self._quiet())
            stack.enter_context(torch.set_grad_enabled(gradients))
            if gradients:
                # Nothing goes backward: what is kept for that would be memory for nothing.
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_forgotten, _forgotten))
            (output,) = self._outputs([call], tolerate=True)
        return output

    def _further_calls(self) -> Iterator[tuple[Call, bool, str]]:
        """Calls that no reference is of: each with whether gradients are on, and how a sentence names it."""
        samples = self.samples
        assert samples is not None
        yield _fresh(min(self._calls, key=_rows_of)), True, "where gradients are on"
        if not samples.dynamic or samples.batch_size is None:
            return
        known = {samples.batch_size, *map(_rows_of, self._calls)}
        for size in dict.fromkeys((1, *(self.batch_sizes or ()))):
            if size not in known:
                with suppress(LoadError):  # the user's function makes no batch of that size: it won't be met then
                    yield _fresh(samples.at(size)), False, f"at a batch size of {size}"
        if 1 not in known:
            for call in samples.rows_alone():
                yield _fresh(call), False, "for a row that is alone"

    def _leave_alone(self, tree: ModelTree, output: Any, when: str) -> bool:
        """Where a call parts a pair, or comes to a rewritten forward as its graph has no place for, run the pass that changed
        it again without these changes; whether it did."""
        if not isinstance(output, UnseenCall):
            return False
        for done in self._done:
            places = [change.place for change in done.result.changes if _is_about(change, output)]
            if not places:
                continue
            left = self._left_alone.setdefault(done.number, {})
            if len(left) >= _MOST_PARTED or not left.keys().isdisjoint(places):
                # A pass that doesn't leave alone what it is told to is no better for another run.
                line = first_line(output)
                self._take_back(tree, done, f"{when}: {line}" if when else line)
            else:
                left.update((place, _why_left_alone(place, output, when)) for place in places)
                self._run_again(tree, done)
            return True
        return False

    def _run_again(self, tree: ModelTree, first: _Done) -> None:
        """Take back this pass and those behind it, and run them anew."""
        self._take_back_from(first.number)
        self._run_from(tree, first.number)

    def _take_back_from(self, number: int) -> None:
        """Take back the pass of this number and those behind it, with their records."""
        for done in reversed(self._done):
            if done.number >= number:
                done.result.rewriter.roll_back()
        self._done = [done for done in self._done if done.number < number]
        self.records = self.records[:number]

    def _wrong_before_a_cast(self) -> tuple[ParityReport, list[_Done]] | None:
        """What is wrong with the passes in front of the first that makes the result less precise, and these passes.

        Judged by what that one allows, with the whole, an error of some hundredths of theirs would be taken for rounding.
        """
        applied = [done for done in self._done if done.result.changes]
        first = next((n for n, done in enumerate(applied) if done.lowered), 0)
        if not first:
            return None
        with taken_back([edit for done in applied[first:] for edit in done.result.rewriter.edits]):
            report = self._compare(applied[:first])
        return (report, applied[:first]) if report.verdict == "failed" else None

    def _take_back_culprit(self, tree: ModelTree, report: ParityReport, among: Sequence[_Done] | None = None) -> None:
        """Find the first pass after which the result is wrong, take it back, and run those behind it once more.

        Args:
            among: the first passes, with all of which it is wrong already; None for all.
        """
        applied = [done for done in self._done if done.result.changes] if among is None else among
        culprit, reason = self._culprit(applied, report.reason)
        self._take_back(tree, culprit, f"{reason}{self._place_of(culprit)}")

    def _place_of(self, culprit: _Done) -> str:
        """A sentence on the module that is wrong first with this pass and without those behind it; "" where none is found."""
        if self.mode != "inference" or self._ran is None:
            return ""
        later = [edit for done in self._done if done.number > culprit.number for edit in done.result.rewriter.edits]
        reference = self._judging(self._ran.reference(), _precisions([culprit]))
        with taken_back(later):
            found = located_module(reference, reference.compare(self.copy.root), self.copy.root)
        return f" {found}" if found.divergence is not None else ""

    def _culprit(self, applied: Sequence[_Done], reason: str, *, right: int = 0) -> tuple[_Done, str]:
        """The first of these passes after which the result is wrong, and the reason: that of all of them is given.

        Args:
            right: after so many of them it is right.
        """
        everything = [done for done in self._done if done.result.changes]
        # The first wrong number of passes is in (low, high].
        low, high = right, len(applied)
        while high - low > 1:
            middle = (low + high) // 2
            later = [edit for done in everything[middle:] for edit in done.result.rewriter.edits]
            with taken_back(later):
                seen = self._compare(applied[:middle])
            if seen.verdict == "failed":
                high, reason = middle, seen.reason
            else:
                low = middle
        return applied[high - 1], reason

    def _take_back(self, tree: ModelTree, culprit: _Done, reason: str) -> None:
        """Roll this pass back, and run those behind it once more."""
        self._take_back_from(culprit.number + 1)
        # It stands last now, and its record stays.
        self._done.pop()
        self._roll_back(self._passes[culprit.number], culprit.record, culprit.result, reason)
        self._run_from(tree, culprit.number + 1)

    def _tell(self, stage: str, done: int, total: int, text: str, name: str = "") -> None:
        self.progress(Progress(stage, done, total, text, name))

    @property
    def precisions(self) -> tuple[Lowered, ...]:
        """What makes the result less precise than the original."""
        return _precisions(self._done)

    @property
    def kept(self) -> list[PassResult]:
        """The results of the passes that stay."""
        return [done.result for done in self._done]


def _precisions(done: Iterable[_Done]) -> tuple[Lowered, ...]:
    return tuple(dict.fromkeys(lowered for one in done if one.result.changes for lowered in one.lowered))


def _is_own(item: Pass) -> bool:
    return type(item).__module__.partition(".")[0] == "passes"


def _is_lossy(item: Pass) -> bool:
    return item.lowers_precision or item.max_error is not None


def size_of(tree: ModelTree, context: Context) -> Size:
    """What the model is made of; of its operations a run tells."""
    parameters = [parameter for parameter in tree.root.parameters() if not is_lazy(parameter)]
    return Size(
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        _operations(tree, context),
    )


def _operations(tree: ModelTree, context: Context) -> int | None:
    if tree.runs is not None and tree.runs.runs:
        recording = tree.runs.runs[0].recording
    else:
        recorder = Recorder(tree.root, tree.modules)
        if context.run_each is None or context.run_each(recorder, 0) is not None:
            return None
        recording = recorder.recording
    return sum(map(_computes, recording.nodes()))


def _computes(node: Node) -> bool:
    """Whether a recorded node is a call that computes, and reads no property such as `x.shape` or `x.grad_fn`."""
    is_call = node.op == "call_function" and not node.meta["asks"]
    return is_call and not (getattr(node.target, "__name__", "") == "__get__" and shape_of(node) is None)


def coverage_record(tree: ModelTree, context: Context) -> CoverageRecord:
    """How much of the model the example calls show to the passes."""
    owners = [module for module in tree.modules() if any(p is not None for p in module._parameters.values())]
    recorded = recorded_runs(tree, context)
    if recorded is None:
        return CoverageRecord(0, len(owners))
    nodes = (node for run in recorded.runs for node in run.recording.nodes())
    read = {id(ref.value) for node in nodes if (ref := tensor_of(node)) is not None}
    unreached = [module for module in owners if not any(id(p) in read for p in module._parameters.values())]
    return CoverageRecord(len(owners) - len(unreached), len(owners), tuple(map(tree.path, unreached)))


def check_requirements(passes: Sequence[Pass], context: Context) -> None:
    """See, before any work, that every pass can do what it is asked to.

    Raises:
        RequirementNotMet: one can't.
    """
    for item in passes:
        item.check(context)


def _fresh(call: Call) -> Call:
    args, kwargs = pytree.tree_map(_cloned, (call.args, call.kwargs))
    return Call(tuple(args), kwargs)


def _rows_of(call: Call) -> int:
    return rows_of((call.args, call.kwargs))


def _is_about(change: Change, error: UnseenCall) -> bool:
    """Whether the call wouldn't have been refused without the change."""
    return error.pair is not None and change.between is not None and set(change.between) == set(error.pair)


def _why_left_alone(place: Place, error: UnseenCall, when: str) -> str:
    assert error.pair is not None
    first, second = error.pair
    if when:
        return f"{place.what}, {when} what {first} gives out isn't what {second} takes, or isn't used by that alone"
    return (
        f"{place.what}, what {first} gives out is used on its way to {second}, as by a reentrant checkpoint or another"
        " autograd function"
    )


def _forgotten(kept: Any) -> Any:
    return None


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _since(started: float) -> float:
    return time.perf_counter() - started
