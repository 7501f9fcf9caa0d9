"""Twins of the functions and weak references that modules keep, for a copy of the modules.

`copy.deepcopy` takes a function for a constant. But one that closes over a module, has it as a default or names it as a
global is a reference to that module like any other: in a copy of the tree it has to lead to the copy.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from optimizer.errors import UsageError
from passes.graph.outside import KEPT, WEAK, WEAK_DICTS, held_by, named_globals
from passes.graph.side_effects import assigned_globals, contents_of, values_in
from passes.graph.twin_globals import TwinGlobals, function_over

# Most of what a table holds is of these types, and leads nowhere.
_LEAVES = frozenset({str, int, float, bool, type(None), bytes})

# Gives the copy of a value; the text says where the value is, for a note where it has none.
Copier = Callable[[Any, str], Any]


class FunctionTwins:
    """The twins for one copy of a tree: each function, cell and weak reference has at most one.

    A function has one if it leads to a module or tensor of the tree: by the variables around it, its defaults, its
    attributes or the globals that it names, and by plain containers, bound methods, partials, weak references and other
    functions in these. Every other function stays the one object that it is, as do the variables around it that lead
    nowhere. A global that leads nowhere is that of the function's file at every call, and who binds another one to the
    name of a module later doesn't reach the twin.

    Args:
        memo: the copy of each object by the object's identity, as `copy.deepcopy` has it; the twins are put in there.
        tree: the modules and tensors that have a copy, or will have one, by identity.
        copied: gives the copy of any value.
    """

    def __init__(self, memo: dict[int, Any], tree: set[int], copied: Copier) -> None:
        self.memo = memo
        self.tree = tree
        self.copied = copied
        # Also keeps alive whatever is known by its identity.
        self._seen: dict[int, Any] = {}
        self._leading = set[int]()
        self._cells: dict[int, types.CellType] = {}
        # For each file, by the identity of its globals.
        self._globals: dict[int, TwinGlobals] = {}
        self._waiting: list[tuple[Any, Any]] = []

    def prepare(self, value: Any) -> None:
        """Put the twins of the functions and weak references in a value, containers and plain objects too, into the memo.

        What they hold follows in `fill`: not all modules have their copies yet.

        Raises:
            UsageError: a function names a global that leads to the tree, and assigns one.
        """
        for kept in _kept_in(value, {}, depth=4):
            found = self._leading_from(kept)
            # A function's twin needs its cells, a method's its function, a weak reference's what it leads to.
            for item in found:
                if isinstance(item, types.CellType):
                    self._cells[id(item)] = types.CellType()
                    self._waiting.append((item, self._cells[id(item)]))
            for kind in (types.FunctionType, types.MethodType, *WEAK):
                for item in (item for item in found if type(item) is kind and id(item) not in self.memo):
                    self._make(item)

    def fill(self) -> list[types.CellType]:
        """Give the twins the copies of what the originals hold.

        Returns:
            The variables around the twins that are their own, by now with values, and their own globals.
        """
        # Copying what one holds may find others.
        while self._waiting:
            original, twin = self._waiting.pop()
            if isinstance(original, types.CellType):
                twin.cell_contents = self.copied(original.cell_contents, "a variable around a kept function")
            elif isinstance(original, types.FunctionType):
                self._fill_function(original, twin)
            else:
                for key, value in original.items():
                    where = f"a value in a {type(original).__name__}"
                    twin[self.memo.get(id(key), key)] = self._copied_if_leading(value, where)
        return [*self._cells.values(), *(cell for scope in self._globals.values() for cell in scope.own.values())]

    def _leading_from(self, start: Any) -> list[Any]:
        """What leads to the tree of all that is found from a value on, and wasn't found before."""
        holders: dict[int, list[Any]] = {}
        leading: list[Any] = []
        waiting = [start]
        while waiting:
            item = waiting.pop()
            if id(item) in self._seen:
                continue
            self._seen[id(item)] = item
            for part in held_by(item):
                if self._leads(part):
                    leading.append(item)
                elif type(part) not in _LEAVES:
                    holders.setdefault(id(part), []).append(item)
                    waiting.append(part)
        found: dict[int, Any] = {}
        # Backwards, as functions may hold each other in a circle.
        while leading:
            item = leading.pop()
            if id(item) not in found:
                found[id(item)] = item
                leading += holders.get(id(item), ())
        self._leading.update(found)
        return list(found.values())

    def _make(self, item: Any) -> None:
        if isinstance(item, types.FunctionType):
            self.memo[id(item)] = twin = self._function(item)
            self._waiting.append((item, twin))
        elif isinstance(item, types.MethodType):
            # One of a class's own function is copied as any object is.
            if id(item.__func__) in self.memo:
                self.memo[id(item)] = self._method(item)
        elif isinstance(item, WEAK_DICTS):
            self.memo[id(item)] = twins = type(item)()
            self._waiting.append((item, twins))
        elif isinstance(item, weakref.WeakSet):
            self.memo[id(item)] = weakref.WeakSet([self._referent(each) for each in item])
        elif isinstance(item, weakref.WeakMethod):
            method: Any = item()
            self.memo[id(item)] = weakref.WeakMethod(self._method(method))
        else:
            # What the callback would tidy up is the caller's.
            self.memo[id(item)] = weakref.ref(self._referent(item()))

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        scope: dict[str, Any] = function.__globals__
        if any(map(self._leads, named_globals(function).values())):
            _refuse_to_assign(function)
            if id(scope) not in self._globals:
                self._globals[id(scope)] = TwinGlobals(scope)
            scope = self._globals[id(scope)]
        return function_over(function, scope, self._cells)

    def _method(self, method: types.MethodType) -> types.MethodType:
        owner = self._referent(method.__self__)
        if owner is method.__self__:
            owner = self.copied(owner, "the object of a kept method")
        return types.MethodType(self.memo.get(id(method.__func__), method.__func__), owner)

    def _referent(self, value: Any) -> Any:
        """The copy of what is referred to weakly: that of a module is made now where it hasn't been made yet."""
        if id(value) in self.tree:
            return self.copied(value, f"a {type(value).__name__}")
        return self.memo.get(id(value), value)

    def _fill_function(self, original: types.FunctionType, twin: types.FunctionType) -> None:
        where = f"what function {original.__qualname__!r} holds"

        def copies(values: dict[str, Any]) -> dict[str, Any]:
            return {name: self._copied_if_leading(value, where) for name, value in values.items()}

        scope: Any = twin.__globals__
        for name, value in named_globals(original).items() if scope is not original.__globals__ else ():
            if self._leads(value) and name not in scope.own:
                scope.give(name, self.copied(value, where))
        if original.__defaults__ is not None:
            twin.__defaults__ = tuple(self._copied_if_leading(value, where) for value in original.__defaults__)
        if original.__kwdefaults__ is not None:
            twin.__kwdefaults__ = copies(original.__kwdefaults__)
        twin.__dict__.update(copies(original.__dict__))

    def _copied_if_leading(self, value: Any, where: str) -> Any:
        return self.copied(value, where) if self._leads(value) else value

    def _leads(self, value: Any) -> bool:
        return id(value) in self.tree or id(value) in self._leading


def _refuse_to_assign(function: types.FunctionType) -> None:
    for name in assigned_globals(function.__code__):
        raise UsageError(
            f"function {function.__qualname__!r}, which the model keeps, uses the model as a global of its file and"
            f" assigns the global {name!r}: a copy of it would assign another one. Keep {name!r} in an attribute of a"
            " module or in a list."
        )


def _kept_in(value: Any, seen: dict[int, int], depth: int) -> Iterator[Any]:
    """The functions and weak references in a value, in its containers, and in the attributes of plain objects."""
    kind = type(value)
    if kind in KEPT:
        yield value
    if seen.get(id(value), -1) >= depth:
        return
    seen[id(value)] = depth
    # The object of a bound method is copied with it.
    contents = (value.__self__,) if kind is types.MethodType else value if kind is tuple else contents_of(value)
    if depth and contents is not None and kind not in WEAK:
        for item in contents if type(contents) is tuple else values_in(contents):
            yield from _kept_in(item, seen, depth - 1)
