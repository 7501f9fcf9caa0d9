"""channels-last in inference: the graph gets converted weights, the outputs keep their strides."""

import copy
import dataclasses
import itertools
import math
import pickle
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folding_models import Direct, Pair, StandardisedConv, image
from graph_values import values_in
from laid_out import laid_out
from operations import computed
from pass_contract import captured, check_pass
from tiny_models import Net, enliven
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.utils import _pytree as pytree

from optimizer import optimize, report_of
from passes import ChannelsLast, Example, PassResult
from passes.channels_last import Costs, cheapest_formats
from passes.graph.backend import GRAPH_CALL, compilation_of
from passes.graph.captured import example_of, name_of
from passes.graph.layouts import CONTIGUOUS, EITHER, LAST, is_channels_last, layout_of
from passes.graph.layouts import laid_out as laid_out_example


class Many(Pair):
    """Outputs of every kind."""

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return {
            "map": y,
            "rest": (y.relu(), [y.mean((2, 3)), None, 3]),
            "last": x.to(memory_format=torch.channels_last),
        }


class Written(Pair):
    """Writes to a map after something else has got a view of it."""

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        rows = y.view(y.shape[0], -1)
        y.mul_(2)
        y[:, 0] = 1
        y += 1
        return rows.sum(1), self.after(y)

    def more(self) -> None:
        self.after = nn.Conv2d(4, 3, 1)


CONV = {"conv": "nn.Conv2d(3, 4, 3, padding=1)"}


def of(forward: str) -> Any:
    """Make a model that returns this of its convolution and its input."""
    return Example(forward, (2, 3, 8, 8), CONV).module


# Outputs with permuted dims, as image models return for tokens.
TOKENS = of("((y := conv(x)).flatten(2).transpose(1, 2), y.permute(0, 2, 3, 1), y.permute(1, 0, 2, 3))")
# Two values in one memory.
ALIASED = of("((y := conv(x).relu()), y[:, 1:])")


def image_net(*layers: nn.Module) -> nn.Module:
    return enliven(nn.Sequential(*layers)).eval()


def net_2d() -> nn.Module:
    return image_net(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 8, 3, groups=8),
        nn.Conv2d(8, 4, 1), nn.MaxPool2d(2), nn.ConvTranspose2d(4, 3, 2, stride=2),
    )  # fmt: skip


def strides_of(outputs: Any) -> list[Any]:
    return [leaf.stride() if isinstance(leaf, Tensor) else leaf for leaf in pytree.tree_leaves(outputs)]


def formats_in(fast: nn.Module, *args: Any, **kwargs: Any) -> list[tuple[str, str]]:
    """The path of each convolution in the graph, and the format of its output."""
    return [
        (graph.path_of(node), layout_of(value) or "")
        for graph, node, value in values_in(fast, *args, **kwargs)
        if name_of(node).startswith("conv")
    ]


MODELS: list[Any] = [
    (net_2d, image(2, 3, 12, 12), ["0", "3", "4", "5", "7"]),
    (
        lambda: image_net(nn.Conv3d(3, 4, 3), nn.ReLU(), nn.ConvTranspose3d(4, 2, 2)),
        image(2, 3, 5, 6, 7),
        ["0", "2"],
    ),
    (lambda: image_net(nn.ConvTranspose2d(3, 4, 3, output_padding=1, stride=2)), image(2, 3, 6, 6), ["0"]),
    (lambda: image_net(nn.Conv3d(1, 4, 3), nn.Conv3d(4, 4, 2)), image(2, 1, 9, 9, 9), ["0", "1"]),
    (lambda: Many().eval(), image(), ["conv"]),
    (lambda: Direct().eval(), image(), ["conv (conv2d)"]),
    (TOKENS, image(1, 3, 8, 8), ["conv"]),
    # It fails with an output of the convolution in another memory format, and the next one returns other values.
    (of("conv(x).view(x.shape[0], -1)"), image(), ["conv"]),
    (of("torch.as_strided(y := conv(x), (y.shape[0], y[0].numel()), (y[0].numel(), 1))"), image(), ["conv"]),
    (ALIASED, image(), ["conv"]),
    (lambda: Written().eval(), image(), ["conv", "after"]),
    # It asks for strides, returns every second channel, and draws numbers for a map.
    (
        of("((y := conv(x)).stride(), y[:, ::2], y.is_contiguous(), torch.empty_like(y).bernoulli_(0.5))"),
        image(),
        ["conv"],
    ),
    (of("F.dropout(y := conv(x), 0.5, training=True) + torch.rand_like(y)"), image(), ["conv"]),
    (lambda: image_net(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2)), image(), ["0"]),
]


