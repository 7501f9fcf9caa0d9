import copy
import gc
import inspect
import linecache
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from passes.errors import UnseenCall
from passes.graph.capture import capture
from passes.graph.forward import GraphForward
from passes.graph.structure import CallStructure, Unstructured, signature_of

X = torch.linspace(-1, 1, 24).reshape(2, 3, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, *rest, scale=1.0, mask=None, **more):
        y = F.gelu(self.linear(x)) * scale + torch.arange(x.shape[-1])
        y = F.layer_norm(y, (4,)).transpose(1, 2).softmax(-1).contiguous(memory_format=torch.contiguous_format)
        y = F.scaled_dot_product_attention(y, y, y) - F.avg_pool1d(y, 1) + torch.einsum("abc->abc", y)
        for other in rest:
            y = y + other.sum()
        if mask is not None:
            y = y.masked_fill(mask.transpose(1, 2), 0)
        return {"y": y, "rest": [F.relu(item) for item in more.values()], "none": None, "same": y}


def installed(*args, **kwargs) -> Net:
    module = Net().eval()
    structure = CallStructure.of_call(signature_of(module), args, kwargs)
    module.__dict__["forward"] = capture(module, {id(module): structure}).graphs[id(module)].forward()
    return module


def flat(outputs):
    return [outputs["y"], *outputs["rest"]]


CALLS = [((X,), {}), ((X, X), {"scale": 2.0}), ((X,), {"mask": X > 0, "extra": X})]


@pytest.mark.parametrize(("args", "kwargs"), CALLS)
def test_it_answers_as_the_forward(args, kwargs):
    module = installed(*args, **kwargs)
    got, wanted = module(*args, **kwargs), Net.forward(module, *args, **kwargs)
    assert got.keys() == wanted.keys()
    assert got["none"] is None
    for a, b in zip(flat(got), flat(wanted), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("args", "kwargs"), [((X,), {"scale": 2.0}), ((X, X), {}), ((X, 1), {}), ((), {"x": [X]}), ((X,), {"more": X})]
)
def test_other_calls_raise(args, kwargs):
    with pytest.raises(UnseenCall, match=r"Net at the root is called .* example inputs"):
        installed(X)(*args, **kwargs)


class Special(torch.Tensor):
    pass


def test_a_tensor_of_another_class_raises_and_those_of_torch_do_not():
    module = installed(X)
    with pytest.raises(UnseenCall, match=r"Net at the root is called with a Special where .* for a tensor"):
        module(X.as_subclass(Special))
    wanted = module(X)["y"]
    assert torch.equal(module(nn.Parameter(X))["y"], wanted)
    assert torch.equal(torch.func.vmap(lambda x: module(x)["y"])(X[None])[0], wanted)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert module(mode.from_tensor(X))["y"].shape == wanted.shape
    with pytest.raises(Unstructured, match="a Special may answer otherwise"):
        installed(X.as_subclass(Special))


def test_wrong_calls_raise_as_python_does():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        installed(X)()


def test_the_other_mode_raises():
    module = installed(X)
    module.__dict__["training"] = True
    with pytest.raises(UnseenCall, match=r"rewritten for inference.*\.eval\(\)"):
        module(X)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles(protocol):
    module = installed(X, scale=3.0)
    again = pickle.loads(pickle.dumps(module, protocol))
    assert torch.equal(again(X, scale=3.0)["y"], module(X, scale=3.0)["y"])
    assert isinstance(again.forward, GraphForward)
    assert again.forward.owner is again
    with pytest.raises(UnseenCall):
        again(X)


def test_copies_belong_to_the_copy():
    module = installed(X)
    twin = copy.deepcopy(module)
    assert twin.forward.owner is twin
    nn.init.zeros_(twin.linear.weight)
    assert not torch.equal(twin(X)["y"], module(X)["y"])


def test_the_signature_is_that_of_the_forward():
    assert str(inspect.signature(installed(X).forward)) == "(x, *rest, scale=1.0, mask=None, **more)"


def test_the_source_lives_as_long_as_the_function():
    # torch keeps something of the first trace of a process; equal graphs of others share a function.
    installed(X)
    module = installed(X, X, X, scale=7.0)
    module.forward.prepare()
    name = module.forward._functions[False].__code__.co_filename
    assert "def forward(self, x" in "".join(linecache.getlines(name))
    del module
    gc.collect()
    assert name not in linecache.cache
