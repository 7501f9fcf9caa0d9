"""Try a graph pass on the graphs of the example inputs, check its changes, and install it for later graphs."""

from __future__ import annotations

import re
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from passes.base import Change, Context, Edit, ModelTree, PassResult, Place, Remark, Skip
from passes.graph.backend import GRAPH_CALL, Applied, GraphCall, Step, compilation_of
from passes.graph.captured import CapturedGraph, Modules, function_of
from passes.graph.edits import AttributeEdit, undo_all
from passes.graph.effects import Memory
from passes.graph.graph_pass import GraphChange, GraphPass, GraphRewriter, RegionCheck
from passes.graph.recording import Runs, recorded_runs, tensor_of, users_of
from passes.torch_private import COMPILED_CALL, active_transforms


def try_on_graphs(item: GraphPass, tree: ModelTree, context: Context) -> PassResult:
    """Rewrite the graphs of the example inputs, and check each change on real activations.

    The changes that prove right are installed: the pass makes them again in each graph that later calls capture.
    """
    writer = _Installed(tree, context)
    runs = recorded_runs(tree, context)
    if runs is not None and not runs.failure and not any(item.is_for(run.recording) for run in runs.runs):
        # A capture takes the time of many calls.
        told = dict.fromkeys(skip for run in runs.runs for skip in item.left_out(tree, run.recording))
        if context.explain and not told:
            told[Skip("", "a run of the model makes no call that the pass is for")] = None
        return PassResult((), tuple(told), writer)
    trial = _Trial(item, context)
    try:
        before = writer.passes
        writer.install((*before, _Tried(trial)))
        trial.run(writer.call)
        compilation = compilation_of(writer.call)
        if compilation.compiled.is_split and runs is not None and not runs.failure and not trial.raised:
            trial.skips.update(dict.fromkeys(_outside_of_graphs(tree, runs, compilation.read)))
        if trial.raised and trial.changes and context.run_compiled is not None:
            writer.install_instead(before)
            if context.run_compiled(nullcontext()) is not None:
                # Without the changes, the captured graphs raise too: they aren't those of the model.
                trial.clear()
        checked = tuple(trial.checked())
        if trial.changes:
            kept = frozenset(trial.changes)
            writer.install_instead((*before, Applied(item, trial.settings, kept, trial.token)))
        else:
            writer.roll_back()
    except BaseException:
        writer.roll_back()
        raise
    writer.changes = list(trial.changes.values())
    return PassResult(tuple(writer.changes), tuple(trial.skips), writer, tuple(trial.remarks), checked=checked)


def _outside_of_graphs(tree: ModelTree, runs: Runs, read: Collection[str]) -> list[Skip]:
    """A skip for each outermost module whose calls use parameters and buffers of which no captured graph reads any.

    Such as the layers of torch.nn in a loop in which a graph breaks, which torch.compile then runs as written.
    """
    paths = Modules(tree.root).tensors
    is_inside: dict[str, bool] = {}
    for node in (node for run in runs.runs for node in run.recording.nodes()):
        ref = tensor_of(node)
        if ref is not None and users_of(node) and (path := paths.get(id(ref.value))):
            owner = tree.path(ref.owner)
            is_inside[owner] = is_inside.get(owner, False) or path in read
    inside = [path for path, is_read in is_inside.items() if is_read]
    outermost = dict.fromkeys(_outermost(path, inside) for path, is_read in is_inside.items() if not is_read)
    return [Skip(path, _OUTSIDE) for path in outermost]


_OUTSIDE = (
    "it runs outside of the graphs that torch.compile captures: TORCH_LOGS=graph_breaks in the environment shows why"
)


def _outermost(path: str, others: Collection[str]) -> str:
    """The shortest beginning of a path that contains none of the others."""
    names = path.split(".")
    beginnings = (".".join(names[:count]) for count in range(1, len(names)))
    return next((each for each in beginnings if not any(f"{other}.".startswith(f"{each}.") for other in others)), path)