def changes_of(fast: Any) -> list[str]:
    return [change.where for change in report_of(fast).passes[-1].changes]


def done_on(model: nn.Module, *args: Any) -> PassResult:
    """Run the pass without comparing the outputs."""
    tree, context = captured(model, args)
    return ChannelsLast().run(tree, context)


@pytest.mark.parametrize("make", [Many, Written])
def test_keeps_the_contract(make: Any) -> None:
    assert check_pass(ChannelsLast(), make().eval(), (image(2, 3, 12, 12),)).changes


@pytest.mark.parametrize(("make", "x", "changed"), MODELS)
def test_outputs_are_in_the_format_of_the_original(make: Any, x: Tensor, changed: list[str]) -> None:
    model = make()
    fast = optimize(model, ["channels-last"], example_inputs=(x,))
    assert report_of(fast).passes[0].status == "applied", str(report_of(fast))
    assert changes_of(fast) == changed
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert fast.state_dict(keep_vars=True)[name].stride() == tensor.stride()
    for batch in (x, x[:1], torch.cat([x, x])):
        torch.manual_seed(0)
        got = fast(batch)
        torch.manual_seed(0)
        wanted = model(batch)
        assert strides_of(got) == strides_of(wanted)
        for mine, theirs in zip(pytree.tree_leaves(got), pytree.tree_leaves(wanted), strict=True):
            if isinstance(theirs, Tensor):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    # The graph knows the strides of its values: passes after this one go by them.
    for graph, node, value in values_in(fast, x):
        if isinstance(example_of(node), Tensor):
            known = laid_out_example(node)
            assert known is not None
            assert (known.shape, known.stride()) == (value.shape, value.stride()), node.format_node()
        if name_of(node).startswith("conv"):
            # A batch of one channel or pixel is in both formats.
            assert layout_of(value) in (LAST, EITHER), graph.path_of(node)


def test_outputs_that_share_memory_still_do() -> None:
    fast = optimize(ALIASED(), ["channels-last"], example_inputs=(image(),))
    whole, part = fast(image())
    whole.zero_()
    assert not part.any()


def test_a_map_is_copied_only_where_its_strides_show() -> None:
    """Operations in place keep the format."""
    fast = optimize(Written().eval(), ["channels-last"], example_inputs=(image(),))
    assert formats_in(fast, image()) == [("conv", LAST), ("after", LAST)]
    copies = [graph.path_of(node) for graph, node, _ in values_in(fast, image()) if name_of(node) == "contiguous"]
    assert copies == ["conv", "after"], "the map with a view, where it is made; and the output"


def test_a_weight_that_others_read_or_that_is_computed_is_converted_too() -> None:
    """The parameter itself stays as it is."""
    tied = image_net(nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3))
    tied[1].weight = tied[0].weight

    class Flattened(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(x, self.weight) * self.weight.view(-1)[1]

    normed = image_net(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 3)))
    for model in (tied, image_net(Flattened(3, 4, 3)), image_net(StandardisedConv(3, 4, 3)), normed):
        fast = optimize(model, ["channels-last"], example_inputs=(image(),))
        assert len(changes_of(fast)) == sum(isinstance(each, nn.Conv2d) for each in model.modules())
        assert {layout for _, layout in formats_in(fast, image())} == {LAST}


