"""Choose what to recompute and what to keep, given a price for each byte that is kept."""

from __future__ import annotations

from collections.abc import Sequence

import networkx

from passes.checkpointing.choice import overwritten, possible
from passes.checkpointing.profile import Profile

_SOURCE, _SINK = "keep nothing", "run nothing"


def cheapest(profile: Profile, costs: Sequence[float], price: float, needed: frozenset[int]) -> tuple[bool, ...]:
    """Choose the calls to recompute so that the total of recomputation costs and prices of kept bytes is minimal.

    This is a minimum cut: the calls on the side of the source are recomputed. The total includes the cost of each
    recomputed call, and the price of the saved results of each kept call. If a recomputed call takes another result of
    a kept call, the total includes its price too.

    Args:
        profile: the profile of the step.
        costs: the cost of each call.
        price: the price of one byte, in the unit of the costs.
        needed: values that are needed although no call saves them.

    Returns:
        For each call, whether it is recomputed.
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
