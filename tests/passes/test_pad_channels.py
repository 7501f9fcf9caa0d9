"""Padding of layers to multiples of 8 channels: only where that can pay, with the same outputs."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_values import values_in
from pass_contract import captured, changes, check_pass, skips
from real_models import REAL_MODELS
from tiny_models import Net, enliven
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from optimizer import check_parity, export, optimize, report_of
from passes import PadChannels, PassResult
from passes.errors import PassOptionError
from passes.graph.captured import name_of
from passes.graph.layouts import is_channels_last
from passes.registry import parse_pass

ANYWHERE = PadChannels(force=True)
PRODUCTS = {
    *("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def captured_anew() -> Iterator[None]:
    """Capture the models of each test anew: torch keeps a limited number of graphs per forward, over all models."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def operations(model: nn.Module, *args: Any) -> list[tuple[str, Any]]:
    """The operations of the second call, each with the shapes of its inputs."""
    with torch.no_grad():
        model(*args)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as found:
            model(*args)
    return [(event.name.removeprefix("aten::"), event.input_shapes) for event in found.events()]


def weights_of(model: nn.Module, *args: Any) -> list[tuple[int, ...]]:
    """The shapes of the weights that linear layers and convolutions compute with."""
    return [tuple(shapes[1]) for name, shapes in operations(model, *args) if name in PRODUCTS]


def padded(model: nn.Module, *args: Tensor) -> nn.Module:
    """The padded result; the report shows that it was compared with the model."""
    fast = optimize(model.eval(), [ANYWHERE], example_inputs=args)
    assert report_of(fast).passes[0].status == "applied", report_of(fast)
    assert report_of(fast).verified
    return fast


def whole_numbers(model: nn.Module) -> nn.Module:
    """Set all parameters to small integers, whose sums are exact in any order, and return the model."""
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(0, 2, parameter.shape) * 2 - 1
            parameter.copy_((signs * torch.randint(1, 4, parameter.shape)).to(parameter))
    return model


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 3), (4, 5), (8, 8)),
    "linear of rows": (lambda: nn.Linear(5, 3), (4, 2, 6, 5), (8, 8)),
    "inputs alone": (lambda: nn.Linear(5, 16), (4, 5), (16, 8)),
    "outputs alone": (lambda: nn.Linear(16, 3), (4, 16), (8, 16)),
    "without a bias": (lambda: nn.Linear(9, 17, bias=False), (4, 9), (24, 16)),
    "one": (lambda: nn.Linear(1, 1), (4, 1), (8, 8)),
    "conv1d": (lambda: nn.Conv1d(3, 5, 3, padding=1), (4, 3, 9), (8, 8, 3)),
    "conv2d": (lambda: nn.Conv2d(3, 5, 3, stride=2, dilation=2), (4, 3, 9, 11), (8, 8, 3, 3)),
    "same": (lambda: nn.Conv2d(3, 5, 3, padding="same"), (4, 3, 6, 5), (8, 8, 3, 3)),
    "conv3d": (lambda: nn.Conv3d(3, 5, (1, 2, 3), bias=False), (4, 3, 4, 5, 6), (8, 8, 1, 2, 3)),
    "circular": (lambda: nn.Conv2d(3, 5, 3, padding=1, padding_mode="circular"), (4, 3, 6, 6), (8, 8, 3, 3)),
    "reflect": (lambda: nn.Conv1d(3, 16, 3, padding=2, padding_mode="reflect"), (4, 3, 6), (16, 8, 3)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(3, 5, 2, stride=2), (4, 3, 6), (8, 8, 2)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(3, 16, 3, stride=2, output_padding=1), (4, 3, 6, 5), (8, 16, 3, 3)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(8, 5, 2, dilation=2), (4, 8, 3, 4, 5), (8, 8, 2, 2, 2)),
}


# Results --------------------------------------------------------------------------------------------------------------


