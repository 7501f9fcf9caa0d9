"""Fold a BatchNorm into the preceding convolution."""

import copy
import functools
import pickle
import random
import threading
from dataclasses import dataclass
from typing import Any

import folding_models as models
import pytest
import torch
import torch.nn.functional as F
from allocations import LargestResult
from folding_models import CONVOLUTIONS, FAR, image, norm_behind
from pairs import is_carried
from pass_contract import captured, check_pass, recorded
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import check_parity, optimize, report_of
from passes import FoldConvBn, fold_conv_bn
from passes.errors import UnseenCall
from passes.fold_conv_bn import folded_tensors
from passes.program.matching import pairs_behind
from passes.program.weights import bare


def norms_in(model: nn.Module) -> int:
    return len(list(pairs_behind(recorded(model, image()))))


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_the_algebra_is_exact_in_float64(kind: str, bias: bool, affine: bool) -> None:
    make, shape = CONVOLUTIONS[kind]
    conv = make(bias=bias)
    model = enliven(nn.Sequential(conv, norm_behind(conv, shape, affine=affine, eps=1e-2))).double().eval()
    x = image(*shape).double()
    tree, context = captured(model, x, keep_flags=True)
    done = FoldConvBn().run(tree, context)
    assert [(change.where, change.what) for change in done.changes] == [("1", "folded into 0")]
    fast = tree.root
    assert is_carried(fast[1])
    assert torch.allclose(fast(x), model(x), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(conv(x), model(x), rtol=1e-2, atol=1e-2), "this BatchNorm does nothing to be folded"


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_parity_in_float32(kind: str) -> None:
    make, shape = CONVOLUTIONS[kind]
    conv = make()
    model = enliven(nn.Sequential(conv, norm_behind(conv, shape), nn.ReLU())).eval()
    tree, context = captured(model, image(*shape))
    assert len(FoldConvBn().run(tree, context).changes) == 1
    report = check_parity(model, tree.root, (image(*shape),), batch_sizes=(1, 5), draws=1)
    assert report.ok, report.reason


@pytest.mark.parametrize("cls", models.FOLDED)
def test_folds_every_spelling(cls: type[nn.Module]) -> None:
    model = cls().eval()
    tree, context = captured(model, image())
    done = FoldConvBn().run(tree, context)
    assert len(done.changes) == (2 if cls in (models.TwoNorms, models.TorchFunctions) else 1)
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert report_of(fast).passes[0].status == "applied", str(report_of(fast))
    assert norms_in(fast) == 0
    twin = pickle.loads(pickle.dumps(fast))
    assert torch.equal(twin(image()), fast(image()))


def test_a_weight_standardisation_is_no_batch_norm() -> None:
    done = check_pass(FoldConvBn(), models.Standardised().eval(), (image(),))
    assert done.changes == ()


def test_what_a_folded_functional_norm_read_is_gone() -> None:
    fast = optimize(models.WithAct(), ["fold-conv-bn"], example_inputs=(image(),))
    assert set(fast.state_dict()) == {"conv.weight", "conv.bias", "bn.num_batches_tracked"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_keep_theirs(dtype: torch.dtype) -> None:
    model = models.Pair(bias=False).to(dtype).eval()
    x = image().to(dtype)
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(x,))
    assert report_of(fast).passes[0].status == "applied", str(report_of(fast))
    assert {tensor.dtype for tensor in fast.parameters()} == {dtype}
    assert fast(x).dtype is dtype


def random_pair(seed: int) -> tuple[nn.Module, torch.Tensor]:
    """A layer with a BatchNorm that has the statistics of its inputs, and an example input."""
    draw = random.Random(seed)
    dims, before, behind = draw.choice([0, 1, 2, 2]), draw.choice([3, 8, 16]), draw.choice([2, 8, 16])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        x = torch.randn(draw.choice([1, 2, 4]), before, *[draw.choice([3, 6])] * dims)
        conv = [nn.Linear, nn.Conv1d, nn.Conv2d][dims](before, behind, *[3] * bool(dims), bias=draw.random() < 0.5)
        norm = norm_behind(conv, x.shape, momentum=None)
        model = enliven(nn.Sequential(conv, norm, nn.ReLU()), seed)
        norm.reset_running_stats()
        model(torch.randn(64, *x.shape[1:]))
    return model.eval(), x.relu() if draw.random() < 0.5 else x


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(12))
def test_ordinary_pairs_in_half_precision_are_folded(dtype: torch.dtype, seed: int) -> None:
    model, x = random_pair(seed)
    fast = optimize(model.to(dtype), ["fold-conv-bias", "fold-conv-bn"], example_inputs=(x.to(dtype),))
    folded, reasons = (
        report_of(fast).passes[1],
        [str(skip) for record in report_of(fast).passes for skip in record.skips],
    )
    assert (folded.status, reasons) == ("applied", [])


