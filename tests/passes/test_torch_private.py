"""The private names of torch that passes use exist, and do what the passes need."""

import weakref

import pytest
import torch
from torch import nn

from passes.torch_capture import (
    MOST_CAPTURES,
    SizeConditions,
    captured_call,
    dim_of,
    is_held,
    mark_open,
    shape_environment,
)
from passes.torch_private import beneath_transforms, forget_sources, is_watched, settings_of_now


def _call(module, args, kwargs):
    return module._call_impl(*args, **kwargs)


def captured(module):
    seen = []

    def capture(graph, inputs, around):
        seen.append((graph, inputs, around))
        return graph.forward

    return captured_call(_call_of_its_own(), capture), seen


def _call_of_its_own():
    import types

    return types.FunctionType(_call.__code__.replace(), globals())


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = 2.0

    def forward(self, x):
        return self.linear(x) * self.scale


def test_calls_of_many_kinds_are_right_and_silent(caplog):
    model = Scaled()
    call, seen = captured(model)
    for model.scale in map(float, range(2 * MOST_CAPTURES)):
        assert torch.equal(call.run(model, (torch.ones(2, 3),), {}), model(torch.ones(2, 3)))
    assert len(seen) == MOST_CAPTURES
    assert not [record for record in caplog.records if record.levelname not in ("DEBUG", "INFO")]


def test_what_the_front_end_raises_on_runs_eagerly(monkeypatch):
    model = Scaled()
    call, _ = captured(model)
    monkeypatch.setattr(
        call._front_end, "_torchdynamo_orig_backend", lambda *args: (_ for _ in ()).throw(ValueError("no"))
    )
    assert torch.equal(call.run(model, (torch.ones(2, 3),), {}), model(torch.ones(2, 3)))
    assert str(call.error) == "no"


def test_what_looks_at_operations_is_seen():
    seen = []

    class Looking(nn.Module):
        def forward(self, x):
            seen.append(is_watched())
            return x + 1

    model, x = Looking(), torch.randn(2)
    model(x)
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.trace"):
        torch.jit.trace(model, (x,), check_trace=False)
    torch.vmap(model)(x[None])
    with torch.device("cpu"):
        model(x)
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        model(x)
    with torch.autograd.forward_ad.dual_level():
        model(x)
    assert seen == [False, True, True, True, True, True]


class BySizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x, y):
        z = x * self.weight if x.size(0) < 9 else x
        return z.view(x.size(0), 3).sum() + y


def _of_list(module, inputs):
    return module.forward(*inputs)


def test_a_whole_graph_says_what_it_takes_and_what_it_assumes_of_open_sizes():
    seen = {}

    def capture(graph, inputs, around):
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        seen["dims"] = [dim_of(node) for node in placeholders]
        seen["held"] = [is_held(node) for node in placeholders]
        seen["environment"] = shape_environment()
        return graph.forward

    inputs = [torch.ones(4, 3), torch.ones(4)]
    mark_open(inputs[0], 0)
    captured_call(_of_list, capture, whole=True).run(BySizes(), inputs)
    # The second input is as long as the first, but only dim 0 of the first is open.
    assert sorted(dim for dim in seen["dims"] if dim is not None) == [("inputs", 0, 0)]
    assert sum(seen["held"]) == 1
    conditions = SizeConditions(seen["environment"])
    assert conditions.are_of_dims
    assert [conditions.hold(lambda dim, size=size: size) for size in (1, 2, 8, 9)] == [False, True, True, False]


def test_no_weak_reference_to_a_tensor_is_left_after_its_sources_are_forgotten():
    model, weights = nn.Linear(2, 2), []

    def capture(graph, inputs, around):
        weights.extend(node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder"))
        return graph.forward

    captured_call(_call_of_its_own(), capture).run(model, (torch.ones(3, 2),), {})
    assert weakref.getweakrefs(model.weight)
    forget_sources(weights)
    assert not weakref.getweakrefs(model.weight)


def test_only_captures_of_others_time_their_guards(monkeypatch):
    from torch._dynamo import guards

    timed = []

    def latency(*given):
        timed.append(given)
        return 1.0

    monkeypatch.setattr(guards, "profile_guard_manager", latency)
    model, x = Scaled(), torch.ones(2, 3)
    captured(model)[0].run(model, (x,), {})
    assert not timed
    torch.compile(model, backend="eager")(x)
    assert timed


def test_what_vmap_wraps_has_the_memory_beneath():
    x, found = torch.ones(2, 3), []
    torch.vmap(torch.vmap(lambda y: found.append(y) or y * 2))(x)
    assert beneath_transforms(found[0]).untyped_storage().data_ptr() == x.data_ptr()
    assert beneath_transforms(x) is x


SETTINGS = {
    "gradients": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_compared_with_those_of_now(name):
    with torch.no_grad():
        settings = settings_of_now()
        assert settings.check()
        with SETTINGS[name]():
            assert not settings.check()
        assert settings.check()
        torch.set_default_dtype(torch.float64)
        try:
            assert not settings.check()
        finally:
            torch.set_default_dtype(torch.float32)
