"""The only way to write to a program. It keeps the record of what was changed and what was left alone."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Concatenate, NamedTuple, ParamSpec

import torch
from torch import fx, nn

from passes.graph.baked import Baked, BakedCall, BakedLayer
from passes.graph.capture import ModuleGraph
from passes.graph.casts import Precision
from passes.graph.edits import (
    AttributeEdit,
    ClassEdit,
    Edit,
    FormatEdit,
    HookEdit,
    MetaEdit,
    ModuleEdit,
    TensorEdit,
    in_format,
)
from passes.graph.formats import DimOrder
from passes.graph.forward import GraphForward
from passes.graph.guards import (
    AroundForward,
    ChannelsLastInput,
    ChannelsLastInputs,
    ContiguousInput,
    DrawsInOrder,
    FoldedConvForward,
    FoldedNormForward,
    FoldedPair,
    FormattedForward,
    LentForward,
    SealCheckingForward,
    inner_forward,
    opened_from,
    refuse_checkpoint,
    sealed_for,
)
from passes.graph.linear_groups import (
    JoiningApply,
    LinearGroup,
    shared_by,
    sharing_forwards,
)
from passes.graph.match import (
    Affine,
    BatchNorm,
    ChannelScale,
    Convolution,
    can_be_sealed,
    channels_between,
    in_order,
    is_layer,
    opened_between,
)
from passes.graph.moved_bias import MovedBias
from passes.graph.padded import PaddedForward, call_wide
from passes.graph.program import Program
from passes.graph.region import Region
from passes.graph.stretches import Stretch
from passes.graph.tracing import RANK
from passes.program.tensors import TensorRef


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
        gives_way: whether it writes to graphs alone, so that the forwards which these stand in for go on being right.
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
    gives_way: bool = False

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
        self._guarded: dict[int, nn.Module] = {}
        # The pairs in the graphs that become forwards whatever the training flag says, and the biases that these had.
        self._tied: dict[int, list[tuple[TensorRef, FoldedPair]]] = {}
        self._places: dict[int, list[tuple[nn.Module, str]]] | None = None
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
        *,
        gives_way: bool = False,
        all_outputs: bool = False,
    ) -> Iterator[Change]:
        """Record what is written in the block as one change, checked at the last output of the region, or at all.

        One that `gives_way` writes to graphs and to no tensor: the forwards of the classes answer what the graphs of such
        changes alone don't hold for.

        A change that is among `left_alone` is recorded as a skip: the block is run, and all that it writes is dropped.

        An error in the block takes its edits of modules back. What it wrote to graphs goes only with the whole pass:
        `finish` refuses after such an error, and `roll_back` is what is left to do.

        Raises:
            RuntimeError: inside of another change.
        """
        if self._open is not None:
            raise RuntimeError("a change is opened inside of another one")
        change = Change(where, what, self._words[where, what], tuple(region), gives_way=gives_way)
        self._words[where, what] += 1
        reason = self.left_alone.get(change.place)
        change.left_alone = reason is not None
        change.before = None
        if region and reason is None:
            change.before = Region.of(self.program, region, all_outputs=all_outputs)
        self._open, self._added = change, []
        try:
            yield change
            if change.before is not None:
                change.after = change.before.rewritten(self.program, self._gone, self._added)
        except BaseException:
            for edit in reversed(change.edits):
                edit.undo()
            self._places = None
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
    def replace_module(self, change: Change, module: nn.Module, new: nn.Module) -> None:
        """Put another module in every place of the tree that holds this one; `new` may hold it in turn.

        Raises:
            RuntimeError: the tree doesn't register it.
        """
        if not self.program.is_registered(module):
            raise RuntimeError(
                f"{self.program.paths[id(module)][0]} stands in a plain container, and can't be replaced"
            )
        if self._places is None:
            self._places = {}
            self._note_children(self.program.root)
        places = self._places.pop(id(module), [])
        self._note_children(new)
        for parent, name in places:
            self._do(change, ModuleEdit(parent, name, new))
            self._places.setdefault(id(new), []).append((parent, name))
        for node in self.program.calls_of(module):
            if "module" in node.meta:
                self._do(change, MetaEdit(node.meta, "module", new))

    def _note_children(self, top: nn.Module) -> None:
        assert self._places is not None
        for parent in top.modules():
            for name, child in parent._modules.items():
                if child is not None:
                    self._places.setdefault(id(child), []).append((parent, name))

    @_writes
    def set_forward(self, change: Change, module: nn.Module, forward: Any) -> None:
        """Give one module instance another forward; what stands around the one of now stands around that."""
        self.set_attribute(change, module, "forward", _in_place_of(module.__dict__.get("forward"), forward))

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
    def leave_out(self, call: fx.Node) -> None:
        """Take the call of a child out of its graph which gives its only input as it is, as long as it does."""
        self.bypass(call)
        home, child = self.program.home(call), self.program.module_of(call)
        assert child is not None
        inner = self.program.graphs.get(id(child))
        found = BakedCall.of_child(home.module, tuple(str(call.target).split(".")))
        home.baked += (found, *(inner.baked if inner is not None else ()))

    @_writes
    def erase(self, node: fx.Node) -> None:
        """Take a node out of its graph whose value nobody uses."""
        self._own(node)
        node.graph.erase_node(node)

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

    @_writes
    def set_bias(self, change: Change, conv: Convolution, value: torch.Tensor) -> None:
        """Give the convolution this bias, (out,), whether it had one or not."""
        like = conv.weight if conv.bias is None or conv.bias_value is None else conv.bias
        parameter = nn.Parameter(value, requires_grad=_needs_gradient(like, *change.sources))
        if conv.bias is not None:
            self.set_tensor(change, conv.bias, parameter)
            return
        ref = TensorRef(conv.weight.owner, _free_name(conv.weight))
        self.set_tensor(change, ref, parameter)
        self._own(conv.node)
        with conv.node.graph.inserting_before(conv.node):
            reader = conv.node.graph.get_attr(_beside(_reader_of(self.program, conv), ref.name))
        self.program.note_reader(reader)
        _set_bias_argument(conv.node, reader)

    @_writes
    def drop_bias(self, change: Change, conv: Convolution) -> None:
        """Leave the convolution without its bias."""
        assert conv.bias is not None
        if conv.module is None:
            self._own(conv.node)
            readers = [node for node in conv.node.all_input_nodes if node.op == "get_attr"]
            _set_bias_argument(conv.node, None)
            _erase_unused(readers)
        self._take_away(change, conv.bias)

    @_writes
    def move_bias(self, change: Change, conv: Convolution, norm: BatchNorm) -> None:
        """Leave a convolution that is trained on without its bias, which the BatchNorm's running mean holds now.

        Checkpoints go on having it, as zero: what is saved can be loaded into the original, and the reverse. A graph that
        reads the bias reads none from now on.
        """
        assert conv.bias is not None
        bias, value = conv.bias, conv.bias.value
        assert value is not None
        moved = MovedBias(
            (self._path_of(bias), bias.owner, bias.name),
            None if norm.mean is None else (self._path_of(norm.mean), norm.mean.owner, norm.mean.name),
            (conv.weight.owner, conv.weight.name),
            value.numel(),
        )
        self.set_tensor(change, bias, None)
        for path, registry, hook in moved.hooks():
            self._do(change, HookEdit(self.program.root.get_submodule(path), registry, moved.key, hook))

    def _path_of(self, ref: TensorRef) -> str:
        return self.program.paths[id(ref.owner)][0]

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
    def pad_layer(self, change: Change, layer: nn.Module, inputs: int, outputs: int) -> None:
        """Have a linear layer or convolution compute with so many more channels, which are zeros; whatever else stands
        around its forward stands around that."""
        earlier = layer.__dict__.get("forward")
        forward = PaddedForward(layer, inner_forward(layer), inputs, outputs)
        self.set_attribute(change, layer, "forward", _in_place_of(earlier, forward))

    @_writes
    def keep_wide(self, change: Change, stretch: Stretch) -> None:
        """Leave the channels that padded layers add to the values of a stretch in them, up to the layers that take them."""
        if change is not self._open:
            raise RuntimeError("a graph is written to outside of its change")
        for node in stretch.nodes:
            self._own(node)
            new = self._call_of_layer(node, stretch) if node in stretch.layers else self._same_again(node)
            node.replace_all_uses_with(new)
            node.graph.erase_node(node)
            self._gone[node] = new
            self._added.append(new)

    def _call_of_layer(self, node: fx.Node, stretch: Stretch) -> fx.Node:
        taken, given = stretch.layers[node]
        graph = node.graph
        with graph.inserting_before(node):
            layer = graph.get_attr(str(node.target))
            new = graph.call_function(call_wide, (layer, node.all_input_nodes[0], stretch.dims, taken, given))
        new.meta.update(node.meta)
        self.program.note_reader(layer)
        return new

    def _same_again(self, node: fx.Node) -> fx.Node:
        """What is checked of a rewrite is what it put in, in order: also what stays as it is in between."""
        home, child = self.program.home(node), self.program.module_of(node)
        with node.graph.inserting_before(node):
            new = node.graph.node_copy(node, lambda source: source)
        if child is not None:
            self.program.note_call(new, child)
            inner = self.program.graphs.get(id(child))
            found = BakedLayer.of_child(home.module, tuple(str(node.target).split(".")))
            home.baked += (found, *(inner.baked if inner is not None else ()))
        return new

    @_writes
    def enter_channels_last(self, change: Change, conv: nn.Module) -> None:
        """Have a convolution bring its input into channels_last, and leave its weight as it is."""
        self.set_attribute(change, conv, "forward", ChannelsLastInput(conv, conv.__dict__.get("forward")))

    @_writes
    def draw_in_order(self, change: Change, module: nn.Module) -> None:
        """Have a module draw random numbers for maps in channels_last as for contiguous ones."""
        self.set_attribute(change, module, "forward", DrawsInOrder(module, module.__dict__.get("forward")))

    @_writes
    def share_input(self, change: Change, around: nn.Module, group: LinearGroup) -> None:
        """Have some Linears on one input compute together as long as the forward of the module around them runs."""
        weight, bias, parts = group.joined()
        for layer, name, parameter in parts:
            self.set_tensor(change, TensorRef(layer, name), parameter)
        group.take(weight, bias)
        for module, forward in sharing_forwards(around, group):
            self.set_attribute(change, module, "forward", forward)
        self.set_attribute(change, around, "_apply", JoiningApply(around, shared_by(around)))

    @_writes
    def carry_norm(self, change: Change, conv: Convolution, norm: Affine) -> None:
        """Take a BatchNorm, or a product or sum by channel, out whose convolution does its work now.

        What the first of the two makes goes to the second and nowhere else, which both check at every call: the forwards
        around them are as they were, and may be called in any way. A BatchNorm that is a module stays for that, without
        tensors; for what is a function, its graph checks, and where one graph shows all that there is between the two,
        nothing has to.
        """
        self._close_lenders(change, conv, norm)
        if can_be_sealed(self.program, conv, norm):
            nearer = opened_between(self.program, conv, norm)
            self._seal(change, conv, norm, nearer, self._pair(conv, norm, nearer), carried=True)
        else:
            self._keep_together(change, conv, norm)
            self._hold_ranks(change, conv, norm)
        if norm.module is None:
            self.bypass(norm.node, _value_of(self.program, norm))
        else:
            self._forget_statistics(change, norm)
            self._refuse_resets(change, norm.module)
        for ref in norm.tensors:
            self._take_away(change, ref)

    def _refuse_resets(self, change: Change, norm: nn.Module) -> None:
        """The statistics are in another module's weights: setting them back would do nothing, and say nothing."""
        forward = inner_forward(norm)
        if isinstance(forward, FoldedNormForward):
            self._do(change, AttributeEdit(norm, "reset_running_stats", forward.pair.refuse_reset))

    def _close_lenders(self, change: Change, conv: Convolution, norm: Affine) -> None:
        """Have layers that lend their tensors to a function refuse to be called, which nothing does that was seen."""
        for place in (conv, norm):
            if place.module is not None:
                continue
            home = self.program.home(place.node).module
            where = self.program.where(conv.node), self.program.where(norm.node)
            for owner in {id(ref.owner): ref.owner for ref in place.tensors if ref.owner is not home}.values():
                if is_layer(owner) and not isinstance(inner_forward(owner), LentForward):
                    self.set_forward(change, owner, LentForward(owner, self.program.paths[id(owner)][0], *where))

    def _hold_ranks(self, change: Change, conv: Convolution, norm: Affine) -> None:
        """Nothing else would say that the BatchNorm's channels aren't the convolution's on input of other dims."""
        first, second = in_order(conv, norm)
        own = self._rank(conv, norm)
        if own is None:
            return
        ranks = {first.input: own} if first.input.op == "placeholder" else {}
        for node, rank in (self.program.inputs_behind(second.input) | ranks).items():
            self._do(change, MetaEdit(node.meta, RANK, rank))

    def _rank(self, conv: Convolution, norm: Affine) -> int | None:
        """The dims of what the first of a pair is given, which it holds for; None where it holds for any.

        Where no run shows them, as many as the convolution takes.
        """
        if isinstance(norm, ChannelScale) and not norm.moves and norm.rank <= conv.dims + 1:
            return None
        first, _ = in_order(conv, norm)
        return self.program.rank_of_input(first.node) or conv.dims + 2

    @_writes
    def tie(
        self,
        change: Change,
        conv: Convolution,
        norm: BatchNorm,
        *,
        elsewhere: Sequence[tuple[Convolution, BatchNorm]] = (),
        trained: bool = False,
    ) -> None:
        """Both are right only together now, which is checked at every call.

        Where one graph shows all that there is between the two, it becomes the forward, and goes no other way. In
        training graphs do so for both values of the training flag.

        Args:
            elsewhere: the two as they are in the other states.
            trained: whether the convolution had a bias that was trained.
        """
        nearer = opened_between(self.program, conv, norm)
        pair = self._pair(conv, norm, nearer, trained=trained)
        if can_be_sealed(self.program, conv, norm):
            self._seal(change, conv, norm, nearer, pair, carried=False)
            for other in elsewhere:
                self._seal_in_graphs(change, *other, pair)
        else:
            self._keep_together(change, conv, norm)
            self._hold_ranks(change, conv, norm)
            self._own(norm.node)
        self._close_lenders(change, conv, norm)
        if self.program.mode == "training" and conv.bias is not None:
            for place in (conv, norm):
                if place.module is None:
                    self._tied.setdefault(id(self.program.home(place.node)), []).append((conv.bias, pair))

    def _pair(self, conv: Convolution, norm: Affine, nearer: fx.Node | None, *, trained: bool = False) -> FoldedPair:
        paths = self.program.where(conv.node), self.program.where(norm.node)
        # Elsewhere than behind the convolution itself, the seal alone says where the channels are.
        rank = None if norm.leads or nearer is not None else self._rank(conv, norm)
        return FoldedPair(*paths, rank, conv.dims, leads=norm.leads, trained=trained)

    def _seal(
        self,
        change: Change,
        conv: Convolution,
        norm: Affine,
        nearer: fx.Node | None,
        pair: FoldedPair,
        *,
        carried: bool,
    ) -> None:
        """Have both check; `nearer` is where another pair gives the value between them free, if one does."""
        if nearer is not None:
            self._keep_together(change, conv, norm)
            self._seal_beyond(change, nearer, pair)
        elif conv.module is not None:
            earlier = inner_forward(conv.module)
            behind, front = (earlier.pair, earlier.front) if isinstance(earlier, FoldedConvForward) else (None, None)
            behind, front = (behind, pair) if norm.leads else (pair, front)
            self.set_forward(change, conv.module, FoldedConvForward(conv.module, behind, front))
        if norm.module is not None:
            self.set_forward(change, norm.module, FoldedNormForward(norm.module, pair, carried=carried))
        self._seal_in_graphs(change, conv, norm, pair, is_beyond=nearer is not None)
        around = self.program.innermost_around(conv.node, norm.node)
        if around is not None and not around.shows_every_call:
            # The module that calls both gets its forward at the end, once for all its pairs.
            self._guarded[id(around.module)] = around.module

    def _seal_in_graphs(
        self, change: Change, conv: Convolution, norm: Affine, pair: FoldedPair, *, is_beyond: bool = False
    ) -> None:
        if conv.module is None and not is_beyond:
            if norm.leads:
                self._open_in_graph(change, conv.node, conv.input, pair, conv.dims)
            else:
                self._seal_in_graph(change, conv.node, pair, conv.dims)
        if norm.module is None:
            if norm.leads:
                self._seal_in_graph(change, norm.node, pair, None)
            else:
                self._open_in_graph(change, norm.node, norm.input, pair, _dims_behind(self.program, conv, norm))

    def _seal_beyond(self, change: Change, nearer: fx.Node, pair: FoldedPair) -> None:
        """Seal the value between what was folded before, nearer to the convolution, and another BatchNorm."""
        module = self.program.module_of(nearer)
        if module is not None:
            forward = inner_forward(module)
            assert isinstance(forward, FoldedNormForward)
            self.set_forward(change, module, forward.with_farther(pair))
        elif pair.leads:
            self._open_in_graph(change, nearer, nearer.all_input_nodes[0], pair, None)
        else:
            self._seal_in_graph(change, nearer, pair, nearer.args[2])

    def _keep_together(self, change: Change, conv: Convolution, norm: Affine) -> None:
        """Have the convolution go on as it is, where one graph shows what is between it and the BatchNorm."""
        if conv.module is None:
            self._own(conv.node)
            return
        earlier = inner_forward(conv.module)
        if not isinstance(earlier, FoldedConvForward):
            return
        # It looks anew whether there is a bias.
        self.set_forward(change, conv.module, FoldedConvForward(conv.module, earlier.pair, earlier.front))
        rank = self._rank(conv, norm)
        if earlier.pair is not None and earlier.pair.rank is None and rank is not None:
            self._do(change, AttributeEdit(earlier.pair, "rank", rank))

    def _seal_in_graph(self, change: Change, first: fx.Node, pair: FoldedPair, behind: Any) -> None:
        self._own(first)
        with first.graph.inserting_after(first):
            held = first.graph.get_attr(self._hold(change, self.program.home(first).module, pair))
        sealing = [user for user in first.users if user.target is sealed_for]
        if sealing:
            # Another pass has folded the two together before.
            sealing[0].update_arg(1, held)
            return
        users = list(first.users)
        with first.graph.inserting_after(held):
            sealed = first.graph.call_function(sealed_for, (first, held, behind))
        for user in users:
            user.replace_input_with(first, sealed)

    def _open_in_graph(
        self, change: Change, second: fx.Node, value: fx.Node, pair: FoldedPair, behind: int | None
    ) -> None:
        self._own(second)
        with second.graph.inserting_before(second):
            held = second.graph.get_attr(self._hold(change, self.program.home(second).module, pair))
            opened = second.graph.call_function(opened_from, (value, held, behind))
        second.replace_input_with(value, opened)

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

    def _forget_statistics(self, change: Change, norm: BatchNorm) -> None:
        """Leave nothing of what the BatchNorm counts in a state dict."""
        assert norm.module is not None
        self._do(change, AttributeEdit(norm.module, "track_running_stats", False))
        if norm.module._buffers.get("num_batches_tracked") is not None:
            self.set_tensor(change, TensorRef(norm.module, "num_batches_tracked"), None)

    def _take_away(self, change: Change, ref: TensorRef) -> None:
        """Leave the name without a tensor, whose values are in others now, and make loading one an error in any case."""
        self.set_tensor(change, ref, None)
        hooks = ref.owner._load_state_dict_pre_hooks
        if any(getattr(hook, "hook", None) is refuse_checkpoint for hook in hooks.values()):
            return
        self._do(change, AttributeEdit(ref.owner, "_load_state_dict_pre_hooks", OrderedDict(hooks)))
        ref.owner.register_load_state_dict_pre_hook(refuse_checkpoint)

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
        home.gives_way &= self._open.gives_way

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
                self._install(graph.module, self._forward_of(graph))
        for module in self._guarded.values():
            # A graph goes no other way: a forward that would is the class' own.
            if not isinstance(inner_forward(module), SealCheckingForward | GraphForward):
                self._install(module, SealCheckingForward(module))
        self.program.refresh()

    def _forward_of(self, graph: ModuleGraph) -> GraphForward:
        tied = self._tied.get(id(graph))
        if tied is None:
            return graph.forward(gives_way=True)
        key = id(graph.module)
        others = {state.flags[key]: state.graphs[key] for state in self.program.other_states}
        gone = [self._baked_none(graph, bias) for bias, _ in tied]
        return graph.forward(others, gone, [pair for _, pair in tied if pair.trained])

    def _baked_none(self, graph: ModuleGraph, ref: TensorRef) -> Baked:
        """The place of a parameter that is gone, as something that the graph counts on."""
        path = self._path_of(ref)
        inside = not graph.path or path == graph.path or path.startswith(f"{graph.path}.")
        parts = tuple(filter(None, path.removeprefix(graph.path).split("."))) if inside else ()
        return Baked.of(graph.module if inside else ref.owner, ref.name, None, "_parameters", parts)

    def _install(self, module: nn.Module, forward: Any) -> None:
        edit = AttributeEdit(module, "forward", _in_place_of(module.__dict__.get("forward"), forward))
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
        self._guarded.clear()
        self._tied.clear()
        self._places = None
        # The record stays; there is nothing more to be taken back.
        for change in self.changes:
            change.edits = []
        self.program.refresh()


