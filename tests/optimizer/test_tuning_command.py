"""The command's options for timing and tuning: refusals, calibration files, --bench, and the table."""

import json
import shutil
from typing import Any

import crashing_runtimes
import numpy
import pytest
import torch
from fake_tuning import fake_clock
from safetensors.torch import save_file
from tiny_models import enliven
from torch import nn
from user_folder import refused

from optimize_export.manifest import file_digest
from optimize_export.runtime import Route
from optimizer import Bundle, export
from optimizer.command import cli
from optimizer.command.loading import load
from optimizer.command.tables import as_text
from optimizer.parity import Accuracy
from optimizer.tuning import Benchmark
from optimizer.tuning.benchmark import Figure, Ratio

# Options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "tunes"),
    [
        ({}, False),
        ({"accuracy": 0.9}, True),
        ({"accuracy": "top1=0.99"}, True),
        ({"accuracy": 0.9, "tune": True}, True),
        ({"accuracy": 0.9, "choices": True}, False),
        ({"tune": True}, True),
        ({"tune": False}, False),
    ],
    ids=str,
)
def test_an_accuracy_budget_implies_tuning(arguments, tunes, tmp_path, monkeypatch):
    class Begun(Exception):
        """Ends the export where the work begins."""

    def begin(job: Any) -> None:
        raise Begun(job.tune)

    monkeypatch.setattr("optimizer.api.measure", begin)
    monkeypatch.setattr("optimizer.api.read_choices", lambda *given: "read")
    with pytest.raises(Begun, match=str(tunes)):
        export(nn.Linear(4, 3), example_inputs=(torch.randn(2, 4),), output=tmp_path / "net", **arguments)


def test_missing_calibration_is_refused_before_the_model_is_loaded(write, capsys):
    path = write("raise SystemExit(9)")
    options = ["--tune", "--accuracy", "0.9", "--calibration", "nowhere.npz"]
    assert cli.main([str(path), *options]) == 3
    assert "The calibration inputs nowhere.npz don't exist." in capsys.readouterr().err


def test_missing_choices_are_refused_before_the_model_is_loaded(write, capsys, monkeypatch):
    monkeypatch.chdir(write.folder)
    path = write("raise SystemExit(9)")
    assert cli.main([str(path), "--choices", "nowhere"]) == 2
    assert "nowhere can't be read: No such file or directory." in capsys.readouterr().err


# Calibration ------------------------------------------------------------------------------------------------------


