"""Files that tuning adds: in half precision, from the module that cast-precision has cast, and compiled for the machine."""

import pickle

import pytest
import torch
from fake_tuning import ConvNet, Wrong, chooser, fake_clock, fake_quantization, images, opening, prepare
from tiny_models import enliven
from torch import nn

from exporters.aoti import missing_compiler
from optimize_export.errors import ExportFailed
from optimize_export.runtime import Route
from optimizer import export, load, optimize, verify_bundle
from optimizer.bundle import open_bundle
from optimizer.exporting.writing import note_on_placement
from optimizer.tuning.candidates import frozen


class Overflowing(nn.Module):
    """In float16, the middle layer gives infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.large = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.large(nn.functional.gelu(self.conv(image)).mean((2, 3)))
        return self.head(x * 1e-6)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("prepared"), ("torchscript", "pt2"))


@pytest.fixture
def speeds(monkeypatch):
    monkeypatch.setattr("optimizer.tuning.tuner.fast_dtypes", lambda device: ("float16", "bfloat16"))
    # Compiling takes half a minute.
    monkeypatch.setattr("optimizer.tuning.candidates.missing_compiler", lambda device: "none here")
    fake_quantization(monkeypatch)
    speeds = fake_clock(monkeypatch)
    speeds.seconds = {"eager": 1.0, "float16.torchscript.pt in torch": 0.1, "float16": 0.12, "": 0.5}
    return speeds


@pytest.fixture
def choosing(prepared, speeds, tmp_path, monkeypatch):
    return chooser(prepared, tmp_path, monkeypatch)


def test_the_best_file_in_half_precision_is_added_and_the_others_are_removed(choosing):
    found = choosing(tune=True, accuracy="0.999")
    assert found.route == "torchscript-float16 in torch"
    assert found.files == {"model.torchscript.pt", "model.pt2", "model.float16.torchscript.pt"}
    entry = found.entries["torchscript-float16"]
    assert (entry["path"], entry["parity"]["verdict"]) == ("model.float16.torchscript.pt", "within budget")
    assert 0.999 < entry["accuracy"]["cosine"] < 1
    assert entry["bytes"] == (found.folder / entry["path"]).stat().st_size
    assert (entry["inputs"], entry["outputs"]) == (
        found.entries["torchscript"]["inputs"],
        found.entries["torchscript"]["outputs"],
    )
    assert entry["quantization"] == {"kind": "float16", "kept": []}
    timed = {name for name in found.timed if "float16" in name}
    assert timed == {f"model.float16.{name} in torch" for name in ("torchscript.pt", "pt2")} | {
        "model.float16.torchscript.pt in torch, freeze"
    }
    assert not any("bfloat16" in name for name in found.dropped)


def test_only_torchscript_is_frozen_in_half_precision_too():
    assert frozen(Route("torchscript-bfloat16", "torch")) == Route("torchscript-bfloat16", "torch", {"freeze": True})
    assert frozen(Route("torchscript-mine", "torch")) is None


def test_without_a_budget_none_is_made(choosing):
    found = choosing(tune=True)
    assert found.route == "torchscript in torch"
    assert not any("float16" in figure.name for figure in found.benchmark.figures)


def test_a_file_outside_the_budget_is_dropped_with_its_accuracy(choosing, monkeypatch):
    opening(monkeypatch, lambda runner, route: Wrong(runner) if "float16" in route.format else runner)
    found = choosing(tune=True, accuracy="0.9999999")
    assert found.route == "torchscript in torch"
    assert found.files == {"model.torchscript.pt", "model.pt2"}
    figures = {figure.name: figure for figure in found.benchmark.figures}
    assert found.dropped["torchscript-float16"].startswith("outside the budget: it has cosine 0.99")
    assert figures["torchscript-float16"].accuracy.cosine < 0.9999999
    told = "cast-precision is unchanged: in bfloat16 it is off by "
    assert found.dropped["pt2-bfloat16"] == found.dropped["torchscript-bfloat16"]
    assert found.dropped["pt2-bfloat16"].startswith(told)


def test_a_file_that_cannot_be_compiled_is_dropped_with_the_reason(choosing, monkeypatch):
    monkeypatch.setattr("optimizer.tuning.tuner.Tuner._compiles", True)
    monkeypatch.setattr("exporters.aoti.missing_compiler", lambda: "there is no compiler")
    found = choosing(tune=True)
    assert found.dropped["aoti"] == "The model can't be exported to aoti: there is no compiler"
    assert found.files == {"model.torchscript.pt", "model.pt2"}


def test_a_chosen_file_that_cannot_be_compiled_is_no_wrong_file(monkeypatch, tmp_path):
    monkeypatch.setattr("exporters.aoti.missing_compiler", lambda: "there is no compiler")
    choices = tmp_path / "manifest.json"
    choices.write_text('{"benchmark": {"recommended": {"format": "aoti", "runtime": "torch", "settings": {}}}}')
    options = {"formats": ("torchscript",), "effort": "quick", "choices": choices}
    with pytest.raises(ExportFailed, match=r"couldn't be exported: .* to aoti: there is no compiler\.$"):
        export(nn.Linear(4, 3).eval(), (torch.randn(2, 4),), output=tmp_path / "net", **options)


def test_a_layer_that_overflows_stays_in_float32_and_the_choice_is_made_again(speeds, tmp_path):
    torch.manual_seed(0)
    model = enliven(Overflowing()).eval()
    with torch.no_grad():
        model.large.weight.mul_(1e6)
    options = {"example_inputs": (images(),), "formats": ("torchscript",), "effort": "quick", "accuracy": 0.999}
    options |= {"atol": 1e-4}  # for exact files
    fast = optimize(model, example_inputs=(images(),))
    bundle = export(fast, output=tmp_path / "net", **options)
    entry = next(each for each in bundle.manifest["artifacts"] if each["format"] == "torchscript-float16")
    why = "in float16 it is no longer finite"
    assert entry["quantization"] == {"kind": "float16", "kept": ["large"], "why": [why]}
    assert verify_bundle(bundle).ok
    run = load(bundle)
    assert str(run.route) == "torchscript-float16 in torch"
    x = images(rows=3, seed=7)
    assert run(x).dtype == torch.float32
    torch.testing.assert_close(run(x), model(x), rtol=1e-2, atol=1e-2)

    again = export(fast, output=tmp_path / "again", choices=bundle.path, **options)
    assert open_bundle(again.path).manifest["benchmark"]["recommended"]["format"] == "torchscript-float16"
    assert torch.equal(load(again)(x), run(x))


@pytest.mark.parametrize(
    ("passes", "sentence"),
    [
        (["cast-precision:how=autocast"], "the pass cast-precision has lowered the precision already"),
        (None, "the original of the model isn't known: export what optimize returned"),
    ],
)
def test_a_model_that_has_no_float32_original_is_told_of(passes, sentence, speeds, tmp_path):
    model = optimize(enliven(nn.Linear(4, 3)).eval(), passes, example_inputs=(torch.randn(2, 4),))
    if passes is None:
        model = pickle.loads(pickle.dumps(model))
    options = {"formats": ("torchscript",), "effort": "quick", "accuracy": 0.9}
    bundle = export(model, (torch.randn(2, 4),), output=tmp_path / "net", **options)
    dropped = {figure["name"]: figure["dropped"] for figure in bundle.manifest["benchmark"]["figures"]}
    assert dropped["torchscript-float16"] == sentence


@pytest.mark.slow
@pytest.mark.skipif(missing_compiler() is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize("made_again", [False, pytest.param(True, marks=pytest.mark.zoo)])
def test_a_compiled_file_that_is_the_fastest_is_added_without_naming_the_format(made_again, monkeypatch, tmp_path):
    monkeypatch.setattr("optimizer.tuning.candidates.with_other_passes", lambda job: ())
    speeds = fake_clock(monkeypatch)
    speeds.seconds = {"eager": 1.0, "aoti": 0.1, "": 0.5}
    torch.manual_seed(0)
    model = enliven(ConvNet()).eval()
    options = {"example_inputs": (images(),), "formats": ("torchscript",), "effort": "quick"}
    bundle = export(model, output=tmp_path / "net", tune=True, tune_seconds=600, **options)
    assert [each["format"] for each in bundle.manifest["artifacts"]] == ["torchscript", "aoti"]
    assert bundle.manifest["parity"]["ok"]
    assert "torch.compile" not in {figure["name"] for figure in bundle.manifest["benchmark"]["figures"]}
    assert verify_bundle(bundle).ok
    run, x = load(bundle), images(rows=3, seed=7)
    assert (str(run.route), run.notes) == ("aoti in torch", ())
    torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    for name, other, reason in (
        ("cpu.get_capabilities", dict, "but the processor here has no "),
        ("__version__", "2.99.1", "torch 2.99.1: export it on the machine where it will run."),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"torch.{name}", other)
            elsewhere = load(bundle)
            torch.testing.assert_close(elsewhere(x), model(x), rtol=1e-4, atol=1e-5)
        assert str(elsewhere.route) == "torchscript in torch"
        (note,) = elsewhere.notes
        assert note.startswith("aoti in torch isn't used on cpu: torch can't load model.aoti.pt2: ")
        assert reason in note

    if made_again:
        again = export(model, output=tmp_path / "again", choices=bundle.path, **options)
        assert [each["format"] for each in again.manifest["artifacts"]] == ["torchscript", "aoti"]
        assert str(load(again).route) == "aoti in torch"


@pytest.mark.parametrize(
    ("placement", "told"),
    [
        (
            {"CUDAExecutionProvider": 356, "CPUExecutionProvider": 3},
            ["m.onnx: 3 of 359 nodes run on the CPU, for shapes and constants"],
        ),
        ({"CUDAExecutionProvider": 356}, []),
        ({"CPUExecutionProvider": 3}, []),
        (None, []),
    ],
)
def test_nodes_that_a_gpu_leaves_to_the_cpu_are_told(placement, told):
    assert list(note_on_placement("m.onnx", placement)) == told