class _Installed:
    """Installs the list of passes in the root's `GraphCall`, as edits that can be undone."""

    def __init__(self, tree: ModelTree, context: Context) -> None:
        self.tree = tree
        self._open_dims = _open_dims(context.example_calls)
        self.root = tree.root
        self.edits: list[Edit] = []
        self.changes: list[Change] = []
        self.precision = None

    @property
    def call(self) -> GraphCall:
        call = self.root.__dict__[GRAPH_CALL]
        assert isinstance(call, GraphCall)
        return call

    @property
    def passes(self) -> tuple[Step, ...]:
        """The graph passes that were installed before this one."""
        call = self.root.__dict__.get(GRAPH_CALL)
        return call.passes if isinstance(call, GraphCall) else ()

    def install(self, passes: tuple[Step, ...]) -> None:
        """Make these the passes that rewrite the root's graphs."""
        if GRAPH_CALL not in self.root.__dict__:
            # Reuse the captures of an earlier pass that changed nothing.
            call = self.tree.graph_call = self.tree.graph_call or GraphCall(
                self.root, (), self._open_dims, self.tree.hooked
            )
            self._do(AttributeEdit(self.root, GRAPH_CALL, call))
        # The copy of an earlier result has a `GraphCall`, but runs as written.
        self._do(AttributeEdit(self.root, COMPILED_CALL, self.call))
        self._do(AttributeEdit(self.call, "is_for_files", False))
        self._do(AttributeEdit(self.call, "passes", passes))

    def install_instead(self, passes: tuple[Step, ...]) -> None:
        """Replace the list of the last `install`."""
        self.edits.pop().undo()
        self._do(AttributeEdit(self.call, "passes", passes))

    def _do(self, edit: Edit) -> None:
        edit.apply()
        self.edits.append(edit)

    def roll_back(self) -> None:
        """Undo everything; the next pass captures new graphs."""
        undo_all(self.edits)
        self.edits.clear()
        if self.changes:
            self.tree.graph_call = self.root.__dict__.get(GRAPH_CALL)


def _open_dims(calls: Sequence[Any]) -> list[tuple[int, int]]:
    """The dims in which the calls differ: the index of the tensor among the arguments, and the dim."""
    shapes = [
        [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in pytree.tree_leaves(call)]
        for call in calls
    ]
    if len({len(each) for each in shapes}) != 1:
        return []
    return [
        (number, dim)
        for number, each in enumerate(zip(*shapes, strict=True))
        if None not in each and len({len(shape) for shape in each if shape is not None}) == 1
        for dim, sizes in enumerate(zip(*(shape for shape in each if shape is not None), strict=True))
        if len(set(sizes)) > 1
    ]


class _Tried:
    """A trial as a step of the call.

    The reference is weak, so that code which saves and restores the state of modules doesn't reach the trial's record.
    """

    def __init__(self, trial: _Trial) -> None:
        self._trial = weakref.ref(trial)
        self.token = trial.token

    def rewrite(self, captured: CapturedGraph, inputs: Sequence[Any]) -> CapturedGraph:
        trial = self._trial()
        return captured if trial is None else trial.rewrite(captured, inputs)

    def done(self, graph: fx.Graph) -> None:
        trial = self._trial()
        ends = trial is not None and graph is trial.whole
        if ends and any(node.op.startswith("call") for node in graph.nodes):
            raise _Enough


class _Enough(BaseException):
    """Ends a run after its only graph. A BaseException, so that the forward doesn't catch it as an error."""


