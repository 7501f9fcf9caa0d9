"""Choose what to ship: which candidates are tried, dropped and recommended. The clock and quantization are fakes."""

import itertools
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_tuning import (
    ConvNet,
    Finite,
    Wrong,
    chooser,
    fake_clock,
    fake_quantization,
    images,
    opening,
    prepare,
)
from tiny_models import enliven
from torch import nn

from exporters.onnx_quantization import KINDS
from exporters.registry import QUANTIZED
from optimize_export.errors import DeviceError, LoadError, UsageError
from optimize_export.runtime import Route
from optimizer import export, optimize
from optimizer.bundle import open_bundle
from optimizer.exporting.job import ExportJob
from optimizer.model import Call, Samples
from optimizer.parity import Accuracy, measure_reference
from optimizer.pipeline import provenance_of
from optimizer.tuning import choose
from optimizer.tuning.benchmark import Candidate, Figure, PeakMemory, Ratio, Refused, recommendation
from optimizer.tuning.candidates import Bench, Files, NonFinite, with_other_passes
from optimizer.tuning.lossy import Lossy, Recipe
from optimizer.tuning.tuner import Tuner, settings_of


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("prepared"), ("torchscript", "onnx"))


@pytest.fixture
def speeds(monkeypatch):
    return fake_clock(monkeypatch)


@pytest.fixture
def rounding(monkeypatch):
    return fake_quantization(monkeypatch)


@pytest.fixture
def choosing(prepared, speeds, tmp_path, monkeypatch):
    return chooser(prepared, tmp_path, monkeypatch)


EXPORTED = {"model.onnx", "model.torchscript.pt"}
ONNX, SCRIPT = "onnx in onnxruntime", "torchscript in torch"


# Every export -----------------------------------------------------------------------------------------------------


def test_nothing_is_chosen_where_nobody_asks(prepared, speeds):
    job, measured, written, folder = prepared
    assert not job.bench
    assert choose(job, measured, None, written, folder) is None
    assert speeds.timed == []


def test_each_file_is_timed_in_its_own_runtime_and_frozen_next_to_eager(choosing, speeds):
    speeds.seconds = {"eager": 1.0, "freeze": 0.4, "onnxruntime": 0.5, "torch": 0.8}
    found = choosing()
    assert found.timed == [
        "eager",
        "model.onnx in onnxruntime",
        "model.torchscript.pt in torch",
        "model.torchscript.pt in torch, freeze",
    ]
    assert found.route == "torchscript in torch, freeze"
    assert found.benchmark.reason == "ship model.torchscript.pt in torch, freeze: 2.50 times as fast as eager"
    figure = found.benchmark.figures[1]
    assert (figure.seconds, figure.speed_up.median, figure.accuracy) == (0.5, 2.0, None)
    assert figure.bytes == found.benchmark.figures[1].bytes > 0
    assert figure.memory is None or figure.memory >= 0
    assert (found.benchmark.batch_sizes, found.benchmark.rounds) == ((2,), 21)
    assert found.files == EXPORTED


@pytest.mark.parametrize(
    ("ratios", "told"),
    [
        ((1.78, 0.9, 2.4), ", but a gain isn't sure: it is 1.78 (0.90 to 2.40) times as fast"),
        ((1.01, 0.99, 1.02), ", but expect no gain: it is 1.01 (0.99 to 1.02) times as fast"),
        ((0.7, 0.6, 0.9), ", but not for speed: it is slower than eager, 0.70 (0.60 to 0.90) times as fast"),
        ((2.72, 2.5, 3.0), ": 2.72 times as fast as eager"),
    ],
)
def test_the_recommendation_is_true_of_its_bounds(ratios, told):
    figure = Figure("a", Route("onnx", "onnxruntime"), seconds=1.0, speed_up=Ratio(*ratios, rounds=9))
    assert recommendation([figure], "a").startswith(f"ship a{told}")


def test_a_file_outside_the_budget_is_not_told_as_faster_in_python():
    ratio = Ratio(2.0, 1.9, 2.1, 21)
    shipped = Figure("model.onnx", Route("onnx", "onnxruntime"), seconds=1.0, speed_up=ratio)
    refused = Figure("onnx-int8", None, seconds=0.1, dropped="outside the budget")
    assert recommendation([shipped, refused], "model.onnx") == "ship model.onnx: 2.00 times as fast as eager"


def test_a_tie_is_told_with_both_figures():
    def figure(name: str, gain: float, format: str = "onnx", **more: Any) -> Figure:
        return Figure(name, Route(format, "onnxruntime"), seconds=1 / gain, speed_up=Ratio(gain, 2.0, 4.0, 9), **more)

    assert recommendation([figure("simple", 2.72), figure("fast", 3.36, "pt2")], "simple") == (
        "ship simple: 2.72 times as fast as eager; tie: fast, 3.36 times as fast as eager here, isn't surely faster, and the "
        "simpler file is shipped"
    )
    same_file = recommendation([figure("simple", 2.72), figure("fast", 3.36)], "simple")
    assert same_file.endswith("and the simpler way to run it is recommended")
    assert "tie" not in recommendation([figure("simple", 2.72), figure("fast", 2.73)], "simple")
    lossy = figure("int8", 3.36, accuracy=Accuracy(cosine=0.99))
    assert recommendation([figure("simple", 2.72), lossy], "simple").endswith("and the exact file is shipped")


