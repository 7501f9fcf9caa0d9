"""Whatever a plan recomputes, the outputs, gradients and buffers of a step stay bit-identical."""

import copy
import random
import sys
import threading
from collections import Counter, namedtuple
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from tiny_models import Net
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from training_models import MODELS, Names, built, rows

from passes.checkpointing.plan import Plan, Step
from passes.checkpointing.tape import Tape


class Counts(TorchDispatchMode):
    """Counts how often each operator runs."""

    def __init__(self):
        super().__init__()
        self._counts = Counter()

    def __getitem__(self, name):
        return self._counts[name]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def names_of(model, inputs):
    model, inputs = copy.deepcopy((model, inputs))
    with Names() as seen:
        model(*inputs)
    return tuple(seen.names)


def planned(model, inputs, choose):
    """A plan with the steps that `choose(index, name)` returns."""
    names = names_of(model, inputs)
    return Plan(names, tuple(choose(index, name) for index, name in enumerate(names)))


def everything(index, name):
    return Step(recomputed=True, internals=frozenset(range(8)), random=True)


def random_choice(seed):
    rng = random.Random(seed)
    share, regions, inside = rng.choice((0.2, 0.5, 0.9)), rng.choice((1, 3, 30)), rng.random() < 0.5
    nested = rng.random() < 0.5

    def choose(index, name):
        internals = frozenset(number for number in range(8) if inside and rng.random() < share)
        region = (index * regions // 100,)
        if nested:
            region = (0, *region)[: rng.choice((1, 2, 2))]
        return Step(region, rng.random() < share, internals, random=True)

    return choose


def backward(outputs):
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(output.shape, generator=generator).to(output.dtype) for output in outputs]
    torch.autograd.backward(outputs, gradients)


def steps(model, inputs, plan, count=2):
    """Outputs, gradients, buffers and random state of several steps from one seed, on a copy."""
    model, inputs = copy.deepcopy((model, inputs))
    torch.manual_seed(0)
    seen = []
    for _ in range(count):
        with Tape(plan) if plan is not None else nullcontext() as tape:
            outputs = model(*inputs)
        assert tape is None or tape.missed is None
        backward(outputs)
        seen.extend([outputs] if isinstance(outputs, torch.Tensor) else outputs)
    leaves = [value for value in inputs if isinstance(value, torch.Tensor)]
    seen.extend(leaf.grad for leaf in (*model.parameters(), *leaves))
    seen.extend(model.buffers())
    seen.append(torch.get_rng_state())
    return [None if value is None else value.detach() for value in seen]


def assert_equal(expected, got):
    assert len(expected) == len(got)
    for number, (a, b) in enumerate(zip(expected, got, strict=True)):
        assert (a is None) == (b is None), number
        assert a is None or torch.equal(a, b), number


# ------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize("name", MODELS)
def test_all_may_be_computed_again(name):
    model, inputs = MODELS[name]()
    assert_equal(steps(model, inputs, None), steps(model, inputs, planned(model, inputs, everything)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", MODELS)
def test_any_part_may_be_computed_again(name, seed):
    model, inputs = MODELS[name]()
    assert_equal(steps(model, inputs, None), steps(model, inputs, planned(model, inputs, random_choice(seed))))


@pytest.mark.parametrize("name", ["in place", "attention", "twice", "recurrent"])
def test_what_drew_no_random_numbers_when_it_was_planned_may_draw_some(name):
    """A dropout of zero, for example, may be raised later."""
    model, inputs = MODELS[name]()
    plan = planned(model, inputs, lambda index, name: Step(recomputed=True))
    assert_equal(steps(model, inputs, None), steps(model, inputs, plan))


@pytest.fixture
def switching():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("kept", [True, False])
def test_threads_draw_one_at_a_time(kept, switching):
    """A thread that repeats its draws isn't affected by draws of other threads in the meantime."""

    def choose(index, name):
        return Step(random=True) if kept and not index else everything(index, name)

    model = Net(lambda m, x: F.dropout(F.dropout(x, 0.5).exp() - 1, 0.5).exp() - 1)
    plan = planned(model, (torch.ones(2048),), choose)
    wrong = []

    def work():
        for _ in range(50):
            x = torch.ones(2048, requires_grad=True)
            with Tape(plan):
                last = model(x)
            last.sum().backward()
            # The gradient is nonzero exactly where the output is nonzero.
            wrong.append(((x.grad != 0) != (last.detach() != 0)).sum().item())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0] * 200


def test_what_is_given_in_inference_mode_is_kept():
    with torch.inference_mode():
        x = torch.randn(6, 8)
    model = Net(lambda m, x: (x + m.bias).exp().sin(), bias=nn.Parameter(torch.randn(8)))
    with Tape(Plan(("add", "exp", "sin"), (Step(recomputed=True),) * 3)):
        result = model(x)
    (gradient,) = torch.autograd.grad(result.sum(), model.bias)
    assert torch.equal(gradient, torch.autograd.grad(model(x).sum(), model.bias)[0])


Pair = namedtuple("Pair", "first second")


def test_tuples_of_any_class_are_taken_apart():
    class Stacked(nn.Module):
        def forward(self, x):
            pair = Pair(x + 1, x - 1)
            y = torch.cat(pair)
            pair.second.add_(1)
            return torch.stack(torch.linalg.slogdet(y.sin().reshape(-1, 2, 2))).exp() + pair.second.cos().sum()

    model, inputs = built(Stacked, rows())
    assert_equal(steps(model, inputs, None), steps(model, inputs, planned(model, inputs, everything)))


def test_a_gradient_inside_of_the_forward_is_the_same():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            energy = self.layer(x).tanh().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0] * self.layer(x).sigmoid()

    model, inputs = built(Inner, rows())
    assert_equal(steps(model, inputs, None), steps(model, inputs, planned(model, inputs, everything)))


