"""The modules that a model reaches, and their deep copy over the caller's weights: passes edit one, and every run uses one.

`copy.deepcopy` makes it, with a memo that maps each parameter to a new `Parameter` over the same storage. Buffers and
all other state are copied. So nothing that a run or a pass does to the copy reaches the caller's module.
"""

from __future__ import annotations

import copy
import functools
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from optimize_export.errors import LoadError
from optimize_export.structure import CONSTANTS
from optimize_export.wording import a_type, lack_of_memory, listed, quote, type_name
from optimizer.torch_private import copied_script
from passes.graph.backend import GraphCall
from passes.graph.forwards import unbound_forward
from passes.graph.memory import storages_of
from passes.torch_private import COMPILED_CALL

Mode = Literal["inference", "training"]

# The dicts in which `nn.Module` keeps its tensors and children.
REGISTRIES = ("_parameters", "_buffers", "_modules")
# Values of these types contain no module. Most attributes of a module have one of these types.
_WITHOUT_MODULES = (type(None), bool, int, float, complex, str, bytes, torch.Tensor)
_CONTAINERS = (dict, OrderedDict, list, tuple, set)
# Maximum depth of containers to search, starting at the attributes of a module.
_DEPTH = 3
# Maximum depth of containers and functions to search for modules that functions hold.
_DEPTH_OF_FUNCTIONS = 8
# Values of these types can't change in place, so both trees may contain the same one.
_CONSTANT = (
    *CONSTANTS,
    type,
    types.BuiltinFunctionType,
    types.FunctionType,
    types.ModuleType,
    torch.Size,
    torch.jit.ScriptFunction,
)
_EMPTY = (dict, OrderedDict, list, set)
# The methods, in addition to `__deepcopy__`, by which a class defines how it is copied.
_WAYS = ("__getstate__", "__setstate__", "__reduce_ex__", "__reduce__")


# ------------------------------------------------------------------------------------------- the modules of a model


def reachable_modules(model: nn.Module) -> list[nn.Module]:
    """All modules of the tree, then the modules in attributes and plain containers, with their trees."""
    return list(dict.fromkeys([*model.modules(), *(module for _, module in unregistered_modules(model))]))


def unregistered_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that no module registers as a child, each with its path.

    The path is the code that reaches the module: `layers[0].conv`. A module in several places is listed once per place.
    """
    waiting = list(model.named_modules())
    registered = {module for _, module in waiting}
    found: list[tuple[str, nn.Module]] = []
    visited = set[nn.Module]()
    while waiting:
        path, module = waiting.pop()
        if is_script(module) or module in visited:
            continue
        visited.add(module)
        for name, value in module.__dict__.items():
            if _holds_no_module(value) or name in REGISTRIES:
                continue
            for place, top in _modules_in(value, f"{path}.{name}".lstrip("."), _DEPTH):
                new = [item for item in top.named_modules(prefix=place) if item[1] not in registered]
                found += new
                waiting += new
    return found


def modules_of(target: Any) -> list[nn.Module]:
    """The modules of the tree; empty for a callable that isn't a module."""
    return list(target.modules()) if isinstance(target, nn.Module) else []


def is_script(module: nn.Module) -> bool:
    """Whether this is a TorchScript module, whose attributes aren't Python attributes."""
    return isinstance(module, torch.jit.ScriptModule)


def _holds_no_module(value: Any) -> bool:
    """Whether a search for modules can skip a value, because of its type or because it is empty."""
    return type(value) in _WITHOUT_MODULES or (type(value) in _CONTAINERS and not value)


def _modules_in(value: Any, path: str, depth: int) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield path, value
    elif depth and isinstance(value, dict | list | tuple | set):
        keys, items = (value, value.values()) if isinstance(value, dict) else (range(len(value)), value)
        for key, item in zip(keys, items, strict=False):
            if not _holds_no_module(item):
                yield from _modules_in(item, f"{path}[{key!r}]", depth - 1)


