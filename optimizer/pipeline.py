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
from optimizer.float64 import off_by_one_ulp, random_signs
from optimizer.held_iterators import held_iterators
from optimizer.inputs import Call, Samples
from optimizer.locating import located_module
from optimizer.module_tree import is_script, reachable_modules
from optimizer.parity import ParityReport, Reference, RegionParity, RegionReference, float64_mode, judge
from optimizer.preserve import eager_only, pinned_settings, random_state, seed_torch
from optimizer.provenance import Source
from optimizer.report import CoverageRecord, PassRecord, PlaceRecord, Progress, ProgressFunction, Size
from optimizer.sentences import lack_of_memory
from optimizer.working_copy import Mode, WorkingCopy, private_state
from passes.base import Context, DeclaredError, Pass, PassResult
from passes.errors import PassesError, UnseenCall
from passes.graph.capture import Capture, Island, ModuleGraph, capture, training_flags
from passes.graph.casts import AutocastForward, Precision, root_cast
from passes.graph.edits import AttributeEdit, in_place, taken_back
from passes.graph.formats import DimOrder
from passes.graph.guards import dim_order, ordered_leaves
from passes.graph.interception import intercepted_calls
from passes.graph.program import Program, own_tensors
from passes.graph.recording import Recordings, agree, record
from passes.graph.region import Region
from passes.graph.rewriter import Change, Place
from passes.graph.storage import same_values
from passes.graph.witness import witness_inputs
from passes.program.folded import is_carried
from passes.registry import pass_named, pass_names

logger = logging.getLogger(__name__)

