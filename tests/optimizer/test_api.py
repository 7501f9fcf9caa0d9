"""`export`, its refusals, and the bundles that it writes; `optimize` is tested in test_optimize.py."""

import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import crashing_runtimes
import onnx
import onnxruntime
import pytest
import torch
from changed_bundles import seal
from fake_tuning import Wrong
from tiny_models import Net as OfFunction
from tiny_models import enliven
from torch import nn

import optimizer
from exporters import onnx_session
from exporters.base import Exporter
from exporters.errors import ExporterError, ExportError, MetadataError, ProviderFallback, UnknownFormat, UnknownOpset
from exporters.onnx import OnnxExporter
from exporters.onnx_session import judge_placement
from exporters.registry import exporter_named
from exporters.torchscript import TorchScriptExporter
from optimize_export.errors import (
    DeviceError,
    ExportFailed,
    LoadError,
    ParityError,
    StructureError,
    UsageError,
    VacuousError,
)
from optimizer import Bundle, export, open_bundle, optimize, rejudge_bundle, report_of, verify_bundle
from optimizer.exporting.artifact_parity import ArtifactParity, Failures, FileProof
from optimizer.report import STAGES, Progress


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, image: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        features = torch.relu(self.norm(self.conv(image))).mean((2, 3))
        return {"logits": self.head(features) * scale, "features": features}


def made() -> nn.Module:
    torch.manual_seed(0)
    return enliven(Net()).eval()


@pytest.fixture
def model() -> nn.Module:
    return made()


@pytest.fixture(scope="module")
def image() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


GIVEN = {"author": "Jane", "stride": "32"}


@pytest.fixture(scope="module")
def written(image, tmp_path_factory) -> tuple[Bundle, list[Progress]]:
    """A bundle of a result of `optimize` in all formats but aoti, and the steps of its export."""
    fast, seen = optimize(made(), example_inputs=(image, 0.5)), list[Progress]()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SOURCE_DATE_EPOCH", raising=False)
        bundle = export(
            fast,
            example_inputs=(image, 0.5),
            output=tmp_path_factory.mktemp("written") / "net",
            formats=("torchscript", "onnx", "pt2"),
            metadata=GIVEN,
            opset=17,
            device="cpu",
            progress=seen.append,
            source="net.py",
        )
    return bundle, seen


@pytest.mark.slow
def test_files_of_a_model_that_writes_to_its_input_are_compared_by_their_outputs(tmp_path):
    torch.manual_seed(0)
    model = OfFunction(lambda self, x: self.head(x.mul_(2)), head=nn.Linear(4, 3)).eval()
    options = {"output": tmp_path / "net", "formats": ("torchscript", "onnx", "pt2")}
    bundle = export(model, example_inputs=(torch.randn(2, 4),), **options)
    for artifact in bundle.manifest["artifacts"]:
        assert [output["noise"]["name"] for output in artifact["measurement"]["outputs"]] == ["output"]
    (told,) = [note for note in bundle.manifest["notes"] if "in place" in note]
    assert told.startswith("x is changed in place by the original, which files can't show: return")
    # Each file gets the stored inputs, even if the file before it wrote to its inputs.
    assert verify_bundle(bundle.path).ok


FIXED = "fixed in the files at the values of the example inputs: argument "


def test_numbers_that_no_call_of_a_file_can_change_are_told(written, tmp_path):
    example = (torch.randn(2, 4), 1, 2, 3, 4, 5, 6)
    model = OfFunction(lambda self, x, *numbers: self.head(x) + sum(numbers), head=nn.Linear(4, 3)).eval()
    bundle = export(model, example_inputs=example, output=tmp_path / "net", formats=("torchscript",))
    told = f"{FIXED}`more_0` = 1, argument `more_1` = 2, argument `more_2` = 3, argument `more_3` = 4 and 2 more"
    assert told in bundle.manifest["notes"]
    assert told in (bundle.path / "README.md").read_text()
    assert f"{FIXED}`scale` = 0.5" in written[0].manifest["notes"]


