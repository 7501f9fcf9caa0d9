"""Which tensors of a tree its forwards may write to, as far as their code and graphs show."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from passes.graph.capture import ModuleGraph, is_atom
from passes.graph.side_effects import names_in, package_of, plain_function, with_helpers
from passes.graph.tracing import attributes_in, function_of, writes_in_place

State = tuple[dict[str, Any], str, torch.Tensor]


def state_of(module: nn.Module) -> list[State]:
    """The buffers and plain tensors of a module: in which dict they are, under what name, and they themselves."""
    homes: tuple[dict[str, Any], ...] = (module._buffers, module.__dict__)
    return [
        (home, name, value)
        for home in homes
        for name, value in home.items()
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    ]


def may_be_written(root: nn.Module, modules: Sequence[nn.Module], graphs: Mapping[int, ModuleGraph]) -> set[int]:
    """The tensors, by identity, that forwards may write to: buffers, plain tensors, and weights with a largest norm.

    A layer of torch.nn's own leaves its tensors alone, and so does a traced forward that writes to nothing; one whose graph
    writes in place may write to its own and to what the graph names. Of any other forward, and of hooks, little is known:
    they may write to the buffers of all layers of torch.nn's own below them, and to what their code names of other modules.

    Args:
        root: the whole tree.
        modules: those of the tree and of plain containers in it, without scripted ones.
        graphs: by identity of the module.
    """
    written = set[int]()
    unknown: list[nn.Module] = []
    for module in modules:
        graph = graphs.get(id(module))
        if _only_reads(module):
            written |= _shortened(module)
        elif graph is None or not graph.shows_every_call:
            unknown.append(module)
            written |= _own(module)
        else:
            in_place = writes_in_place(graph.graph)
            written |= _own(module) if in_place else set()
            written |= _named_below(module, attributes_in(graph.graph), in_place)
    hooks = [hook for module in modules for hook in _hooks_of(module)]
    if not unknown and not hooks:
        return written
    # A hook sees more than the module that it stands at.
    below = list(modules) if hooks else _below([*unknown, *_unregistered(root, modules)])
    names = _names_in(unknown, hooks)
    for module in below:
        if is_atom(module):
            written |= {id(value) for value in module._buffers.values() if value is not None}
        else:
            written |= {id(value) for _, name, value in state_of(module) if name in names}
    return written


def _only_reads(module: nn.Module) -> bool:
    """Whether a layer of torch.nn's own leaves its buffers as they are."""
    if isinstance(module, _NormBase):
        # `eval()` doesn't reach one in a plain list: it goes on counting.
        return not module.training
    return is_atom(module)


def _own(module: nn.Module) -> set[int]:
    return {id(value) for *_, value in state_of(module)}


def _shortened(module: nn.Module) -> set[int]:
    """The weight of an embedding that shortens the rows that it looks up."""
    is_shortened = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    return {id(module.weight)} if is_shortened else set()


def _named_below(module: nn.Module, names: Iterable[str], in_place: bool) -> set[int]:
    """What a graph names of the modules below its own.

    Only who writes, or has a layer's statistics written (`F.batch_norm`), has a need of a layer's buffers.
    """
    found = set[int]()
    for target in names:
        path, _, name = target.rpartition(".")
        owner = module.get_submodule(path)
        if in_place or is_atom(owner):
            found |= {id(value) for _, own, value in state_of(owner) if own == name}
    return found


def _hooks_of(module: nn.Module) -> Iterator[Callable[..., object]]:
    """The hooks around the forward of a module; torch's own, as of `weight_norm`, write to the module's own alone."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for hook in hooks.values():
            function = plain_function(hook)
            home = package_of(function) if isinstance(function, types.FunctionType) else type(hook).__module__
            if home.partition(".")[0] != "torch":
                yield hook


def _below(modules: Iterable[nn.Module]) -> list[nn.Module]:
    found: dict[int, nn.Module] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if id(module) not in found and not isinstance(module, torch.jit.ScriptModule):
            found[id(module)] = module
            waiting += (child for child in module._modules.values() if child is not None)
    return list(found.values())


def _unregistered(root: nn.Module, modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules in plain containers: which forward has them isn't looked into."""
    registered = {id(module) for module in root.modules()}
    return [module for module in modules if id(module) not in registered]


def _names_in(modules: Iterable[nn.Module], hooks: Iterable[Callable[..., object]]) -> frozenset[str]:
    """The names in the code of forwards, hooks and functions held as attributes, and of the functions that these name."""
    # Most modules of a tree are of few classes.
    codes = set[tuple[Any, type]]()
    for module in modules:
        held = (plain_function(value) for value in vars(module).values())
        functions = [function_of(module), *(value for value in held if type(value) is types.FunctionType)]
        codes.update((function, type(module)) for function in functions)
    for hook in hooks:
        function = plain_function(hook)
        if type(function) is not types.FunctionType:
            # An object that is called.
            function = next((vars(cls)["__call__"] for cls in type(hook).__mro__ if "__call__" in vars(cls)), None)
        codes.add((function if type(function) is types.FunctionType else None, type(hook)))
    followed = (function for own, owner in codes for function in with_helpers(own, owner))
    return frozenset[str]().union(*(names_in(function.__code__) for function in followed))
