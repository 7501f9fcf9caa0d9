"""Globals that stand before those of a file, and functions over them."""

from __future__ import annotations

from typing import Any

import pytest

from passes.graph.twin_globals import TwinGlobals, file_globals, function_over, home_of


def _file(source: str, **names: Any) -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "a_file", **names}
    exec(source, scope)
    return scope


def _twin(file: dict[str, Any], **own: Any) -> TwinGlobals:
    scope = TwinGlobals(file)
    for name, value in own.items():
        scope.give(name, value)
    return scope


SOURCE = """
def use():
    return one, two, len([two for _ in range(2)]), (lambda: one)(), [one + each for each in (two,)]
"""


def test_a_function_finds_its_own_values_and_those_of_the_file_as_they_are() -> None:
    file = _file(SOURCE, one=1, two=2)
    twin = function_over(file["use"], _twin(file, one=10), {})
    # More often than it takes for the interpreter to take a way of its own for each of the two.
    for _ in range(100):
        assert file["use"]() == (1, 2, 2, 1, [3])
        assert twin() == (10, 2, 2, 10, [12])
    file["two"] = 3
    assert (twin(), file["use"]()) == ((10, 3, 2, 10, [13]), (1, 3, 2, 1, [4]))
    del file["two"]
    with pytest.raises(NameError, match="'two'"):
        twin()


def test_a_function_is_what_it_was() -> None:
    file = _file("def named(x: int) -> str:\n 'What it does.'\n return one", one=1)
    twin = function_over(file["named"], _twin(file, one=10), {})
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "__code__"):
        assert getattr(twin, name) == getattr(file["named"], name)
    assert not hasattr(twin, "__wrapped__")
    plain = function_over(file["named"], file, {})
    assert plain.__code__ is file["named"].__code__
    assert plain.__dict__ == {}


def test_every_method_of_the_globals_sees_both() -> None:
    file = _file("", one=1, two=2)
    scope = _twin(file, one=10)
    assert (scope["one"], scope.get("two"), scope.get("three", 3), "two" in scope, "three" in scope) == (
        10,
        2,
        3,
        True,
        False,
    )
    assert dict(scope) == {**file, "one": 10} == {**scope}
    assert (len(scope), list(scope.keys())) == (len(file), list(file))
    scope["one"], scope["two"], scope["three"] = 11, 22, 33
    assert (scope["one"], scope["two"], scope["three"]) == (11, 22, 33)
    assert (file["one"], file["two"], file["three"]) == (1, 22, 33)
    scope.update(two=2)
    del scope["three"]
    assert (file["two"], "three" in file, scope.pop("two"), "two" in file) == (2, False, 2, False)
    with pytest.raises(KeyError):
        scope["three"]


def test_code_asks_for_its_globals_and_imports() -> None:
    source = """
def use():
    import math
    class Inside:
        value = len(names), one
    assert Inside.value == (3, 10)
    return globals()["one"], eval("len(names)", dict(globals())), Inside.__module__, math.floor(1.5)
"""
    file = _file(source, one=1, names="abc")
    assert function_over(file["use"], _twin(file, one=10), {})() == (10, 3, "a_file", 1)


def test_twins_of_twins_go_back_to_one_file() -> None:
    file = _file(SOURCE, one=1, two=2)
    first = _twin(file, one=10)
    second = _twin(first, two=20)
    twin = function_over(function_over(file["use"], first, {}), second, {})
    assert twin() == (10, 20, 2, 10, [30])
    assert file_globals(twin) is file_globals(file["use"]) is file
    assert (home_of(second, "two"), home_of(second, "one"), home_of(second, "__name__")) == (second, first, file)
    assert home_of(second, "one") is first
    assert home_of(second, "three") is file