def test_a_result_goes_into_a_bundle(written):
    bundle, seen = written
    assert bundle.parity.ok
    assert [artifact.format for artifact in bundle.artifacts] == ["torchscript", "onnx", "pt2"]
    assert bundle.missing == bundle.manifest["missing"] == {}
    assert (bundle.manifest["model"]["class"], bundle.manifest["model"]["source"]) == ("Net", "net.py")
    statuses = {record["name"]: record["status"] for record in bundle.manifest["passes"]}
    assert statuses == {"fold-conv-bias": "applied", "fold-conv-bn": "applied", "channels-last": "applied"}
    assert {step.stage for step in seen} <= set(STAGES)
    assert [step for step in seen if step.stage == "bundle"][-1].done == 1
    report = json.loads((bundle.path / "report.json").read_text())["optimize"]
    assert report["seconds"] > 0
    assert bundle.manifest["coverage"]["share"] == 1.0
    assert bundle.manifest["passes"][1]["changes"] == [{"where": "norm", "text": "folded into conv"}]
    assert None not in {each["seconds"] for each in bundle.manifest["passes"]}


def test_the_report_is_plain_data_and_readable(model, image):
    fast = optimize(model, example_inputs=(image,))
    document = json.loads(json.dumps(fast.report.to_json()))
    assert document["coverage"]["share"] == 1.0
    text = str(fast.report)
    assert "fold-conv-bn" in text
    assert "the largest error is" in text


def test_the_files_have_an_open_batch_names_and_the_opset(model, written):
    bundle, _ = written
    session = onnxruntime.InferenceSession(bundle.path / "model.onnx", providers=["CPUExecutionProvider"])
    assert [(i.name, i.shape) for i in session.get_inputs()] == [("image", ["batch", 3, 8, 8])]
    assert [(o.name, o.shape[0]) for o in session.get_outputs()] == [("logits", "batch"), ("features", "batch")]
    for batch in (1, 7):
        images = torch.randn(batch, 3, 8, 8)
        logits, _ = session.run(None, {"image": images.numpy()})
        assert torch.allclose(torch.from_numpy(logits), model(images, 0.5)["logits"], atol=1e-5)
    opsets = onnx.load(bundle.path / "model.onnx").opset_import
    assert {entry.domain: entry.version for entry in opsets}[""] == 17
    assert [artifact.opset for artifact in bundle.artifacts] == [None, 17, None]
    assert [entry["opset"] for entry in bundle.manifest["artifacts"]] == [None, 17, None]


def test_metadata_are_in_every_file_and_in_the_manifest(written):
    bundle, _ = written
    for artifact, entry in zip(bundle.artifacts, bundle.manifest["artifacts"], strict=True):
        found = exporter_named(artifact.format).read_metadata(artifact.path)
        assert artifact.metadata == entry["metadata"] == found
        assert GIVEN.items() <= found.items()
        assert found["optimize_export.outputs"] == '["logits", "features"]'
    assert not any("metadata" in note for note in bundle.manifest["notes"])


def test_a_moved_bundle_is_verified_with_metadata_the_placement_of_nodes_and_the_state_of_tf32(written, moved):
    bundle, _ = written
    script, onnx, program = bundle.manifest["artifacts"]
    assert script["placement"] is program["placement"] is None
    assert onnx["placement"] == bundle.load("onnx").placement
    assert onnx["placement"].keys() == {"CPUExecutionProvider"}
    pinned = {"float32_precision": "ieee", "torch_tf32": "off", "mha_fastpath": "off"}
    assert script["parity"]["settings"] == script["measurement"]["settings"] == pinned
    assert onnx["parity"]["settings"] == {**pinned, "onnxruntime_tf32": "off"}
    verified = verify_bundle(moved)
    assert verified.ok, str(verified)
    told = verified.to_json()["artifacts"]
    assert [each["metadata"] for each in told] == [entry["metadata"] for entry in bundle.manifest["artifacts"]]
    assert [figures.parity.settings for figures in verified.artifacts] == [
        artifact["parity"]["settings"] for artifact in bundle.manifest["artifacts"]
    ]
    assert [figures.placement for figures in rejudge_bundle(bundle.path).artifacts] == [None, onnx["placement"], None]


