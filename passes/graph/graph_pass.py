"""The base class of graph passes, and the rewriter by which they read and change a captured graph.

def rewrite(self, graph: GraphRewriter, context: Context) -> None:
    for node in graph.calls("gelu"):
        if graph.argument(node, 1, "approximate", "none") != "none":
            graph.skip(node, "it is an approximation already")
            continue
        with graph.change(node, "GELU by tanh"):
            graph.replace_call(node, F.gelu, (node.args[0],), {"approximate": "tanh"})

Each change has a name, so that it can be checked and excluded.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx, nn

from passes.base import Change, Context, ModelTree, NothingWritten, Pass, PassResult, Place, Remark, Skip
from passes.errors import RequirementNotMet
from passes.graph import captured, effects, layouts
from passes.graph.captured import (
    EXAMPLE,
    CapturedGraph,
    Derived,
    Unusable,
    Usable,
    computing,
    example_of,
    name_of,
    propagate,
)
from passes.graph.recording import Recording

Node = fx.Node
"""A node of torch.fx: a torch call or an input of a captured graph, or a node of a recorded run."""
# The reason why a change must not be made; None to make it.
WhyNot = Callable[[Place], str | None]


class GraphPass(Pass):
    """A pass that rewrites captured graphs.

    `rewrite` is first tried on the graphs of the example inputs. Later it is called for each newly captured graph, and
    makes only the changes that were accepted in the trial.
    """

    needs_run: ClassVar[str] = "needs recorded runs of the model"
    # Whether exported files contain the changes, provided that the forward is a single graph
    in_files: ClassVar[bool] = True
    # Modules that the pass changes, and that it refuses with a reason: its tests and documentation
    VALID: ClassVar[Sequence[Example]] = ()
    REFUSED: ClassVar[Sequence[Example]] = ()

    @abstractmethod
    def rewrite(self, graph: GraphRewriter, context: Context) -> None:
        """Find the candidates, and change or skip each."""

    def is_for(self, recording: Recording) -> bool:
        """Whether a recorded eager run has a call that the pass may change; if none has, nothing is captured."""
        return True

    def left_out(self, tree: ModelTree, recording: Recording) -> Sequence[Skip]:
        """The candidates of a run that the pass isn't for, each with the reason; none by default."""
        return ()

    def run(self, tree: ModelTree, context: Context) -> PassResult:
        """Have the graphs of the example inputs rewritten by this pass, and its changes checked.

        Raises:
            RequirementNotMet: there are no example inputs, and the pass is of no use without.
        """
        if context.try_on_graphs is not None:
            return context.try_on_graphs(self, tree, context)
        if self.needs_run:
            raise RequirementNotMet(f"The pass {self.name} {self.needs_run}: add example inputs.")
        return PassResult((), (Skip("", "it needs a run: add example inputs"),), NothingWritten())


@dataclass
class GraphChange(Change):
    """One rewrite of a captured graph."""

    replaced: dict[fx.Node, fx.Node] = field(default_factory=dict)  # the replaced nodes, each with its replacement
    made: list[fx.Node] = field(default_factory=list)
    check: RegionCheck | None = None  # the check of this change; None if it replaces no value


@dataclass
class RegionCheck:
    """The check of one change: subgraphs from the same sources to the replaced values, and to their replacements."""

    sources: tuple[fx.Node, ...]  # the nodes of the original graph whose values are the inputs of both
    old: fx.Graph
    new: fx.Graph


