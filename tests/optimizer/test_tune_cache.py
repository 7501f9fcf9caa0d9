"""Results of tuning that are kept by content, and proven again instead of timed."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_tuning import (
    Chosen,
    Wrong,
    chooser,
    fake_clock,
    fake_quantization,
    opening,
    prepare,
)

from optimize_export.manifest import version_of
from optimizer.options import AccuracyBudget
from optimizer.tuning import cache
from optimizer.tuning.cache import cache_file


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("prepared"), ("onnx",))


@pytest.fixture
def speeds(monkeypatch):
    speeds = fake_clock(monkeypatch)
    speeds.seconds = {"eager": 1.0, "int8.onnx in onnxruntime": 0.1, "": 0.5}
    return speeds


@pytest.fixture
def rounding(monkeypatch):
    rounding = fake_quantization(monkeypatch)
    rounding.levels = {"int8-static": 100}
    return rounding


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "cache" / "optimize-export" / "tune"


@pytest.fixture
def tune(prepared, speeds, rounding, tmp_path, monkeypatch):
    choosing = chooser(prepared, tmp_path, monkeypatch)

    def tune(accuracy: str = "exact", tune_seconds: float = 600.0) -> Chosen:
        speeds.timed.clear()
        return choosing(tune=True, accuracy=accuracy, tune_seconds=tune_seconds)

    return tune


def read(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8")))


def test_the_same_files_are_not_tuned_twice(tune, speeds, kept):
    first = tune()
    assert speeds.timed
    (file,) = kept.iterdir()
    assert read(file).keys() == {"date", "seconds", "quantization", "benchmark"}
    again = tune()
    assert speeds.timed == []
    *notes, note = again.benchmark.notes
    assert note == f"these are times of {read(file)['date']}; delete {file} to tune again"
    assert replace(again.benchmark, notes=tuple(notes)) == first.benchmark
    assert list(kept.iterdir()) == [file]


def test_a_kept_lossy_choice_is_made_and_proven_again(tune, speeds, rounding, kept):
    rounding.levels = {"int8-static": 2}
    first = tune("0.999")
    (file,) = kept.iterdir()
    assert read(file)["quantization"] == {"kind": "int8-static", "kept": ["head"]}
    again = tune("0.999")
    assert speeds.timed == []
    assert again.entries == first.entries
    assert again.entries["onnx-int8"]["quantization"]["kept"] == ["head"]
    assert again.files == {"model.onnx", "model.int8.onnx"}


def test_a_kept_lossy_choice_outside_the_budget_is_tuned_again(tune, speeds, rounding):
    assert tune("0.999").route == "onnx-int8 in onnxruntime"
    rounding.levels = {"int8-static": 1}
    rounding.finer = 1
    found = tune("0.999")
    assert speeds.timed
    assert found.route == "onnx in onnxruntime"
    assert found.files == {"model.onnx"}


def test_a_kept_choice_that_is_wrong_now_is_tuned_again(tune, speeds, monkeypatch):
    speeds.seconds = {"eager": 1.0, "1 thread": 0.2, "": 0.5}
    assert tune().route == "onnx in onnxruntime, 1 thread"
    opening(monkeypatch, lambda runner, route: Wrong(runner) if route.settings.get("threads") == 1 else runner)
    assert tune().route == "onnx in onnxruntime"
    assert speeds.timed


def put(value: Any, *keys: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = value

    return change


ONNX = {"format": "onnx", "runtime": "onnxruntime", "settings": {}}
POISON = {
    "an unknown format": put({**ONNX, "format": "pickle"}, "benchmark", "recommended"),
    "a format of no file": put({**ONNX, "format": "torchscript", "runtime": "torch"}, "benchmark", "recommended"),
    "a lossy route without a budget": put({**ONNX, "format": "onnx-int8"}, "benchmark", "recommended"),
    "a route that wasn't timed": put({**ONNX, "settings": {"threads": 3}}, "benchmark", "recommended"),
    "a text for seconds": put("NaN", "benchmark", "figures", 1, "seconds"),
    "a deep nesting": lambda data: data.update(x=nested(500)),
    "no figures": put(7, "benchmark", "figures"),
    "a text for the time": put("long", "seconds"),
    "a date": put("\x1b[31myesterday", "date"),
}


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
def test_a_choice_that_this_export_could_not_have_made_is_none(tune, speeds, kept, poison):
    first = tune()
    (file,) = kept.iterdir()
    data = read(file)
    data["benchmark"]["notes"].append("")
    poison(data)
    file.write_text(json.dumps(data), encoding="utf-8")
    again = tune()
    assert speeds.timed
    assert again.benchmark.recommended == first.benchmark.recommended
    assert not any(note.startswith("these are times of") for note in again.benchmark.notes)


def test_the_sentence_about_a_kept_choice_is_about_its_route(tune, speeds, kept):
    first = tune()
    (file,) = kept.iterdir()
    data = read(file)
    data["benchmark"]["reason"] = "ship model.onnx in openvino: 99 times as fast as eager"
    file.write_text(json.dumps(data), encoding="utf-8")
    assert tune().benchmark.reason == first.benchmark.reason
    assert speeds.timed == []


BROKEN = [lambda path, content=content: path.write_bytes(content) for content in (b"{", b"\xff", b'{"benchmark": {}}')]


@pytest.mark.timeout(60)
@pytest.mark.skipif(os.name != "posix", reason="files of POSIX")
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero"), *BROKEN])
def test_what_is_no_file_or_broken_is_replaced(tune, speeds, kept, make):
    tune()
    (file,) = kept.iterdir()
    file.unlink()
    make(file)
    assert tune().route == "onnx in onnxruntime"
    assert speeds.timed
    assert file.is_dir() or read(file)["benchmark"]["recommended"]["format"] == "onnx"


def test_a_shorter_search_is_not_taken_for_a_longer_one(tune, speeds):
    tune(tune_seconds=300)
    tune(tune_seconds=600)
    assert speeds.timed
    tune(tune_seconds=300)
    assert speeds.timed == []


def test_a_folder_that_cannot_be_written_is_a_note(tune, tmp_path, kept):
    (tmp_path / "cache").write_text("a file")
    found = tune()
    assert found.route == "onnx in onnxruntime"
    assert found.benchmark.notes == (f"the result of the tuning isn't kept: {kept} can't be written (Not a directory)",)


def test_nothing_is_kept_where_nothing_could_be_measured(tune, kept, monkeypatch):
    monkeypatch.setattr("optimizer.tuning.candidates.available_memory", lambda: 1000)
    assert tune().benchmark.recommended is None
    assert not kept.exists()


# The name of the file ---------------------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """As a `Bench`, and as its `Lossy`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "model.onnx").write_text("weights")
    files = SimpleNamespace(
        folder=tmp_path, entries=[{"format": "onnx", "files": ["model.onnx"]}], inputs=[torch.zeros(2, 3)]
    )
    job = SimpleNamespace(target=torch.device("cpu"), budget=AccuracyBudget(cosine=0.9), finite_inputs=False)
    measured = SimpleNamespace(reference=SimpleNamespace(blank=SimpleNamespace(mode="inference")))
    calibration = SimpleNamespace(used=((torch.zeros(2, 3),),), held_out=())
    return SimpleNamespace(
        bench=SimpleNamespace(files=files, job=job, batch_sizes=(2,), measured=measured),
        lossy=SimpleNamespace(calibration=calibration),
        folder=tmp_path,
        patch=monkeypatch,
    )