def test_an_exporter_that_knows_no_metadata_goes_on_and_is_named(model, image, tmp_path, monkeypatch):
    monkeypatch.setattr(TorchScriptExporter, "read_metadata", staticmethod(Exporter.read_metadata))
    options = {"example_inputs": (image,), "formats": "torchscript"}
    bundle = export(model, output=tmp_path / "net", metadata={"author": "Jane"}, **options)
    assert bundle.artifacts[0].metadata == {}
    (note,) = (note for note in bundle.manifest["notes"] if "metadata" in note)
    assert note == "the torchscript file lacks the metadata author: its exporter doesn't write metadata"
    bundle = export(model, output=tmp_path / "plain", **options)
    assert not any("metadata" in note for note in bundle.manifest["notes"])


def test_names_can_be_given_and_a_static_batch_is_fixed(model, image, tmp_path):
    given = {"input_names": ["picture"], "output_names": ["scores", "vector"], "static_batch": True}
    bundle = export(model, example_inputs=(image,), output=tmp_path / "net", formats="onnx", **given)
    (artifact,) = bundle.artifacts
    assert [spec.name for spec in (*artifact.inputs, *artifact.outputs)] == ["picture", "scores", "vector"]
    assert artifact.inputs[0].shape == (2, 3, 8, 8)
    assert bundle.manifest["parity"]["batch_sizes"] == [2]


def test_the_comparison_is_with_the_original_by_the_users_tolerance(model, image, tmp_path):
    """A result that was damaged after `optimize` is rejected: it is compared with the original, not with itself."""
    fast = optimize(model, example_inputs=(image,))
    fast.conv.weight = nn.Parameter(1.01 * fast.conv.weight.detach())
    with pytest.raises(ParityError, match="isn't proven to compute the same as the original: features is") as caught:
        export(fast, example_inputs=(image,), output=tmp_path / "net", formats=("torchscript",))
    assert not (tmp_path / "net").exists()
    assert list(tmp_path.iterdir()) == []
    (artifact,) = caught.value.figures["artifacts"]
    assert artifact["parity"]["outputs"][0]["max_error"] > artifact["parity"]["outputs"][0]["tolerance"]
    bundle = export(fast, example_inputs=(image,), output=tmp_path / "net", formats=("torchscript",), atol=0.1)
    assert bundle.parity.ok
    assert verify_bundle(bundle.path).ok


@pytest.mark.slow
def test_a_tolerance_goes_by_the_names_in_the_files_or_in_the_model(model, image, tmp_path):
    fast = optimize(model, example_inputs=(image,))
    fast.head.weight = nn.Parameter(fast.head.weight.detach() * 1.001)

    def written(folder, **options):
        names = options.pop("output_names", ("scores", "vector"))
        given = {"output": tmp_path / folder, "formats": ("torchscript",), "output_names": names}
        return export(fast, example_inputs=(image,), **given, **options)

    # The head has an error; the features before it have none.
    for number, name in enumerate(("scores", "logits")):
        bundle = written(f"net{number}", atol={name: 0.1})
        assert [output["name"] for output in bundle.parity.artifacts["torchscript"]["outputs"]] == ["scores", "vector"]
        assert [output["atol"] for output in bundle.manifest["golden"]["outputs"]] == [0.1, None]
        assert verify_bundle(bundle.path).ok
    with pytest.raises(ParityError, match="scores is off by"):
        written("off", atol={"vector": 0.1})
    with pytest.raises(ParityError, match=r"scores differs from the original .* atol 1e-12 and rtol 0 allow"):
        written("off", atol={"logits": 1e-12})
    with pytest.raises(UsageError, match=r"'boxes'; the outputs are: scores \(logits in the model\), vector \(feat"):
        written("off", atol={"boxes": 0.1})
    with pytest.raises(UsageError, match="rtol names the output scores twice: it is logits in the model"):
        written("off", rtol={"scores": 0.1, "logits": 0.1})
    # A name in the files takes precedence over the same name in the model.
    assert written("swapped", output_names=("features", "logits"), atol={"features": 0.1}).parity.ok
    with pytest.raises(ParityError, match="features is off by"):
        written("off", output_names=("features", "logits"), atol={"logits": 0.1})
    assert not (tmp_path / "off").exists()


def test_a_folded_weight_that_was_written_to_is_refused_and_a_shared_one_is_not(model, image, tmp_path):
    fast = optimize(model, example_inputs=(image,))
    with torch.no_grad():
        model.head.weight.mul_(2)
    assert export(fast, example_inputs=(image,), output=tmp_path / "net", formats=("torchscript",)).parity.ok
    with torch.no_grad():
        model.norm.running_mean.add_(1)
    with pytest.raises(ExportFailed, match=r"^norm\.running_mean was modified after optimize"):
        export(fast, example_inputs=(image,), output=tmp_path / "other")


