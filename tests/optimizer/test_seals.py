"""A folded convolution is only correct before its BatchNorm: any other use raises and never gives a wrong result."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from tiny_models import enliven
from torch import nn

from optimizer import optimize, report_of
from passes.errors import UnseenCall
from passes.program.weights import bare


def norm_net(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return enliven(nn.Sequential(*layers)).eval()


def image(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 3, 8, 8)), generator=torch.Generator().manual_seed(0))


class Flagged(nn.Module):
    """Has attributes, arguments and methods that the example call doesn't use."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.alpha = 1.0
        self.raw_too = False

    def forward(self, x, scale=1.0):
        features = self.conv(x)
        y = self.bn(features) * self.alpha * scale
        return (y, features) if self.raw_too else y

    def features(self, x):
        return self.bn(self.conv(x)).mean((2, 3))

    def raw(self, x):
        return self.conv(x) * 2


@pytest.fixture
def pair():
    torch.manual_seed(0)
    model = enliven(Flagged()).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert fast.report.passes[0].status == "applied"
    return model, fast


def same(mine, theirs) -> bool:
    return torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4)


def test_arguments_and_attributes_that_no_run_showed_work(pair):
    model, fast = pair
    assert same(fast(image(), 2.0), model(image(), 2.0))
    model.alpha = fast.alpha = 5.0
    assert same(fast(image()), model(image()))
    assert same(fast.features(image()), model.features(image()))


def test_what_looks_between_the_two_raises(pair):
    _, fast = pair
    with pytest.raises(UnseenCall, match=r"^conv was folded together with bn, but its output was used without it"):
        fast.raw(image())
    with pytest.raises(UnseenCall):
        fast.conv(image()) + 1
    fast.raw_too = True
    with pytest.raises(UnseenCall):
        fast(image())


def test_the_two_called_by_hand_are_right(pair):
    model, fast = pair
    assert same(fast.bn(fast.conv(image())), model.bn(model.conv(image())))


def test_an_eps_that_is_set_later_raises_where_it_went_into_weights(pair):
    model, fast = pair
    tied = optimize(model, ["fold-conv-bias"], example_inputs=(image(),))
    for each in (model, fast, tied):
        each.bn.eps = 1.0
    with pytest.raises(
        UnseenCall, match=r"^bn has a different eps than when it was folded into conv: set it in the orig"
    ):
        fast(image())
    assert same(tied(image()), model(image()))


def test_a_folded_batch_norm_that_is_put_in_training_raises(pair):
    """By hand, or in a branch of the forward; `train` of the whole model leaves it in eval mode."""
    model, fast = pair
    fast.bn.train()
    with pytest.raises(UnseenCall, match=r"^bn was put in training mode, but it was folded together with conv in ev"):
        fast(image())
    fast.bn.eval()
    assert same(fast(image()), model(image()))
    tied = optimize(model, ["fold-conv-bias"], example_inputs=(image(),))
    for each in (model, tied):
        each.bn.train()
    assert same(tied(image()), model(image()))


class AsksForAClass(Flagged):
    def forward(self, x, strict=False):
        features = self.conv(x)
        if strict and not isinstance(features, torch.Tensor):
            return x
        return self.bn(features)


def test_a_forward_that_asks_whether_the_value_between_is_a_tensor_is_told_so():
    torch.manual_seed(0)
    model = enliven(AsksForAClass()).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert fast.report.passes[0].changes
    assert same(fast(image(), True), model(image(), True))