def functions_over_modules(
    owners: Sequence[nn.Module], modules: Sequence[nn.Module]
) -> Iterator[tuple[nn.Module, str, list[nn.Module]]]:
    """Find the functions that hold modules.

    Yields:
        The module that keeps the function, a name for the place, and those of `modules` that the function holds.
    """
    tree = {id(module) for module in modules}
    for owner in owners:
        attributes = {} if is_script(owner) else vars(owner)
        for name, value in attributes.items():
            if name in REGISTRIES or _holds_no_module(value):
                continue
            held = [module for module in _held_by_functions(value, _DEPTH_OF_FUNCTIONS, set()) if id(module) in tree]
            if held:
                yield owner, f"a hook ({name})" if "hook" in name else f"attribute {name!r}", held


def _held_by_functions(
    value: Any, depth: int, seen: set[tuple[int, bool]], *, inside: bool = False
) -> Iterator[nn.Module]:
    """The modules that functions in a value hold; `copy.deepcopy` copies methods and partials, but no function.

    Args:
        inside: whether the value belongs to a function.
    """
    if isinstance(value, nn.Module):
        if inside:
            yield value
    elif depth and (id(value), inside) not in seen:
        # A value may be reached twice: outside of any function, where it is copied, and through one, where it isn't.
        seen.add((id(value), inside))
        inside = inside or type(value) is types.FunctionType
        for part in _parts_of(value):
            yield from _held_by_functions(part, depth - 1, seen, inside=inside)


def _parts_of(value: Any) -> list[Any]:
    kind = type(value)
    if kind in (dict, OrderedDict):
        return list(value.values())
    if kind is types.MethodType:
        return [value.__func__, value.__self__]
    if kind is functools.partial:
        return [value.func, *value.args, *value.keywords.values()]
    if kind is not types.FunctionType:
        return list(value) if kind in _CONTAINERS else []
    # The variables of a function's closure, its defaults and its attributes (`__wrapped__`).
    held = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()]
    for cell in value.__closure__ or ():
        # A variable may have no value yet.
        with suppress(ValueError):
            held.append(cell.cell_contents)
    return held


# ---------------------------------------------------------------------------------------------------------- the copy


@dataclass
class WorkingCopy:
    """The copy of one module."""

    # An instance of the caller's class.
    root: nn.Module
    # In "inference", the parameters are new `Parameter`s over the caller's storage, and the buffers are copies; in
    # "training", both are the caller's own objects.
    mode: Mode
    # By `id` of each module of the copy, the caller's module that it was copied from.
    originals: dict[int, nn.Module]
    # Sentences about functions that still run the caller's modules.
    notes: list[str] = field(default_factory=list)

    def own_parameters(self, names: Collection[str]) -> None:
        """Give these parameters, to which forward writes, their own storage.

        In training mode they are the caller's, and nothing happens.
        """
        if self.mode == "training":
            return
        own_storage(_named(self.root, names))

    def unregistered(self) -> list[tuple[str, nn.Module]]:
        """The modules in plain containers of the copy, outside its tree, each with its path."""
        return [place for place in unregistered_modules(self.root) if id(place[1]) in self.originals]


def own_storage(parameters: Iterable[nn.Parameter]) -> None:
    """Copy the memory of parameters; those that share memory share it afterwards too."""
    memo: dict[int, Any] = {}
    with copying_tensors():
        for parameter in parameters:
            parameter.data = copy.deepcopy(parameter.detach(), memo)


