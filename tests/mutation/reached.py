"""A pytest plugin: record which guards refuse in which test, by their calls of `note`, and how long each test takes."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

_T = TypeVar("_T")
_NOTED: set[int] = set()
# The guards that refused during the setup of a fixture with a wider scope count for all tests that use the fixture.
_BY_FIXTURE: dict[str, set[int]] = defaultdict(set)
_TESTS: dict[str, dict[str, Any]] = {}


def note(number: int) -> None:
    """Record that a guard refuses."""
    _NOTED.add(number)


def note_where(number: int, answer: bool, value: _T) -> _T:
    """Return the value by which a guard decides, and record a refusal if its truth value is `answer`."""
    if bool(value) is answer:
        note(number)
    return value


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Iterator[Any]:
    earlier = set(_NOTED)
    _NOTED.clear()
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function":
            _BY_FIXTURE[fixturedef.argname] |= _NOTED
        _NOTED.update(earlier)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[Any]:
    _NOTED.clear()
    _TESTS[item.nodeid] = {"seconds": 0.0, "passed": True}
    result = yield
    guards = _NOTED.union(*(_BY_FIXTURE.get(name, set()) for name in getattr(item, "fixturenames", ())))
    _TESTS[item.nodeid]["guards"] = sorted(guards)
    return result


def pytest_runtest_logreport(report: Any) -> None:
    test = _TESTS.setdefault(report.nodeid, {"seconds": 0.0, "passed": True})
    test["seconds"] += report.duration
    test["passed"] &= not report.failed


def pytest_sessionfinish() -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    if any("guards" in test for test in _TESTS.values()):
        Path(os.environ["REACHED"], f"{worker}.json").write_text(json.dumps(_TESTS), encoding="utf-8")