def test_a_weight_that_depends_on_the_input_is_not() -> None:
    model = of("F.conv2d(conv(x), conv.weight.mean(1, keepdim=True) * x.mean(), groups=4)")()
    (record,) = report_of(optimize(model, ["channels-last"], example_inputs=(image(),))).passes
    assert [change.where for change in record.changes] == ["conv"]
    assert [skip.where for skip in record.skips] == ["the root (conv2d)"]
    assert "depends on the inputs" in record.skips[0].text


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
    fast = optimize(model, [ChannelsLast()], example_inputs=(image(2, 3, 12, 12),))
    (record,) = report_of(fast).passes
    assert [change.where for change in record.changes] == ["conv"]
    # From 2.15 on, torch leaves the layer out of its graphs.
    told = [("first", "its weight is in mkldnn's own layout")] if torch.__version__ < (2, 15) else []
    assert [(skip.where, skip.text) for skip in record.skips] == told
    assert torch.allclose(fast(image(2, 3, 12, 12)), model(image(2, 3, 12, 12)), atol=1e-5)


@pytest.mark.parametrize("make", [net_2d, lambda: narrowing()])
def test_what_is_in_the_format_already_is_left_alone(make: Any) -> None:
    done = done_on(make().to(memory_format=torch.channels_last), image(2, 3, 34, 34))
    assert (done.changes, done.skips) == ((), ())


KEPT = "kept in contiguous format"


def narrowing() -> nn.Module:
    """Large maps and small weights first, small maps and large weights at the end."""
    return image_net(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(8), nn.Conv2d(16, 64, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 32, (1, 2)),
    )  # fmt: skip


def test_large_weights_on_small_maps_stay_contiguous() -> None:
    x = image(2, 3, 34, 34)
    fast = optimize(narrowing(), ["channels-last"], example_inputs=(x,))
    (record,) = report_of(fast).passes
    assert [(change.where, change.text) for change in record.changes] == [
        ("0", "weight in channels_last"), ("3", KEPT), ("6", KEPT),
    ]  # fmt: skip
    assert (record.status, record.skips) == ("applied", ())
    assert record.remarks == (), "a change that is meant is no loss"
    for each in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert formats_in(each, x) == [("0", LAST), ("3", CONTIGUOUS), ("6", CONTIGUOUS)]


def test_more_rows_are_worth_more_and_another_device_has_no_such_rule() -> None:
    x = image(40, 3, 34, 34)
    fast = optimize(narrowing(), ["channels-last"], example_inputs=(x,))
    assert formats_in(fast, x) == [("0", LAST), ("3", LAST), ("6", LAST)]
    tree, context = captured(narrowing(), (image(2, 3, 34, 34),))
    done = ChannelsLast().run(tree, dataclasses.replace(context, device=torch.device("cuda")))
    assert [change.where for change in done.changes] == ["0", "3", "6"]


def test_weights_that_are_all_large_are_left_alone() -> None:
    model = image_net(nn.Conv2d(16, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 2))
    done = done_on(model, image(2, 16, 4, 4))
    assert done.changes == ()
    assert [skip.where for skip in done.skips] == ["0", "2"]
    assert {skip.reason.split(":")[0] for skip in done.skips} == {"its weight is large compared with its maps"}


def test_a_small_weight_between_large_ones_is_left_alone_because_of_these() -> None:
    model = image_net(
        nn.Conv2d(64, 256, 3, padding=1), nn.Conv2d(256, 2, 1), nn.Conv2d(2, 512, 3), nn.Conv2d(512, 512, 3)
    )
    (done,) = optimize(model, [ChannelsLast()], example_inputs=(image(2, 64, 8, 8),)).report.passes
    reasons = {skip.where: skip.text for skip in done.skips}
    assert reasons["0"].startswith("its weight is large compared with its maps: ")
    assert reasons["1"].startswith("the convolutions around it are faster in contiguous format, ")


