"""Sealed outputs and folded weights: permitted uses, and refused ones."""

import copy
import io
import itertools
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optimizer import optimize, report_of
from passes.errors import UnseenCall
from passes.program.folded import FoldedConvForward, FoldedNormForward, NoSealsLeave
from passes.program.folded_checkpoint import admit_checkpoint, save_plain
from passes.program.pairs import FoldedPair
from passes.program.seals import SealedOutput, SealedTensor, opened_from, sealed
from passes.program.tensors import TensorRef
from passes.program.weights import (
    FORWARDS,
    ComparedExports,
    FoldedLayer,
    FoldedParameter,
    FoldedTensor,
    bare,
    folded_parameter,
    folded_tensor,
)

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A convolution and a BatchNorm, called as modules or as functions; `way` selects a branch."""

    def __init__(self, functional=False):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.functional = functional
        self.way = "seen"

    def forward(self, x):
        if self.way == "weight":
            return F.conv2d(x, self.conv.weight) if not self.functional else x.mean() * self.conv.weight
        if self.way == "view":
            return x.flatten(1)[:, :27] @ self.conv.weight.view(4, -1).t()
        if self.way == "bias":
            return x.mean() + self.conv.bias
        if self.way == "detached":
            return x.mean() + self.conv.weight.detach().sum()
        if self.way == "number":
            return x * self.conv.bias[0].item()
        bn = self.bn
        if self.functional:
            y = F.conv2d(x, self.conv.weight, self.conv.bias)
            if self.way == "raw":
                return y.relu()
            return F.batch_norm(y, bn.running_mean, bn.running_var, bn.weight, bn.bias, False, 0.1, bn.eps)
        y = self.conv(x)
        return y.relu() if self.way == "raw" else bn(y)


class Telling(nn.Module):
    """Adds the sum of the tensor called `name` to the output, if a name is set."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.name = ""

    def forward(self, x):
        if not self.name:
            return self.net(x)
        owner, _, name = self.name.rpartition(".")
        return self.net(x) + getattr(self.get_submodule(owner), name).sum()


def folded(functional):
    """The model, and a folded and sealed copy of it."""
    torch.manual_seed(0)
    model = Net(functional).eval()
    with torch.no_grad():
        for tensor in (model.bn.running_mean, model.bn.bias):
            tensor.uniform_(-1, 1)
        for tensor in (model.bn.running_var, model.bn.weight):
            tensor.uniform_(0.5, 2)
    result = copy.deepcopy(model)
    conv, bn = result.conv, result.bn
    scale = bn.weight.detach() / (bn.running_var + bn.eps).sqrt()
    weight = conv.weight.detach() * scale.reshape(-1, 1, 1, 1)
    bias = (conv.bias.detach() - bn.running_mean) * scale + bn.bias.detach()
    function = TensorRef(bn, "running_mean") if functional else None
    pair = FoldedPair("conv", "bn", 4, 2, function=function, eps=bn.eps)
    layer = FoldedLayer(TensorRef(conv, "weight"), TensorRef(conv, "bias"), 2, module=not functional)
    layer.pair = pair
    names = ("weight", "bias", "running_mean", "running_var") if functional else ()
    pair.taken = tuple(TensorRef(bn, name) for name in names)
    conv._parameters["weight"] = folded_parameter(weight, layer, requires_grad=True)
    conv._parameters["bias"] = folded_parameter(bias, layer, requires_grad=True)
    conv.register_state_dict_post_hook(save_plain)
    conv.register_load_state_dict_pre_hook(admit_checkpoint)
    if not functional:
        conv.__dict__["forward"] = FoldedConvForward(conv, pair)
        bn.__dict__["forward"] = FoldedNormForward(bn, pair, carried=True)
    for name in ("weight", "bias", "running_mean", "running_var"):
        home = bn._parameters if name in bn._parameters else bn._buffers
        if functional:
            value = {"running_var": 1 - bn.eps, "weight": 1.0}.get(name, 0.0)
            bn.__dict__[name] = folded_tensor(torch.full((4,), value), pair=pair)
        home[name] = None
    return model, result


def exported(result, **options):
    """Export the module as the root of an optimized model."""
    result.__dict__["forward"] = NoSealsLeave(result, None)
    return torch.export.export(result, (X,), **options)


WAYS = {
    "eager": lambda module: module(X),
    "compiled": lambda module: torch.compile(module, backend="eager")(X),
    "exported": exported,
    "traced": lambda module: torch.jit.trace(module, (X,), check_trace=False),
}