CALLS = [images(4, seed) for seed in range(4)]
BUDGET: dict[str, Any] = {"tune": True, "accuracy": "0.999", "calibration": CALLS}
ALL_LEVELS = dict.fromkeys(itertools.chain(*KINDS.values()), 1000)


@pytest.mark.parametrize(
    ("seconds", "levels", "options", "route"),
    [
        ({"eager": 1.0, "": 0.5}, {}, {}, ONNX),
        # A gain below 2 % isn't worth a choice.
        ({"eager": 1.0, "onnxruntime": 0.503, "freeze": 0.497, "": 0.5}, {}, {}, ONNX),
        ({"eager": 1.0, "onnxruntime": 0.6, "": 0.5}, {}, {}, SCRIPT),
        ({"eager": 1.0, "onnxruntime": 1.0, "": 1.3}, {}, {}, ONNX),
        # A setting that gains nothing.
        ({"eager": 1.0, "1 thread": 0.495, "": 0.5}, {}, {"tune": True}, ONNX),
        # Nothing lossy is tried without a budget.
        ({"int8": 0.1, "": 0.5}, ALL_LEVELS, {"tune": True}, ONNX),
        ({"eager": 1.0, "int8": 0.8, "": 0.5}, {"int8-static": 100, "int8-dynamic": 100}, BUDGET, ONNX),
        # An exact file is chosen before a lossy one that is as fast.
        (
            {"eager": 1.0, "model.onnx in onnxruntime, 1 thread": 0.2, "int8": 0.2, "": 0.5},
            {"int8-static": 100},
            BUDGET,
            "onnx in onnxruntime, 1 thread",
        ),
    ],
)
def test_the_simplest_of_equals_is_recommended(seconds, levels, options, route, choosing, speeds, rounding):
    speeds.seconds, rounding.levels = seconds, levels
    found = choosing(**options)
    assert found.route == route
    assert found.files == EXPORTED, "files that aren't recommended are removed"
    assert found.entries.keys() == {"onnx", "torchscript"}
    assert bool(rounding.calibrated) == ("accuracy" in options)


def test_a_wrong_variant_is_dropped_and_never_recommended(choosing, speeds, monkeypatch):
    speeds.seconds = {"eager": 1.0, "freeze": 0.01, "": 0.5}
    opening(monkeypatch, lambda runner, route: Wrong(runner) if route.settings.get("freeze") else runner)
    found = choosing()
    assert found.dropped.keys() == {"model.torchscript.pt in torch, freeze"}
    assert found.dropped["model.torchscript.pt in torch, freeze"].startswith("it isn't proven: ")
    assert found.route == ONNX


LOSES = "with NaN in an input, it gives finite numbers where the original gives NaN or infinity (10 of 10 elements of output)"
ALLOW = "; if inputs are always finite, allow it by `finite_inputs=True`"


@pytest.mark.parametrize("lossy", ["onnxruntime", "freeze"])
def test_a_file_that_loses_nan_is_recommended_only_for_finite_inputs(lossy, choosing, speeds, monkeypatch):
    speeds.seconds = {lossy: 0.1, "": 1.0}
    opening(monkeypatch, lambda runner, route: Finite(runner) if lossy in str(route) else runner)
    found = choosing()
    assert lossy not in found.route
    assert [why for name, why in found.dropped.items() if lossy in name] == [LOSES + ALLOW]
    assert found.benchmark.notes == ()
    found = choosing(finite_inputs=True)
    assert lossy in found.route
    assert [note for note in found.benchmark.notes if note.endswith(LOSES)] == list(found.benchmark.notes)


def test_where_every_file_loses_nan_none_is_recommended_and_the_reason_says_so(choosing, speeds, monkeypatch):
    opening(monkeypatch, lambda runner, route: Finite(runner))
    found = choosing()
    assert found.benchmark.recommended is None
    assert found.benchmark.reason == f"ship no file yet: model.onnx in onnxruntime: {LOSES}{ALLOW}"


@pytest.mark.parametrize(
    ("forward", "inputs", "lost"),
    [
        (lambda x: x * 2, lambda: (torch.randn(3, 4),), True),
        # The second input has rows of its own.
        (lambda x, y: x * 2 + y.nan_to_num(0.0), lambda: (torch.randn(3, 4), torch.randn(3, 4)), True),
        # The original itself gives finite numbers.
        (lambda x: x.nan_to_num(0.0, 1.0, -1.0), lambda: (torch.randn(3, 4),), False),
        # Nobody puts NaN into integers or masks; a label has no NaN.
        (lambda x: x * 2, lambda: (torch.arange(12).reshape(3, 4),), False),
        (lambda x: x * 2, lambda: (torch.tensor([[0.0, 1.0], [1.0, 0.0]]),), False),
        (lambda x: x.argmax(1), lambda: (torch.randn(3, 4),), False),
        # An input that the original refuses.
        (lambda x: x * int(x.sum()), lambda: (torch.randn(3, 4),), False),
        (lambda x: x * 2, lambda: (torch.randn(4),), True),
    ],
)
def test_inputs_with_nan_are_tried_where_they_are_possible(forward, inputs, lost):
    tensors = inputs()
    adapter = SimpleNamespace(call_arguments=lambda flat: (tuple(flat), {}), output_names=("y",))
    measured: Any = SimpleNamespace(adapter=adapter, reference=measure_reference(forward, Samples(tensors)))
    right: Any = lambda *given: (forward(*given),)  # noqa: E731
    nonfinite = NonFinite(measured, tensors)
    assert nonfinite.lost_by(right) is None
    assert (nonfinite.lost_by(Finite(right)) is not None) == lost