def working_copy(
    model: nn.Module, mode: Mode = "inference", *, private: Collection[str] = (), check_functions: bool = True
) -> WorkingCopy:
    """Copy a module without copying the memory of its weights.

    Tied weights, shared modules and tensors over the same memory stay tied and shared in the copy. Modules in plain
    containers are copied too. A function that the model keeps is not copied. If it holds modules of the model, it still
    uses the caller's modules, and a note says so.

    Args:
        model: any module; it is only read.
        mode: see `WorkingCopy.mode`.
        private: names of parameters that get their own memory; only in inference mode.
        check_functions: whether to search for functions that hold modules of the model; a second copy doesn't need it.
    """
    modules = reachable_modules(model)
    memo: dict[int, Any] = {}
    plain = [module for module in modules if is_plain(module)]
    notes = _notes_on_functions(plain, modules, mode) if check_functions else []
    apart = _storages_of(_named(model, private))
    shared = _memorize(model, modules, memo, mode, private)
    memo |= _references(plain, memo)
    # All plain modules get a copy before any attribute is copied: otherwise deepcopy would recurse along module chains.
    for module in plain:
        memo[id(module)] = object.__new__(type(module))
    with copying_tensors(shared):
        # Children first, so that a class that copies itself finds the modules inside it complete.
        for module in reversed(modules):
            if is_script(module):
                _copy_script(module, memo, mode, apart)
            elif is_plain(module):
                # Another compiled call would run the caller's module.
                is_ours = isinstance(vars(module).get(COMPILED_CALL), GraphCall)
                leave = () if is_ours else (COMPILED_CALL,)
                memo[id(module)].__dict__.update(_copied_attributes(module, memo, leave=leave))
            elif id(module) not in memo:
                _copy_by_itself(module, memo)
    originals = {id(memo[id(module)]): module for module in modules if id(module) in memo}
    return WorkingCopy(memo[id(model)], mode, originals, notes)


@contextmanager
def private_state(root: nn.Module, written: Iterable[str] = ()) -> Iterator[None]:
    """Run the modules of a working copy themselves, and restore their state afterwards.

    This is for runs that identify modules by their objects. Inside, every attribute is a copy that refers to the same
    modules and parameters. Afterwards, the attributes are the original objects again.

    Args:
        root: the module that runs inside.
        written: names of parameters that forward writes to; inside, these are copies too.
    """
    modules = reachable_modules(root)
    memo: dict[int, Any] = {id(module): module for module in modules}
    shared = _memorize_parameters(modules, memo, [*_named(root, frozenset(written))], lambda one: one)
    memo |= {id(one): one for module in modules for one in _installed(module)}
    scripted = [buffer for module in modules if is_script(module) for buffer in module.buffers(recurse=False)]
    values = [buffer.detach().clone() for buffer in scripted]
    before = [(module, dict(module.__dict__)) for module in modules if not is_script(module)]
    try:
        with copying_tensors(shared):
            for module, _ in before:
                module.__dict__.update(_copied_attributes(module, memo, leave=(COMPILED_CALL,)))
        yield
    finally:
        for module, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        with torch.no_grad():
            for buffer, old in zip(scripted, values, strict=True):
                if not torch.equal(buffer, old):
                    buffer.copy_(old)


def _installed(module: nn.Module) -> Iterator[Any]:
    """The objects of passes in the attributes and hooks of a module.

    They refer to each other by identity, and have no state.
    """
    for name, value in () if is_script(module) else vars(module).items():
        for item in (value, *value.values()) if name.endswith("_hooks") and isinstance(value, dict) else (value,):
            owner = getattr(item, "__self__", item)
            if type(owner).__module__.partition(".")[0] in ("passes", "optimizer"):
                yield owner
                yield item


class _CopiedTensors(TorchFunctionMode):
    """Makes `copy.deepcopy` copy tensors of any kind while it is active.

    Tensors with an autograd history, which torch refuses to copy, are copied without it. Tensors in a shared storage
    stay in it.
    """

    def __init__(self, shared: frozenset[int]) -> None:
        super().__init__()
        self.shared = shared

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = self._copied(tensor, memo)
        return memo[id(tensor)]

    def _copied(self, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if is_lazy(tensor):
            return type(tensor)(tensor.requires_grad, tensor.data.device, tensor.data.dtype)  # type: ignore[call-arg, arg-type]
        if (places := storages_of(tensor)) and self.shared.issuperset(places):
            return tensor.detach()
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_mkldnn or tensor.is_quantized:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad and tensor.is_leaf)
        if tensor.is_leaf:
            return tensor.__deepcopy__(memo)
        # The memo keeps alive every object whose id it uses.
        return copy.deepcopy(tensor.detach(), memo)