@dataclass(eq=False)
class _Trial:
    """A trial run of a pass: makes all changes that are not excluded, and records them."""

    item: GraphPass
    context: Context
    # The only graph of the forward, if an earlier pass has shown it; it ends the run before it computes
    whole: fx.Graph | None = None
    token: object = field(default_factory=object)
    changes: dict[Place, Change] = field(default_factory=dict)  # the changes by place
    # skips, remarks: these without duplicates, since one place may be captured more than once
    skips: dict[Skip, None] = field(default_factory=dict)
    remarks: dict[Remark, None] = field(default_factory=dict)
    raised: bool = False  # whether the run raised
    _made: list[tuple[CapturedGraph, list[GraphChange]]] = field(default_factory=list)
    # The graphs, with the checks of their new changes, and the inputs with which they were called
    _to_check: list[tuple[CapturedGraph, list[tuple[Place, RegionCheck]], list[Any]]] = field(default_factory=list)

    def clear(self) -> None:
        self.changes.clear()
        self.remarks.clear()
        self._to_check.clear()

    @property
    def settings(self) -> Context:
        """The part of the context that outlives this run and is stored with the result."""
        return Context(self.context.mode, self.context.device)

    def run(self, call: GraphCall) -> None:
        """Run the model on the example inputs.

        Raises:
            Exception: any error of the pass.
        """
        assert self.context.run_compiled is not None
        compilation = compilation_of(call)
        compilation.error = None
        if compilation.is_complete and len(compilation.graphs) == 1:
            # An earlier pass has run all calls by this graph, so there is nothing else to be seen.
            self.whole = compilation.graphs[0].captured.graph
        try:
            failure = self.context.run_compiled(compilation.noting_calls())
            compilation.is_complete = failure is None
        except _Enough:
            failure = None
        if compilation.error is not None:
            raise compilation.error
        if failure is not None:
            self.raised = True
            self.skips[Skip("", f"it raises where torch.compile captures its graphs ({failure})")] = None
        elif not compilation.graphs:
            self.skips[Skip("", compilation.why_nothing())] = None
        for program in compilation.graphs:
            changes = [change for captured, made in self._made for change in made if captured.is_of(program.captured)]
            for paths in program.other_owners():
                self._add_for_other(changes, paths)
        self._made.clear()

    def _add_for_other(self, changes: Sequence[GraphChange], paths: Mapping[str, str]) -> None:
        """Record the changes for equal modules that share the graph: the paths of their tensors by those of the first."""
        renamed = {_renamed(old, new) for old, new in paths.items() if old != new}
        if len(renamed) == 1:
            ((old, new),) = renamed
            pattern = re.compile(rf"(?<![\w.]){re.escape(old)}(?=\.|$|[ ,:])")
            for change in changes:
                where, what = (pattern.sub(new, text) for text in (change.where, change.what))
                found = Change(where, what, change.number)
                self.changes.setdefault(found.place, found)

    def rewrite(self, captured: CapturedGraph, inputs: Sequence[Any]) -> CapturedGraph:
        graph = GraphRewriter(captured, self.context.left_alone.get, self.context.mode, explains=self.context.explain)
        self.item.rewrite(graph, self.settings)
        self.skips.update(dict.fromkeys(graph.skips))
        # Graphs for other sizes repeat the places with other numbers.
        known = {remark.where for remark in self.remarks}
        self.remarks.update(dict.fromkeys(remark for remark in graph.remarks if remark.where not in known))
        self._made.append((captured, graph.changes))
        new = [change for change in graph.changes if change.place not in self.changes]
        for change in graph.changes:
            self.changes.setdefault(
                change.place, Change(change.where, change.what, change.number, sources=change.sources)
            )
        checks = [(change.place, change.check) for change in new if change.check is not None]
        if self.context.judge is not None and checks:
            self._to_check.append((captured, checks, _own_inputs(captured.graph, inputs)))
        return graph.captured

    def checked(self) -> Iterator[tuple[Change, Any]]:
        """Compare the old and the new subgraph of each change; yields the change with the result."""
        for captured, checks, inputs in self._to_check:
            for place, check, values in _flow(captured, checks, inputs):
                assert self.context.judge is not None
                old, new = (function_of(graph, captured.home) for graph in (check.old, check.new))
                yield self.changes[place], self.context.judge(old, new, values)
        self._to_check.clear()


def _renamed(path: str, other: str) -> tuple[str, str]:
    """Two paths without the names that they have in common at their ends."""
    old, new = path.split("."), other.split(".")
    while old and new and old[-1] == new[-1]:
        old, new = old[:-1], new[:-1]
    return ".".join(old), ".".join(new)


def _flow(
    captured: CapturedGraph, checks: Sequence[tuple[Place, RegionCheck]], inputs: Sequence[Any]
) -> Iterator[tuple[Place, RegionCheck, tuple[Any, ...]]]:
    """Run a graph, and yield each check with its input values as soon as they are computed."""
    first = next(iter(captured.graph.nodes))
    waiting = deque(sorted(checks, key=lambda item: max(item[1].sources, default=first)))
    last_uses = {source: check for _, check in waiting for source in check.sources}
    values: dict[fx.Node, Any] = {}
    interpreter = fx.Interpreter(fx.GraphModule(captured.home, captured.graph), garbage_collect_values=True)
    interpreter.args_iter = iter(inputs)
    with torch.no_grad():
        for node in captured.graph.nodes:
            if node.op == "output":
                break
            interpreter.env[node] = value = interpreter.run_node(node)
            if node in last_uses:
                values[node] = value
            # The graph enters and leaves transforms of torch.func. Inside them nothing else can run.
            while waiting and max(waiting[0][1].sources, default=first) <= node and active_transforms() is None:
                place, check = waiting.popleft()
                yield place, check, tuple(pytree.tree_map(_cloned, values[source]) for source in check.sources)
                for source in check.sources:
                    if last_uses[source] is check:
                        values.pop(source, None)
            for gone in interpreter.user_to_last_uses.get(node, ()):
                interpreter.env.pop(gone, None)
    assert not waiting


def _own_inputs(graph: fx.Graph, inputs: Sequence[Any]) -> list[Any]:
    """The inputs, cloned if the graph may write to one of them."""
    memory = Memory(graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    written = memory.may_be_written(placeholders)
    return [_cloned(value) if written else value for value in inputs]


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
