"""channels-last in inference: the weights are converted, the outputs keep their memory format."""

import copy
import dataclasses
import itertools
import math
import pickle
import random
from typing import Any

import pytest
import torch
from folding_models import Direct, Pair, StandardisedConv, image
from laid_out import laid_out
from operations import computed
from pass_contract import captured, check_pass, check_same, sentences_of, tree_of
from tiny_models import enliven
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from optimizer import optimize, report_of
from passes import ChannelsLast
from passes.channels_last import _cheapest_formats, _Costs
from passes.memory_format.forwards import is_kept_contiguous
from passes.memory_format.watch import LayoutWatch
from passes.program.memory_formats import is_channels_last


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
    """Returns outputs with permuted dims, as image models do to make tokens."""

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return y.flatten(2).transpose(1, 2), y.permute(0, 2, 3, 1), y.permute(1, 0, 2, 3)


class Viewed(Pair):
    """Depends on the memory format of a convolution's output."""

    def forward(self, x: Tensor) -> Any:
        return self.conv(x).view(x.shape[0], -1)


class Strided(Pair):
    """Returns other values in another memory format, without an error."""

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return torch.as_strided(y, (y.shape[0], y[0].numel()), (y[0].numel(), 1))


class Flattened(nn.Conv2d):
    """Reads its weight in a way that depends on the memory format."""

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
        (net_2d, image(2, 3, 12, 12), ["0", "3", "4", "5", "7"]),
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
    tree, context = captured(net_2d())
    done = ChannelsLast().run(tree, context)
    assert done.changes == ()
    assert {text for _, text in sentences_of(done)} == {
        "only a run can show that no view depends on the old format: add example inputs"
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
        (own, "its weight is also read by 0, which may depend on its memory format"),
        (standardised, "its weight is also read by 0, which may depend on its memory format"),
    ):
        done = check_pass(ChannelsLast(), model, (image(),))
        assert done.changes == ()
        assert {text for _, text in sentences_of(done)} == {reason}
    assert check_pass(ChannelsLast(), normed, (image(),)).changes == ()


class FromMkldnn(Pair):
    """Its first convolution computes in mkldnn's own layout, like the modules of `torch.utils.mkldnn`."""

    def more(self) -> None:
        self.first = nn.Conv2d(3, 3, 3)

    def forward(self, x: Tensor) -> Any:
        return self.bn(self.conv(self.first(x.to_mkldnn()).to_dense()))


def test_a_weight_in_mkldnns_own_layout_is_left_alone() -> None:
    model = FromMkldnn().eval()
    for name, value in list(model.first.named_parameters()):
        setattr(model.first, name, nn.Parameter(laid_out("mkldnn", value.detach())))
    (record,) = report_of(optimize(model, [ChannelsLast()], example_inputs=(image(2, 3, 12, 12),))).passes
    assert [change.where for change in record.changes if change.where] == ["conv"]
    assert [(skip.where, skip.text) for skip in record.skips] == [("first", "its weight is in mkldnn's own layout")]


def test_what_is_in_the_format_already_is_left_alone() -> None:
    model = net_2d().to(memory_format=torch.channels_last)
    done = check_pass(ChannelsLast(), model, (image(2, 3, 12, 12),))
    assert (done.changes, done.skips) == ((), ())


def test_a_weight_whose_values_lie_alike_in_both_formats_gets_the_strides_and_stays_where_it_is() -> None:
    """A convolution uses the format of its weight's strides, so it converts maps that lost the format."""
    model = image_net(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, groups=4))
    fast = optimize(model, ["channels-last"], example_inputs=(image(),))
    for name in ("0", "1"):
        old, new = model.get_submodule(name).weight, fast.get_submodule(name).weight
        assert (is_channels_last(old), is_channels_last(new)) == (False, True)
        assert old.data_ptr() == new.data_ptr()