@contextmanager
def copying_tensors(shared: frozenset[int] = frozenset()) -> Iterator[None]:
    """Make `copy.deepcopy` copy tensors of any kind, except the memory of shared storages.

    Python 3.12 and 3.13 warn that they are the last to copy the iterators of itertools. Where warnings are errors, a
    model that holds one couldn't be copied. Its author can't avoid the copy, so the warning is dropped.
    """
    with warnings.catch_warnings(), _CopiedTensors(shared):
        warnings.filterwarnings("ignore", ".*support will be removed from itertools", DeprecationWarning)
        yield


def _notes_on_functions(owners: Sequence[nn.Module], modules: Sequence[nn.Module], mode: Mode) -> list[str]:
    """Notes on functions that hold the caller's modules."""
    notes = []
    for owner, place, held in functions_over_modules(owners, modules):
        where = f"{place} of {type(owner).__name__} is a function that references modules of the original model"
        if mode == "training":
            raise LoadError(
                f"{where}, so training would change them instead of their copies: make it a method that uses self."
            )
        if any(module.training for module in held):
            raise LoadError(f"{where} in training mode: call model.eval() first, or make it a method that uses self.")
        kinds = listed(sorted({type(module).__name__ for module in held}))
        notes.append(f"{where} ({kinds}): it keeps running those, which aren't optimized")
    return notes


def _memorize(
    model: nn.Module, modules: Sequence[nn.Module], memo: dict[int, Any], mode: Mode, private: Collection[str]
) -> frozenset[int]:
    """Put the replacement of each parameter into the memo; in training mode, that of each tensor.

    Returns:
        The storages that stay shared.
    """
    if mode == "inference":
        apart = [*_named(model, private), *_shortened(modules)]
        return _memorize_parameters(modules, memo, apart, _same_storage)
    python = [module for module in modules if not is_script(module)]
    values = [value for module in python for value in (*module._parameters.values(), *module._buffers.values())]
    values += (value for module in python for value in vars(module).values())
    own = {id(value): value for value in values if isinstance(value, torch.Tensor)}
    memo |= own
    return _storages_of(own.values())


def _references(modules: Sequence[nn.Module], memo: Mapping[int, Any]) -> dict[int, weakref.ref[torch.Tensor]]:
    """The weak references of recurrent layers to their weights, by the id of those that they replace.

    A copied reference would refer to the caller's weights. The first call would then renew it, and be captured again.
    """
    held = (module for module in modules if isinstance(module, nn.RNNBase))
    references = (each for module in held for each in vars(module).get("_flat_weight_refs", ()) if each is not None)
    return {id(each): weakref.ref(memo[id(each())]) for each in references if id(each()) in memo}


def _memorize_parameters(
    modules: Sequence[nn.Module],
    memo: dict[int, Any],
    apart: Sequence[torch.Tensor],
    stand_in: Callable[[nn.Parameter], torch.Tensor],
) -> frozenset[int]:
    """Put the replacement of each parameter into the memo.

    Args:
        apart: tensors that aren't shared: parameters in their memory are copied.
        stand_in: makes the replacement of every other parameter.

    Returns:
        The storages that stay shared.
    """
    python = [module for module in modules if not is_script(module)]
    parameters = {id(one): one for module in python for one in module._parameters.values() if one is not None}
    buffers = (one for module in python for one in module._buffers.values() if one is not None)
    # If a buffer is in the memory of a weight, the weight is copied with it.
    moved, copied = _storages_of((*buffers, *apart)), set(map(id, apart))
    shared = set[int]()
    for key, parameter in parameters.items():
        places = storages_of(parameter)
        if key in copied or not moved.isdisjoint(places) or is_lazy(parameter):
            with copying_tensors():
                own = copy.deepcopy(parameter if is_lazy(parameter) else parameter.detach(), memo)
            memo[key] = own if is_lazy(parameter) else _as_parameter(parameter, own)
        else:
            memo[key] = stand_in(parameter)
            shared.update(places)
    return frozenset(shared)


def _named(model: nn.Module, names: Collection[str]) -> Iterator[nn.Parameter]:
    # A scripted module has no `get_parameter`.
    return (one for name, one in model.named_parameters(remove_duplicate=False) if name in names)


