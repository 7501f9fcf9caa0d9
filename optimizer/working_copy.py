"""A copy of a module's tree over the same tensors, so that passes can edit it and the caller's module stays as it is."""

from __future__ import annotations

import copy
import enum
import types
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from optimizer.errors import LoadError
from optimizer.kept_functions import FunctionTwins
from optimizer.preserve import held_iterators, reachable_modules, unregistered_modules
from optimizer.sentences import lack_of_memory, quote, type_name
from optimizer.written_state import may_be_written, state_of
from passes.graph.capture import ModuleGraph
from passes.graph.forward import unbound_forward
from passes.graph.memory import copied_together, groups_of
from passes.graph.side_effects import REGISTRIES, attributes_of, contents_of, holds_no_module, values_in
from passes.graph.snapshot import Snapshot
from passes.graph.storage import same_values, storages_of, write_values

Mode = Literal["inference", "training"]

# Values of these types can't be changed in place: both trees may hold the same one.
_CONSTANT = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    type,
    types.BuiltinFunctionType,
    types.ModuleType,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)
# So can't a function, but one may hold modules of the tree.
_IMMUTABLE = (*_CONSTANT, types.FunctionType)
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
        variables: the cells of the variables around the functions of the copy, and of their own globals, that are tensors
            of the tree: some function may reach a buffer by one.
    """

    root: nn.Module
    mode: Mode
    originals: dict[int, nn.Module]
    notes: list[str] = field(default_factory=list)
    variables: list[types.CellType] = field(default_factory=list)
    _memo: dict[int, Any] = field(default_factory=dict, repr=False)
    # The copy's tensors, by identity, in the memory of one in a container: they were settled when they were copied.
    _nested: set[int] = field(default_factory=set, repr=False)

    def restore_attribute(self, module: nn.Module, name: str) -> None:
        """Copy one attribute of `module` (a module of the copy) from the caller's module once more."""
        original = self.originals[id(module)]
        if name in original.__dict__:
            module.__dict__[name] = copy.deepcopy(original.__dict__[name], dict(self._memo))
        else:
            module.__dict__.pop(name, None)

    def own_state(self, graphs: Mapping[int, ModuleGraph], parameters: Iterable[str] = ()) -> None:
        """Give the copy storage of its own for what its forwards may write to (`optimizer.written_state`).

        All else stays shared with the caller's module; what lies in one memory goes on doing so. In training all is shared.

        Args:
            graphs: by identity of the module.
            parameters: the names of those that a run was seen to write to.
        """
        if self.mode == "training":
            return
        modules = [module for module in map(self._twin_of, self.originals.values()) if not _is_script(module)]
        written = may_be_written(self.root, modules, graphs) | {
            id(self.root.get_parameter(name)) for name in parameters
        }
        if not written:
            return
        places = [place for module in modules for place in state_of(module)]
        beside = _parameters_beside(modules, (value for *_, value in places if id(value) in written), written)
        own: dict[int, torch.Tensor] = {}
        groups = groups_of([*(value for *_, value in places), *beside])
        anew = _touching(groups, written) - _touching(groups, self._nested)
        for group in groups:
            if id(group[0]) in anew:
                own |= _owned(group)
        # Whoever reads what another one writes goes on doing so.
        for home, name, value in places:
            home[name] = own.get(id(value), value)
        for parameter in beside:
            # The same object: more than modules may hold it.
            if id(parameter) in own:
                parameter.data = own[id(parameter)].detach()
        for cell in self.variables:
            cell.cell_contents = own.get(id(cell.cell_contents), cell.cell_contents)

    def _twin_of(self, original: nn.Module) -> nn.Module:
        twin: nn.Module = self._memo[id(original)]
        return twin

    def unregistered(self) -> list[tuple[str, nn.Module]]:
        """The modules that stand in plain containers of the copy and not in its tree, each with its path.

        Those that couldn't be copied are the caller's, and left out.
        """
        return [place for place in unregistered_modules(self.root) if id(place[1]) in self.originals]

    def source_of(self, module: nn.Module, name: str) -> weakref.ref[torch.Tensor] | None:
        """The caller's tensor behind parameter or buffer `name` of a module of the copy, held weakly."""
        original = self.originals.get(id(module))
        tensor = None if original is None else getattr(original, name, None)
        return weakref.ref(tensor) if isinstance(tensor, torch.Tensor) else None