def test_a_number_that_happens_to_be_exact_is_not_taken_for_the_precision_of_a_layer() -> None:
    """The rounding error of a layer with one output may be 0 for one input, and show only for similar inputs."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1, eps=1e-100)).bfloat16().eval()
    with torch.no_grad():
        # 179/256 + 77/256 is exactly 1. For other inputs, the BatchNorm amplifies the rounding error of the sum.
        model[0].weight.copy_(torch.tensor([[179 / 256, 77 / 256]]))
        model[1].running_mean.fill_(0.984375)
        model[1].running_var.fill_(8e-4)
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    assert torch.equal(model[0](x), torch.ones(1, 1, dtype=torch.bfloat16))
    (record,) = report_of(optimize(model, ["fold-conv-bn"], example_inputs=(x,))).passes
    assert (record.status, record.skips) == ("applied", ())


class CancellingFunctions(nn.Module):
    """Two pairs of functions in one forward; only their order distinguishes them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.usual, self.cancelling = (nn.Parameter(torch.randn(4, 3, 3, 3, generator=generator)) for _ in range(2))
        models.let_cancel(self.cancelling)
        for name in ("first", "second"):
            self.register_buffer(f"{name}_mean", torch.rand(4, generator=generator))
            self.register_buffer(f"{name}_var", torch.rand(4, generator=generator) + 0.5)

    def forward(self, x: torch.Tensor) -> Any:
        usual = F.batch_norm(F.conv2d(x, self.usual), self.first_mean, self.first_var)
        return usual, F.batch_norm(F.conv2d(x + 1000, self.cancelling), self.second_mean, self.second_var)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_two_pairs_of_functions_only_the_one_that_loses_too_much_is_left_alone(dtype: torch.dtype) -> None:
    model = CancellingFunctions().to(dtype).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image().to(dtype),))
    (record,) = report_of(fast).passes
    assert (len(record.changes), len(record.skips)) == (1, 1)
    assert "it loses too much to rounding" in record.skips[0].text
    assert torch.equal(fast.cancelling, model.cancelling)
    assert not torch.equal(bare(fast.usual), model.usual)
    assert torch.equal(fast(image().to(dtype))[1], model(image().to(dtype))[1])


def test_layout_and_gradient_flags_are_kept() -> None:
    model = models.Pair(bias=False).eval().to(memory_format=torch.channels_last)
    model.requires_grad_(False)
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert fast.conv.weight.stride() == model.conv.weight.stride()
    assert not fast.conv.weight.requires_grad
    assert not fast.conv.bias.requires_grad
    model.conv.weight.requires_grad_(True)
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    assert fast.conv.weight.requires_grad
    assert fast.conv.bias.requires_grad