_HALF = frozenset({torch.float16, torch.bfloat16})
# So many numbers show how far a part of a model is rounded; one that gives fewer is run again, at most so many times.
_ENOUGH_NUMBERS = 128
_MOST_NEIGHBOURS = 32
# A pass is run again where some of its changes are to be left alone, which may give way to others.
_MOST_TRIES = 8
# Of the pairs that a run doesn't keep together, each is found by a run of its own: a pass leaves so many changes alone for
# that, and goes as a whole where there are more.
_MOST_PARTED = 8
# What the check of one pass may keep of the activations at a time; more places are looked at in a further run.
_WITNESS_BYTES = 64 << 20


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
    _reference: Reference | None = None
    # Of a training result: the original in eval; False where it doesn't run so.
    _reference_in_eval: Reference | Literal[False] | None = None
    # Those in kind, by the one that they are made of and what they are in.
    _in_kind: dict[tuple[int, tuple[Lowered, ...]], Reference] = field(default_factory=dict)
    _calls: list[Call] = field(default_factory=list)
    # By the training flag of the root.
    _orders: dict[bool, tuple[DimOrder | None, ...]] = field(default_factory=dict)
    _passes: Sequence[Pass] = ()
    _done: list[_Done] = field(default_factory=list)
    # What the pass of this number is told to leave alone from the start.
    _left_alone: dict[int, dict[Place, str]] = field(default_factory=dict)
    # The passes of these numbers are taken back whatever they do, each for the reason.
    _wrong: dict[int, str] = field(default_factory=dict)

    @property
    def mode(self) -> Mode:
        """ "inference" or "training"."""
        return self.copy.mode

    def measure_original(self) -> Reference | None:
        """Run the original at two batch sizes or more, which all results are compared with; None without inputs.

        Raises:
            LoadError: it raises on the example inputs.
        """
        if self.samples is None:
            return None
        self._tell("capture", 0, 3, "running the original")
        sizes = self._two_sizes(self.samples)
        self._reference = Reference.measure(self.original, self.samples, batch_sizes=sizes, draws=2, mode=self.mode)
        self.copy.own_parameters(self._reference.written)
        worked = [size for size in sizes or [] if size in self._reference.batch_sizes]
        self._calls = [self.samples.at(size) for size in worked] if sizes else [self.samples.given]
        # A branch that only one of them takes is to be seen before anything is rewritten.
        self._calls += [self.samples.at(size, draw) for size, draw in self.samples.further]
        if len(self._calls) < 2:
            self.notes.append("only one batch size could be run, so that constants of the batch size aren't found")
        return self._reference

    def _two_sizes(self, samples: Samples) -> list[int] | None:
        if not samples.dynamic or samples.batch_size is None:
            return None
        asked = [size for size in self.batch_sizes or () if size != samples.batch_size]
        # A batch of one is special to many models: it isn't taken for the second size. In training neither is one of two:
        # a BatchNorm over two rows gives plus and minus one, and gradients that are little but rounding.
        default = samples.batch_size + 1 if self.mode == "training" else 2 if samples.batch_size != 2 else 3
        other = next((size for size in asked if size > 1), default)
        return [samples.batch_size, other]

    def capture(self) -> Program:
        """The graphs of the working copy, each of which computes what its module does."""
        captured, recordings = self._captured()
        program = Program.of(captured, recordings, self.mode, self.copy.unregistered())
        if self.mode == "training":
            program.other_states = tuple(self._in_state(flag) for flag in self._other_flags())
        return program

    def _other_flags(self) -> list[bool]:
        """The values that all training flags may be set to, where some have another."""
        flags = {module.training for module in self.copy.root.modules() if hasattr(module, "training")}
        return [flag for flag in (False, True) if flag not in flags or len(flags) > 1]

    def _in_state(self, flag: bool) -> Program:
        """The program of the working copy with all of it in training or all in eval."""
        with training_flags(self.copy.root, flag):
            captured, recordings = self._captured(" in training" if flag else " in eval")
            return Program.of(captured, recordings, self.mode, self.copy.unregistered())

    def _captured(self, when: str = "") -> tuple[Capture, Recordings | None]:
        root = self.copy.root
        recordings = self._record(when)
        self._tell("capture", 1, 3, "tracing")
        structures = recordings.structures if recordings else None
        called = recordings.counts if recordings else None
        uncalled = frozenset(id(m) for m in root.modules() if called is not None and id(m) not in called)
        with held_iterators(root.modules()):
            captured = capture(root, structures, uncalled, recordings.ranks if recordings else None)
        for module, name in captured.leaks:
            self.copy.restore_attribute(module, name)
        self._tell("capture", 2, 3, "comparing the graphs with the original")
        if recordings is not None:
            self._leave_wrong_graphs(captured)
        self._tell("capture", 3, 3, "")
        return captured, recordings

    def _record(self, when: str) -> Recordings | None:
        root, besides = self.copy.root, self.copy.unregistered()
        if not self._calls:
            return None
        with self._quiet():
            try:
                runs = [record(root, call.args, dict(call.kwargs), besides) for call in self._fresh_calls()]
            except Exception as error:  # noqa: BLE001 - a forward may not bear being watched: it is then not recorded
                self.notes.append(f"the runs{when} couldn't be recorded ({type(error).__name__}: {_first_line(error)})")
                return None
        return agree(root, runs, besides)

    def _fresh_calls(self) -> list[Call]:
        """Copies of the calls, as a forward may write to its inputs."""
        return [_fresh(call) for call in self._calls]

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Run the working copy eagerly and leave no trace of it: its modules are told by identity, so none is copied."""
        with ExitStack() as stack:
            stack.enter_context(random_state(0))
            stack.enter_context(pinned_settings())
            stack.enter_context(eager_only())
            stack.enter_context(torch.no_grad())
            stack.enter_context(self._private_state())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            yield

    def _private_state(self) -> AbstractContextManager[None]:
        root, reference = self.copy.root, self._reference
        own = {name for name, _ in root.named_parameters(remove_duplicate=False)}
        return private_state(root, () if reference is None else reference.written & own)

    def _leave_wrong_graphs(self, captured: Capture) -> None:
        """Make islands of the forwards that answer otherwise by their graph: a trace may have frozen something."""
        root = self.copy.root
        with self._quiet():
            wanted = self._outputs()
        self._orders.setdefault(root.training, _orders_of(wanted))
        while captured.graphs:
            with self._quiet():
                with in_place([_installed(graph) for graph in captured.graphs.values()]):
                    if _same(wanted, self._outputs(tolerate=True)):
                        return
                culprits = self._culprits(captured)
            if not culprits:
                # Wrong together, right alone: nothing is known then.
                culprits = dict.fromkeys(captured.graphs, "its graph and those of others don't go together")
            for key, reason in culprits.items():
                graph = captured.graphs.pop(key)
                captured.islands[key] = Island(graph.path, graph.module, reason)

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

    def _culprits(self, captured: Capture) -> dict[int, str]:
        found: dict[int, str] = {}
        busy = False

        def around(module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            nonlocal busy
            graph = captured.graphs.get(id(module))
            if graph is None or busy or id(module) in found:
                return call(*args, **kwargs)
            busy = True
            reason = self._why_wrong(graph, args, kwargs)
            busy = False
            if reason:
                found[id(module)] = reason
            return call(*args, **kwargs)

        with intercepted_calls(self.copy.root, around):
            # A forward may not bear being watched: what was found until then counts.
            self._outputs(tolerate=True)
        return found

    def _why_wrong(self, graph: ModuleGraph, args: Any, kwargs: Any) -> str | None:
        by_graph = _installed(graph)

        def run(forward: Callable[..., Any]) -> Any:
            seed_torch(0)
            own_args, own_kwargs = pytree.tree_map(_cloned, (args, kwargs))
            return forward(*own_args, **own_kwargs)

        state = torch.get_rng_state()
        try:
            wanted = run(graph.module.forward)
            try:
                with in_place([by_graph]):
                    got = run(graph.module.forward)
            except Exception as error:  # noqa: BLE001 - the graph is wrong, whatever it raises
                return f"its graph raises where its forward doesn't ({type(error).__name__}: {_first_line(error)})"
        finally:
            torch.set_rng_state(state)
        return None if _same(wanted, got) else "its graph answers otherwise: a trace froze something of its forward"

    def run(self, program: Program, passes: Sequence[Pass]) -> None:
        """Run the passes in order; each is kept or taken back.

        Raises:
            OptimizeFailed: a pass fails or is rolled back, with `strict` or where it is a guarantee.
        """
        self._passes = passes
        self._run_from(program, 0)
        self._tell("optimize", len(passes), len(passes) + 1, "comparing the result with the original")

    def _run_from(self, program: Program, first: int) -> None:
        context = self.context()
        for number, item in enumerate(self._passes[first:], first):
            if _is_lossy(item):
                self._find_wrong_behind(program, number, context)
            self._run_numbered(program, number, context)

    def _run_numbered(self, program: Program, number: int, context: Context) -> None:
        item = self._passes[number]
        self._tell("optimize", number, len(self._passes) + 1, item.name, item.name)
        context = replace(context, left_alone=self._left_alone.get(number, {}))
        if context.example_calls:
            context = replace(context, judge=partial(self._judge, item.declared_error))
        self._run_one(program, number, item, context)

    def _find_wrong_behind(self, program: Program, number: int, context: Context) -> None:
        """Find the passes behind one that is less precise which are wrong, by runs of them without it.

        Judged by what that one allows, an error of some hundredths of theirs would be taken for rounding. What compiles does
        so for the dtypes that it meets: in others it makes other code, which shows nothing of this.
        """
        behind = [
            later
            for later, item in enumerate(self._passes[number:], number)
            if not (_is_lossy(item) or item.is_barrier or later in self._wrong)
        ]
        if self._reference is None or not behind:
            return
        before = sum(1 for done in self._done if done.result.changes)
        while True:
            for later in behind:
                self._run_numbered(program, later, context)
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
        flag = self.copy.root.training
        orders, others = self._orders.get(flag, ()), self._orders.get(not flag)
        context = Context(self.mode, self.device, calls, orders, others)
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
            with self._quiet(), watch:
                root(*call.args, **call.kwargs)
        except Exception as error:  # noqa: BLE001 - a run of foreign code under watch may raise anything
            return f"{type(error).__name__}: {_first_line(error)}"
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
            return f"{type(error).__name__}: {_first_line(error)}"
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

    def _run_one(self, program: Program, number: int, item: Pass, context: Context) -> None:
        for tries_left in reversed(range(_MOST_TRIES)):
            ran = self._attempt(program, item, context)
            if ran is None:
                return
            record, result = ran
            if (reason := self._wrong.get(number)) is not None and result.changes:
                self.records.append(record)
                self._roll_back(item, record, result, reason)
                return
            found = (
                self._check_changes(program, record, result, item.declared_error)
                if result.changes and self._calls
                else _Checked()
            )
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

    def _attempt(self, program: Program, item: Pass, context: Context) -> tuple[PassRecord, PassResult] | None:
        """Run the pass; None where it raises, which is recorded.

        Raises:
            OptimizeFailed: with `strict`, or of a guarantee, where it raises; always where it wrote to the caller's weights.
        """
        started = time.perf_counter()
        tree = _TreeState(program.modules())
        sources = self._sources(program)
        try:
            result = item.run(program, context)
        except PassesError:
            raise
        except Exception as error:
            # A ProgramPass takes back what it did; of any other pass only the tree as it was is known.
            tree.restore()
            program.refresh()
            self._refuse_writes(item, sources)
            reason = f"{type(error).__name__}: {_first_line(error)}"
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

    def _sources(self, program: Program) -> list[tuple[Source, torch.Tensor | None]]:
        """The caller's tensors, and the values of those that a run writes to and puts back, which moves their versions."""
        named = [*self.original.named_parameters(), *self.original.named_buffers()]
        for path, module in program.unregistered:
            tensors = own_tensors(self.copy.originals[id(module)])
            named += ((f"{path}.{name}", tensor) for name, tensor in tensors.items())
        scripted = (module for module in reachable_modules(self.copy.root) if is_script(module))
        put_back = {id(tensor) for module in scripted for tensor in module.buffers(recurse=False)}
        return [
            (Source.of(name, tensor), tensor.detach().clone() if id(tensor) in put_back else None)
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

    def _check_changes(
        self, program: Program, record: PassRecord, result: PassResult, declared: DeclaredError | None
    ) -> _Checked:
        """Compare each change with what it replaced, on what the original flow gives it, up to the first wrong one."""
        regions = {n: c.before for n, c in enumerate(result.changes) if c.before is not None and c.after is not None}
        found = _Checked()
        for change, pairs in result.checked:
            for algebra, rounding in pairs:
                found.add(change, algebra, rounding)
                record.parity, record.error = found.worst, found.error
                if found.wrong is not None:
                    return found
        autocast = self._autocast()
        while regions:
            try:
                inputs = self._witness(program, result, regions)
            except Exception as error:  # noqa: BLE001 - a run of foreign code under watch may raise anything
                if self._runs_without(result):
                    text = f"{type(error).__name__}: {_first_line(error)}"
                    found.wrong = f"the run that shows what it is given raises ({text})"
                # Else an earlier pass is to blame: the comparison of the whole finds which.
                return found
            if not inputs:
                # Never reached in the run: there is nothing to compare.
                break
            # From the last change to the first: each is compared on the tree that it was made in.
            with ExitStack() as later:
                later.enter_context(pinned_settings())
                for number in reversed(range(len(result.changes))):
                    change = result.changes[number]
                    if number in inputs:
                        before = regions.pop(number)
                        values = inputs[number]
                        for algebra, precision in _check_change(before, change, values, self.mode, autocast, declared):
                            found.add(change, algebra, precision)
                            record.parity, record.error = found.worst, found.error
                            if found.wrong is not None:
                                return found
                    later.enter_context(taken_back(change.edits))
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
        dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
        given, autocast = values, self._autocast()
        if torch.float32 in dtypes and dtypes & _HALF and not _runs(old, values):
            # Under an autocast, which casts what is read: the part by itself computes in float32.
            values = tuple(_raised(value) for value in values)
        is_half = any(isinstance(value, torch.Tensor) and value.dtype in _HALF for value in values)
        with pinned_settings():
            found = [_check(old, new, values, is_half, declared)]
            if autocast is not None and found[0][0].ok:
                in_half = _reference_in_half(_under(autocast, old), given)
                in_half = in_half if declared is None else in_half.allowing(declared)
                found.append((found[0][0], in_half.compare(_under(autocast, new), by_own_error=True)))
        return found

    def _witness(
        self, program: Program, result: PassResult, regions: dict[int, Region]
    ) -> dict[int, tuple[torch.Tensor, ...]]:
        # Each change is looked at on few rows: it is the algebra that shows there, at every element.
        call = min(self._fresh_calls(), key=_rows)
        root = self.copy.root
        # The buffers of then are kept, not those of now: in training a run writes to them.
        with taken_back(result.rewriter.edits), self._quiet():
            return witness_inputs(
                program,
                regions,
                result.rewriter.before,
                lambda: root(*call.args, **call.kwargs),
                limit=_WITNESS_BYTES,
            )

    def _runs_without(self, result: PassResult) -> bool:
        """Whether the tree as it was before the pass runs."""
        with taken_back(result.rewriter.edits), self._quiet():
            return not any(isinstance(outputs, Exception) for outputs in self._outputs(tolerate=True))

    def _roll_back(self, item: Pass, record: PassRecord, result: PassResult, reason: str) -> None:
        result.rewriter.roll_back()
        record.status, record.reason, record.remarks, record.detail = "rolled-back", reason, (), None
        if self.strict or item.is_guarantee:
            raise OptimizeFailed(f"{record.name} was rolled back: {reason}")

    def verify(self, program: Program) -> ParityReport | None:
        """Compare the whole with the original; take back the pass that makes it wrong, as often as there is one.

        Raises:
            OptimizeFailed: a pass is rolled back, with `strict` or where it is a guarantee.
            ParityError: the result is wrong without any pass: it can't be given to the caller.
        """
        if self._reference is None:
            return None
        while True:
            report = self._compare()
            if report.verdict != "failed" and (wrong := self._wrong_before_a_cast()) is not None:
                self._take_back_culprit(program, *wrong)
                continue
            if report.verdict != "failed":
                if self._leave_what_parts_elsewhere_alone(program):
                    continue
                return report
            if not any(done.result.changes for done in self._done):
                raise ParityError(
                    f"Without any pass the result doesn't compute what the model did ({report.reason}): the model, or a pass,"
                    " writes to its weights."
                )
            if not self._leave_what_parts_alone(program):
                self._take_back_culprit(program, report)

    def could_apply(self, program: Program) -> list[str]:
        """The passes that weren't named and would change something, where the named ones changed nothing.

        The model isn't run for it.
        """
        if self.mode != "inference" or not self._passes or any(record.status == "applied" for record in self.records):
            return []
        named = {item.name for item in self._passes}
        return [name for name in pass_names() if name not in named and self._would_apply(program, name)]

    def _would_apply(self, program: Program, name: str) -> bool:
        tree = _TreeState(program.modules())
        try:
            item, context = pass_named(name).made_with({}), self.context()
            if self.mode not in item.modes:
                return False
            item.check(context)
            return item.would_apply(program, context)
        except Exception as error:  # noqa: BLE001 - the user didn't ask for this pass: one that raises isn't named
            logger.debug("%s can't be tried: %s", name, error)
            tree.restore()
            program.refresh()
            return False

    def _compare(self, done: Sequence[_Done] | None = None) -> ParityReport:
        """The result beside the original; in training in eval too, which is shown where it isn't right there.

        Args:
            done: the passes that stand now, where those are not all.
        """
        assert self._reference is not None
        done = self._done if done is None else done
        precisions = _precisions(done)
        report = judge(self._judging(self._reference, precisions).compare(self.copy.root))
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
                self._reference_in_eval = Reference.measure(self.original, self.samples, batch_sizes=sizes, draws=1)
            except LoadError as error:
                self.notes.append(f"the result wasn't compared in eval: {_first_line(error).rstrip('.')}")
                self._reference_in_eval = False
        if self._reference_in_eval is False:
            return None
        report = judge(self._judging(self._reference_in_eval, precisions).compare(self.copy.root))
        return replace(report, reason=f"In eval: {report.reason}")

    def _leave_what_parts_alone(self, program: Program) -> bool:
        """Run a pass again without the pair that the calls don't keep together; whether there is one.

        What the first of a pair gives out may be used on the way to the second by what no recording shows, as by an
        autograd function of the user's.
        """
        with self._quiet(), torch.set_grad_enabled(self.mode == "training"):
            outputs = self._outputs(tolerate=True)
        return any(self._leave_alone(program, output, "") for output in outputs)

    def _leave_what_parts_elsewhere_alone(self, program: Program) -> bool:
        """The same for what inference is likely to meet beside the calls: a batch of one row, and gradients that are on."""
        if self.mode == "training" or not any(done.result.changes for done in self._done):
            return False
        for call, gradients, when in self._further_calls():
            with ExitStack() as stack:
                stack.enter_context(self._quiet())
                stack.enter_context(torch.set_grad_enabled(gradients))
                if gradients:
                    # Nothing goes backward: what is kept for that would be memory for nothing.
                    stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_forgotten, _forgotten))
                (output,) = self._outputs([call], tolerate=True)
            if self._leave_alone(program, output, when):
                return True
        return False

    def _further_calls(self) -> Iterator[tuple[Call, bool, str]]:
        """Calls that no reference is of: each with whether gradients are on, and how a sentence names it."""
        samples = self.samples
        assert samples is not None
        yield _fresh(min(self._calls, key=_rows)), True, "where gradients are on"
        if not samples.dynamic or samples.batch_size is None:
            return
        known = {samples.batch_size, *map(_rows, self._calls)}
        for size in dict.fromkeys((1, *(self.batch_sizes or ()))):
            if size not in known:
                with suppress(LoadError):  # the user's function makes no batch of that size: it won't be met then
                    yield _fresh(samples.at(size)), False, f"at a batch size of {size}"
        if 1 not in known:
            for call in samples.rows_alone():
                yield _fresh(call), False, "for a row that is alone"

    def _leave_alone(self, program: Program, output: Any, when: str) -> bool:
        """Where a call parts a pair, or comes to a rewritten forward as its graph has no place for, run the pass that changed
        it again without these changes; whether it did."""
        if not isinstance(output, UnseenCall):
            return False
        for done in self._done:
            places = [change.place for change in done.result.changes if _is_about(program, change, output)]
            if not places:
                continue
            left = self._left_alone.setdefault(done.number, {})
            if len(left) >= _MOST_PARTED or not left.keys().isdisjoint(places):
                # A pass that doesn't leave alone what it is told to is no better for another run.
                line = _first_line(output)
                self._take_back(program, done, f"{when}: {line}" if when else line)
            else:
                left.update((place, _why_left_alone(place, output, when)) for place in places)
                self._run_again(program, done)
            return True
        return False

    def _run_again(self, program: Program, first: _Done) -> None:
        """Take back this pass and those behind it, and run them anew."""
        self._take_back_from(first.number)
        self._run_from(program, first.number)

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

    def _take_back_culprit(self, program: Program, report: ParityReport, among: Sequence[_Done] | None = None) -> None:
        """Find the first pass after which the result is wrong, take it back, and run those behind it once more.

        Args:
            among: the first passes, with all of which it is wrong already; None for all.
        """
        applied = [done for done in self._done if done.result.changes] if among is None else among
        culprit, reason = self._culprit(applied, report.reason)
        self._take_back(program, culprit, f"{reason}{self._place_of(culprit)}")

    def _place_of(self, culprit: _Done) -> str:
        """A sentence on the module that is wrong first with this pass and without those behind it; "" where none is found."""
        if self.mode != "inference" or self._reference is None:
            return ""
        later = [edit for done in self._done if done.number > culprit.number for edit in done.result.rewriter.edits]
        reference = self._judging(self._reference, _precisions([culprit]))
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

    def _take_back(self, program: Program, culprit: _Done, reason: str) -> None:
        """Roll this pass back, and run those behind it once more."""
        self._take_back_from(culprit.number + 1)
        # It stands last now, and its record stays.
        self._done.pop()
        self._roll_back(self._passes[culprit.number], culprit.record, culprit.result, reason)
        self._run_from(program, culprit.number + 1)

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


