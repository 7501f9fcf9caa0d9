"""The base class of module passes, which change how modules store tensors and run, but not what they compute."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from passes.base import (
    Change,
    Context,
    Edit,
    ModelTree,
    Pass,
    PassResult,
    Place,
    Precision,
    Remark,
    Skip,
    TensorRef,
    training_flags,
)
from passes.graph.edits import AttributeEdit, ClassEdit, TensorEdit, in_place, taken_back, undo_all
from passes.graph.forwards import dtype_inside
from passes.graph.recording import Runs, recorded_runs


@dataclass
class ModuleChange(Change):
    """One rewrite of modules."""

    module: nn.Module | None = None  # whose calls are compared before and after; None to compare only the whole model


class ModuleRewriter:
    """Changes the modules of one working copy, for one pass. Every write must be inside a `change` block.

    It keeps the record of the changes, and rolls them back.
    """

    def __init__(self, tree: ModelTree, left_alone: Mapping[Place, str] | None = None) -> None:
        self.tree = tree
        self.changes: list[ModuleChange] = []
        self.skips: list[Skip] = []
        self.remarks: list[Remark] = []
        self.precision: Precision | None = None  # the reduced precision of the result, if the pass lowers it
        # The changes that must not be made, each with the reason: a sentence without the full stop.
        self._left_alone = left_alone or {}
        self._words: Counter[tuple[str, str]] = Counter()
        self._open: ModuleChange | None = None

    def runs(self, context: Context) -> Runs | None:
        """The recorded runs of the example inputs on the current model; None without example inputs."""
        return recorded_runs(self.tree, context)

    @property
    def computes_in(self) -> torch.dtype | None:
        """The half precision that an earlier pass has set for the whole model; None if there is none."""
        return dtype_inside(self.tree.root)

    def skip(self, where: str, reason: str) -> None:
        """Skip a candidate; the reason is a sentence without the full stop."""
        self.skips.append(Skip(where, reason))

    def remark(self, where: str, text: str) -> None:
        """Report a place that this pass must not change but the user can."""
        self.remarks.append(Remark(where, text))

    @contextmanager
    def change(self, where: str, what: str, module: nn.Module | None = None) -> Iterator[ModuleChange]:
        """Record the edits of the block as one change, checked at the calls of `module`.

        An excluded change is undone and recorded as a skip. An error in the block undoes its edits.

        Raises:
            RuntimeError: another change is open.
        """
        if self._open is not None:
            raise RuntimeError("a change is opened inside another one")
        change = ModuleChange(where, what, self._words[where, what], module=module)
        self._words[where, what] += 1
        reason = self._left_alone.get(change.place)
        change.left_alone = reason is not None
        self._open = change
        try:
            yield change
        except BaseException:
            undo_all(change.edits)
            raise
        finally:
            self._open = None
        if reason is None:
            self.changes.append(change)
        else:
            undo_all(change.edits)
            change.edits.clear()
            self.skips.append(Skip(change.where, reason))

    def set_tensor(self, ref: TensorRef, value: torch.Tensor) -> None:
        """Put another tensor under the name of a parameter or buffer.

        A tensor for a parameter is wrapped in an `nn.Parameter`. It requires a gradient if the old parameter, or a
        source of the change, did.
        """
        if ref.name not in ref.owner._buffers and not isinstance(value, nn.Parameter):
            sources = (ref, *self._changing().sources)
            needs_gradient = any(one.value is not None and one.value.requires_grad for one in sources)
            value = nn.Parameter(value, requires_grad=needs_gradient)
        self._do(TensorEdit(ref.owner, ref.name, value))

    def set_class(self, module: nn.Module, cls: type[nn.Module]) -> None:
        """Change the class of one module instance, which keeps its attributes."""
        self._do(ClassEdit(module, cls))

    def set_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute in the `__dict__` of one module instance."""
        self._do(AttributeEdit(module, name, value))

    def _changing(self) -> ModuleChange:
        if self._open is None:
            raise RuntimeError("a module is modified outside a change")
        return self._open

    def _do(self, edit: Edit) -> None:
        change = self._changing()
        edit.apply()
        change.edits.append(edit)
        self.tree.forget_runs()

    @property
    def edits(self) -> list[Edit]:
        """All edits of modules, in the order in which they were made."""
        return [edit for change in self.changes for edit in change.edits]

    def roll_back(self) -> None:
        """Undo all edits; later passes must be rolled back first."""
        undo_all(self.edits)
        # The record is kept, but there is nothing left to undo.
        for change in self.changes:
            change.edits = []
        self.tree.refresh()


class ModulePass(Pass):
    """A pass that changes dtypes, classes and forwards of the modules of the working copy.

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
