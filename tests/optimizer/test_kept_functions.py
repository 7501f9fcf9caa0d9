import functools
import gc
import threading
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from tiny_models import enliven
from torch import nn
from torch.nn.utils import parametrizations

from optimizer import optimize
from optimizer.errors import UsageError
from optimizer.working_copy import private_buffers, working_copy

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.bn(self.conv(x)).relu()


def made(change):
    torch.manual_seed(0)
    model = enliven(Pair())
    change(model)
    return model


def content(function, name):
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def script(source, **names):
    """The globals of a file of that source, which has the names."""
    scope = {"__name__": "script", "torch": torch, **names}
    exec(source, scope)
    return scope


# --- forwards that are set on an instance, and parts by hand -----------------------------------------------------------


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


CHANGES = [
    _lambda, _defaults, _wrapper, _method, _list, _recursive, _weak, _partial, _child, _hook, _buffer, _written_buffer,
    _global, _global_list, _global_helper, _global_partial, _global_hook, _global_buffer,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("verified", [False, True])
def test_the_result_runs_its_own_modules(change, mode, verified):
    def optimized():
        # The passes that leave checkpoints as they are.
        passes = ["channels-last"] if mode == "inference" else None
        return optimize(model, passes, example_inputs=(X,) if verified else None, mode=mode)

    model, twin = made(change).train(), made(change).train(mode == "training")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fast = optimized()
    assert torch.allclose(fast(X), twin(X), atol=1e-5)
    if mode == "inference":
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    weights = {name: value * 1.5 if value.is_floating_point() else value for name, value in before.items()}
    fast.load_state_dict(weights)
    twin.load_state_dict(weights)
    assert torch.allclose(fast(X), twin(X), atol=1e-4)


@pytest.mark.parametrize("change", [_lambda, _global])
@pytest.mark.parametrize("verified", [False, True])
def test_a_forward_over_the_model_itself_is_folded(verified, change):
    model = made(change).train()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(X,) if verified else None)
    assert fast.report.passes[0].status == "applied"
    assert torch.allclose(fast(X), made(change).eval()(X), atol=1e-5)
    assert model.training


# --- what has a twin ----------------------------------------------------------------------------------------------------


def test_functions_wherever_they_are_kept():
    def change(m):
        conv = m.conv
        m.direct = lambda: conv
        m.listed = [m.direct, (lambda: conv, 1)]
        m.named = {"a": types.SimpleNamespace(inside=lambda: conv)}
        m.fixed = (lambda: conv,)
        m.bound = [functools.partial(lambda a, b: conv, 1)]

    model = made(change)
    clone = working_copy(model).root
    calls = [lambda m: m.direct(), lambda m: m.listed[1][0](), lambda m: m.named["a"].inside()]
    calls += [lambda m: m.fixed[0](), lambda m: m.bound[0](2)]
    assert all(call(clone) is clone.conv for call in calls)
    assert all(call(model) is model.conv for call in calls)
    assert clone.listed[0] is clone.direct


def test_weak_references_lead_to_the_copy():
    def change(m):
        m.ref = weakref.ref(m.conv)
        m.refs = [weakref.ref(m.conv.weight), weakref.WeakMethod(m.conv.forward)]
        m.group = weakref.WeakSet([m.conv, m.bn])
        m.by_module = weakref.WeakKeyDictionary({m.conv: [m.bn]})
        m.by_name = weakref.WeakValueDictionary({"conv": m.conv})

    model = made(change)
    clone = working_copy(model).root
    for one in (model, clone):
        assert one.ref() is one.conv
        assert one.refs[0]() is one.conv.weight
        assert one.refs[1]().__self__ is one.conv
        assert set(one.group) == {one.conv, one.bn}
        assert one.by_module[one.conv] == [one.bn]
        assert dict(one.by_name) == {"conv": one.conv}


def test_a_weak_reference_to_what_copies_itself():
    def change(m):
        parametrizations.weight_norm(m.conv)
        conv = m.conv
        m.bn.before = weakref.ref(m.conv)
        m.bn.call = lambda: conv
        m.conv.owner = lambda: m

    clone = working_copy(made(change)).root
    assert clone.bn.before() is clone.bn.call() is clone.conv
    assert clone.conv.owner() is clone


def test_functions_share_their_variables_as_before():
    def change(m):
        current, calls = m.conv, 0

        def switch():
            nonlocal current, calls
            current, calls = m.bn, calls + 1

        m.switch, m.get = switch, lambda: current
        m.calls = lambda: calls

    model = made(change)
    clone = working_copy(model).root
    assert clone.get() is clone.conv
    clone.switch()
    assert clone.get() is clone.bn
    assert model.get() is model.conv
    # What holds nothing of the tree is no one's own.
    assert (clone.calls(), clone.calls is model.calls) == (1, True)


