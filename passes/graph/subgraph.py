"""A part of a graph as a graph of its own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx


def graph_between(sources: Sequence[fx.Node], way: Sequence[fx.Node], last: fx.Node) -> fx.Graph:
    """The graph of the last node's value, whose inputs are the sources.

    Args:
        way: all nodes that the value is made of, in their order; those of the sources may be among them.
    """
    graph = fx.Graph()
    twins = {source: graph.placeholder(f"source_{number}") for number, source in enumerate(sources)}
    for node in way:
        if node not in twins:
            twins[node] = graph.node_copy(node, twins.__getitem__)
    graph.output(twins[last])
    return graph