def test_a_file_that_cannot_run_is_dropped(choosing, speeds, monkeypatch):
    def refuse(runner: Any, route: Any) -> Any:
        if route.runtime == "onnxruntime":
            raise RuntimeError("no kernel\nfor this node")
        return runner

    opening(monkeypatch, refuse)
    found = choosing()
    assert found.dropped == {"model.onnx in onnxruntime": "it can't run: no kernel for this node"}
    assert found.route.startswith(SCRIPT)


class Tired:
    """A runner that fails at its second call; the proof with NaN and infinity still works."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._calls = runner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self._calls += 1
        if self._calls > 1 and tensors[0].isfinite().all():
            raise MemoryError
        return self._runner(*tensors)


def test_a_runtime_that_fails_in_a_later_call_does_not_stop_the_export(choosing, monkeypatch):
    opening(monkeypatch, lambda runner, route: Tired(runner) if route.runtime == "onnxruntime" else runner)
    found = choosing()
    assert found.benchmark.recommended is None
    assert found.benchmark.reason.startswith("not measured: model.onnx in onnxruntime failed when it ran again: ")
    assert found.files == EXPORTED


def test_an_original_that_needs_gradients_is_not_measured(choosing, monkeypatch):
    def forward(self: nn.Module, image: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            image.requires_grad_()
            return torch.autograd.grad(image.square().sum(), image)[0]

    monkeypatch.setattr(ConvNet, "forward", forward)
    found = choosing()
    assert found.benchmark.recommended is None
    assert found.benchmark.reason.startswith("not measured: the original, to compare with: it can't run: ")


def test_files_too_large_for_the_memory_are_not_measured(choosing, speeds, monkeypatch):
    monkeypatch.setattr("optimizer.tuning.candidates.available_memory", lambda: 1000)
    for tune in (False, True):
        found = choosing(tune=tune)
        assert found.benchmark.recommended is None
        assert "not measured: the files need up to" in found.benchmark.reason
    assert speeds.timed == []


# Tuning -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def openvino(choosing, monkeypatch):
    pytest.importorskip("openvino")
    monkeypatch.setattr("optimizer.tuning.tuner.is_installed", lambda runtime: True)


@pytest.mark.usefixtures("openvino")
def test_tuning_tries_runtimes_and_then_settings_of_the_fastest(choosing, speeds):
    speeds.seconds = {"eager": 1.0, "fixed shapes, 1 thread": 0.2, "openvino": 0.3, "onnxruntime": 0.4, "": 0.9}
    found = choosing(tune=True)
    assert found.route == "onnx in openvino, fixed shapes, 1 thread"
    tried = {*found.timed, *found.dropped}
    assert {
        "model.onnx in onnxruntime, no spinning",
        "model.onnx in openvino, fixed shapes, 1 thread",
        "model.torchscript.pt in torch, freeze",
        "the optimized module",
    } <= tried
    assert not any(figure.accuracy for figure in found.benchmark.figures)
    assert found.dropped["model.torchscript.pt in torch"].endswith(" is 2.25 times as fast as it")
    assert found.files == EXPORTED


def test_a_file_is_recommended_even_if_python_is_far_faster(choosing, speeds):
    speeds.seconds = {"eager": 1.0, "the optimized module": 0.1, "": 0.5}
    found = choosing(tune=True)
    assert found.route == ONNX
    assert found.benchmark.reason == (
        "ship model.onnx in onnxruntime: 2.00 times as fast as eager; in Python, the optimized module is faster: "
        "10.00 times as fast as eager"
    )


@pytest.fixture
def other_passes(choosing, monkeypatch):
    monkeypatch.setattr("optimizer.tuning.candidates.with_other_passes", with_other_passes)


@pytest.mark.usefixtures("other_passes")
def test_passes_that_pay_are_told_and_others_dropped_with_the_reason(choosing, speeds):
    speeds.seconds = {"eager": 1.0, "the module without channels-last": 0.81, "the optimized module": 0.8, "": 0.5}
    found = choosing(tune=True)
    assert found.dropped["the module without channels-last"] == (
        "no clear gain: 0.99 (0.99 to 0.99) times as fast as the optimized module"
    )
    assert found.dropped["the module with merge-linears"] == "the pass is unchanged: it finds nothing to change"
    assert found.dropped["the module with pad-channels"].startswith("the pass is unchanged: ")
    assert found.benchmark.notes == ()
    assert found.route == ONNX
    speeds.seconds["the module without channels-last"] = 0.4
    # The first result, which is kept, isn't taken for a longer search.
    found = choosing(tune=True, tune_seconds=700)
    assert "the module without channels-last" in found.timed
    assert found.benchmark.notes == (
        "in Python, the module without channels-last is 2.00 (2.00 to 2.00) times as fast as the optimized module: "
        "choose these passes, and export again",
    )
    assert found.benchmark.reason.endswith(
        "; in Python, the module without channels-last is faster: 2.50 times as fast as eager"
    )


def passes_tried(model: nn.Module, passes: list[str] | None) -> list[tuple[str, list[str]]]:
    provenance = None if passes is None else provenance_of(optimize(model, passes=passes, example_inputs=(images(),)))
    job = SimpleNamespace(provenance=provenance)
    return [(name, [item.name for item in made]) for name, _, made in with_other_passes(job)]


def test_optional_passes_are_tried_in_addition_and_in_front_of_a_compiler(monkeypatch):
    model = enliven(ConvNet()).eval()
    assert passes_tried(model, ["fold-conv-bn", "jit-fusion"]) == [
        ("the module with channels-last", ["fold-conv-bn", "jit-fusion", "channels-last"]),
        ("the module with merge-linears", ["fold-conv-bn", "jit-fusion", "merge-linears"]),
        ("the module with pad-channels", ["fold-conv-bn", "jit-fusion", "pad-channels"]),
    ]
    assert ("the module without channels-last", []) in passes_tried(model, ["channels-last"])
    assert [name for name, _ in passes_tried(model, None)] == [
        "the module with channels-last",
        "the module with merge-linears",
        "the module with pad-channels",
        "the module with jit-fusion",
    ]


@pytest.mark.usefixtures("openvino")
def test_few_files_stay_open(choosing, speeds, monkeypatch):
    speeds.seconds = {"eager": 1.0, "no spinning": 0.45, "1 thread": 0.42, "thread": 0.4, "openvino": 0.41, "": 0.5}
    monkeypatch.setattr("optimizer.tuning.tuner.usable_cpus", lambda: 8)
    attempt, still_open = Tuner._try, []

    def counted(self: Tuner, candidate: Candidate) -> None:
        attempt(self, candidate)
        still_open.append(len(self._ready))

    monkeypatch.setattr(Tuner, "_try", counted)
    found = choosing(tune=True)
    assert max(still_open) <= 8, "six, and the exported files"
    files = [name for name in found.timed if name.startswith("model")]
    assert len(files) <= 8
    assert {"model.onnx in onnxruntime", "model.torchscript.pt in torch"} <= set(files), "the simplest stay"
    assert "6 others are at least as fast" in found.dropped.values()


def test_candidates_after_the_time_is_up_are_not_tried(choosing, speeds, monkeypatch):
    speeds.seconds = {"eager": 1.0, "": 0.5}
    seconds = iter(range(0, 1000, 5))
    monkeypatch.setattr("optimizer.tuning.tuner.time.monotonic", lambda: next(seconds))
    found = choosing(tune=True, tune_seconds=10)
    assert found.route == ONNX
    assert "not tried: the time was up" in found.dropped.values()


def test_a_candidate_that_cant_end_in_time_is_not_begun(choosing, speeds, monkeypatch):
    speeds.seconds = {"eager": 1.0, "": 0.5}
    now, told = [0.0], []
    monkeypatch.setattr("optimizer.tuning.tuner.time.monotonic", lambda: now[0])
    opened = Tuner._opened

    def slowly(self: Tuner, *rest: Any, **more: Any) -> Any:
        found = opened(self, *rest, **more)
        now[0] += 25.0 if found else 0.0
        return found

    monkeypatch.setattr(Tuner, "_opened", slowly)
    monkeypatch.setattr(ExportJob, "progress", lambda self, *step: told.append(step))
    found = choosing(tune=True, tune_seconds=100)
    assert "not tried: it takes about 25 s, and 20 s were left" in found.dropped.values()
    assert now[0] <= 70
    (_, done, total, text) = [step for step in told if step[0] == "tune"][-1]
    assert (done, text) == (total, f"{total} ways to run the model")


@pytest.mark.parametrize("levels", [100, 2])
def test_a_quantized_file_that_was_made_in_time_is_judged_and_timed(levels, choosing, speeds, rounding, monkeypatch):
    speeds.seconds = {"eager": 1.0, "int8": 0.1, "": 0.5}
    rounding.levels = {"int8-dynamic": levels, "uint8-dynamic": 100, "int8-static": 100}
    now = [0.0]
    monkeypatch.setattr("optimizer.tuning.tuner.time.monotonic", lambda: now[0])
    # Files in half precision would come first.
    monkeypatch.setattr("optimizer.tuning.tuner.fast_dtypes", lambda device: ())
    make = Lossy.made

    def late(self: Lossy, format: str, files: Files, recipe: Recipe | None = None) -> dict[str, Any]:
        # A processor with instructions for bfloat16 is offered files in it before.
        if "int8" in format:
            now[0] = 1000.0
        return make(self, format, files, recipe)

    monkeypatch.setattr(Lossy, "made", late)
    found = choosing(**BUDGET)
    assert found.dropped["onnx-int8"] == "not tried: the time was up"
    if levels == 100:
        assert found.route == "onnx-int8-dynamic in onnxruntime"
    else:
        assert found.dropped["onnx-int8-dynamic"].startswith("the time was up, and the best so far has cosine 0.9")
        assert found.route == ONNX


def test_the_fastest_exact_file_is_timed_beside_a_far_faster_lossy_one(choosing, speeds, rounding):
    """Who reads the figures wants to know what the loss of accuracy buys."""
    rounding.levels = ALL_LEVELS
    speeds.seconds = {"eager": 1.0, "int8": 0.1, "onnx in": 0.5, "": 0.9}
    found = choosing(**BUDGET)
    assert "int8" in str(found.route)
    assert "model.onnx in onnxruntime" in found.timed
    assert found.dropped["model.torchscript.pt in torch"] == "model.onnx in onnxruntime is 1.80 times as fast as it"


def test_a_quantized_file_within_the_budget_is_recommended(choosing, speeds, rounding):
    rounding.levels = {"int8-static": 100}
    speeds.seconds = {"eager": 1.0, "model.int8.onnx in onnxruntime": 0.1, "": 0.5}
    found = choosing(tune=True, accuracy="0.999")
    assert found.route == "onnx-int8 in onnxruntime"
    entry = found.entries["onnx-int8"]
    assert entry["quantization"] == {"kind": "int8-static", "kept": []}
    assert entry["accuracy"]["budget"] == {"cosine": 0.999, "top1": None}
    assert 0.999 < entry["accuracy"]["cosine"] < 1
    # The golden calls and two of the eight random ones, which were kept apart from the calibration.
    assert (len(rounding.calibrated[0]), entry["accuracy"]["calls"] > 2) == (6, True)
    assert entry["parity"]["ok"]
    assert found.files == EXPORTED | {"model.int8.onnx"}
    figure = next(each for each in found.benchmark.figures if each.route == found.benchmark.recommended)
    assert figure.accuracy is not None
    assert found.benchmark.notes == ("int8 was calibrated with random inputs: pass real ones as the calibration",)


class Noisy(ConvNet):
    """In training mode, its outputs are random, and its BatchNorm changes with each call."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(image + 3, 0.5, self.norm.training)) + 0 * torch.rand(1)


