"""What a forward goes by that no comparison can watch: a graph may not stand in for it."""

from __future__ import annotations

import contextvars
import functools
import itertools
import logging
import os
import re
import threading
import time
import types
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
import torch.random as torch_random
from folding_models import Pair, image
from torch import Tensor, nn

from optimizer import optimize, report_of
from passes.errors import UnseenCall
from passes.graph.unwatched import unwatched

LEVEL = contextvars.ContextVar("LEVEL", default=1.0)
LOCAL = threading.local()
NUMBERS = itertools.count(1)
LOG = logging.getLogger(__name__)
PATTERN = re.compile("a")
perf_counter = time.perf_counter


class Settings:
    """Answers when it is called."""

    scale: ClassVar = [2.0]

    def __init__(self) -> None:
        self.level = [1.0]

    def __call__(self) -> float:
        return self.level[0]

    @classmethod
    def of_class(cls) -> float:
        return cls.scale[0]

    @staticmethod
    def of_all() -> float:
        return Settings.scale[0]


SETTINGS = Settings()


def by_default(level: list[float] = [1.0]) -> float:  # noqa: B006 - that it can change is what is looked at
    return level[0]


def with_attribute() -> float:
    level: float = with_attribute.level[0]  # type: ignore[attr-defined]
    return level


with_attribute.level = [1.0]  # type: ignore[attr-defined]


def counting() -> Callable[[], int]:
    count = 0

    def more() -> int:
        nonlocal count
        count += 1
        return count

    return more


def _imports() -> float:
    import time

    return time.time()


UNWATCHED: dict[str, tuple[Callable[[], Any], str]] = {
    "context variable": (lambda: LEVEL.get(), r"goes by a ContextVar \(LEVEL\)"),
    "thread's own": (lambda: LOCAL.level, r"goes by a _local \(LOCAL\)"),
    "iterator": (lambda: next(NUMBERS), r"goes by a count \(NUMBERS\)"),
    "clock": (lambda: time.time(), "uses time"),
    "clock by its name": (lambda: perf_counter(), "uses perf_counter"),
    "clock that is imported": (lambda: _imports(), "uses time"),
    "file": (lambda: os.path.exists("a"), "uses os"),
    "identity": (lambda: id(SETTINGS), "uses id"),
    "default dtype": (lambda: torch.get_default_dtype(), "asks for torch's get_default_dtype"),
    "threads": (lambda: torch.get_num_threads(), "asks for torch's get_num_threads"),
    "seed, by another name": (lambda: torch_random.initial_seed(), "asks for torch's initial_seed"),
    "setting of a backend": (lambda: torch.backends.cudnn.benchmark, "asks for torch's backends"),
    "counter": (counting(), "assigns the outer variable 'count'"),
}
WATCHED: dict[str, Callable[[], Any]] = {
    "log": lambda: LOG.info("called"),
    "text": lambda: PATTERN.match("a"),
    "object": lambda: SETTINGS(),
    "class": lambda: Settings.of_class(),
    "function with a default": lambda: by_default(),
    "tensor": lambda: torch.zeros(1),
}


@pytest.mark.parametrize("kind", UNWATCHED)
def test_what_answers_otherwise_without_a_change(kind: str) -> None:
    function, clause = UNWATCHED[kind]
    assert re.fullmatch(clause, unwatched({function: None}, []) or "")
    assert re.fullmatch(clause, unwatched({functools.partial(function).func: Pair}, [1, "a", image()]) or "")


@pytest.mark.parametrize("kind", WATCHED)
def test_what_can_be_compared(kind: str) -> None:
    assert unwatched({WATCHED[kind]: None}, [SETTINGS, LOG, nn.ReLU(), None]) is None


def test_what_a_module_has_is_looked_at_too() -> None:
    assert unwatched({}, [[itertools.count()]]) == "goes by a count"
    assert unwatched({}, [types.SimpleNamespace(level=LEVEL)]) == "goes by a ContextVar"
    assert unwatched({}, [time.time]) == "uses time"
    assert unwatched({}, [F.relu, torch.relu, torch.ops.aten.relu, len]) is None


class Scaled(Pair):
    """Multiplies what its BatchNorm gives, which it calls as a function, by a number."""

    def __init__(self, scale: Callable[[], float]) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        bn = self.bn
        y = F.batch_norm(self.conv(x), bn.running_mean, bn.running_var, bn.weight, bn.bias, False, 0.1, bn.eps)
        return y * self.scale()


def test_no_graph_stands_in_for_a_forward_that_goes_by_a_clock() -> None:
    counted = Scaled(counting()).eval()
    fast = optimize(counted, ["fold-conv-bn"])
    (record,) = report_of(fast).passes
    assert record.status == "unchanged"
    assert "calls batch_norm as a function, assigns the outer variable 'count': what that" in record.skips[0].text
    x = image()
    assert not torch.allclose(fast(x), fast(x), atol=1e-2)


STATES: dict[str, tuple[Callable[[], float], list[float]]] = {
    "object that is called": (lambda: SETTINGS(), SETTINGS.level),
    "class method": (lambda: Settings.of_class(), Settings.scale),
    "static method": (lambda: Settings.of_all(), Settings.scale),
    "default": (lambda: by_default(), by_default.__defaults__[0]),  # type: ignore[index]
    "attribute of a function": (lambda: with_attribute(), with_attribute.level),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("inputs", [None, (image(),)])
def test_state_of_functions_and_classes_is_compared(kind: str, inputs: Any) -> None:
    scale, state = STATES[kind]
    model = Scaled(scale).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=inputs)
    assert report_of(fast).passes[0].status == "applied"
    assert torch.allclose(fast(image()), model(image()), atol=1e-5)
    before = state[0]
    try:
        state[0] = 3.0
        with pytest.raises(UnseenCall, match="changed after optimize"):
            fast(image())
    finally:
        state[0] = before
    assert torch.allclose(fast(image()), model(image()), atol=1e-5)


def test_what_holds_too_much_to_be_looked_through_is_told_of() -> None:
    many = list(range(5000))
    wanted = "goes by a list that holds too much to be looked through"
    assert unwatched({}, [many]) == wanted
    assert unwatched({}, [many[:1000]]) is None