def test_layers_can_be_added_to_a_result():
    model = norm_net(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    wanted = model(image()).relu()
    fast.append(nn.ReLU())
    assert same(fast(image()), wanted)
    with pytest.raises(UnseenCall):
        fast[:1](image()).sum()


@pytest.mark.parametrize(
    ("layers", "seen", "other"),
    [
        ((nn.Linear(6, 4), nn.BatchNorm1d(4)), (5, 6), (5, 4, 6)),
        ((nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4)), (2, 3, 4), (3, 4)),
        ((nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), (2, 3, 8, 8), (3, 8, 8)),
    ],
)
def test_an_input_of_another_rank_raises(layers, seen, other):
    fast = optimize(norm_net(*layers), ["fold-conv-bn"], example_inputs=(image(*seen),))
    assert len(fast.report.passes[0].changes) == 1
    with pytest.raises(UnseenCall, match=f"for {len(seen)}-D input, but got {len(other)}-D input"):
        fast(image(*other))


def test_a_pair_in_two_children_of_a_forward_that_branches():
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Sequential(nn.Conv2d(3, 4, 1))
            self.b = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())

        def forward(self, x):
            y = self.a(x)
            return self.b(y) if x.abs().max() < 50 else y * 2

    model = enliven(Branching()).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert [change.where for change in fast.report.passes[0].changes] == ["b.0"]
    assert same(fast(image()), model(image()))
    with pytest.raises(UnseenCall):
        fast(100 * image())


def test_weights_from_before_the_fold_are_refused_and_its_own_are_taken(pair):
    model, fast = pair
    own = {name: tensor.clone() for name, tensor in fast.state_dict().items()}
    assert not any(name.startswith("bn.") for name in own)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"bn\.weight was folded into another weight"):
            fast.load_state_dict(model.state_dict(), strict=strict)
    fast.load_state_dict(own)
    assert same(fast(image()), model(image()))


def test_weights_from_before_any_rewrite_are_refused():
    model = enliven(Scaled()).eval()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for passes, name in (
        (["fold-conv-bias"], "conv.bias"),
        (["fold-conv-bn"], "bn.weight"),
        (["fold-conv-bias", "fold-conv-bn"], "bn.weight"),
    ):
        fast = optimize(model, passes, example_inputs=(image(),))
        own = {key: tensor.clone() for key, tensor in fast.state_dict().items()}
        with pytest.raises(RuntimeError, match=f"{name} was folded into another weight"):
            copy.deepcopy(fast).load_state_dict(before, strict=False)
        fast.load_state_dict(own)
        assert same(fast(image()), model(image()))