@pytest.mark.slow
def test_a_result_that_was_trained_is_exported_as_the_original_would_be(model, image, tmp_path):
    """The running mean that absorbed a bias belongs to the result: training doesn't update the caller's."""
    fast = optimize(model.train(), example_inputs=(image,), mode="training")
    assert [record.status for record in report_of(fast).passes] == ["applied"]
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        fast(image)["logits"].square().mean().backward()
        optimizer.step()
    assert (fast.norm.running_mean - model.norm.running_mean + model.conv.bias).abs().max() > 1e-2
    bundle = export(fast, example_inputs=(image,), output=tmp_path / "net")
    assert bundle.parity.ok
    with torch.no_grad():
        fast.norm.running_mean.add_(1)
        # Loading the trained state into the caller's model is no reason to refuse.
        model.load_state_dict(fast.state_dict())
    assert export(fast, example_inputs=(image,), output=tmp_path / "again", formats=("torchscript",)).parity.ok


JUDGED = ArtifactParity.judge


def test_what_a_failed_exporter_left_behind_is_not_published(tmp_path, monkeypatch, caplog):
    def half(self, request, directory):
        (directory / "model.onnx.part").write_bytes(b"half")
        (directory / "parts").mkdir()
        (directory / "parts" / "one").write_bytes(b"half")
        raise ExportError("The model can't be exported to onnx.")

    monkeypatch.setattr(OnnxExporter, "export", half)
    bundle = export(nn.Linear(3, 3), example_inputs=(torch.randn(2, 3),), output=tmp_path / "net")
    assert bundle.missing == open_bundle(bundle.path).missing == {"onnx": "The model can't be exported to onnx."}
    (told,) = [record for record in caplog.records if record.name == "optimizer.api"]
    assert told.levelname == "WARNING"
    assert f"onnx is missing from the bundle, and torchscript is published at {tmp_path / 'net'}: " in caplog.text
    written = {"manifest.json", "SHA256SUMS", "README.md", "report.html", "report.json"}
    assert {path.name for path in bundle.path.iterdir()} == {*written, "golden.safetensors", "model.torchscript.pt"}
    report = verify_bundle(bundle.path)
    assert report.ok
    assert any(note.startswith("the format onnx is missing: ") for note in report.notes)


def test_a_file_that_proves_nothing_is_not_explained_as_a_wrong_one(tmp_path, monkeypatch):
    """The noise may be measured again for one file, and may then hide the signal of this file alone."""
    monkeypatch.setattr(
        ArtifactParity, "judge", lambda self, measurement: replace(JUDGED(self, measurement), verdict="vacuous")
    )
    explained = []
    monkeypatch.setattr(Failures, "explain", lambda *arguments: explained.append(arguments))
    with pytest.raises(ParityError, match="The onnx artifact isn't proven to compute the same as the original"):
        export(nn.Linear(3, 3), example_inputs=(torch.randn(2, 3),), output=tmp_path / "net", formats=("onnx",))
    assert explained == []
    assert list(tmp_path.iterdir()) == []


def test_no_format_that_is_left_is_an_error_that_names_all(tmp_path):
    loop = OfFunction(lambda self, x: torch.stack([row * (index + 1) for index, row in enumerate(x)]))
    with pytest.raises(ExportError, match=r"can't be exported to onnx .* can't be exported to pt2 "):
        export(loop, example_inputs=(torch.randn(2, 3),), output=tmp_path / "net", formats=("onnx", "pt2"))
    assert list(tmp_path.iterdir()) == []


def test_outputs_that_prove_nothing_in_half_precision_are_not_published(tmp_path):
    small, x = OfFunction(lambda self, x: self.head(x) * 1e-3 + 1, head=nn.Linear(4, 3)), torch.randn(2, 4)
    assert export(small, example_inputs=(x,), output=tmp_path / "net", formats=("torchscript",)).parity.ok
    fast = optimize(small, ["cast-precision:how=weights"], example_inputs=(x,))
    with pytest.raises(VacuousError, match=r"^Computed in bfloat16, the outputs carry no signal .*: leave out cast"):
        export(fast, example_inputs=(x,), output=tmp_path / "half", formats=("torchscript",))


