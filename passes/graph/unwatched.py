"""What a forward goes by that no comparison can watch: clocks, settings of torch, iterators, objects without attributes.

A graph that stands in for a forward holds the answers of its trace. Data is compared at every call; the answers of these
may be others without anything that could be compared being another.
"""

from __future__ import annotations

import dis
import functools
import logging
import re
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy
import torch

from passes.graph.fingerprint import TooMuch, is_of, kind_without_parts
from passes.graph.outside import is_data, named_everywhere
from passes.graph.side_effects import assigned_outside, globals_in, names_in

# The modules of Python's library whose functions answer by the time, the process, the system or a draw.
_ASKING = frozenset({
    "_thread", "asyncio", "contextvars", "datetime", "gc", "genericpath", "glob", "io", "locale", "multiprocessing", "nt",
    "ntpath", "os", "pathlib", "platform", "posix", "posixpath", "queue", "random", "resource", "secrets", "shutil",
    "socket", "subprocess", "sys", "tempfile", "threading", "time", "uuid",
})  # fmt: skip
_ASKING_BUILTINS = frozenset({"id", "input", "open"})
# What torch answers by its settings or its state. Whether gradients or autocast are on is refused while it is traced.
_ASKING_TORCH = frozenset({
    "are_deterministic_algorithms_enabled", "backends", "get_default_device", "get_default_dtype",
    "get_deterministic_debug_mode", "get_float32_matmul_precision", "get_num_interop_threads", "get_num_threads",
    "get_rank", "get_rng_state", "get_world_size", "initial_seed", "is_anomaly_enabled",
    "is_deterministic_algorithms_warn_only_enabled", "is_initialized",
    "is_warn_always_enabled", "max_memory_allocated", "mem_get_info", "memory_allocated", "memory_reserved",
})  # fmt: skip
# Objects without attributes whose answers stay the same.
_STEADY = (
    object, slice, types.EllipsisType, types.MethodDescriptorType, types.WrapperDescriptorType, re.Pattern, logging.Logger,
    numpy.dtype, numpy.ufunc, torch.finfo, torch.iinfo,
)  # fmt: skip


def unwatched(functions: Mapping[Any, Any], values: Iterable[Any]) -> str | None:
    """A clause about what functions, and those that they reach, go by and can't be compared; None where all can.

    Args:
        functions, values: as `passes.graph.outside.named_outside` takes them.
    """
    values = list(values)
    for value in values:
        if clause := _of_named("", value):
            return clause
    for function, name, value in named_everywhere(functions, values):
        is_torch = is_of(value, types.ModuleType) and value.__name__.partition(".")[0] == "torch"
        if is_torch and (asked := sorted(names_in(function.__code__) & _ASKING_TORCH)):
            return f"asks for torch's {asked[0]}"
        # Each function comes once without a name.
        if clause := _of_named(name, value) if name else _of_code(function):
            return clause
    return None


def _of_named(name: str, value: Any) -> str | None:
    if is_of(value, types.ModuleType):
        is_asking = value.__name__.partition(".")[0] in _ASKING or value.__name__.startswith("torch.backends")
        return f"uses {value.__name__}" if is_asking else None
    if is_of(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        home = str(value.__module__)
        is_asking = home.partition(".")[0] in _ASKING or (home.startswith("torch") and value.__name__ in _ASKING_TORCH)
        return f"uses {value.__qualname__}" if is_asking else None
    try:
        kind = kind_without_parts(value, _STEADY) if is_data(value) else None
    except TooMuch:
        return f"goes by a {type(value).__name__}{name and f' ({name})'} that holds too much to be looked through"
    return None if kind is None else f"goes by a {kind.__name__}{name and f' ({name})'}"


@functools.lru_cache(maxsize=1024)
def _imported(code: types.CodeType) -> str | None:
    imported = (step.argval for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME")
    found = next((name for name in imported if name.partition(".")[0] in _ASKING), None)
    inner = (_imported(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return found or next(filter(None, inner), None)


def _of_code(function: types.FunctionType) -> str | None:
    if assigned := assigned_outside(function.__code__):
        return f"assigns the {assigned[0][0]} {assigned[0][1]!r}"
    built_in = sorted((globals_in(function.__code__) & _ASKING_BUILTINS) - function.__globals__.keys())
    called = built_in[0] if built_in else _imported(function.__code__)
    return called and f"uses {called}"
