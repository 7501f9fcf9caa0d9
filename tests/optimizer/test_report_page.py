"""The report of a bundle: what the page shows, that it is safe to open, and reports in notebooks."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optimize_export.manifest import plain
from optimizer import Bundle, check_parity, export, optimize, report_of, verify_bundle
from optimizer.bundle.report import BundleReport, ModuleOperations, facts_of, graph_of, summary_of
from optimizer.profiling import profile_lines
from optimizer.showing import accuracy_plot, checkpoint_plot, memory_plot, metric_bar, metric_plot, parity_plot
from optimizer.showing import page as html_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(image).mean((2, 3)))


X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


STRANGE = "\x1b[31m\x07\u202e\u200b"


@pytest.fixture(scope="module")
def fast() -> nn.Module:
    """A result whose class has control and direction characters in its name."""
    return optimize(type(f"Net{STRANGE}", (Net,), {})().eval(), example_inputs=(X,))


@pytest.fixture(scope="module")
def bundle(fast: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    output = tmp_path_factory.mktemp("report") / "net"
    return export(fast, example_inputs=(X,), output=output, formats=("pt2",))


def figure(name: str, seconds: float | None, **changes: Any) -> dict[str, Any]:
    gain = {"median": 2.0, "low": 1.5, "high": 2.5, "rounds": 3}
    route = None if name == "eager" else {"format": "pt2", "runtime": "torch", "settings": {"threads": len(name)}}
    start = {"name": name, "route": route, "bytes": 10, "memory": 2**20, "seconds": seconds, "p95": seconds}
    return {**start, "speed_up": gain, "accuracy": None, "dropped": None, **changes}


LOSSY = {"cosine": 0.999, "top1": None, "equal": None, "max_error": 0.1, "snr": 30.0, "calls": 1, "problem": None}
FIGURES = [
    figure("eager", 0.2, memory=None),
    figure("fast", 0.1),
    figure("lossy", 0.05, accuracy=LOSSY, memory=2**21),
    figure("slow", None, dropped="others are faster"),
    figure("int4", 0.01, accuracy={**LOSSY, "cosine": 0.5}, dropped="outside the budget"),
]


def timed(manifest: Any) -> dict[str, Any]:
    benchmark = {"batch_sizes": [2], "threads": 1, "rounds": 3, "figures": FIGURES, "notes": []}
    return {**manifest, "benchmark": {**benchmark, "recommended": FIGURES[1]["route"], "reason": "ship fast: it is"}}


def page(manifest: Any, **changes: Any) -> str:
    start: dict[str, Any] = {"optimize": None, "graph": (), "profile": {}, "unproven": ()}
    return html_of("bundle", **facts_of(manifest, BundleReport(summary_of(manifest), **{**start, **changes})))


def test_the_report_is_a_file_of_the_bundle_and_the_page_loads_and_runs_nothing(bundle: Bundle) -> None:
    assert {"report.html", "report.json"} <= {file["path"] for file in bundle.manifest["files"]}
    assert verify_bundle(bundle.path, run=False).ok
    text = (bundle.path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script|<link|javascript", text)


def test_the_same_facts_give_the_same_page(bundle: Bundle) -> None:
    stored = json.loads((bundle.path / "report.json").read_text())
    graph = tuple(ModuleOperations(**each) for each in stored["graph"])
    again = page(bundle.manifest, optimize=stored["optimize"], graph=graph)
    assert again == (bundle.path / "report.html").read_text(encoding="utf-8")


def everywhere(change: Callable[[str], str], value: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: everywhere(change, item) for key, item in value.items()}
    return [everywhere(change, item) for item in value] if isinstance(value, list | tuple) else value


def test_every_text_of_a_model_is_escaped(bundle: Bundle) -> None:
    def hostile(text: str) -> str:
        return text if text == "eager" else f"<script>{text}</script>\"'"

    manifest = everywhere(hostile, plain(timed(bundle.manifest)))
    graph = (ModuleOperations("", hostile("Net"), {hostile("relu"): 1}, {}), ModuleOperations(hostile("a"), "", {}, {}))
    profile = {hostile("onnx"): {"seconds": 1.0, "operations": []}}
    text = page(manifest, graph=graph, profile=profile, unproven=manifest["artifacts"])
    assert "<script" not in text
    assert text.count("&lt;script&gt;") > 50


def test_control_and_direction_characters_of_names_are_shown_as_escapes(fast: nn.Module, bundle: Bundle) -> None:
    shown = {
        "report.html": (bundle.path / "report.html").read_text(encoding="utf-8"),
        "README.md": (bundle.path / "README.md").read_text(encoding="utf-8"),
        "notebook": bundle._repr_html_(),
        "notebook of optimize": report_of(fast)._repr_html_(),
        "print": str(report_of(fast)),
    }
    for name, text in shown.items():
        assert not set(text) & set(STRANGE.replace("[31m", "")), name
        assert r"\x1b[31m\x07\u202e\u200b" in text, name
    assert "the largest error is" in shown["print"]


def test_the_first_screen_says_what_was_made_and_what_to_ship(bundle: Bundle) -> None:
    summary = summary_of(timed(bundle.manifest))
    assert (summary.ship, summary.seconds, summary.eager_seconds, summary.ok) == ("fast", 0.1, 0.2, True)
    assert summary.share is not None
    assert 0 <= summary.share <= 1
    text = page(timed(bundle.manifest))
    for told in ("2.00 times", "between 1.50 and 2.50", "model.pt2", "others are faster", "cosine 0.999"):
        assert told in text
    assert "is missing" not in text


def test_what_is_missing_or_unproven_is_on_the_page(bundle: Bundle) -> None:
    failed = {
        **bundle.manifest["artifacts"][0],
        "path": "wrong.onnx",
        "parity": {"verdict": "failed", "reason": "off."},
    }
    text = page({**bundle.manifest, "missing": {"onnx": "No such operator."}}, unproven=(failed,))
    assert "onnx is missing" in text
    assert "No such operator." in text
    assert re.search(r'wrong.onnx: <span class="bad">failed</span>', text)
    assert "not measured" in text


def test_the_graph_shows_what_a_fold_removes(bundle: Bundle) -> None:
    graph = {each["module"]: each for each in json.loads((bundle.path / "report.json").read_text())["graph"]}
    assert (graph["body.1"]["before"], graph["body.1"]["after"]) == ({"batch_norm": 1}, {})
    assert graph["body.0"]["before"] == graph["body.0"]["after"] == {"conv2d": 1}
    assert graph["body.2"]["after"] == {"relu": 1}
    assert (graph["body"]["kind"], graph["body"]["before"]) == ("Sequential", {})


def test_calls_and_operators_are_not_told_as_a_loss(bundle: Bundle) -> None:
    graph = graph_of({}, [("", "attention")] * 76, [("", "matmul")] * 123 + [("a", "relu")])
    text = page(bundle.manifest, graph=graph)
    assert "76 calls, 124 operators" in text
    assert "76 → 124" not in text
    assert "more operators than calls isn't more work" in text.replace("&#39;", "'")


def test_a_profile_has_the_rows_of_the_terminal(bundle: Bundle) -> None:
    operation = {"name": "relu", "where": "a", "modules": ["a"], "calls": 1, "seconds": 0.05, "share": 0.05}
    profile = {
        "seconds": 1.0,
        "device": "cpu",
        "mode": "inference",
        "operations": [operation] * 12,
        "peak_memory": None,
    }
    text = page(bundle.manifest, profile={"original": profile})
    shown = text.partition("<h2>Profile</h2>")[2].partition("<h2>")[0]
    _, _, _, *rows = profile_lines(profile, "")
    assert shown.count("<tr>") - 1 == len(rows) == 12
    for name, share in (("others", "10 %"), ("between operations", "40 %")):
        assert f"<td>{name}</td>" in shown
        assert f'<td class="n">{share}</td>' in shown


@pytest.mark.parametrize("before", [True, False], ids=["optimized", "as it is"])
def test_the_training_mode_is_told_in_every_paper_of_the_bundle(before: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    x = torch.randn(2, 4)
    made = export(
        optimize(model, example_inputs=(x,)) if before else model,
        example_inputs=(x,),
        output=tmp_path / "net",
        formats=("torchscript",),
        effort="quick",
    )
    made_is = "the result is in eval mode and was" if before else "the files are in eval mode and were"
    told = f"the model is in training mode; {made_is} compared with the model in eval mode"
    assert told in made.manifest["notes"]
    for name in ("report.html", "README.md"):
        assert told in (made.path / name).read_text(encoding="utf-8"), name
    assert model.training


def test_errors_beyond_the_allowance_are_marked() -> None:
    calls = [{"batch_size": size, "draw": 0, "max_error": error} for size, error in ((8, 0.0), (1, 0.5), (None, 2.0))]
    output = {"name": "y", "tolerance": 1.0, "judged": True, "calls": [*calls, {**calls[0], "max_error": None}]}
    plot = parity_plot({"outputs": [output]})
    assert plot is not None
    assert plot.limit is not None
    assert [text for _, text in plot.x.ticks] == ["1", "8", "given"]
    places = {point.hint: (point.kind, point.y < plot.limit[0]) for point in plot.points}
    assert list(places.values()) == [("good", True), ("good", True), ("bad", False)]
    assert min(point.y for point in plot.points) == 0.0
    assert parity_plot({"outputs": [{**output, "calls": calls[3:]}]}) is None
    assert parity_plot({"outputs": [{**output, "by_user": True}]}) is None
    assert parity_plot({}) is None


def test_only_unbeaten_candidates_are_on_the_line() -> None:
    rows = [figure("eager", 0.3, memory=None), figure("a", 0.1), figure("b", 0.2), figure("c", 0.05, memory=2**22)]
    plot = memory_plot(rows)
    assert plot is not None
    assert {point.label: point.kind for point in plot.points} == {"2": "best", "3": "other", "4": "best"}
    assert len(plot.line) == 2
    assert memory_plot(rows[:2]) is None
    assert accuracy_plot(rows) is None
    lossy = accuracy_plot(FIGURES[:3])
    assert lossy is not None
    assert {point.label: point.y == 0.0 for point in lossy.points} == {"1": True, "2": True, "3": False}


def test_candidates_outside_the_budget_are_hollow_and_beat_none() -> None:
    refused = figure("int4", 0.01, accuracy={**LOSSY, "cosine": 0.5}, memory=2**18, dropped="outside the budget: …")
    for draw in (memory_plot, accuracy_plot):
        plot = draw(FIGURES[:3], [refused])
        assert plot is not None
        (hollow,) = (point for point in plot.points if point.kind == "refused")
        assert (hollow.label, hollow.hint) == ("", "int4: 10 ms, not used: outside the budget: …")
        assert sum(point.kind == "best" for point in plot.points) == len(plot.line) == 2


METRIC = {
    "score": 0.712, "drop": 0.0012, "upper": 0.0041, "confidence": 0.95, "budget": 0.005, "percent": True,
    "examples": 2000, "of": 10000, "needed": None, "verdict": "within", "part": "final",
    "changed": [[7, 1.0, 0.0], [1234, 0.0, 1.0]], "changed_count": 25,
}  # fmt: skip


def measured(figures: list[dict[str, Any]], metric: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures with a metric where they are lossy, and their accuracy in words."""
    return [
        {**each, "said": "told", "accuracy": each["accuracy"] and {**each["accuracy"], "metric": metric}}
        for each in figures
    ]


