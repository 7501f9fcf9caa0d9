"""What the code of a tree's forwards can reach of a module other than by calling it where its parent holds it.

A trace or a recorded run shows what a forward did. A branch that neither took may read the weight of a convolution, and
no seal stands before a weight. So the code itself is read: it finds more than is ever run. What it doesn't find are names
that are put together while the code runs, and code that a forward reaches by more than two calls or in other packages.
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from passes.graph.outside import KEPT, held_by
from passes.graph.side_effects import contents_of, holds_no_module, names_in, package_of, values_in, with_helpers
from passes.graph.tracing import function_of
from passes.program.checkpoint_guard import refuse_checkpoint
from passes.program.moved_bias import MovedBias
from passes.program.seals import SHAPE_AND_KIND

# What gives many tensors at once, or one by a name that is a value.
_MANY = frozenset({
    "parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "_parameters", "_buffers",
    "get_parameter", "get_buffer",
})  # fmt: skip
# What code names that asks for the kind of parameters only, as in `next(p.dtype for p in self.parameters())`.
_KIND = SHAPE_AND_KIND | {"parameters", "buffers", "next"}
# With these a text is the name of an attribute.
_BY_TEXT = frozenset({"getattr", "attrgetter", "__getattr__", "__getattribute__", "__dict__", "vars"})
_SKIPPED = frozenset({"CACHE", "PRECALL", "PUSH_NULL", "NOP", "RESUME", "EXTENDED_ARG"})


@dataclass(frozen=True)
class Access:
    """One attribute that a code takes of something.

    Attributes:
        of_self: whether `path` starts at the function's first argument; otherwise it isn't known where.
        path: the attributes that are taken before, one of another.
        name: the attribute.
    """

    of_self: bool
    path: tuple[str, ...]
    name: str


@functools.lru_cache(maxsize=4096)
def accesses_in(code: types.CodeType) -> tuple[Access, ...]:
    """Every attribute that a code and the functions defined in it take, unless only its shape or kind is asked for."""
    if names_in(code) <= _KIND and not _computes(code):
        return ()
    found = [*_chained(code), *(_texts(code) if not _BY_TEXT.isdisjoint(names_in(code)) else ())]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += accesses_in(constant)
    return tuple(dict.fromkeys(found))


def _chained(code: types.CodeType) -> Iterator[Access]:
    steps = [one for one in dis.get_instructions(code) if one.opname not in _SKIPPED]
    first = code.co_varnames[0] if code.co_argcount else None
    of_self, path = False, list[str]()
    for index, step in enumerate(steps):
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            of_self, path = step.opname.startswith("LOAD_FAST") and step.argval == first, []
            continue
        if not _asks_for_kind(steps, index, len(path)):
            yield Access(of_self, tuple(path), str(step.argval))
        path.append(str(step.argval))


def _asks_for_kind(steps: list[dis.Instruction], index: int, depth: int) -> bool:
    """Whether it is `….weight.dtype`, or `next(….parameters()).dtype`."""
    following = index + 1
    if steps[index].argval in ("parameters", "buffers") and index > depth + 1:
        calls = [(step.opname, step.argval) for step in steps[index + 1 : index + 3]]
        if calls == [("CALL", 0), ("CALL", 1)] and steps[index - depth - 2].argval == "next":
            following = index + 3
    after = steps[following : following + 1]
    return any(step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval in SHAPE_AND_KIND for step in after)


def _texts(code: types.CodeType) -> Iterator[Access]:
    for constant in code.co_consts:
        for text in constant if isinstance(constant, tuple | frozenset) else (constant,):
            if isinstance(text, str):
                *path, name = text.split(".")
                yield Access(False, tuple(path), name)


def _computes(code: types.CodeType) -> bool:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return any(step.opname.startswith("BINARY") for step in dis.get_instructions(code)) or any(map(_computes, inner))


@functools.lru_cache(maxsize=4096)
def asks_for_types(code: types.CodeType) -> bool:
    """Whether a code, or a function defined in it, asks by `type` what class a value other than `self` has."""
    steps = [one for one in dis.get_instructions(code) if one.opname not in _SKIPPED]
    for step, after in itertools.pairwise(steps):
        if step.opname == "LOAD_GLOBAL" and step.argval == "type" and after.argval != "self":
            return True
    return any(asks_for_types(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))


def classes_run_by(function: types.FunctionType) -> Iterator[type]:
    """The classes of modules whose forward a code takes as a function, as in `nn.Conv2d.forward(layer, x)`."""
    for first, path in _roots_of_forwards(function.__code__):
        value = function.__globals__.get(first)
        for name in path:
            value = vars(value).get(name) if isinstance(value, types.ModuleType) else None
        if isinstance(value, type) and issubclass(value, nn.Module):
            yield value


@functools.lru_cache(maxsize=4096)
def _roots_of_forwards(code: types.CodeType) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """For each `….forward` of a global, in a code and the functions defined in it: its name, and the attributes between."""
    if "forward" not in names_in(code):
        return ()
    found = []
    first, path = "", list[str]()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if first and step.argval == "forward":
                found.append((first, tuple(path)))
            path.append(str(step.argval))
        elif step.opname not in _SKIPPED:
            first, path = (str(step.argval) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ""), []
    inner = (_roots_of_forwards(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return (*found, *itertools.chain(*inner))


@dataclass(frozen=True)
class _Code:
    """What the code of one forward and of what it calls takes and asks.

    Attributes:
        classes: those whose forward it takes as a function.
    """

    accesses: tuple[Access, ...]
    asks_for_types: bool
    classes: frozenset[type]


def _code_of(own: types.FunctionType, cls: type) -> _Code:
    methods = {own, *(value for base in cls.__mro__ for value in vars(base).values() if _is_function(value))}
    methods |= {value.fget for base in cls.__mro__ for value in vars(base).values() if type(value) is property}
    functions = with_helpers(own, cls)
    found = dict.fromkeys(
        access if function in methods else replace(access, of_self=False)
        for function in functions
        for access in accesses_in(function.__code__)
    )
    classes = frozenset(cls for function in functions for cls in classes_run_by(function))
    return _Code(tuple(found), any(asks_for_types(function.__code__) for function in functions), classes)


def _code_of_kept(function: types.FunctionType) -> _Code:
    """What a function takes that a module keeps: it isn't known of what."""
    if package_of(function) == "torch":
        return _Code((), asks_for_types=False, classes=frozenset())
    found = dict.fromkeys(replace(access, of_self=False) for access in accesses_in(function.__code__))
    return _Code(tuple(found), asks_for_types=False, classes=frozenset(classes_run_by(function)))


