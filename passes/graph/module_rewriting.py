"""Change how modules store tensors and run, without changing their values: formats, dtypes, classes, wrappers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from passes.base import Context, Precision
from passes.graph.changes import Change, ChangeRecord, Place, Remark, Skip
from passes.graph.edits import ClassEdit, FormatEdit, in_format, undo_all
from passes.graph.forwards import dtype_inside
from passes.graph.hooks import has_hooks, is_parametrized
from passes.graph.model_tree import ModelTree
from passes.graph.recording import Runs
from passes.graph.runs import recorded_runs
from passes.graph.tensors import TensorRef
from passes.graph.torch_calls import PLAIN_TENSORS


@dataclass
class ModuleChange(Change):
    """One rewrite of modules.

    Attributes:
        module: the module whose calls are compared before and after; None if only the whole model is compared.
    """

    module: nn.Module | None = None


class ModuleRewriter(ChangeRecord[ModuleChange]):
    """Changes the modules of one working copy, for one pass. Every write must be inside a `change` block.

    Attributes:
        remarks: places that cost performance and that only the user can fix.
        precision: the reduced precision of the result, if the pass lowers it; None otherwise.
    """

    def __init__(self, tree: ModelTree, left_alone: Mapping[Place, str] | None = None) -> None:
        super().__init__(tree, left_alone)
        self.remarks: list[Remark] = []
        self.precision: Precision | None = None

    def runs(self, context: Context) -> Runs | None:
        """The recorded runs of the example inputs on the current model; None without example inputs."""
        return recorded_runs(self.tree, context)

    @property
    def computes_in(self) -> torch.dtype | None:
        """The half precision that an earlier pass has set for the whole model; None if there is none."""
        return dtype_inside(self.tree.root)

    def why_not(self, ref: TensorRef) -> str | None:
        """The reason why a parameter or buffer can't be replaced by another tensor, as a clause; None if it can."""
        tensor = ref.value
        assert tensor is not None
        if type(tensor) not in PLAIN_TENSORS:
            return f"its {ref.name} is a {type(tensor).__name__}"
        if is_parametrized(ref.owner):
            return "it has parametrizations"
        if has_hooks(ref.owner):
            return f"it has hooks, which may set its {ref.name}"
        if self.tree.holders_of(tensor) > 1:
            return f"its {ref.name} is shared with another module"
        return None

    def skip(self, where: str, reason: str) -> None:
        """Skip a candidate; the reason is a sentence without the full stop."""
        self.skips.append(Skip(where, reason))

    def remark(self, where: str, text: str) -> None:
        """Report a place that this pass must not change but the user can."""
        self.remarks.append(Remark(where, text))

    @contextmanager
    def change(self, where: str, what: str, module: nn.Module | None = None) -> Iterator[ModuleChange]:
        """Record the edits of the block as one change, checked at the calls of `module`.

        Raises:
            RuntimeError: another change is open.
        """
        with self._recorded(ModuleChange(where, what, module=module)) as change:
            yield change

    def set_tensor(self, ref: TensorRef, value: torch.Tensor | None) -> None:
        """Put another tensor under the name of a parameter or buffer; None removes the tensor.

        A tensor for a parameter is wrapped in an `nn.Parameter`. It requires a gradient if the old parameter, or a
        source of the change, did.
        """
        if value is not None and ref.name not in ref.owner._buffers and not isinstance(value, nn.Parameter):
            sources = (ref, *self._changing().sources)
            needs_gradient = any(one.value is not None and one.value.requires_grad for one in sources)
            value = nn.Parameter(value, requires_grad=needs_gradient)
            self.tree.made[id(value)] = value
        self._put(ref, value)

    def set_memory_format(self, ref: TensorRef, memory_format: torch.memory_format) -> None:
        """Convert a parameter or buffer to another memory format."""
        old = ref.value
        assert old is not None
        if isinstance(old, nn.Parameter) and self.tree.made.get(id(old)) is old and _fills_its_storage(old):
            self._do(FormatEdit(old, memory_format))
        else:
            self.set_tensor(ref, in_format(old.detach(), memory_format))

    def set_class(self, module: nn.Module, cls: type[nn.Module]) -> None:
        """Change the class of one module instance, which keeps its attributes."""
        self._do(ClassEdit(module, cls))

    def set_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute in the `__dict__` of one module instance."""
        self._set(module, name, value)

    def withdraw(self, change: ModuleChange) -> None:
        """Undo the last change."""
        if self._open is not None or not self.changes or self.changes[-1] is not change:
            raise RuntimeError("only the last change can be withdrawn")
        undo_all(change.edits)
        self.changes.pop()


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor uses its whole storage, so that its strides alone describe its layout."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
