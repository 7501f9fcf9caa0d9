"""Which pass brings in what a result gets wrong: found by bisection, at every call that files are compared at.

`optimize` compares at two batch sizes, and takes a pass back that is wrong there. Files are compared at more, and one may
show what a pass did at another: the passes are run again from the original, ever fewer of them, and what they give is
compared at all of the calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from optimizer.sentences import quote
from passes.base import Pass

logger = logging.getLogger(__name__)


def pass_to_blame(passes: Sequence[Pass], is_wrong_with: Callable[[Sequence[Pass] | None], bool]) -> str:
    """A sentence on the pass that makes a result wrong; "" where the result is right, or no pass changed anything.

    Args:
        passes: those that changed something, in order.
        is_wrong_with: whether the result of these passes alone, run again from the original, is wrong at any of the calls;
            for None, the result that there is.

    Nothing that goes wrong on the way is raised: it would stand in the place of what failed.
    """
    try:
        return _found(passes, is_wrong_with)
    except Exception as error:  # foreign code runs here too, and the failure that is looked at is to be told
        logger.debug("the search for the pass raised", exc_info=True)
        return f"Which pass brings it in isn't known: looking for it raised {type(error).__name__}: {quote(error)}."


def _found(passes: Sequence[Pass], is_wrong_with: Callable[[Sequence[Pass] | None], bool]) -> str:
    if not passes or not is_wrong_with(None):
        return ""
    if not is_wrong_with(passes):
        return "Run again, the passes make no such result: this one was written to after it was made."
    # The first wrong number of passes is in (low, high].
    low, high = 0, len(passes)
    while high - low > 1:
        middle = (low + high) // 2
        if is_wrong_with(passes[:middle]):
            high = middle
        else:
            low = middle
    if high <= 1 and is_wrong_with(()):
        return "It is so without any pass."
    return f"The pass {passes[high - 1].name} brings it in: without it, and those behind it, the result is right at every call."