def test_each_file_of_a_folder_is_a_call(write, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    numpy.savez(folder / "b.npz", x=numpy.ones((3, 4), dtype=numpy.float32))
    save_file({"x": torch.zeros(2, 4)}, folder / "a.safetensors")
    (folder / "notes.txt").write_text("not a call")
    loaded = load(str(write("")), calibration=folder)
    assert loaded.calibration is not None
    assert [(call.args, call.kwargs["x"].shape[0]) for call in loaded.calibration] == [((), 2), ((), 3)]
    assert [call.file for call in loaded.calibration] == ["a.safetensors", "b.npz"]
    (alone,) = load(str(write("")), calibration=folder / "b.npz").calibration or ()
    assert alone.kwargs["x"].tolist() == torch.ones(3, 4).tolist()


def test_calibration_files_that_are_no_calls_are_refused(write, tmp_path):
    path = str(write(""))
    numpy.savez(tmp_path / "pickled.npz", x=numpy.array([{}, {}], dtype=object))
    assert "pickled.npz couldn't be read as npz" in refused(path, calibration=tmp_path / "pickled.npz")
    numpy.savez(tmp_path / "names.npz", picture=numpy.zeros((2, 4), dtype=numpy.float32))
    assert "The inputs names.npz don't fit forward of Net: missing a required argument: 'x'" in refused(
        path, calibration=tmp_path / "names.npz"
    )
    (tmp_path / "broken.npz").write_bytes(b"PK")
    message = refused(path, calibration=tmp_path / "broken.npz")
    assert "The inputs broken.npz aren't a .npz file: write it with numpy.savez." in message
    (tmp_path / "empty").mkdir()
    message = refused(path, calibration=tmp_path / "empty")
    assert message == f"{tmp_path / 'empty'} contains no .safetensors or .npz file."


FUNCTION = """
def get_calibration_inputs():
    return [torch.ones(2, 4), {"x": torch.ones(3, 4)}]
"""


def test_the_function_of_the_file_gives_the_calls_only_with_a_budget(write):
    calls = load(str(write(FUNCTION)), calibrates=True).calibration
    assert calls is not None
    assert [type(call) for call in calls] == [torch.Tensor, dict]
    raising = write("def get_calibration_inputs():\n    raise OSError('no data set here')\n", "raising.py")
    assert load(str(raising)).calibration is None
    assert "no data set here" in refused(str(raising), calibrates=True)
    assert load(str(write("", "without.py")), calibrates=True).calibration is None


def test_calibration_inputs_must_be_a_list_of_calls(write):
    path = write("calibration_inputs = torch.ones(2, 4)\n", "alone.py")
    message = refused(str(path), calibrates=True)
    assert "calibration_inputs is a Tensor; it must be a list of calls" in message


@pytest.mark.slow
def test_a_file_with_calibration_is_exported_without_a_budget(write, tmp_path, capsys):
    path = write(FUNCTION, "calibrated.py")
    code = cli.main([str(path), "--output", str(tmp_path / "net"), "--formats", "torchscript", "--quick"])
    assert code == 0, capsys.readouterr().err


# --bench ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    torch.manual_seed(0)
    model = enliven(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))).eval()
    folder = tmp_path_factory.mktemp("bench") / "net"
    return export(model, example_inputs=(torch.randn(2, 4),), output=folder, formats=("torchscript", "onnx"))


@pytest.fixture
def speeds(monkeypatch):
    return fake_clock(monkeypatch)


def digests(bundle: Bundle) -> dict[str, str]:
    return {path.name: file_digest(path) for path in bundle.path.iterdir()}