def _is_lossy(item: Pass) -> bool:
    return item.lowers_precision or item.max_error is not None


def size_of(program: Program) -> Size:
    """What the program is made of."""
    parameters = [parameter for parameter in program.root.parameters() if not is_lazy(parameter)]
    calls = sum(node.op in ("call_module", "call_function", "call_method") for node in program.nodes())
    called = [module for node in program.nodes() if (module := program.module_of(node)) is not None]
    # A call of a module with a graph is what is in the graph; one of a BatchNorm that was folded computes nothing.
    inner = sum(id(module) in program.graphs or is_carried(module) for module in called)
    return Size(
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        calls - inner,
    )


def coverage_record(program: Program) -> CoverageRecord:
    """The coverage as the report holds it."""
    coverage = program.coverage()
    islands = tuple(PlaceRecord(path, reason) for path, reason in coverage.islands)
    return CoverageRecord(coverage.reached, coverage.parameterised, coverage.graphs, coverage.recorded, islands)


def check_requirements(passes: Sequence[Pass], context: Context) -> None:
    """See, before any work, that every pass can do what it is asked to.

    Raises:
        RequirementNotMet: one can't.
    """
    for item in passes:
        item.check(context)


def _check_change(
    before: Region,
    change: Change,
    values: tuple[torch.Tensor, ...],
    mode: Mode,
    autocast: torch.dtype | None,
    declared: DeclaredError | None,
) -> Iterator[tuple[RegionParity, RegionParity | None]]:
    """Whether the region computes with the change what it computed without it, as `_check`; in training, in eval too.

    Args:
        autocast: the dtype of an autocast around the whole: under that it is looked at as well, as kernels are others there.
        declared: the error that the pass declares.
    """
    after, given = change.after, values
    assert after is not None
    with taken_back(change.edits):
        read = before.read_tensors()
        held = {tensor.dtype for tensor in (*read, *(p for module in before.modules for p in module.parameters()))}
        if torch.float32 in held and not held & _HALF:
            # Under an autocast around the whole, which casts what is read: the part by itself computes in float32.
            values = tuple(_raised(value) for value in values)
        flowing = (*values, *read)
    is_half = any(isinstance(value, torch.Tensor) and value.dtype in _HALF for value in flowing)

    def old(*values: Any) -> Any:
        with taken_back(change.edits), before.private_state():
            return before(*values)

    def new(*values: Any) -> Any:
        with after.private_state():
            return after(*values)

    algebra, rounding = _check(old, new, values, is_half, declared)
    yield algebra, rounding
    if autocast is not None and algebra.ok:
        cast = _reference_in_half(_under(autocast, old), given)
        cast = cast if declared is None else cast.allowing(declared)
        yield algebra, cast.compare(_under(autocast, new), by_own_error=True)
    if mode == "training" and any(module.training for module in before.modules):
        # What running statistics are for shows in eval alone.
        with ExitStack() as stack:
            for module in before.modules:
                stack.enter_context(training_flags(module, False))
            yield _check(old, new, values, is_half, declared)