def test_weights_that_no_kernel_packs_are_worth_it_however_large() -> None:
    """torch uses kernels that don't pack the weight for small inputs with one row, and for float64."""
    model = image_net(nn.Conv2d(16, 64, 3, padding="same"), nn.ReLU(), nn.ConvTranspose2d(64, 64, 2))
    one, more = image(1, 16, 4, 4), image(2, 16, 4, 4)
    assert [change.where for change in done_on(model, one).changes] == ["0", "2"]
    assert done_on(model, more).changes == ()
    assert [change.where for change in done_on(model.double(), more.double()).changes] == ["0", "2"]


def test_kernels_that_return_contiguous_maps_get_contiguous_weights() -> None:
    model = image_net(nn.Conv3d(3, 4, 3), nn.ReLU(), nn.Conv3d(4, 4, 3)).double()
    done = done_on(model, torch.randn(2, 3, 8, 8, 8, dtype=torch.float64))
    assert done.changes == ()
    assert [skip.where for skip in done.skips] == ["0", "2"]
    assert {skip.reason for skip in done.skips} == {"its kernel returns contiguous maps for inputs in any format"}


@pytest.mark.parametrize(
    "order",
    [
        ("fold-conv-bias", "fold-conv-bn", "channels-last"),
        ("channels-last", "fold-conv-bias", "fold-conv-bn"),
    ],
)
def test_in_every_order_with_folding(order: tuple[str, ...]) -> None:
    x, model = image(2, 3, 34, 34), narrowing()
    model[3] = enliven(nn.Conv2d(16, 64, 3))
    fast = optimize(model, order, example_inputs=(x,))
    assert [record.status for record in report_of(fast).passes].count("rolled-back") == 0
    assert "applied" in [record.status for record in report_of(fast).passes if record.name != "channels-last"]
    assert formats_in(fast, x) == [("0", LAST), ("3", CONTIGUOUS), ("6", CONTIGUOUS)]
    assert computed("batch_norm", fast, x) == 0
    again = optimize(fast, order, example_inputs=(x,))
    assert {record.status for record in report_of(again).passes} == {"unchanged"}
    for batch in (x, x[:1], torch.cat([x, x])):
        assert (fast(batch) - model(batch)).abs().max() < 1e-5
        assert strides_of(fast(batch)) == strides_of(model(batch))


def test_folded_weights_exist_once() -> None:
    """The folded weight in the old format is freed as soon as the converted one is made."""
    model = image_net(nn.Conv2d(3, 256, 3, bias=False), nn.BatchNorm2d(256), nn.ReLU(), nn.Conv2d(256, 256, 3))
    fast = optimize(model, example_inputs=(image(2, 3, 40, 40),))
    assert [record.status for record in report_of(fast).passes] == ["unchanged", "applied", "applied"]
    with torch.no_grad():
        fast(image(2, 3, 40, 40))
    (program,) = compilation_of(fast.__dict__[GRAPH_CALL]).graphs
    kept = list(program.captured.derived._values.values())
    assert sorted(value.numel() for value in kept) == [256, 256 * 27, 256 * 256 * 9]
    assert all(layout_of(value) == LAST for value in kept if value.dim() == 4)


def test_the_formats_are_the_cheapest() -> None:
    """Compare with an exhaustive search."""
    draw = random.Random(0)
    for _ in range(200):
        costs = [
            Costs(
                math.inf if (fixed := draw.random()) < 0.05 else draw.randint(0, 9),
                math.inf if fixed > 0.9 else draw.randint(0, 9),
                draw.randint(0, 5),
            )
            for _ in range(draw.randint(1, 7))
        ]
        cheapest = min(_total(costs, formats) for formats in itertools.product((False, True), repeat=len(costs)))
        assert _total(costs, cheapest_formats(costs)) == cheapest
    assert cheapest_formats([]) == []


def _total(costs: list[Costs], formats: Any) -> float:
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
        scaled = pixels if how in ("direct", "between") else (pixels - 0.5) / 0.25
        y = self.a(scaled).relu()
        if how == "between":
            pixels.mul_(2)
        y = y + self.b(scaled)
        if mask is not None:
            y = y * mask
        return {"y": y, "rest": (pixels[:, :1] if how == "looked at" else pixels if how == "given back" else None,)}


