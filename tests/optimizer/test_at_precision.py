"""A result at a lower precision is judged by the original's own error at that precision."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from folding_models import image
from real_models import REAL_MODELS
from tiny_models import Net, enliven
from torch import Tensor, nn

from optimize_export.errors import UsageError
from optimizer import check_parity, export, optimize, report_of, verify_bundle
from optimizer.model.inputs import Samples
from optimizer.parity import ParityReport, Reference, judge, measure_reference
from passes import CastPrecision, Precision
from passes.base import Context, TensorRef
from passes.graph.module_pass import ModulePass, ModuleRewriter

BFLOAT16 = Precision(torch.bfloat16)
FLOAT16 = Precision(torch.float16)
PRECISIONS = [BFLOAT16, Precision(torch.bfloat16, everywhere=True), FLOAT16, Precision(torch.float16, everywhere=True)]
IDS = [f"{each.name}-{'weights' if each.everywhere else 'autocast'}" for each in PRECISIONS]


def net() -> nn.Module:
    torch.manual_seed(0)
    return enliven(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8),
            nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
        )
    ).eval()  # fmt: skip


def x() -> Tensor:
    return image(2, 3, 8, 8)


def cast(model: nn.Module, precision: Precision, *args: Any, **kwargs: Any) -> nn.Module:
    how = "weights" if precision.everywhere else "autocast"
    item = CastPrecision(dtype=precision.name, how=how)  # type: ignore[arg-type]
    fast = optimize(model, [item], example_inputs=args, example_kwargs=kwargs)
    assert report_of(fast).passes[0].status == "applied", str(report_of(fast))
    return fast


def reference_of(model: nn.Module, *args: Any, **kwargs: Any) -> Reference:
    return measure_reference(model, Samples(args, kwargs), batch_sizes=[2, 3], draws=2)


def faulty(model: nn.Module, fault: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of the model with a fault in its first output."""
    twin = copy.deepcopy(model)

    def put(module: nn.Module, args: Any, outputs: Any) -> Any:
        if isinstance(outputs, Tensor):
            return fault(outputs)
        outputs = copy.copy(outputs)
        first = next(iter(outputs))
        outputs[first] = fault(outputs[first])
        return outputs

    twin.register_forward_hook(put)
    return twin


def one_nan(value: Tensor) -> Tensor:
    value = value.clone()
    value.view(-1)[0] = math.nan
    return value


FAULTS = {
    "scaled by a tenth": lambda value: 1.1 * value,
    "a channel swapped": lambda value: value[..., [1, 0, *range(2, value.shape[-1])]],
    "a NaN": one_nan,
    "an infinity": lambda value: one_nan(value).nan_to_num(nan=math.inf),
    "left out": torch.zeros_like,
    "another dtype": lambda value: value.bfloat16(),
}


@pytest.mark.parametrize(
    ("name", "precision"),
    [*(("net", each) for each in PRECISIONS), pytest.param("bert", BFLOAT16, marks=pytest.mark.slow)],
    ids=[*(f"net-{each}" for each in IDS), f"bert-{IDS[0]}"],
)
def test_a_right_cast_passes_and_every_planted_fault_fails(name: str, precision: Precision) -> None:
    model, args, kwargs = (net(), (x(),), {}) if name == "net" else REAL_MODELS["bert"]()
    fast = cast(model, precision, *args, **kwargs)
    reference = reference_of(model, *args, **kwargs)
    lower = reference.at_precision(precision)
    right = judge(lower.compare(fast))
    assert right.ok, right.reason
    assert right.ratio < 2.5
    # Without the declared precision, the same result fails.
    assert judge(reference.compare(fast)).verdict == "failed"
    faults = FAULTS if name == "net" else {fault: FAULTS[fault] for fault in ("scaled by a tenth", "a channel swapped")}
    for fault, put in faults.items():
        seen = judge(lower.compare(faulty(fast, put)))
        assert seen.verdict == "failed", f"{fault} isn't seen: {seen.reason}"


