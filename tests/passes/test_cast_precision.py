"""cast-precision: the layers that are cast, those that stay in float32 and why, and what must not change."""

import copy
import itertools
import pickle
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from folding_models import image
from pass_contract import captured, check_pass, check_same, tree_of
from real_models import REAL_MODELS
from tiny_models import Net, enliven
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import exporters.onnx
from exporters import ExportError
from exporters.errors import RouteRefused
from exporters.isolation import torchscript_allowed
from optimizer import export, optimize, report_of, verify_bundle
from passes import CastPrecision
from passes.base import Context
from passes.casting.forwards import AutocastForward, InFloat32, RootCast, UnderAutocast
from passes.errors import PassOptionError, RequirementNotMet
from passes.graph.forwards import standing_around
from passes.registry import parse_pass

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
EVERY = [("bfloat16", "weights"), ("float16", "autocast")]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Draw the same weights in whatever order the tests run."""
    torch.manual_seed(0)


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return enliven(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8),
            nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
        )
    ).eval()  # fmt: skip


def linear(*sizes: int) -> nn.Module:
    return enliven(nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))).eval()


class Encoder(nn.Module):
    """Attention, LayerNorm, tied weights, integer inputs and several outputs; its positions are always float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 23)
        self.head.weight = self.embed.weight
        enliven(self)

    def forward(self, ids: Tensor) -> dict[str, Any]:
        places = torch.arange(ids.shape[1], device=ids.device).float()[:, None] * torch.arange(1.0, 9.0).reciprocal()
        h = self.embed(ids) + places.sin()
        h = h + self.attention(self.norm(h), self.norm(h), self.norm(h), need_weights=False)[0]
        h = h + F.gelu(self.inner(h))
        logits = self.head(h)
        state = (h, None, h.bfloat16(), h.double())
        return {"logits": logits, "state": state, "ids": ids, "length": ids.shape[1]}


class Island(nn.Module):
    """Has a data-dependent branch, and a norm that casts to float32 itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(8))
        enliven(self)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if float(h.abs().max()) < 0:
            return h
        wide = h.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.second(self.scale * normed.to(h.dtype))


def recurrent() -> nn.Module:
    return enliven(Net(lambda m, x: m.head(m.rnn(x)[0]), rnn=nn.LSTM(6, 8, batch_first=True), head=nn.Linear(8, 3)))


def large() -> nn.Module:
    """The output of its middle layer overflows float16."""
    layers = {"first": nn.Linear(6, 8), "large": nn.Linear(8, 8), "last": nn.Linear(8, 3)}
    model = enliven(Net(lambda m, x: m.last(m.large(m.first(x).relu()) * 1e-6), **layers))
    model.large.weight.data.mul_(1e6)
    return model.eval()


def cancelling(by: float = 100) -> nn.Module:
    """Its BatchNorm subtracts a mean that is two hundred times as large as the difference."""
    layers = {"conv": nn.Conv2d(3, 8, 3), "norm": nn.BatchNorm2d(8), "head": nn.Linear(8, 5)}
    model = enliven(Net(lambda m, x: m.head(m.norm(m.conv(x)).relu().mean((2, 3))), **layers))
    model.conv.bias.data.add_(by)
    model.norm.running_mean.add_(by)
    return model.eval()


def nearly() -> nn.Module:
    """Each layer loses little precision, but the difference of two loses much; the third one hardly matters."""
    layers = {name: nn.Linear(6, 8) for name in ("one", "other", "alone")}
    model = enliven(Net(lambda m, x: (m.one(x) - m.other(x)) * (1 + 1e-3 * m.alone(x)), **layers))
    with torch.no_grad():
        model.other.weight.copy_(model.one.weight + 1e-3 * rows(8, 6))
        model.other.bias.copy_(model.one.bias)
    return model.eval()


def hopeless() -> nn.Module:
    """No layer causes the error: the forward subtracts two nearly equal products, which autocast casts."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.layer(x)
        return h * 1e-6 + h @ torch.full((6, 6), 1.0) - h @ torch.full((6, 6), 1.001)

    return enliven(Net(run, layer=nn.Linear(6, 6))).eval()


def mixing() -> nn.Module:
    """Multiplies a cast tensor by a float32 tensor that the forward makes; no kernel accepts both dtypes."""
    inner = Net(lambda m, x: m.inner(x @ m.weight) @ (2 * torch.eye(6)), inner=nn.Linear(6, 6))
    inner.weight = nn.Parameter(rows(6, 6))
    return Holder(inner).eval()


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.head = inner, nn.Linear(6, 3)
        enliven(self)

    def forward(self, *args: Tensor) -> Tensor:
        return self.head(self.inner(*args))


