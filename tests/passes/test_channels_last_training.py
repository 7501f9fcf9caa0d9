"""channels-last in training: the feature maps are converted, the weights keep their memory format."""

import copy
import dataclasses
import functools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_contract import captured, check_pass, sentences_of
from tiny_models import Net, enliven
from torch import Tensor, nn
from training_models import peak_of

from optimizer import optimize, report_of
from passes import ChannelsLast, InsertCheckpoints
from passes.memory_format.forwards import ChannelsLastInput, ContiguousInput
from passes.memory_format.watch import LAST, LayoutWatch, layout_of

ENTERED, KEPT = "input converted to channels_last", "kept in contiguous format"
OUTPUTS = "outputs in the memory format of the original"


class Block(nn.Module):
    """A residual block that writes in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)), inplace=True)
        y = self.norms[1](self.second(y))
        y += x
        return F.relu(y, inplace=True)


class Images(nn.Module):
    """Small weights on large maps, then large weights on small maps."""

    def __init__(self, *, dim: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU())
        self.blocks = nn.Sequential(*(Block(8) for _ in range(2)))
        self.pool = nn.MaxPool2d(4)
        self.tail = nn.Sequential(nn.Conv2d(8, 64, 3, padding=1), nn.BatchNorm2d(64), nn.SiLU(), nn.Conv2d(64, 48, 3))
        self.head = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Any:
        maps = self.blocks(self.stem(x))
        return self.head(self.tail(self.pool(maps)).mean((2, 3))), maps


def images(batch: int = 4, side: int = 16, *, seed: int = 0) -> Tensor:
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(seed))


def made(cls: Any = Images) -> nn.Module:
    torch.manual_seed(0)
    return enliven(cls()).train()


def optimized(model: nn.Module, passes: Any = ("channels-last",), x: Tensor | None = None) -> nn.Module:
    given = images() if x is None else x
    return optimize(model, list(passes), mode="training", example_inputs=(given,), strict=True)


@functools.cache
def _pair() -> tuple[nn.Module, nn.Module]:
    model = made()
    return model, optimized(model)


def pair() -> tuple[nn.Module, nn.Module]:
    """A model and its result, which share their tensors."""
    return copy.deepcopy(_pair())


def changes_of(result: nn.Module, name: str = "channels-last") -> list[tuple[str, str]]:
    (record,) = [record for record in report_of(result).passes if record.name == name]
    return [(change.where, change.text) for change in record.changes]


def loss_of(outputs: Any) -> Tensor:
    leaves = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum(leaf.square().mean() for leaf in leaves)


def steps(model: nn.Module, x: Tensor, count: int = 3) -> list[Any]:
    """Losses, gradients and buffers of several steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    seen: list[Any] = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        seen += [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
        seen += [buffer.clone() for buffer in model.buffers()]
        optimizer.step()
    return seen


def assert_close(expected: list[Any], got: list[Any], tolerance: float = 1e-9) -> None:
    assert len(expected) == len(got)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)


def doubles(*models: nn.Module) -> list[nn.Module]:
    """Copies in float64, where rounding is too small to move a value across the kink of a ReLU."""
    return [copy.deepcopy(model).double() for model in models]


def watched(model: nn.Module, x: Tensor) -> LayoutWatch:
    watch = LayoutWatch(model)
    with torch.no_grad(), watch:
        copy.deepcopy(model.state_dict())
        model(x)
    return watch