def test_functions_that_hold_nothing_of_the_tree_stay_the_same_objects():
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
    clone = working_copy(model).root
    assert clone.act is clone.table[0] is around
    assert clone.table[1] is F.relu
    assert clone.unset is unset
    assert list(clone._forward_hooks.values()) == [around]
    late = 1


def test_a_twin_is_what_the_function_was():
    def change(m):
        def named(x: int, owner=m, *, plain="a", inner=m.conv) -> str:
            """What it does."""
            return __class__  # noqa: F821 - an empty variable around it

        named.tag, named.owner = [1], m
        __class__ = None
        named.__wrapped__ = lambda: m
        m.named = named
        del __class__

    model = made(change)
    clone = working_copy(model).root
    mine, theirs = clone.named, model.named
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "__code__", "__globals__"):
        assert getattr(mine, name) == getattr(theirs, name)
    assert mine.__defaults__ == (clone,)
    assert mine.__kwdefaults__ == {"plain": "a", "inner": clone.conv}
    assert (mine.owner, mine.tag is theirs.tag) == (clone, True)
    assert mine.__wrapped__() is clone
    assert theirs.__defaults__ == (model,)
    assert theirs.__wrapped__() is model.named.owner is model
    assert mine.__closure__ == theirs.__closure__


def test_functions_in_a_circle():
    def change(m):
        def first(n):
            return m.conv if n == 0 else second(n - 1)

        def second(n):
            return first(n)

        first.peer = second
        m.second = second

    model = made(change)
    clone = working_copy(model).root
    assert clone.second(3) is clone.conv
    assert content(clone.second, "first").peer is clone.second
    assert model.second(3) is model.conv


def test_what_a_function_holds_in_other_objects_stays():
    class Trainer:
        def __init__(self, model):
            self.model = model

    def change(m):
        trainer = Trainer(m)
        m.get = lambda: trainer

    model = made(change)
    assert working_copy(model).root.get is model.get


def test_a_container_that_cant_be_copied_is_shared_and_named():
    def change(m):
        held = [m.conv, threading.Lock()]
        m.get = lambda: held

    model = made(change)
    result = working_copy(model)
    assert result.root.get()[0] is model.conv
    assert result.notes == [
        "a variable around a kept function can't be copied (TypeError) and is shared with the original"
    ]


def test_twins_keep_nothing_alive():
    model = made(_lambda)
    gc.collect()
    gc.disable()
    try:
        result = working_copy(model)
        memo = weakref.ref(result)
        del result
        assert memo() is None
    finally:
        gc.enable()


# --- globals ------------------------------------------------------------------------------------------------------------


def test_other_globals_are_those_of_the_file_at_every_call():
    scope = script("""
def step(x):
    log.append(1)
    return model.conv(x) * scale
def make():
    def inner():
        return model, scale
    return inner
def plain():
    return scale
log, scale = [], 2.0
""")

    def change(m):
        scope["model"], m.step, m.make, m.plain = m, scope["step"], scope["make"], scope["plain"]

    model = made(change)
    clone = working_copy(model).root
    assert clone.step.__globals__ is clone.make.__globals__ is not scope
    assert clone.plain is model.plain
    assert torch.equal(clone.step(X), clone.conv(X) * 2)
    scope["scale"] = 3.0
    assert torch.equal(clone.step(X), clone.conv(X) * 3)
    assert scope["log"] == [1, 1]
    inner = clone.make()
    assert (inner(), inner.__module__) == ((clone, 3.0), "script")
    del scope["scale"]
    with pytest.raises(NameError, match="name 'scale' is not defined"):
        clone.step(X)
    assert scope["model"] is model


def test_a_copy_of_a_copy_has_globals_of_its_own():
    model = made(_global_list)
    first = working_copy(model).root
    second = working_copy(first).root
    layers = [one.forward.__globals__["layers"] for one in (model, first, second)]
    assert all(
        held[0] is one.conv and held[1] is one.bn for held, one in zip(layers, (model, first, second), strict=True)
    )


def test_libraries_arent_walked_through():
    def change(m):
        m.act, m.kept = F.relu, [F.gelu, torch.optim.Adam.step]
        F.__dict__["model_of_a_test"] = m

    model = made(change)
    try:
        clone = working_copy(model).root
        assert clone.act is F.relu
        assert clone.kept == model.kept
    finally:
        del F.__dict__["model_of_a_test"]


def test_helpers_of_another_file_are_its_own():
    def change(m):
        other = script("def helper(): return model\ndef held(at=[model]): return at", model=m)
        m.get = script("def get(): return helper, held", helper=other["helper"], held=other["held"])["get"]

    model = made(change)
    clone = working_copy(model).root
    assert clone.get()[0] is model.get()[0]
    assert clone.get()[1]() == [clone]