class Watching(TorchDispatchMode):
    """Records the first argument of each operation with this in its name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.seen = name, list[Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.name in str(func):
            self.seen.append(args[0])
        return func(*args, **(kwargs or {}))


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def ids() -> Tensor:
    return torch.randint(0, 23, (2, 7), generator=torch.Generator().manual_seed(3))


def texts_of(done: Any) -> dict[str, str]:
    return {change.where: change.what for change in done.changes}


def changed(item: CastPrecision, model: nn.Module, args: tuple[Tensor, ...]) -> dict[str, str]:
    """What the pass does at each place. `test_keeps_the_contract` also compares the outputs."""
    tree, context = captured(model, args)
    return texts_of(item.run(tree, context))


def kept_in(texts: dict[str, str]) -> dict[str, str]:
    return {where: text for where, text in texts.items() if text.startswith("kept in float32")}


@pytest.mark.parametrize(("dtype", "how"), [("bfloat16", "autocast"), ("float16", "weights")])
@pytest.mark.parametrize(
    ("make", "args"),
    [
        (net, (image(2, 3, 8, 8),)),
        (Encoder, (ids(),)),
        (Island, (rows(3, 6),)),
        (recurrent, (rows(2, 5, 6),)),
        (large, (rows(2, 6),)),
        (mixing, (rows(4, 6),)),
    ],
    ids=["net", "encoder", "island", "recurrent", "large", "mixing"],
)
def test_keeps_the_contract(make: Any, args: tuple[Tensor, ...], dtype: Any, how: Any) -> None:
    done = check_pass(CastPrecision(dtype=dtype, how=how), make().eval(), args)
    assert done.precision is not None
    assert (done.precision.dtype, done.precision.everywhere) == (DTYPES[dtype], how == "weights")
    assert done.changes[-1].where == ""


@pytest.mark.parametrize(("dtype", "how"), EVERY)
def test_inside_it_is_the_dtype_and_outside_as_before_and_so_in_copies_and_pickles(dtype: Any, how: Any) -> None:
    model, x = net(), image(2, 3, 8, 8)
    fast = optimize(model, [CastPrecision(dtype=dtype, how=how)], example_inputs=(x,))
    assert report_of(fast).verified
    assert not kept_in({place.where: place.text for place in report_of(fast).passes[0].changes})
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    wanted = fast(x)
    assert wanted.dtype == torch.float32
    twin = copy.deepcopy(fast)
    assert standing_around(twin, RootCast).owner is twin  # type: ignore[union-attr]
    for each in (fast, twin, pickle.loads(pickle.dumps(fast))):
        seen: list[torch.dtype] = []
        each[3].register_forward_hook(lambda module, args, output, seen=seen: seen.append(output.dtype))
        assert torch.equal(each(x), wanted)
        assert seen == [DTYPES[dtype]]
        assert {each[index].weight.dtype for index in (0, 3, 8)} == {
            DTYPES[dtype] if how == "weights" else torch.float32
        }
        # torch's BatchNorm accepts float32 tensors next to an input in half precision.
        assert {value.dtype for value in each[1].state_dict().values()} == {torch.float32, torch.int64}
    with torch.no_grad():
        twin[0].weight.zero_()
    assert torch.equal(fast(x), wanted)
    assert not torch.equal(twin(x), wanted)


def test_weights_take_half_the_memory() -> None:
    report = report_of(optimize(linear(64, 64, 64), [CastPrecision(how="weights")], example_inputs=(rows(2, 64),)))
    assert report.after.parameter_bytes * 2 == report.before.parameter_bytes


@pytest.mark.parametrize(("dtype", "how"), EVERY)
def test_outputs_have_the_structure_and_the_dtypes_of_the_original(dtype: Any, how: Any) -> None:
    model = Encoder().eval()
    fast = optimize(model, [CastPrecision(dtype=dtype, how=how)], example_inputs=(ids(),))
    assert report_of(fast).passes[0].status == "applied", str(report_of(fast))
    given = ids()
    for batch in (given, given[:1], given.repeat(3, 1)[:5]):
        outputs = fast(batch)
        assert outputs.keys() == model(batch).keys()
        assert outputs["logits"].dtype == outputs["state"][0].dtype == torch.float32
        assert outputs["state"][1] is None
        assert [value.dtype for value in outputs["state"][2:]] == [torch.bfloat16, torch.float64]
        assert outputs["length"] == 7
        assert outputs["ids"] is batch


def test_without_example_inputs_autocast_is_all_there_is() -> None:
    model = net()
    fast = optimize(model, [CastPrecision()])
    assert [place.text for place in report_of(fast).passes[0].changes] == ["runs under autocast to bfloat16"]
    x = image(2, 3, 8, 8)
    assert fast(x).dtype == torch.float32
    assert not torch.equal(fast(x), model(x))
    with pytest.raises(RequirementNotMet, match=r"how='weights' needs a run .* add example inputs"):
        optimize(model, [CastPrecision(how="weights")])


# Arguments of a call --------------------------------------------------------------------------------------------------


class Step(nn.Module):
    """One step of a recurrence: it writes its state into the caller's dict and appends it to the caller's list."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 6), nn.Linear(6, 6)
        enliven(self)

    def forward(self, x: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        h = self.enter(x) + state["h"]
        state["h"] = self.leave(h).tanh()
        state["seen"].append(state["h"])
        return self.leave(h), state


def fresh_state() -> dict[str, Any]:
    return {"h": torch.zeros(4, 6), "seen": []}


@pytest.mark.parametrize(("how", "keep"), [("autocast", "enter"), ("weights", ""), ("weights", "leave")])
def test_what_a_forward_writes_into_the_callers_dicts_and_lists_comes_to_her(how: Any, keep: str) -> None:
    model, x = Step().eval(), rows(4, 6)
    fast = optimize(model, [CastPrecision(how=how, keep=keep)], example_inputs=(x, fresh_state()))
    assert report_of(fast).passes[0].status == "applied", str(report_of(fast))
    mine, own = fresh_state(), fresh_state()
    seen = own["seen"]
    for _ in range(3):
        wanted, _ = model(x, mine)
        got, state = fast(x, own)
        torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05)
        assert state is own
    assert own["seen"] is seen
    assert [value.dtype for value in seen] == [torch.float32] * 3
    torch.testing.assert_close(own["h"], mine["h"], rtol=0.05, atol=0.05)


