"""The base class of module passes, which change how modules store tensors and run, but not what they compute."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from passes.base import Context, Pass, PassResult
from passes.graph.edits import in_place, taken_back
from passes.graph.model_tree import ModelTree, training_flags
from passes.graph.module_rewriting import ModuleChange, ModuleRewriter


class ModulePass(Pass):
    """A pass that changes memory formats, dtypes, classes and forwards of the modules of the working copy.

    `rewrite` finds the candidates, and changes or skips each. Each change is then checked at the calls of its module,
    and finally on the whole model.
    """

    @abstractmethod
    def rewrite(self, model: ModuleRewriter, context: Context) -> None:
        """Find the candidates, and change or skip each."""

    def run(self, tree: ModelTree, context: Context) -> PassResult:
        """Rewrite the modules, and compare each changed module with the original on its inputs in a run."""
        writer = ModuleRewriter(tree, context.left_alone)
        try:
            self.rewrite(writer, context)
            checked = tuple(_checked(writer, context))
        except BaseException:
            writer.roll_back()
            raise
        if writer.changes:
            tree.refresh()
        return PassResult(
            tuple(writer.changes),
            tuple(writer.skips),
            writer,
            tuple(writer.remarks),
            precision=writer.precision,
            checked=checked,
        )


def _checked(writer: ModuleRewriter, context: Context) -> Iterator[tuple[ModuleChange, Sequence[tuple[Any, Any]]]]:
    """Compare each module with and without its change, on the example call with the smallest batch."""
    changes = [change for change in writer.changes if change.module is not None]
    if context.judge is None or context.run_inside is None or not changes:
        return
    check = _Check(changes, context)
    with taken_back(writer.edits):
        failure = context.run_inside(check.watching(), context.smallest_call)
    if failure is not None:
        raise RuntimeError(f"the run that checks its changes raises ({failure})")
    yield from check.found


class _Check:
    """Compares each change at the first call of its module, in a run of the tree without the changes of the pass."""

    def __init__(self, changes: Iterable[ModuleChange], context: Context) -> None:
        self.found: list[tuple[ModuleChange, Sequence[tuple[Any, Any]]]] = []
        self._left: dict[nn.Module, list[ModuleChange]] = {}
        self._context = context
        for change in changes:
            assert change.module is not None
            self._left.setdefault(change.module, []).append(change)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hook the modules for the time of the run."""
        with ExitStack() as stack:
            for module in self._left:
                stack.callback(module.register_forward_pre_hook(self._compare, with_kwargs=True).remove)
            yield

    def _compare(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        changes = self._left.pop(module, None)
        if changes is None:
            # The call is part of the comparison itself, or the module is called again in the same run.
            return
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        values = tuple(leaves[place].detach().clone() for place in places)

        def call(*values: torch.Tensor) -> Any:
            given = list(leaves)
            for place, value in zip(places, values, strict=True):
                given[place] = value
            own_args, own_kwargs = pytree.tree_unflatten(given, spec)
            with _own_buffers(module):
                return module(*own_args, **own_kwargs)

        for change in changes:
            self.found.append((change, list(self._judged(module, change, call, values))))

    def _judged(
        self, module: nn.Module, change: ModuleChange, call: Callable[..., Any], values: tuple[torch.Tensor, ...]
    ) -> Iterator[tuple[Any, Any]]:
        def changed(*values: torch.Tensor) -> Any:
            with in_place(change.edits):
                return call(*values)

        assert self._context.judge is not None
        yield from self._context.judge(call, changed, values)
        if self._context.mode == "training" and module.training:
            # Errors in running statistics show only in eval.
            with training_flags(module, False):
                yield from self._context.judge(call, changed, values)


@contextmanager
def _own_buffers(module: nn.Module) -> Iterator[None]:
    """In the block, give the module copies of its buffers, to which it may write."""
    homes = [(one._buffers, dict(one._buffers)) for one in module.modules()]
    try:
        for home, held in homes:
            home.update({name: None if buffer is None else buffer.clone() for name, buffer in held.items()})
        yield
    finally:
        for home, held in homes:
            home.update(held)
