"""The only way to write to a program. It keeps the record of what was changed and what was left alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from passes.graph.capture import ModuleGraph
from passes.graph.edits import AttributeEdit, Edit, ModuleEdit, TensorEdit
from passes.graph.forward import GraphForward
from passes.graph.guards import (
    FoldedConvForward,
    FoldedNormForward,
    FoldedPair,
    FormattedForward,
    SettlingForward,
    inner_forward,
)
from passes.graph.match import BatchNorm, Convolution, TensorRef
from passes.graph.program import Program
from passes.graph.region import Region


@dataclass(frozen=True)
class Skip:
    """A place that a pass looked at and left alone.

    Attributes:
        where: the module path.
        reason: a sentence without its full stop.
    """

    where: str
    reason: str


@dataclass
class Change:
    """One rewrite.

    Attributes:
        where: the module path.
        what: what was done, in a few words.
        region: the nodes that the rewrite replaces, in the order of the run; the first one's inputs go in, the last
            one's value comes out, and it is there that the rewrite is checked.
        edits: what was done to the modules.
        before, after: how the region's value is computed without the rewrite, and with it.
        sources: the tensors of the caller's module that new ones were computed from, each with its owner and name.
    """

    where: str
    what: str
    region: tuple[fx.Node, ...] = ()
    edits: list[Edit] = field(default_factory=list)
    before: Region | None = None
    after: Region | None = None
    sources: list[TensorRef] = field(default_factory=list)


@dataclass
class _Rewritten:
    graph: fx.Graph
    nodes: dict[fx.Node, fx.Node]


class Rewriter:
    """Writes to the graphs and modules of one program, for one pass.

    Attributes:
        program: what is there to be read; it follows the edits.
        changes, skips: the record.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.changes: list[Change] = []
        self.skips: list[Skip] = []
        self._before: dict[int, _Rewritten] = {}
        self._installed: list[Edit] = []
        self._pairs: dict[int, tuple[nn.Module, list[FoldedPair]]] = {}

    def skip(self, node: fx.Node, reason: str) -> None:
        """Leave the node alone, for a reason that is a sentence without its full stop."""
        self.skips.append(Skip(self.program.where(node), reason))

    def skip_module(self, path: str, reason: str) -> None:
        """Leave a module alone that no graph calls."""
        self.skips.append(Skip(path, reason))

    @contextmanager
    def change(self, where: str, what: str, region: Sequence[fx.Node] = ()) -> Iterator[Change]:
        """Record what is written in the block as one change; an error in the block takes it back."""
        change = Change(where, what, tuple(region))
        change.before = Region.of(self.program, region) if region else None
        try:
            yield change
            change.after = Region.of(self.program, region) if region else None
        except BaseException:
            for edit in reversed(change.edits):
                edit.undo()
            raise
        self.changes.append(change)

    def set_tensor(self, change: Change, ref: TensorRef, value: torch.Tensor | None) -> None:
        """Put another tensor under the name of a parameter or buffer; None leaves the name without one.

        A parameter's place gets a parameter, which needs a gradient if the old one did.
        """
        old = ref.value
        if value is not None and ref.name not in ref.owner._buffers and not isinstance(value, nn.Parameter):
            value = nn.Parameter(value, requires_grad=old.requires_grad if old is not None else False)
        self._do(change, TensorEdit(ref.owner, ref.name, value))

    def replace_module(self, change: Change, module: nn.Module, new: nn.Module) -> None:
        """Put another module in every place of the tree that holds this one."""
        for parent in self.program.root.modules():
            for name, child in parent._modules.items():
                if child is module:
                    self._do(change, ModuleEdit(parent, name, new))

    def set_forward(self, change: Change, module: nn.Module, forward: Any) -> None:
        """Give one module instance another forward."""
        self._do(change, AttributeEdit(module, "forward", forward))

    def bypass(self, node: fx.Node) -> None:
        """Take the node out of its graph; whoever used its value uses its input instead."""
        source = node.all_input_nodes[0]
        self._own(node)
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)

    def set_bias(self, change: Change, conv: Convolution, value: torch.Tensor) -> None:
        """Give the convolution this bias, (out,), whether it had one or not."""
        weight = conv.weight.value
        assert weight is not None
        needs_gradient = weight.requires_grad if conv.bias_value is None else conv.bias_value.requires_grad
        parameter = nn.Parameter(value, requires_grad=needs_gradient)
        if conv.bias is not None:
            self.set_tensor(change, conv.bias, parameter)
            return
        ref = TensorRef(conv.weight.owner, _free_name(conv.weight))
        self.set_tensor(change, ref, parameter)
        self._own(conv.node)
        with conv.node.graph.inserting_before(conv.node):
            reader = conv.node.graph.get_attr(self._target_in(conv.node, ref))
        _set_bias_argument(conv.node, reader)

    def drop_bias(self, change: Change, conv: Convolution) -> None:
        """Leave the convolution without its bias."""
        assert conv.bias is not None
        if conv.module is None:
            self._own(conv.node)
            readers = [node for node in conv.node.all_input_nodes if node.op == "get_attr"]
            _set_bias_argument(conv.node, None)
            for reader in readers:
                if not reader.users:
                    reader.graph.erase_node(reader)
        self.set_tensor(change, conv.bias, None)

    def keep_output_formats(self, formats: Sequence[torch.memory_format | None]) -> None:
        """Bring the root's output leaves into these memory formats; None leaves a leaf as it comes.

        This stands around the root's forward, whatever that is: what an output holds may differ from call to call.
        """
        root = self.program.root
        with self.change("", "outputs in the memory format of the original") as change:
            self.set_forward(change, root, FormattedForward(root, tuple(formats), root.__dict__.get("forward")))

    def _target_in(self, node: fx.Node, ref: TensorRef) -> str:
        owner = self.program.home(node).module
        prefix = next(path for path, module in owner.named_modules() if module is ref.owner)
        return f"{prefix}.{ref.name}" if prefix else ref.name

    def carry_norm(self, change: Change, conv: Convolution, norm: BatchNorm) -> None:
        """Take a BatchNorm out whose convolution does its work now.

        In a traced forward its call goes, and its place in the tree becomes an identity. In a forward that can't be
        traced it stays, without tensors, as a check that the run goes the way that the recorded runs went.
        """
        home = self.program.home(norm.node)
        if home.traced and self.program.home(conv.node).traced:
            self.bypass(norm.node)
            if norm.module is not None:
                self.replace_module(change, norm.module, nn.Identity())
            return
        assert conv.module is not None
        assert norm.module is not None
        pair = FoldedPair(self.program.where(conv.node), self.program.where(norm.node))
        self.set_forward(change, conv.module, FoldedConvForward(conv.module, pair))
        self.set_forward(change, norm.module, FoldedNormForward(norm.module, pair))
        for ref in norm.tensors:
            self.set_tensor(change, ref, None)
        # The module that calls both gets its forward at the end, once for all its pairs.
        self._pairs.setdefault(id(home.module), (home.module, []))[1].append(pair)

    def _do(self, change: Change, edit: Edit) -> None:
        edit.apply()
        change.edits.append(edit)

    def _own(self, node: fx.Node) -> None:
        """Before the first write to a graph, keep it as it was."""
        home = self.program.home(node)
        if id(home) in self._before:
            return
        nodes: dict[fx.Node, fx.Node] = {}
        graph = fx.Graph()
        output = next(node for node in reversed(home.graph.nodes) if node.op == "output")
        nodes[output] = graph.output(graph.graph_copy(home.graph, nodes))
        self._before[id(home)] = _Rewritten(graph, nodes)

    def before(self, home: ModuleGraph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
        """The graph as it was before this pass, and the node there for each node of then."""
        rewritten = self._before.get(id(home))
        return (rewritten.graph, rewritten.nodes) if rewritten else (home.graph, {n: n for n in home.graph.nodes})

    def finish(self) -> None:
        """Check the rewritten graphs and make them the forwards of their modules."""
        for graph in self._rewritten():
            graph.graph.lint()
            if not graph.traced:
                continue
            graphs = {graph.module.training: (graph.graph, graph.outputs)}
            self._install(graph.module, GraphForward(graph.module, graph.path, graph.structure, graphs))
        for module, pairs in self._pairs.values():
            earlier = inner_forward(module)
            known = earlier.pairs if isinstance(earlier, SettlingForward) else ()
            self._install(module, SettlingForward(module, (*known, *pairs)))
        self.program.refresh()

    def _install(self, module: nn.Module, forward: Any) -> None:
        earlier = module.__dict__.get("forward")
        if isinstance(earlier, FormattedForward):
            forward = FormattedForward(module, earlier.formats, forward)
        edit = AttributeEdit(module, "forward", forward)
        edit.apply()
        self._installed.append(edit)

    def _rewritten(self) -> list[ModuleGraph]:
        return [graph for graph in self.program.graphs.values() if id(graph) in self._before]

    @property
    def edits(self) -> list[Edit]:
        """All edits of modules, in the order they were made."""
        return [edit for change in self.changes for edit in change.edits] + self._installed

    def roll_back(self) -> None:
        """Take everything back."""
        for edit in reversed(self.edits):
            edit.undo()
        for graph in self._rewritten():
            graph.graph = self._before[id(graph)].graph
        self._before.clear()
        self._installed.clear()
        self._pairs.clear()
        self.program.refresh()


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