def test_a_drop_has_its_bound_as_a_line_and_the_budget() -> None:
    timed = measured(FIGURES[:3], METRIC)
    plot = metric_plot(timed, measured([FIGURES[4]], {**METRIC, "drop": 0.02, "upper": 0.03}))
    assert plot is not None
    points = {point.label: point for point in plot.points}
    assert [points[label].top for label in "12"] == [None, None]
    lossy, refused = points["3"], points[""]
    assert plot.limit is not None
    assert points["1"].y < lossy.y < (lossy.top or 0) < plot.limit[0] < refused.y < (refused.top or 0) <= 1
    assert (refused.kind, "told, not used" in refused.hint) == ("refused", True)
    # Only figures with a metric have a cost besides exact ones.
    assert metric_plot(FIGURES[:3]) is None


def test_an_improvement_is_below_0() -> None:
    plot = metric_plot(measured(FIGURES[:3], {**METRIC, "drop": -0.002, "upper": 0.001}))
    assert plot is not None
    points = {point.label: point for point in plot.points}
    assert 0 <= points["3"].y < points["1"].y < (points["3"].top or 0)
    assert ("0", points["1"].y) in [(text, place) for place, text in plot.y.ticks]


@pytest.mark.parametrize(("drop", "upper"), [(0.0012, 0.0041), (-0.001, 0.002), (0.01, 0.02), (0.0, 0.0)])
def test_the_bar_has_all_of_a_metric_in_its_order(drop: float, upper: float) -> None:
    bar = metric_bar({**METRIC, "drop": drop, "upper": upper})
    values = {bar.zero: 0.0, bar.drop: drop, bar.upper: upper, bar.budget: 0.005}
    assert sorted(values.values()) == [values[place] for place in sorted(values)]
    assert (min(values), max(values)) == (0.0, 1.0)