def working_copy(model: nn.Module, mode: Mode = "inference", *, share_parameters: bool | None = None) -> WorkingCopy:
    """Copy the tree of `model` over the same tensors.

    Every attribute that can be changed in place (lists, dicts, configuration objects) is copied, tensors that a module
    registers or has as an attribute are not. What a module refers to inside the tree refers to the copy's own modules.
    Modules that stand in plain containers are copied likewise.

    Args:
        model: any module; it is read, never written.
        mode: see `WorkingCopy.mode`.
        share_parameters: take the caller's `Parameter` objects themselves; by default only in training.

    Raises:
        UsageError: a function that a module keeps uses the tree by a global of its file, and assigns a global.
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
        # The modules and tensors that are copied, by identity. Tensors that stay the same are among them: a run may put
        # others in their place for a time, and that must not reach the functions of the caller's module.
        self.tree = set[int]()
        self.twins = FunctionTwins(self.memo, self.tree, self._copied)

    def clone_tree(self, model: nn.Module) -> None:
        modules = reachable_modules(model)
        self._clone_nested([module for module in modules if not _is_script(module)])
        for module in modules:
            self._clone_tensors(module)
        self.tree.update(self.memo, map(id, modules))
        # All shells exist before any attribute is copied, so that a reference from one module to another, in either
        # direction, finds its copy.
        for module in modules:
            if not _copies_itself(module):
                self._remember(module, object.__new__(type(module)))
        # Children first: a module that copies itself finds those inside it in the memo, and complete.
        for module in _children_first(modules):
            if not _copies_itself(module):
                self._fill(module)
                continue
            if id(module) not in self.memo:
                self._copy_by_itself(module)
            self._remember(module, self.memo[id(module)])
        cells = self.twins.fill()
        self.result.variables += (cell for cell in cells if isinstance(cell.cell_contents, torch.Tensor))
        # They hold this object, which would live on until the next collection of garbage, and the memo with it.
        del self.twins
        self.result.root = self.memo[id(model)]

    def _copy_by_itself(self, module: nn.Module) -> None:
        if _is_script(module):
            self.memo[id(module)] = copy.copy(module)
            return
        for value in module.__dict__.values():
            if not holds_no_module(value):
                self.twins.prepare(value)
        try:
            self.memo[id(module)] = copy.deepcopy(module, self.memo)
        except Exception as error:
            if lack_of_memory(error):
                raise
            raise LoadError(
                f"copy.deepcopy of the model's {type(module).__name__} failed: {quote(error, with_type=True)}. Passes and"
                " exporters work on a copy: fix its __deepcopy__."
            ) from error
        if not isinstance(self.memo[id(module)], nn.Module):
            raise LoadError(
                f"copy.deepcopy of the model's {type(module).__name__} gave a {type_name(self.memo[id(module)])}. Passes and"
                " exporters work on a copy: fix its __deepcopy__."
            )

    def _remember(self, original: nn.Module, clone: nn.Module) -> None:
        self.memo[id(original)] = clone
        self.result.originals[id(clone)] = original

    def _clone_nested(self, modules: Sequence[nn.Module]) -> None:
        """Keep tensors in plain containers together with those of the modules whose memory they lie in.

        What is in a container can't be exchanged for what a forward may write to: in inference all of them get memory of
        the copy's own at once. A parameter isn't written to, and stays the caller's.
        """
        nested = list(_nested_tensors(modules))
        if not nested:
            return
        held = [value for module in modules for *_, value in state_of(module)]
        if self.share_parameters:
            held += [value for module in modules for value in module._parameters.values() if value is not None]
        groups = groups_of([*nested, *held])
        together = _touching(groups, set(map(id, nested))) & _touching(groups, set(map(id, held)))
        for group in groups:
            if id(group[0]) in together:
                copies = {id(value): value for value in group} if self.share_parameters else _owned(group)
                self.memo |= copies
                self.result._nested |= set(map(id, copies.values()))

    def _clone_tensors(self, module: nn.Module) -> None:
        # A script module gives its tensors out anew at each look: its copy shares them.
        plain = () if _is_script(module) else module.__dict__.values()
        for tensor in (*module._parameters.values(), *module._buffers.values(), *plain):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in self.memo:
                self.memo[id(tensor)] = tensor if self.share_parameters else _same_storage(tensor)

    def _fill(self, module: nn.Module) -> None:
        clone = self.memo[id(module)]
        for name, value in module.__dict__.items():
            # What `compile` made runs the caller's module.
            if name != "_compiled_call_impl":
                clone.__dict__[name] = self._attribute(module, name, unbound_forward(value))
        for name in (slot for cls in type(module).__mro__ for slot in _slots_of(cls)):
            if hasattr(module, name):
                object.__setattr__(clone, name, self._attribute(module, name, getattr(module, name)))

    def _attribute(self, module: nn.Module, name: str, value: Any) -> Any:
        if isinstance(value, _CONSTANT):
            return value
        if name in REGISTRIES:
            return {key: self.memo.get(id(item), item) if item is not None else None for key, item in value.items()}
        if name.endswith(_HOOKS) and isinstance(value, dict):
            return type(value)() if not value else self._hooks(module, value)
        if type(value) in (list, dict, set, OrderedDict) and not value:
            return type(value)()
        if isinstance(value, tuple) and all(isinstance(item, _CONSTANT) for item in value):
            return value
        return self._copied(value, f"attribute {name!r} of {type(module).__name__}")

    def _copied(self, value: Any, where: str) -> Any:
        if id(value) in self.tree and id(value) not in self.memo:
            self._copy_by_itself(value)
        if id(value) not in self.memo:
            self.twins.prepare(value)
        if id(value) in self.memo:
            return self.memo[id(value)]
        try:
            for hidden in _answer_for_copy(value, {}, depth=4):
                self.memo[id(hidden)] = hidden
                self.result.notes.append(
                    f"{where} holds a {type(hidden).__name__}, which can't be copied and is shared with the original"
                )
            return copy.deepcopy(value, self.memo)
        except Exception as error:  # noqa: BLE001 - whatever a value's own __deepcopy__ raises: it is then shared
            self.result.notes.append(
                f"{where} can't be copied ({type(error).__name__}) and is shared with the original"
            )
            return value

    def _hooks(self, module: nn.Module, hooks: dict[Any, Any]) -> dict[Any, Any]:
        # Hooks of weight_norm and the like are objects or bound methods that refer to modules of the tree.
        copied = copy.copy(hooks)
        for key, hook in hooks.items():
            copied[key] = self._copied(hook, f"a hook of {type(module).__name__}")
        return copied


def _children_first(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules, each behind its children: one that stands in several places is a child of others in front of it too."""
    order: dict[int, nn.Module] = {}
    entered = set[int]()
    for top in reversed(modules):
        waiting = [(top, False)]
        while waiting:
            module, is_left = waiting.pop()
            if is_left:
                order[id(module)] = module
            elif id(module) not in entered:
                entered.add(id(module))
                waiting.append((module, True))
                children = () if _is_script(module) else module._modules.values()
                waiting += [(child, False) for child in children if child is not None]
    return list(order.values())