def _dims_behind(program: Program, conv: Convolution, norm: Affine) -> int | None:
    """How many dims there are behind that of the channels in what comes to one behind; None for dim 1."""
    if not isinstance(norm, ChannelScale):
        return None
    channels = channels_between(program, conv, norm) if norm.moves else None
    return conv.dims if channels is None else channels.rank - channels.dim - 1


def _value_of(program: Program, affine: Affine) -> fx.Node:
    """What it is given, where that may be something else by now that gives the same."""
    return next(
        node for node in affine.node.all_input_nodes if program.producer(node) is program.producer(affine.input)
    )


def _needs_gradient(*refs: TensorRef) -> bool:
    return any(ref.value is not None and ref.value.requires_grad for ref in refs)


def _in_place_of(earlier: Any, forward: Any) -> Any:
    """The forward, within what stands around the earlier one."""
    if not isinstance(earlier, AroundForward):
        return forward
    return earlier.around(_in_place_of(earlier.inner, forward))


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


def _reader_of(program: Program, conv: Convolution) -> fx.Node:
    """The node by which a functional convolution reads its weight."""
    return next(
        node
        for node in conv.node.all_input_nodes
        if node.op == "get_attr" and program.tensor_of(node)[:2] == (conv.weight.owner, conv.weight.name)
    )


def _beside(reader: fx.Node, name: str) -> str:
    path, dot, _ = str(reader.target).rpartition(".")
    return f"{path}{dot}{name}"


def _erase_unused(readers: Sequence[fx.Node]) -> None:
    for reader in readers:
        if not reader.users:
            reader.graph.erase_node(reader)


def _free_name(weight: TensorRef) -> str:
    """A name for a bias beside the weight."""
    registered = weight.owner._parameters
    if weight.name == "weight" and registered.get("bias", _MISSING) is None:
        return "bias"
    name = f"{weight.name}_bias"
    while hasattr(weight.owner, name):
        name += "_"
    return name


_MISSING = object()


def _set_bias_argument(node: fx.Node, value: fx.Node | None) -> None:
    if len(node.args) > 2:
        node.update_arg(2, value)
    else:
        node.update_kwarg("bias", value)