# Guarantees ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_maps_go_to_channels_last_and_the_parameters_are_the_callers_own() -> None:
    model = made()
    before = [(id(p), p.stride(), p._version) for p in model.parameters()]
    done = check_pass(ChannelsLast(), model, (images(),), mode="training")
    assert [(change.where, change.what) for change in done.changes] == [
        ("tail.0", KEPT), ("tail.3", KEPT), ("stem.0", ENTERED), ("", OUTPUTS),
    ]  # fmt: skip
    fast = optimized(model)
    assert [(id(p), p.stride(), p._version) for p in fast.parameters()] == before
    assert all(mine is theirs for mine, theirs in zip(fast.buffers(), model.buffers(), strict=True))
    assert not any("forward" in vars(module) for module in model.modules())
    seen: dict[str, Any] = {}
    for path, module in fast.named_modules():
        module.register_forward_hook(lambda m, a, out, path=path: seen.update({path: layout_of(out)}))
    fast(images())
    inside = ("stem.0", "stem.1", "stem.2", "blocks.0.first", "blocks.0.norms.1", "blocks.1", "pool")
    assert {path: seen[path] for path in inside} == dict.fromkeys(inside, LAST)
    assert layout_of(model(images())[1]) != LAST


@pytest.mark.parametrize(
    "x", [images(), images(2, 12), images(7, 24), images(3, 16).to(memory_format=torch.channels_last)]
)
def test_steps_are_the_originals_at_any_size(x: Tensor) -> None:
    original, fast = doubles(*pair())
    assert_close(steps(original, x.double()), steps(fast, x.double()))


def test_gradients_lie_as_the_parameters_and_the_inputs_do() -> None:
    _, fast = pair()
    x = images().requires_grad_()
    loss_of(fast(x)).backward()
    assert x.grad is not None
    assert x.grad.stride() == x.stride()
    for name, parameter in fast.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.stride() == parameter.stride(), name
    (gradient,) = torch.autograd.grad(loss_of(fast(x)), x)
    assert gradient.stride() == x.stride()


def test_outputs_lie_as_the_originals_do_in_training_and_in_eval() -> None:
    model, fast = pair()
    for training in (True, False, True):
        for x in (images(), images(2, 12)):
            mine, theirs = fast.train(training)(x), copy.deepcopy(model).train(training)(x)
            assert [leaf.stride() for leaf in mine] == [leaf.stride() for leaf in theirs]


def test_gradients_come_back_in_the_format_of_each_map() -> None:
    """Otherwise, the backward pass of a BatchNorm takes eight times as long."""
    _, fast = pair()
    seen: dict[str, tuple[Any, Any]] = {}

    def hook(module: nn.Module, args: Any, output: Tensor, path: str) -> None:
        output.register_hook(lambda gradient: seen.setdefault(path, (layout_of(output), layout_of(gradient))) and None)

    for path in ("pool", "tail.1", "tail.2", "blocks.0", "stem.2", "stem.1"):
        fast.get_submodule(path).register_forward_hook(lambda m, a, out, path=path: hook(m, a, out, path))
    _, maps = fast(images())
    # The gradient of an output has the format that the loss gives it.
    maps.backward(torch.randn(maps.shape))
    assert seen["stem.1"] == seen["stem.2"] == (LAST, LAST)
    seen.clear()
    loss_of(fast(images())[0]).backward()
    assert seen["pool"] == (LAST, LAST), "in front of what is kept contiguous"
    assert seen["tail.1"] == ("contiguous", "contiguous")


def test_a_model_in_eval_is_optimized_as_it_trains() -> None:
    model = made().eval()
    fast = optimized(model)
    assert not fast.training
    assert changes_of(fast) == changes_of(_pair()[1])
    original, fast = doubles(model, fast)
    assert_close(steps(original.train(), images().double()), steps(fast.train(), images().double()))


@pytest.mark.parametrize("move", [copy.deepcopy, lambda result: pickle.loads(pickle.dumps(result))])
def test_copies_train_alike(move: Any) -> None:
    fast = _pair()[1]
    moved = move(fast)
    assert moved.stem[0].forward.owner is moved.stem[0]
    assert_close(steps(copy.deepcopy(fast), images()), steps(moved, images()), 0.0)