def test_bench_times_every_file_of_a_bundle_and_leaves_it_unchanged(bundle, speeds, capsys, monkeypatch):
    monkeypatch.setattr("optimizer.tuning.choice.is_installed", lambda runtime: False)
    speeds.seconds = {"freeze": 0.001, "onnxruntime": 0.004, "torch": 0.002}
    before = digests(bundle)
    assert cli.main(["bench", str(bundle.path), "--device", "cpu"]) == 0
    head, *rows, conclusion, _, _ = capsys.readouterr().out.splitlines()
    assert head.split() == ["latency", "of", "median", "p95", "speed-up", "memory", "size"]
    assert [row.split("  ")[0] for row in rows] == [
        "model.onnx in onnxruntime",
        "model.torchscript.pt in torch",
        "model.torchscript.pt in torch, freeze",
    ]
    assert "4 ms" in rows[0]
    assert "1.00 (1.00 to 1.00)" in rows[0]
    assert "2.00 (2.00 to 2.00)" in rows[1]
    assert conclusion.startswith(
        "run model.torchscript.pt in torch, freeze: no simpler file is as fast here, and no other is surely faster; "
        "the speed-ups are over model.onnx in onnxruntime (batch 2"
    )
    assert cli.main(["bench", str(bundle.path), "--device", "cpu", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"]
    assert document["benchmark"]["recommended"]["settings"] == {"freeze": True}
    assert len(document["benchmark"]["figures"]) == 3
    assert digests(bundle) == before


def test_bench_runs_no_file_of_a_damaged_bundle(bundle, speeds, tmp_path, capsys):
    shutil.copytree(bundle.path, tmp_path / "copy")
    with (tmp_path / "copy" / "model.onnx").open("ab") as file:
        file.write(b"x")
    assert cli.main(["bench", str(tmp_path / "copy")]) == 8
    assert "is damaged, and no file is run: model.onnx was changed" in capsys.readouterr().err
    assert speeds.timed == []
    assert cli.main(["bench", str(tmp_path / "nothing")]) == 8


def test_bench_says_that_no_file_runs(bundle, speeds, capsys, monkeypatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr("optimizer.tuning.candidates.can_start", lambda: False)
    monkeypatch.setattr("optimizer.tuning.candidates.open_route", fail)
    assert cli.main(["bench", str(bundle.path), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "not used: model.onnx in onnxruntime: it can't run: no such instruction" in out
    assert "no file runs here" in out


# The table --------------------------------------------------------------------------------------------------------


def figure(name: str, seconds: float | None, gain: float = 1.0, **more: Any) -> Figure:
    ratio = None if seconds is None else Ratio(gain, gain - 0.1, gain + 0.1, 21)
    p95 = None if seconds is None else 2 * seconds
    return Figure(name, None, seconds=seconds, p95=p95, speed_up=ratio, **more)


def lines(*figures: Figure, threads: int = 4, notes: tuple[str, ...] = ()) -> list[str]:
    found = Benchmark((2,), threads, 21, figures, Route("onnx", "onnxruntime"), "ship it", notes)
    return as_text({"benchmark": found.to_json()}, terminal=False).splitlines()


def test_the_table_has_times_sizes_and_the_recommendation():
    head, eager, file, dropped, note, conclusion = lines(
        figure("eager", 2.0),
        figure("model.onnx", 0.0123, 2.5, bytes=3 << 20, memory=5 << 20),
        figure("model.pt2", None, dropped="it can't run: no"),
        notes=("the fan was loud",),
    )
    assert head.split() == ["latency", "of", "median", "p95", "speed-up", "memory", "size"]
    assert eager.split() == ["eager", "2", "s", "4", "s", "1.00", "(0.90", "to", "1.10)"]
    assert "12.3 ms  24.6 ms  2.50 (2.40 to 2.60)  5.0 MiB  3.0 MiB" in file
    assert (dropped, note) == ("not used: model.pt2: it can't run: no", "note: the fan was loud")
    assert conclusion == "ship it (batch 2, 4 threads of torch, 21 rounds)"


def test_the_table_has_accuracy_if_a_lossy_file_was_timed():
    accuracy = Accuracy(cosine=0.9999999, top1=0.98)
    head, exact, lossy, conclusion = lines(
        figure("model.onnx", 1e-5), figure("model.int8.onnx", 1e-6, accuracy=accuracy), threads=1
    )
    assert head.split()[-1] == "accuracy"
    assert ("10 µs" in exact, exact.endswith("rounding only")) == (True, True)
    assert ("1 µs" in lossy, lossy.endswith("cosine 0.99999990, top-1 98 %")) == (True, True)
    assert "1 thread of torch" in conclusion


def test_a_verified_lossy_file_is_shown_with_its_accuracy():
    artifact = {
        "format": "onnx-int8",
        "path": "model.int8.onnx",
        "parity": None,
        "accuracy": Accuracy(cosine=0.998).to_json(),
        "problem": None,
    }
    (line,) = as_text({"artifacts": [artifact]}, terminal=False).splitlines()
    assert line == "model.int8.onnx  within budget: cosine 0.99800"
    (line,) = as_text({"artifacts": [{**artifact, "problem": "x"}]}, terminal=False).splitlines()
    assert line == "model.int8.onnx  failed: cosine 0.99800"


def test_bench_says_which_runtime_crashes(bundle, speeds, capsys, monkeypatch):
    monkeypatch.setattr("optimizer.tuning.candidates.open_route", crashing_runtimes.crash_unless_torch)
    assert cli.main(["bench", str(bundle.path), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "model.onnx in onnxruntime: it can't run: onnxruntime crashes (SIGSEGV) while it loads the file" in out