KEPT = "kept in contiguous format"
DEAR = "its weight is large compared with its maps: repacking it at every call would cost more than channels_last saves"


def narrowing() -> nn.Module:
    """Large maps and small weights first, small maps and large weights at the end."""
    return image_net(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(8), nn.Conv2d(16, 64, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 32, (1, 2)),
    )  # fmt: skip


def formats_in(model: nn.Module, x: Tensor) -> list[bool]:
    """For each convolution, whether its output is contiguous."""
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
    model = image_net(nn.Conv2d(16, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 2))
    done = check_pass(ChannelsLast(), model, (image(2, 16, 4, 4),))
    assert done.changes == ()
    assert [(skip.where, skip.reason) for skip in done.skips] == [("0", DEAR), ("2", DEAR)]


def test_weights_that_no_kernel_packs_are_worth_it_however_large() -> None:
    """torch uses kernels that don't pack the weight for small inputs with one row, and for float64."""
    model = image_net(nn.Conv2d(16, 64, 3, padding="same"), nn.ReLU(), nn.ConvTranspose2d(64, 64, 2))
    one, more = image(1, 16, 4, 4), image(2, 16, 4, 4)
    assert [change.where for change in check_pass(ChannelsLast(), model, (one,)).changes] == ["0", "2", ""]
    unbatched = ChannelsLast().run(*captured(model, (one[0],)))
    assert [change.where for change in unbatched.changes] == ["0", "2", ""]
    assert check_pass(ChannelsLast(), model, (more,)).changes == ()
    assert [change.where for change in check_pass(ChannelsLast(), model.double(), (more.double(),)).changes] == [
        "0",
        "2",
        "",
    ]


def test_another_device_has_no_such_rule() -> None:
    tree, context = captured(narrowing(), (image(2, 3, 34, 34),))
    done = ChannelsLast().run(tree, dataclasses.replace(context, device=torch.device("cuda")))
    assert [change.where for change in done.changes] == ["0", "3", "6", ""]


@pytest.mark.parametrize("order", [*itertools.permutations(("fold-conv-bias", "fold-conv-bn", "channels-last"))])
def test_in_every_order_with_folding(order: tuple[str, ...]) -> None:
    x, model = image(2, 3, 34, 34), narrowing()
    model[3] = enliven(nn.Conv2d(16, 64, 3))
    fast = optimize(model, order, example_inputs=(x,))
    assert [record.status for record in report_of(fast).passes].count("rolled-back") == 0
    assert "applied" in [record.status for record in report_of(fast).passes if record.name != "channels-last"]
    assert is_kept_contiguous(fast[3])
    assert computed("batch_norm", fast, x) == 0
    again = optimize(fast, order, example_inputs=(x,))
    assert {record.status for record in report_of(again).passes} == {"unchanged"}
    for batch in (x, x[:1], torch.cat([x, x])):
        assert (fast(batch) - model(batch)).abs().max() < 1e-5
        assert strides_of(fast(batch)) == strides_of(model(batch))


def test_the_users_own_format_is_left_alone() -> None:
    model = narrowing().to(memory_format=torch.channels_last)
    assert check_pass(ChannelsLast(), model, (image(2, 3, 34, 34),)).changes == ()


def test_the_formats_are_the_cheapest() -> None:
    """Compare with an exhaustive search."""
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
    # The input of the model is contiguous.
    changes = sum(cost.change for cost, old, new in zip(costs, (False, *formats), formats, strict=False) if old != new)
    return changes + sum(
        cost.channels_last if is_last else cost.contiguous for cost, is_last in zip(costs, formats, strict=True)
    )


