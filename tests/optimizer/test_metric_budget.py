"""Exports whose budget is the drop of the user's own metric. The clock and quantization are fakes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_tuning import fake_clock, fake_quantization
from torch import nn

from optimize_export.errors import LoadError, ParityError, UsageError
from optimizer import Bundle, export, load, rejudge_bundle, verify_bundle
from optimizer.accuracy import EvaluateError, PairedTest, Search
from optimizer.command import cli
from optimizer.command.tables import benchmark_lines
from optimizer.tuning import lossy as tuning_lossy

X = torch.randn(4000, 6, generator=torch.Generator().manual_seed(1))


def net() -> nn.Module:
    torch.manual_seed(0)
    last = nn.Linear(32, 4)
    made = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), last).eval()
    with torch.no_grad():
        # So that each class is the answer to some rows.
        last.bias -= made(X).mean(0)
    return made


LABELS = net()(X).argmax(1)


def evaluate(run):
    for start in range(0, len(X), 200):
        yield run(X[start : start + 200]).argmax(1) == LABELS[start : start + 200]


@pytest.fixture
def rounding(monkeypatch):
    monkeypatch.setattr("optimizer.tuning.candidates.missing_compiler", lambda device: "none here")
    monkeypatch.setattr("optimizer.tuning.candidates.with_other_passes", lambda job: ())
    monkeypatch.setattr("optimizer.tuning.tuner.is_installed", lambda runtime: False)
    fake_clock(monkeypatch).seconds = {"eager": 1.0, "int8.onnx in onnxruntime": 0.1, "int8-dynamic": 0.2, "": 0.5}
    rounding = fake_quantization(monkeypatch)
    # With these levels, nearly 4 % of the rows get another class.
    rounding.levels, rounding.finer = {"int8-static": 10}, 1
    return rounding


def made(folder: Path, accuracy: str, **options: Any) -> Bundle:
    options = {"evaluate": evaluate, "tune_seconds": 600, "formats": ("onnx",), **options}
    return export(net(), example_inputs=(X[:2],), output=folder / "net", effort="quick", accuracy=accuracy, **options)


def figures(bundle: Bundle) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in bundle.manifest["benchmark"]["figures"]}


INT8 = "model.int8.onnx in onnxruntime"


def test_a_file_within_the_budget_is_shipped_after_a_final_test(rounding, tmp_path):
    bundle = made(tmp_path, "drop<=6%")
    manifest = bundle.manifest
    assert manifest["benchmark"]["recommended"]["format"] == "onnx-int8"
    (entry,) = [each for each in manifest["artifacts"] if each["format"] == "onnx-int8"]
    metric = entry["accuracy"]["metric"]
    assert entry["accuracy"]["budget"]["drop"] == 0.06
    assert (metric["part"], metric["verdict"], metric["confidence"], metric["score"]) == ("final", "within", 0.95, 1.0)
    assert 0 < metric["drop"] < metric["upper"] <= 0.06
    assert metric["examples"] == metric["of"], "the order isn't said to be random"
    assert metric == figures(bundle)[INT8]["accuracy"]["metric"]
    told = f"drop {100 * metric['drop']:.3g} points, at most {100 * metric['upper']:.3g} (95 %, {metric['examples']:,}"
    texts = {
        "reason": manifest["benchmark"]["reason"],
        "parity": manifest["parity"]["reason"],
        "README": (bundle.path / "README.md").read_text(encoding="utf-8"),
        "page": (bundle.path / "report.html").read_text(encoding="utf-8"),
        "loaded": load(bundle).accuracy,
        "verified": str(verify_bundle(bundle)),
        "judged": str(rejudge_bundle(bundle)),
        "table": "\n".join(str(getattr(line, "columns", line)) for line in benchmark_lines(bundle.benchmark)),
    }
    assert {name for name, text in texts.items() if told in text} == {*texts}
    assert verify_bundle(bundle).ok
    assert rejudge_bundle(bundle).ok
    assert "(budget: drop 6 points at 95 %)" in texts["README"]


def test_the_final_test_of_shuffled_examples_ends_when_it_is_sure(rounding, tmp_path):
    def shuffled(run):
        yield from evaluate(run)

    shuffled.shuffled = True
    bundle = made(tmp_path, "drop<=30%", evaluate=shuffled)
    metric = figures(bundle)[INT8]["accuracy"]["metric"]
    assert (metric["part"], metric["verdict"]) == ("final", "within")
    assert metric["examples"] < len(X) / 2


def test_a_file_beyond_the_budget_is_refused_though_its_cosine_is_fine(rounding, tmp_path):
    rounding.levels = {"int8-static": 30}
    bundle = made(tmp_path, "drop<=0.5%")
    assert bundle.manifest["benchmark"]["recommended"]["format"] == "onnx"
    figure = figures(bundle)["onnx-int8"]
    assert figure["accuracy"]["cosine"] > 0.99
    assert figure["accuracy"]["metric"]["verdict"] == "outside"
    assert figure["dropped"].startswith("outside the budget: the best has drop ")
    assert figures(made(tmp_path / "cosine", "0.99", evaluate=None))[INT8]["dropped"] is None


def test_a_file_must_be_within_all_parts_of_the_budget(rounding, tmp_path):
    bundle = made(tmp_path, "0.99999,drop<=6%")
    assert bundle.manifest["benchmark"]["recommended"]["format"] == "onnx"
    refused = figures(bundle)["onnx-int8"]
    assert "metric" not in refused["accuracy"], "the metric is the most expensive part, and comes last"


def test_where_the_final_test_fails_the_next_file_is_tested_with_what_is_left(rounding, tmp_path, monkeypatch):
    rounding.levels = {"int8-static": 10, "int8-dynamic": 1000}
    finals: list[PairedTest] = []
    real = Search.final

    def final(self: Search, *, is_last: bool) -> PairedTest:
        test = real(self, is_last=is_last)
        finals.append(test)
        # The first one is given a budget that its file can't keep.
        if len(finals) == 1:
            test.budget = 1e-9
        return test

    monkeypatch.setattr(Search, "final", final)
    bundle = made(tmp_path, "drop<=6%")
    assert bundle.manifest["benchmark"]["recommended"]["format"] == "onnx-int8-dynamic"
    assert [test.alpha for test in finals] == pytest.approx([0.025, 0.025]), "the last one has all that is left"
    assert finals[1].verdict == "within"
    refused = {name: each["dropped"] for name, each in figures(bundle).items() if each["dropped"]}
    assert " in the final test" in refused[INT8] or refused[INT8].startswith("too few examples")
    # Other threads don't make it better.
    assert {name for name in refused if "int8.onnx" in name} >= {INT8}
    assert not any("int8.onnx" in name and each["dropped"] is None for name, each in figures(bundle).items())


def test_with_too_few_examples_the_exact_file_is_shipped_and_told_how_many_would_do(rounding, tmp_path):
    def few(run):
        yield run(X[:300]).argmax(1) == LABELS[:300]

    rounding.levels = {"int8-static": 100_000}
    bundle = made(tmp_path, "drop<=0.5%", evaluate=few)
    assert bundle.manifest["benchmark"]["recommended"]["format"] == "onnx"
    told = figures(bundle)[INT8]["dropped"]
    assert told.startswith("too few examples to decide whether the metric drops at most 0.5 points: drop 0 points, ")
    assert told.endswith(" would do")


def test_inputs_of_evaluate_are_the_calibration_and_are_not_judged(rounding, tmp_path):
    bundle = made(tmp_path, "drop<=6%")
    assert not any("random inputs" in note for note in bundle.manifest["benchmark"]["notes"])
    used = torch.cat([torch.from_numpy(call["input"]) for call in rounding.calibrated[0]])
    of_data = {tuple(row) for row in X[::8].tolist()}
    assert all(tuple(row) in of_data for row in used.tolist())
    assert 40 <= len(used) <= 64

    rounding.calibrated.clear()
    given = made(tmp_path / "given", "drop<=6%", calibration=[X[:1000]])
    assert given.manifest["artifacts"][1]["accuracy"]["metric"]["of"] in (None, *range(2000, 2400))
    assert len(rounding.calibrated[0]) == 375


def test_a_choice_is_tested_again_on_the_final_part(rounding, tmp_path, monkeypatch):
    tuned = made(tmp_path, "drop<=6%")
    parts: list[str] = []
    real = tuning_lossy.Evaluation.metric

    def metric(self: Any, name: Any, runner: Any, test: Any, part: Any, *rest: Any) -> Any:
        parts.append(part)
        return real(self, name, runner, test, part, *rest)

    monkeypatch.setattr(tuning_lossy.Evaluation, "metric", metric)
    again = made(tmp_path / "again", "drop<=6%", choices=tuned.path)
    assert parts == ["final"]
    assert again.manifest["benchmark"]["recommended"] == tuned.manifest["benchmark"]["recommended"]
    assert again.manifest["artifacts"][1]["accuracy"]["metric"]["part"] == "final"
    with pytest.raises(
        ParityError, match=r"can't be used: outside the budget: the metric may drop 0.1 points, and it has"
    ):
        made(tmp_path / "stricter", "drop<=0.1%", choices=tuned.path)
    with pytest.raises(UsageError, match="needs `evaluate`"):
        made(tmp_path / "without", "drop<=6%", choices=tuned.path, evaluate=None)


def test_a_wrong_evaluate_ends_the_export_in_its_own_sentence(rounding, tmp_path):
    generator = torch.Generator().manual_seed(0)

    def shuffled(run):
        order = torch.randperm(len(X), generator=generator)
        for start in range(0, len(X), 200):
            chosen = order[start : start + 200]
            yield run(X[chosen]).argmax(1) == LABELS[chosen]

    def wrong_shape(run):
        yield run(X[:, :5])

    def wrong_dtype(run):
        yield run(X.double())

    for function, told in (
        (shuffled, "gives run other inputs in its second run"),
        (wrong_shape, r"calls run with `input` as float32\[4000, 5\], but the example input is float32\[2, 6\]"),
        (wrong_dtype, r"calls run with `input` as float64\[4000, 6\]"),
    ):
        with pytest.raises(EvaluateError, match=told):
            made(tmp_path, "drop<=6%", evaluate=function)
        assert not (tmp_path / "net").exists()


def test_a_file_in_half_precision_is_judged_by_the_metric_alone(rounding, tmp_path, monkeypatch):
    monkeypatch.setattr("optimizer.tuning.tuner.fast_dtypes", lambda device: ("bfloat16",))
    fake_clock(monkeypatch).seconds = {"eager": 1.0, "bfloat16.torchscript.pt in torch": 0.1, "": 0.5}
    bundle = made(tmp_path, "drop<=3%", formats=("torchscript",))
    (entry,) = [each for each in bundle.manifest["artifacts"] if each["format"] == "torchscript-bfloat16"]
    metric = entry["accuracy"]["metric"]
    assert (metric["part"], metric["verdict"]) == ("final", "within")
    assert metric["upper"] <= 0.03
    refused = made(tmp_path / "small", "drop<=0.01%", formats=("torchscript",))
    assert refused.manifest["benchmark"]["recommended"]["format"] == "torchscript"
    told = {each["dropped"] for name, each in figures(refused).items() if "bfloat16" in name}
    assert any(each.startswith(("outside the budget: it has drop", "too few examples")) for each in told)


class Nested(nn.Module):
    """Takes a keyword argument, and returns a dict with a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
        scores = self.net(x) * scale
        return {"all": (scores, scores.amax(1)), "kind": "scores"}