@pytest.mark.parametrize("name", ["fold-conv-bn", "fold-conv-bias"])
def test_functional_call_takes_its_own_weights_and_refuses_those_from_before_the_fold(name):
    model = norm_net(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    fast = optimize(model, [name], example_inputs=(image(),))
    own = {key: bare(tensor) * 1 for key, tensor in fast.named_parameters()}
    assert same(torch.func.functional_call(fast, own, (image(),)), model(image()))
    assert not same(torch.func.functional_call(fast, {"0.weight": own["0.weight"] * 2}, (image(),)), model(image()))
    with pytest.raises(UnseenCall, match="a different weight or bias than the one that was folded"):
        torch.func.functional_call(fast, dict(model.named_parameters()), (image(),))
    assert same(fast(image()), model(image()))


class Scaled(nn.Module):
    """Calls BatchNorm as a function, and reads a child module and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.act = nn.ReLU()
        self.scale = 2.0

    def forward(self, x):
        bn = self.bn
        y = F.batch_norm(self.conv(x), bn.running_mean, bn.running_var, bn.weight, bn.bias, False, 0.1, bn.eps)
        return self.act(y) * self.scale


def test_a_forward_by_functions_follows_attributes_and_children():
    model = enliven(Scaled()).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert len(fast.report.passes[0].changes) == 1
    model.act, fast.act = nn.Tanh(), nn.Tanh()
    model.scale = fast.scale = 3.0
    for result in (fast, copy.deepcopy(fast), optimize(fast, ["fold-conv-bn"], example_inputs=(image(),))):
        assert same(result(image()), model(image()))
    fast.bn.eps = 1.0
    with pytest.raises(UnseenCall, match=r"^the root \(batch_norm\) has a different eps than when it was folded"):
        fast(image())
    fast.bn.eps = model.bn.eps
    with pytest.raises(UnseenCall, match="folded together with"):
        torch.func.functional_call(fast, dict(model.named_parameters()), (image(),))
    for name in ("weight", "running_var"):
        with pytest.raises(UnseenCall, match="has parameters again, but they were folded into another module"):
            torch.func.functional_call(fast, {f"bn.{name}": getattr(model.bn, name)}, (image(),))
    assert same(fast(image()), model(image()))
    compiled = torch.compile(fast, backend="eager", fullgraph=True)
    assert same(compiled(image()), model(image()))


def test_torch_export_takes_a_result():
    model = norm_net(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    fast = optimize(model, example_inputs=(image(),))
    exported = torch.export.export(fast, (image(),)).module()
    assert same(exported(image()), model(image()))


class ByFunction(nn.Module):
    """If its height equals the channels, an unbatched input also fits the statistics, and would be silently wrong."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.register_buffer("mean", torch.linspace(-1, 1, 4))
        self.register_buffer("var", torch.linspace(1, 2, 4))

    def forward(self, x, scale):
        y = F.conv2d(x, self.conv.weight, self.conv.bias, padding=1)
        return F.batch_norm(y, self.mean, self.var) * scale


@pytest.mark.parametrize("again", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), optimize])
def test_functions_refuse_input_of_other_dims_than_they_were_folded_for(again):
    model = enliven(ByFunction()).eval()
    fast = again(optimize(model, ["fold-conv-bn"], example_inputs=(image(), torch.tensor(2.0))))
    assert same(fast(image(3, 3, 4, 4), torch.tensor(3.0)), model(image(3, 3, 4, 4), torch.tensor(3.0)))
    with pytest.raises(UnseenCall, match="for 4-D input, but got 3-D input"):
        fast(image(3, 4, 4), torch.tensor(3.0))
    # Inputs that the convolution doesn't get may have any shape.
    assert same(fast(image(), torch.ones(4, 1, 1)), model(image(), torch.ones(4, 1, 1)))


class GivenForward:
    """A descriptor that returns a function as an instance's forward."""

    def __get__(self, module, cls=None):
        return self if module is None else lambda x: F.batch_norm(module.conv(x), module.mean, module.var)


class WithDescriptor(ByFunction):
    forward = GivenForward()


def test_torch_export_takes_a_result_whose_class_gives_its_forward():
    model = enliven(WithDescriptor()).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert report_of(fast).passes[0].status == "applied"
    assert same(torch.export.export(fast, (image(),)).module()(image()), model(image()))


class Counts(nn.Module):
    """Normalizes by a function, and counts its calls in a buffer registered after the statistics."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("mean", torch.linspace(-1, 1, 4))
        self.register_buffer("var", torch.linspace(1, 2, 4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return F.batch_norm(self.conv(x), self.mean, self.var) * self.count


def test_torch_export_takes_a_result_that_writes_to_a_buffer():
    model = enliven(Counts()).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert report_of(fast).passes[0].status == "applied"
    exported = torch.export.export(fast, (image(),)).module()
    assert same(exported(image()), model(image()))
    assert same(exported(image()), model(image()))


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
def test_each_tensor_that_is_given_back_to_a_norm_is_seen(pair, name):
    model, fast = pair
    tensor = getattr(model.bn, name)
    with pytest.raises(UnseenCall, match="bn has parameters again, but they were folded into another module"):
        torch.func.functional_call(fast, {f"bn.{name}": tensor}, (image(),))
    setattr(fast.bn, name, tensor)
    with pytest.raises(UnseenCall, match="bn has parameters again, but they were folded into another module"):
        fast(image())


def test_statistics_that_went_into_weights_are_not_reset(pair):
    model, fast = pair
    for result in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        with pytest.raises(UnseenCall, match="the running statistics of bn were folded into conv"):
            result.bn.reset_running_stats()
        assert same(result(image()), model(image()))


class Lending(nn.Module):
    """Uses the tensors of a layer without calling it. If given, `tap` names the layer that a branch calls."""

    def __init__(self, tap=None, *, registered=False):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.tap = None if tap is None else Tap(getattr(self, tap), registered=registered)

    def forward(self, x):
        y = self.compute(x)
        return y if self.tap is None else y + self.tap(x, y).mean()


class LendingConv(Lending):
    lends, keeps = "conv", "bn"

    def compute(self, x):
        return self.bn(F.conv2d(x, self.conv.weight, self.conv.bias))


class OwnConv(nn.Conv2d):
    def forward(self, input):
        return super().forward(input) * 2


class LendingOwnConv(LendingConv):
    """The layer's class is the user's own; its forward calls torch code that reads the weight."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.conv = OwnConv(3, 4, 3)


