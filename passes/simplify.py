"""A forward without what it needn't do: what does nothing, is done twice, is the same at every call, or is used by nobody."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from passes.base import GraphPass
from passes.graph.capture import ModuleGraph, is_atom
from passes.graph.constants import Constant, value_of
from passes.graph.effects import Aliases, is_dropout_off, is_pure, is_repeatable, may_share
from passes.graph.forward import GraphForward, cost_of
from passes.graph.guards import inner_forward
from passes.graph.hooks import has_hooks
from passes.graph.match import Node, is_stock, only_tensor
from passes.graph.program import operation_name
from passes.graph.rewriter import Change, Rewriter
from passes.graph.subgraph import graph_between
from passes.graph.tracing import IS_TENSOR


@dataclass(frozen=True)
class Simplify(GraphPass):
    """Leave out what does nothing, what is computed twice or for nobody, and compute constants once.

        h = dropout(x)                 in eval                 ->  x
        a = f(x); b = f(x)             f pure                  ->  b = a
        w = g(parameters, numbers)     g of several operations ->  computed once, and again when the tensors change
        d = f(x)                       nobody uses d           ->  nothing

    Nothing is left out that has an effect: that draws random numbers, writes to a tensor, checks one, is watched by a hook
    or is a function of unknown code. Two values become one, and constants are kept, only where nothing may write to
    them. Every value stays the same to the bit.

    No tensor of the module is touched, so the forward of the class stays as right as its graph. It answers where the
    graph doesn't hold: for calls of another structure, and once something that was left out would do something: a Dropout
    that is put in training, an Identity with a hook. A constant is computed anew once a tensor that it is made of was
    written to, moved or replaced; torch doesn't tell of writes by `.data`.

    Left alone are forwards that gain less than it costs to see, at every call, that a graph still holds: those that read
    large objects, such as a configuration, or hold no more than an Identity.

    Not in the preset, as torch.compile makes code anew for each graph that stands in for a forward, where equal blocks
    that are compiled one by one share it else.

    Does not handle: forwards that can't be traced; what is done twice in two modules; constants that go through modules;
    arithmetic of other forms (x + 0 isn't x where x is -0.0); sizes and views, which cost next to nothing, on their own.
    """

    name: ClassVar[str] = "simplify"
    modes: ClassVar[tuple[str, ...]] = ("inference",)

    def rewrite(self, graph: Rewriter) -> None:
        """Simplify every graph that stands in for a forward, those of children first: a parent's call may do nothing then."""
        for home in reversed(list(graph.program.graphs.values())):
            if home.traced:
                _Simplifier(graph, home).run()


# A constant is kept where it spares at least so many operations, or computing so many elements.
_WORTH_OPERATIONS = 3
_WORTH_ELEMENTS = 1 << 14
# It may take so many times the memory of what it is made of, beside so many bytes.
_MOST_GROWTH = 2
_MOST_BYTES = 16 << 20


class _Simplifier:
    """Simplifies one graph."""

    def __init__(self, graph: Rewriter, home: ModuleGraph) -> None:
        self.graph = graph
        self.program = graph.program
        self.home = home
        self._aliases: Aliases | None = None
        self._may_write: bool | None = None
        self._places: dict[Node, int] = {}
        self._has_written = False

    def run(self) -> None:
        """Leave out all that can be, if it is worth it."""
        gain = self._gain()
        if not gain:
            return
        if gain <= self._cost():
            self.graph.skip_module(self.home.path, _NOT_WORTH)
            return
        self._leave_out_nothings()
        self._compute_once()
        self._keep_constants()
        self._leave_out_unused()

    def _cost(self) -> int:
        """What the graph costs as a forward; nothing where it is one already."""
        if isinstance(inner_forward(self.home.module), GraphForward):
            return 0
        return cost_of(self.home.structure, self.home.baked)

    def _gain(self) -> int:
        """About how many tenths of a microsecond what could be left out takes at a call, in Python alone."""
        gain = 0
        known: dict[Any, Node] = {}
        firsts: dict[Node, Node] = {}
        constant: dict[Node, None] = {}
        for node in self._nodes:
            child = self.program.module_of(node)
            if self._is_constant(node, constant):
                constant[node] = None
                gain += _OPERATION if self._computes(node) else 0
            elif child is not None and self._nothing(child) is not None:
                gain += (_DROPOUT if isinstance(child, _DROPOUTS) else _CHILD) - _WATCHED
            elif node.op in ("call_module", "call_function", "call_method"):
                firsts[node] = first = known.setdefault(self._key(node, firsts), node)
                is_needless = self._computes(node) and (first is not node or not node.users)
                if _gives_again(node) is not None or (is_needless and is_repeatable(self.program, node)):
                    gain += _OPERATION if child is None else _LAYER
        return gain

    @property
    def _nodes(self) -> list[Node]:
        return list(self.home.graph.nodes)

    @property
    def aliases(self) -> Aliases:
        """Those of the graph as it was: to leave something out makes more of them one only where nothing is written."""
        if self._aliases is None:
            self._aliases = Aliases(self.program, self.home.graph)
        return self._aliases

    def may_write(self) -> bool:
        """Whether the graph can stand in for the forward; the first refusal is recorded."""
        if self._may_write is None:
            unwatched = self.home.unwatched()
            self._may_write = unwatched is None
            if unwatched is not None:
                text = f"its forward {unwatched}: what that answers at another call can't be known"
                self.graph.skip_module(self.home.path, text)
        return self._may_write

    def _change(self, where: str, what: str, region: tuple[Node, ...] = ()) -> AbstractContextManager[Change]:
        self._has_written = True
        return self.graph.change(where, what, region, gives_way=True)

    # What does nothing ------------------------------------------------------------------------------------------------

    def _leave_out_nothings(self) -> None:
        for node in self._nodes:
            if not node.users:
                continue
            if node.op == "call_module":
                self._leave_out_call(node)
            elif (found := _gives_again(node)) is not None and self.may_write():
                source, is_what = found
                if reason := self._why_not_replaced(node, source, is_what):
                    self.graph.skip(node, reason)
                    continue
                text = f"{operation_name(node)} left out, which gives what it is given"
                with self._change(self.program.where(node), text, self._way(source, node)):
                    self.graph.bypass(node, source)

    def _way(self, source: Node, node: Node) -> tuple[Node, ...]:
        """The nodes from behind the source to the node: where the one takes back what the other did, there are two."""
        before = node.args[0]
        return (node,) if before is source or not isinstance(before, type(node)) else (before, node)

    def _leave_out_call(self, node: Node) -> None:
        child = self.program.module_of(node)
        if child is None or only_tensor(node) is None or (what := self._nothing(child)) is None:
            return
        if reason := _why_not_left_out(child):
            self.graph.skip(node, reason)
        elif self.may_write():
            with self._change(self.program.where(node), what, (node,)):
                self.graph.leave_out(node)

    def _nothing(self, child: nn.Module) -> str | None:
        """What to say of a module that gives its only input as it is; None for others."""
        if isinstance(child, _DROPOUTS):
            is_off = is_stock(child, _DROPOUTS) and not child.training
            return "left out, as dropout does nothing in eval" if is_off else None
        if is_atom(child):
            return "left out, as an identity does nothing" if is_stock(child, (nn.Identity,)) else None
        inner = self.program.graphs.get(id(child))
        if inner is None or not inner.shows_every_call or child.training or inner.unwatched() is not None:
            return None
        first, *others = inner.graph.nodes
        is_nothing = first.op == "placeholder" and len(others) == 1 and inner.outputs.is_leaf()
        if not is_nothing or others[0].args[0] != [first]:
            return None
        return "left out, as its forward gives what it is given"

    def _why_not_replaced(self, node: Node, source: Node, is_what: str) -> str | None:
        # What is the same tensor stays so whatever is done to it; a view is another one, also where only its shape is set.
        if is_what == _VIEW and self.aliases.may_be_written((node, source)):
            return f"what {operation_name(node)} gives again may be written to"
        return self._why_not_one(node, source) if is_what == _COPY else None

    def _why_not_one(self, node: Node, other: Node) -> str | None:
        """Why the values can't be one."""
        if self.aliases.may_be_written((node, other)):
            return f"the value of {operation_name(node)} or of what it is made of may be written to"
        if self.aliases.may_leave(node):
            return f"the value of {operation_name(node)} leaves the forward, and may be written to by others"
        return None

    # What is done twice -----------------------------------------------------------------------------------------------

    def _compute_once(self) -> None:
        known: dict[Any, Node] = {}
        # Of nodes that give equal values, the first one: also of sizes and views, which aren't worth a change.
        firsts: dict[Node, Node] = {}
        for node in self._nodes:
            if node.op not in ("call_module", "call_function", "call_method") or not node.users:
                continue
            # What draws or does something else is looked at only where there are two alike.
            first = known.setdefault(self._key(node, firsts), node)
            if first is node or not is_repeatable(self.program, node):
                continue
            computes = self._computes(node)
            if self.aliases.may_be_written(node.all_input_nodes):
                if computes:
                    text = "stands there twice, and what it is given may be written to in between"
                    self.graph.skip(node, f"{operation_name(node)} {text}")
                continue
            firsts[node] = first
            if not computes or not self.may_write():
                continue
            if reason := self._why_not_one(node, first):
                self.graph.skip(node, reason)
                continue
            text = f"{operation_name(node)} computed once instead of twice"
            # The second one's arguments may be sizes and views that equal those of the first.
            region = (first, node) if first.args == node.args and first.kwargs == node.kwargs else ()
            with self._change(self.program.where(node), text, region):
                self.graph.bypass(node, first)

    def _computes(self, node: Node) -> bool:
        """Whether the node makes a tensor, and doesn't just ask for a size or look at another tensor."""
        return node.op == "call_module" or (IS_TENSOR in node.meta and not may_share(self.program, node))

    def _key(self, node: Node, firsts: dict[Node, Node]) -> Any:
        target = id(self.program.module_of(node)) if node.op == "call_module" else node.target
        return node.op, target, _key_of(node.args, firsts), _key_of(node.kwargs, firsts)

    # What is the same at every call -----------------------------------------------------------------------------------

    def _keep_constants(self) -> None:
        constant: dict[Node, None] = {}
        nodes = self._nodes
        self._places = {node: place for place, node in enumerate(nodes)}
        for node in nodes:
            if self._is_constant(node, constant):
                constant[node] = None
        # The last ones first: what they are made of is then still as it was.
        for node in reversed(constant):
            if node.op != "get_attr" and any(user not in constant for user in node.users):
                self._keep(node)

    def _is_constant(self, node: Node, known: dict[Node, None]) -> bool:
        if node.op == "get_attr":
            return _has_values(self.program.tensor_of(node)[2])
        if node.op not in ("call_function", "call_method") or node.target is value_of:
            return False
        return all(source in known for source in node.all_input_nodes) and is_repeatable(self.program, node)

    def _keep(self, node: Node) -> None:
        way = sorted(_all_behind(node), key=self._places.__getitem__)
        sources = [one for one in way if one.op == "get_attr"]
        if IS_TENSOR not in node.meta or not any(self._computes(one) for one in way if one.op != "get_attr"):
            return
        constant = Constant(graph_between(sources, way, node), self.program.where(node))
        tensors = [self._tensor(source) for source in sources]
        with torch.no_grad():
            value = constant.compute(*tensors)
        if len(way) - len(sources) < _WORTH_OPERATIONS and value.numel() < _WORTH_ELEMENTS:
            return
        if reason := self._why_not_kept(node, way, tensors, value):
            self.graph.skip(node, reason)
        elif self.may_write():
            steps = tuple(one for one in way if one.op != "get_attr")
            text = f"{len(steps)} operations on constants computed once for all calls"
            with self._change(self.program.where(node), text, steps) as change:
                self.graph.substitute(change, steps, value_of, sources, constant)

    def _tensor(self, source: Node) -> torch.Tensor:
        tensor = self.program.tensor_of(source)[2]
        assert tensor is not None
        return tensor

    def _why_not_kept(
        self, node: Node, way: Sequence[Node], sources: Sequence[torch.Tensor], value: torch.Tensor
    ) -> str | None:
        made = [one for one in way if one.op != "get_attr"]
        if self.aliases.may_be_written(made):
            return f"the value of {operation_name(node)} is the same at every call, but may be written to"
        if self.aliases.may_leave(node):
            return f"the value of {operation_name(node)} is the same at every call, but leaves the forward"
        size = value.numel() * value.element_size()
        given = sum(source.numel() * source.element_size() for source in sources)
        if size > _MOST_GROWTH * given + _MOST_BYTES:
            return f"the value of {operation_name(node)} is the same at every call, but would take {size >> 20} MiB to keep"
        return None

    # What nobody uses -------------------------------------------------------------------------------------------------

    def _leave_out_unused(self) -> None:
        unused: dict[Node, None] = {}
        for node in reversed(self._nodes):
            if node.op in ("placeholder", "output") or any(user not in unused for user in node.users):
                continue
            if is_pure(self.program, node):
                unused[node] = None
        work = [node for node in unused if self._computes(node)]
        # Sizes and views that nobody uses cost next to nothing: they go where the graph is another one anyway.
        if not unused or not (work or self._has_written) or not self.may_write():
            return
        count = f"{len(work)} operations" if len(work) > 1 else operation_name(work[0]) if work else "sizes and views"
        with self._change(self.home.path, f"{count} left out, as nobody uses what is computed"):
            for node in unused:
                self.graph.erase(node)


# What a call of each takes in Python, in tenths of a microsecond; what it computes comes on top, for all but the first.
_DROPOUT, _CHILD, _OPERATION, _LAYER = 40, 12, 12, 40
# The look at a child that is left out.
_WATCHED = 6
_NOT_WORTH = "what could be left out costs less than to see at every call that its graph still holds"
_DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
_CASTS = frozenset({"bfloat16", "bool", "contiguous", "cpu", "cuda", "double", "float", "half", "int", "long", "to"})
_SETTLING = frozenset({"abs", "ceil", "floor", "relu", "relu6", "round", "sign", "trunc"})
# Whose values are floating point, whatever goes in.
_GIVING_FLOATS = frozenset({
    "conv1d", "conv2d", "conv3d", "exp", "gelu", "layer_norm", "linear", "rsqrt", "sigmoid", "silu", "softmax", "sqrt",
    "tanh", "div", "truediv", "interpolate", "mean",
})  # fmt: skip
_NEUTRAL = {"mul": 1, "rmul": 1, "div": 1, "truediv": 1, "sub": 0, "pow": 1}


def _why_not_left_out(child: nn.Module) -> str | None:
    if has_hooks(child):
        return "it does nothing, but has hooks"
    if type(child).__call__ is not nn.Module.__call__:
        return "it does nothing, but its class has a __call__ of its own"
    return None


# What an operation gives that does nothing: what it was given itself, a view of that, or a copy.
_ITSELF, _VIEW, _COPY = "itself", "view", "copy"


def _gives_again(node: Node) -> tuple[Node, str] | None:
    """The node whose value this one gives, and as what it gives that; None for what gives another value."""
    if node.op not in ("call_function", "call_method") or not node.args or not isinstance(node.args[0], type(node)):
        return None
    home = getattr(node.target, "__module__", None) or ""
    if node.op == "call_function" and not (
        home.startswith("torch") or home == "_operator" or _is_built_in(node.target)
    ):
        return None
    source, name = node.args[0], operation_name(node)
    if "dropout" in name:
        return (source, _ITSELF) if is_dropout_off(node) else None
    if IS_TENSOR not in source.meta or "out" in node.kwargs:
        return None
    if name == "getitem":
        return (source, _VIEW) if _is_whole(node.args[1]) else None
    if name == "pad":
        return (source, _COPY) if _pads_nothing(node) else None
    if name in _NEUTRAL:
        is_neutral = len(node.args) == 2 and not node.kwargs and _is_number(node.args[1], _NEUTRAL[name])
        return (source, _COPY) if is_neutral and _gives_floats(source) else None
    return _takes_back(node, source, name)


def _is_built_in(target: Any) -> bool:
    return isinstance(target, type(torch.relu)) and getattr(torch, target.__name__, None) is target


def _takes_back(node: Node, source: Node, name: str) -> tuple[Node, str] | None:
    """Where two alike do no more than one, or the second takes back what the first did."""
    if operation_name(source) != name and (operation_name(source), name) != ("unsqueeze", "squeeze"):
        return None
    if (
        source.op not in ("call_function", "call_method")
        or not source.args
        or not isinstance(source.args[0], type(node))
    ):
        return None
    if source.kwargs or node.kwargs or IS_TENSOR not in source.args[0].meta:
        return None
    mine, theirs = node.args[1:], source.args[1:]
    if any(isinstance(one, type(node)) for one in (*mine, *theirs)):
        return None
    if name in _CASTS or name in _SETTLING:
        return (source, _COPY if name in _SETTLING else _ITSELF) if mine == theirs else None
    if name == "transpose":
        return (source.args[0], _VIEW) if mine in (theirs, theirs[::-1]) else None
    if name == "squeeze":
        return (source.args[0], _VIEW) if mine == theirs and len(mine) == 1 else None
    return None


def _is_whole(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is Ellipsis or (isinstance(part, slice) and part == slice(None)) for part in parts)


def _pads_nothing(node: Node) -> bool:
    widths = node.args[1] if len(node.args) > 1 else node.kwargs.get("pad")
    mode = node.args[2] if len(node.args) > 2 else node.kwargs.get("mode", "constant")
    return mode == "constant" and isinstance(widths, list | tuple) and all(_is_number(width, 0) for width in widths)


def _is_number(value: Any, wanted: int) -> bool:
    return type(value) in (int, float) and value == wanted


def _gives_floats(node: Node) -> bool:
    return node.op in ("call_function", "call_method") and operation_name(node) in _GIVING_FLOATS


def _has_values(tensor: Any) -> bool:
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return False
    return not tensor.is_meta and not tensor.is_sparse and not tensor.is_quantized


def _key_of(value: Any, firsts: dict[Node, Node]) -> Any:
    """What tells arguments apart: 1, 1.0 and True, and -0.0 and 0.0, are three and two."""
    if isinstance(value, Node):
        return "node", id(firsts.get(value, value))
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(_key_of(item, firsts) for item in value)
    if isinstance(value, dict):
        return "dict", tuple((name, _key_of(item, firsts)) for name, item in value.items())
    if isinstance(value, slice):
        return "slice", _key_of((value.start, value.stop, value.step), firsts)
    if isinstance(value, int | float | str | torch.dtype | torch.device | torch.memory_format | type(None)):
        return type(value).__name__, repr(value)
    return "object", id(value)


def _all_behind(node: Node) -> set[Node]:
    """The node and all that its value is made of."""
    found = {node}
    waiting = [node]
    while waiting:
        new = [source for source in waiting.pop().all_input_nodes if source not in found]
        found.update(new)
        waiting += new
    return found
