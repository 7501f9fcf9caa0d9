"""What a node computes, however it is spelled; and what only looks like it."""

from typing import Any

import folding_models as models
import pytest
import torch
import torch.nn.functional as F
from folding_models import CONVOLUTIONS, Pair, image, norm_behind
from pass_contract import captured
from torch import Tensor, nn

from passes.graph.hooks import has_hooks
from passes.graph.match import (
    TensorRef,
    activation_at,
    batch_norm_at,
    conv_bn_chains,
    convolution_at,
    is_parametrized,
    is_stock,
    modules_between,
    uses_values,
)


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolution_modules(kind: str) -> None:
    make, shape = CONVOLUTIONS[kind]
    conv = make()
    program, _ = captured(nn.Sequential(conv, norm_behind(conv, shape)).eval())
    ((found, norm),) = conv_bn_chains(program)
    assert found.module is program.root[0]
    assert (found.transposed, found.groups) == ("transposed" in kind, getattr(conv, "groups", 1))
    assert found.dims == (0 if kind == "linear" else len(shape) - 2)
    assert found.weight.value is program.root[0].weight
    assert norm.module is program.root[1]
    assert not norm.uses_batch_statistics
    assert modules_between(program, found, norm) == []


class Calls(nn.Module):
    """One function call on parameters of its own."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(torch.ones(2, 2, 3))
        self.bias = nn.Parameter(torch.ones(2))
        self.register_buffer("stat", torch.ones(2))

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


def place_of(call: Any) -> tuple[Any, Any]:
    program, _ = captured(Calls(call).eval())
    nodes = [node for node in program.nodes() if node.op in ("call_function", "call_method")]
    return program, nodes[-1]


CONV_CALLS = {
    "positional": lambda m, x: F.conv1d(x, m.weight, m.bias, 1, 0, 1, 1),
    "keywords": lambda m, x: F.conv1d(weight=m.weight, input=x, bias=m.bias),
    "torch": lambda m, x: torch.conv1d(x, m.weight, bias=m.bias),
    "transposed": lambda m, x: F.conv_transpose1d(x, m.weight, m.bias),
    "linear": lambda m, x: F.linear(x, m.weight, m.bias),
}
NO_CONV_CALLS = {
    "weight is computed": lambda m, x: F.conv1d(x, m.weight * 2, m.bias),
    "bias is computed": lambda m, x: F.conv1d(x, m.weight, m.bias * 2),
    "weight comes in": lambda m, x: F.conv1d(m.weight, x),
    "no convolution": lambda m, x: F.avg_pool1d(x, 2),
    "groups come in": lambda m, x: F.conv1d(x, m.weight, m.bias, 1, 0, 1, x.shape[1]),
    "weight is the input": lambda m, x: F.linear(x, x),
}


@pytest.mark.parametrize("name", CONV_CALLS)
def test_convolution_calls(name: str) -> None:
    program, node = place_of(CONV_CALLS[name])
    found = convolution_at(program, node)
    assert found is not None
    assert found.module is None
    assert found.input.op == "placeholder"
    assert (found.weight, found.bias) == (TensorRef(program.root, "weight"), TensorRef(program.root, "bias"))
    assert found.transposed == (name == "transposed")
    assert found.dims == (0 if name == "linear" else 1)


@pytest.mark.parametrize("name", NO_CONV_CALLS)
def test_what_is_no_convolution_call(name: str) -> None:
    program, node = place_of(NO_CONV_CALLS[name])
    assert convolution_at(program, node) is None


def test_batch_norm_calls() -> None:
    program, node = place_of(lambda m, x: F.batch_norm(x, m.stat, m.stat, bias=m.bias, eps=0.5))
    found = batch_norm_at(program, node)
    assert found is not None
    assert (found.weight, found.bias, found.eps) == (None, TensorRef(program.root, "bias"), 0.5)
    assert not found.uses_batch_statistics
    program, node = place_of(lambda m, x: torch.batch_norm(x, m.bias, None, m.stat, m.stat, True, 0.1, 1e-5, False))
    found = batch_norm_at(program, node)
    assert found is not None
    assert found.weight == TensorRef(program.root, "bias")
    assert found.uses_batch_statistics
    assert found.updates_statistics
    for call in (
        lambda m, x: F.batch_norm(x, m.stat * 2, m.stat),
        lambda m, x: F.layer_norm(x, (2,), m.bias, m.bias),
        lambda m, x: F.batch_norm(m.weight, m.stat, m.stat).sum() + x,
        lambda m, x: F.batch_norm(x, m.stat, m.stat, eps=1 / x.shape[0]),
        lambda m, x: F.batch_norm(x, m.stat, m.stat, training=x.shape[0] > 1),
        lambda m, x: F.batch_norm(x, m.stat, m.stat, weight=x),
    ):
        program, node = place_of(call)
        assert batch_norm_at(program, node) is None


@pytest.mark.parametrize("input", [None, 1.0, (), "x"])
def test_a_call_on_no_value_of_the_graph_is_no_layer(input: Any) -> None:
    for call, at in ((CONV_CALLS["positional"], convolution_at), (_on_statistics, batch_norm_at)):
        program, node = place_of(call)
        assert at(program, node) is not None
        node.update_arg(0, input)
        assert at(program, node) is None


def _on_statistics(module: nn.Module, x: Tensor) -> Tensor:
    return F.batch_norm(x, module.stat, module.stat)


def test_a_weight_that_is_no_tensor_is_none() -> None:
    program, node = place_of(CONV_CALLS["positional"])
    node.args[1].target = "training"
    assert convolution_at(program, node) is None


@pytest.mark.parametrize(
    ("bias", "is_convolution"),
    [("gone", True), ("gone forever", False), ("shadowed", False), ("bias", True), (0.5, False), ("none", False)],
)
def test_a_bias_that_is_no_tensor_any_more_is_none(bias: Any, is_convolution: bool) -> None:
    """What is trained without a bias is read by a graph that still names it."""
    program, node = place_of(CONV_CALLS["positional"])
    program.root.register_parameter("gone", None)
    program.root.register_parameter("shadowed", None)
    program.root.__dict__["shadowed"] = 0.5
    program.root.none = None
    if isinstance(bias, str):
        node.args[2].target = bias
    else:
        node.update_arg(2, bias)
    found = convolution_at(program, node)
    assert (found is not None) == is_convolution
    assert found is None or found.bias == TensorRef(program.root, bias)


def test_a_bias_that_a_method_computes_is_none_of_the_parameters() -> None:
    program, node = place_of(lambda m, x: F.conv1d(x, m.weight, m.bias.abs()))
    program.root.register_parameter("abs", None)
    assert convolution_at(program, node) is None


USES: dict[str, tuple[Any, bool]] = {
    "shape": (lambda m, x: x.shape, False),
    "values by an attribute": (lambda m, x: x.data, True),
    "kind by a method": (lambda m, x: x.is_floating_point(), False),
    "values by a method": (lambda m, x: x.exp(), True),
    "function": (lambda m, x: torch.exp(x), True),
    "shaped as it": (lambda m, x: m.weight.view_as(x), False),
    "shaped as it, by name": (lambda m, x: m.weight.view_as(other=x), True),
    "shaped as another": (lambda m, x: x.view_as(m.weight), True),
    "shaped as itself": (lambda m, x: x.view_as(x), True),
}


@pytest.mark.parametrize("kind", USES)
def test_what_uses_the_values_of_a_tensor(kind: str) -> None:
    call, uses = USES[kind]
    program, _ = captured(Calls(call).eval())
    (value,) = (node for node in program.nodes() if node.op == "placeholder")
    (user,) = value.users
    assert uses_values(program, user, value) is uses


@pytest.mark.parametrize("layer", [nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)])
def test_a_module_that_is_given_more_than_one_tensor_is_no_layer(layer: nn.Module) -> None:
    program, _ = captured(nn.Sequential(layer).eval())
    (node,) = program.calls_of(program.root[0])
    at = convolution_at if isinstance(layer, nn.Conv2d) else batch_norm_at
    assert at(program, node) is not None
    value = node.args[0]
    for args in ((value, value), (value, [4, 4]), (), (1.0,)):
        node.args = args
        assert at(program, node) is None


def test_a_transposed_convolution_is_given_a_size_too_and_nothing_else() -> None:
    program, _ = captured(nn.Sequential(nn.ConvTranspose2d(3, 4, 3)).eval())
    (node,) = program.calls_of(program.root[0])
    value = node.args[0]
    for args, kwargs, is_one in (
        ((value,), {}, True),
        ((value, [4, 4]), {}, True),
        ((), {"output_size": [4, 4], "input": value}, True),
        ((value,), {"other": 1}, False),
        ((1.0,), {}, False),
        ((), {}, False),
    ):
        node.args, node.kwargs = args, kwargs
        assert (convolution_at(program, node) is not None) == is_one


def test_batch_norm_modules() -> None:
    norm = nn.BatchNorm2d(3)
    program, _ = captured(nn.Sequential(norm, nn.BatchNorm2d(3, track_running_stats=False)), keep_flags=True)
    first, second = (batch_norm_at(program, program.calls_of(module)[0]) for module in program.root)
    assert first is not None
    assert second is not None
    assert (first.uses_batch_statistics, first.updates_statistics) == (True, True)
    assert (second.uses_batch_statistics, second.updates_statistics) == (True, False)
    assert len(second.tensors) == 2


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda m, x: F.relu(x), "relu"),
        (lambda m, x: x.relu_(), "relu"),
        (lambda m, x: torch.sigmoid(x), "sigmoid"),
        (lambda m, x: F.silu(x), "silu"),
        (lambda m, x: x.exp(), None),
    ],
)
def test_activations(call: Any, name: str | None) -> None:
    assert activation_at(*place_of(call)) == name


def test_what_keeps_the_forward() -> None:
    class Kept(nn.Conv2d):
        pass

    class OwnForward(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return x

    class OwnCall(nn.Conv2d):
        def __call__(self, x: Tensor) -> Tensor:
            return x

    class OwnPart(nn.Conv2d):
        def _conv_forward(self, *args: Any) -> Any:
            return args

    class OwnCheck(nn.BatchNorm2d):
        def _check_input_dim(self, input: Tensor) -> None:
            input.clamp_(min=0)

    assert is_stock(nn.BatchNorm2d(1), (nn.BatchNorm2d,))
    assert not is_stock(OwnCheck(1), (nn.BatchNorm2d,))
    kinds = (nn.Conv2d,)
    assert is_stock(nn.Conv2d(1, 1, 1), kinds)
    assert is_stock(Kept(1, 1, 1), kinds)
    for cls in (OwnForward, OwnCall, OwnPart, nn.Conv1d):
        assert not is_stock(cls(1, 1, 1), kinds)
    patched = nn.Conv2d(1, 1, 1)
    patched.forward = lambda x: x
    assert not is_stock(patched, kinds)


def test_hooks_and_parametrizations() -> None:
    for register in (
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ):
        module = nn.Conv2d(1, 1, 1)
        assert not has_hooks(module)
        handle = getattr(module, register)(lambda *args: None)
        assert has_hooks(module)
        handle.remove()
        assert not has_hooks(module)
    assert not is_parametrized(nn.Conv2d(1, 1, 1))
    assert is_parametrized(nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 1, 1)))


@pytest.mark.parametrize(
    ("cls", "paths"),
    [
        (Pair, []),
        (models.ThroughIdentity, ["between"]),
        (models.AcrossModules, ["head", "stem"]),
        (models.Nested, ["1", "0", "0.0.1", "0.0"]),
    ],
)
def test_modules_on_the_way(cls: type[nn.Module], paths: list[str]) -> None:
    program, _ = captured(cls().eval(), image())
    ((conv, norm),) = conv_bn_chains(program)
    found = [program.paths[id(module)][0] for module in modules_between(program, conv, norm)]
    assert sorted(found) == sorted(paths)


def test_a_guarded_pair_is_a_pair_until_it_is_folded() -> None:
    from passes import FoldConvBias, FoldConvBn

    program, context = captured(models.Island().eval(), image())
    FoldConvBias().run(program, context)
    assert len(list(conv_bn_chains(program))) == 1
    FoldConvBn().run(program, context)
    assert list(conv_bn_chains(program)) == []