@pytest.mark.parametrize("static", [False, True])
def test_run_is_called_as_the_model_and_returns_what_it_returns(static, rounding, tmp_path):
    batch, scale = 2 if static else 100, torch.tensor(2.0)
    seen: list[str] = []

    def nested(run):
        for rows, labels in zip(X[:800].split(batch), LABELS[:800].split(batch), strict=True):
            found = run(rows, scale=scale)
            seen.append(f"{found['kind']} {[type(each).__name__ for each in found['all']]}")
            assert torch.equal(found["all"][0].amax(1), found["all"][1])
            yield found["all"][0].argmax(1) == labels

    bundle = export(
        Nested().eval(),
        example_inputs=(X[:2],),
        example_kwargs={"scale": scale},
        output=tmp_path / "net",
        formats=("onnx",),
        effort="quick",
        accuracy="drop<=15%",
        evaluate=nested,
        static_batch=static,
    )
    assert set(seen) == {"scores ['Tensor', 'Tensor']"}
    metric = bundle.manifest["artifacts"][1]["accuracy"]["metric"]
    assert (metric["part"], metric["verdict"]) == ("final", "within")
    assert all(len(call["x"]) == 2 for calls in rounding.calibrated for call in calls) or not static


# The command ----------------------------------------------------------------------------------------------------------