# Inputs ---------------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Two convolutions read the scaled pixels; `how` says what else the forward does with the pixels."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 5, padding=2)
        self.how = how

    def forward(self, pixels: Tensor, mask: Tensor | None = None, how: str = "") -> Any:
        how = how or self.how
        if how == "written":
            pixels.mul_(2)
        if how == "padded":
            pixels = torch.nn.functional.pad(pixels, (2, 2, 2, 2))
        scaled = (pixels - 0.5) / 0.25
        y = self.a(scaled).relu() + self.b(scaled)
        if mask is not None:
            y = y * mask
        return {"y": y, "rest": (pixels[:, :1] if how == "looked at" else pixels if how == "given back" else None,)}


CONVERTED = "input pixels converted to channels_last once"


def texts_of(done: Any) -> list[str]:
    return [change.what for change in done.changes]


@pytest.mark.parametrize("how", ["", "padded"])
def test_an_input_that_several_convolutions_read_is_converted_once(how: str) -> None:
    x, mask = image(), (torch.rand(2, 1, 8, 8) > 0.5).float()
    if how == "padded":
        mask = (torch.rand(2, 1, 12, 12) > 0.5).float()
    model = enliven(Branches(how)).eval()
    done = check_pass(ChannelsLast(), model, (x, mask))
    assert texts_of(done) == [
        *["weight in channels_last"] * 2,
        CONVERTED,
        "outputs in the memory format of the original",
    ]
    fast = optimize(model, ["channels-last"], example_inputs=(x, mask))
    assert report_of(fast).passes[0].status == "applied", str(report_of(fast))
    seen: list[bool] = []
    fast.a.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].is_contiguous(memory_format=torch.channels_last))
    )
    for twin in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(optimize(model, example_inputs=(x, mask))))):
        for kwargs in ({"pixels": x, "mask": mask}, {"pixels": x[:1], "mask": None}):
            kept = x.clone()
            got, wanted = twin(**kwargs), model(**kwargs)
            assert torch.allclose(got["y"], wanted["y"], atol=1e-4)
            assert strides_of(got) == strides_of(wanted)
            assert torch.equal(x, kept)
            assert x.is_contiguous()
    assert seen
    assert all(seen)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["written", "given back", "looked at"])
def test_an_input_that_has_to_be_the_callers_own_is_not_converted(how: str) -> None:
    model = enliven(Branches(how)).eval()
    done = check_pass(ChannelsLast(), model, (image(),))
    assert CONVERTED not in texts_of(done)
    assert done.changes


def test_a_branch_that_no_run_took_gets_a_copy_and_the_caller_what_it_makes_of_it() -> None:
    model = enliven(Branches()).eval()
    fast = optimize(model, ["channels-last"], example_inputs=(image(),))
    assert CONVERTED in [change.text for change in report_of(fast).passes[0].changes]
    mine, theirs = image(), image()
    assert torch.allclose(fast(mine, how="written")["y"], model(theirs, how="written")["y"], atol=1e-4)
    assert torch.equal(mine, theirs)
    assert fast(mine, how="given back")["rest"][0] is mine


def test_an_input_that_one_convolution_reads_is_left_to_it() -> None:
    """Converting the image instead saves nothing: the convolution's input is hardly larger, or even smaller."""
    for model in (
        image_net(nn.ReLU(), nn.Conv2d(3, 4, 3)),
        image_net(nn.MaxPool2d(2), nn.Conv2d(3, 4, 3)),
        image_net(nn.ZeroPad2d(1), nn.Conv2d(3, 4, 3)),
    ):
        done = check_pass(ChannelsLast(), model, (image(2, 3, 12, 12),))
        assert len(done.changes) == 2
    enlarging = image_net(nn.Upsample(scale_factor=2), nn.Conv2d(3, 4, 3))
    assert "input input converted to channels_last once" in texts_of(check_pass(ChannelsLast(), enlarging, (image(),)))


def test_an_input_whose_format_is_lost_before_the_convolutions_is_left_to_them() -> None:
    class Normed(Branches):
        def forward(self, pixels: Tensor) -> Any:
            normed = torch.nn.functional.instance_norm(pixels)
            return self.a(normed) + self.b(normed)

    done = check_pass(ChannelsLast(), enliven(Normed()).eval(), (image(),))
    assert len(done.changes) == 3, "two weights, one output"


