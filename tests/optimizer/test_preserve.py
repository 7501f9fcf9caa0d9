import array
import copy
import itertools
import random
import tempfile
import warnings
from collections import Counter, deque
from types import SimpleNamespace

import numpy
import pytest
import torch
from tiny_models import enliven
from torch import nn

from optimize_export.errors import LoadError
from optimizer import check_parity, optimize
from optimizer.model.runs import Runs


class Countdown:
    """An iterator that is written in Python."""

    def __init__(self, start):
        self.left = start
        self.inner = iter(range(start))

    def __iter__(self):
        return self

    def __next__(self):
        self.left -= 1
        return self.left + next(self.inner)


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="a device in use is seeded at once")
def test_a_device_that_is_not_in_use_keeps_the_seed_that_it_will_start_from() -> None:
    """`torch.manual_seed` queues the seed in torch.cuda, which uses the last one queued."""
    torch.manual_seed(7)
    waiting = torch.cuda._lazy_seed_tracker.get_calls()
    queued = list(torch.cuda._queued_calls)
    model = enliven(nn.Sequential(nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3), nn.Dropout(0.5))).eval()
    fast = optimize(model, example_inputs=(torch.randn(2, 3, 4),))
    check_parity(model, fast, example_inputs=lambda size, generator: (torch.randn(size, 3, 4, generator=generator),))
    assert torch.cuda._lazy_seed_tracker.get_calls() == waiting
    assert torch.cuda._queued_calls == queued


class Drawing(nn.Module):
    def __init__(self, items):
        super().__init__()
        self.items = items
        self.calls = 0
        self.conv, self.bn = nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3)

    def forward(self, x):
        self.calls += 1
        next(self.items)
        return self.bn(self.conv(x))


class WarningCountdown(Countdown):
    """Warns when it is copied, as the iterators of itertools do in Python 3.12 and 3.13."""

    def __deepcopy__(self, memo):
        message = "Pickle, copy, and deepcopy support will be removed from itertools in Python 3.14."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        twin = WarningCountdown(self.left)
        twin.inner = copy.deepcopy(self.inner)
        return twin


ITERATORS = {
    "list": lambda: iter([1, 2, 3, 4]),
    "list, reversed": lambda: reversed([1, 2, 3, 4]),
    "tuple": lambda: iter((1, 2, 3, 4)),
    "range": lambda: iter(range(4)),
    "dict": lambda: iter({1: 0, 2: 0, 3: 0, 4: 0}),
    "count": lambda: itertools.count(5),
    "cycle": lambda: itertools.cycle([1, 2, 3]),
    "zip": lambda: zip([1, 2, 3, 4], itertools.count(), strict=False),
    "enumerate": lambda: enumerate([4, 5, 6, 7]),
    "map": lambda: map(abs, iter([1, -2, 3, -4])),
    "chain": lambda: itertools.chain([1, 2], [3, 4]),
    "islice": lambda: itertools.islice([1, 2, 3, 4, 5], 4),
    "in Python": lambda: Countdown(8),
    "with the warning of Python 3.12": lambda: WarningCountdown(8),
}


@pytest.mark.parametrize("name", ITERATORS)
def test_an_iterator_stays_where_it_is(name):
    iterator, twin = ITERATORS[name](), ITERATORS[name]()
    if name != "range":  # one that nothing was drawn from
        assert next(iterator) == next(twin)
    model = Drawing(iterator)
    with Runs(model, in_eval=True).fresh() as fresh:
        copied = [next(fresh.items) for _ in range(2)]
    assert model.items is iterator
    following = [next(twin) for _ in range(3)]
    assert [next(iterator) for _ in range(3)] == following
    assert copied == following[:2]


# The test copies the model itself.
@pytest.mark.filterwarnings("ignore:.*support will be removed from itertools:DeprecationWarning")
@pytest.mark.parametrize("name", ["cycle", "in Python"])
def test_measuring_and_optimizing_move_neither_iterators_nor_counters(name):
    model, twin = enliven(Drawing(itertools.chain(ITERATORS[name](), itertools.count()))).eval(), ITERATORS[name]()
    x = torch.randn(2, 3, 4)
    assert check_parity(model, copy.deepcopy(model), (x,)).ok
    optimize(model, ["fold-conv-bn"], example_inputs=(x,))
    assert model.calls == 0
    assert next(model.items) == next(twin)