@pytest.mark.parametrize("training", [["", "norm"], ["norm"]], ids=["all", "a part"])
def test_lossy_files_are_judged_in_eval_mode_and_the_model_stays_as_it_was(
    training, speeds, rounding, tmp_path, monkeypatch
):
    model = enliven(Noisy()).eval()
    for path in training:
        model.get_submodule(path).training = True
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    choosing = chooser(prepare(tmp_path / "prepared", ("onnx",), model), tmp_path, monkeypatch)
    drawn = torch.get_rng_state()
    rounding.levels = {"int8-static": 1000}
    speeds.seconds = {"eager": 1.0, "int8": 0.1, "": 0.5}
    found = choosing(tune=True, accuracy="0.999")
    assert found.route == "onnx-int8 in onnxruntime"
    assert found.entries["onnx-int8"]["accuracy"]["cosine"] > 0.9999
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_calibration_call_on_which_the_model_raises_is_one_sentence(choosing, speeds, rounding, monkeypatch):
    forward = ConvNet.forward

    def refusing(self: ConvNet, image: torch.Tensor) -> torch.Tensor:
        if image.max() > 1000:
            raise IndexError("index out of range in self")
        return forward(self, image)

    rounding.levels = {"int8-static": 1000}
    monkeypatch.setattr(ConvNet, "forward", refusing)
    with pytest.raises(LoadError, match=r"The model raises on a calibration call: IndexError: index out of range"):
        choosing(tune=True, accuracy="0.999", calibration=[1e4 * images()] * 4)