def test_inputs_that_are_no_maps_stay_as_they_are() -> None:
    class Mixed(Branches):
        def forward(self, ids: Tensor, volume: Tensor, *, maps: list[Tensor]) -> Any:
            y = self.a(maps[0]) + self.b(maps[0])
            return y * ids.float().mean() + volume.mean(), volume.flatten(2), (ids, y)

    model = enliven(Mixed()).eval()
    x, ids, volume = image(), torch.arange(6).view(2, 3), torch.randn(2, 3, 2, 2, 2)
    done = check_pass(ChannelsLast(), model, (ids, volume), example_kwargs={"maps": [x]})
    assert texts_of(done) == [*["weight in channels_last"] * 2, "outputs in the memory format of the original"]
    fast = optimize(model, ["channels-last"], example_inputs=(ids, volume), example_kwargs={"maps": [x]})
    assert strides_of(fast(ids, volume, maps=[x])) == strides_of(model(ids, volume, maps=[x]))


@pytest.mark.parametrize(
    ("model", "x", "changed"),
    [
        (
            lambda: nn.Sequential(
                nn.Conv3d(3, 4, 3), nn.BatchNorm3d(4), nn.ReLU(), nn.ConvTranspose3d(4, 2, 2, stride=2)
            ),
            torch.randn(2, 3, 5, 6, 7),
            ["0", "3"],
        ),
        (
            lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3, output_padding=1, stride=2), nn.ConvTranspose2d(4, 2, 3)),
            torch.randn(2, 3, 6, 6),
            ["0", "1"],
        ),
        (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU()), torch.randn(2, 3, 9), []),
        (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)), torch.randn(2, 1, 9, 9), ["0", "1"]),
        (lambda: nn.Sequential(nn.Conv3d(1, 4, 3), nn.Conv3d(4, 4, 1)), torch.randn(2, 1, 9, 9, 9), ["0", "1"]),
    ],
)
def test_kinds_of_convolutions(model: Any, x: Tensor, changed: list[str]) -> None:
    made = enliven(model()).eval()
    done = check_pass(ChannelsLast(), made, (x,))
    assert [change.where for change in done.changes if change.where] == changed
    fast = optimize(made, example_inputs=(x,))
    assert report_of(fast).verified
    assert strides_of(fast(x)) == strides_of(made(x))