def _is_function(value: Any) -> bool:
    return type(value) is types.FunctionType


@dataclass(frozen=True)
class _Read:
    """An attribute that the forward at the path `reader` takes of the module at `start`.

    Attributes:
        reader, module: the module whose forward it is, by path and by identity.
        start: the path of the module, or None where it isn't known.
        ending: the end of its path then.
    """

    reader: str
    module: int
    start: str | None
    ending: tuple[str, ...]

    def takes_of(self, path: str) -> bool:
        """Whether the module may be the one at the path."""
        if self.start is not None:
            return self.start == path
        parts = path.split(".")
        return is_under(path, self.reader) and parts[len(parts) - len(self.ending) :] == list(self.ending)

    def takes_below(self, path: str) -> bool:
        """Whether the one at the path may be the module or stand below it."""
        return is_under(path, self.reader if self.start is None else self.start)


def is_under(path: str, above: str) -> bool:
    """Whether a module's path is another's, or stands below it."""
    return not above or path == above or path.startswith(f"{above}.")


class NamedReads:
    """What the forwards of one tree can read by name, and which modules they hold beside their children.

    It is of the tree as the capture found it: what passes put there holds no module, and no code of a user's.
    """

    def __init__(self, root: nn.Module, unregistered: Sequence[tuple[str, nn.Module]] = ()) -> None:
        self._unregistered = frozenset(path for path, _ in unregistered)
        self._reads: dict[str, list[_Read]] = {}
        self._holders: dict[int, str] = {}
        # For each module that holds others so: the paths of those.
        self._held: dict[str, list[str]] = {}
        self._askers: set[int] = set()
        # For each module: the names of its methods that are kept, each with the path of a module that keeps it.
        self._keepers: dict[int, dict[str, str]] = {}
        # The classes whose forward a code takes as a function, with the path and identity of the module that it is of.
        self._run_as_functions: list[tuple[type, str, int]] = []
        codes: dict[tuple[types.FunctionType, type], _Code] = {}
        kept: dict[types.FunctionType, _Code] = {}
        # Modules may share what holds much: a configuration, or a vocabulary.
        inside: dict[int, list[nn.Module | types.FunctionType | _KeptMethod]] = {}
        everything = [*root.named_modules(), *unregistered]
        paths = {id(module): path for path, module in reversed(everything)}
        for path, module in everything:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            for name, value in module.__dict__.items():
                if holds_no_module(value) or (name in _OWN and type(value) not in KEPT):
                    continue
                if id(value) not in inside:
                    inside[id(value)] = list(_held_in(value, 4))
                for other in inside[id(value)]:
                    if isinstance(other, types.FunctionType):
                        if other not in kept:
                            kept[other] = _code_of_kept(other)
                        self._note(path, module, kept[other])
                        continue
                    if isinstance(other, _KeptMethod):
                        # One of its own among its hooks, as lazy modules have, runs when the module is called.
                        if other.module is not module or not (name == "forward" or name.endswith("_hooks")):
                            self._keepers.setdefault(id(other.module), {}).setdefault(other.name, path)
                        continue
                    if other is module:
                        continue
                    self._holders.setdefault(id(other), path)
                    if id(other) in paths:
                        self._held.setdefault(path, []).append(paths[id(other)])
            own = function_of(module)
            if own is None or package_of(own) == "torch":
                continue
            if (own, type(module)) not in codes:
                codes[own, type(module)] = _code_of(own, type(module))
            self._note(path, module, codes[own, type(module)])
        self._of_many = [read for many in _MANY for read in self._reads.get(many, ())]

    def _note(self, path: str, module: nn.Module, code: _Code) -> None:
        if code.asks_for_types:
            self._askers.add(id(module))
        self._run_as_functions += ((cls, path, id(module)) for cls in code.classes if not isinstance(module, cls))
        for access in code.accesses:
            start, ending = _start_of(path, module, access)
            self._reads.setdefault(access.name, []).append(_Read(path, id(module), start, ending))

    def asks_for_types(self, module: nn.Module) -> bool:
        """Whether the module's forward asks by `type` what class a value has."""
        return id(module) in self._askers

    def holder_of(self, module: nn.Module) -> str | None:
        """The path of a module that holds this one in an attribute, list, dict or object, and not as its child."""
        return self._holders.get(id(module))

    @property
    def any_goes_past(self) -> bool:
        """Whether any module may be run otherwise than by its call: most trees have none."""
        return bool(self._keepers or self._run_as_functions)

    def keepers_of(self, module: nn.Module) -> Mapping[str, str]:
        """The methods of a module, other than its call, that are kept: their names, each with the path of who keeps it."""
        return self._keepers.get(id(module), {})

    def runner_of(self, module: nn.Module, path: str, but: frozenset[int]) -> str | None:
        """The path of a module whose code may run the module at a path by the forward of its class, as a function.

        Args:
            but: modules, by identity, whose forwards are no matter.
        """
        for cls, runner, key in self._run_as_functions:
            if key not in but and isinstance(module, cls):
                read = _Read(runner, key, None, ())
                if read.takes_of(path) or self._takes_elsewhere(read, path):
                    return runner
        return None

    def reader_of(self, path: str, name: str, but: frozenset[int]) -> str | None:
        """The path of a module whose forward may read the attribute `name` of the module at the path.

        Args:
            but: modules, by identity, whose forwards are no matter.
        """
        for read in self._reads.get(name, ()):
            if read.module not in but and (read.takes_of(path) or self._takes_elsewhere(read, path)):
                return read.reader
        for read in self._of_many:
            if read.module not in but and (read.takes_below(path) or self._takes_elsewhere(read, path)):
                return read.reader
        return None

    def _takes_elsewhere(self, read: _Read, path: str) -> bool:
        """Whether the attribute may be of the module at the path, which doesn't stand below the reader.

        It may where the reader holds the module, or one around it, beside its own children. Whoever holds the container of
        one that the tree doesn't register may stand anywhere.
        """
        if read.start is not None:
            return False
        return path in self._unregistered or any(is_under(path, held) for held in self._held.get(read.reader, ()))