@pytest.mark.parametrize(
    ("levels", "format", "quantization"),
    [
        # Sensitive nodes stay in float.
        (
            {"int8-static": 2},
            "onnx-int8",
            {
                "kind": "int8-static",
                "kept": ["head"],
                "why": ["quantized alone, it changes the outputs by 10 %"],
            },
        ),
        # A dynamic file gets more accurate weights before that.
        ({"int8-dynamic": 2, "uint8-dynamic": 100}, "onnx-int8-dynamic", {"kind": "uint8-dynamic", "kept": []}),
    ],
)
def test_a_file_outside_the_budget_is_made_more_accurate(levels, format, quantization, choosing, speeds, rounding):
    rounding.levels = levels
    speeds.seconds = {"eager": 1.0, "int8": 0.1, "": 0.5}
    found = choosing(**BUDGET)
    assert found.entries[format]["quantization"] == quantization
    assert found.benchmark.notes == ()


def test_the_best_outside_the_budget_is_told(choosing, speeds, rounding):
    rounding.levels = {"int8-static": 1}
    speeds.seconds = {"eager": 1.0, "int8": 0.1, "": 0.5}
    found = choosing(tune=True, accuracy="0.999999999")
    assert found.route == ONNX
    assert found.dropped["onnx-int8"].startswith("outside the budget: the best has cosine 0.9")
    assert found.dropped["onnx-int4"] == "it can't be made: the file has nothing for int4-weights"
    figure = next(each for each in found.benchmark.figures if each.name == "onnx-int8")
    assert figure.accuracy is not None
    assert figure.accuracy.cosine > 0.9
    assert found.files == EXPORTED, "a refused file doesn't stay"