def test_an_image_of_one_channel_is_in_both_formats_and_its_maps_are_not() -> None:
    """If only the later convolutions were in channels_last, the second one would have to convert its input."""
    model = image_net(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    x = torch.randn(2, 1, 9, 9)
    for order in (["channels-last"], ["fold-conv-bn", "channels-last"], ["channels-last", "fold-conv-bn"]):
        fast = optimize(model, order, example_inputs=(x,))
        watch = LayoutWatch(fast)
        with torch.no_grad(), watch:
            wanted, got = model(x), fast(x)
        assert torch.allclose(got, wanted, atol=1e-5)
        assert watch.layouts.moved == got.numel(), "the output alone is brought back"
        assert {record.status for record in report_of(fast).passes} == {"applied"}


# Where the format is lost ---------------------------------------------------------------------------------------------


class Lossy(nn.Module):
    """Loses channels_last twice, once before a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.ReLU())
        self.conv = nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.stem(x)).softmax(1) * 2


def remarks_of(model: nn.Module, x: Tensor, passes: list[str] | None = None) -> list[tuple[str, str]]:
    records = report_of(optimize(model, passes, example_inputs=(x,))).passes
    return [(remark.where, remark.text) for record in records for remark in record.remarks]


def test_the_report_names_where_the_format_is_lost() -> None:
    model = enliven(Lossy()).eval()
    assert remarks_of(model, image()) == [
        ("stem.1 (instance_norm)", "channels_last is lost here for 576 elements: conv converts 576 elements back"),
        (
            "the root (softmax)",
            "channels_last is lost here for 128 elements: the operations after it run in contiguous format",
        ),
    ]
    fast = optimize(model, example_inputs=(image(),))
    assert "channels-last: stem.1 (instance_norm): channels_last is lost here" in str(fast.report)
    (found,) = [record for record in fast.report.to_json()["passes"] if record["name"] == "channels-last"]
    assert [set(remark) for remark in found["remarks"]] == [{"where", "text"}] * 2


def test_nothing_is_lost_in_a_plain_network() -> None:
    assert remarks_of(net_2d(), image(2, 3, 12, 12)) == []
    assert remarks_of(narrowing(), image(2, 3, 34, 34)) == [], "a change that is meant is no loss"


def test_no_run_is_watched_where_nothing_is_changed() -> None:
    model = enliven(Lossy()).eval().to(memory_format=torch.channels_last)
    tree, context = captured(model, (image(),))

    def run_inside(watch: Any, number: int = 0) -> str | None:
        raise AssertionError("there is nothing to look at")

    done = ChannelsLast().run(tree, dataclasses.replace(context, run_inside=run_inside))
    assert (done.changes, done.remarks) == ((), ())


def test_without_a_run_nothing_is_said() -> None:
    tree, context = captured(enliven(Lossy()).eval(), (image(),))
    done = ChannelsLast().run(tree, dataclasses.replace(context, run_inside=None))
    assert len(done.changes) == 3
    assert done.remarks == ()


def test_a_pass_that_is_rolled_back_says_nothing_of_formats() -> None:
    assert remarks_of(Viewed().eval(), image(), ["channels-last"]) == []


def test_a_forward_that_bears_no_watch_is_optimized_and_the_report_says_so() -> None:
    class Hostile(Pair):
        def forward(self, x: Tensor) -> Tensor:
            if any(type(mode) is LayoutWatch for mode in torch.overrides._get_current_function_mode_stack()):
                raise ValueError("not under watch\nnever")
            return self.conv(x).relu()

    model = enliven(Hostile()).eval()
    fast = optimize(model, ["channels-last"], example_inputs=(image(),))
    assert report_of(fast).passes[0].status == "applied"
    assert remarks_of(model, image(), ["channels-last"]) == [
        ("", "no run shows where channels_last is lost (ValueError: not under watch)")
    ]


def test_the_watched_run_leaves_no_trace() -> None:
    class Counting(Lossy):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.seen: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(len(x))
            return super().forward(x) + torch.rand(()) * 0

    model = enliven(Counting()).eval()
    tree, context = captured(model, (image(),))
    before, state, draws = tree_of(tree.root), copy.deepcopy(tree.root.state_dict()), torch.get_rng_state()
    done = ChannelsLast().run(tree, context)
    assert done.remarks
    done.rewriter.roll_back()
    check_same(before, tree_of(tree.root), "the watched run left a difference")
    assert torch.equal(state["calls"], tree.root.calls)
    assert torch.equal(draws, torch.get_rng_state())


def test_under_autocast() -> None:
    """The inputs and the weights of the convolutions then have different dtypes."""

    class Cast(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Conv2d(4, 2, 3)

        @torch.autocast("cpu", torch.bfloat16)
        def forward(self, x: Tensor) -> Any:
            return self.head(self.conv(x).relu()).float()

    model = enliven(Cast()).eval()
    fast = optimize(model, example_inputs=(image(),))
    *_, record = report_of(fast).passes
    assert (record.name, record.status) == ("channels-last", "applied")
    assert {change.where for change in record.changes} >= {"conv", "head"}
    assert report_of(fast).verified
    torch.testing.assert_close(fast(image()), model(image()), rtol=0.02, atol=0.02)