def test_a_layer_left_out_inside_fails() -> None:
    model = net()
    lower = reference_of(model, x()).at_precision(BFLOAT16)
    fast = cast(model, BFLOAT16, x())
    for index in (1, 2, 4):
        left_out, fast[index] = fast[index], nn.Identity()
        assert judge(lower.compare(fast)).verdict == "failed", f"layer {index} was left out"
        fast[index] = left_out
    assert judge(lower.compare(fast)).ok


def test_an_overflow_fails() -> None:
    layers = {"first": nn.Linear(6, 8), "last": nn.Linear(8, 3)}
    model = enliven(Net(lambda net, x: net.last(torch.atan(1e-5 * (1e5 * net.first(x)))), **layers)).eval()
    given = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    reference = reference_of(model, given)

    def candidate(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        twin = copy.deepcopy(model).to(dtype)
        return lambda value: twin(value.to(dtype)).float()

    assert judge(reference.at_precision(PRECISIONS[1]).compare(candidate(torch.bfloat16))).ok
    # The overflow doesn't show in the output, because the arc tangent of infinity is finite.
    assert candidate(torch.float16)(given).isfinite().all()
    assert judge(reference.at_precision(PRECISIONS[3]).compare(candidate(torch.float16))).verdict == "failed"


def test_the_noise_is_the_error_of_the_original_at_that_precision() -> None:
    model = net()
    reference = reference_of(model, x())
    before = copy.deepcopy(model.state_dict())
    plain, coarse, fine = (
        each.noises["output"] for each in (reference, reference.at_precision(BFLOAT16), reference.at_precision(FLOAT16))
    )
    # The error of the model itself under autocast, at the same calls.
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        errors = [
            (model(kept.call or call).float() - kept.truth.values["output"]) for kept, call in calls_of(reference)
        ]
    largest = max(float(error.abs().max()) for error in errors)
    # The noise is at least the error of rounding the output once.
    assert coarse.noise == pytest.approx(max(largest, 2**-8 * coarse.scale), rel=1e-6)
    squares = sum(float(error.square().sum()) for error in errors) / sum(error.numel() for error in errors)
    assert coarse.noise_rms == pytest.approx(squares**0.5, rel=1e-6)
    # The machine epsilon of float16 is an eighth of that of bfloat16.
    assert fine.noise == pytest.approx(coarse.noise / 8, rel=1e-6)
    assert plain.noise < fine.noise / 100
    # Neither the reference nor the model was changed.
    assert reference.noises["output"] is plain
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all("forward" not in vars(module) for module in model.modules())


def calls_of(reference: Reference) -> list[tuple[Any, Any]]:
    return [(one, reference.original.inputs_of(one).args[0]) for one in reference.original.calls]


def test_layers_that_stay_in_float32_add_no_noise() -> None:
    model = net()
    reference = reference_of(model, x())
    for everywhere in (False, True):
        every = tuple(str(index) for index in range(9))
        kept = Precision(torch.bfloat16, everywhere, every, every)
        coarse = reference.at_precision(Precision(torch.bfloat16, everywhere)).noises["output"]
        fine = reference.at_precision(kept).noises["output"]
        # The noise always includes one rounding of the output. If all layers stay in float32, autocast adds no other.
        assert fine.noise_rms < coarse.noise_rms
        if not everywhere:
            assert fine.noise == pytest.approx(2**-8 * fine.scale)


@pytest.mark.parametrize("precision", PRECISIONS, ids=IDS)
def test_an_input_that_no_layer_takes_is_no_part_of_the_noise(precision: Precision) -> None:
    waves = Net(lambda net, x, time: net.layer(x) + time.sin(), layer=enliven(nn.Linear(6, 6)))
    given = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    reference = reference_of(waves, given, torch.linspace(990, 999, 4)[:, None])
    noise = reference.at_precision(precision).noises["output"]
    assert noise.noise < 8 * torch.finfo(precision.dtype).eps * noise.scale


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_layer_that_stays_in_float32_may_write_to_its_arguments(everywhere: bool) -> None:
    class Tap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = enliven(nn.Linear(6, 6))

        def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
            seen.append(self.layer(x))
            return seen[-1]

    class Tapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.tap = enliven(nn.Linear(6, 6)), Tap()

        def forward(self, x: Tensor) -> Tensor:
            seen = [self.first(x)]
            self.tap(seen[0], seen)
            return torch.stack(seen).sum(0)

    reference = reference_of(Tapped(), torch.randn(2, 6, generator=torch.Generator().manual_seed(0)))
    noise = reference.at_precision(Precision(torch.bfloat16, everywhere, ("tap",), ())).noises["output"]
    assert noise.noise < 8 * torch.finfo(torch.bfloat16).eps * noise.scale


def test_an_original_that_is_lost_in_the_dtype_proves_nothing() -> None:
    def cancels(net: nn.Module, x: Tensor) -> Tensor:
        large = 100 + net.layer(x)
        return net.layer(x) * 0.01 + (large - net.layer(large) + net.layer(large)) - large

    model = Net(cancels, layer=enliven(nn.Linear(6, 6)))
    given = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    precision = PRECISIONS[1]
    reference = reference_of(model, given)
    assert judge(reference.compare(model)).ok
    report = judge(reference.at_precision(precision).compare(model))
    assert report.verdict == "vacuous"
    assert "hardly larger than its rounding noise" in report.reason


def test_integers_that_the_original_itself_decides_differently_are_ties() -> None:
    class Labels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = enliven(nn.Linear(6, 4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            scores = self.layer(x)
            return scores, scores.argmax(-1)

    torch.manual_seed(0)
    model = Labels()
    given = torch.randn(400, 6, generator=torch.Generator().manual_seed(0))
    reference = measure_reference(model, Samples((given,)), batch_sizes=[400], draws=2)
    lower = reference.at_precision(BFLOAT16)
    fast = cast(model, BFLOAT16, given)
    assert not torch.equal(fast(given)[1], model(given)[1])
    report = judge(lower.compare(fast))
    assert report.ok, report.reason
    ties = {name: each.noises["output_1"].tied for name, each in (("plain", reference), ("coarse", lower))}
    finer = reference.at_precision(FLOAT16).noises["output_1"].tied
    assert ties["plain"] <= finer < ties["coarse"] < 40
    assert any("when it computes in bfloat16" in note for note in report.notes)

    class Wrong(Labels):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            scores, labels = super().forward(x)
            return scores, labels.roll(1)

    wrong = Wrong()
    wrong.load_state_dict(model.state_dict())
    assert judge(lower.compare(wrong)).verdict == "failed"


def test_gradients_are_judged_at_the_precision() -> None:
    model = enliven(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))
    given = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    samples = Samples((given,))
    reference = measure_reference(model, samples, batch_sizes=[8, 9], draws=1, mode="training")
    lower = reference.at_precision(BFLOAT16)
    fast = optimize(model, [CastPrecision()], mode="training", example_inputs=(given,))
    assert judge(lower.compare(fast)).ok
    assert judge(reference.compare(fast)).verdict == "failed"
    assert {noise.kind for noise in lower.noises.values()} == {"output", "gradient"}
    name = "gradient of 0.weight"
    assert lower.noises[name].noise > 10 * reference.noises[name].noise

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 1.2 * gradient

    fast.register_forward_hook(lambda module, args, output: Scaled.apply(output))
    wrong = judge(lower.compare(fast))
    assert wrong.verdict == "failed"
    assert "gradient" in wrong.reason


# In the pipeline ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale(ModulePass):
    """Multiply the last layer's weight by a number. Only the comparison of the whole model can find that."""

    name: ClassVar[str] = "scale"
    by: float = 1.1

    def rewrite(self, graph: ModuleRewriter, context: Context) -> None:
        last = graph.tree.root[8]
        with graph.change("8", "scaled by a number") as change:
            change.sources.append(TensorRef(last, "weight"))
            graph.set_tensor(TensorRef(last, "weight"), last.weight.detach() * self.by)


def statuses(report: Any) -> list[str]:
    return [record.status for record in report.passes]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["autocast", "weights"])
def test_a_wrong_pass_next_to_a_right_cast_is_found(how: Any) -> None:
    good = CastPrecision(how=how)
    # Both kinds of casts are judged alike, so one of them has a third of the orders.
    for passes, wanted in (
        ([good, Scale()], ["applied", "rolled-back"]),
        ([Scale(), good], ["rolled-back", "applied"]),
        # An error of 1 % is below the error of bfloat16, so passes before a cast are judged without the cast.
        (["fold-conv-bn", Scale(1.01), good], ["applied", "rolled-back", "applied"]),
        ([Scale(1.01), "fold-conv-bn", good], ["rolled-back", "applied", "applied"]),
        ([Scale(1.01), good, "fold-conv-bias", "fold-conv-bn"], ["rolled-back", "applied", "applied", "applied"]),
        # So are passes after a cast.
        ([good, Scale(1.01)], ["applied", "rolled-back"]),
        (["fold-conv-bn", good, Scale(1.01), "fold-conv-bias"], ["applied", "applied", "rolled-back", "unchanged"]),
        ([good, Scale(1.01), "fold-conv-bn", Scale(0.99)], ["applied", "rolled-back", "applied", "rolled-back"]),
        ([Scale(1.01), good, Scale(0.99)], ["rolled-back", "applied", "rolled-back"]),
    )[:: 1 if how == "autocast" else 3]:
        report = report_of(optimize(net(), passes, example_inputs=(x(),)))
        assert statuses(report) == wanted, str(report)
        assert report.verified


def test_a_change_after_a_cast_is_still_checked_by_itself() -> None:
    @dataclass(frozen=True)
    class WrongFold(ModulePass):
        """Make the weight of a convolution 1 % too large, which the comparison of the whole model may miss."""

        name: ClassVar[str] = "wrong-fold"
        by: float = 1.01

        def rewrite(self, graph: ModuleRewriter, context: Context) -> None:
            conv = graph.tree.root[0]
            with graph.change("0", "its weight a little larger", conv):
                graph.set_tensor(TensorRef(conv, "weight"), conv.weight.detach() * self.by)

    for how in ("autocast", "weights"):
        report = report_of(
            optimize(net(), [CastPrecision(how=how), WrongFold()], example_inputs=(x(),))  # type: ignore[arg-type]
        )
        assert statuses(report) == ["applied", "rolled-back"], str(report)
        assert report.passes[1].reason.startswith("0 (its weight a little larger)")


class WrongInHalf(nn.Conv2d):
    """Right in float32 and wrong in bfloat16, like a faulty kernel for one dtype."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output * 1.5 if output.dtype is torch.bfloat16 else output


@dataclass(frozen=True)
class OtherClass(ModulePass):
    """Give one convolution a class that is wrong in bfloat16, and another one a class that is right."""

    name: ClassVar[str] = "other-class"

    def rewrite(self, graph: ModuleRewriter, context: Context) -> None:
        for number, cls in ((0, WrongInHalf), (3, type("Right", (nn.Conv2d,), {}))):
            conv = graph.tree.root[number]
            with graph.change(str(number), f"made a {cls.__name__}", conv):
                graph.set_class(conv, cls)


def test_a_change_after_autocast_that_is_wrong_only_in_its_dtype_is_undone() -> None:
    model = net()
    (record,) = report_of(optimize(model, [OtherClass()], example_inputs=(x(),))).passes
    assert [change.where for change in record.changes] == ["0", "3"], "right in float32"
    _, record = report_of(optimize(model, [CastPrecision(), OtherClass()], example_inputs=(x(),))).passes
    assert (record.status, [change.where for change in record.changes]) == ("applied", ["3"])
    (skip,) = record.skips
    assert skip.where == "0"
    assert "undone (made a WrongInHalf), because it loses too much to rounding" in skip.text


def test_a_barrier_after_a_cast_is_run_with_the_cast_alone() -> None:
    seen = []

    @dataclass(frozen=True)
    class Compiles(Scale):
        """A barrier that multiplies a weight by 1, so it changes no value."""

        name: ClassVar[str] = "compiles"
        is_barrier: ClassVar[bool] = True
        by: float = 1.0

        def rewrite(self, graph: ModuleRewriter, context: Context) -> None:
            seen.append(graph.tree.root[8].weight.dtype)
            super().rewrite(graph, context)

    report = report_of(optimize(net(), [CastPrecision(how="weights"), Compiles()], example_inputs=(x(),)))
    assert statuses(report) == ["applied", "applied"]
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize(
    ("declared", "how", "words"),
    [
        (None, "autocast", "its rounding noise"),
        (Precision(torch.float16, everywhere=True), "weights", "its error in float16"),
    ],
)
def test_a_cast_that_declares_no_precision_or_a_higher_one_is_rolled_back(declared: Any, how: Any, words: str) -> None:
    @dataclass(frozen=True)
    class Silent(CastPrecision):
        name: ClassVar[str] = "silent"

        def rewrite(self, graph: ModuleRewriter, context: Any) -> None:
            super().rewrite(graph, context)
            graph.precision = declared

    report = report_of(optimize(net(), [Silent(how=how)], example_inputs=(x(),)))
    assert statuses(report) == ["rolled-back"]
    assert words in report.passes[0].reason


def test_the_report_names_the_precision_of_its_noise() -> None:
    report = report_of(optimize(net(), [CastPrecision(dtype="float16")], example_inputs=(x(),)))
    parity = report.parity
    assert parity is not None
    assert parity.precision == "float16"
    assert parity.reason.endswith("times the error of the original in float16.")
    assert ParityReport.from_json(parity.to_json()) == parity
    assert parity.reason in str(report)
    plain = report_of(optimize(net(), [], example_inputs=(x(),))).parity
    assert plain is not None
    assert plain.precision == ""
    assert "error of the original in" not in plain.reason


def test_two_callables_are_compared_at_a_precision() -> None:
    model = net()
    fast = cast(model, BFLOAT16, x())
    assert not check_parity(model, fast, (x(),)).ok
    assert check_parity(model, fast, (x(),), precision=BFLOAT16).ok
    with pytest.raises(UsageError, match="Only a module can be compared at another precision"):
        check_parity(model.forward, fast, (x(),), precision=BFLOAT16)


def test_a_bundle_holds_the_noise_at_the_precision(tmp_path: Any) -> None:
    fast = cast(net(), BFLOAT16, x())
    options: dict[str, Any] = {"example_inputs": (x(),), "formats": ("torchscript",), "batch_sizes": (1, 3)}
    bundle = export(fast, output=tmp_path / "cast", **options)
    plain = export(net(), output=tmp_path / "plain", **options)
    (coarse,), (fine,) = (each.manifest["golden"]["outputs"] for each in (bundle, plain))
    assert coarse["noise"] > 100 * fine["noise"]
    assert bundle.manifest["golden"]["precision"] == "bfloat16"
    assert plain.manifest["golden"]["precision"] == ""
    verified = verify_bundle(bundle.path)
    assert verified.ok
    parity = verified.artifacts[0].parity
    assert parity is not None
    assert parity.reason.endswith("the error of the original in bfloat16.")
