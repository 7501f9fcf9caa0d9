"""A copy of a module's tree over the same tensors, so that passes can edit it and the caller's module stays as it is."""

from __future__ import annotations

import copy
import enum
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

Mode = Literal["inference", "training"]

# Values of these types can't be changed in place: both trees may hold the same one.
_IMMUTABLE = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)
# Dictionaries of hooks: the copy gets its own, with the same hooks in them.
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


@dataclass
class WorkingCopy:
    """The copy of one module.

    Attributes:
        root: the copy, an instance of the caller's class.
        mode: in "inference" its parameters are new `Parameter`s over the caller's storage; in "training" they and the
            buffers are the caller's own objects.
        originals: for each module of the copy, by identity, the caller's module it stands for.
        notes: sentences about what couldn't be copied and is shared with the caller's module.
    """

    root: nn.Module
    mode: Mode
    originals: dict[int, nn.Module]
    notes: list[str] = field(default_factory=list)
    _memo: dict[int, Any] = field(default_factory=dict, repr=False)

    def restore_attribute(self, module: nn.Module, name: str) -> None:
        """Copy one attribute of `module` (a module of the copy) from the caller's module once more."""
        original = self.originals[id(module)]
        if name in original.__dict__:
            module.__dict__[name] = copy.deepcopy(original.__dict__[name], dict(self._memo))
        else:
            module.__dict__.pop(name, None)

    def source_of(self, module: nn.Module, name: str) -> weakref.ref[torch.Tensor] | None:
        """The caller's tensor behind parameter or buffer `name` of a module of the copy, held weakly."""
        original = self.originals.get(id(module))
        tensor = None if original is None else getattr(original, name, None)
        return weakref.ref(tensor) if isinstance(tensor, torch.Tensor) else None


def working_copy(model: nn.Module, mode: Mode = "inference", *, share_parameters: bool | None = None) -> WorkingCopy:
    """Copy the tree of `model` over the same tensors.

    Every attribute that can be changed in place (lists, dicts, configuration objects) is copied, tensors are not.
    What a module refers to inside the tree refers to the copy's own modules.

    Args:
        model: any module; it is read, never written.
        mode: see `WorkingCopy.mode`.
        share_parameters: take the caller's `Parameter` objects themselves; by default only in training.
    """
    share = mode == "training" if share_parameters is None else share_parameters
    result = WorkingCopy(model, mode, {})
    _Cloner(result, share).clone_tree(model)
    return result


class _Cloner:
    def __init__(self, result: WorkingCopy, share_parameters: bool) -> None:
        self.result = result
        self.memo = result._memo
        self.share_parameters = share_parameters

    def clone_tree(self, model: nn.Module) -> None:
        modules = list(model.modules())
        for module in modules:
            self._clone_tensors(module)
        # All shells exist before any attribute is copied, so that a reference from one module to another, in either
        # direction, finds its copy.
        plain = [module for module in modules if not _copies_itself(module)]
        for module in plain:
            self._remember(module, object.__new__(type(module)))
        # Children first: a module that copies itself finds those inside it in the memo.
        for module in reversed(modules):
            if id(module) not in self.memo:
                self._remember(module, copy.copy(module) if _is_script(module) else copy.deepcopy(module, self.memo))
        for module in plain:
            self._fill(module)
        self.result.root = self.memo[id(model)]

    def _remember(self, original: nn.Module, clone: nn.Module) -> None:
        self.memo[id(original)] = clone
        self.result.originals[id(clone)] = original

    def _clone_tensors(self, module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in self.memo:
                self.memo[id(parameter)] = parameter if self.share_parameters else _same_storage(parameter)
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) not in self.memo:
                self.memo[id(buffer)] = buffer if self.share_parameters else _alias(buffer)
        for value in module.__dict__.values():
            # A tensor with a gradient history can't be deep-copied; plain tensors are constants of the forward.
            if isinstance(value, torch.Tensor):
                self.memo[id(value)] = value

    def _fill(self, module: nn.Module) -> None:
        clone = self.memo[id(module)]
        for name, value in module.__dict__.items():
            clone.__dict__[name] = self._attribute(module, name, value)
        clone.__dict__.pop("_compiled_call_impl", None)

    def _attribute(self, module: nn.Module, name: str, value: Any) -> Any:
        if isinstance(value, _IMMUTABLE):
            return value
        if name in ("_parameters", "_buffers", "_modules"):
            return {key: self.memo.get(id(item), item) if item is not None else None for key, item in value.items()}
        if name.endswith(_HOOKS) and isinstance(value, dict):
            return copy.copy(value) if not value else self._hooks(value)
        if isinstance(value, set | list | dict) and not value:
            return copy.copy(value)
        try:
            return copy.deepcopy(value, self.memo)
        except Exception as error:  # noqa: BLE001 - whatever an attribute's own __deepcopy__ raises: it is then shared
            where = f"attribute {name!r} of {type(module).__name__}"
            self.result.notes.append(
                f"{where} can't be copied ({type(error).__name__}) and is shared with the original"
            )
            return value

    def _hooks(self, hooks: dict[Any, Any]) -> dict[Any, Any]:
        # Hooks of weight_norm and the like are objects or bound methods that refer to modules of the tree.
        copied = copy.copy(hooks)
        for key, hook in hooks.items():
            copied[key] = hook if isinstance(hook, types.FunctionType) else copy.deepcopy(hook, self.memo)
        return copied