def test_the_weight_is_rounded_once() -> None:
    model = models.Pair().eval()
    (pair,) = pairs_behind(recorded(model, image()))
    weight, bias = folded_tensors(pair)
    wide = copy.deepcopy(model).double()
    scale = wide.bn.weight / torch.sqrt(wide.bn.running_var + wide.bn.eps)
    assert torch.equal(weight, (wide.conv.weight * scale.reshape(-1, 1, 1, 1)).float())
    assert torch.equal(bias, ((wide.conv.bias - wide.bn.running_mean) * scale + wide.bn.bias).float())


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weight_is_folded_in_slices_of_its_rows(kind: str, dtype: torch.dtype, monkeypatch: Any) -> None:
    """At most one slice is converted to float64 at a time, and the result is bitwise the same."""
    make, shape = CONVOLUTIONS[kind]
    convolution = make()
    model = enliven(nn.Sequential(convolution, norm_behind(convolution, shape))).to(dtype).eval()
    (pair,) = pairs_behind(recorded(model, image(*shape).to(dtype)))
    whole, bias = folded_tensors(pair)
    before = convolution.weight.clone()
    row = convolution.weight[0].numel()
    monkeypatch.setattr(fold_conv_bn, "_ELEMENTS", 2 * row)
    with LargestResult() as largest:
        sliced, _ = folded_tensors(pair)
    assert largest.of[torch.float64] == (
        convolution.weight.numel() if dtype is torch.float64 else max(2 * row, len(bias))
    )
    assert torch.equal(sliced, whole)
    assert sliced.stride() == whole.stride() == convolution.weight.stride()
    assert torch.equal(convolution.weight, before)


def test_the_identity_is_in_the_mode_of_the_norm() -> None:
    fast = optimize(models.Pair(), ["fold-conv-bn"], example_inputs=(image(),))
    assert not any(module.training for module in fast.modules())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.bn.train(), "it uses the statistics of the batch"),
        (lambda m: setattr(m, "bn", nn.BatchNorm2d(4, track_running_stats=False)), "it uses the statistics of"),
    ],
)
def test_batch_statistics_are_left_alone(change: Any, reason: str) -> None:
    model = models.Pair().eval()
    change(model)
    tree, context = captured(model, image(), keep_flags=True)
    done = FoldConvBn().run(tree, context)
    assert done.changes == ()
    assert reason in done.skips[0].reason


@pytest.fixture(scope="module")
def guarded() -> Any:
    @functools.cache
    def make(cls: type[nn.Module]) -> nn.Module:
        model = cls().eval()
        fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
        assert report_of(fast).passes[0].status == "applied", str(report_of(fast))
        assert torch.allclose(fast(image(seed=4)), model(image(seed=4)), atol=1e-5)
        return fast

    return make


@pytest.mark.parametrize("cls", models.UNSEEN)
def test_a_branch_that_was_not_seen_raises(guarded: Any, cls: type[nn.Module]) -> None:
    fast = guarded(cls)
    for twin in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        before = twin(image(seed=4))
        with pytest.raises(UnseenCall, match="call optimize\\(\\) with example inputs that take this branch"):
            twin(FAR)
        assert torch.equal(twin(image(seed=4)), before), "the error left something behind"


def test_an_error_of_the_model_stays_its_own(guarded: Any) -> None:
    fast = guarded(models.IslandRaises)
    before = fast(image(seed=4))
    with pytest.raises(ValueError, match="too large"):
        fast(FAR)
    assert torch.equal(fast(image(seed=4)), before)


def test_a_guarded_module_keeps_its_signature(guarded: Any) -> None:
    import inspect

    assert list(inspect.signature(guarded(models.Island).forward).parameters) == ["x"]