def side_by_side(*names: str, between: type[nn.Module] = nn.Identity) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model that calls each of these layers on an input of its own, and the inputs; all are whole numbers."""
    model = Net(
        lambda m, *xs: [block(x) for block, x in zip(m.blocks, xs, strict=True)],
        blocks=nn.ModuleList(nn.Sequential(between(), LAYERS[name][0](), between()) for name in names),
    )
    return whole_numbers(model).eval(), tuple(torch.randint(-3, 4, LAYERS[name][1]).float() for name in names)


def weights_in(names: Any) -> list[tuple[int, ...]]:
    return [LAYERS[name][2] for name in names]


def test_every_kind_of_layer_computes_in_multiples_of_eight() -> None:
    model, xs = side_by_side(*LAYERS, between=nn.Tanh)
    fast = padded(enliven(model), *xs)
    places = [change.where for change in report_of(fast).passes[0].changes]
    assert places == [f"blocks.{number}.1" for number in range(len(LAYERS))]
    assert weights_of(fast, *xs) == weights_in(LAYERS)
    assert [value.stride() for value in fast(*xs)] == [value.stride() for value in model(*xs)]
    assert fast.state_dict().keys() == model.state_dict().keys()
    assert all(mine is not None and mine.shape == model.get_parameter(n).shape for n, mine in fast.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_sums_are_the_same_to_the_bit(dtype: torch.dtype) -> None:
    model, xs = side_by_side(*LAYERS)
    model, xs = model.to(dtype), tuple(x.to(dtype) for x in xs)
    fast = padded(model, *xs)
    for size in (1, 2, 4):
        few = [x[:size] for x in xs]
        assert all(map(torch.equal, fast(*few), model(*few)))


@pytest.mark.parametrize("order", list(itertools.permutations(["channels-last", ANYWHERE])))
def test_maps_in_channels_last_stay_so(order: list[Any]) -> None:
    names = "conv2d", "conv3d", "transposed 2d"
    model, xs = side_by_side(*names, between=nn.ReLU)
    # On small maps, channels_last doesn't pay.
    xs = tuple(torch.randn(*x.shape[:2], *(3 * size for size in x.shape[2:])) for x in xs)
    fast = optimize(enliven(model), order, example_inputs=xs)
    assert {record.status for record in report_of(fast).passes} == {"applied"}
    assert weights_of(fast, *xs) == weights_in(names)
    maps = [value for _, node, value in values_in(fast, *xs) if name_of(node) == "relu"]
    assert [is_channels_last(value) for value in maps[1::2]] == [True] * 3
    assert [value.stride() for value in fast(*xs)] == [value.stride() for value in model(*xs)]
    assert check_parity(model, fast, xs, batch_sizes=(1, 2, 5)).ok


def test_nan_and_infinity_come_through_as_before() -> None:
    model, plain = side_by_side(*LAYERS)
    fast = padded(model, *plain)
    for value in (float("nan"), float("inf"), -float("inf")):
        xs = [x.clone() for x in plain]
        for x in xs:
            x[0].view(-1)[0] = value
            x[-1] = value
        with torch.no_grad():
            torch.testing.assert_close(fast(*xs), model(*xs), rtol=0, atol=0, equal_nan=True)
            # The result shares this memory.
            for block in model.blocks:
                block[1].weight.view(-1)[0] = value
            torch.testing.assert_close(fast(*xs), model(*xs), rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(fast(*plain), model(*plain), rtol=0, atol=0, equal_nan=True)


def test_what_was_done_is_told() -> None:
    model = nn.Sequential(nn.Linear(5, 16), nn.Linear(16, 3), nn.Linear(3, 9), nn.Linear(9, 16).requires_grad_(False))
    done = check_pass(ANYWHERE, model, (torch.randn(2, 5),))
    assert changes(done) == [
        ("0", "padded with zeros from 5 to 8 inputs"),
        ("1", "padded with zeros from 3 to 8 outputs"),
        ("2", "padded with zeros from 3 to 8 inputs and from 9 to 16 outputs"),
        ("3", "padded with zeros from 9 to 16 inputs"),
    ]
    assert skips(done) == []


def test_the_multiple_is_an_option() -> None:
    x = torch.randn(2, 5)
    fast = optimize(nn.Linear(5, 70), "pad-channels:multiple=64:force=true", example_inputs=(x,))
    assert weights_of(fast, x) == [(128, 64)]


@pytest.mark.parametrize("multiple", [1, 0, -8])
def test_a_multiple_of_less_than_two_is_refused(multiple: int) -> None:
    with pytest.raises(ValueError, match=f"multiple must be a number of channels of 2 or more, not {multiple}"):
        PadChannels(multiple=multiple)
    with pytest.raises(
        PassOptionError, match=f"pad-channels: multiple must be a number of channels of 2 or more, not {multiple}"
    ):
        parse_pass(f"pad-channels:multiple={multiple}")


def test_a_transposed_convolution_gives_the_size_that_is_asked_for() -> None:
    up = enliven(nn.ConvTranspose2d(3, 5, 3, stride=2))
    model = Net(lambda m, x: m.up(x, output_size=[14, 14]) + m.up(x, [14, 14]), up=up).eval()
    x = torch.randn(2, 3, 6, 6)
    fast = padded(model, x)
    assert fast(x).shape == (2, 5, 14, 14)
    assert weights_of(fast, x) == [(8, 8, 3, 3)] * 2


def test_an_input_without_a_batch_is_padded_too() -> None:
    names = "linear", "conv1d", "conv2d", "conv3d", "transposed 2d"
    model, xs = side_by_side(*names)
    fast = padded(model, *xs)
    rows = [x[0] for x in xs]
    assert all(map(torch.equal, fast(*rows), model(*rows)))
    assert weights_of(fast, *rows) == weights_in(names)


@pytest.mark.parametrize("name", ["linear", "conv2d", "transposed 2d"])
def test_an_input_that_does_not_fit_raises_as_before(name: str) -> None:
    make, shape, _ = LAYERS[name]
    model = make().eval()
    fast = padded(model, torch.randn(shape))
    channel = 1 if len(shape) == 4 else -1
    for x in (
        torch.randn(shape).narrow(channel, 0, 2),
        torch.randn(8, 8),
        torch.randn(()),
        torch.randn(shape).double(),
    ):
        messages = []
        for each in (model, fast):
            with pytest.raises(RuntimeError) as raised:
                each(x)
            messages.append(str(raised.value))
        assert messages[0] == messages[1]


# Parameters -----------------------------------------------------------------------------------------------------------


def paddings(model: nn.Module, x: Tensor) -> list[Any]:
    """The shapes of the tensors that a call pads."""
    return [shapes[0] for name, shapes in operations(model, x) if name == "constant_pad_nd"]


def test_a_weight_is_padded_once() -> None:
    model, x = nn.Sequential(nn.Linear(5, 3), nn.ReLU()).eval(), torch.randn(4, 5)
    fast = padded(model, x)
    assert [value.data_ptr() for value in fast.parameters()] == [value.data_ptr() for value in model.parameters()]
    assert paddings(fast, x) == [[4, 5]]
    with torch.autocast("cpu", torch.bfloat16):
        assert paddings(fast, x) == [[4, 5]]
    with torch.no_grad():
        fast[0].weight.mul_(2)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as found:
            fast(x)
        padded_now = [event.input_shapes[0] for event in found.events() if event.name == "aten::constant_pad_nd"]
        assert padded_now == [[3, 5], [4, 5]]
    assert paddings(fast, x) == [[4, 5]]


# What isn't padded ----------------------------------------------------------------------------------------------------


class OwnLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_a_weight_that_the_forward_writes_to_stays() -> None:
    def decaying(m: Any, x: Tensor) -> Tensor:
        y = F.linear(m.layer(x), m.weight)
        m.weight.mul_(0.5)
        return y

    model = enliven(Net(decaying, layer=nn.Linear(5, 3), weight=nn.Buffer(torch.randn(7, 3)))).eval()
    tree, context = captured(model, (torch.randn(4, 5),))
    done = ANYWHERE.run(tree, context)
    reason = "the forward may write to weight"
    assert skips(done) == [("the root (linear)", reason)]
    assert [where for where, _ in changes(done)] == ["layer"]


def test_layers_of_any_class_and_functions_are_padded() -> None:
    weight = nn.Parameter(torch.randn(7, 3))
    model = Net(lambda m, x: F.linear(m.own(x).relu(), weight=m.weight).relu(), own=OwnLinear(5, 3), weight=weight)
    model, x = enliven(model).eval(), torch.randn(4, 5)
    assert [change.where for change in check_pass(ANYWHERE, model, (x,)).changes] == [
        "own (linear)", "the root (linear)"
    ]  # fmt: skip
    assert weights_of(padded(model, x), x) == [(8, 8), (8, 8)]


def test_tied_weights_and_shared_layers_are_padded() -> None:
    layers = {"words": nn.Embedding(11, 6), "layer": nn.Linear(6, 6), "head": nn.Linear(6, 11, bias=False)}
    model = Net(lambda m, x: m.head(m.layer(m.layer(m.words(x)))), **layers)
    model.head.weight = model.words.weight
    model, x = enliven(model).eval(), torch.randint(0, 11, (4, 3))
    check_pass(ANYWHERE, model, (x,))
    fast = padded(model, x)
    assert fast.head.weight is fast.words.weight
    with torch.no_grad():
        for each in (fast, model):
            each.words.weight.mul_(2)
        torch.testing.assert_close(fast(x), model(x))
    assert weights_of(fast, x) == [(8, 8), (8, 8), (16, 8)]


# Where padding pays ---------------------------------------------------------------------------------------------------


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Simulate an NVIDIA GPU, of which the pass reads only the compute capability."""

    def of(major: int, minor: int = 0) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
        monkeypatch.setattr(torch.version, "hip", None)

    of(8)
    return of


