"""Weights in channels_last, outputs as the caller knows them."""

import copy
import dataclasses
import itertools
import math
import random
from typing import Any

import pytest
import torch
from folding_models import Direct, Pair, StandardisedConv, image
from pass_contract import captured, check_pass, sentences_of
from tiny_models import enliven
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from optimizer import optimize, report_of
from passes import ChannelsLast
from passes.channels_last import _cheapest_formats, _Costs
from passes.graph.guards import is_kept_contiguous


class Many(Pair):
    """Outputs of every kind."""

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return {
            "map": y,
            "rest": (y.relu(), [y.mean((2, 3)), None, 3]),
            "last": x.to(memory_format=torch.channels_last),
        }


class Tokens(Pair):
    """Outputs with the dims in another order: as image models make tokens of a map."""

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return y.flatten(2).transpose(1, 2), y.permute(0, 2, 3, 1), y.permute(1, 0, 2, 3)


class Viewed(Pair):
    """Counts on the format of a convolution's output."""

    def forward(self, x: Tensor) -> Any:
        return self.conv(x).view(x.shape[0], -1)


class Strided(Pair):
    """Answers otherwise, without an error, in another format."""

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return torch.as_strided(y, (y.shape[0], y[0].numel()), (y[0].numel(), 1))


class Flattened(nn.Conv2d):
    """Reads its weight in a way that counts on the format."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(x, self.weight) * self.weight.view(-1)[1]


def image_net(*layers: nn.Module) -> nn.Module:
    return enliven(nn.Sequential(*layers)).eval()


def net_2d() -> nn.Module:
    return image_net(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 8, 3, groups=8),
        nn.Conv2d(8, 4, 1), nn.MaxPool2d(2), nn.ConvTranspose2d(4, 3, 2, stride=2),
    )  # fmt: skip


def strides_of(outputs: Any) -> list[Any]:
    return [leaf.stride() if isinstance(leaf, Tensor) else leaf for leaf in pytree.tree_leaves(outputs)]


@pytest.mark.parametrize(
    ("make", "x", "changed"),
    [
        (net_2d, image(2, 3, 12, 12), ["0", "3", "7"]),
        (lambda: image_net(nn.Conv3d(3, 4, 2), nn.ReLU()), image(2, 3, 5, 6, 7), ["0"]),
        (lambda: Many().eval(), image(), ["conv"]),
        (lambda: Direct().eval(), image(), ["conv"]),
        (lambda: Tokens().eval(), image(), ["conv"]),
        (lambda: Tokens().eval(), image(1, 3, 8, 8), ["conv"]),
        (lambda: image_net(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2)), image(), ["0"]),
    ],
)
def test_outputs_are_in_the_format_of_the_original(make: Any, x: Tensor, changed: list[str]) -> None:
    model = make()
    done = check_pass(ChannelsLast(), model, (x,))
    assert [change.where for change in done.changes] == [*changed, ""]
    fast = optimize(model, ["channels-last"], example_inputs=(x,))
    assert report_of(fast).passes[0].status == "applied", str(report_of(fast))
    weight = fast.get_submodule(changed[0]).weight
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    assert weight.is_contiguous(memory_format=formats[weight.dim()])
    for batch in (x, x[:1], torch.cat([x, x])):
        assert strides_of(fast(batch)) == strides_of(model(batch))


def test_the_inside_runs_in_channels_last() -> None:
    fast = optimize(net_2d(), ["channels-last"], example_inputs=(image(2, 3, 12, 12),))
    seen: list[bool] = []
    fast[2].register_forward_hook(
        lambda module, args, output: seen.append(output.is_contiguous(memory_format=torch.channels_last))
    )
    fast(image(2, 3, 12, 12))
    assert seen == [True]


@pytest.mark.parametrize("cls", [Viewed, Strided])
def test_a_forward_that_counts_on_the_format_is_never_wrong(cls: type[nn.Module]) -> None:
    model = cls().eval()
    fast = optimize(model, ["channels-last"], example_inputs=(image(),))
    (record,) = report_of(fast).passes
    assert record.status == "rolled-back"
    assert record.reason
    assert fast.conv.weight.is_contiguous()
    assert torch.equal(fast(image()), model(image()))


def test_without_example_inputs() -> None:
    program, context = captured(net_2d())
    done = ChannelsLast().run(program, context)
    assert done.changes == ()
    assert {text for _, text in sentences_of(done)} == {
        "only a run shows that no view counts on the old format: give example inputs"
    }


def test_refusals() -> None:
    tied = image_net(nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3))
    tied[1].weight = tied[0].weight
    hooked = image_net(nn.Conv2d(3, 3, 3))
    hooked[0].register_forward_pre_hook(lambda module, args: None)
    normed = image_net(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 3)))
    own = image_net(Flattened(3, 4, 3))
    standardised = image_net(StandardisedConv(3, 4, 3))
    for model, reason in (
        (tied, "its weight is shared with another module"),
        (hooked, "it has hooks, which may set its weight"),
        (own, "its weight is also read by 0, which may count on the format"),
        (standardised, "its weight is also read by 0, which may count on the format"),
    ):
        done = check_pass(ChannelsLast(), model, (image(),))
        assert done.changes == ()
        assert {text for _, text in sentences_of(done)} == {reason}
    assert check_pass(ChannelsLast(), normed, (image(),)).changes == ()


def test_what_is_in_the_format_already_is_left_alone() -> None:
    model = net_2d().to(memory_format=torch.channels_last)
    done = check_pass(ChannelsLast(), model, (image(2, 3, 12, 12),))
    assert (done.changes, done.skips) == ((), ())
    pointwise = image_net(nn.Conv2d(3, 4, 1))
    assert check_pass(ChannelsLast(), pointwise, (image(),)).changes == ()


KEPT = "kept in contiguous format"
DEAR = "its weight is large beside its maps: packing that anew at every call would cost more than channels_last saves"


def narrowing() -> nn.Module:
    """Large maps and small weights first, small maps and large weights at the end."""
    return image_net(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(8), nn.Conv2d(16, 64, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 32, 1),
    )  # fmt: skip


def formats_in(model: nn.Module, x: Tensor) -> list[bool]:
    """Of each convolution's output, whether it is contiguous."""
    seen: list[bool] = []
    hooks = [
        layer.register_forward_hook(lambda module, args, output: seen.append(output.is_contiguous()))
        for layer in model.modules()
        if isinstance(layer, nn.Conv2d)
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return seen


def test_large_weights_on_small_maps_stay_contiguous() -> None:
    x = image(2, 3, 34, 34)
    done = check_pass(ChannelsLast(), narrowing(), (x,))
    assert [(change.where, change.what) for change in done.changes] == [
        ("0", "weight in channels_last"), ("3", KEPT), ("6", KEPT), ("", "outputs in the memory format of the original"),
    ]  # fmt: skip
    assert done.skips == ()
    fast = optimize(narrowing(), ["channels-last"], example_inputs=(x,))
    assert report_of(fast).passes[0].status == "applied"
    assert formats_in(fast, x) == [False, True, True]
    assert formats_in(copy.deepcopy(fast), x) == [False, True, True]


def test_more_rows_are_worth_more() -> None:
    assert formats_in(optimize(narrowing(), ["channels-last"], example_inputs=(image(40, 3, 34, 34),)), image(40, 3, 34, 34)) == [
        False, False, False,
    ]  # fmt: skip


def test_weights_that_are_all_large_are_left_alone() -> None:
    model = image_net(nn.Conv2d(16, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 1))
    done = check_pass(ChannelsLast(), model, (image(2, 16, 4, 4),))
    assert done.changes == ()
    assert [(skip.where, skip.reason) for skip in done.skips] == [("0", DEAR), ("2", DEAR)]


def test_another_device_has_no_such_rule() -> None:
    program, context = captured(narrowing(), (image(2, 3, 34, 34),))
    done = ChannelsLast().run(program, dataclasses.replace(context, device=torch.device("cuda")))
    assert [change.where for change in done.changes] == ["0", "3", ""]


@pytest.mark.parametrize("order", [*itertools.permutations(("fold-conv-bias", "fold-conv-bn", "channels-last"))])
def test_in_every_order_with_folding(order: tuple[str, ...]) -> None:
    x, model = image(2, 3, 34, 34), narrowing()
    model[3] = enliven(nn.Conv2d(16, 64, 3))
    fast = optimize(model, order, example_inputs=(x,))
    assert [record.status for record in report_of(fast).passes].count("rolled-back") == 0
    assert "applied" in [record.status for record in report_of(fast).passes if record.name != "channels-last"]
    assert is_kept_contiguous(fast[3])
    assert fast[4].running_mean is None, "the BatchNorm is folded"
    again = optimize(fast, order, example_inputs=(x,))
    assert {record.status for record in report_of(again).passes} == {"unchanged"}
    for batch in (x, x[:1], torch.cat([x, x])):
        assert (fast(batch) - model(batch)).abs().max() < 1e-5
        assert strides_of(fast(batch)) == strides_of(model(batch))


def test_the_users_own_format_is_left_alone() -> None:
    model = narrowing().to(memory_format=torch.channels_last)
    assert check_pass(ChannelsLast(), model, (image(2, 3, 34, 34),)).changes == ()


def test_the_formats_are_the_cheapest() -> None:
    """Against all ways there are."""
    draw = random.Random(0)
    for _ in range(200):
        costs = [
            _Costs(
                math.inf if (fixed := draw.random()) < 0.05 else draw.randint(0, 9),
                math.inf if fixed > 0.9 else draw.randint(0, 9),
                draw.randint(0, 5),
            )
            for _ in range(draw.randint(1, 7))
        ]
        cheapest = min(_total(costs, formats) for formats in itertools.product((False, True), repeat=len(costs)))
        assert _total(costs, _cheapest_formats(costs)) == cheapest
    assert _cheapest_formats([]) == []


def _total(costs: list[_Costs], formats: Any) -> float:
    # The input of the whole comes in contiguous format.
    changes = sum(cost.change for cost, old, new in zip(costs, (False, *formats), formats, strict=False) if old != new)
    return changes + sum(
        cost.channels_last if is_last else cost.contiguous for cost, is_last in zip(costs, formats, strict=True)
    )
