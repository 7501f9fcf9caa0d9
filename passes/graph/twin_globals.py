"""Functions that do what another does, over copies of some of its globals."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    _Dict = dict[str, Any]
else:

    class _Dict(MutableMapping, dict):
        """A dict whose every method goes by the five that a mapping must have."""


class TwinGlobals(_Dict):
    """Globals with values of their own for some names; all others are looked up in, and written to, those of a file.

    Where the globals of a function are no plain dict, its code asks them by `__getitem__` (CPython's LOAD_GLOBAL). It
    assigns a global past `__setitem__` all the same: a function that does so must not have these.

    Attributes:
        file: the globals that these stand before.
        own: the names with values of their own, each in a cell.
    """

    def __init__(self, file: dict[str, Any]) -> None:
        # What the interpreter reads past every method: for the builtins, imports, the names of functions made inside, and, as
        # of then, for all that the body of a class names.
        super().__init__(file)
        self.file = file
        self.own: dict[str, types.CellType] = {}

    def give(self, name: str, value: Any) -> None:
        """Have a value of its own under a name."""
        self.own[name] = types.CellType(value)
        dict.__setitem__(self, name, value)

    def __getitem__(self, name: str) -> Any:
        cell = self.own.get(name)
        return self.file[name] if cell is None else cell.cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self.own:
            self.own[name].cell_contents = value
        else:
            self.file[name] = value

    def __delitem__(self, name: str) -> None:
        del self.file[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.file)

    def __len__(self) -> int:
        return len(self.file)


def file_globals(function: types.FunctionType) -> dict[str, Any]:
    """The globals of the file that a function, or the one it is the twin of, is written in."""
    scope = function.__globals__
    while isinstance(scope, TwinGlobals):
        scope = scope.file
    return scope


def home_of(scope: dict[str, Any], name: str) -> dict[str, Any]:
    """The globals that have the value a function over `scope` finds under a name."""
    while isinstance(scope, TwinGlobals) and name not in scope.own:
        scope = scope.file
    return scope


def function_over(
    function: types.FunctionType, scope: dict[str, Any], cells: Mapping[int, types.CellType]
) -> types.FunctionType:
    """A function of the same code over other globals and variables, without defaults and attributes.

    Args:
        cells: what stands for a variable around the function, by the identity of its cell.
    """
    closure = function.__closure__ and tuple(cells.get(id(cell), cell) for cell in function.__closure__)
    twins = isinstance(scope, TwinGlobals)
    code = _uncompiled(function.__code__) if twins else function.__code__
    made = types.FunctionType(code, scope, function.__name__, None, closure)
    functools.update_wrapper(made, function, updated=())
    # It stands for the function, it doesn't wrap it.
    del made.__wrapped__  # type: ignore[attr-defined]
    if twins:
        vars(made).update(
            _torchdynamo_disable=True, _torchdynamo_disable_msg="it has globals of its own beside those of its file"
        )
    return made


def _uncompiled(code: types.CodeType) -> types.CodeType:
    """The same code as another object, which torch.compile runs as it is, with all that it calls.

    It looks up the globals of what it compiles in the file by their names, whatever the function itself would find.
    """
    inner = (_uncompiled(each) if isinstance(each, types.CodeType) else each for each in code.co_consts)
    twin = code.replace(co_consts=tuple(inner))
    compiler = torch._C._dynamo.eval_frame
    skip = compiler._FrameAction.SKIP
    compiler.set_code_exec_strategy(twin, compiler._FrameExecStrategy(skip, skip))
    return twin
