"""The benchmark of the cost of the proof: a small run, and the count of forwards."""

import json
from functools import partial

import pytest
import torch
from benchmark_runs import imported, run_benchmark
from torch import nn

run = partial(run_benchmark, "proof_cost")


@pytest.fixture(scope="module")
def proof_cost():
    with imported("proof_cost") as module:
        yield module


def test_forwards_count_by_their_rows_and_dtype(proof_cost):
    model = proof_cost.Counted(nn.Linear(3, 3))
    x = torch.randn(4, 3)

    def call():
        for rows in (x, x[:1]):
            model(rows)
        model.double()(x.double())
        torch.compile(model, backend="eager")(x.double())
        return "result"

    result, forwards = proof_cost.counted(call, rows=2)
    assert result == "result"
    assert forwards == {"forwards": 2.5, "float64": 2.0, "all": 6.5}


@pytest.mark.zoo
def test_a_model_is_measured(tmp_path, proof_cost):
    paths = {"json": tmp_path / "cost.json", "markdown": tmp_path / "cost.md"}
    options = [f"--{name}={path}" for name, path in paths.items()]
    process = run("--models=vit_small", "--scale=0.1", "--check", *options)
    (figures,) = json.loads(paths["json"].read_text())["results"]
    ours, plain = figures[proof_cost.OURS], figures[proof_cost.PLAIN]
    assert process.returncode == (0 if ours["met"] else 1), process.stderr
    for stage in ("optimize", "export"):
        counts = ours[stage]
        assert counts["forwards"] > 0
        assert counts["all"] == sum(value for kind, value in counts.items() if kind != "all") + counts.get("float64", 0)
    assert ours["export"]["files"] > 0
    assert ours["further format"] > 0
    assert ours["memory"] == ours["peak_bytes"] / plain["peak_bytes"]
    assert "| vit_small | 0 |" in paths["markdown"].read_text()
