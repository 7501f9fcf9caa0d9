import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from passes.graph.forwards import intercepted_calls

X = torch.ones(2, 4)


def recording(seen):
    def around(module, call, args, kwargs):
        seen.append(module)
        return call(*args, **kwargs)

    return around


def test_other_modules_and_threads_through():
    model, other, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4), []

    with intercepted_calls(model, recording(seen)):
        other(X)
        thread = threading.Thread(target=model, args=(X,))
        thread.start()
        thread.join()
        assert seen == []
        model(X)
    model(X)
    assert seen == [model, *model]


def test_the_call_may_be_changed_and_hooks_run_around_it():
    model, hooked = nn.Linear(4, 4), []
    model.register_forward_hook(lambda module, args, output: hooked.append(args))
    with intercepted_calls(model, lambda module, call, args, kwargs: call(args[0] * 2, **kwargs) + 1):
        got = model(X)
    assert torch.equal(got, model(X * 2) + 1)
    assert torch.equal(hooked[0][0], X)


def test_a_module_that_is_replaced_keeps_its_identity_to_itself():
    """Otherwise a new module at the same address could be mistaken for it."""
    model = nn.Sequential(nn.Linear(4, 4))
    replaced = weakref.ref(model[0])
    with intercepted_calls(model, lambda module, call, args, kwargs: call(*args, **kwargs)):
        model[0] = nn.Identity()
        gc.collect()
        assert replaced() is not None


def test_what_is_compiled_is_seen_to_be_called():
    inner = nn.Linear(4, 4)
    model, seen = nn.Sequential(torch.compile(inner, backend="eager")), []
    compiled = vars(model[0])["forward"]

    with intercepted_calls(model, recording(seen)):
        got = model(X)
    assert torch.equal(got, inner(X))
    assert seen == [model, model[0], inner]
    assert vars(model[0])["forward"] is compiled


def test_an_error_leaves_nothing_behind():
    compiled = torch.compile(nn.ReLU(), backend="eager")
    forward = vars(compiled)["forward"]
    with pytest.raises(ZeroDivisionError), intercepted_calls(compiled, lambda *args: 1 / 0):
        raise ZeroDivisionError
    assert vars(compiled)["forward"] is forward


def test_modules_that_are_left_out_run_as_before():
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), []

    with intercepted_calls(model, recording(seen), leave={id(model), id(model[0])}):
        assert "forward" not in vars(model[0])
        model(X)
    assert seen == [model[1]]