def on_a_gpu(model: nn.Module, x: Tensor) -> PassResult:
    tree, context = captured(model.eval(), (x,))
    item = PadChannels()
    item.check(context)
    return item.run(tree, replace(context, device=torch.device("cuda")))


def halves(rows: int, channels: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, channels, dtype=dtype)


def test_nothing_is_padded_for_a_cpu() -> None:
    reason = "the model is on a device without tensor cores (cpu), where padding only costs"
    model = nn.Sequential(nn.Linear(101, 99).bfloat16()).eval()
    done = check_pass(PadChannels(), model, (torch.randn(16, 101).bfloat16(),))
    assert (changes(done), skips(done)) == ([], [("", reason)])


NO_TENSOR_CORES = "the model is on a device without tensor cores (cuda), where padding only costs"


@pytest.mark.parametrize(
    ("capability", "hip", "dtype", "reason"),
    [
        ((6, 1), None, torch.float16, NO_TENSOR_CORES),
        ((8, 0), "6.4", torch.bfloat16, NO_TENSOR_CORES),
        (
            (7, 0),
            None,
            torch.bfloat16,
            "its layers compute in bfloat16, but the tensor cores of cuda need multiples only for float16",
        ),
        (
            (8, 0),
            None,
            torch.float32,
            "its layers compute in float32, but the tensor cores of cuda need multiples only for float16 and bfloat16",
        ),
        ((7, 0), None, torch.float16, None),
        ((8, 0), None, torch.bfloat16, None),
    ],
)
def test_tensor_cores_and_the_dtype_decide(
    ampere: Any,
    capability: tuple[int, int],
    hip: str | None,
    dtype: torch.dtype,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ampere(*capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    done = on_a_gpu(nn.Sequential(nn.Linear(1001, 999, dtype=dtype)), halves(512, 1001, dtype))
    assert skips(done) == ([] if reason is None else [("", reason)])
    assert len(done.changes) == (reason is None)


LITTLE = (
    "it multiplies so little per element that copies of its inputs and outputs cost more than a faster product saves"
)


def test_a_size_counts_only_if_it_is_fixed(ampere: Any) -> None:
    layer = nn.Linear(1001, 999).bfloat16()
    done = on_a_gpu(Net(lambda m, x: m.layer(x.view(2, 1001)), layer=layer), halves(2, 1001))
    assert (changes(done), skips(done)) == ([], [("layer", f"{LITTLE}, on an input of shape [2, 1001]")])
    # One graph serves all sizes, for which padding is assumed to pay.
    done = on_a_gpu(nn.Sequential(layer), halves(2, 1001))
    padded = "padded with zeros from 1001 to 1008 inputs and from 999 to 1000 outputs"
    assert (changes(done), skips(done)) == ([("0", padded)], [])


def test_the_dtype_is_that_of_autocast(ampere: Any) -> None:
    def cast(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = m.inside(x)
        return m.outside(x.float())

    done = on_a_gpu(Net(cast, inside=nn.Linear(500, 501), outside=nn.Linear(501, 500)), torch.randn(500, 500))
    assert changes(done) == [("inside", "padded with zeros from 500 to 504 inputs and from 501 to 504 outputs")]
    assert skips(done) == [("outside", "it computes in float32, which doesn't gain from multiples")]


@pytest.mark.parametrize(
    ("layer", "rows", "reason"),
    [
        (nn.Linear(1001, 999), 512, None),
        (nn.Linear(90, 90), 9000, LITTLE),
        (nn.Linear(3, 1000), 9, "padded, it would multiply 2.7 times as much, mostly zeros"),
        (nn.Linear(4000, 1), 9, "padded, it would multiply 8.0 times as much, mostly zeros"),
    ],
)
def test_a_linear_layer_is_padded_where_it_computes_much(
    ampere: Any, layer: nn.Linear, rows: int, reason: str | None
) -> None:
    done = on_a_gpu(nn.Sequential(layer.bfloat16()), halves(rows, layer.in_features))
    assert len(done.changes) == (reason is None)
    assert all(skip.reason.startswith(reason or "nothing") for skip in done.skips)
    assert bool(done.skips) == (reason is not None)


LAST = torch.channels_last


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Conv2d(60, 60, 3).to(memory_format=LAST), None),
        (nn.ConvTranspose2d(60, 60, 3).to(memory_format=LAST), None),
        (nn.Conv3d(60, 60, 3).to(memory_format=torch.channels_last_3d), None),
        (
            nn.Conv2d(60, 60, 3),
            "its maps are contiguous, and cuDNN pads those itself: put channels-last before this pass",
        ),
        (nn.Conv1d(60, 60, 3), "its maps are contiguous, and cuDNN pads those itself"),
        (
            nn.Conv2d(3, 64, 7).to(memory_format=LAST),
            "its input has 3 channels, and cuDNN has kernels for such images",
        ),
        (
            nn.Conv2d(9, 9, 3).to(memory_format=LAST),
            "padded, it would multiply 3.2 times as much, mostly zeros",
        ),
        (
            nn.Conv2d(60, 60, 1).to(memory_format=LAST),
            LITTLE,
        ),
    ],
)
def test_a_convolution_is_padded_where_cudnn_does_not_do_it(ampere: Any, layer: Any, reason: str | None) -> None:
    size = (9,) * (layer.weight.dim() - 2)
    done = on_a_gpu(nn.Sequential(layer.half()), torch.randn(2, layer.in_channels, *size).half())
    assert len(done.changes) == (reason is None)
    assert skips(done) == ([] if reason is None else [("0", reason)])