@pytest.mark.parametrize("how", ["", "direct", "written", "given back", "looked at"])
def test_a_map_that_several_convolutions_read_stays_as_it_is(how: str) -> None:
    x, mask = image(), (torch.rand(2, 1, 8, 8) > 0.5).float()
    model = enliven(Branches(how)).eval()
    fast = optimize(model, ["channels-last"], example_inputs=(x, mask))
    (record,) = report_of(fast).passes
    assert record.status == "applied", str(report_of(fast))
    assert [change.text for change in record.changes] == ["weight in channels_last"] * 2
    for twin in (fast, copy.deepcopy(fast)):
        for kwargs in ({"pixels": x, "mask": mask}, {"pixels": x[:1], "mask": None}):
            mine, theirs = ({**kwargs, "pixels": kwargs["pixels"].clone()} for _ in range(2))
            got, wanted = twin(**mine), model(**theirs)
            assert torch.allclose(got["y"], wanted["y"], atol=1e-4)
            assert strides_of(got) == strides_of(wanted)
            assert torch.equal(mine["pixels"], theirs["pixels"])
            assert how != "given back" or got["rest"][0] is mine["pixels"]


def test_inputs_that_are_no_maps_stay_as_they_are() -> None:
    class Mixed(Branches):
        def forward(self, ids: Tensor, volume: Tensor, *, maps: list[Tensor]) -> Any:
            y = self.a(maps[0]) + self.b(maps[0])
            return y * ids.float().mean() + volume.mean(), volume.flatten(2), (ids, y)

    model = enliven(Mixed()).eval()
    x, ids, volume = image(), torch.arange(6).view(2, 3), torch.randn(2, 3, 2, 2, 2)
    fast = optimize(model, ["channels-last"], example_inputs=(ids, volume), example_kwargs={"maps": [x]})
    changes = [change.text for change in report_of(fast).passes[0].changes]
    assert changes == ["weight in channels_last"] * 2
    assert strides_of(fast(ids, volume, maps=[x])) == strides_of(model(ids, volume, maps=[x]))


def test_an_image_of_one_channel_is_in_both_formats_and_its_maps_are_not() -> None:
    """If only the later convolutions were in channels_last, the second one would have to convert its input."""
    model = image_net(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    x = torch.randn(2, 1, 9, 9)
    for order in (["channels-last"], ["fold-conv-bn", "channels-last"]):
        fast = optimize(model, order, example_inputs=(x,))
        assert torch.allclose(fast(x), model(x), atol=1e-5)
        assert formats_in(fast, x) == [("0", LAST), ("3", LAST)]
        assert {record.status for record in report_of(fast).passes} == {"applied"}


def test_a_weight_whose_values_lie_alike_in_both_formats_gets_the_strides_and_stays_where_it_is() -> None:
    """A convolution uses the format of its weight's strides, so it converts maps that lost the format."""
    model = image_net(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, groups=4))
    fast = optimize(model, ["channels-last"], example_inputs=(image(),))
    with torch.no_grad():
        fast(image())
    (program,) = compilation_of(fast.__dict__[GRAPH_CALL]).graphs
    derived = list(program.captured.derived._values.values())
    assert [is_channels_last(value) for value in derived] == [True, True]
    assert {value.data_ptr() for value in derived} == {model[0].weight.data_ptr(), model[1].weight.data_ptr()}


# Where the format is lost ---------------------------------------------------------------------------------------------


