"""Rules on chains of pointwise operations, each of which is a kernel of its own in eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from optimizer.diagnosis.evidence import Evidence, Seen, escapes, inputs_of, replay
from optimizer.diagnosis.findings import rule
from optimizer.showing import percent_text, seconds_text
from passes.fusion.pointwise import computes_each_element
from passes.graph.recording import Node, operation_name, shape_of, users_of

# The least number of operations in a chain, and the least share of the time, that are reported.
_SHORTEST, _LEAST_SHARE = 3, 0.03
_SHORTEST_IN_PLACE = 2
_OPERATORS = frozenset({"add", "sub", "mul", "div", "truediv", "pow"})
_CASTS = frozenset({"to", "float", "half", "bfloat16", "double", "type", "type_as"})
# Built-in functions of one tensor that people write by hand, as the calls to write instead.
_BUILT_IN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "F.gelu(x)": F.gelu,
    'F.gelu(x, approximate="tanh")': lambda x: F.gelu(x, approximate="tanh"),
    "F.silu(x)": F.silu,
    "F.mish(x)": F.mish,
    "F.hardswish(x)": F.hardswish,
    "F.hardsigmoid(x)": F.hardsigmoid,
    "F.softplus(x)": F.softplus,
    "F.softsign(x)": F.softsign,
}
# The built-in function may differ from the chain by this much, absolute and relative.
_CLOSE = 1e-5


@rule("warning")
def activation_by_hand(evidence: Evidence) -> Iterator[Seen]:
    """A chain of operations computes an activation that torch has as one function; both are compared on numbers.

    It isn't reported if the function isn't faster at these sizes.
    """
    found = {}
    for chain in _chains(evidence):
        if (name := _built_in(chain)) is not None:
            found[chain[-1]] = chain, name
    for line, group in evidence.by_line(found):
        chain, name = found[group[0]]
        (source,) = inputs_of(chain)
        x = evidence.draw(source)
        before, after = evidence.fastest(partial(replay, chain, {source: x}), partial(_BUILT_IN[name], x))
        if after >= before:
            continue
        yield evidence.seen(
            line,
            group,
            f"{len(chain)} operations compute what one function of torch computes",
            f"one chain takes {seconds_text(before)} here, and the function {seconds_text(after)}; the chains take "
            f"{percent_text(evidence.share(node for last in group for node in found[last][0]))} of the time",
            f"call {name}",
        )


@rule("warning")
def unfused_chain(evidence: Evidence) -> Iterator[Seen]:
    """At least 3 pointwise operations follow each other, and take at least 3 % of the time."""
    chains = {
        chain[-1]: chain
        for chain in _chains(evidence)
        if _count(chain) >= _SHORTEST and _built_in(chain) is None and not any(map(_is_in_place, chain))
    }
    for line, group in evidence.by_line(chains):
        share = evidence.share(node for last in group for node in chains[last])
        if share >= _LEAST_SHARE:
            count = max(_count(chains[last]) for last in group)
            yield evidence.seen(
                line,
                group,
                f"{count} pointwise operations follow each other, each of which reads and writes memory",
                f"they take {percent_text(share)} of the time",
                "use the pass jit-fusion or torch-compile, which fuse such chains",
            )


@rule("note")
def in_place_in_chain(evidence: Evidence) -> Iterator[Seen]:
    """An operation in place is between pointwise operations that take at least 3 % of the time: jit-fusion skips them."""
    chains = {node: chain for chain in _chains(evidence) for node in chain if _is_in_place(node)}
    for line, group in evidence.by_line(chains):
        share = evidence.share({node for each in group for node in chains[each]})
        if share >= _LEAST_SHARE:
            names = dict.fromkeys(map(operation_name, group))
            yield evidence.seen(
                line,
                group,
                f"a chain of pointwise operations is in place at {' and '.join(f'`{name}`' for name in names)}",
                f"jit-fusion doesn't fuse the chain, which takes {percent_text(share)} of the time",
                "write it out of place before jit-fusion; torch-compile fuses it as it is",
            )


def _chains(evidence: Evidence) -> list[list[Node]]:
    """The largest chains of pointwise operations, each in the order of execution; the last computes the result."""
    home: dict[Node, Node] = {}
    members: dict[Node, list[Node]] = {}
    for node in reversed(evidence.calls):
        if not _is_pointwise(node):
            continue
        homes = {home.get(user) for user in users_of(node)}
        last = next(iter(homes)) if len(homes) == 1 else None
        if last is not None and not escapes(node):
            home[node] = last
            members[last].append(node)
        elif not _is_cast(node):
            home[node], members[node] = node, [node]
    return [chain[::-1] for chain in reversed(members.values()) if _count(chain) >= _SHORTEST_IN_PLACE]


def _is_pointwise(node: Node) -> bool:
    if shape_of(node) is None or not node.all_input_nodes or operation_name(node) in ("clone", "copy_"):
        return False
    return _is_cast(node) or computes_each_element(_plain(operation_name(node)))


def _plain(name: str) -> str:
    """The name without the mark of an operation in place or of swapped operands."""
    name = name.strip("_")
    return name[1:] if name[:1] in ("r", "i") and name[1:] in _OPERATORS else name


def _is_cast(node: Node) -> bool:
    return operation_name(node) in _CASTS


def _is_in_place(node: Node) -> bool:
    name = operation_name(node)
    # Activations of torch.nn.functional have no other flag than `inplace`, and some modules pass it by position.
    of_functional = getattr(node.target, "__module__", None) == F.__name__
    by_place = of_functional and any(argument is True for argument in node.args[1:])
    is_operator = name[:1] == "i" and name[1:] in _OPERATORS
    return bool(node.kwargs.get("inplace") is True or by_place or name.endswith("_") or is_operator)


def _count(chain: Sequence[Node]) -> int:
    return sum(not _is_cast(node) for node in chain)


def _built_in(chain: Sequence[Node]) -> str | None:
    """The built-in function that computes the same as the chain; None if there is none."""
    inputs = inputs_of(chain)
    if len(inputs) != 1 or inputs[0].op == "get_attr" or _count(chain) < _SHORTEST - 1:
        return None
    shape = shape_of(inputs[0])
    # Without a shape, a call returned several tensors, and the chain may read more than one of them.
    if shape is None or not shape.dtype.is_floating_point:
        return None
    x = torch.linspace(-8, 8, 1025)
    try:
        made = replay(chain, {inputs[0]: x.clone()})
    except (RuntimeError, TypeError, ValueError, IndexError):
        # The chain needs another shape or dtype.
        return None
    if made.shape != x.shape:
        return None
    if any(f"F.{operation_name(node)}(x)" in _BUILT_IN for node in chain):
        # The function is called already, and the chain scales its result by 1.
        return None
    close = (name for name, call in _BUILT_IN.items() if torch.allclose(made.float().cpu(), call(x), _CLOSE, _CLOSE))
    return next(close, None)