class LendingScale(Lending):
    """The scale belongs to a layer of a type that no pass folds."""

    lends, keeps = "scale", "conv"

    def __init__(self):
        super().__init__()
        self.scale = nn.PReLU()

    def compute(self, x):
        return self.bn(self.conv(x) * self.scale.weight)


class LendingNorm(Lending):
    lends, keeps = "bn", "conv"

    def compute(self, x):
        bn = self.bn
        y = self.conv(x)
        return F.batch_norm(y, bn.running_mean, bn.running_var, bn.weight, bn.bias, self.training, 0.1, bn.eps)


class LendingBoth(Lending):
    lends, keeps = "bn", "conv"

    def compute(self, x):
        bn = self.bn
        y = F.conv2d(x, self.conv.weight, self.conv.bias)
        return F.batch_norm(y, bn.running_mean, bn.running_var, bn.weight, bn.bias, self.training, 0.1, bn.eps)


class Tap(nn.Module):
    def __init__(self, layer, *, registered):
        super().__init__()
        self.layer = layer if registered else None
        self.layers = [] if registered else [layer]

    def forward(self, x, y):
        if y.abs().mean() < 1e3:
            return y.new_zeros(())
        layer = self.layer or self.layers[0]
        return layer(x if isinstance(layer, nn.Conv2d) else y)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [(LendingConv, "inference"), (LendingNorm, "inference"), (LendingBoth, "inference"), (LendingNorm, "training")],
)
def test_a_layer_that_lends_its_tensors_to_a_function_is_not_called_itself(kind, mode):
    model = enliven(kind()).train(mode == "training")
    passes = ["fold-conv-bias"] if mode == "training" else ["fold-conv-bias", "fold-conv-bn"]
    fast = optimize(model, passes, mode=mode, example_inputs=(image(),))
    assert [record.status for record in fast.report.passes] == ["applied"] * len(passes)
    model.eval()
    fast.eval()
    given = {"conv": image(), "bn": image(2, 4, 6, 6)}
    for result in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert same(result(image()), model(image()))
        if mode == "inference":
            with pytest.raises(UnseenCall, match="folded together with"):
                getattr(result, kind.lends)(given[kind.lends]) + 1


@pytest.mark.parametrize("kind", [LendingOwnConv, LendingScale])
def test_a_layer_of_another_class_that_lends_its_tensors_is_not_called_itself(kind):
    model = enliven(kind()).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert fast.report.passes[0].status == "applied"
    assert same(fast(image()), model(image()))
    with pytest.raises(UnseenCall, match="folded together with"):
        getattr(fast, kind.lends)(image())


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("kind", [LendingConv, LendingNorm, LendingBoth])
def test_a_branch_that_calls_a_lending_layer_raises(kind, registered):
    model = enliven(kind(kind.lends, registered=registered)).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert report_of(fast).passes[0].status == "applied"
    assert same(fast(image()), model(image()))
    with pytest.raises(UnseenCall, match="folded together with"):
        fast(image() * 1e8)