def _is_script(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _copies_itself(module: nn.Module) -> bool:
    """Whether a module's class has its own way of being copied: scripted, compiled and parametrized modules do."""
    cls = type(module)
    if _is_script(module):
        # Copying one copies the module objects and shares their tensors.
        return True
    if isinstance(module, torch.fx.GraphModule):
        # Its own copy would rebuild the class; the copy is to be an instance of the same one.
        return False
    own_state = cls.__setstate__ is not nn.Module.__setstate__ or cls.__getstate__ is not nn.Module.__getstate__
    return own_state or hasattr(cls, "__deepcopy__")


def _same_storage(parameter: nn.Parameter) -> nn.Parameter:
    if type(parameter) is not nn.Parameter:
        return parameter
    # `detach` shares the version counter with the caller's parameter, so a later write is seen on both sides.
    clone = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    clone.__dict__.update(parameter.__dict__)
    return clone


def _alias(buffer: torch.Tensor) -> torch.Tensor:
    if type(buffer) is not torch.Tensor:
        return buffer
    return buffer.detach()


@contextmanager
def private_buffers(root: nn.Module, *, keep_written: bool = False) -> Iterator[set[tuple[int, str]]]:
    """Let a run of `root` write to copies of its buffers, and put the buffers back afterwards.

    Args:
        root: the module that is run inside.
        keep_written: buffers that the run wrote to are replaced for good by a copy with the values from before the run,
            so that later runs don't write into the storage of whoever shares them.

    Yields:
        A set that holds, after the block, (id of the module, name) of each buffer that was written to.
    """
    written: set[tuple[int, str]] = set()
    copies: dict[int, tuple[torch.Tensor, int]] = {}
    places: list[tuple[nn.Module, str, torch.Tensor]] = []
    for module in root.modules():
        if _is_script(module):
            continue
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in copies:
                # `_is_view` aside, a clone keeps dtype, device and strides.
                clone = buffer.detach().clone()
                copies[id(buffer)] = (clone, clone._version)
            places.append((module, name, buffer))
            module._buffers[name] = copies[id(buffer)][0]
    try:
        yield written
    finally:
        kept: dict[int, torch.Tensor] = {}
        for module, name, buffer in places:
            clone, version = copies[id(buffer)]
            current = module._buffers.get(name)
            changed = current is not clone or clone._version != version
            if changed:
                written.add((id(module), name))
            if changed and keep_written:
                kept.setdefault(id(buffer), buffer.detach().clone())
            module._buffers[name] = kept.get(id(buffer), buffer)
