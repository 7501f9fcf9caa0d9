"""Rules on operations that one kernel can compute: attention written by hand, and chains of pointwise operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from optimizer.diagnosis.evidence import Evidence, Seen, elements_of, escapes, inputs_of, is_returned, replay
from optimizer.diagnosis.findings import rule
from optimizer.showing import percent_text, seconds_text
from passes.fusion.pointwise import computes_each_element
from passes.graph.recording import Node, operation_name, shape_of, shape_of_each, users_of

# ------------------------------------------------------------------------------------------------------------- attention

# Products of two tensors over the last dim of the first.
_PRODUCTS = frozenset({"matmul", "bmm", "rmatmul"})
# Between the scores and softmax: operations that the arguments `scale` and `attn_mask` replace, casts and views.
_MASKS = frozenset({
    "add", "iadd", "radd", "sub", "isub", "masked_fill", "where", "to", "float", "type", "type_as", "view", "reshape",
    "unsqueeze", "squeeze", "contiguous",
})  # fmt: skip
_SCALES = frozenset({"mul", "imul", "rmul", "div", "idiv", "truediv", "itruediv"})
# Between softmax and the product with the values.
_AFTER = frozenset({"dropout", "to", "type", "type_as", "float", "half", "view", "reshape", "contiguous"})
_FARTHEST = 12


class Attention(NamedTuple):
    """The product of queries and keys, softmax, and the product with the values."""

    nodes: tuple[Node, ...]
    """All operations, from the first product to the second."""
    softmax: Node
    """The one among them that computes the weights."""
    masks: tuple[Node, ...]
    """The tensors that are added to the scores, or that choose some of them."""

    @property
    def scores(self) -> Node:
        """The product of queries and keys."""
        return self.nodes[0]


@rule("warning")
def hand_written_attention(evidence: Evidence) -> Iterator[Seen]:
    """Attention is written as product, softmax and product, where `scaled_dot_product_attention` computes the same.

    It isn't reported if something else reads the weights, or if the function isn't faster at these sizes.
    """
    found = {each.nodes[-1]: each for node in evidence.calls if (each := _attention_at(evidence, node)) is not None}
    for line, group in evidence.by_line(found):
        largest = max((found[node] for node in group), key=lambda each: elements_of(each.softmax))
        try:
            before, after = _times(evidence, largest)
        except (RuntimeError, ValueError, TypeError):
            # The sizes aren't those that the function takes.
            continue
        if after >= before:
            continue
        numbers = sum(elements_of(found[node].softmax) for node in group)
        yield evidence.seen(
            line,
            group,
            "attention is computed by a product, softmax and a product",
            f"it writes {numbers:,} weights to memory, and scaled_dot_product_attention none where it has a fused kernel; "
            f"here the largest takes {seconds_text(before)}, with the function {seconds_text(after)}",
            "call torch.nn.functional.scaled_dot_product_attention, with a dim for the heads",
        )


def _attention_at(evidence: Evidence, node: Node) -> Attention | None:
    if operation_name(node) != "softmax" or not node.all_input_nodes or not _is_over_last(node):
        return None
    before, masks = [node.all_input_nodes[0]], list[Node]()
    while (name := _without_underscores(before[-1])) not in _PRODUCTS:
        source = _source_of(before[-1], name)
        if source is None or len(before) > _FARTHEST:
            return None
        masks += (each for each in before[-1].all_input_nodes if each is not source and name in _MASKS)
        before.append(source)
    scores = before[-1]
    if any(each in evidence.constant for each in scores.all_input_nodes) or len(scores.all_input_nodes) != 2:
        return None
    after = [node]
    while len(users := users_of(after[-1])) == 1 and _without_underscores(users[0]) in _AFTER:
        after += users
    if len(users) != 1 or _without_underscores(users[0]) not in _PRODUCTS or users[0].args[0] is not after[-1]:
        return None
    if any(map(is_returned, after)) or not _fits(scores, after[-1], users[0]):
        return None
    return Attention((*reversed(before), *after, *users), node, tuple(masks))


def _without_underscores(node: Node) -> str:
    return operation_name(node).strip("_")


def _source_of(node: Node, name: str) -> Node | None:
    """The value that an operation between the scores and softmax changes; None for other operations."""
    size = elements_of(node)
    sources = [each for each in node.all_input_nodes if elements_of(each) == size]
    if len(sources) > 1:
        # A mask may be as large as the scores.
        sources = [each for each in sources if _leads_to_product(each)]
    if len(sources) != 1 or not (name in _MASKS or (name in _SCALES and _are_scales(node, sources[0]))):
        return None
    return sources[0]


def _leads_to_product(node: Node) -> bool:
    for _ in range(_FARTHEST):
        name = _without_underscores(node)
        if name in _PRODUCTS or not node.all_input_nodes:
            return name in _PRODUCTS
        node = node.all_input_nodes[0]
    return False


def _are_scales(node: Node, source: Node) -> bool:
    """Whether the other factors are numbers, or one number for each head, which the queries can be scaled by."""
    others = [shape_of(each) for each in node.all_input_nodes if each is not source]
    return all(shape is not None and all(size == 1 for size in shape.sizes[-2:]) for shape in others)


def _is_over_last(node: Node) -> bool:
    shape = shape_of(node)
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    return shape is not None and dim in (-1, len(shape.sizes) - 1)


def _fits(scores: Node, weights: Node, result: Node) -> bool:
    """Whether the sizes are those of attention: the weights, (…, L, S), are multiplied by values, (…, S, D)."""
    others = [each for each in result.all_input_nodes if each is not weights]
    shapes = [shape_of_each(each) for each in (scores, weights, *scores.all_input_nodes, *others)]
    if len(shapes) != 5 or any(shape is None or len(shape.sizes) < 3 for shape in shapes):
        return False
    made, last, _, _, values = (shape.sizes for shape in shapes if shape is not None)
    return made[-2:] == last[-2:] and values[-2] == last[-1]


def _times(evidence: Evidence, found: Attention) -> list[float]:
    """The seconds of the operations written out, and of the function, on random numbers of the same sizes."""
    drawn = {node: evidence.draw(node) for node in inputs_of(found.nodes)}
    q, keys = (drawn[node] for node in found.scores.all_input_nodes)
    v = drawn[next(node for node in found.nodes[-1].all_input_nodes if node in drawn)]
    mask = None
    if found.masks:
        shapes = [tuple(drawn[node].shape) for node in found.masks if node in drawn]
        full = (*q.shape[:-1], keys.shape[-1])
        is_plain = len(shapes) == len(found.masks) == 1 and len(shapes[0]) == len(full)
        mask = torch.zeros(shapes[0] if is_plain else full, device=evidence.device, dtype=q.dtype)
    # Without a dim for the heads, torch takes a slow kernel.
    query, key, value = (each if each.dim() > 3 else each.unsqueeze(1) for each in (q, keys.transpose(-1, -2), v))
    heads = mask if mask is None or mask.dim() > 3 else mask.unsqueeze(1)
    function = partial(F.scaled_dot_product_attention, query, key, value, attn_mask=heads, scale=1.0)
    return evidence.fastest(partial(replay, found.nodes, drawn), function)


# ------------------------------------------------------------------------------------------------ pointwise operations

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
