"""The benchmark of the verdicts on two small models; its counts reveal a broken judge."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmark_runs import imported, run_benchmark
from torch import nn

from optimize_export.manifest import plain
from optimizer.exporting import artifact_parity
from optimizer.parity import check_parity

OPTIONS = ("--models=resnet,vit", "--inputs=1", "--faults=1")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rule")
    paths = {"json": folder / "new" / "rule.json", "markdown": folder / "rule.md"}
    options = [*OPTIONS, *(f"--{name}={path}" for name, path in paths.items())]
    # Runs per model: the result of `optimize` and three files on the export's inputs, and all four on other inputs.
    process = run_benchmark("rule", *options, "--runs=16", "--check", timeout=500)
    assert process.returncode == 0, process.stderr
    return options, json.loads(paths["json"].read_text()), paths["markdown"].read_text(), process.stderr


@pytest.fixture(scope="module")
def rule():
    with imported("rule") as module:
        yield module


def test_judges_all_that_is_right_and_all_faults(done):
    _, figures, markdown, _ = done
    total = figures["total"]
    assert {name: total[name] for name in ("runs", "failed", "missed", "errors")} == {
        "runs": 16, "failed": 0, "missed": 0, "errors": 0,
    }  # fmt: skip
    for unit in figures["units"]:
        assert {format: file["route"] for format, file in unit["files"].items()} == {
            "torchscript": "trace", "onnx": "dynamo", "pt2": "export",
        }  # fmt: skip
        kinds = {(fault["what"], fault["kind"]) for fault in unit["faults"] if fault["outcome"] == "caught"}
        assert len(kinds) == 8, kinds
    assert "| ONNX file | 2 | 2 | 4 | 0 |" in markdown
    assert "| torchscript | 2 | 2 | 100 % | trace 2 |" in markdown
    assert (
        "Of 16 correct files and results, 0 fail. Of 16 faults, 0 pass although they move an output by more" in markdown
    )


def test_goes_on_where_it_was_stopped_with_other_weights(done):
    options, before, _, said = done
    process = run_benchmark("rule", *options, "--runs=20", timeout=500)
    assert process.returncode == 0, process.stderr
    assert "resnet, weights 0" in said
    assert "weights 0" not in process.stderr
    units = json.loads(Path(options[3].partition("=")[2]).read_text())["units"]
    assert units[:2] == before["units"]
    assert [(unit["model"], unit["draw"]) for unit in units[2:]] == [("resnet", 1)]
    # Faults are planted only with the first weights.
    assert not units[2]["faults"]
    assert [run["ratio"] for run in units[2]["runs"]] != [run["ratio"] for run in units[0]["runs"]]


def spoilt(rule, monkeypatch, factor):
    """Measure one model with a judge that allows `factor` times the noise."""
    right = rule.judge

    def judge(measurement, **options):
        return right(measurement, **{**options, "factor": factor})

    monkeypatch.setattr(rule, "judge", judge)
    monkeypatch.setattr(artifact_parity, "judge", judge)
    unit = rule.measure("resnet", 0, rule.Settings(inputs=1, faults=1, seed=0))
    assert not unit.error
    return unit, rule.totals([vars(unit)])


def test_a_judge_that_lets_nothing_pass_is_counted(rule, monkeypatch):
    unit, total = spoilt(rule, monkeypatch, 1e-9)
    # Each file fails in its export, so only the result of `optimize` is judged on other inputs.
    assert [(run["what"], run["inputs"]) for run in unit.runs if run["verdict"] == "failed"] == [
        ("torchscript", 0), ("onnx", 0), ("pt2", 0), ("passes", 1),
    ]  # fmt: skip
    assert total["failed"] == 4
    assert not rule.is_met(total)
    (table,) = [rule.right_table([vars(unit)])]
    assert any("TorchScript file: The torchscript artifact isn't proven to compute" in line for line in table.caption)
    assert unit.runs[-1]["figures"]["outputs"]


def test_a_judge_that_lets_everything_pass_is_counted(rule, monkeypatch):
    unit, total = spoilt(rule, monkeypatch, 1e9)
    passed = {fault["kind"] for fault in unit.faults if fault["outcome"] == "passed"}
    # Faults that change shapes are caught anyway, and `optimize` doesn't use the replaced judge.
    assert {"weight off by 1 %", "perturbed initializer", "lower dtype"} <= passed
    assert total["missed"] >= 4
    assert not rule.is_met(total)
    assert any("passes, and moves an output by" in line for line in rule.fault_table([vars(unit)]).caption)


def test_an_error_of_the_program_is_counted(rule, monkeypatch):
    def raising(*args, **options):
        raise ZeroDivisionError("nothing to divide by")

    monkeypatch.setattr(rule, "optimize", raising)
    unit = rule.measure("resnet", 0, rule.Settings(inputs=1, faults=1, seed=0))
    assert "ZeroDivisionError: nothing to divide by" in unit.error
    assert not rule.is_met(rule.totals([vars(unit)]))


def test_a_fault_that_passes_is_told_by_the_outputs_that_were_judged(rule):
    report = check_parity(nn.Linear(2, 2), nn.Linear(2, 2), example_inputs=(torch.ones(2, 2),))
    (output,) = report.outputs
    ratios = [(3.46, True), (0.2, True), (7.5, False)]
    outputs = tuple(replace(output, ratio=ratio, judged=judged) for ratio, judged in ratios)
    fault = {
        "what": "onnx", "kind": "lower dtype", "place": "Conv conv", "outcome": rule.PASSED, "effect": 11.8,
        "figures": plain(replace(report, outputs=outputs).to_json()),
    }  # fmt: skip
    (sentence,) = rule.fault_table([{"model": "net", "draw": 0, "faults": [fault]}]).caption
    assert sentence.startswith(
        "net, weights 0: lower dtype at Conv conv passes, and moves an output by 11.8 times its noise"
    )
    assert sentence.endswith("says 3.5 times.")