class Tap(nn.Module):
    """Stores its output and its inputs in the caller's list and dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        enliven(self)

    def forward(self, x: Tensor, held: tuple[list[Tensor], dict[str, Tensor]]) -> Tensor:
        rows, named = held
        assert {value.dtype for value in (x, *rows, *named.values())} == {torch.float32}
        y = self.layer(x)
        rows += [y, named["first"]]
        named["given"] = x
        return y


class Tapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.tap, self.last = nn.Linear(6, 6), Tap(), nn.Linear(6, 6)
        enliven(self)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        rows, named = [first], {"first": first}
        h = self.tap(first, (rows, named))
        # After the call, they hold the original tensor again, also where the call has stored it.
        assert rows[0] is rows[2] is named["first"] is named["given"] is first
        return self.last(h + sum(rows) * len(rows))


@pytest.mark.parametrize("how", ["autocast", "weights"])
def test_a_module_in_float32_writes_into_the_lists_and_dicts_that_it_is_given(how: Any) -> None:
    fast = optimize(Tapped().eval(), [CastPrecision(how=how, keep="tap")], example_inputs=(rows(4, 6),))
    assert report_of(fast).passes[0].status == "applied", str(report_of(fast))
    texts = {place.where: place.text for place in report_of(fast).passes[0].changes}
    assert kept_in(texts) == {"tap": "kept in float32 by the option keep"}


@pytest.mark.parametrize("how", ["autocast", "weights"])
def test_an_output_that_the_example_left_out_is_float32_when_it_comes(how: Any) -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.more = nn.Linear(6, 6), nn.Linear(6, 2)
            enliven(self)

        def forward(self, x: Tensor, given: Tensor | None = None, want: bool = False) -> Any:
            h = self.layer(x)
            return (h, self.more(h), given, torch.Size([3])) if want else h

    fast = optimize(Auxiliary().eval(), [CastPrecision(how=how)], example_inputs=(rows(2, 6),))
    assert report_of(fast).passes[0].status == "applied", str(report_of(fast))
    own = rows(3, 3).bfloat16()
    first, more, same, size = fast(rows(2, 6), own, want=True)
    assert first.dtype == more.dtype == torch.float32
    assert same is own
    assert isinstance(size, torch.Size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_result_with_weights_of_another_dtype_computes_in_that(dtype: torch.dtype) -> None:
    model = Encoder().eval()
    fast = optimize(model, [CastPrecision(how="weights", keep="inner")], example_inputs=(ids(),))
    state = {name: value.to(dtype) for name, value in model.state_dict().items()}
    given = copy.deepcopy(fast)
    given.load_state_dict(state, assign=True)
    for each in (given, copy.deepcopy(fast).to(dtype)):
        assert {parameter.dtype for parameter in each.parameters()} == {dtype}
        got, wanted = each(ids())["logits"], model(ids())["logits"]
        torch.testing.assert_close(got.float(), wanted, rtol=0.05, atol=0.05)


def test_a_result_under_autocast_that_is_cast_computes_as_the_original_does() -> None:
    model, x = linear(6, 8, 3), rows(2, 6)
    fast = optimize(model, [CastPrecision()], example_inputs=(x,))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        mine, own = copy.deepcopy(model).to(dtype), copy.deepcopy(fast).to(dtype)
        assert torch.equal(own(x.to(dtype)), mine(x.to(dtype)))
        assert own(x.to(dtype)).dtype == dtype


def embedded() -> nn.Module:
    """A sinusoidal time embedding, as in diffusion models; half precision can't represent large times exactly."""

    def run(m: Any, x: Tensor, time: Tensor) -> Tensor:
        waves = time[:, None] * m.frequencies
        return m.leave(m.enter(x).relu() * m.embed(torch.cat([waves.sin(), waves.cos()], -1)))

    layers = {"enter": nn.Linear(6, 8), "embed": nn.Linear(8, 8), "leave": nn.Linear(8, 6)}
    return enliven(Net(run, **layers, frequencies=nn.Buffer(torch.arange(4.0).div(-2).exp()))).eval()