def with_metric(manifest: Any, **changes: Any) -> dict[str, Any]:
    """The manifest with a lossy recommended file whose metric was measured."""
    shown = timed(manifest)
    figures = measured(shown["benchmark"]["figures"], {**METRIC, **changes})
    shown["benchmark"] = {**shown["benchmark"], "figures": figures, "recommended": FIGURES[2]["route"]}
    made = {"kind": "int8-static", "kept": ["head", "<b>"], "why": ["quantized alone, it changes the outputs by 3 %"]}
    shown["artifacts"] = [{**shown["artifacts"][0], "quantization": made}]
    return shown


def test_the_page_of_a_lossy_bundle_has_its_metric_and_what_changed(bundle: Bundle) -> None:
    text = page(with_metric(bundle.manifest))
    for part in (
        '<svg class="budget"',
        "a drop of 0.12 points",
        "at most 0.41 at 95 % confidence, and 0.5 is allowed; from 71.2 %, on 2,000 examples of 10,000",
        "25 examples of 2,000 have another score; these have the largest drops",
        '<td class="n">1234</td><td class="n">0</td><td class="n">1</td><td class="n good">-1</td>',
        "<td><code>head</code></td><td>quantized alone, it changes the outputs by 3 %</td>",
        "<td><code>&lt;b&gt;</code></td><td>not measured</td>",
        "drop of the metric, points",
    ):
        assert part in text, part
    assert "1 - cosine" not in text
    plain_number = page(with_metric(bundle.manifest, percent=False, changed=[], changed_count=None, of=None))
    assert "a drop of 0.0012<" in plain_number.replace("</b>", "<")
    assert "Examples that changed" not in plain_number