# With other passes ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_files_compute_the_same(tmp_path: Any) -> None:
    layers = {"conv": nn.Conv2d(3, 6, 3, padding=1), "norm": nn.BatchNorm2d(6), "up": nn.ConvTranspose2d(6, 5, 2)}
    more = {"first": nn.Linear(5, 9), "second": nn.Linear(9, 5)}
    run = lambda m, x: m.second(F.gelu(m.first(m.up(m.norm(m.conv(x)).relu()).mean((2, 3)))))  # noqa: E731
    model, x = enliven(Net(run, **layers, **more)).eval(), torch.randn(2, 3, 8, 8)
    fast = optimize(model, ["fold-conv-bn", "channels-last", ANYWHERE], example_inputs=(x,))
    bundle = export(fast, example_inputs=(x,), output=tmp_path / "bundle", formats=("onnx", "torchscript", "pt2"))
    assert bundle.parity.ok


def test_merged_layers_are_padded_together() -> None:
    layers = {"gate": nn.Linear(6, 9), "up": nn.Linear(6, 9), "down": nn.Linear(9, 6)}
    model = enliven(Net(lambda m, x: m.down(m.gate(x).sigmoid() * m.up(x)), **layers)).eval()
    x = torch.randn(4, 6)
    fast = optimize(model, ["merge-linears:force=true", ANYWHERE], example_inputs=(x,))
    assert [record.status for record in report_of(fast).passes] == ["applied", "applied"]
    assert check_parity(model, fast, (x,), batch_sizes=(1, 2, 5)).ok
    assert weights_of(fast, x) == [(24, 8), (8, 16)]
    with torch.no_grad():
        for each in (model, fast):
            each.up.weight.mul_(2)
    torch.testing.assert_close(fast(x), model(x))