# What every module has: its children, its own tensors, and a forward that a rewrite put there. One of the user's is a
# function.
_OWN = frozenset({"_modules", "_parameters", "_buffers", "forward"})


# A call of a module by these goes by its instance's forward.
_CALLS = frozenset({"__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward"})


@dataclass(frozen=True)
class _KeptMethod:
    """A method of a module, other than its call: whatever stands in for the module's forward, it goes past that."""

    module: nn.Module
    name: str


def _held_in(top: Any, depth: int) -> Iterator[nn.Module | types.FunctionType | _KeptMethod]:
    """The modules, their methods and the functions in a value, in what it holds, and in what the functions hold.

    Args:
        depth: so many containers deep.
    """
    # Values may hold each other: so many containers deep each was looked into, by identity.
    seen: dict[int, int] = {}
    waiting = [(top, depth)]
    while waiting:
        value, left = waiting.pop()
        kind = type(value)
        # Who keeps checkpoints as they were knows modules, and calls none; who guards them looks at names alone.
        if holds_no_module(value) or kind is MovedBias or value is refuse_checkpoint:
            continue
        if issubclass(kind, nn.Module):
            yield value
        elif seen.get(id(value), -1) < left:
            if id(value) not in seen:
                yield from (value,) if kind is types.FunctionType else _methods_in(value)
            seen[id(value)] = left
            waiting += _parts_of(value, left)


