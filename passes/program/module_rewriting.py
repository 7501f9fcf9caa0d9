"""The way to change modules whose values stay what they are: their formats, dtypes, classes, and what stands around them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from passes.base import Precision
from passes.program.changes import Change, ChangeRecord, Place, Remark, Skip
from passes.program.edits import ClassEdit, FormatEdit, in_format, undo_all
from passes.program.model_tree import ModelTree
from passes.program.tensors import TensorRef
from passes.program.weights import like_old


@dataclass
class ModuleChange(Change):
    """One rewrite of modules.

    Attributes:
        module: the one whose calls are compared with what they gave before; None for a change that only the whole shows.
    """

    module: nn.Module | None = None


class ModuleRewriter(ChangeRecord[ModuleChange]):
    """Writes to the modules of one working copy, for one pass. Everything is written inside of a `change`.

    Attributes:
        remarks: places that cost something and that the user may mend.
        precision: how the result computes, where the pass makes it compute less precisely than the original.
    """

    def __init__(self, tree: ModelTree, left_alone: Mapping[Place, str] | None = None) -> None:
        super().__init__(tree, left_alone)
        self.remarks: list[Remark] = []
        self.precision: Precision | None = None

    def skip(self, where: str, reason: str) -> None:
        """Leave a place alone, for a reason that is a sentence without its full stop."""
        self.skips.append(Skip(where, reason))

    def remark(self, where: str, text: str) -> None:
        """Tell the user of a place that isn't the pass' to change."""
        self.remarks.append(Remark(where, text))

    @contextmanager
    def change(self, where: str, what: str, module: nn.Module | None = None) -> Iterator[ModuleChange]:
        """Record what is written in the block as one change, checked where `module` is called.

        Raises:
            RuntimeError: inside of another change.
        """
        with self._recorded(ModuleChange(where, what, module=module)) as change:
            yield change

    def set_tensor(self, ref: TensorRef, value: torch.Tensor | None) -> None:
        """Put another tensor under the name of a parameter or buffer; None leaves the name without one.

        A parameter's place gets a parameter, which needs a gradient if the old one, or a source of the change, did.
        """
        if value is not None and ref.name not in ref.owner._buffers and not isinstance(value, nn.Parameter):
            sources = (ref, *self._changing().sources)
            needs_gradient = any(one.value is not None and one.value.requires_grad for one in sources)
            value = like_old(ref.value, nn.Parameter(value, requires_grad=needs_gradient))
            self.tree.made[id(value)] = value
        self._put(ref, value)

    def set_memory_format(self, ref: TensorRef, memory_format: torch.memory_format) -> None:
        """Bring a parameter or buffer into another memory format."""
        old = ref.value
        assert old is not None
        if isinstance(old, nn.Parameter) and self.tree.made.get(id(old)) is old and _fills_its_storage(old):
            self._do(FormatEdit(old, memory_format))
        else:
            self.set_tensor(ref, in_format(old.detach(), memory_format))

    def set_class(self, module: nn.Module, cls: type[nn.Module]) -> None:
        """Make one module instance one of another class, with all that it holds."""
        self._do(ClassEdit(module, cls))

    def set_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        """Put a value into the `__dict__` of one module instance."""
        self._set(module, name, value)

    def withdraw(self, change: ModuleChange) -> None:
        """Take back the last change."""
        if self._open is not None or not self.changes or self.changes[-1] is not change:
            raise RuntimeError("only the last change can be withdrawn")
        undo_all(change.edits)
        self.changes.pop()


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor is all of its storage, so that its strides are enough to make another one like it."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