class Keeping(nn.Module):
    """Scales its output by state that it keeps between calls."""

    def __init__(self, held, step):
        super().__init__()
        self.held, self.step = held, step
        self.conv, self.bn = nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.bn(self.conv(x)) * self.step(self.held)


def _count(held):
    held.append(1)
    return len(held)


KEPT = {
    "deque": (deque, _count),
    "nested": (lambda: [[[]]], lambda held: _count(held[0][0])),
    "counter": (Counter, lambda held: (held.update("a"), held["a"])[1]),
    "object": (lambda: SimpleNamespace(inner=SimpleNamespace(calls=[])), lambda held: _count(held.inner.calls)),
    "numpy": (lambda: numpy.zeros(1), lambda held: float(held.__iadd__(1)[0])),
    "bytearray": (bytearray, _count),
    "array": (lambda: array.array("i"), _count),
    "random": (lambda: random.Random(3), lambda held: held.random()),
    "random in a list": (lambda: [random.Random(3)], lambda held: held[0].uniform(0, 1)),
    "numpy generator": (lambda: {"draws": numpy.random.default_rng(3)}, lambda held: float(held["draws"].random())),
    "torch generator": (lambda: torch.Generator().manual_seed(3), lambda held: torch.rand(1, generator=held)),
    "count in a list": (lambda: [itertools.count(1)], lambda held: next(held[0])),
    "iterator in a dict": (lambda: {"a": [iter(range(1, 999))]}, lambda held: next(held["a"][0])),
    "tensor in a tuple": (lambda: {"a": (torch.zeros(1),)}, lambda held: held["a"][0].add_(1).clone()),
    "tensor in an object": (
        lambda: SimpleNamespace(total=torch.zeros(1)),
        lambda held: held.total.add_(1).clone(),
    ),
}


@pytest.mark.filterwarnings("ignore:.*support will be removed from itertools:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("inputs", [(torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)),), None])
@pytest.mark.parametrize("name", KEPT)
def test_state_of_all_kinds_is_in_the_result_what_it_was_and_stays_the_callers(name, inputs):
    make, step = KEPT[name]
    model = enliven(Keeping(make(), step)).eval()
    twin, before = copy.deepcopy(model), copy.deepcopy(model)
    if inputs is not None:
        assert check_parity(model, copy.deepcopy(model), inputs).ok
    fast = optimize(model, ["fold-conv-bn"], example_inputs=inputs)
    x = torch.randn(2, 3, 4)
    with torch.no_grad():
        first, second = fast(x), fast(x)
        for answer in (first, second):
            assert torch.allclose(answer, twin(x), atol=1e-5)
        assert not torch.allclose(first, second)
        assert torch.equal(model(x), before(x))


def generator():
    yield from range(100)


@pytest.mark.parametrize("make", [generator, lambda: zip(generator(), [1, 2], strict=False)], ids=["plain", "inside"])
def test_a_generator_is_refused_and_not_moved(make):
    model = enliven(Drawing(make())).eval()
    x = torch.randn(2, 3, 4)
    for run in (
        lambda: check_parity(model, model, (x,)),
        lambda: optimize(model, ["fold-conv-bn"], example_inputs=(x,)),
    ):
        with pytest.raises(
            LoadError, match=r"attribute .items. of Drawing can't be copied .* store a list and an index"
        ):
            run()
    assert next(model.items) in (0, (0, 1))


def test_a_file_is_refused():
    model = enliven(nn.Sequential(nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3))).eval()
    with tempfile.TemporaryFile() as file:
        model.file = file
        with pytest.raises(LoadError, match=r"attribute .file. of Sequential can't be copied"):
            check_parity(model, model, (torch.randn(2, 3, 4),))


class _Steps(nn.Module):
    """Counts its calls, in eval too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return x + self.steps


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
@pytest.mark.parametrize(("inner", "mode"), [(lambda: nn.BatchNorm2d(4), "training"), (_Steps, "inference")])
def test_the_callers_scripted_parts_keep_their_buffers(mode, inner):
    scripted = torch.jit.script(enliven(nn.Sequential(nn.Conv2d(3, 4, 3), inner())))
    model = nn.Sequential(scripted, enliven(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)))).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fast = optimize(model, passes=["fold-conv-bias"], mode=mode, example_inputs=(torch.randn(2, 3, 8, 8),))
    (done,) = fast.report.passes
    assert done.status in ("applied", "unchanged")
    assert fast.report.parity.verdict == "ok"
    after = model.state_dict()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