class Lossy(nn.Module):
    """Loses channels_last twice, once before a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.ReLU())
        self.conv = nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.stem(x)).softmax(1) * 2


def test_the_report_names_where_the_format_is_lost() -> None:
    model = enliven(Lossy()).eval()
    fast = optimize(model, example_inputs=(image(),))
    text = "channels_last is lost here for 576 elements: conv converts 576 elements back"
    assert f"channels-last: stem.1 (instance_norm): {text}" in str(fast.report)
    (found,) = [record for record in fast.report.to_json()["passes"] if record["name"] == "channels-last"]
    assert found["remarks"] == [{"where": "stem.1 (instance_norm)", "text": text}]


def test_a_view_that_needs_the_old_format_is_named() -> None:
    def shuffled(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        return m.after(y.view(len(y), 2, 2, *y.shape[2:]).transpose(1, 2).reshape(y.shape))

    model = enliven(Net(shuffled, conv=nn.Conv2d(3, 4, 3, padding=1), after=nn.Conv2d(4, 3, 3))).eval()
    (remark,) = report_of(optimize(model, ["channels-last"], example_inputs=(image(),))).passes[0].remarks
    assert remark.where == "the root (reshape)"
    assert "after converts 512 elements back" in remark.text


def test_under_autocast() -> None:
    """The inputs and the weights of the convolutions then have different dtypes."""

    def cast(m: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return m.head(m.conv(x).relu()).float()

    model = enliven(Net(cast, conv=nn.Conv2d(3, 4, 3, padding=1), head=nn.Conv2d(4, 2, 3))).eval()
    fast = optimize(model, example_inputs=(image(),))
    *_, record = report_of(fast).passes
    assert (record.name, record.status) == ("channels-last", "applied")
    assert {change.where for change in record.changes} >= {"conv", "head"}
    assert report_of(fast).verified
    torch.testing.assert_close(fast(image()), model(image()), rtol=0.02, atol=0.02)


def test_a_forward_in_several_graphs_gets_maps_in_its_own_format_between_them() -> None:
    def broken(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        torch._dynamo.graph_break()
        return m.after(y.view(len(y), -1, *y.shape[2:]))

    model = enliven(Net(broken, conv=nn.Conv2d(3, 4, 3, padding=1), after=nn.Conv2d(4, 3, 3))).eval()
    fast = optimize(model, ["channels-last"], example_inputs=(image(),))
    assert torch.allclose(fast(image()), model(image()), atol=1e-5)
    assert strides_of(fast(image())) == strides_of(model(image()))


# The formats of tensors -------------------------------------------------------------------------------------------------

LAST_2D, LAST_3D = torch.channels_last, torch.channels_last_3d


@pytest.mark.parametrize("sizes", [(2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (1, 1, 4, 5), (2, 3, 1, 5)])
def test_the_format_of_a_map_is_what_torch_takes_it_for(sizes: tuple[int, ...]) -> None:
    for order in itertools.permutations(range(4)):
        back = [order.index(dim) for dim in range(4)]
        tensor = torch.randn([sizes[dim] for dim in order]).permute(back)
        assert tensor.shape == sizes
        assert is_channels_last(tensor) is (suggest_memory_format(tensor) is LAST_2D)
        assert nn.functional.conv2d(tensor, torch.ones(4, sizes[1], 1, 1)).is_contiguous() or is_channels_last(tensor)
        found = layout_of(tensor)
        if tensor.is_contiguous() and tensor.is_contiguous(memory_format=LAST_2D):
            assert found == EITHER
        else:
            wanted = LAST if suggest_memory_format(tensor) is LAST_2D and not tensor.is_contiguous() else CONTIGUOUS
            assert found == wanted, (sizes, order)


def test_formats_of_other_values() -> None:
    last = torch.randn(2, 8, 4, 4).contiguous(memory_format=LAST_2D)
    assert layout_of(last) == layout_of(last[:, ::2]) == layout_of(last[:, :, :2]) == LAST
    assert layout_of(torch.randn(2, 3, 4, 5, 6).contiguous(memory_format=LAST_3D)) == LAST
    assert layout_of(torch.randn(2, 3, 4, 5, 6)) == layout_of(torch.randn(1, 1, 4, 5).expand(2, 3, 4, 5)) == CONTIGUOUS
    for other in (None, 3, [last], torch.randn(3), torch.randn(2, 3, 4), torch.randn(2, 3, 4, 4).to_sparse()):
        assert layout_of(other) is None
