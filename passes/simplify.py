"""Simplify captured graphs: remove no-ops, duplicates and unused results, and cache constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from passes.base import Context
from passes.graph_interface import Example, GraphPass, GraphRewriter, Memory, Node


@dataclass(frozen=True)
class Simplify(GraphPass):
    """Remove no-ops, duplicates and unused results, and compute constants only once.

        h = dropout(x)                 in eval                 ->  x
        a = f(x); b = f(x)             f pure                  ->  b = a
        w = g(parameters, numbers)     g of several operations ->  computed once, and again when the tensors change
        d = f(x)                       nobody uses d           ->  nothing

    Operations with side effects stay: those that draw random numbers, write to a tensor, check one, or call unknown
    code. Two values are merged, and constants are cached, only if nothing may write to them, in the forward or after
    it. All values stay bit-identical.

    No tensor of the module is modified. A Dropout that is switched to training, or an Identity that gets a hook, is
    noticed at the next call. A constant is cached if that saves 3 operations or 16,384 elements, and takes at most
    twice the memory of its sources plus 16 MiB. It is recomputed when a source was written to, moved, cast or replaced;
    torch doesn't count writes through `.data`. It is computed at each call under autocast. If gradients flow to a
    source, the graph runs as it was written. Exported files contain the simplified graph if the forward is one graph. If
    you trace, export or compile the result yourself, you get the original operations.

    Does not handle: what torch.compile can't capture; duplicates in two captured graphs; arithmetic other than x * 1,
    x / 1, x - 0 and x ** 1 (x + 0 isn't x where x is -0.0); sizes and views on their own, which cost next to nothing.
    """

    name: ClassVar[str] = "simplify"
    modes: ClassVar[tuple[str, ...]] = ("inference",)

    VALID: ClassVar[Sequence[Example]] = (
        Example("dropout(x) * 2", (2, 4), {"dropout": "nn.Dropout()"}),
        Example("torch.cat([x.exp() + 1, x.exp() + 2])", (2, 4)),
        Example(
            "x @ (scale.exp() * weight).sin()",
            (2, 4),
            {"scale": "nn.Parameter(torch.ones(4, 1))", "weight": "nn.Parameter(torch.rand(4, 4))"},
        ),
    )
    REFUSED: ClassVar[Sequence[Example]] = (
        Example("torch.cat([x.exp().add_(1), x.exp()])", (2, 4), reason="may be written to"),
        Example("(x.exp(), x.exp())", (2, 4), reason="leaves the forward, and may be written to outside"),
    )

    def rewrite(self, graph: GraphRewriter, context: Context) -> None:
        """Simplify one graph."""
        _leave_out_nothings(graph)
        _compute_once(graph)
        _keep_constants(graph)
        _leave_out_unused(graph)


# A constant is cached if that saves at least this number of operations, or its tensor has this number of elements.
_WORTH_OPERATIONS = 3
_WORTH_ELEMENTS = 1 << 14
# It may take at most this multiple of the memory of its sources, plus this number of bytes.
_MOST_GROWTH = 2
_MOST_BYTES = 16 << 20


# No-ops ---------------------------------------------------------------------------------------------------------------


def _leave_out_nothings(graph: GraphRewriter) -> None:
    memory = graph.memory()
    for node in graph.calls():
        if not node.users or (found := _gives_again(graph, node)) is None:
            continue
        source, is_what = found
        name = graph.name_of(node)
        if is_what == _VIEW and memory.may_be_written((node, source)):
            # An in-place operation may change the shape of one view alone. `_ITSELF` is safe: it is the same tensor.
            graph.skip(node, f"the value that {name} returns unchanged may be written to")
        elif is_what == _COPY and (reason := _why_not_one(graph, memory, node, source)):
            graph.skip(node, reason)
        else:
            is_layer = "dropout" in name and graph.is_of_layer(node)
            what = "because dropout does nothing in eval" if is_layer else "because it returns its input"
            with graph.change(node, f"left out, {what}" if is_layer else f"{name} left out, {what}"):
                graph.replace(node, source)


def _why_not_one(graph: GraphRewriter, memory: Memory, node: Node, other: Node) -> str | None:
    """The reason why the two values can't be one tensor; None if they can."""
    if memory.may_be_written((node, other)):
        return f"the value of {graph.name_of(node)}, or a value that it is computed from, may be written to"
    if memory.may_leave(node):
        return f"the value of {graph.name_of(node)} leaves the forward, and may be written to outside"
    return None


# Duplicates -----------------------------------------------------------------------------------------------------------


def _compute_once(graph: GraphRewriter) -> None:
    memory, settings = graph.memory(), graph.settings()
    known: dict[Any, Node] = {}
    # For each duplicate, the first node with this value. Includes sizes and views, which aren't worth a change.
    firsts: dict[Node, Node] = {}
    for node in graph.calls():
        if not node.users or graph.is_derived(node):
            continue
        # Side effects are checked only for calls that occur twice.
        first = known.setdefault(_key_of((settings[node], node.op, node.target, node.args, node.kwargs), firsts), node)
        if first is node or not graph.is_repeatable(node):
            continue
        computes = _computes(graph, memory, node)
        name = graph.name_of(node)
        if memory.may_be_written(node.all_input_nodes):
            if computes:
                graph.skip(node, f"{name} occurs twice, and its input may be written to in between")
            continue
        firsts[node] = first
        if not computes:
            continue
        if reason := _why_not_one(graph, memory, node, first):
            graph.skip(node, reason)
            continue
        with graph.change(node, f"{name} computed once instead of twice"):
            graph.replace(node, first)


def _computes(graph: GraphRewriter, memory: Memory, node: Node) -> bool:
    """Whether the node computes a new tensor, and not just a size or a view."""
    return graph.is_tensor(node) and not memory.shares(node)


# Constants ------------------------------------------------------------------------------------------------------------


def _keep_constants(graph: GraphRewriter) -> None:
    memory, settings = graph.memory(), graph.settings()
    constant: dict[Node, None] = {}
    for node in graph.nodes:
        # After the first autocast or gradient switch, a constant may have another dtype than when computed separately.
        if not settings[node] and _is_constant(graph, node, constant):
            constant[node] = None
    # In reverse order, so that the sources of each constant are still unchanged.
    for node in reversed(constant):
        if node.op != "placeholder" and any(user not in constant for user in node.users):
            _keep(graph, memory, node)


def _is_constant(graph: GraphRewriter, node: Node, known: Mapping[Node, None]) -> bool:
    if node.op == "placeholder":
        return graph.is_parameter(node)
    if node.op not in ("call_function", "call_method") or graph.is_derived(node):
        return False
    return all(source in known for source in node.all_input_nodes) and graph.is_repeatable(node)


def _keep(graph: GraphRewriter, memory: Memory, node: Node) -> None:
    sources = [source for source in graph.between(node, ()) if source.op == "placeholder"]
    steps = graph.between(node, sources)
    if not graph.is_tensor(node) or not any(_computes(graph, memory, step) for step in steps):
        return
    value = graph.example(node)
    if len(steps) < _WORTH_OPERATIONS and value.numel() < _WORTH_ELEMENTS:
        return
    name = graph.name_of(node)
    size = value.numel() * value.element_size()
    given = sum(example.numel() * example.element_size() for example in map(graph.example, sources))
    if memory.may_be_written(steps):
        graph.skip(node, f"the value of {name} is the same at every call, but may be written to")
    elif memory.may_leave(node):
        graph.skip(node, f"the value of {name} is the same at every call, but leaves the forward")
    elif size > _MOST_GROWTH * given + _MOST_BYTES:
        graph.skip(node, f"the value of {name} is the same at every call, but would take {size >> 20} MiB to keep")
    else:
        with graph.change(node, f"{len(steps)} operations on constants computed once for all calls"):
            function = graph.function_of(node, sources)
            graph.replace(node, graph.derived(node, function, *sources, what=name))


# Unused results -------------------------------------------------------------------------------------------------------


def _leave_out_unused(graph: GraphRewriter) -> None:
    memory = graph.memory()
    unused: dict[Node, None] = {}
    for node in reversed(graph.calls()):
        if all(user in unused for user in node.users) and graph.is_pure(node):
            unused[node] = None
    work = [node for node in unused if _computes(graph, memory, node)]
    # Unused sizes and views cost next to nothing. They are removed only if the graph changes anyway.
    if not unused or not (work or graph.changes):
        return
    count = f"{len(work)} operations" if len(work) > 1 else graph.name_of(work[0]) if work else "sizes and views"
    with graph.change("", f"{count} left out, because the result is unused"):
        graph.drop(list(reversed(unused)))


# Which operations are no-ops ------------------------------------------------------------------------------------------

_CASTS = frozenset({"bfloat16", "bool", "contiguous", "cpu", "cuda", "double", "float", "half", "int", "long", "to"})
_SETTLING = frozenset({"abs", "ceil", "floor", "relu", "relu6", "round", "sign", "trunc"})
_NEUTRAL = {"mul": 1, "div": 1, "truediv": 1, "sub": 0, "pow": 1}
# What a no-op returns: its input itself, a view of it, or a copy.
_ITSELF, _VIEW, _COPY = "itself", "view", "copy"


def _gives_again(graph: GraphRewriter, node: Node) -> tuple[Node, str] | None:
    """The node whose value this one returns, and how (`_ITSELF`, `_VIEW`, `_COPY`); None if it computes a new value."""
    if not node.args or not graph.is_tensor(node.args[0]) or "out" in node.kwargs:
        return None
    source: Any = node.args[0]
    name = graph.name_of(node)
    if "dropout" in name:
        return (source, _ITSELF) if graph.is_dropout_off(node) else None
    if name == "getitem":
        return (source, _VIEW) if _is_whole(node.args[1]) else None
    if name == "pad":
        return (source, _COPY) if _pads_nothing(node) else None
    if name in _NEUTRAL:
        is_neutral = len(node.args) == 2 and not node.kwargs and _is_number(node.args[1], _NEUTRAL[name])
        return (source, _COPY) if is_neutral and graph.example(source).is_floating_point() else None
    return _takes_back(graph, node, source, name)


def _takes_back(graph: GraphRewriter, node: Node, source: Node, name: str) -> tuple[Node, str] | None:
    """As `_gives_again`, for a call that repeats the call before it without effect, or undoes it."""
    if graph.name_of(source) != name and (graph.name_of(source), name) != ("unsqueeze", "squeeze"):
        return None
    if not source.args or not graph.is_tensor(source.args[0]) or source.kwargs or node.kwargs:
        return None
    before: Any = source.args[0]
    mine, theirs = node.args[1:], source.args[1:]
    if any(isinstance(one, Node) for one in (*mine, *theirs)):
        return None
    if name in _CASTS or name in _SETTLING:
        return (source, _COPY if name in _SETTLING else _ITSELF) if mine == theirs else None
    if name == "transpose":
        return (before, _VIEW) if mine in (theirs, theirs[::-1]) else None
    if name == "squeeze":
        return (before, _VIEW) if mine == theirs and len(mine) == 1 else None
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


def _key_of(value: Any, firsts: Mapping[Node, Node]) -> Any:
    """A key that tells arguments apart: 1, 1.0 and True have different keys, and so have -0.0 and 0.0."""
    if isinstance(value, Node):
        return "node", id(firsts.get(value, value))
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(_key_of(item, firsts) for item in value)
    if isinstance(value, Mapping):
        return "dict", tuple((name, _key_of(item, firsts)) for name, item in value.items())
    if isinstance(value, slice):
        return "slice", _key_of((value.start, value.stop, value.step), firsts)
    if isinstance(value, int | float | str | torch.dtype | torch.device | torch.memory_format | type(None)):
        return type(value).__name__, repr(value)
    return "object", id(value)