def test_a_guarded_module_runs_in_two_threads(guarded: Any) -> None:
    fast = guarded(models.IslandRawOutput)
    wanted = fast(image(seed=4))
    seen: list[bool] = []
    raised: list[bool] = []

    def near() -> None:
        seen.extend(torch.equal(fast(image(seed=4)), wanted) for _ in range(50))

    def far() -> None:
        for _ in range(50):
            with pytest.raises(UnseenCall):
                fast(FAR)
            raised.append(True)

    threads = [threading.Thread(target=near), threading.Thread(target=far), threading.Thread(target=near)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 100
    assert len(raised) == 50


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit")
def test_a_guarded_module_is_traced_by_jit(guarded: Any) -> None:
    fast = guarded(models.Island)
    traced = torch.jit.trace(fast, (image(),))
    assert torch.equal(traced(image(seed=4)), fast(image(seed=4)))


@pytest.mark.parametrize("cls", [models.Island, models.IslandBesides, models.IslandAsksShape])
def test_a_guarded_module_is_compiled(guarded: Any, cls: type[nn.Module]) -> None:
    fast = guarded(cls)
    torch._dynamo.reset()
    compiled = torch.compile(fast, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(image(seed=4)), fast(image(seed=4)))
        assert torch.equal(compiled(image(seed=5)), fast(image(seed=5)))
        if cls is models.IslandBesides:
            with pytest.raises(UnseenCall, match="its output was used without it"):
                compiled(FAR)
            assert torch.equal(compiled(image(seed=4)), fast(image(seed=4)))
    torch._dynamo.reset()


@pytest.mark.parametrize("cls", [models.Pair, models.Island])
def test_inside_of_a_compiled_child(cls: type[nn.Module]) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(torch.compile(cls(), backend="eager"), nn.ReLU()).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),), strict=True)
    (change,) = report_of(fast).passes[0].changes
    assert change.where == "0._orig_mod.bn"
    with torch.no_grad():
        for seed in (4, 5):
            torch.testing.assert_close(fast(image(seed=seed)), model(image(seed=seed)), rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_guarded_module_can_be_optimized_again(guarded: Any) -> None:
    fast = guarded(models.IslandBesides)
    again = optimize(fast, example_inputs=(image(),))
    assert torch.allclose(again(image(seed=4)), fast(image(seed=4)), atol=1e-5)
    with pytest.raises(UnseenCall):
        again(FAR)


class Sized(nn.Module):
    """Calls a transposed convolution with an output size."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.BatchNorm2d(3)
        self.conv = nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(self.front(x), output_size=[2 * x.shape[2], 2 * x.shape[3]]))


class SizedByPosition(Sized):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x, (11, 12)))


class SizedIsland(Sized):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(output_size=(11, 12) if x.sum() > 1e3 else (12, 11), input=x))


@pytest.mark.parametrize("kind", [Sized, SizedByPosition, SizedIsland])
def test_a_transposed_convolution_may_be_told_its_output_size(kind: type[Sized]) -> None:
    model, x = enliven(kind()).eval(), image(2, 3, 6, 6)
    fast = optimize(model, ["fold-conv-bias", "fold-conv-bn"], example_inputs=(x,))
    assert [len(record.changes) for record in report_of(fast).passes] == [1, 1]
    torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
    assert check_parity(model, fast, (x,), batch_sizes=(1, 3)).ok


class Box:
    """Holds a value in a slot, where a search of `__dict__` doesn't find it."""

    __slots__ = ("kept",)


@dataclass
class Given:
    """An argument of a class that torch doesn't know as a container."""

    x: Tensor
    box: Box


class TakesObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, given: Given) -> Tensor:
        return self.bn(self.conv(given.x))


class KeepsInObject(TakesObject):
    """Stores the output of the convolution in the object."""

    def forward(self, given: Given) -> Tensor:
        given.box.kept = self.conv(given.x)
        return self.bn(given.box.kept)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "folds"), [(TakesObject, 1), (KeepsInObject, 0)])
def test_what_comes_in_an_object_goes_through_layers_that_fold(kind: type[nn.Module], folds: int) -> None:
    model, x = enliven(kind()).eval(), image()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(Given(x, Box()),))
    assert len(report_of(fast).passes[0].changes) == folds
    torch.testing.assert_close(fast(Given(x, Box())), model(Given(x, Box())), rtol=1e-5, atol=1e-5)
    assert check_parity(model, fast, (Given(image(3, 3, 5, 5), Box()),)).ok