# Real models ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("bert", torch.bfloat16), ("resnet", torch.float32)])
def test_a_real_model_of_odd_sizes_computes_the_same(name: str, dtype: torch.dtype) -> None:
    model, args, kwargs = REAL_MODELS[name]()
    model, args = model.to(dtype), tuple(value.to(dtype) if value.is_floating_point() else value for value in args)
    given = {"example_inputs": args, "example_kwargs": kwargs}
    # Their sizes are powers of two.
    fast = optimize(model, [PadChannels(multiple=12, force=True)], **given)
    (record,) = report_of(fast).passes
    assert (record.status, record.skips) == ("applied", ())
    assert len(record.changes) == sum(isinstance(each, nn.Linear | nn.Conv2d) for each in model.modules())
    assert check_parity(model, fast, **given, batch_sizes=(1, 2, 5), draws=1).ok


# Between layers -------------------------------------------------------------------------------------------------------


def of_two(run: Callable[..., Any]) -> nn.Module:
    return Net(run, first=nn.Linear(5, 7), second=nn.Linear(7, 3)).eval()


def test_nan_and_infinity_stay_in_their_rows_between_layers() -> None:
    model, x = whole_numbers(of_two(lambda m, x: m.second(m.first(x).relu()))), torch.randint(-3, 4, (4, 5)).float()
    fast = padded(model, x)
    x[0, 0], x[1, 1], x[2] = float("nan"), float("inf"), -float("inf")
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            torch.testing.assert_close(fast(x), model(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("function", [
    lambda self, x: self.second(F.relu(self.first(x), inplace=True)), lambda self, x: self.second(self.first(x).add_(1)),
    lambda self, x: (self.second(h := self.first(x)), h.view(-1)), lambda self, x: self.first(x).view(7, -1),
])  # fmt: skip
def test_an_output_is_a_tensor_of_its_own(function: Callable[..., Any]) -> None:
    check_pass(ANYWHERE, enliven(of_two(function)), (torch.randn(4, 5),))


@pytest.mark.parametrize("fold", ["fold-conv-bias", "fold-conv-bn"])
def test_a_fold_after_it_says_to_come_before_it(fold: str) -> None:
    model = enliven(nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))).eval()
    fast = optimize(model, ["pad-channels:force=true", fold], example_inputs=(torch.randn(2, 4, 6, 6),))
    record = report_of(fast).passes[1]
    assert record.status == "unchanged"
    (skip,) = record.skips
    assert skip.where == "1"
    assert skip.text.startswith("its input is a part of the channels of 0: put this pass before pad-channels")