def _under(autocast: torch.dtype, region: Callable[..., Any]) -> Callable[..., Any]:
    def run(*values: Any) -> Any:
        tensors = (value for value in values if isinstance(value, torch.Tensor))
        device = next((tensor.device.type for tensor in tensors), "cpu")
        with torch.autocast(device, autocast, cache_enabled=False):
            return region(*values)

    return run


def _check(
    old: Callable[..., Any],
    new: Callable[..., Any],
    values: tuple[torch.Tensor, ...],
    is_half: bool,
    declared: DeclaredError | None,
) -> tuple[RegionParity, RegionParity | None]:
    """Whether both compute the same; and whether the new one is as precise, where that is asked.

    A rewrite may sum in another order, and a few elements show too little of what rounding does to judge it by them. In
    float64 what is left is the algebra, and the rounding of the new weights, which the noise of the old part covers. In
    float16 and bfloat16 that noise covers too much: there the new part has to be about as close to float64 as the old
    one. What rounding does otherwise is judged on the whole.
    """

    def in_float64(*values: Any) -> Any:
        # It may write to what it is given.
        copies = tuple(map(_cloned, values))
        with float64_mode():
            outputs = new(*values)
        # Each in the dtype that it gives by itself, which needn't be that of what goes in.
        return pytree.tree_map(_as_dtype_of, outputs, new(*copies))

    reference = _reference_in_half(old, values) if is_half else RegionReference.measure(old, [values])
    if declared is not None:
        reference = reference.allowing(declared)
    if not reference.in_float64:
        return reference.compare(new), None
    algebra = reference.compare(in_float64)
    return algebra, reference.compare(new, by_own_error=True) if is_half and algebra.ok else None