MODEL = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
x = torch.randn(2000, 6)
labels = model(x).argmax(1)
example_inputs = x[:2]
"""
EVALUATE = """
def evaluate(run):
    for rows, wanted in zip(x.split(100), labels.split(100)):
        yield run(rows).argmax(1) == wanted
"""


def run_command(folder: Path, capsys: Any, source: str, *options: str) -> tuple[int, Any]:
    file = folder / "classifier.py"
    file.write_text(source, encoding="utf-8")
    arguments = [str(file), "--output", str(folder / "out"), "--quick", "--formats", "onnx", "--json", *options]
    code = cli.main(arguments)
    return code, json.loads(capsys.readouterr().out)


def test_the_command_takes_evaluate_from_the_file(rounding, tmp_path, capsys):
    code, document = run_command(tmp_path, capsys, MODEL + EVALUATE, "--accuracy", "drop<=20%", "--confidence", "90%")
    assert code == 0, document
    metric = document["artifacts"][1]["accuracy"]["metric"]
    assert (metric["part"], metric["verdict"], metric["confidence"]) == ("final", "within", 0.9)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("", "classifier.py has no evaluate, which a budget for the drop of a metric needs: add `def evaluate(run)`"),
        ("evaluate = 0.9", "classifier.py: evaluate is a float; it must be a function of one argument, evaluate(run)."),
        (
            "def evaluate(model, data): ...",
            "classifier.py: evaluate takes 2 arguments; it must take one, evaluate(run).",
        ),
        (EVALUATE + "aggregate = 1", "classifier.py: aggregate is an int; it must be a function of one argument, aggr"),
    ],
)
def test_a_file_without_a_usable_evaluate_is_told(source, told, tmp_path, capsys):
    code, document = run_command(tmp_path, capsys, MODEL + source, "--accuracy", "drop<=1%")
    assert code == LoadError.exit_code
    assert document["error"]["message"].startswith(told)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("run(rows)[:, 0] * torch.nan", "evaluate yields nan as the score of example 1: it must be finite."),
        (
            "run(rows).argmax(1) == wanted[:7]",
            "evaluate raises after call 1 of run: RuntimeError: The size of tensor a",
        ),
        ("['right'] * 100", "evaluate yields a list as a score: it must yield a number, or a tensor, array or list"),
        ("run(rows[:, :3])", "evaluate calls run with `input` as float32[100, 3], but the example input is float32[2"),
        ("run(rows).sum(1) * generator.random()", "evaluate yields other scores in its second run, for the same outp"),
    ],
)
def test_an_evaluate_that_fails_ends_the_command_in_one_sentence(value, told, tmp_path, capsys):
    source = "import random\ngenerator = random.Random(0)\n" + MODEL
    source += EVALUATE.replace("run(rows).argmax(1) == wanted", value)
    code, document = run_command(tmp_path, capsys, source, "--accuracy", "drop<=1%")
    assert code == LoadError.exit_code
    assert document["error"]["message"].startswith(told)


def test_evaluate_in_the_file_is_ignored_without_its_budget(tmp_path, capsys):
    code, document = run_command(tmp_path, capsys, MODEL + "def evaluate(model, data): ...", "--no-bench")
    assert code == 0, document