def test_a_result_of_another_pass_is_folded_later() -> None:
    """The checkpoint guard of the first pass doesn't count as a reader of the weight."""
    model = enliven(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).eval()
    given = (image(),)
    fast = optimize(optimize(model, ["fold-conv-bias"], example_inputs=given), ["fold-conv-bn"], example_inputs=given)
    assert len(report_of(fast).passes[0].changes) == 1
    torch.testing.assert_close(fast(image()), model(image()), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("layer", ["conv", "linear", "transposed"])
def test_the_result_runs_compiled_by_inductor(layer: str, grad: bool) -> None:
    """Compiled code calls kernels with the folded tensors, outside of any forward."""
    made: dict[str, tuple[nn.Module, nn.Module, Tensor]] = {
        "conv": (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), image(2, 3, 8, 8)),
        "linear": (nn.Linear(6, 8), nn.BatchNorm1d(8), torch.randn(4, 6)),
        "transposed": (nn.ConvTranspose2d(3, 8, 3), nn.BatchNorm2d(8), image(2, 3, 8, 8)),
    }
    first, second, x = made[layer]
    model = enliven(nn.Sequential(first, second, nn.ReLU())).eval()
    both = optimize(model, ["fold-conv-bn", "torch-compile"], example_inputs=(x,))
    assert [record.status for record in report_of(both).passes] == ["applied", "applied"]
    fast = optimize(model, example_inputs=(x,))
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(torch.compile(fast)(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padding", [(1, 1), "same"])
def test_padding_that_is_set_later_is_refused_behind_a_folded_norm(padding: Any) -> None:
    model = enliven(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3))).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(image(),))
    fast[1].padding = padding
    with pytest.raises(UnseenCall, match="1 pads with zeros now, but 0 was folded into it when it didn't"):
        fast(image())


def test_code_that_goes_around_the_seal_finds_no_number_of_a_folded_norm() -> None:
    fast = optimize(enliven(models.Pair()).eval(), ["fold-conv-bn"], example_inputs=(image(),))
    (norm,) = (module for module in fast.modules() if isinstance(module, nn.BatchNorm2d))
    with pytest.warns(UserWarning, match="To copy construct"):
        assert torch.tensor(norm.running_var).isnan().all()


def test_a_cache_that_only_the_first_run_fills_stands_in_no_way() -> None:
    """As in RT-DETR, where a function with `lru_cache` computes the position embeddings."""

    @functools.lru_cache
    def positions(size: int) -> Tensor:
        return torch.arange(size).float().div(size).sin()

    class Positioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 4, 3)
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.first(x + positions(x.shape[-1])))

    model = enliven(Positioned()).eval()
    fast = optimize(model, FoldConvBn(), example_inputs=(image(),))
    assert [(record.status, len(record.changes)) for record in fast.report.passes] == [("applied", 1)]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit")
def test_a_sealed_value_is_reshaped_in_a_trace_by_sizes_of_another() -> None:
    """As in PatchTSMixer: in a trace, sizes are tensors."""

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.first = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            rows = x.reshape(x.shape[0] * x.shape[1], x.shape[2], x.shape[3])
            rows = self.norm(rows.transpose(1, 2)).transpose(1, 2)
            return self.first(torch.reshape(rows, x.shape))

    model = enliven(Mixer()).eval()
    fast = optimize(model, FoldConvBn(), example_inputs=(torch.randn(2, 3, 5, 8),))
    assert [record.status for record in fast.report.passes] == ["applied"]
    traced = torch.jit.trace(fast, (torch.randn(2, 3, 5, 8),))
    x = torch.randn(4, 3, 5, 8)
    assert torch.allclose(traced(x), model(x), atol=1e-5)