def test_a_quantized_file_that_cannot_be_loaded_is_dropped(choosing, speeds, rounding, monkeypatch):
    def refuse(path: Path, *_: Any) -> None:
        raise DeviceError(f"onnxruntime can't load {path.name}: no kernel")

    rounding.levels = {"int8-static": 100}
    speeds.seconds = {"eager": 1.0, "": 0.5}
    monkeypatch.setattr("optimizer.tuning.lossy.open_in_child", refuse)
    found = choosing(tune=True, accuracy="0.999")
    assert found.route == ONNX
    assert found.dropped["onnx-int8"] == "it can't be made: onnxruntime can't load model.int8.onnx: no kernel"
    assert found.files == EXPORTED


@pytest.mark.usefixtures("openvino")
def test_a_lower_precision_of_openvino_is_judged_by_the_budget(choosing, speeds, rounding, monkeypatch):
    speeds.seconds = {"eager": 1.0, "bfloat16": 0.1, "": 0.5}
    monkeypatch.setattr("optimizer.tuning.tuner.openvino_precisions", lambda: ["bfloat16"])
    opening(monkeypatch, lambda runner, route: Wrong(runner) if "precision" in route.settings else runner)
    found = choosing(tune=True, accuracy="0.99")
    assert found.route == "onnx in openvino, bfloat16, fixed shapes"
    found = choosing(tune=True, accuracy="0.99999999")
    assert found.route == ONNX
    assert found.dropped["model.onnx in openvino, bfloat16, fixed shapes"].startswith("outside the budget: cosine 0.99")


def test_the_formats_of_quantized_files_can_be_loaded_and_made():
    assert set(KINDS) == set(QUANTIZED)


# Calibration ------------------------------------------------------------------------------------------------------


def test_calls_with_more_rows_are_split_and_every_fourth_is_kept_apart(choosing, speeds, rounding):
    rounding.levels = {"int8-static": 100}
    calls = [images(5), (images(2, 1),), {"image": images(1, 2)}]
    choosing(tune=True, accuracy="0.9", calibration=calls)
    rows = [row["image"].shape[0] for row in rounding.calibrated[0]]
    assert rows == [2, 2, 1, 1], "2, 2 and 1 rows; then 2, kept apart; then 1"
    choosing(tune=True, accuracy="0.9", calibration=[images(5)], static=True)
    assert [row["image"].shape[0] for row in rounding.calibrated[-1]] == [2, 2]


@pytest.mark.parametrize(
    ("calls", "sentence"),
    [
        ([], "calibration is empty: pass at least one call"),
        ([images(), images().double()], r"Calibration call 1: `image` is float64\[2, 3, 8, 8\], but the example"),
        ([images()[:, :1]], r"Calibration call 0: `image` is float32\[2, 1, 8, 8\], but the example input is float32"),
        ([images()[0, 0]], r"Calibration call 0: `image` is float32\[8, 8\], but the example input is float32"),
        ([images(0)], "Calibration call 0 has a batch of no rows: use at least one row"),
        ([images(), images() / 0], "Calibration call 1: `image` contains NaN or infinity: leave out this call"),
        ([images(7) * torch.nan], "Calibration call 0: `image` contains NaN or infinity"),
        ([Call((images() / 0,), file="a.npz")], "^a.npz: `image` contains NaN or infinity"),
        ([("a cat", images())], "Calibration call 0 doesn't fit the model: "),
        ([{"picture": images()}], "Calibration call 0 doesn't fit the model: "),
        ([7], "Calibration call 0 is of type int: pass a tensor, a tuple of arguments or a dict"),
        # Fewer rows are refused if the batch is fixed.
        ([images(1)], r"`image` is float32\[1, 3, 8, 8\]"),
    ],
)
def test_calibration_that_does_not_fit_is_refused(choosing, calls, sentence):
    with pytest.raises(UsageError, match=sentence):
        choosing(tune=True, accuracy="0.9", calibration=calls, static=sentence.startswith("`image`"))


# On a GPU ---------------------------------------------------------------------------------------------------------


