"""The benchmark of tuned training steps, on small models: a cut run goes on, and the goals are right."""

import json
import time

import pytest
from benchmark_runs import imported, run_benchmark

from optimizer.training import Setup

OPTIONS = ["--small", "--rounds=2", "--threads=1", "--tune-seconds=2", "--cases=convnext_tiny"]


def test_a_cut_run_goes_on_and_ends_with_all_tables(tmp_path):
    path = tmp_path / "training.jsonl"
    options = [*OPTIONS, f"--json={path}", f"--markdown={tmp_path / 'training.md'}"]
    assert run_benchmark("training", *options, "--ways=eager").returncode == 0
    kept = path.read_text()
    # As if two runs had ended in the middle of this one.
    path.write_text(kept + 2 * f"{json.dumps({'started': ['convnext_tiny', 'bf16']})}\n")

    done = run_benchmark("training", *options, "--ways=eager,channels-last,bf16,fp16,ours")
    assert done.returncode == 0, done.stderr
    assert "convnext_tiny  eager " not in done.stdout
    assert path.read_text().startswith(kept)
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    rows = {each["contender"]: each for each in entries if "case" in each}
    assert {way: row["unavailable"] for way, row in rows.items() if row["unavailable"]} == {
        "bf16": "2 runs ended while this was measured",
        "fp16": "RuntimeError: float16 with a GradScaler needs a GPU",
    }
    assert rows["channels-last"]["peak"] > 0
    assert len(rows["ours"]["seconds"]) == len(rows["ours"]["base_seconds"]) == 2
    assert rows["ours"]["best"] in ("eager", "channels-last")
    # Nothing that takes a compiler is tried in that time.
    # Its name says what else pays, such as "torch.compile with fused optimizer".
    assert "torch.compile" in [each.split(" with ")[0] for each in rows["ours"]["tuning"]["untried"]]
    assert [len(each["goals"]) for each in entries if "goals" in each] == [3, 3]
    assert "| convnext_tiny | bf16 | – |" in (tmp_path / "training.md").read_text()


@pytest.mark.parametrize("name", ["resnet50", "vit_small", "bert_base", "gpt2"])
def test_a_case_is_made_the_same_at_every_call(name):
    with imported("training") as training:
        (model, step, batch), (again, _, _) = (training.made_case(name, small=True) for _ in range(2))
        loss = step(model.eval(), batch)
        assert loss.requires_grad
        assert loss.equal(step(again.eval(), batch))


def test_a_way_ends_at_its_limit():
    with imported("training") as training, pytest.raises(training.OutOfTimeError), training.limited(0.1):
        time.sleep(5)


def test_settings_that_are_those_of_another_way_are_not_measured_again():
    with imported("training") as training:
        for case, device, setup in (
            ("resnet50", "cuda", Setup(precision="fp16", channels_last=True, compile="whole")),
            ("resnet50", "cpu", Setup(channels_last=True, compile="whole")),
            ("gpt2", "cuda", Setup(precision="fp16", compile="whole")),
        ):
            assert training.setup_of("composer", case, device) == setup
        with pytest.raises(RuntimeError, match="those of compile"):
            training.setup_of("composer", "gpt2", "cpu")


def rows_of(case="resnet50", over_best=None, took=60.0, **gains):
    rows = []
    for name, gain in gains.items():
        row = {"case": case, "contender": name.replace("_", "-"), "unavailable": None, "setup": name}
        rows.append(row | {"gain": {"median": gain}})
    best = max((row for row in rows if row["contender"] != "ours"), key=lambda row: row["gain"]["median"])
    for row in rows:
        if row["contender"] == "ours":
            row |= {"best": best["contender"], "over_best": over_best and {"median": over_best}}
            row["setup"] = row["setup"] if over_best else best["setup"]
            row |= {"tuning": {"seconds": took, "allowed": 60}}
    return rows


@pytest.mark.parametrize(
    ("rows", "met"),
    [
        ([], [False] * 3),
        (rows_of(eager=1.0, compile=1.4, ours=1.5, over_best=1.06), [True, True, True]),
        # The rounds with the best peer count, and not the gains from different runs.
        (rows_of(eager=1.0, compile=1.4, ours=1.5, over_best=0.96), [False, True, True]),
        (rows_of(eager=1.0, compile=1.5, ours=1.4, over_best=0.98), [True, False, True]),
        # The same settings as the best peer, whatever the noise.
        (rows_of(eager=1.0, bf16=0.1, ours=0.9), [True, False, True]),
        (rows_of(eager=1.0, ours=1.2), [True, False, True]),
        (rows_of(eager=1.0, ours=1.5, over_best=1.5, took=73.0), [True, True, False]),
        # A missing choice is behind.
        (rows_of(eager=1.0, ours=1.5, over_best=1.5) + rows_of("gpt2", eager=1.0), [False, True, True]),
    ],
)
def test_goals(rows, met):
    with imported("training") as training:
        assert [goal["met"] for goal in training.goals_of(rows)] == met