def named(parts: Any) -> Path:
    return cache_file(parts.bench, parts.lossy)


def another_version(name: str) -> str | None:
    return None if name == "openvino" else version_of(name) or "1"


CHANGES: dict[str, Callable[[Any], Any]] = {
    "the file": lambda parts: (parts.folder / "model.onnx").write_text("weight5"),
    "a shape": lambda parts: setattr(parts.bench.files, "inputs", [torch.zeros(2, 4)]),
    "a dtype": lambda parts: setattr(parts.bench.files, "inputs", [torch.zeros(2, 3, dtype=torch.int64)]),
    "the batch size": lambda parts: setattr(parts.bench, "batch_sizes", (3,)),
    "the budget": lambda parts: setattr(parts.bench.job, "budget", AccuracyBudget(top1=0.9)),
    "finite inputs": lambda parts: setattr(parts.bench.job, "finite_inputs", True),
    "the mode": lambda parts: setattr(parts.bench.measured.reference.blank, "mode", "training"),
    "the calibration": lambda parts: setattr(parts.lossy.calibration, "used", ((torch.ones(2, 3),),)),
    "nothing lossy": lambda parts: setattr(parts, "lossy", None),
    "the device": lambda parts: parts.patch.setattr(cache, "describe_device", lambda device: {"name": "another"}),
    "threads": lambda parts: parts.patch.setattr(torch, "get_num_threads", lambda: 77),
    "a version": lambda parts: parts.patch.setattr(cache, "version_of", another_version),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_name_depends_on_all_that_the_choice_depends_on(parts, change):
    before = named(parts)
    assert named(parts) == before
    assert before.parent == parts.folder / "optimize-export" / "tune"
    change(parts)
    assert named(parts) != before


def test_the_folder_of_the_user_is_the_default(parts):
    parts.patch.delenv("XDG_CACHE_HOME")
    parts.patch.setattr(Path, "home", lambda: Path("/home/jane"))
    assert named(parts).parent == Path("/home/jane/.cache/optimize-export/tune")