@pytest.mark.parametrize("assigns", ["calls += 1", "del calls", "[calls := each for each in x]"])
def test_a_function_that_assigns_globals_and_uses_the_model_as_one_is_refused(assigns):
    def change(m):
        script(f"def forward(x):\n global calls\n {assigns}\n return model.conv(x)\nmodel.forward = forward", model=m)

    with pytest.raises(UsageError, match=r"function 'forward', which the model keeps, .* assigns the global 'calls'"):
        working_copy(made(change))


def test_a_function_that_assigns_globals_and_uses_the_model_otherwise_is_no_matter():
    scope = script("""
def make(m):
    def count(x):
        global calls
        calls += 1
        return m.conv(x)
    return count
def forward(x):
    return model.count(x) * calls
calls = 0
""")

    def change(m):
        scope["model"], m.count, m.forward = m, scope["make"](m), scope["forward"]

    model = made(change)
    clone = working_copy(model).root
    assert torch.equal(clone(X), clone.conv(X))
    assert torch.equal(clone(X), clone.conv(X) * 2)
    assert scope["calls"] == 2


def reset_by_variable(m):
    mean = m.bn.running_mean
    m.reset = lambda: mean.zero_()


def reset_by_global(m):
    m.reset = script("def reset(): mean.zero_()", mean=m.bn.running_mean)["reset"]


@pytest.mark.parametrize(
    ("change", "held"),
    [
        (reset_by_variable, lambda reset: content(reset, "mean")),
        (reset_by_global, lambda reset: reset.__globals__["mean"]),
    ],
)
def test_a_run_reaches_private_buffers_by_variables_and_globals_too(change, held):
    for mode in ("inference", "training"):
        model = made(change)
        before = model.bn.running_mean.clone()
        result = working_copy(model, mode)
        clone = result.root
        with private_buffers(clone, result.variables) as written:
            clone.reset()
            assert not clone.bn.running_mean.any()
            assert torch.equal(model.bn.running_mean, before)
        assert written == {(id(clone.bn), "running_mean")}
        assert held(clone.reset) is clone.bn.running_mean


def test_a_compiled_result_runs_its_own_modules_by_globals():
    class Outer(Pair):
        def forward(self, x):
            return self.run(x + 1) if x.sum() > -1e9 else x

    scope = script("def run(x): return sum(model.bn(model.conv(each)) for each in [x, helper(x)]) * scale", scale=2.0)

    torch.manual_seed(0)
    model = enliven(Outer()).eval()
    scope |= {"model": model, "helper": lambda x: x * scope["scale"]}
    model.run = scope["run"]
    fast = optimize(model, ["torch-compile:backend=eager"])
    with torch.no_grad():
        fast.conv.weight = nn.Parameter(fast.conv.weight * 2)
        for scale in (2.0, 3.0):
            scope["scale"] = scale
            x = X + 1
            wanted = sum(fast.bn(fast.conv(each)) for each in (x, x * scale)) * scale
            torch.testing.assert_close(fast(X), wanted)


# --- branches that no run took ------------------------------------------------------------------------------------------


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


def _reads_by_another(m):
    def total():
        return m.conv.weight.sum()

    m.act.forward = lambda x: x + total() if x.max() > 1000 else x


def _reads_in_a_hook(m):
    m.act.register_forward_hook(lambda module, args, y: y + m.conv.weight.sum() if y.max() > 1000 else y)


def _reads_by_a_partial(m):
    m.act.total = functools.partial(lambda conv: conv.weight.sum(), m.conv)
    m.act.forward = lambda x: x + m.act.total() if x.max() > 1000 else x


def _reads_by_globals(m):
    source = """
def total(conv):
    return conv.weight.sum()
model.act.forward = lambda x: x + total(model.conv) if x.max() > 1000 else x
"""
    script(source, model=m)


READERS = [_reads_around, _reads_by_another, _reads_in_a_hook, _reads_by_a_partial, _reads_by_globals]


@pytest.mark.parametrize("change", READERS)
@pytest.mark.parametrize("verified", [False, True])
def test_a_weight_that_a_kept_function_may_read_is_left_alone(change, verified):
    model = enliven(Branch(change)).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(X,) if verified else None)
    assert fast.report.passes[0].status == "unchanged"
    assert torch.allclose(fast(X, 1e5), model(X, 1e5))
    other = optimize(
        enliven(Branch(lambda m: None)).eval(), ["fold-conv-bn"], example_inputs=(X,) if verified else None
    )
    assert other.report.passes[0].status == "applied"


@pytest.mark.parametrize("verified", [False, True])
def test_a_forward_that_counts_in_a_variable_around_it_goes_on_counting(verified):
    def change(m):
        calls = 0

        def forward(x):
            nonlocal calls
            calls += 1
            return m.bn(m.conv(x))

        m.forward, m.calls = forward, lambda: calls

    fast = optimize(made(change), ["fold-conv-bn"], example_inputs=(X,) if verified else None)
    before = fast.calls()
    fast(X)
    assert fast.calls() == before + 1