@pytest.mark.parametrize(("dtype", "how"), EVERY)
def test_a_float_that_no_layer_takes_keeps_its_digits(dtype: Any, how: Any) -> None:
    model, x = embedded(), rows(4, 6)
    fast = optimize(model, [CastPrecision(dtype=dtype, how=how)], example_inputs=(x, torch.arange(4.0)))
    (record,) = report_of(fast).passes
    assert record.status == "applied", str(report_of(fast))
    assert not kept_in({place.where: place.text for place in record.changes})
    for time in (2.0, 999.0, 65519.0):
        wanted = model(x, torch.full((4,), time))
        error = (fast(x, torch.full((4,), time)) - wanted).norm() / wanted.norm()
        assert error < 2 * torch.finfo(DTYPES[dtype]).eps


def masked() -> nn.Module:
    def run(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        return (m.query(x) @ m.key(x).transpose(1, 2) + mask).softmax(-1) @ m.value(x)

    return enliven(Net(run, **{name: nn.Linear(6, 6) for name in ("query", "key", "value")})).eval()


@pytest.mark.parametrize(("dtype", "how"), EVERY)
def test_a_mask_of_the_least_number_stays_finite(dtype: Any, how: Any) -> None:
    model, x = masked(), rows(2, 4, 6)
    least = torch.finfo(torch.float32).min
    causal = torch.full((4, 4), least).triu(1)
    fast = optimize(model, [CastPrecision(dtype=dtype, how=how)], example_inputs=(x, causal))
    texts = {place.where: place.text for place in report_of(fast).passes[0].changes}
    assert report_of(fast).passes[0].status == "applied", str(report_of(fast))
    assert not kept_in(texts)
    for mask in (causal, torch.zeros(4, 4), torch.full((4, 4), -torch.inf).triu(1)):
        torch.testing.assert_close(fast(x, mask), model(x, mask), rtol=0.05, atol=0.05)
    # A fully masked row loses its scores in any dtype, because the mask absorbs them.
    every = torch.full((4, 4), least)
    assert model(x, every).isfinite().all()
    assert fast(x, every).isfinite().all()


def test_what_mixes_its_weights_with_float32_computes_under_autocast() -> None:
    model, x = masked(), rows(2, 4, 6)
    texts = changed(CastPrecision(how="weights"), model, (x, torch.zeros(4, 4)))
    assert re.fullmatch(
        r"inputs and outputs keep their dtypes around bfloat16, under autocast, because it raises without \(RuntimeError: .*\)",
        texts[""],
    )
    holder = Holder(model).eval()
    texts = changed(CastPrecision(how="weights"), holder, (x, torch.zeros(4, 4)))
    assert texts["inner"].startswith("under autocast, because it raises without (RuntimeError: ")
    assert texts[""] == "inputs and outputs keep their dtypes around bfloat16"
    fast = optimize(holder, [CastPrecision(how="weights")], example_inputs=(x, torch.zeros(4, 4)))
    assert {parameter.dtype for parameter in fast.parameters()} == {torch.bfloat16}
    assert isinstance(fast.inner.forward, UnderAutocast)


# Layers that stay in float32 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["autocast", "weights"])
def test_a_layer_that_overflows_stays_in_float32(how: Any) -> None:
    tree, context = captured(large(), (rows(2, 6),))
    done = CastPrecision(dtype="float16", how=how).run(tree, context)
    assert kept_in(texts_of(done)) == {"large": "kept in float32: in float16 it is no longer finite"}
    assert done.precision == replace(done.precision, kept=("large",), bare=("large",), everywhere=how == "weights")
    named = CastPrecision(dtype="float16", how=how, keep="large").run(*captured(large(), (rows(2, 6),)))
    assert named.precision == replace(done.precision, bare=("large",) if how == "weights" else ())
    assert not kept_in(changed(CastPrecision(how=how), large(), (rows(2, 6),)))


@pytest.mark.parametrize(("dtype", "how"), EVERY)
def test_a_difference_of_large_numbers_and_what_feeds_it_stay_in_float32(dtype: Any, how: Any) -> None:
    model = cancelling()
    fast = optimize(model, [CastPrecision(dtype=dtype, how=how)], example_inputs=(image(),))
    kept = kept_in({place.where: place.text for place in report_of(fast).passes[0].changes})
    assert kept.keys() >= {"conv", "norm"}
    assert re.fullmatch(rf"kept in float32: in {dtype} it is off by [\d.]+ % of its output", kept["norm"])
    assert fast.conv.weight.dtype == torch.float32
    assert not kept_in(changed(CastPrecision(dtype=dtype, how=how), cancelling(0), (image(),)))
    # The remaining error is one rounding of the linear layer, not a hundred.
    x = image(5, 3, 8, 8)
    assert (fast(x) - model(x)).abs().max() < torch.finfo(DTYPES[dtype]).eps * model(x).abs().max()


@pytest.mark.parametrize("how", ["autocast", "weights"])
def test_where_the_whole_loses_too_much_the_layers_that_lose_most_stay_in_float32(how: Any) -> None:
    texts = changed(CastPrecision(how=how), nearly(), (rows(4, 6),))
    kept = kept_in(texts)
    assert {"one", "other"} <= kept.keys()
    for text in kept.values():
        assert re.search(
            r"in bfloat16 the model is off by [\d.]+ % .*, and this layer is off by 0\.\d+ % of its output$", text
        )


@pytest.mark.parametrize("how", ["autocast", "weights"])
def test_nothing_is_changed_where_no_layer_is_to_blame(how: Any) -> None:
    model, x = hopeless(), rows(4, 6)
    report = report_of(optimize(model, [CastPrecision(how=how)], example_inputs=(x,)))
    record = report.passes[0]
    assert (record.status, record.changes) == ("unchanged", ())
    (skip,) = record.skips
    reason = (
        r"in bfloat16 it is off by \S+ % of its output even with every sensitive layer in float32, and may be by 12 %"
    )
    assert re.fullmatch(reason, skip.text)


def test_what_raises_in_the_dtype_stays_in_float32() -> None:
    model = mixing()
    x = rows(4, 6)
    texts = changed(CastPrecision(how="weights"), model, (x,))
    assert texts["inner"].startswith("kept in float32: in bfloat16 it raises (RuntimeError: ")
    assert "inner.inner" not in texts
    assert texts["head"] == "weights in bfloat16"


@pytest.mark.parametrize("always", [True, False])
def test_a_layer_without_a_kernel_stays_in_float32(always: bool) -> None:
    class Picky(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            is_half = x.dtype != torch.float32 or torch.is_autocast_enabled("cpu")
            # Some kernels exist only without gradients.
            if is_half and (always or torch.is_grad_enabled()):
                raise RuntimeError('"picky" not implemented for this type')
            return F.linear(x, self.weight, self.bias)

    model = enliven(nn.Sequential(nn.Linear(6, 6), Picky(6, 6), nn.Linear(6, 3))).eval()
    for how in ("autocast", "weights"):
        texts = changed(CastPrecision(how=how), model, (rows(2, 6),))  # type: ignore[arg-type]
        assert (
            texts["1"] == 'kept in float32: in bfloat16 it raises (RuntimeError: "picky" not implemented for this type)'
        )


def test_each_layer_is_run_as_often_in_a_deep_model() -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Counting.calls += 1
            return super().forward(x)

    calls = []
    for depth in (4, 16):
        tree, context = captured(enliven(nn.Sequential(*(Counting(6, 6) for _ in range(depth)))).eval(), (rows(2, 6),))
        Counting.calls = 0
        CastPrecision().run(tree, context)
        calls.append(Counting.calls / depth)
    # In float32, alone in the dtype, and in the whole model in the dtype.
    assert calls == [3, 3]


def test_modules_that_the_user_names_stay_in_float32() -> None:
    model, x = net(), image(2, 3, 8, 8)
    texts = changed(CastPrecision(how="weights", keep="8 | 0"), model, (x,))
    assert kept_in(texts) == dict.fromkeys(("0", "8"), "kept in float32 by the option keep")
    nested = nn.Sequential(nn.Sequential(linear(6, 6), nn.ReLU()), linear(6, 3)).eval()
    fast = optimize(nested, [CastPrecision(how="weights", keep="0")], example_inputs=(rows(2, 6),))
    assert [parameter.dtype for parameter in fast.parameters()] == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert isinstance(fast[0].forward, InFloat32)
    assert "forward" not in vars(fast[0][0])


def test_a_tied_parameter_stays_one() -> None:
    model = Encoder().eval()
    fast = optimize(model, [CastPrecision(how="weights")], example_inputs=(ids(),))
    assert fast.head.weight is fast.embed.weight
    assert fast.head.weight.dtype == torch.bfloat16
    kept = optimize(model, [CastPrecision(how="weights", keep="head")], example_inputs=(ids(),))
    assert kept.head.weight is kept.embed.weight
    assert kept.head.weight.dtype == torch.float32
    texts = {place.where: place.text for place in report_of(kept).passes[0].changes}
    assert texts["embed"] == "kept in float32, because it shares a parameter with head"
    assert report_of(kept).verified


def test_the_losses_are_measured_without_a_trace() -> None:
    model = enliven(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    tree, context = captured(model, (rows(4, 6),), mode="training")
    before, state = tree_of(tree.root), torch.random.get_rng_state()
    done = CastPrecision().run(tree, context)
    assert [change.where for change in done.changes] == [""]
    assert torch.equal(state, torch.random.get_rng_state())
    done.rewriter.roll_back()
    check_same(before, tree_of(tree.root), "a measurement left something")


# Refusals -------------------------------------------------------------------------------------------------------------


def test_what_it_is_not_for_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    x = rows(2, 6)
    with pytest.raises(RequirementNotMet, match="casts weights for inference only: train with how='autocast'"):
        optimize(linear(6, 3).train(), [CastPrecision(how="weights")], mode="training", example_inputs=(x,))
    with pytest.raises(RequirementNotMet, match=r"for models in float32, and 0 has parameters in float64"):
        optimize(linear(6, 3).double(), [CastPrecision()], example_inputs=(x.double(),))
    with pytest.raises(
        RequirementNotMet, match=r"keep='1\|head', but 'head' isn't the path of any module of Sequential"
    ):
        optimize(linear(6, 6, 3), [CastPrecision(keep="1|head")], example_inputs=(x,))
    on_gpu = Context("inference", torch.device("cuda"), (((x,), {}),))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(RequirementNotMet, match=r"no bfloat16|can't use bfloat16 on a GPU of compute capability 7\.5"):
        CastPrecision().check(on_gpu)
    CastPrecision(dtype="float16").check(on_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    CastPrecision().check(on_gpu)


def test_a_quantized_model_is_refused() -> None:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 3)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.register_buffer("table", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.table.dequantize()

    tree, context = captured(Quantized().eval())
    with pytest.raises(RequirementNotMet, match="the root is quantized: leave the pass out"):
        CastPrecision().run(tree, context)


@pytest.mark.parametrize(("dtype", "how"), EVERY)
def test_what_is_cast_already_is_left_as_it_is(dtype: Any, how: Any) -> None:
    x = rows(2, 6)
    item = CastPrecision(dtype=dtype, how=how)
    half = linear(6, 3).to(DTYPES[dtype])
    done = check_pass(item, half, (x.to(DTYPES[dtype]),))
    assert done.skips[0].reason == f"its parameters are already in {dtype}"
    assert done.precision is None
    twice = report_of(optimize(linear(6, 3), [item, CastPrecision()], example_inputs=(x,)))
    assert [record.status for record in twice.passes] == ["applied", "unchanged"]
    assert twice.passes[1].skips[0].text == f"it already computes in {dtype}"


def test_options() -> None:
    assert parse_pass("cast-precision:dtype=float16:how=weights:keep=head|layers.*.norm") == CastPrecision(
        dtype="float16", how="weights", keep="head|layers.*.norm"
    )
    assert parse_pass("cast-precision:error=0.01") == CastPrecision(error=0.01)
    for values in ({"dtype": "float8"}, {"how": "all"}, {"keep": None}, {"error": 1.0}):
        with pytest.raises(PassOptionError):
            CastPrecision.made_with(values)


def test_a_cpu_without_fast_kernels_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    from passes import cast_precision

    remark = "torch has no fast kernels for float16 on this CPU: the result is for other devices"
    for fast, wanted in (((), [remark]), (("float16",), [])):
        monkeypatch.setattr(cast_precision, "fast_dtypes", lambda device, fast=fast: fast)
        tree, context = captured(linear(6, 3), (rows(2, 6),))
        assert [each.text for each in CastPrecision(dtype="float16").run(tree, context).remarks] == wanted


# Later use of a result ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["autocast", "weights"])
def test_it_is_compiled(how: Any) -> None:
    torch.compiler.reset()
    model, x = mixing(), rows(4, 6)
    fast = optimize(model, [CastPrecision(how=how, keep="head")], example_inputs=(x,))
    compiled = torch.compile(fast, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), fast(x))
    both = optimize(model, [CastPrecision(how=how, keep="head"), "torch-compile:backend=eager"], example_inputs=(x,))
    assert [record.status for record in report_of(both).passes] == ["applied", "applied"]
    assert torch.equal(both(x), fast(x))


@pytest.mark.parametrize("how", ["autocast", "weights"])
def test_checkpoints_go_both_ways(how: Any) -> None:
    model, x = net(), image(2, 3, 8, 8)
    fast = optimize(model, [CastPrecision(how=how)], example_inputs=(x,))
    assert fast.state_dict().keys() == model.state_dict().keys()
    other = enliven(net(5), seed=5)
    wanted = optimize(other, [CastPrecision(how=how)], example_inputs=(x,))(x)
    assert not torch.equal(fast(x), wanted)
    fast.load_state_dict(other.state_dict())
    assert torch.equal(fast(x), wanted)
    assert {parameter.dtype for parameter in fast[0].parameters()} == {
        torch.bfloat16 if how == "weights" else torch.float32
    }
    model.load_state_dict(fast.state_dict())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    torch.testing.assert_close(model(x), other(x), rtol=0.05, atol=0.05)


def test_a_weight_that_is_written_to_later_is_told_of(tmp_path: Path) -> None:
    model, x = linear(6, 3), rows(2, 6)
    fast = optimize(model, [CastPrecision(how="weights")], example_inputs=(x,))
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(Exception, match=r"0\.weight was modified after optimize"):
        export(fast, example_inputs=(x,), output=tmp_path / "net", formats=("torchscript",))


def test_a_result_is_cast_where_it_is_moved_and_when_it_is_optimized_again() -> None:
    x = image(2, 3, 8, 8)
    fast = optimize(net(), [CastPrecision()], example_inputs=(x,))
    again = optimize(fast, ["fold-conv-bn"], example_inputs=(x,))
    assert (report_of(again).passes[0].status, report_of(again).verified) == ("applied", True)
    assert standing_around(again, RootCast) is not None
    cast = standing_around(fast, RootCast)
    assert isinstance(cast, AutocastForward)
    assert not cast.repeats
    moved = copy.deepcopy(fast).to("meta")
    assert moved(torch.empty(2, 3, 8, 8, device="meta")).dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_training_gets_the_gradients_of_autocast(dtype: Any) -> None:
    model = enliven(
        nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(288, 5)
        )
    )
    x = image(4, 3, 8, 8)
    fast = optimize(model, [CastPrecision(dtype=dtype)], mode="training", example_inputs=(x,))
    report = report_of(fast)
    assert report.passes[0].status == "applied", str(report)
    assert report.parity is not None
    assert report.parity.precision == dtype
    assert all(mine is theirs for mine, theirs in zip(fast.parameters(), model.parameters(), strict=True))
    torch.manual_seed(0)
    loss = fast(x).square().mean()
    loss.backward()
    got = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    torch.manual_seed(0)
    with torch.autocast("cpu", DTYPES[dtype], cache_enabled=False):
        outputs = model(x)
    outputs.float().square().mean().backward()
    assert all(torch.equal(one, parameter.grad) for one, parameter in zip(got, model.parameters(), strict=True))
    assert {gradient.dtype for gradient in got} == {torch.float32}


class Repeated(nn.Module):
    """Calls a cell once per step, and another layer only once."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(6, 6), nn.Linear(6, 7)
        enliven(self)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            h = (self.cell(h) + x[:, step]).tanh()
        return self.head(h)


@pytest.mark.parametrize("examples", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_a_weight_that_is_used_again_is_cast_once_in_a_call(gradients: bool, examples: bool) -> None:
    model, x = Repeated().eval(), rows(4, 5, 6)
    fast = optimize(model, [CastPrecision()], example_inputs=(x,) if examples else None)
    cast = standing_around(fast, RootCast)
    assert isinstance(cast, AutocastForward)
    # Without a recorded run, a loop can't be ruled out.
    assert cast.repeats
    with torch.set_grad_enabled(gradients):
        for _ in range(2):
            with Watching("_to_copy") as casts:
                fast(x)
            shapes = sorted(tuple(each.shape) for each in casts.seen if each.dtype is torch.float32)
            assert [shape for shape in shapes if shape in ((6, 6), (7, 6))] == [(6, 6), (7, 6)]
        with torch.no_grad():
            fast.cell.weight.mul_(2)
            model.cell.weight.copy_(fast.cell.weight)
        torch.testing.assert_close(fast(x), model(x), rtol=0.05, atol=0.05)


def test_a_weight_that_is_used_again_gets_its_gradient_through_one_cast() -> None:
    class Stopped(Repeated):
        """Uses the weight first without gradients, and this use makes the cast."""

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                first = self.cell(x[:, 0])
            return super().forward(x) + first.sum()

    model, x = Stopped(), rows(4, 5, 6)
    fast = optimize(model, [CastPrecision()], mode="training", example_inputs=(x,))
    assert report_of(fast).passes[0].status == "applied", str(report_of(fast))
    fast(x).square().mean().backward()
    got = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().mean().backward()
    for one, parameter in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=0.05, atol=0.05)


def test_a_trace_holds_the_casts_of_weights_that_are_used_again() -> None:
    model, x = Repeated().eval(), rows(4, 5, 6)
    fast = optimize(model, [CastPrecision()], example_inputs=(x,))
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("ignore")
        fast(x)
        traced = torch.jit.trace(fast, (x,), check_trace=False)
    before = traced(x)
    with torch.no_grad():
        traced.cell.weight.mul_(2)
    assert not torch.equal(traced(x), before)
    torch.testing.assert_close(traced(x), model(x), rtol=0.05, atol=0.05)


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "how"), [("float16", "autocast"), ("float16", "weights"), ("bfloat16", "autocast")])
def test_files_hold_the_dtype(dtype: Any, how: Any, tmp_path: Path) -> None:
    x = rows(3, 6)
    model = enliven(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))).eval()
    fast = optimize(model, [CastPrecision(dtype=dtype, how=how)], example_inputs=(x,))
    # onnxruntime has no product in bfloat16 for CPUs.
    formats = ("torchscript", "onnx") if dtype == "float16" else ("torchscript",)
    bundle = export(fast, example_inputs=(x,), output=tmp_path / "net", formats=formats, batch_sizes=(1, 5))
    assert bundle.parity.ok
    assert bundle.manifest["parity"]["precision"] == bundle.manifest["golden"]["precision"] == dtype
    assert verify_bundle(bundle.path).ok
    loaded = bundle.load("torchscript")
    assert torch.equal(loaded(x)[0], fast(x))
    with Watching("addmm") as products:
        loaded(x)
    assert [each.dtype for each in products.seen] == [DTYPES[dtype]] * 2
    if how == "weights":
        with torchscript_allowed():
            state = torch.jit.load(bundle.path / "model.torchscript.pt").state_dict()
        assert torch.float16 in {value.dtype for value in state.values()}
    if "onnx" not in formats:
        return
    graph = onnx.shape_inference.infer_shapes(onnx.load(tmp_path / "net" / "model.onnx")).graph
    types = {value.name: value.type.tensor_type.elem_type for value in graph.value_info}
    calls = [node for node in graph.node if node.op_type in ("Gemm", "MatMul")]
    assert [types[node.output[0]] for node in calls] == [onnx.TensorProto.FLOAT16] * 2
    assert {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)} == {onnx.TensorProto.FLOAT}


def test_what_a_format_cannot_hold_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: Any, **kwargs: Any) -> Any:
        raise RouteRefused("there is no Conv")

    # For a convolution, the three real routes to ONNX raise this too, but each takes seconds.
    for route in ("by_dynamo", "by_torchscript"):
        monkeypatch.setattr(exporters.onnx, route, refuses)
    x = rows(3, 6)
    options: dict[str, Any] = {"example_inputs": (x,), "formats": ("onnx",), "output": tmp_path / "net"}
    why = "(dynamo, dynamo-unoptimized and torchscript: there is no Conv)."
    hint = ", which not every operator of a format and not every runtime supports: export it"
    for dtype, others in (("bfloat16", " in float16, or in float32."), ("float16", " in float32.")):
        fast = optimize(linear(6, 3), [CastPrecision(dtype=dtype)], example_inputs=(x,))  # type: ignore[arg-type]
        with pytest.raises(ExportError, match=re.escape(f"{why} It computes in {dtype}{hint}{others}")):
            export(fast, **options)
    with pytest.raises(ExportError) as plain:
        export(linear(6, 3), **options)
    assert hint not in str(plain.value)


# Real models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "how"), [("bert", "weights"), ("llama", "autocast")])
def test_a_model_of_transformers_is_cast(name: str, how: Any) -> None:
    model, args, kwargs = REAL_MODELS[name]()
    fast = optimize(model, [CastPrecision(how=how)], example_inputs=args, example_kwargs=kwargs)
    report = report_of(fast)
    assert report.passes[0].status == "applied", str(report)
    assert report.verified
    outputs = fast(*args, **kwargs)
    assert type(outputs) is type(model(*args, **kwargs))
    assert outputs[0].dtype == torch.float32