def test_state_dicts_load_both_ways() -> None:
    (model, fast), other = pair(), enliven(Images(), seed=5)
    assert list(fast.state_dict()) == list(model.state_dict())
    fast.load_state_dict(other.state_dict())
    original, mine = doubles(other.train(), fast)
    assert_close(steps(original, images().double()), steps(mine, images().double()))
    other.load_state_dict(mine.state_dict())
    assert all(p.stride() == q.stride() for p, q in zip(other.parameters(), mine.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_move(dtype: torch.dtype) -> None:
    fast = pair()[1].to(dtype)
    logits, maps = fast(images().to(dtype))
    assert logits.dtype is maps.dtype is dtype
    loss_of((logits, maps)).backward()
    assert fast.stem[0].weight.grad.dtype is dtype


def test_under_autocast() -> None:
    original, fast = copy.deepcopy(_pair()[0]), pair()[1]
    losses = []
    for each in (original, fast):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(loss_of(each(images())))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=0.02, atol=0.0)
    assert layout_of(fast.stem[0].weight.grad) != LAST


# With other passes ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.5, "min"])
def test_behind_a_fold_and_in_front_of_checkpoints(budget: float | str) -> None:
    model, x = made(), images()
    passes = ["fold-conv-bias", "channels-last"]
    plain = optimized(model, passes)
    fast = optimized(model, [*passes, InsertCheckpoints(memory_budget=budget)])
    assert [record.status for record in report_of(fast).passes] == ["applied"] * 3
    assert changes_of(fast) == changes_of(plain)
    if budget == 0.5:
        peak, eager = (peak_of(copy.deepcopy(one), (x,), {}) for one in (fast, plain))
        assert peak <= 0.5 * eager
    torch.use_deterministic_algorithms(False)
    # The plan runs the forward as it was written, so the fold in the other result rounds differently.
    assert_close(steps(copy.deepcopy(plain), x), steps(copy.deepcopy(fast), x), 1e-5)
    original, fast = doubles(model, fast)
    assert_close([loss_of(original(x.double()))], [loss_of(fast(x.double()))])


def test_a_result_that_is_optimized_again_stays_as_it_is() -> None:
    _, fast = pair()
    again = optimize(fast, ["channels-last"], mode="training", example_inputs=(images(),))
    assert report_of(again).passes[0].status == "unchanged"


# Random numbers -------------------------------------------------------------------------------------------------------


def dropping(how: str) -> nn.Module:
    """Draws random numbers for maps, for dropout or noise, as `how` says."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.stem(x) * 2
        if how == "function":
            y = F.dropout(y, 0.3, m.training)
        elif how == "noise":
            y = y + 0.1 * torch.rand_like(y)
        else:
            y = m.drop(y)
        return m.last(y).mean((2, 3))

    layers = {"stem": nn.Conv2d(3, 8, 3), "last": nn.Conv2d(8, 8, 3)}
    return Net(run, **layers, drop=nn.Dropout(0.3, inplace=how == "in place"))


@pytest.mark.parametrize(("how", "where"), [("function", ""), ("noise", ""), ("module", "drop"), ("in place", "drop")])
def test_random_numbers_fall_on_the_elements_that_they_fell_on(how: str, where: str) -> None:
    model = made(lambda: dropping(how))
    fast = optimized(model, x=images(4, 24))
    assert (where, "random numbers drawn as for contiguous maps") in changes_of(fast)
    original, fast = doubles(model, fast)
    for training in (True, False):
        expected = steps(original.train(training), images(4, 24).double())
        assert_close(expected, steps(fast.train(training), images(4, 24).double()))
    watch = watched(fast.train(), images(4, 24).double())
    assert watch.layouts.draws == []


def test_what_draws_nothing_in_eval_isnt_brought_there_and_back() -> None:
    fast = optimized(made(lambda: dropping("module")), x=images(4, 24))
    moved = [watched(fast.train(training), images(4, 24)).layouts.moved for training in (True, False)]
    assert moved[1] < moved[0]


# Difficult models and refusals ----------------------------------------------------------------------------------------


def of_two(run: Any) -> nn.Module:
    return made(lambda: Net(run, first=nn.Conv2d(3, 8, 3), second=nn.Conv2d(8, 8, 3)))


def viewed_in_eval(m: Any, x: Tensor) -> Tensor:
    """Depends on the memory format, but only in eval mode."""
    y = m.second(m.first(x).relu())
    return y.flatten(1) if m.training else y.view(len(y), -1)


def test_a_forward_that_counts_on_the_format_in_eval_is_never_wrong() -> None:
    model = of_two(viewed_in_eval)
    fast = optimize(model, ["channels-last"], mode="training", example_inputs=(images(4, 24),))
    (record,) = report_of(fast).passes
    assert record.status == "rolled-back"
    assert record.reason.startswith("In eval: ")
    assert torch.equal(copy.deepcopy(fast).eval()(images()), copy.deepcopy(model).eval()(images()))


class Branching(Images):
    """Has a data-dependent branch."""

    def forward(self, x: Tensor) -> Any:
        if x.sum().item() > 1e9:
            x = x * 2
        return super().forward(x)


def test_a_branch_on_a_value() -> None:
    model = made(Branching)
    fast = optimized(model)
    assert ("stem.0", ENTERED) in changes_of(fast)
    original, fast = doubles(model, fast)
    for x in (images().double(), images().double() + 1e9):
        assert_close(steps(original, x, 1)[:1], steps(fast, x, 1)[:1], 1e-6)


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight / self.weight.std(), self.bias, self.stride, self.padding)


def net(*layers: nn.Module) -> nn.Module:
    return enliven(nn.Sequential(*layers)).train()


def reasons_of(model: nn.Module, x: Tensor) -> list[tuple[str, str]]:
    done = check_pass(ChannelsLast(), model, (x,), mode="training")
    return [(skip.where, skip.reason) for skip in done.skips]


def test_refusals() -> None:
    assert reasons_of(net(Standardised(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten()), images(4, 24)) == [
        ("0", "it is a Standardised, which has its own computation")
    ]
    unbatched = net(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    done = ChannelsLast().run(*captured(unbatched, (images(4, 24)[0],), mode="training"))
    assert (done.changes, {skip.reason for skip in done.skips}) == (
        (), {"its input has no batch dim, so its kernels treat it as contiguous"},
    )  # fmt: skip
    tree, context = captured(made(), mode="training")
    assert {text for _, text in sentences_of(ChannelsLast().run(tree, context))} == {
        "only a run can show that no view depends on the old format: add example inputs"
    }


@pytest.mark.slow
def test_weights_that_are_all_large_are_left_alone() -> None:
    model = net(nn.Conv2d(16, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 2))
    x = torch.randn(2, 16, 4, 4)
    done = check_pass(ChannelsLast(), model, (x,), mode="training")
    assert done.changes == ()
    assert [skip.where for skip in done.skips] == ["0", "3"]
    assert {skip.reason.split(":")[0] for skip in done.skips} == {"its weight is large compared with its maps"}
    more = check_pass(ChannelsLast(), model, (torch.randn(4, 16, 40, 40),), mode="training")
    assert [change.where for change in more.changes] == ["0", ""]


def test_a_kernel_of_one_element_is_copied_by_nobody() -> None:
    pointwise = net(nn.Conv2d(16, 64, 1), nn.ReLU(), nn.Conv2d(64, 128, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = torch.randn(4, 16, 6, 6)
    assert [c.where for c in check_pass(ChannelsLast(), pointwise, (x,), mode="training").changes] == ["0", ""]
    larger = net(nn.Conv2d(16, 64, 3), nn.ReLU(), nn.Conv2d(64, 128, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert check_pass(ChannelsLast(), larger, (x,), mode="training").changes == ()


def test_a_batchnorm_behind_is_worth_it() -> None:
    """The weight costs 4 * 576 elements: more than writing the 1568 outputs, less than also reading them again."""
    x, conv, rest = torch.randn(4, 8, 9, 9), nn.Conv2d(8, 8, 3), (nn.ReLU(), nn.Flatten())
    bare, normed = net(conv, *rest), net(conv, nn.BatchNorm2d(8), *rest)
    assert check_pass(ChannelsLast(), bare, (x,), mode="training").changes == ()
    assert [c.where for c in check_pass(ChannelsLast(), normed, (x,), mode="training").changes] == ["0", ""]


def test_another_device_has_no_such_rule() -> None:
    tree, context = captured(made(), (images(),), mode="training")
    done = ChannelsLast().run(tree, dataclasses.replace(context, device=torch.device("cuda")))
    assert [(change.where, change.what) for change in done.changes] == [("stem.0", ENTERED), ("", OUTPUTS)]


def test_weights_in_channels_last_stay_so() -> None:
    model = made().to(memory_format=torch.channels_last)
    done = check_pass(ChannelsLast(), model, (images(),), mode="training")
    assert done.changes == ()


# Kinds of inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [2, 1])
def test_volumes(batch: int) -> None:
    """For one row, the kernels return contiguous maps for any input, so nothing can be gained."""
    model = net(nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2), nn.ConvTranspose3d(8, 4, 2))
    x = torch.randn(batch, 3, 10, 10, 10)
    done = ChannelsLast().run(*captured(model, (x,), mode="training"))
    assert [c.where for c in done.changes] == (["0", ""] if batch > 1 else [])
    fast = optimize(model, ["channels-last"], mode="training", example_inputs=(x,))
    original, fast = doubles(model, fast)
    assert_close(steps(original, x.double()), steps(fast, x.double()))


def test_an_image_of_one_channel_enters_by_its_strides() -> None:
    model = net(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    x = torch.randn(4, 1, 16, 16)
    fast = optimized(model, x=x)
    assert [where for where, _ in changes_of(fast)] == ["0", ""]
    seen: list[Any] = []
    fast[1].register_forward_hook(lambda m, args, out: seen.append(layout_of(out)))
    fast(x)
    assert seen == [LAST]


@pytest.mark.parametrize("forward", [ChannelsLastInput, ContiguousInput])
def test_a_transposed_convolution_is_told_its_output_size(forward: Any) -> None:
    conv = nn.ConvTranspose2d(3, 4, 3, stride=2)
    x = images(2, 5)
    expected = conv(x, output_size=[12, 12])
    conv.forward = forward(conv, None)
    for got in (conv(x, output_size=[12, 12]), conv(x, [12, 12]), conv(input=x, output_size=[12, 12])):
        torch.testing.assert_close(got, expected)


@pytest.mark.filterwarnings("ignore:.*dynamo.*")
def test_compiled_code_chooses_its_formats_itself() -> None:
    model = made().eval()
    fast = optimized(model)
    compiled = torch.compile(copy.deepcopy(fast), backend="eager", fullgraph=True)
    assert_close(list(model(images())), list(compiled(images())), 1e-4)
    exported = torch.export.export(copy.deepcopy(fast), (images(),)).module()
    assert_close(list(model(images())), list(exported(images())), 1e-4)


def test_transforms_of_functions_go_through() -> None:
    model = made().eval().double()
    fast, x = optimized(model, x=images().double()).eval(), images().double()

    def loss(module: nn.Module) -> Any:
        return lambda one: loss_of(module(one[None]))

    mine, theirs = (torch.func.vmap(torch.func.grad(loss(each)))(x) for each in (fast, model))
    assert_close([theirs], [mine])


def test_gradients_of_gradients() -> None:
    model = made().eval().double()
    fast = optimized(model, x=images().double())
    found = []
    for each in (model, fast):
        x = images().double().requires_grad_()
        (gradient,) = torch.autograd.grad(each(x)[0].square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    assert_close(found[:1], found[1:])
