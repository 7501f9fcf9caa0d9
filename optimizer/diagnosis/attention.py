"""The rule on attention that is written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from optimizer.diagnosis.evidence import Evidence, Seen, elements_of, inputs_of, is_returned, replay
from optimizer.diagnosis.findings import rule
from optimizer.showing import seconds_text
from passes.graph.recording import Node, operation_name, shape_of, shape_of_each, users_of

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
    while (name := _plain(before[-1])) not in _PRODUCTS:
        source = _source_of(before[-1], name)
        if source is None or len(before) > _FARTHEST:
            return None
        masks += (each for each in before[-1].all_input_nodes if each is not source and name in _MASKS)
        before.append(source)
    scores = before[-1]
    if any(each in evidence.constant for each in scores.all_input_nodes) or len(scores.all_input_nodes) != 2:
        return None
    after = [node]
    while len(users := users_of(after[-1])) == 1 and _plain(users[0]) in _AFTER:
        after += users
    if len(users) != 1 or _plain(users[0]) not in _PRODUCTS or users[0].args[0] is not after[-1]:
        return None
    if any(map(is_returned, after)) or not _fits(scores, after[-1], users[0]):
        return None
    return Attention((*reversed(before), *after, *users), node, tuple(masks))


def _plain(node: Node) -> str:
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
        name = _plain(node)
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