class GraphRewriter:
    """Reads and rewrites one captured graph, for one pass."""

    def __init__(self, before: CapturedGraph, why_not: WhyNot, mode: str, *, explains: bool = False) -> None:
        # The graph that is rewritten, with the modules that it was captured from; `before` is not changed.
        self.captured, twins = before.copied()
        self.changes: list[GraphChange] = []
        self.skips: list[Skip] = []
        self.remarks: list[Remark] = []
        self.mode = mode  # "inference" or "training"
        self.explains = explains  # whether `explain` records anything
        self._why_not = why_not
        self._words: Counter[tuple[str, str]] = Counter()
        self._open: GraphChange | None = None
        # The last placeholder, of which a pass adds none, or the last derived tensor after it.
        self._before_derived = self._last_input = self.captured.graph.find_nodes(op="placeholder")[-1:]
        # For each node, the node of `before` with the same value.
        self._origins = {twin: node for node, twin in twins.items()}

    # Find -------------------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes, in the order of execution, without those inside a transform of torch.func such as `vmap`.

        The values there are wrapped, so a change of them can't be checked.
        """
        return [node for node in self.captured.graph.nodes if not effects.is_in_transform(node)]

    def calls(self, *names: str) -> list[fx.Node]:
        """The calls by function or method name; all calls without a name.

        "relu" matches F.relu(x), torch.relu(x) and x.relu().
        """
        calls = (node for node in computing(self.captured.graph) if not names or name_of(node) in names)
        return [node for node in calls if not effects.is_in_transform(node)]

    def where(self, node: fx.Node) -> str:
        """The location of a node, for reports."""
        return self.captured.where(node)

    argument = staticmethod(captured.argument)
    example = staticmethod(example_of)
    is_tensor = staticmethod(captured.is_tensor)
    name_of = staticmethod(captured.name_of)

    def between(self, node: fx.Node, sources: Collection[fx.Node]) -> list[fx.Node]:
        """The nodes that compute the node's value from the sources, including the node itself, in execution order."""
        return sorted(captured.between([node], set(sources)))

    def function_of(self, node: fx.Node, sources: Sequence[fx.Node]) -> Callable[..., Any]:
        """The function that computes the node's value from the values of the sources, in their order.

        Raises:
            KeyError: the value depends on an input of the graph that isn't among the sources.
        """
        return captured.function_of(captured.subgraph([node], sources), self.captured.home)

    # Judge ------------------------------------------------------------------------------------------------------------

    def memory(self) -> effects.Memory:
        """Which values may be written to or returned, in the current graph."""
        return effects.Memory(self.captured.graph, self.captured.tensors)

    def settings(self) -> dict[fx.Node, int]:
        """A number for each node; nodes with equal numbers run under the same autocast and gradient mode."""
        found, number = {}, 0
        for node in self.captured.graph.nodes:
            number += effects.is_setting(node)
            found[node] = number
        return found

    is_dropout_off = staticmethod(effects.is_dropout_off)
    is_pure = staticmethod(effects.is_pure)
    is_repeatable = staticmethod(effects.is_repeatable)
    why_layout_shows = staticmethod(layouts.why_layout_shows)
    laid_out = staticmethod(layouts.laid_out)

    def is_derived(self, node: fx.Node) -> bool:
        """Whether `derived` made the node, in this pass or an earlier one."""
        return isinstance(node.target, Derived)

    def is_of_layer(self, node: fx.Node) -> bool:
        """Whether a torch.nn layer made the node."""
        return self.captured.is_of_layer(node)

    def is_parameter(self, node: Any) -> bool:
        """Whether the node is a parameter or buffer."""
        return node in self.captured.tensors

    def value(self, node: fx.Node) -> torch.Tensor | None:
        """The parameter or buffer itself, which must not be changed; None for other nodes."""
        return self.captured.value_of(node)

    def path_of(self, node: fx.Node) -> str:
        """The path of a parameter or buffer, "head.weight"; for other nodes, the path of the module that made them."""
        return self.captured.tensors.get(node) or self.captured.path_of(node)

    def skip(self, node: fx.Node, reason: str) -> None:
        """Record that a candidate was skipped; the reason is a clause without a full stop."""
        line = self.captured.line_of(node) if self.explains else ""
        self.skip_place(self.where(node), f"{reason} ({line})" if line else reason)

    def explain(self, node: fx.Node, reason: str) -> None:
        """Record why a pattern doesn't match at a node; reported as a skip by `optimize(…, explain=True)` only."""
        if self.explains:
            self.skip(node, reason)

    def skip_place(self, where: str, reason: str) -> None:
        """Record a skip for a module path."""
        self.skips.append(Skip(where, reason))

    # Rewrite ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def change(self, where: fx.Node | str, what: str) -> Iterator[GraphChange]:
        """Make one change; every write must be inside such a block.

        A derived tensor that can't be used ends the block: the change is then skipped with the reason.

        The change is checked later: the replaced values and their replacements must agree. Nodes that become unused are
        removed if they have no side effects. An excluded change runs like any other, and its writes are then discarded.
        """
        if self._open is not None:
            raise RuntimeError("a change is opened inside another one")
        where = where if isinstance(where, str) else self.where(where)
        change = GraphChange(where, what, self._words[where, what])
        self._words[where, what] += 1
        reason = self._why_not(change.place)
        change.left_alone = reason is not None
        self._open = change
        try:
            try:
                yield change
            except Unusable as unusable:
                change.left_alone, reason = True, str(unusable)
            if reason is None:
                self._close(change)
                self.changes.append(change)
                return
            for node in reversed(change.made):
                self.captured.graph.erase_node(node)
            self._before_derived = self._last_input
            if reason:
                self.skips.append(Skip(where, reason))
        finally:
            self._open = None

    def replace_call(
        self, node: fx.Node, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """Replace the node with a call of another function; returns the new node."""
        new = self.call(node, function, args, kwargs)
        if EXAMPLE not in new.meta and EXAMPLE in node.meta:
            new.meta[EXAMPLE] = node.meta[EXAMPLE]
        self.replace(node, new)
        return new

    def call(
        self,
        before: fx.Node,
        function: Callable[..., Any] | str,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None = None,
        *,
        like: fx.Node | None = None,
    ) -> fx.Node:
        """Insert a new call of a function, or of a tensor's method by name, before a node.

        Its example is that of `like` if that is given; to compute one takes milliseconds.
        """
        new = self._insert(before, function, args, kwargs or {})
        if like is None:
            propagate(new)
        else:
            new.meta[EXAMPLE] = like.meta[EXAMPLE]
        return new

    def _insert(
        self, before: fx.Node, function: Callable[..., Any] | str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> fx.Node:
        change = self._writing()
        op = "call_method" if isinstance(function, str) else "call_function"
        with self.captured.graph.inserting_before(before):
            new = self.captured.graph.create_node(op, function, tuple(args), kwargs)
        captured.take_place(new, before)
        change.made.append(new)
        return new

    def redirect(self, user: fx.Node, node: fx.Node, other: fx.Node) -> None:
        """Make one user of the node read another node instead, without a check of this change.

        For users that read only the shape, and for the same values in other memory: see `settle`.
        """
        if not self._writing().left_alone:
            user.replace_input_with(node, other)

    def derived(
        self,
        before: fx.Node,
        function: Callable[..., Any],
        *sources: fx.Node,
        what: str,
        usable: Usable | None = None,
        in_autocast: bool = True,
    ) -> fx.Node:
        """Insert a tensor that a function computes from parameters and buffers, once for all calls.

        It is an input of the rewritten graph, and is computed again when a source was written to, moved, cast or
        replaced; torch doesn't count writes through `.data`. If gradients flow to a source, a result for inference runs
        the graph as it was written, and a result for training computes the tensor in the graph at each call.

        Args:
            before: the node to insert it before.
            function: computes the tensor from the sources. Equal functions of the same sources share one value, also
                between graphs: use a frozen dataclass with `__call__`.
            sources: parameters, buffers, or other derived tensors.
            what: a description of the tensor.
            usable: the reason why a value must not be used, as a clause; None for values that may. It is asked now,
                and a reason makes a skip of this change. It is asked again at each later value; with a reason, the
                graph runs as it was written.
            in_autocast: whether the function is part of the forward and follows an active autocast; False for
                functions that always run without autocast.
        """
        call = Derived(function, what, usable, in_autocast=in_autocast, each_call=self.mode == "training")
        new = self._insert(before, call, sources, {})
        # It needs nothing else from the graph, and may be a source of a derived tensor for an earlier node.
        max([*self._before_derived, *sources]).append(new)
        self._before_derived = [new]
        if self.mode == "inference":
            # A result for inference has its own buffers, which don't follow later writes to the caller's.
            places = (self.captured.modules.buffer_at(self.captured.tensors.get(source, "")) for source in sources)
            self._writing().sources += [place for place in places if place is not None]
        self.captured.derived.compute_now(self.captured, new)
        if EXAMPLE not in new.meta:
            propagate(new)
        return new

    def replace(self, node: fx.Node, other: fx.Node) -> None:
        """Make the users of the node read another node of equal value."""
        change = self._writing()
        change.replaced[node] = other
        if change.left_alone:
            return
        other.meta[effects.ALSO_IN] = effects.places_of(other) | effects.places_of(node)
        node.replace_all_uses_with(other, delete_user_cb=lambda user: user is not other)
        # A node that has a counterpart in `before` keeps it.
        self._origins.setdefault(other, self._origins.get(node, node))

    def settle(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Call it once after all changes, if nodes got inputs with other strides: see `layouts.settle`."""
        return layouts.settle(self.captured, nodes)

    def remark(self, where: str, text: str) -> None:
        """Record a place that costs performance and that only the user can fix; the text is a clause."""
        self.remarks.append(Remark(where, text))

    def drop(self, nodes: Sequence[fx.Node]) -> None:
        """Remove nodes without users, given in the order of execution."""
        self._writing()
        if self._open is not None and not self._open.left_alone:
            for node in reversed(nodes):
                self.captured.graph.erase_node(node)

    def drop_unused(self, node: fx.Node) -> None:
        """Remove a node that has no users any more, and what only it needed, if that has no side effects."""
        if not self._writing().left_alone:
            for dead in reversed(self._dead([node])):
                self.captured.graph.erase_node(dead)

    def _writing(self) -> GraphChange:
        if self._open is None:
            raise RuntimeError("a graph is modified outside a change")
        return self._open

    def _close(self, change: GraphChange) -> None:
        if not change.replaced:
            return
        dead = self._dead(change.replaced)
        old_outputs, new_outputs = list(change.replaced), list(change.replaced.values())
        made = set(change.made)
        region = {*dead, *old_outputs}
        # New nodes that write in place belong to the change, although no output depends on them.
        writing = [node for node in change.made if not effects.is_pure(node)]
        # Both subgraphs start from the same values: the inputs of the new nodes and of the replaced ones.
        stops = _closest([*new_outputs, *writing], made.__contains__) | _closest(old_outputs, region.__contains__)
        # They must exist in the original graph too.
        sources = tuple(sorted(_closest(stops, lambda node: node not in self._origins)))
        change.check = RegionCheck(
            tuple(self._origins[stop] for stop in sources),
            captured.subgraph(old_outputs, sources),
            captured.subgraph(new_outputs, sources, also=writing),
        )
        for node in reversed(dead):
            self.captured.graph.erase_node(node)

    def _dead(self, replaced: Collection[fx.Node]) -> list[fx.Node]:
        """The replaced nodes and those before them that became unused, in the order of execution."""
        dead: dict[fx.Node, None] = {}
        waiting = list(replaced)
        while waiting:
            node = waiting.pop()
            if node in dead or node.op in ("placeholder", "output") or any(user not in dead for user in node.users):
                continue
            if effects.is_pure(node) or (self._open is not None and node in self._open.replaced):
                dead[node] = None
                waiting += node.all_input_nodes
        return sorted(dead)


def _closest(nodes: Iterable[fx.Node], is_inside: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """The closest nodes that aren't inside, from these on backwards."""
    return {node for node in captured.before(nodes, is_inside) if not is_inside(node)}


# Examples -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """A module, and whether a pass changes it."""

    # The expression that the module returns for its input `x`: "norm(conv(x))". It may use `torch`, `F` and the layers
    forward: str
    shape: tuple[int, ...]  # the shape of `x`; its first dim is the batch
    # The layers and parameters by name, each as an expression: "nn.Conv2d(3, 8, 3)"
    layers: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""  # a part of the reason why the pass refuses it; "" if the pass changes it

    def module(self) -> nn.Module:
        """Make the module in eval mode, with random weights and statistics."""
        names: dict[str, Any] = {"torch": torch, "F": F, "nn": nn}
        made = {name: eval(code, names) for name, code in self.layers.items()}
        forward = eval(f"lambda self, x, {', '.join(made)}: {self.forward}", names)
        module = type("Net", (_Net,), {"run": forward})(made).eval()
        with torch.no_grad():
            for tensor in (*module.parameters(), *(each for each in module.buffers() if each.is_floating_point())):
                tensor.uniform_(0.5, 1.5)
        return module

    def __str__(self) -> str:
        layers = ", ".join(f"`{name} = {code}`" for name, code in self.layers.items())
        text = f"`{self.forward}`{f' with {layers}' if layers else ''}"
        return f"{text}: {self.reason}" if self.reason else text


class _Net(nn.Module):
    run: Any

    def __init__(self, made: Mapping[str, Any]) -> None:
        super().__init__()
        for name, each in made.items():
            setattr(self, name, each)
        self._names = list(made)

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(x, *(getattr(self, name) for name in self._names))