def test_answers_that_differ_from_themselves_are_not_published(tmp_path):
    count = itertools.count()
    with pytest.raises(VacuousError, match=r"^No output of the original is deterministic, .*: make the model return"):
        export(OfFunction(lambda self, x: x + next(count)), example_inputs=(torch.ones(2, 3),), output=tmp_path / "net")


def test_one_output_that_proves_nothing_is_a_note(tmp_path):
    two = OfFunction(lambda self, x: (x.relu(), x * 0))
    bundle = export(two, example_inputs=(torch.randn(2, 3),), output=tmp_path / "net", formats=("torchscript",))
    assert bundle.parity.ok
    assert "output_1 is all zero and proves nothing." in bundle.manifest["notes"]


@pytest.mark.parametrize(
    ("changed", "error", "sentence"),
    [
        ({"formats": ("tflite",)}, UnknownFormat, "There is no format 'tflite'"),
        ({"formats": ()}, UsageError, "formats is empty"),
        ({"example_inputs": None}, UsageError, "export() needs example_inputs"),
        ({"example_inputs": (torch.randn(2, 3),)}, LoadError, "The model raises on the example inputs"),
        ({"opset": 999}, UnknownOpset, "Opset 999 isn't available here"),
        ({"opset": 17, "formats": "torchscript"}, UnknownOpset, "opset applies to ONNX files only"),
        ({"metadata": {"": "x"}}, MetadataError, "The metadata key '' is empty"),
        ({"metadata": {"optimize_export.torch": "1"}}, MetadataError, "The metadata key 'optimize_export.torch' is"),
        ({"formats": None}, UsageError, "formats is empty"),
        ({"batch_sizes": (0,)}, UsageError, "batch_sizes must be a list of whole numbers of 1 or more"),
        ({"batch_sizes": (True,)}, UsageError, "batch_sizes must be a list of whole numbers of 1 or more"),
        ({"seed": "x"}, UsageError, "seed must be a whole number, not 'x'."),
        ({"device": "tpu"}, UsageError, "There is no device 'tpu'"),
        ({"reference_device": "tpu"}, UsageError, "There is no device 'tpu'"),
        ({"reference_device": "cuda:2"}, UsageError, "The device must be 'auto', 'cpu' or 'cuda', not 'cuda:2'"),
        ({"output": ""}, UsageError, "output must be the folder of the bundle"),
        ({"output": None}, UsageError, "output must be the folder of the bundle"),
        ({"calibration": [torch.zeros(2, 4)]}, UsageError, "Calibration data have an effect only with an accuracy bu"),
        ({"accuracy": 0.9, "tune": False}, UsageError, "An accuracy budget has an effect only with tuning or choices"),
        ({"accuracy": 0.9, "bench": False}, UsageError, "An accuracy budget implies tuning, which times the files"),
        ({"tune": True, "bench": False}, UsageError, "Tuning times the files: leave out `bench=False`."),
        ({"tune": True, "choices": "x"}, UsageError, "Tuning and choices contradict each other"),
        ({"choices": "x"}, UsageError, "The choices x can't be read"),
        ({"accuracy": 2}, UsageError, "accuracy 2 isn't a budget"),
        ({"tune_seconds": 0}, UsageError, "The time for tuning must be a number of seconds above 0"),
        ({"effort": "much"}, UsageError, "effort must be 'quick', 'normal' or 'thorough'"),
        ({"opset": "17"}, UnknownOpset, "The opset must be a whole number"),
        ({"dynamic": {"image": (7,)}}, UsageError, "dynamic opens dim 7 of image"),
        ({"dynamic": {"y": (0,)}}, UsageError, "dynamic names y, but the inputs"),
        ({"dynamic": {"image": (0,)}, "static_batch": True}, UsageError, "static_batch fixes the batch size"),
        ({"input_names": ("a", "b")}, StructureError, "2 input names were given for 1 input tensors"),
        ({"atol": {"y": 1.0}}, UsageError, "atol names the output 'y'"),
    ],
)
def test_what_makes_no_sense_is_one_sentence_without_options_of_the_command(
    model, image, tmp_path, changed, error, sentence
):
    with pytest.raises(error) as caught:
        export(model, **{"example_inputs": (image,), "output": tmp_path / "net", **changed})
    assert str(caught.value).startswith(sentence)
    assert not any(part in str(caught.value) for part in ("\n", "--", "command line"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("options", [{"device": "cuda"}, {"require_gpu": True}, {"reference_device": "cuda"}])
def test_a_required_gpu_that_is_missing(model, image, tmp_path, options):
    with pytest.raises(DeviceError, match="A GPU is required"):
        export(model, example_inputs=(image,), output=tmp_path / "net", **options)


def test_an_original_on_another_device_allows_the_factor_of_the_devices(model, image, tmp_path, monkeypatch):
    seen = []

    def far(measured, here):
        seen.append((measured["type"], here["type"]))
        return 4.0

    monkeypatch.setattr("optimizer.exporting.artifact_parity.factor_between", far)
    given = {"formats": ("torchscript",), "device": "cpu", "reference_device": "cpu"}
    bundle = export(model, example_inputs=(image,), output=tmp_path / "net", **given)
    assert seen == [("cpu", "cpu")]
    assert bundle.manifest["parity"]["reference_device"] == bundle.manifest["golden"]["device"]
    assert bundle.manifest["artifacts"][0]["parity"]["reference_device"] == ""
    parity = bundle.manifest["artifacts"][0]["parity"]
    assert parity["factor"] == bundle.manifest["parity"]["factor"] == 16.0
    assert all(output["tolerance"] == 16 * output["noise"] for output in parity["outputs"])
    assert any("may have errors of 16 times its noise" in note for note in bundle.manifest["notes"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("assigned", "sentence"),
    [
        ([("CUDAExecutionProvider", "a", "Conv"), ("CPUExecutionProvider", "pool", "MaxPool")], r"`pool` \(MaxPool\)"),
        ([("CPUExecutionProvider", "shape", "Shape")], "runs no node of the file on the GPU"),
    ],
)
def test_an_export_goes_by_the_placement_of_nodes_too(model, image, tmp_path, monkeypatch, assigned, sentence):
    load = OnnxExporter.load

    def load_there(path, device):
        judge_placement(assigned, frozenset())
        return load(path, device)

    monkeypatch.setattr(OnnxExporter, "load", staticmethod(load_there))
    # As on a GPU, where the exporter's proof doesn't count and the file is loaded again.
    monkeypatch.setattr(FileProof, "__call__", lambda *_: False)
    with pytest.raises(ProviderFallback, match=sentence):
        export(model, example_inputs=(image,), output=tmp_path / "net", strict=True)
    assert list(tmp_path.iterdir()) == []
    bundle = export(model, example_inputs=(image,), output=tmp_path / "other")
    assert re.search(sentence, bundle.missing["onnx"])
    assert [artifact.format for artifact in bundle.artifacts] == ["torchscript"]
    monkeypatch.setattr(OnnxExporter, "load", staticmethod(load))
    assert export(model, example_inputs=(image,), output=tmp_path / "net", formats=("onnx",)).parity.ok


def test_a_wrapper_of_torch_compile_is_refused_with_the_way_out(model, image, tmp_path):
    wrapped = torch.compile(model, backend="eager")
    for call in (
        lambda: optimize(wrapped, example_inputs=(image,)),
        lambda: export(wrapped, example_inputs=(image,), output=tmp_path / "net"),
    ):
        with pytest.raises(UsageError, match="pass the module itself"):
            call()
    with pytest.raises(UsageError, match=r"must be an nn\.Module, not function"):
        optimize(lambda x: x)
    with pytest.raises(UsageError, match="didn't return it"):
        report_of(model)


def test_a_forward_that_changes_the_current_folder_moves_no_bundle(image, tmp_path, monkeypatch):
    def wander(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        os.chdir(tmp_path / "elsewhere")
        return torch.relu(x)

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    bundle = export(OfFunction(wander), example_inputs=(image,), output="net", formats=("torchscript",))
    assert bundle.path == tmp_path / "net"
    assert (tmp_path / "net" / "manifest.json").is_file()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_models_own_report_stays(image):
    fast = optimize(OfFunction(lambda self, x: x * 2, report="mine"), example_inputs=(image,))
    assert fast.report == "mine"
    assert report_of(fast).verified


@pytest.mark.parametrize(
    "function",
    [optimizer.optimize, optimizer.check_parity, optimizer.export, optimizer.diagnose, optimizer.profile],
)
def test_a_numpy_array_among_the_inputs_is_named(function, tmp_path):
    array = torch.ones(2, 4).numpy()
    further = {"output": tmp_path / "bundle"} if function is optimizer.export else {}
    models = (nn.Linear(4, 4), nn.Linear(4, 4)) if function is optimizer.check_parity else (nn.Linear(4, 4),)
    with pytest.raises(LoadError, match=r"which contain a numpy array: .* to a tensor with torch.from_numpy\.$"):
        function(*models, example_inputs=(array,), **further)


def test_a_number_and_a_text_in_the_output_are_constants_of_the_files(tmp_path):
    model = OfFunction(lambda self, x: {"scale": 0.5, "logits": self.fc(x), "name": "net"}, fc=nn.Linear(4, 3)).eval()
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    fast = optimize(model, example_inputs=(x,))
    bundle = export(fast, example_inputs=(x,), output=tmp_path / "net")
    assert bundle.parity.ok
    assert [[output["name"] for output in each["outputs"]] for each in bundle.manifest["artifacts"]] == [["logits"]] * 2
    assert verify_bundle(tmp_path / "net").ok


# The files of the bundle ----------------------------------------------------------------------------------------------


@pytest.fixture
def moved(written, tmp_path) -> Path:
    return Path(shutil.copytree(written[0].path, tmp_path / "moved"))


@pytest.mark.slow
def test_the_readme_of_real_artifacts_runs_without_this_program(moved):
    snippets = [part.partition("```")[0] for part in (moved / "README.md").read_text().split("```python")[1:]]
    assert len(snippets) == 3
    code = (
        "import sys\nfor snippet in sys.argv[1:]:\n    exec(snippet, found := {})\n    assert len(found['outputs']) == 2\n"
        "assert not {'optimizer', 'exporters', 'passes'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-I", "-c", code, *snippets], cwd=moved, check=True, capture_output=True)


def test_a_crash_of_onnxruntime_is_a_problem_in_the_report(moved, monkeypatch):
    monkeypatch.setattr(onnx_session, "PlainSession", crashing_runtimes.CrashesAtLoad)
    (problem,) = verify_bundle(moved).problems
    assert problem.startswith("model.onnx: it can't be loaded or run: RuntimeCrashed: onnxruntime ")
    assert problem.endswith(" crashes (SIGSEGV) while it loads the file")


def test_a_flipped_bit_in_the_onnx_leaves_no_other_artifact_to_be_run(moved):
    data = bytearray((moved / "model.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (moved / "model.onnx").write_bytes(data)
    report = verify_bundle(moved)
    assert report.artifacts == ()
    assert [problem.partition(" was changed")[0] for problem in report.problems] == ["model.onnx"]


class Runs:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_program_of_a_stranger_is_loaded_without_expect_only(written, moved, tmp_path):
    hostile = io.BytesIO()
    torch.save(((Runs(tmp_path / "ran"),), {}), hostile)
    path = moved / "model.pt2"
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, hostile.getvalue() if name.endswith("sample_inputs/model.pt") else data)
    assert "model.pt2" in verify_bundle(moved).problems[0]
    seal(moved)
    assert "not the expected bundle" in verify_bundle(moved, expect=written[0].sha256sums).problems[0]
    assert verify_bundle(moved, run=False).ok
    assert not (tmp_path / "ran").exists()
    # A model file is a program, and a bundle's own hashes don't show who made it.
    verify_bundle(moved)
    assert (tmp_path / "ran").exists()


def test_a_tolerance_for_the_result_is_none_for_what_an_exporter_does(tmp_path, monkeypatch):
    own = TorchScriptExporter.load

    class Off(Wrong):
        """A loaded file with an error of 2 %."""

        def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(1.02 * output for output in self._runner(*tensors))

    monkeypatch.setattr(TorchScriptExporter, "load", staticmethod(lambda path, device: Off(own(path, device))))
    with pytest.raises(ExporterError, match="output `output` is wrong on inputs of"):
        export(
            nn.Linear(3, 4).eval(),
            example_inputs=(torch.randn(2, 3),),
            output=tmp_path / "net",
            formats=("torchscript",),
            atol=1.0,
        )