def _shortened(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """The weights of embeddings that shorten the rows that they look up, in place."""
    for module in modules:
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            yield module.weight


def is_plain(module: nn.Module) -> bool:
    """Whether a module is copied attribute by attribute.

    This is the case if its class doesn't define how it is copied, as parametrized classes do. Torch's own copy of a
    `GraphModule` makes another class and omits attributes that its graph doesn't name, so it isn't used.
    """
    cls = type(module)
    if is_script(module):
        return False
    if isinstance(module, torch.fx.GraphModule):
        return True
    ways = ((getattr(cls, name), getattr(nn.Module, name)) for name in _WAYS)
    # The methods of torch.nn's layers only support old checkpoints.
    return not hasattr(cls, "__deepcopy__") and all(
        way == common or getattr(way, "__module__", "").startswith("torch.nn.modules.") for way, common in ways
    )


def _copied_attributes(module: nn.Module, memo: dict[int, Any], *, leave: Collection[str] = ()) -> dict[str, Any]:
    return {name: _copied(module, name, value, memo) for name, value in vars(module).items() if name not in leave}


def _copied(module: nn.Module, name: str, value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, _CONSTANT):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if type(value) in _EMPTY and not value:
        # Most dicts of a module are empty, and this is faster.
        memo[id(value)] = type(value)()
        return memo[id(value)]
    where = f"attribute {name!r} of {type(module).__name__}"
    value = unbound_forward(value)
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        if lack_of_memory(error):
            raise
        raise LoadError(
            f"{where} can't be copied ({quote(error, with_type=True)}), but every run needs a copy: "
            f"create it in forward, store a list and an index instead, or define __deepcopy__ on {type_name(value)}."
        ) from error


def _copy_by_itself(module: nn.Module, memo: dict[int, Any]) -> None:
    kind = type_name(module)
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:
        if lack_of_memory(error):
            raise
        raise LoadError(
            f"copy.deepcopy of the model's {kind} failed: {quote(error, with_type=True)}. Passes and exporters work on a"
            " copy: fix its __deepcopy__."
        ) from error
    if not isinstance(copied, nn.Module):
        raise LoadError(
            f"copy.deepcopy of the model's {kind} returned {a_type(copied)}. Passes and exporters work on a "
            "copy: fix its __deepcopy__."
        )
    memo[id(module)] = copied


def _copy_script(module: nn.Module, memo: dict[int, Any], mode: Mode, apart: frozenset[int]) -> None:
    """Put the copies of a scripted module and its descendants into the memo.

    Args:
        apart: the storages of the parameters that the copy doesn't share; in inference mode it shares no buffer either.
    """
    if id(module) in memo:
        return

    def own(tensor: torch.Tensor) -> torch.Tensor:
        is_shared = mode == "training" or (isinstance(tensor, nn.Parameter) and apart.isdisjoint(storages_of(tensor)))
        return tensor if is_shared else copy.deepcopy(tensor)

    twin = copied_script(module, own)
    memo |= {id(mine): theirs for mine, theirs in zip(module.modules(), twin.modules(), strict=True)}


def _same_storage(parameter: nn.Parameter) -> torch.Tensor:
    # `detach` shares the version counter with the caller's tensor, so a write is visible on both sides.
    return _as_parameter(parameter, parameter.detach())


def _as_parameter(parameter: nn.Parameter, data: torch.Tensor) -> torch.Tensor:
    """Make a parameter of `data`, with the class, flag and attributes of another parameter."""
    if type(data) is not type(parameter) and type(parameter) is not nn.Parameter:
        data = data.as_subclass(type(parameter))
    if not isinstance(data, nn.Parameter):
        data = nn.Parameter(data, requires_grad=False)
    if parameter.requires_grad and parameter.is_leaf:
        # A tensor that was made in inference mode accepts the flag only in that mode.
        with torch.inference_mode() if data.is_inference() else nullcontext():
            data.requires_grad_()
    data.__dict__.update(parameter.__dict__)
    return data


def _storages_of(values: Iterable[Any]) -> frozenset[int]:
    return frozenset(place for value in values if isinstance(value, torch.Tensor) for place in storages_of(value))