def _parts_of(value: Any, left: int) -> list[tuple[Any, int]]:
    """What a value holds, with so many containers as there may still be around something in it."""
    kind = type(value)
    if kind in KEPT or kind is types.CellType:
        return [(part, left) for part in held_by(value)]
    contents = None if not left else value if kind is tuple else contents_of(value)
    if contents is None:
        return []
    return [(part, left - 1) for part in (contents if kind is tuple else values_in(contents))]


def _methods_in(value: Any) -> Iterator[_KeptMethod]:
    """The method of a module that a value is, or makes of a function of the class by giving it the module."""
    method = value() if type(value) is weakref.WeakMethod else value
    if type(method) is types.MethodType:
        function, owner = method.__func__, method.__self__
    elif type(method) is functools.partial and method.args:
        function, owner = method.func, method.args[0]
    else:
        return
    name = getattr(function, "__name__", "")
    if isinstance(owner, nn.Module) and name not in _CALLS and _is_of_class(function, type(owner)):
        yield _KeptMethod(owner, name)


def _is_of_class(function: Any, cls: type) -> bool:
    return any(function is value for base in cls.__mro__ for value in vars(base).values())


def _start_of(path: str, module: nn.Module, access: Access) -> tuple[str | None, tuple[str, ...]]:
    """The path of the module that an attribute is taken of; otherwise None, and what its path ends in."""
    if not access.of_self:
        return None, access.path
    for index, name in enumerate(access.path):
        child = module._modules.get(name)
        if child is None:
            return None, access.path[index + 1 :]
        module, path = child, f"{path}.{name}" if path else name
    return path, ()
