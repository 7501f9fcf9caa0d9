"""The only way to write to a program. It keeps the record of what was changed and what was left alone."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Concatenate, NamedTuple, ParamSpec

import torch
from torch import fx, nn

from passes.graph.baked import Baked
from passes.graph.capture import ModuleGraph
from passes.graph.casts import Precision
from passes.graph.edits import (
    AttributeEdit,
    ClassEdit,
    Edit,
    FormatEdit,
    TensorEdit,
    in_format,
)
from passes.graph.formats import DimOrder
from passes.graph.forward import GraphForward
from passes.graph.guards import ChannelsLastInput, ChannelsLastInputs, ContiguousInput, DrawsInOrder, FormattedForward
from passes.graph.program import Program
from passes.graph.region import Region
from passes.program.forwards import in_place_of, inner_forward
from passes.program.tensors import TensorRef
from passes.program.weights import like_old


@dataclass(frozen=True)
class Skip:
    """A place that a pass looked at and left alone.

    Attributes:
        where: the module path.
        reason: a sentence without its full stop.
    """

    where: str
    reason: str


class Place(NamedTuple):
    """What tells one change of a pass from its others, also when the pass is run again.

    Attributes:
        where, what: those of the change.
        number: of the changes with these words, counted from 0.
    """

    where: str
    what: str
    number: int


@dataclass(frozen=True)
class Remark:
    """A place that costs something and that the user may mend.

    Attributes:
        where: the module path, with the operation where one is meant: "encoder.layer1 (view)".
        text: a sentence without its full stop.
    """

    where: str
    text: str


@dataclass
class Change:
    """One rewrite.

    Attributes:
        where: the module path.
        what: what was done, in a few words.
        number: of the changes of the pass with these words, counted from 0.
        region: the nodes that the rewrite replaces, in the order of the run; the first one's inputs go in, the last
            one's value comes out, or those of all, and it is there that the rewrite is checked.
        edits: what was done to the modules.
        before, after: how the region's value is computed without the rewrite, and with it; both None without a region,
            `after` also where the rewrite takes more than the region's inputs.
        sources: the tensors of the caller's module that new ones were computed from, each with its owner and name.
        left_alone: whether nothing of it is written.
        between: the paths of the two that it folds together, in the order of the run; None where it folds nothing.
    """

    where: str
    what: str
    number: int = 0
    region: tuple[fx.Node, ...] = ()
    edits: list[Edit] = field(default_factory=list)
    before: Region | None = None
    after: Region | None = None
    sources: list[TensorRef] = field(default_factory=list)
    left_alone: bool = False
    between: tuple[str, str] | None = None

    @property
    def place(self) -> Place:
        """What tells the change from the others of the pass."""
        return Place(self.where, self.what, self.number)


_Arguments = ParamSpec("_Arguments")
_Write = Callable[Concatenate["Rewriter", _Arguments], None]


def _writes(write: _Write[_Arguments]) -> _Write[_Arguments]:
    """A method that writes: inside of a change that is to be left alone, it does nothing."""

    @functools.wraps(write)
    def written(self: Rewriter, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        if not self.is_leaving_alone:
            write(self, *args, **kwargs)

    return written


@dataclass
class _Kept:
    """A graph as it was before the first write, and its node for each node of then."""

    graph: fx.Graph
    nodes: dict[fx.Node, fx.Node]
    gives_way: bool
    baked: tuple[Baked, ...]


class Rewriter:
    """Writes to the graphs and modules of one program, for one pass.

    Everything is written inside of a `change`. What is written to a graph becomes the module's forward at `finish`.

    Attributes:
        program: what is there to be read; it follows the edits.
        left_alone: the changes of which nothing is written, each with the reason: a sentence without its full stop.
        changes, skips, remarks: the record.
        precision: how the result computes, where a pass makes it compute less precisely than the original.
    """

    def __init__(self, program: Program, left_alone: Mapping[Place, str] | None = None) -> None:
        self.program = program
        self.left_alone = left_alone or {}
        self.changes: list[Change] = []
        self.skips: list[Skip] = []
        self._words: Counter[tuple[str, str]] = Counter()
        self.remarks: list[Remark] = []
        self.precision: Precision | None = None
        self._open: Change | None = None
        self._half_done = False
        self._kept: dict[int, _Kept] = {}
        self._gone: dict[fx.Node, fx.Node] = {}
        # What the open change has put into graphs.
        self._added: list[fx.Node] = []
        self._installed: list[Edit] = []
        # By module and word: the number in the last name that was given.
        self._named: dict[tuple[int, str], int] = {}

    def skip(self, node: fx.Node, reason: str) -> None:
        """Leave the node alone, for a reason that is a sentence without its full stop."""
        self.skips.append(Skip(self.program.where(node), reason))

    def skip_module(self, path: str, reason: str) -> None:
        """Leave a module alone that no graph calls."""
        self.skips.append(Skip(path, reason))

    def remark(self, where: str, text: str) -> None:
        """Tell the user of a place that isn't the pass' to change."""
        self.remarks.append(Remark(where, text))

    @contextmanager
    def change(
        self,
        where: str,
        what: str,
        region: Sequence[fx.Node] = (),
    ) -> Iterator[Change]:
        """Record what is written in the block as one change, checked at the last output of the region.

        A change that is among `left_alone` is recorded as a skip: the block is run, and all that it writes is dropped.

        An error in the block takes its edits of modules back. What it wrote to graphs goes only with the whole pass:
        `finish` refuses after such an error, and `roll_back` is what is left to do.

        Raises:
            RuntimeError: inside of another change.
        """
        if self._open is not None:
            raise RuntimeError("a change is opened inside of another one")
        change = Change(where, what, self._words[where, what], tuple(region))
        self._words[where, what] += 1
        reason = self.left_alone.get(change.place)
        change.left_alone = reason is not None
        change.before = None
        if region and reason is None:
            change.before = Region.of(self.program, region)
        self._open, self._added = change, []
        try:
            yield change
            if change.before is not None:
                change.after = change.before.rewritten(self.program, self._gone, self._added)
        except BaseException:
            for edit in reversed(change.edits):
                edit.undo()
            self._half_done = True
            raise
        finally:
            self._open = None
        if reason is None:
            self.changes.append(change)
        else:
            self.skips.append(Skip(where, reason))

    @property
    def is_leaving_alone(self) -> bool:
        """Whether the open change is one of those that are left alone."""
        return self._open is not None and self._open.left_alone

    @_writes
    def set_tensor(self, change: Change, ref: TensorRef, value: torch.Tensor | None) -> None:
        """Put another tensor under the name of a parameter or buffer; None leaves the name without one.

        A parameter's place gets a parameter, which needs a gradient if the old one, or a source of the change, did.
        """
        if value is not None and ref.name not in ref.owner._buffers and not isinstance(value, nn.Parameter):
            value = nn.Parameter(value, requires_grad=_needs_gradient(ref, *change.sources))
            value = like_old(ref.value, value)
            self.program.made[id(value)] = value
        self._do(change, TensorEdit(ref.owner, ref.name, value))

    @_writes
    def set_memory_format(self, change: Change, ref: TensorRef, memory_format: torch.memory_format) -> None:
        """Bring a parameter or buffer into another memory format."""
        old = ref.value
        assert old is not None
        if isinstance(old, nn.Parameter) and self.program.made.get(id(old)) is old and _fills_its_storage(old):
            self._do(change, FormatEdit(old, memory_format))
        else:
            self.set_tensor(change, ref, in_format(old.detach(), memory_format))

    @_writes
    def set_forward(self, change: Change, module: nn.Module, forward: Any) -> None:
        """Give one module instance another forward; what stands around the one of now stands around that."""
        self.set_attribute(change, module, "forward", in_place_of(module.__dict__.get("forward"), forward))

    @_writes
    def set_class(self, change: Change, module: nn.Module, cls: type[nn.Module]) -> None:
        """Make one module instance one of another class, with all that it holds."""
        self._do(change, ClassEdit(module, cls))

    @_writes
    def set_attribute(self, change: Change, module: nn.Module, name: str, value: Any) -> None:
        """Put a value into the `__dict__` of one module instance."""
        self._do(change, AttributeEdit(module, name, value))

    @_writes
    def bypass(self, node: fx.Node, source: fx.Node | None = None) -> None:
        """Take the node out of its graph; whoever used its value uses `source` instead, its first input by default.

        What it read and nobody else reads goes too.
        """
        source = node.all_input_nodes[0] if source is None else source
        self._own(node)
        readers = [reader for reader in node.all_input_nodes if reader.op == "get_attr"]
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)
        self._gone[node] = source
        _erase_unused(readers)

    @_writes
    def substitute(
        self,
        change: Change,
        nodes: Sequence[fx.Node],
        function: Callable[..., Any],
        args: Sequence[Any],
        held: Any = None,
        counted_on: Sequence[Baked] = (),
    ) -> None:
        """Put the call of a function in the place of a run of nodes in one graph, whose value is that of the last one.

        Those of the others that nobody uses from then on go.

        Args:
            function: a function of a module, by whose name it is pickled.
            args: its arguments: nodes, and what else a graph holds.
            held: an object that is its first argument, before those; it comes to stand in the `__dict__` of the module.
            counted_on: what the function takes for granted, beside what the graph does.
        """
        *_, last = nodes
        self._own(last)
        graph = last.graph
        with graph.inserting_before(last):
            if held is not None:
                args = (graph.get_attr(self._hold(change, self.program.home(last).module, held)), *args)
            new = graph.call_function(function, tuple(args))
        home = self.program.home(last)
        # One layer may be called many times: what is counted on is looked at once.
        for item in counted_on:
            home.baked += (item,) if item not in home.baked else ()
        new.meta.update(last.meta)
        last.replace_all_uses_with(new)
        self._added.append(new)
        for node in reversed(nodes):
            if not node.users:
                self._gone[node] = new
                readers = [reader for reader in node.all_input_nodes if reader.op == "get_attr"]
                graph.erase_node(node)
                _erase_unused(readers)

    def keep_output_orders(
        self, orders: Sequence[DimOrder | None], others: Sequence[DimOrder | None] | None = None
    ) -> None:
        """Bring the dims of the root's output leaves into these orders in memory; None leaves a leaf as it comes.

        `others` are those for the other value of the root's training flag, where it may be set to that. This stands around
        the root's forward, whatever that is: what an output holds may differ from call to call.
        """
        root = self.program.root
        inner = root.__dict__.get("forward")
        if isinstance(inner, FormattedForward):
            inner = inner.inner
        with self.change("", "outputs in the memory format of the original") as change:
            forward = FormattedForward(root, tuple(orders), inner, None if others is None else tuple(others))
            self.set_attribute(change, root, "forward", forward)

    def convert_inputs(self, names: Sequence[str]) -> Change:
        """Bring the root's arguments of these names into channels_last; the outputs' order goes around that."""
        root = self.program.root
        inner = root.__dict__.get("forward")
        while isinstance(inner, ChannelsLastInputs | FormattedForward):
            inner = inner.inner
        with self.change("", f"input {' and '.join(names)} brought into channels_last once") as change:
            forward = ChannelsLastInputs(root, frozenset(names), inner)
            self.set_attribute(change, root, "forward", forward)
        return change

    def withdraw(self, change: Change) -> None:
        """Take back the last change, one that wrote to no graph."""
        if self._open is not None or not self.changes or self.changes[-1] is not change or change.region:
            raise RuntimeError("only the last change can be withdrawn, and none that replaces nodes")
        for edit in reversed(change.edits):
            edit.undo()
        self.changes.pop()

    @_writes
    def keep_contiguous(self, change: Change, conv: nn.Module) -> None:
        """Have a convolution compute in contiguous format, whatever format its input comes in."""
        self.set_attribute(change, conv, "forward", ContiguousInput(conv, conv.__dict__.get("forward")))

    @_writes
    def enter_channels_last(self, change: Change, conv: nn.Module) -> None:
        """Have a convolution bring its input into channels_last, and leave its weight as it is."""
        self.set_attribute(change, conv, "forward", ChannelsLastInput(conv, conv.__dict__.get("forward")))

    @_writes
    def draw_in_order(self, change: Change, module: nn.Module) -> None:
        """Have a module draw random numbers for maps in channels_last as for contiguous ones."""
        self.set_attribute(change, module, "forward", DrawsInOrder(module, module.__dict__.get("forward")))

    def _hold(self, change: Change, owner: nn.Module, held: Any) -> str:
        """Put what a graph needs into the `__dict__` of the module whose graph it is, under a name of its own."""
        word = re.sub(r"(?<!^)(?=[A-Z])", "_", type(held).__name__).lower()
        # Names up to there are taken: what asks for two names for one object does so one after the other.
        for number in itertools.count(self._named.get((id(owner), word), 0)):
            name = f"_{word}_{number}"
            if owner.__dict__.get(name) is held:
                break
            if not hasattr(owner, name):
                self.set_attribute(change, owner, name, held)
                break
        self._named[id(owner), word] = number
        return name

    def _do(self, change: Change, edit: Edit) -> None:
        if change is not self._open:
            raise RuntimeError("a module is written to outside of its change")
        edit.apply()
        change.edits.append(edit)

    def _own(self, node: fx.Node) -> None:
        """Before the first write to a graph, keep it as it was."""
        if self._open is None:
            raise RuntimeError("a graph is written to outside of a change")
        home = self.program.home(node)
        if not home.traced:
            raise RuntimeError(f"the graph of {home.path or 'the root'} is a record of a run, and is never written to")
        if id(home) not in self._kept:
            self._keep(home)
        home.gives_way = False

    def _keep(self, home: ModuleGraph) -> None:
        kept = self._kept[id(home)] = _Kept(*_copied(home.graph), home.gives_way, home.baked)
        installed = inner_forward(home.module)
        if isinstance(installed, GraphForward):
            # The forward that an earlier pass installed goes on with the graph that it was made from.
            installed.move_to(home.graph, kept.graph)

    def before(self, home: ModuleGraph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
        """The graph as it was before this pass, and the node there for each node of then."""
        kept = self._kept.get(id(home))
        return (kept.graph, kept.nodes) if kept else (home.graph, {n: n for n in home.graph.nodes})

    def finish(self) -> None:
        """Check the rewritten graphs and make them the forwards of their modules.

        Raises:
            RuntimeError: a change was left half-way by an error.
        """
        if self._half_done:
            raise RuntimeError("a change was left half-way by an error: the pass has to be rolled back")
        for graph in self._rewritten():
            graph.graph.lint()
            # Those of other states are part of the forwards.
            if self.program.graphs.get(id(graph.module)) is graph:
                self._install(graph.module, graph.forward(gives_way=True))
        self.program.refresh()

    def _install(self, module: nn.Module, forward: Any) -> None:
        edit = AttributeEdit(module, "forward", in_place_of(module.__dict__.get("forward"), forward))
        edit.apply()
        self._installed.append(edit)

    def _rewritten(self) -> list[ModuleGraph]:
        graphs = (graph for state in (self.program, *self.program.other_states) for graph in state.graphs.values())
        return [graph for graph in graphs if id(graph) in self._kept]

    @property
    def edits(self) -> list[Edit]:
        """All edits of modules, in the order they were made."""
        return [edit for change in self.changes for edit in change.edits] + self._installed

    def roll_back(self) -> None:
        """Take everything back; passes that came later have to be taken back before."""
        for edit in reversed(self.edits):
            edit.undo()
        for graph in self._rewritten():
            kept = self._kept[id(graph)]
            graph.graph, graph.gives_way, graph.baked = kept.graph, kept.gives_way, kept.baked
        self._kept.clear()
        self._installed.clear()
        # The record stays; there is nothing more to be taken back.
        for change in self.changes:
            change.edits = []
        self.program.refresh()


def _needs_gradient(*refs: TensorRef) -> bool:
    return any(ref.value is not None and ref.value.requires_grad for ref in refs)


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor is all of its storage, so that its strides are enough to make another one like it."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A graph of the same nodes, and its node for each of the old one's."""
    nodes: dict[fx.Node, fx.Node] = {}
    copy = fx.Graph()
    for node in graph.nodes:
        nodes[node] = copy.node_copy(node, nodes.__getitem__)
    return copy, nodes


def _erase_unused(readers: Sequence[fx.Node]) -> None:
    for reader in readers:
        if not reader.users:
            reader.graph.erase_node(reader)
