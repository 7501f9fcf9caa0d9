"""What to compute again and what to keep, where each byte that is kept has a price."""

from __future__ import annotations

from collections.abc import Sequence

import networkx

from passes.checkpointing.choice import overwritten, possible
from passes.checkpointing.profile import Profile

_SOURCE, _SINK = "keep nothing", "run nothing"


def cheapest(profile: Profile, costs: Sequence[float], price: float, needed: frozenset[int]) -> tuple[bool, ...]:
    """The calls to compute again so that what they cost, and what keeping the rest costs, is the least.

    A minimum cut: calls on the side of the source are computed again. A call that is pays its cost, one that isn't the price
    of what is saved of its results; a result that nobody saves is paid for by the calls that take it and are computed again.

    Args:
        profile: of the step.
        costs: of each call.
        price: of a byte, in the unit of the costs.
        needed: values that are wanted although nobody saves them.
    """
    graph = networkx.DiGraph()
    graph.add_nodes_from((_SOURCE, _SINK))
    for index, call in enumerate(profile.calls):
        if call.repeatable:
            graph.add_edge(index, _SINK, capacity=costs[index])
        else:
            graph.add_edge(index, _SINK)
        wanted = sum(profile.values[value].size for value in call.makes if _is_wanted(profile, value, needed))
        if wanted:
            graph.add_edge(_SOURCE, index, capacity=price * wanted)
        for maker in overwritten(profile, index):
            graph.add_edge(index, maker)
        for value in call.args:
            item = profile.values[value]
            if item.keepable and not _is_wanted(profile, value, needed):
                graph.add_edge(index, ("value", value))
                graph.add_edge(("value", value), item.call, capacity=price * item.size)
    _, (again, _) = networkx.minimum_cut(graph, _SOURCE, _SINK)
    return possible(profile, [index in again for index in range(len(profile.calls))])


def _is_wanted(profile: Profile, value: int, needed: frozenset[int]) -> bool:
    item = profile.values[value]
    return value in needed or bool(item.savers and item.until >= 0 and item.keepable)
