"""Functions on a model that reference its modules: in a copy of the model, they keep using the original's modules."""

import functools
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from tiny_models import enliven
from torch import nn

from optimize_export.errors import LoadError
from optimizer import check_parity, optimize
from optimizer.model.working_copy import working_copy

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.bn(self.conv(x)).relu()


class Planned(Pair):
    def forward(self, x):
        return self.plan["run"](x)


def made(change):
    torch.manual_seed(0)
    model = enliven(Pair())
    change(model)
    return model


def script(source, **names):
    """Run the source as a file that has these names, and return its globals."""
    scope = {"__name__": "script", "torch": torch, **names}
    exec(source, scope)
    return scope


# --- functions that reference modules ---------------------------------------------------------------------------------


def _lambda(m):
    m.forward = lambda x: m.bn(m.conv(x)).relu()


def _defaults(m):
    def forward(x, conv=m.conv, *, bn=m.bn):
        return bn(conv(x)).relu()

    m.forward = forward


def _wrapper(m):
    inner = m.forward

    @functools.wraps(inner)
    def wrapped(x):
        return inner(x) * 2

    m.forward = wrapped


def _method(m):
    conv = m.conv

    def forward(self, x):
        return self.bn(conv(x)).relu()

    m.forward = types.MethodType(forward, m)


def _list(m):
    layers = [m.conv, {"norm": (m.bn,)}]
    m.forward = lambda x: layers[1]["norm"][0](layers[0](x))


def _recursive(m):
    def forward(x, left=1):
        return m.bn(m.conv(x)) if left == 0 else forward(x, left - 1)

    m.forward = forward


def _weak(m):
    conv = weakref.ref(m.conv)
    m.forward = lambda x: m.bn(conv()(x))


def _partial(m):
    m.forward = functools.partial(lambda scale, x: m.bn(m.conv(x)) * scale, 2)


def _child(m):
    inner = m.conv.forward
    m.conv.forward = lambda x: inner(x) * 2


def _hook(m):
    m.conv.register_forward_hook(lambda module, args, output: m.bn(output))


def _beside(m):
    layers = [m.conv, m.bn]
    m.plan = {"layers": layers, "run": lambda x: functools.reduce(lambda value, layer: layer(value), layers, x)}
    m.__class__ = Planned


def _buffer(m):
    mean = m.bn.running_mean
    m.forward = lambda x: m.bn(m.conv(x)) + mean.sum()


def _written_buffer(m):
    m.register_buffer("total", torch.zeros(()))
    total = m.total

    def forward(x):
        total.add_(x.mean())
        return m.bn(m.conv(x)) + m.total

    m.forward = forward


def _global(m):
    script("model.forward = lambda x: model.bn(model.conv(x)).relu()", model=m)


def _global_list(m):
    source = """
import functools
def forward(x):
    return functools.reduce(lambda value, layer: layer(value), layers, x)
model.forward = forward
"""
    script(source, model=m, layers=[m.conv, m.bn])


def _global_helper(m):
    source = """
@torch.no_grad()
def second(x, left=1):
    return bn(x) if left == 0 else second(x, left - 1)
def first(x):
    return sum([conv(each) for each in (x, x)]) / 2
model.forward = lambda x: second(first(x))
"""
    script(source, model=m, conv=m.conv, bn=m.bn)


def _global_partial(m):
    script("model.forward = lambda x: model.bn(run(x))", model=m, run=functools.partial(m.conv.__call__))


def _global_hook(m):
    source = "conv.register_forward_hook(lambda module, args, output: norms['bn'](output))"
    script(source, conv=m.conv, norms={"bn": m.bn})


def _global_buffer(m):
    m.register_buffer("total", torch.zeros(()))
    source = """
def forward(x):
    total.add_(x.mean())
    return model.bn(model.conv(x)) + model.total
model.forward = forward
"""
    script(source, model=m, total=m.total)


# AROUND: the function holds the reference itself. UNSEEN: a global holds it, so only a run shows it. WRITING: the
# function writes to a buffer of the original.
AROUND = [_lambda, _defaults, _wrapper, _method, _list, _recursive, _weak, _partial, _child, _hook, _beside, _buffer]
UNSEEN = [_global, _global_list, _global_helper, _global_partial, _global_hook]
WRITING = [_written_buffer, _global_buffer]


def named(change):
    return change.__name__


