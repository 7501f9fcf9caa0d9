"""Find the pass that made an exported module wrong, by bisection over the passes.

`optimize` compares at two batch sizes, and rolls back a pass that is wrong there. Files are compared at more calls, so
a file may show an error that a pass causes at another size. The bisection runs the first passes of the list again from
the original, and compares each result at every call at which files are compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import nn

from optimize_export.wording import quote
from optimizer.exporting.copies import exportable, optimized_again
from optimizer.exporting.job import ExportJob
from optimizer.model import on_device
from passes.base import Pass

logger = logging.getLogger(__name__)


def blamed(job: ExportJob, exported: nn.Module, is_wrong: Callable[[nn.Module], bool]) -> str:
    """A sentence about the pass that made the exported module wrong; "" if none did, or if the passes can't run again.

    Args:
        job: the export.
        exported: the module that was exported.
        is_wrong: whether a module on the original's device is wrong.
    """
    provenance = job.provenance
    if provenance is None or provenance.original is None:
        return ""
    exported = on_device(exported, job.home)

    def is_wrong_with(passes: Sequence[Pass] | None) -> bool:
        if passes is None:
            return is_wrong(exported)
        return is_wrong(exportable(optimized_again(job, passes, job.home), job.home))

    return pass_to_blame(provenance.applied, is_wrong_with)


def pass_to_blame(passes: Sequence[Pass], is_wrong_with: Callable[[Sequence[Pass] | None], bool]) -> str:
    """Find the pass that makes a result wrong.

    An exception in the search goes into the sentence and isn't raised, because it would hide the original failure.

    Args:
        passes: the passes that changed something, in order.
        is_wrong_with: runs the given passes alone on the original, and returns whether the result is wrong at any call.
            For None it judges the existing result.

    Returns:
        A sentence about the pass; "" if the result is right or no pass changed anything.
    """
    try:
        return _found(passes, is_wrong_with)
    except Exception as error:  # the search runs foreign code, whose error must not hide the failure
        logger.debug("the search for the pass raised", exc_info=True)
        return f"The pass that causes it is unknown: the search raised {type(error).__name__}: {quote(error)}."


def _found(passes: Sequence[Pass], is_wrong_with: Callable[[Sequence[Pass] | None], bool]) -> str:
    if not passes or not is_wrong_with(None):
        return ""
    if not is_wrong_with(passes):
        return "The same passes, run again, give a correct result: this one was modified after optimize() made it."
    # Invariant: the first `low` passes are right or low is 0, and the first `high` passes are wrong.
    low, high = 0, len(passes)
    while high - low > 1:
        middle = (low + high) // 2
        if is_wrong_with(passes[:middle]):
            high = middle
        else:
            low = middle
    if high <= 1 and is_wrong_with(()):
        return "It is wrong even without any pass."
    return (
        f"The pass {passes[high - 1].name} causes it: without it and the later passes, the result is correct at "
        "every call."
    )