# ------------------------------------------------------------------------------------- kept and dropped values


@pytest.mark.parametrize("comes", [True, False])
def test_a_plan_goes_on_behind_a_norm_that_synchronises(comes):
    """If it synchronises, it makes other calls in place of the planned one."""

    class Norm(nn.Module):
        def forward(self, x):
            y = x * 2
            y = torch.nn.functional.batch_norm(y, None, None, training=True) if comes else y.square().sqrt()
            z = y.exp()
            made.append(StorageWeakRef(z.untyped_storage()))
            y = z.exp()
            del z
            return torch.nn.functional.batch_norm(y, None, None, training=True).sum() if comes else y.abs().sum()

    names = ("mul", "batch_norm", "exp", "exp", "batch_norm", "sum")
    again = [Step(recomputed=name == "exp") for name in names]
    made = []
    with Tape(Plan(names, tuple(again), frozenset({1, 4}))) as tape:
        result = Norm()(rows())
    assert tape.missed is None
    # The first exp got its step.
    assert made[0].expired()
    result.backward()


def test_a_plan_waits_for_what_comes_behind_a_norm_that_synchronises():
    with Tape(Plan(("mul", "batch_norm", "exp"), (None, Step(), None), frozenset({1}))) as tape:
        (rows() * 2).sin()
    assert tape.missed == "exp (number 2)"
    with Tape(Plan(("mul", "batch_norm"), (None, Step()), frozenset({1}))) as tape:
        rows() * 2
    assert tape.missed is None
    with Tape(Plan(("mul", "batch_norm", "sin"), (None, Step(), None))) as tape:
        (rows() * 2).sin()
    # The call of a norm that never synchronises must come.
    assert tape.missed == "batch_norm (number 1)"


# ---------------------------------------------------------------------------------- forwards that deviate from the plan


def test_a_write_to_what_was_saved_raises_as_without():
    model = Net(lambda m, x: (y := x + 1, z := y * y, y.add_(1), z)[3])
    with Tape(Plan(("add", "mul", "add_"), (None, Step(recomputed=True), None))):
        result = model(rows())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_a_weight_that_is_written_to_before_the_backward_pass_raises():
    model, (x,) = built(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), rows())
    with Tape(planned(model, (x,), everything)):
        result = model(x)
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(
        RuntimeError, match=r"from which linear is recomputed .* has been modified by an inplace operation"
    ):
        result.sum().backward()


def test_a_plan_of_unequal_lengths_is_refused():
    with pytest.raises(ValueError, match="2 names for 1 steps"):
        Plan(("a", "b"), (None,))


@pytest.mark.parametrize(
    ("regions", "computed"),
    [
        (((), (), (), ()), 4),
        # In separate regions, each result is recomputed from the input, and its arguments are temporary.
        (((0,), (1,), (2,), (3,)), 10),
        # Results of surrounding regions are kept; those of other regions are temporary.
        (((0, 0), (0,), (0, 1), (0, 1)), 5),
        (((0, 0), (0,), (1,), (1,)), 7),
    ],
)
def test_a_region_is_computed_with_those_around_it(regions, computed):
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    plan = Plan(("exp",) * 4, tuple(Step(region, recomputed=True) for region in regions))
    with Tape(plan):
        y = x.exp().exp().exp().exp()
    with Counts() as counts:
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert counts["exp"] == computed
    assert torch.equal(gradient, torch.autograd.grad(x.exp().exp().exp().exp(), x, torch.ones_like(y))[0])