BOTH = pytest.mark.parametrize("functional", [False, True])


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def same(mine, theirs, tolerance=1e-5):
    return torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance)


@BOTH
@pytest.mark.parametrize("again", [lambda m: m, copy.deepcopy, pickled, saved, copy.copy])
def test_the_way_that_was_seen_is_right_and_others_raise(functional, again):
    model, result = folded(functional)
    result = again(result)
    assert same(result(X), model(X))
    for way in ("raw", "weight", "view", "bias"):
        result.way = way
        with pytest.raises(UnseenCall, match=r"conv was .*folded together with bn"):
            result(X)
    result.way = "seen"
    assert same(result(X), model(X))


@BOTH
def test_copies_stand_by_themselves(functional):
    _, result = folded(functional)
    for again in (copy.deepcopy, pickled, saved):
        twin = again(result)
        assert type(twin.conv.weight) is FoldedParameter
        assert twin.conv.weight.sealed_layer.weight.owner is twin.conv
        twin.load_state_dict({name: torch.zeros_like(value) for name, value in twin.state_dict().items()})
        assert not twin(X).any()
        assert result(X).any()


@BOTH
def test_dtypes_modes_and_gradients(functional):
    model, result = folded(functional)
    for change in (lambda m: m.double(), lambda m: m.bfloat16(), lambda m: m.float(), lambda m: m.to("cpu")):
        change(model), change(result)
        x = X.to(model.conv.weight.dtype)
        assert type(result.conv.weight) is FoldedParameter
        assert same(result(x), model(x), 0.1)
    x, other = (X.clone().requires_grad_() for _ in range(2))
    result.float(), model.float()
    (model(x).sin().sum()).backward()
    (result(other).sin().sum()).backward()
    assert same(x.grad, other.grad, 1e-2)
    with torch.inference_mode():
        assert same(result(X), model(X), 1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert same(result(X).float(), model(X).float(), 0.1)
    batched = torch.func.vmap(lambda rows: result(rows[None])[0])(X)
    assert same(batched, model(X), 1e-2)


# torch 2.11 can't raise our error in compiled code: it raises another, which shows the line.
RAISED = r"(is|was) used without|raise (seal\.sealed_by\.went_astray|_read_elsewhere)\("


@BOTH
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_result_is_the_plain_computation(functional, backend):
    model, result = folded(functional)
    torch._dynamo.reset()
    compiled = torch.compile(result, backend=backend, fullgraph=not functional)
    with torch.no_grad():
        assert same(compiled(X), model(X))
    result.way = "raw"
    with pytest.raises((UnseenCall, AssertionError), match=RAISED), torch.no_grad():
        torch.compile(result, backend=backend)(X)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@BOTH
@pytest.mark.parametrize("way", ["raw", "weight", "view", "bias", "detached", "number"])
def test_a_way_that_was_not_seen_is_neither_exported_nor_compiled(functional, way):
    _, result = folded(functional)
    result.way = way
    with pytest.raises(UnseenCall):
        exported(result)
    # Where torch runs an operation on fake tensors, it wraps the error.
    with pytest.raises(Exception, match=RAISED):
        torch.compile(result, backend="eager")(X)
    assert FORWARDS.running == 0
    result.way = "seen"
    exported(result)
    torch.compile(result, backend="eager", fullgraph=True)(X)


class Around(nn.Module):
    """A model around an inner one, which may be optimized separately."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.conv, self.bn = inner, nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5)

    def forward(self, x):
        return self.bn(self.conv(self.inner(x)))


@BOTH
@pytest.mark.parametrize("passes", [["fold-conv-bn"], ["fold-conv-bias"]])
def test_a_result_within_a_result_is_exported(functional, passes):
    model, _ = folded(functional)
    whole = Around(model).eval()
    twice = copy.deepcopy(whole)
    twice.inner = optimize(model, passes, example_inputs=(X,))
    twice = optimize(twice, passes, example_inputs=(X,))
    assert [len(record.changes) for record in report_of(twice).passes] == [1]
    assert same(torch.export.export(twice, (X,)).module()(X), whole(X))


@BOTH
def test_a_strict_export_is_refused_where_it_isnt_compared(functional):
    _, result = folded(functional)
    with pytest.raises(Exception, match="strict=True can't trace how folded tensors are used: leave out strict"):
        exported(result, strict=True)
    with ComparedExports():
        exported(result, strict=True)
    assert not FORWARDS.compared


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.parametrize("value", ["buffer", None])
@pytest.mark.parametrize("way", WAYS)
def test_a_running_mean_in_the_place_of_a_moved_one_is_refused(way, value):
    model, _ = folded(False)
    result = optimize(model, ["fold-conv-bias"], example_inputs=(X,))
    run = WAYS[way] if way != "exported" else lambda module: torch.export.export(module, (X,))
    run(result)
    result.bn.running_mean = None if value is None else torch.zeros(4)
    with pytest.raises(UnseenCall, match="a different running mean than the one that the bias of conv was moved into"):
        run(result)


def test_where_a_bias_was_moved_the_dtype_may_change_before_an_export():
    model, _ = folded(False)
    result = optimize(model, ["fold-conv-bias"], example_inputs=(X,)).double()
    program = torch.export.export(result, (X.double(),))
    assert same(program.module()(X.double()), model.double()(X.double()))


def test_a_class_of_parameters_is_no_folded_one():
    class Own(nn.Parameter):
        pass

    model, result = folded(False)
    result.conv.weight = Own(model.conv.weight.detach().clone())
    with pytest.raises(UnseenCall, match="a different weight or bias"):
        result(X)


@BOTH
@pytest.mark.parametrize("name", ["conv.weight", "bn.running_mean"])
def test_where_a_bias_was_moved_what_changed_is_not_exported_by_another_way(functional, name):
    """The new branch of the forward reads a changed tensor directly."""
    net, _ = folded(functional)
    model = Telling(net)
    result = optimize(model, ["fold-conv-bias"], example_inputs=(X,))
    assert report_of(result).passes[0].status == "applied"
    program = torch.export.export(result, (X,))
    assert same(program.module()(X), model(X))
    result.name = f"net.{name}"
    for run in (lambda: result(X), lambda: torch.export.export(result, (X,))):
        with pytest.raises(UnseenCall):
            run()


@BOTH
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_result_is_the_plain_computation(functional, strict):
    model, result = folded(functional)
    with ComparedExports():
        program = exported(result, strict=strict)
    assert same(program.module()(X), model(X))
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    # Strict mode bypasses `__torch_function__`, so a functional BatchNorm stays in the graph, and returns its input.
    rest = ["aten.batch_norm.default"] if strict and functional else []
    assert names == ["aten.conv2d.default", *rest]


@BOTH
@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_a_traced_result_is_the_plain_computation(functional):
    model, result = folded(functional)
    traced = torch.jit.trace(result, (X,))
    assert same(traced(X), model(X))
    assert "batch_norm" not in str(traced.inlined_graph)


def test_a_sealed_value_answers_for_its_shape_and_moves():
    _, result = folded(False)
    y = result.conv(X)
    assert isinstance(y, torch.Tensor)
    assert (y.shape, y.ndim, y.size(1), y.dtype, len(y)) == ((2, 4, 6, 6), 4, 4, torch.float32, 2)
    assert (y.device, y.is_cuda, y.numel(), y.is_floating_point()) == (X.device, False, 288, True)
    torch._assert(y.dim() == 4, f"4D expected ({y.ndim}D)")
    moved = y.transpose(1, 2).contiguous()
    assert type(moved) is SealedTensor
    assert moved.sealed_dim == 2
    with pytest.raises(UnseenCall, match="takes dim 1 as the channels, but they are in dim 2"):
        result.bn(moved)
    assert torch.equal(result.bn(moved.transpose(1, 2)), result.bn(y))


@pytest.mark.parametrize(
    "use",
    [
        lambda y: y + 1, lambda y: y.max(), lambda y: y.tolist(), lambda y: bool((y > 0).any()), lambda y: y[0],
        lambda y: y.relu_(), lambda y: y.clone().sum(), lambda y: y.detach().sum(), lambda y: y.numpy(),
        lambda y: torch.cat([y, y]), lambda y: list(y), lambda y: copy.deepcopy(y), lambda y: y.flatten() @ y.flatten(),
        lambda y: torch.zeros(2, 4, 6, 6).copy_(y), lambda y: y.item(), lambda y: y.backward(), lambda y: pickle.dumps(y),
        lambda y: F.batch_norm(y, torch.zeros(4), torch.ones(4)), lambda y: F.conv2d(y, torch.ones(1, 4, 1, 1)),
        lambda y: nn.Conv2d(4, 1, 1)(y), lambda y: y.exp().sum(), lambda y: y.data.sum(), lambda y: torch.equal(y, y),
    ],
)  # fmt: skip
def test_a_sealed_value_refuses_all_else(use):
    _, result = folded(False)
    with pytest.raises(UnseenCall, match=r"^conv was folded together with bn, but its output was used without it"):
        use(result.conv(X))


@pytest.mark.parametrize("functional", [False, True])
def test_another_batch_norm_does_not_open_it(functional):
    _, result = folded(functional)
    _, other = folded(functional)
    bn, y = other.bn, (F.conv2d(X, result.conv.weight, result.conv.bias) if functional else result.conv(X))
    with pytest.raises(UnseenCall):
        F.batch_norm(y, bn.running_mean, bn.running_var) if functional else bn(y)
    with pytest.raises(UnseenCall, match="input doesn't come from it"):
        F.batch_norm(X[:, :1], bn.running_mean, bn.running_var) if functional else bn(torch.ones(2, 4, 6, 6))


def test_a_functional_norm_is_called_as_it_was():
    _, result = folded(True)
    y, bn = F.conv2d(X, result.conv.weight, result.conv.bias), result.bn
    with pytest.raises(UnseenCall, match="a different eps"):
        F.batch_norm(y, bn.running_mean, bn.running_var, eps=1.0)
    with pytest.raises(UnseenCall, match="put in training"):
        F.batch_norm(y, bn.running_mean, bn.running_var, training=True)
    bn.running_mean = torch.zeros(4)
    with pytest.raises(UnseenCall):
        F.batch_norm(y, bn.running_mean, bn.running_var)


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w * 2, lambda w: 2 - w, lambda w: w.view(4, -1).sum(), lambda w: w[0].exp(), lambda w: w.t_() if 0 else w.abs(),
        lambda w: torch.zeros_like(w).add_(w), lambda w: torch.zeros(4, 3, 3, 3).copy_(w), lambda w: w.clone().norm(),
        lambda w: [row * 1 for row in w], lambda w: F.conv2d(X, w), lambda w: F.interpolate(w, scale_factor=2),
        lambda w: torch.cat([w, w]), lambda w: w.to(torch.float64) + 1, lambda w: w.data @ w.data.mT, lambda w: w.unbind()[0] + 1,
        lambda w: torch.zeros(4, 3, 3, 3).__setitem__(0, w[0]), lambda w: torch.einsum("oikl->o", w), lambda w: w.mul_(w),
        lambda w: torch.addmm(w.flatten(1), torch.ones(4, 2), torch.ones(2, 27)),
        lambda w: torch.mul(w, 2, out=torch.empty(4, 3, 3, 3)),
        lambda w: torch.addmm(torch.ones(4), X.flatten(1)[:, :27], w.view(4, -1).t(), out=torch.empty(2, 4)),
    ],
)  # fmt: skip
def test_a_folded_weight_refuses_to_be_computed_with(use):
    _, result = folded(False)
    with pytest.raises(
        UnseenCall,
        match=r"^conv was changed when conv was folded together with bn, (but is used without|so its tensors can't be modified)",
    ):
        use(result.conv.weight)


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.flatten()[0].item(), lambda t: float(t.flatten()[0]), lambda t: bool(t.flatten()[0]), lambda t: t.tolist(),
        lambda t: torch.equal(t, t), lambda t: torch.allclose(t, t), lambda t: np.asarray(t), lambda t: t.data.numpy(),
        lambda t: t.data.norm(), lambda t: next(iter(t.flatten())) + 1, lambda t: t.storage()[0],
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["conv.weight", "bn.running_var"])
def test_in_a_forward_no_number_of_a_folded_tensor_can_be_read(read, name):
    _, result = folded(True)
    owner, _, attribute = name.partition(".")
    tensor = getattr(result.get_submodule(owner), attribute)
    with pytest.raises(UnseenCall):
        NoSealsLeave(nn.Identity(), lambda: read(tensor))()


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.zero_(), lambda t: t.data.fill_(1), lambda t: t.copy_(torch.ones_like(t)), lambda t: nn.init.zeros_(t),
        lambda t: nn.init.kaiming_normal_(t), lambda t: t.__setitem__(0, 5), lambda t: setattr(t, "data", torch.ones(t.shape)),
        lambda t: torch._foreach_add_([t], 1.0), lambda t: t.clamp_(None, 0.1), lambda t: t.copy_(other=torch.ones_like(t)),
    ],
)  # fmt: skip
def test_a_folded_weight_cant_be_written_to(write):
    model, result = folded(False)
    with torch.no_grad(), pytest.raises(UnseenCall, match="can't be modified: modify the original model"):
        write(result.conv.weight)
    assert same(result(X), model(X))


def test_a_function_takes_a_folded_weight_and_bias_together_alone():
    model, result = folded(True)
    weight, bias = result.conv.weight, result.conv.bias
    # A call without a bias is accepted, because the fold may have added the bias.
    assert isinstance(F.conv2d(X, weight, None), SealedOutput)
    for given in ((weight, torch.zeros(4)), (torch.zeros(4, 3, 3, 3), bias), (weight, model.conv.bias)):
        with pytest.raises(UnseenCall, match="is used without the two"):
            F.conv2d(X, *given)


def test_detached_in_a_forward_it_stays_folded_and_outside_it_gives_the_values():
    _, result = folded(False)
    root = NoSealsLeave(nn.Identity(), lambda: result.conv.weight.detach())
    with pytest.raises(UnseenCall):
        root().sum()
    assert type(result.conv.weight.detach()) is torch.Tensor


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@BOTH
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "value"), [*itertools.product(["weight", "bias"], ["parameter", "buffer", None])])
def test_a_tensor_in_the_place_of_a_folded_one_is_refused(functional, way, name, value):
    model, result = folded(functional)
    WAYS[way](result)
    new = getattr(model.conv, name).detach().clone()
    setattr(result.conv, name, None if value is None else nn.Parameter(new))
    if value == "buffer":
        delattr(result.conv, name)
        result.conv.register_buffer(name, new)
    # `F.conv2d` itself refuses None as the weight.
    error, text = (
        (TypeError, "conv2d")
        if functional and (name, value) == ("weight", None)
        else (UnseenCall, "a different weight or bias")
    )
    with pytest.raises(error, match=text):
        WAYS[way](result)


@pytest.mark.parametrize("assign", [False, True])
def test_a_folded_weight_can_be_loaded_moved_and_saved(assign):
    model, result = folded(False)
    own = {name: value.clone() for name, value in result.state_dict().items()}
    assert {type(value) for value in own.values()} == {torch.Tensor}
    result.load_state_dict({name: torch.zeros_like(value) for name, value in own.items()}, assign=assign)
    assert not same(result(X), model(X))
    result.load_state_dict(own, assign=assign)
    assert same(result(X), model(X))
    assert type(result.conv.weight) is FoldedParameter
    assert torch.equal(bare(result.conv.weight), own["conv.weight"])
    with pytest.raises(UnseenCall):
        result.conv.weight.sum()
    assert result.conv.weight.shape == (4, 3, 3, 3)
    assert result.conv.weight.numel() == 108
    assert f"{result.conv.weight}".startswith("Parameter")
    assert type(result.conv.weight.view(-1)) is FoldedTensor
    result.requires_grad_(False)
    assert not result.conv.weight.requires_grad


def test_functional_call_takes_its_own_weights():
    model, result = folded(False)
    own = {key: tensor.detach() for key, tensor in result.named_parameters()}
    assert same(torch.func.functional_call(result, own, (X,)), model(X))
    own = {key: bare(tensor) * 1 for key, tensor in result.named_parameters()}
    assert same(torch.func.functional_call(result, own, (X,)), model(X))
    with pytest.raises(UnseenCall, match="has a different weight or bias than the one that was folded"):
        torch.func.functional_call(result, dict(model.named_parameters()), (X,))


def test_a_sealed_value_holds_no_numbers_of_its_own():
    value = torch.randn(2, 4)
    pair = FoldedPair("conv", "bn", None, 0)
    seal = sealed(value, pair)
    assert isinstance(seal, SealedOutput)
    with torch._C.DisableTorchFunctionSubclass():
        assert seal.numel() == 0
    assert opened_from(seal, pair, None) is value


@BOTH
def test_a_layer_that_a_compiled_call_runs_eagerly_gives_what_a_captured_frame_takes(functional, monkeypatch):
    """torch.compile runs a frame eagerly once it has recompiled it too often."""
    model, result = folded(functional)
    torch._dynamo.reset()
    if functional:
        monkeypatch.setattr(FoldedLayer, "compute", torch.compiler.disable(FoldedLayer.compute, recursive=False))
    else:
        eager = torch.compiler.disable(FoldedConvForward.__call__, recursive=False)
        monkeypatch.setattr(FoldedConvForward, "__call__", eager)
    with torch.no_grad():
        assert same(torch.compile(result, backend="eager")(X), model(X))
        assert same(result(X), model(X))