def _answer_for_copy(value: Any, seen: dict[int, int], depth: int) -> Iterator[Any]:
    """The objects in a value that give an answer when `copy` asks for a way of copying them, and have none.

    A `__getattr__` that answers everything does: what it gives would be called, and its result taken for the copy.
    """
    cls = type(value)
    if issubclass(cls, (*_IMMUTABLE, torch.Tensor, nn.Module)) or seen.get(id(value), -1) >= depth:
        return
    seen[id(value)] = depth
    if hasattr(cls, "__getattr__") and not hasattr(cls, "__deepcopy__"):
        own = attributes_of(value) or {}
        if "__deepcopy__" not in own and getattr(value, "__deepcopy__", None) is not None:
            yield value
            return
    contents = value if cls is tuple else contents_of(value)
    if depth and contents is not None:
        for item in contents if cls is tuple else values_in(contents):
            yield from _answer_for_copy(item, seen, depth - 1)


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


def _slots_of(cls: type) -> Sequence[str]:
    slots = cls.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if name not in ("__dict__", "__weakref__")]


def _same_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same class over the same storage, without the history of gradients."""
    if is_lazy(tensor):
        return _own(tensor)
    # `detach` shares the version counter with the caller's tensor, so a later write is seen on both sides.
    clone = tensor.detach()
    if type(clone) is not type(tensor) and type(tensor) is not nn.Parameter:
        clone = clone.as_subclass(type(tensor))
    if isinstance(tensor, nn.Parameter) and not isinstance(clone, nn.Parameter):
        clone = nn.Parameter(clone, requires_grad=False)
    if tensor.requires_grad and tensor.is_leaf:
        # A tensor that was made in inference mode takes the flag in that mode alone.
        with torch.inference_mode() if tensor.is_inference() else nullcontext():
            clone.requires_grad_()
    clone.__dict__.update(tensor.__dict__)
    return clone


def _owned(group: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """For each tensor of a group, by identity, one with the same values, in memory that the copies share as those did."""
    if len(group) == 1:
        return {id(group[0]): _own(group[0])}
    copies = zip(group, copied_together(group), strict=True)
    return {id(tensor): copied.requires_grad_(tensor.requires_grad) for tensor, copied in copies}


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the same values in storage of its own; a lazy one has no storage yet."""
    if is_lazy(tensor):
        return type(tensor)(tensor.requires_grad, tensor.data.device, tensor.data.dtype)  # type: ignore[call-arg, arg-type]
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@contextmanager
def private_buffers(
    root: nn.Module, variables: Iterable[types.CellType] = (), *, keep_written: bool = False
) -> Iterator[set[tuple[int, str]]]:
    """Let a run of `root` write to copies of its buffers and plain tensors, and put all its attributes back afterwards.

    Args:
        root: the module that is run inside.
        variables: those of its working copy.
        keep_written: tensors that the run wrote to are replaced for good by a copy with the values from before the run,
            so that later runs don't write into the storage of whoever shares them.

    Yields:
        A set that holds, after the block, (id of the module, name) of each buffer or plain tensor that was written to.
    """
    written: set[tuple[int, str]] = set()
    reachable = reachable_modules(root)
    modules = [module for module in reachable if not _is_script(module)]
    snapshot = Snapshot(*modules)
    # What can't be replaced by a copy is written to, and gets its values back.
    nested = (tensor for tensor in snapshot.nested.values() if not is_lazy(tensor))
    places = [(module, *place) for module in modules for place in state_of(module) if not is_lazy(place[-1])]
    beside = _parameters_beside(modules, (tensor for *_, tensor in places))
    in_place = [*nested, *script_buffers(reachable), *beside]
    groups = groups_of([*in_place, *(tensor for *_, tensor in places)])
    fixed = _touching(groups, set(map(id, in_place)))
    copies = {id(tensor): own for group in groups for tensor, own in zip(group, copied_together(group), strict=True)}
    for _, home, name, tensor in places:
        home[name] = tensor if id(tensor) in fixed else copies[id(tensor)]
    # These hold them under another name.
    held = [(cell, cell.cell_contents) for cell in variables]
    for cell, tensor in held:
        cell.cell_contents = tensor if id(tensor) in fixed else copies.get(id(tensor), tensor)
    try:
        with held_iterators(modules):
            yield written
    finally:
        changed = {id(one): one for group in groups for one in group if not same_values(one, copies[id(one)])}
        snapshot.restore()
        with torch.no_grad():
            for key in changed.keys() & fixed:
                write_values(changed[key], copies[key])
        replaced = _touching(groups, changed.keys()) - fixed if keep_written else set()
        kept: dict[int, torch.Tensor] = {}
        for group in groups:
            if id(group[0]) in replaced:
                kept |= _owned(group)
        for module, home, name, tensor in places:
            home[name] = kept.get(id(tensor), tensor)
            if id(tensor) in changed:
                written.add((id(module), name))
        for cell, tensor in held:
            cell.cell_contents = kept.get(id(tensor), tensor)


