"""Passes that the user didn't name and that would change something."""

from __future__ import annotations

import logging
from collections.abc import Collection

from optimizer.pipeline.applied import TreeState
from passes.base import Context
from passes.program.model_tree import ModelTree
from passes.registry import pass_named, pass_names

logger = logging.getLogger(__name__)


def passes_that_would_apply(tree: ModelTree, context: Context, *, but: Collection[str]) -> list[str]:
    """The names of the passes that would change something; graph passes are tried only on the forward's first graph.

    Args:
        but: names to leave out.
    """
    return [name for name in pass_names() if name not in but and _would_apply(tree, context, name)]


def _would_apply(tree: ModelTree, context: Context, name: str) -> bool:
    before = TreeState(tree.modules())
    try:
        item = pass_named(name).made_with({})
        if context.mode not in item.modes:
            return False
        item.check(context)
        return item.would_apply(tree, context)
    except Exception as error:  # noqa: BLE001 - the user didn't ask for this pass: one that raises isn't named
        logger.debug("%s can't be tried: %s", name, error)
        before.restore()
        tree.refresh()
        return False
