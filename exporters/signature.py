"""The arguments of a call by the names of forward's parameters, and names for the tensors of a file."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from optimize_export.errors import StructureError
from optimize_export.structure import Key, unique


def bind(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names in the model's signature, in the order in which they were passed.

    Raises:
        StructureError: an argument is passed both by position and by name.
    """
    names = _positional_names(model, len(args), kwargs)
    bound = dict(zip(names, args, strict=True))
    for name, value in kwargs.items():
        if name in bound:
            raise StructureError(f"argument `{name}` is given twice, by position and by name.")
        bound[name] = value
    return bound


def input_names(paths: Iterable[tuple[Key, ...]]) -> tuple[str, ...]:
    """Identifiers for arguments: `mask`, `past_key_values_0_1`."""
    return unique(_identifier(path) for path in paths)


def output_names(paths: Iterable[tuple[Key, ...]], taken: Sequence[str]) -> tuple[str, ...]:
    """Identifiers for outputs: `logits`, `hidden_states_1`, `output`, `output_0`; never one of `taken`."""
    names = []
    for path in paths:
        unnamed = not path or isinstance(path[0], int)
        name = _identifier(("output", *path) if unnamed else path)
        names.append(f"{name}_out" if name in taken else name)
    return unique(names, taken)


def _positional_names(model: nn.Module, count: int, by_name: Collection[str]) -> list[str]:
    """A name for each of the first `count` arguments.

    Arguments that can't be passed by name get names that no other argument has.
    """
    parameters = _forward_parameters(model)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "input")
    either_way = [p.name for p in named if p.kind is p.POSITIONAL_OR_KEYWORD]
    before = [p.name for p in named if p.kind is p.POSITIONAL_ONLY]
    behind = [f"{rest}_{i}" for i in range(count - len(named))]
    others = unique([*before, *behind], {*either_way, *by_name})
    return [*others[: len(before)], *either_way, *others[len(before) :]]


def positional_parameters(model: nn.Module) -> list[str]:
    """The names of forward's parameters that take an argument by position, in order."""
    taken = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in _forward_parameters(model) if parameter.kind in taken]


def _forward_parameters(model: nn.Module) -> list[inspect.Parameter]:
    if isinstance(model, torch.jit.ScriptModule):
        scripted: Any = model.forward
        arguments = scripted.schema.arguments[1:]
        return [inspect.Parameter(argument.name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for argument in arguments]
    # Prefer the forward of the class: one set on the instance often takes only *args.
    of_class = type(model).forward is not nn.Module.forward
    try:
        parameters = list(inspect.signature(type(model).forward if of_class else model.forward).parameters.values())
    except (TypeError, ValueError):  # forward isn't a Python function, so the names are unknown
        return []
    return parameters[1:] if of_class else parameters


def identifier(name: str) -> str:
    """Turn `name` into a Python identifier."""
    name = re.sub(r"\W", "_", name, flags=re.ASCII) or "_"
    return f"_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name


def _identifier(path: tuple[Key, ...]) -> str:
    return identifier("_".join(str(key) for key in path))