@pytest.mark.parametrize("change", [*AROUND, *UNSEEN], ids=named)
def test_the_result_goes_on_with_the_originals_modules(change):
    model, twin = made(change).eval(), made(change).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert check_parity(model, twin, (X,)).ok
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(X,))
    assert torch.allclose(fast(X), twin(X), atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    notes = [note for note in fast.report.notes if "a function that references modules of the original model" in note]
    assert bool(notes) == (change in AROUND)
    assert all(note.endswith("it keeps running those, which aren't optimized") for note in notes)


@pytest.mark.parametrize("change", [_lambda, _child], ids=named)
def test_measuring_trains_such_functions_as_they_are(change):
    model, other = made(change).train(), made(change).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert check_parity(model, other, (X,), mode="training").ok
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        other.conv.weight.mul_(1.01)
    assert not check_parity(model, other, (X,), mode="training").ok


@pytest.mark.parametrize("change", AROUND, ids=named)
def test_modules_in_training_that_a_copy_cant_reach_are_refused(change):
    for inputs in ((X,), None):
        with pytest.raises(LoadError, match="modules of the original model in training mode: call"):
            optimize(made(change).train(), example_inputs=inputs)
        with pytest.raises(LoadError, match="modules of the original model, so training would change them"):
            optimize(made(change).train(), example_inputs=inputs, mode="training")


@pytest.mark.parametrize("change", [*UNSEEN, *WRITING], ids=named)
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_they_are_refused_where_a_run_shows_them(change, mode):
    model = made(change).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(LoadError, match=r"references modules of the original model|a reference outside"):
        optimize(model, example_inputs=(X,), mode=mode)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_bound_methods_and_partials_of_them_lead_to_the_copy():
    def change(m):
        m.act = m.conv.forward
        m.table = {"norm": [functools.partial(m.bn.forward)]}
        m.forward = types.MethodType(lambda self, x: self.table["norm"][0](self.act(x)), m)

    model = made(change).eval()
    result = working_copy(model)
    clone = result.root
    assert result.notes == []
    assert clone.act.__self__ is clone.conv
    assert clone.table["norm"][0].func.__self__ is clone.bn
    assert clone.forward.__self__ is clone
    assert torch.equal(clone(X), model(X))


def test_functions_that_hold_nothing_of_the_model_stay_the_same_objects():
    scale, seen, other = 2.0, [], nn.Linear(2, 2)

    def around(x, by=scale):
        seen.append(other)
        return x * by * scale

    def unset():
        return late

    def change(m):
        m.act, m.table, m.unset = around, [around, F.relu], unset
        m.register_forward_hook(around)

    model = made(change)
    result = working_copy(model)
    clone = result.root
    assert result.notes == []
    assert clone.act is clone.table[0] is around
    assert clone.table[1] is F.relu
    assert clone.unset is unset
    assert list(clone._forward_hooks.values()) == [around]
    late = 1


# --- branches that no run took ----------------------------------------------------------------------------------------


class Branch(Pair):
    def __init__(self, change):
        super().__init__()
        self.act = nn.ReLU()
        change(self)

    def forward(self, x, k=1):
        return self.act(self.bn(self.conv(x)) * k)


def _reads_around(m):
    conv = m.conv
    m.act.forward = lambda x: x + conv.weight.sum() if x.max() > 1000 else x


def _reads_in_a_hook(m):
    m.act.register_forward_hook(lambda module, args, y: y + m.conv.weight.sum() if y.max() > 1000 else y)


def _reads_by_globals(m):
    source = """
def total(conv):
    return conv.weight.sum()
model.act.forward = lambda x: x + total(model.conv) if x.max() > 1000 else x
"""
    script(source, model=m)


READERS = [_reads_around, _reads_in_a_hook, _reads_by_globals]


@pytest.mark.parametrize("change", READERS, ids=named)
def test_a_kept_function_that_reads_a_weight_in_a_branch_is_right(change):
    model, x = enliven(Branch(change)).eval().double(), X.double()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(x,))
    assert torch.allclose(fast(x), model(x), atol=1e-12)
    assert torch.allclose(fast(x, 1e5), model(x, 1e5), rtol=1e-12, atol=1e-6)


@pytest.mark.parametrize("verified", [False, True])
def test_a_forward_that_counts_in_a_variable_around_it_goes_on_counting(verified):
    def change(m):
        calls = 0

        def forward(x):
            nonlocal calls
            calls += 1
            return m.bn(m.conv(x))

        m.forward, m.calls = forward, lambda: calls

    fast = optimize(made(change).eval(), ["fold-conv-bn"], example_inputs=(X,) if verified else None)
    before = fast.calls()
    fast(X)
    assert fast.calls() == before + 1
