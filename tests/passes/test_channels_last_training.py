"""channels-last in training: each call converts the weights; the parameters and gradients keep their memory format."""

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_values import values_in
from pass_contract import captured, check_pass
from tiny_models import Net, enliven
from torch import Tensor, nn

from optimizer import optimize
from passes import ChannelsLast
from passes.graph.captured import name_of
from passes.graph.layouts import CONTIGUOUS, LAST, layout_of

CONVERTED, KEPT = "weight in channels_last", "kept in contiguous format"
CONVOLUTIONS = [f"blocks.{number}.{name}" for number in range(2) for name in ("first", "second")]


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


def formats_in(model: nn.Module, *args: Any) -> list[str]:
    """The format of the output of each convolution that a call makes."""
    return [layout_of(value) or "" for _, node, value in values_in(model, *args) if name_of(node).startswith("conv")]


# Guarantees ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_maps_go_to_channels_last_and_the_parameters_are_the_callers_own() -> None:
    model = made()
    before = [(id(p), p.stride(), p._version) for p in model.parameters()]
    done = check_pass(ChannelsLast(), model, (images(),), mode="training")
    assert [(change.where, change.what) for change in done.changes] == [
        *((path, CONVERTED) for path in ("stem.0", *CONVOLUTIONS)), ("tail.0", KEPT), ("tail.3", KEPT),
    ]  # fmt: skip
    fast = optimized(model)
    assert [(id(p), p.stride(), p._version) for p in fast.parameters()] == before
    assert all(mine is theirs for mine, theirs in zip(fast.buffers(), model.buffers(), strict=True))
    assert not any("forward" in vars(module) for module in model.modules())
    assert formats_in(fast, images()) == [*[LAST] * 5, CONTIGUOUS, CONTIGUOUS]


@pytest.mark.parametrize("x", [images(), images(7, 24), images(3, 16).to(memory_format=torch.channels_last)])
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


def test_outputs_lie_as_the_originals_do_in_training_and_in_eval() -> None:
    model, fast = pair()
    for training in (True, False, True):
        for x in (images(), images(2, 12)):
            mine, theirs = fast.train(training)(x), copy.deepcopy(model).train(training)(x)
            assert [leaf.stride() for leaf in mine] == [leaf.stride() for leaf in theirs]


def test_under_autocast() -> None:
    original, fast = copy.deepcopy(_pair()[0]), pair()[1]
    losses = []
    for each in (original, fast):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(loss_of(each(images())))
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=0.02, atol=0.0)
    assert layout_of(fast.stem[0].weight.grad) != LAST


# Random numbers -------------------------------------------------------------------------------------------------------


def dropping(m: Any, x: Tensor) -> Tensor:
    """Draws random numbers for maps: dropout as a function, as a module and in place, and noise."""
    y = m.stem(x) * 2
    y = m.in_place(F.dropout(y, 0.2, m.training) + 0.1 * torch.rand_like(y)) + m.drop(y)
    return m.last(y).mean((2, 3))


def test_random_numbers_fall_on_the_elements_that_they_fell_on() -> None:
    layers = {"stem": nn.Conv2d(3, 8, 3), "last": nn.Conv2d(8, 8, 3)}
    drops = {"drop": nn.Dropout(0.3), "in_place": nn.Dropout(0.3, inplace=True)}
    model = made(lambda: Net(dropping, **layers, **drops))
    fast = optimized(model, x=images(4, 24))
    assert formats_in(fast, images(4, 24)) == [LAST, LAST]
    original, fast = doubles(model, fast)
    for training in (True, False):
        expected = steps(original.train(training), images(4, 24).double())
        assert_close(expected, steps(fast.train(training), images(4, 24).double()))


# What pays on a CPU ---------------------------------------------------------------------------------------------------


def test_a_view_in_eval_gets_the_format_that_it_needs() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.second(m.first(x).relu())
        return y.flatten(1) if m.training else y.view(len(y), -1)

    model = made(lambda: Net(run, first=nn.Conv2d(3, 8, 3), second=nn.Conv2d(8, 8, 3)))
    original, fast = doubles(model, optimized(model, x=images(4, 24)))
    for training in (True, False):
        expected = steps(original.train(training), images(4, 24).double())
        assert_close(expected, steps(fast.train(training), images(4, 24).double()))


def net(*layers: nn.Module) -> nn.Module:
    return enliven(nn.Sequential(*layers)).train()


def test_a_kernel_of_one_element_is_copied_by_nobody() -> None:
    pointwise = net(nn.Conv2d(16, 64, 1), nn.ReLU(), nn.Conv2d(64, 128, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = torch.randn(4, 16, 6, 6)
    assert [c.where for c in check_pass(ChannelsLast(), pointwise, (x,), mode="training").changes] == ["0", "2"]
    larger = net(nn.Conv2d(16, 64, 3), nn.ReLU(), nn.Conv2d(64, 128, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert check_pass(ChannelsLast(), larger, (x,), mode="training").changes == ()


def test_a_batchnorm_behind_is_worth_it() -> None:
    """The weight costs 4 * 576 elements: more than writing the 1568 outputs, less than also reading them again."""
    x, conv, rest = torch.randn(4, 8, 9, 9), nn.Conv2d(8, 8, 3), (nn.ReLU(), nn.Flatten())
    bare, normed = net(conv, *rest), net(conv, nn.BatchNorm2d(8), *rest)
    assert check_pass(ChannelsLast(), bare, (x,), mode="training").changes == ()
    assert [c.where for c in check_pass(ChannelsLast(), normed, (x,), mode="training").changes] == ["0"]


def test_another_device_has_no_such_rule() -> None:
    tree, context = captured(made(), (images(),), mode="training")
    done = ChannelsLast().run(tree, dataclasses.replace(context, device=torch.device("cuda")))
    assert [change.what for change in done.changes] == [CONVERTED] * 7
