"""Find where feature maps lose the channels_last format on their way through a captured graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from passes.graph.memory_formats import CONTIGUOUS, EITHER, LAST
from passes.graph_interface import CHANNELS_LAST_FORMATS, GraphRewriter, Node, is_channels_last, layout_of
from passes.memory_format.watch import Loss


def losses_in(graph: GraphRewriter, kept: Collection[Node], copies: Mapping[Node, Node]) -> list[Loss]:
    """The losses that make something slower, those with the most converted elements first.

    Args:
        kept: values that are contiguous on purpose, like everything that is computed from them.
        copies: the copies that `GraphRewriter.settle` made, each with the operation that needs it.
    """
    found: dict[str, Loss] = {}
    values = {node: value for node in graph.nodes if (value := graph.laid_out(node)) is not None}
    # The loss that a contiguous map comes from, and the tensors that are in channels_last or were made from such maps.
    lost: dict[Node, Loss] = {}
    was_last = set[Node]()
    meant, memory = set(kept), graph.memory()
    for node, value in values.items():
        sources = [source for source in node.all_input_nodes if source in values]
        layout, is_view = layout_of(value), memory.shares(node)
        _count_conversion(graph, node, values, lost)
        if copies.get(node, node).op == "output":
            continue
        if node in meant or (layout == CONTIGUOUS and not meant.isdisjoint(sources)):
            meant.add(node)
            continue
        for source in sources:
            if source in lost and layout is not None and not is_view:
                lost[source].goes_on = True
        if layout == LAST or (value.dim() > 2 and layout != EITHER and not was_last.isdisjoint(sources)):
            was_last.add(node)
        if layout != CONTIGUOUS or node not in was_last:
            continue
        alike = [source for source in sources if values[source].dim() == value.dim()]
        loss = next((lost[source] for source in alike if source in lost), None)
        was_map = any(layout_of(values[source]) == LAST for source in alike)
        # A tensor with other dims than the map counts as an intermediate value as long as it has these dims.
        is_still_one = any(
            source in was_last and (source in alike or source in lost or layout_of(values[source]) == LAST)
            for source in sources
        )
        if loss is None and (was_map or not is_still_one):
            user = copies.get(node, node)
            where = f"{graph.path_of(user) or 'the root'} ({graph.name_of(user)})"
            loss = found.setdefault(where, Loss(where))
            loss.elements += value.numel()
            loss.copies |= was_map and not is_view
        if loss is not None:
            lost[node] = loss
    return sorted((loss for loss in found.values() if loss.counts), key=lambda loss: (-loss.converted, -loss.elements))


def _count_conversion(graph: GraphRewriter, node: Node, values: Mapping[Node, Any], lost: Mapping[Node, Loss]) -> None:
    """Count what a convolution with a channels_last weight has to convert."""
    if not graph.name_of(node).startswith("conv") or node.op != "call_function":
        return
    source: Any = graph.argument(node, 0, "input")
    weight = values.get(graph.argument(node, 1, "weight"))
    if source not in lost or weight is None or weight.dim() not in CHANNELS_LAST_FORMATS:
        return
    if layout_of(values[source]) == CONTIGUOUS and is_channels_last(weight):
        loss, path = lost[source], graph.path_of(node) or "the root"
        loss.converted += values[source].numel()
        if path not in loss.convolutions:
            loss.convolutions.append(path)