def test_the_page_without_a_metric_has_the_cosine(bundle: Bundle) -> None:
    text = page(timed(bundle.manifest))
    assert "1 - cosine" in text
    for part in ('svg class="budget"', "What it costs", "Examples that changed", "Left in float"):
        assert part not in text


def test_a_checkpoint_curve_has_all_plans_and_no_other_pass_has_one() -> None:
    point = {"peak_bytes": 60, "recomputed_flops": 10}
    detail = {**point, "eager_peak_bytes": 100, "forward_flops": 50, "curve": [point], "uniform": point}
    plot = checkpoint_plot(detail)
    assert plot is not None
    assert [each.kind for each in plot.points] == ["other", "other", "bad", "best"]
    assert math.isclose(plot.points[3].x, 0.6)
    assert checkpoint_plot({"kernels": 3}) is None
    assert checkpoint_plot(None) is None


def test_reports_show_themselves_in_notebooks(fast: nn.Module, bundle: Bundle) -> None:
    parity = check_parity(Net().eval(), Net().eval(), (X,))
    for shown, told in ((report_of(fast), "fold-conv-bn"), (bundle, "model.pt2"), (parity, "failed")):
        text = shown._repr_html_()
        assert told in text
        assert text.startswith("<style>")
        assert "<html" not in text