def _reference_in_half(old: Callable[..., Any], values: tuple[torch.Tensor, ...]) -> RegionReference:
    return RegionReference.measure(old, [values, *_neighbours(old, values)])


def _neighbours(region: Callable[..., Any], values: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The inputs off by one unit in the last place, as often as it takes to see many rounding errors of the region.

    How far one number is rounded is chance: of few numbers the region's own error may be none at all. Where no floats go
    in, there is nothing to be off.
    """
    if not any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in values):
        return
    with torch.no_grad():
        outputs = pytree.tree_leaves(region(*values))
    numbers = sum(leaf.numel() for leaf in outputs if isinstance(leaf, torch.Tensor))
    generator = torch.Generator().manual_seed(0)
    for _ in range(min(_MOST_NEIGHBOURS, _ENOUGH_NUMBERS // max(numbers, 1))):
        signs = random_signs(generator)
        yield tuple(
            off_by_one_ulp(value, signs) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for value in values
        )


def _runs(region: Callable[..., Any], values: tuple[Any, ...]) -> bool:
    try:
        with torch.no_grad():
            region(*map(_cloned, values))
    except RuntimeError:
        return False
    return True


def _raised(value: Any) -> Any:
    return value.to(torch.float32) if isinstance(value, torch.Tensor) and value.dtype in _HALF else value


def _fresh(call: Call) -> Call:
    args, kwargs = pytree.tree_map(_cloned, (call.args, call.kwargs))
    return Call(tuple(args), kwargs)


def _rows(call: Call) -> int:
    tensors = [leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, torch.Tensor)]
    return next((len(tensor) for tensor in tensors if tensor.dim()), 0)


def _is_about(program: Program, change: Change, error: UnseenCall) -> bool:
    """Whether the call wouldn't have been refused without the change."""
    if error.pair is not None and change.between is not None:
        return set(change.between) == set(error.pair)
    if error.pair is not None:
        return {program.where(node) for node in change.region}.issuperset(error.pair)
    return error.rewritten is not None and any(program.home(node).path == error.rewritten for node in change.region)


def _why_left_alone(place: Place, error: UnseenCall, when: str) -> str:
    if error.pair is None:
        what, _, _ = _first_line(error).removeprefix(f"{type(error).__name__}: ").partition(": ")
        return f"{place.what}, {when}{' ' * bool(when)}{what}"
    first, second = error.pair
    if when:
        return f"{place.what}, {when} what {first} gives out isn't what {second} takes, or isn't used by that alone"
    return (
        f"{place.what}, what {first} gives out is used on its way to {second}, as by a reentrant checkpoint or another"
        " autograd function"
    )


def _forgotten(kept: Any) -> Any:
    return None


def _as_dtype_of(leaf: Any, other: Any) -> Any:
    return leaf.to(other.dtype) if isinstance(leaf, torch.Tensor) and isinstance(other, torch.Tensor) else leaf


def _installed(graph: ModuleGraph) -> AttributeEdit:
    return AttributeEdit(graph.module, "forward", graph.forward())


def _same(wanted: Any, got: Any) -> bool:
    """Equal to the bit, in the same containers."""
    mine, my_spec = pytree.tree_flatten(wanted)
    theirs, their_spec = pytree.tree_flatten(got)
    return my_spec == their_spec and all(_same_leaf(a, b) for a, b in zip(mine, theirs, strict=True))


def _same_leaf(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b)
    return same_values(a, b)


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _orders_of(outputs: Sequence[Any]) -> tuple[DimOrder | None, ...]:
    first, *others = (ordered_leaves(output) for output in outputs)
    alike = [leaves for leaves in others if len(leaves) == len(first)]
    return tuple(dim_order(leaves) for leaves in zip(first, *alike, strict=True))


def _first_line(error: BaseException) -> str:
    if lack := lack_of_memory(error):
        return lack
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _since(started: float) -> float:
    return time.perf_counter() - started