def planned(device: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Tuner:
    """A tuner with an ONNX file, whose files are made at once; `more` are attributes of its bench."""

    def entry(format: str, *_: object) -> dict[str, Any]:
        return {"format": format, "path": f"model.{format}", "bytes": 1}

    begun: list[str] = []
    bench = SimpleNamespace(
        files=Files(Path(), [entry("onnx")], device, []),
        job=SimpleNamespace(target=torch.device(device), progress=lambda *step: None),
        further=SimpleNamespace(write=entry, begin=begun.append),
        begun=begun,
        seconds={},
        can_compile=True,
    )
    vars(bench).update(more)
    monkeypatch.setattr("optimizer.tuning.tuner.is_installed", lambda runtime: False)
    monkeypatch.setattr("optimizer.tuning.tuner.usable_cpus", lambda: 1)
    halves = ("float16", "bfloat16") if device == "cuda" else ()
    monkeypatch.setattr("optimizer.tuning.tuner.fast_dtypes", lambda device: halves)
    return Tuner(bench, SimpleNamespace(made=entry), 1000.0)  # type: ignore[arg-type]


def tried(tuner: Tuner, unfit: Collection[str] = ()) -> list[str]:
    """The routes that the tuner tries, if all but those unfit run equally fast."""
    found = []
    for candidate in tuner._candidates():
        found.append(str(candidate.route))
        if found[-1] not in unfit:
            tuner._ready.append((SimpleNamespace(candidate=candidate), 1.0))  # type: ignore[arg-type]
            tuner._fit.add(candidate.name)
    return found


def test_on_a_gpu_what_takes_seconds_comes_first_and_everything_runs_in_a_graph(monkeypatch):
    tuner = planned("cuda", monkeypatch)
    onnx, half = (f"{format} in onnxruntime" for format in ("onnx", "onnx-float16"))
    in_graphs = [f"{onnx}, cuda graph", f"{half}, cuda graph"]
    settings = [f"{in_graphs[0]}, tf32", onnx, f"{in_graphs[1]}, nhwc", half]
    compiled = ["aoti-float16 in torch, cuda graph", "aoti in torch, cuda graph"]
    assert tried(tuner) == [*in_graphs, *settings, *compiled, "onnx-int4 in onnxruntime, cuda graph"]
    assert [figure.name for figure in tuner._dropped] == ["onnx-int8-dynamic", "onnx-int8"]


@pytest.mark.parametrize(("device", "lossy"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_on_a_gpu_the_file_that_is_nearly_always_best_compiles_meanwhile(device, lossy, monkeypatch):
    tuner = planned(device, monkeypatch)
    if not lossy:
        tuner._lossy = None
    tried(tuner)
    expected = [] if device == "cpu" else ["aoti-float16" if lossy else "aoti"]
    assert tuner._bench.begun == expected  # type: ignore[attr-defined]


def test_a_file_that_compiles_already_is_waited_for_while_there_is_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("optimizer.tuning.tuner.time.monotonic", lambda: now[0])
    tuner = planned("cuda", monkeypatch)
    found = []
    for candidate in tuner._candidates():
        found.append(str(candidate.route))
        tuner._fit.add(candidate.name)
        if "onnx-float16" in found[-1]:
            now[0] = 695.0
    assert "aoti-float16 in torch, cuda graph" in found
    assert tuner._dropped[0] == Figure("aoti", None, dropped="not tried: it takes about 25 s, and 5 s were left")


def test_nothing_compiles_beside_the_last_timing(choosing, speeds, monkeypatch):
    order: list[str] = []
    end, conclude = Bench.end_compiling, Bench.conclude

    def ended(self: Bench) -> None:
        order.append("ended")
        end(self)

    def timed(self: Bench, *given: Any) -> Any:
        order.append("timed")
        return conclude(self, *given)

    monkeypatch.setattr(Bench, "end_compiling", ended)
    monkeypatch.setattr(Bench, "conclude", timed)
    choosing(tune=True)
    assert order[:2] == ["ended", "timed"]


def test_a_file_that_cannot_run_in_a_graph_runs_without(monkeypatch):
    found = tried(planned("cuda", monkeypatch), ["onnx in onnxruntime, cuda graph", "aoti in torch, cuda graph"])
    assert found[:3] == [
        "onnx in onnxruntime, cuda graph",
        "onnx in onnxruntime",
        "onnx-float16 in onnxruntime, cuda graph",
    ]
    assert found[-3:-1] == ["aoti in torch, cuda graph", "aoti in torch"]


def test_on_a_cpu_settings_come_before_slow_quantization(monkeypatch):
    tuner = planned("cpu", monkeypatch)
    quantized = [f"onnx-{kind} in onnxruntime" for kind in ("int8-dynamic", "int8", "int4")]
    onnx = "onnx in onnxruntime"
    assert tried(tuner) == [onnx, f"{onnx}, 1 thread", f"{onnx}, no spinning", *quantized]
    assert tuner._dropped == [], "half precision isn't even named"


def test_with_openvino_a_file_for_it_is_made_of_a_network_that_gains(monkeypatch):
    """A file with open sizes is compiled for the sizes of the example."""
    of_inputs = ("onnx-int8-dense", "onnx-int8-inputs")
    both = [f"onnx-int8-{kind} in openvino, fixed shapes" for kind in ("dense", "inputs")]
    for device, kinds, wanted in (
        ("cpu", ("int8-inputs",), both),
        ("cpu", (), []),
        ("cuda", ("int8-inputs",), []),
    ):
        tuner = planned(device, monkeypatch)
        tuner._bench.files.has_open_sizes = True
        tuner._bench.files.inputs = [torch.zeros(2, 3), torch.tensor(1.0)]
        monkeypatch.setattr("optimizer.tuning.tuner.is_installed", lambda runtime: True)
        monkeypatch.setattr("optimizer.tuning.tuner.openvino_precisions", lambda: [])
        monkeypatch.setattr("optimizer.tuning.tuner.kinds", lambda format, source, kinds=kinds: kinds)
        found = list(tuner._quantized_files())
        assert [str(each.route) for each in found if each.route.format in of_inputs] == wanted
        assert not any(each.name in of_inputs for each in tuner._dropped)
        if device == "cpu":
            assert found[1].route == Route("onnx-int8-dynamic", "openvino", {"shapes": "2x3,"})


def test_settings_of_a_file_that_was_made_later_are_tried_too(monkeypatch):
    tuner = planned("cpu", monkeypatch)
    found = []
    for candidate in tuner._candidates():
        found.append(str(candidate.route))
        gain = 2.0 if "int4" in candidate.name else 1.0
        tuner._ready.append((SimpleNamespace(candidate=candidate), gain))  # type: ignore[arg-type]
    int4 = "onnx-int4 in onnxruntime"
    assert found[-3:] == [int4, f"{int4}, 1 thread", f"{int4}, no spinning"]


def test_compiling_begins_only_where_it_can_end(monkeypatch):
    """By the time that it took in this export, or at least 25 seconds."""
    now = [0.0]
    monkeypatch.setattr("optimizer.tuning.tuner.time.monotonic", lambda: now[0])
    seconds: dict[str, float] = {}

    def write(format: str, folder: Path, left: float) -> dict[str, Any]:
        seconds[format] = left
        now[0] += 60.0
        return {"format": format, "path": f"model.{format}", "bytes": 1}

    def refused(format: str) -> None:
        raise Refused("it can't be captured")

    tuner = planned("cuda", monkeypatch, further=SimpleNamespace(write=write, begin=refused))
    tuner._lossy.made = lambda format, files: write(format, Path(), tuner._left())  # type: ignore[union-attr]
    tuner._seconds = 250.0
    assert "aoti in torch, cuda graph" not in tried(tuner)
    assert seconds == {"onnx-float16": 175.0, "aoti-float16": 115.0, "onnx-int4": 55.0}
    assert tuner._dropped[0] == Figure("aoti", None, dropped="not tried: it takes about 60 s, and 55 s were left")


@pytest.mark.parametrize(
    ("device", "refused", "made"),
    [
        ("cuda", [], ["onnx-float16", "torchscript-float16"]),
        ("cuda", ["torchscript-float16"], ["onnx-float16"]),
        ("cuda", ["onnx-float16", "torchscript-float16"], ["torchscript-bfloat16"]),
        ("cpu", [], ["torchscript-float16"]),
    ],
)
def test_bfloat16_is_tried_where_no_file_in_float16_is_within_the_budget(device, refused, made, monkeypatch):
    def entry(format: str, _: object = None) -> dict[str, Any]:
        if format in refused:
            raise Refused("outside the budget: it has cosine 0.9")
        return {"format": format, "path": f"model.{format}", "bytes": 1}

    files = Files(Path(), [entry("onnx"), entry("torchscript")], device, [])
    tuner = planned(device, monkeypatch, files=files)
    tuner._lossy.made = entry  # type: ignore[union-attr]
    monkeypatch.setattr("optimizer.tuning.tuner.fast_dtypes", lambda device: ("float16", "bfloat16"))
    found = [candidate.route for candidate in tuner._in_half_precision() if candidate.route is not None]
    assert list(dict.fromkeys(route.format for route in found)) == made
    assert [figure.name for figure in tuner._dropped] == refused


@pytest.mark.parametrize(
    ("route", "exact", "expected"),
    [
        ("torchscript in torch", True, ["cudnn_benchmark"]),
        ("torchscript in torch", False, ["cudnn_benchmark", "tf32", "cudnn_benchmark tf32"]),
        ("onnx in onnxruntime", False, ["tf32"]),
        ("onnx in onnxruntime", True, []),
        ("onnx-float16 in onnxruntime", False, ["nhwc"]),
    ],
)
def test_settings_are_tried_alone_and_together_on_a_gpu(route, exact, expected):
    found = settings_of(Route(*route.split(" in ")), "cuda", exact=exact)
    assert [" ".join(setting) for setting in found] == expected


def test_times_that_no_reader_takes_stop_no_export(tmp_path, monkeypatch):
    monkeypatch.setattr(PeakMemory, "__exit__", lambda self, *_: setattr(self, "bytes", -28672))
    fast = optimize(enliven(ConvNet()).eval(), example_inputs=(images(),))
    bundle = export(fast, example_inputs=(images(),), output=tmp_path / "b", formats=["torchscript"], bench=True)
    kept = open_bundle(bundle.path).manifest["benchmark"]
    assert kept["figures"] == []
    assert kept["notes"][-1].startswith("no times are kept: ")