def _touching(groups: Iterable[Sequence[torch.Tensor]], some: Set[int]) -> set[int]:
    """The tensors, by identity, of all groups that have one of `some`."""
    return {key for group in groups if not (keys := set(map(id, group))).isdisjoint(some) for key in keys}


def _parameters_beside(
    modules: Iterable[nn.Module], tensors: Iterable[torch.Tensor], some: Set[int] = frozenset()
) -> list[nn.Parameter]:
    """The parameters in the bytes of the tensors, and those of `some`, by identity, with what lies in their bytes."""
    parameters = {id(one): one for module in modules for one in module._parameters.values() if one is not None}
    wanted = [*tensors, *(parameters[key] for key in parameters.keys() & some)]
    storages = {storage for tensor in wanted for storage in storages_of(tensor)}
    near = [one for one in parameters.values() if storages and not storages.isdisjoint(storages_of(one))]
    # A checkpoint may have given all weights one storage.
    beside = _touching(groups_of([*wanted, *near]), set(map(id, wanted))) if near else set()
    return [one for one in near if id(one) in beside]


def script_buffers(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """The buffers of the scripted modules: the copy of such a one has the caller's."""
    for module in modules:
        if _is_script(module):
            yield from module.buffers(recurse=False)


def _nested_tensors(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Tensors in the containers among the attributes of modules: working copies have their own."""
    # Modules may share a container: a vocabulary, say.
    containers = {
        id(value): value
        for module in modules
        for name, value in module.__dict__.items()
        if name not in REGISTRIES and isinstance(value, dict | list | tuple)
    }
    for container in containers.values():
        for item in container.values() if isinstance(container, dict) else container:
            inner = item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple) else (item,)
            yield from (t for t in inner if isinstance(t, torch.Tensor) and not isinstance(t, nn.Parameter))
