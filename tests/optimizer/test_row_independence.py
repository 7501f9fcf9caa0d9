"""Rows that depend on other rows of their batch are found, in the original and in candidates."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import enliven
from torch import nn

from optimize_export.errors import ParityError, UsageError
from optimizer import check_parity, export, rejudge_bundle
from optimizer.command.tables import as_text
from optimizer.model.inputs import Samples
from optimizer.parity import ParityReport, independent_rows, judge, measure_reference


class Net(nn.Module):
    """Its second output has integer rows, its third has no rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.norm(x))
        return {"logits": logits, "label": logits.argmax(1), "weights": self.head.weight.square().sum(1)}


def net() -> nn.Module:
    return enliven(Net()).eval()


def rows(count: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))


def check(reference: Any, candidate: Any, *inputs: torch.Tensor, **options: Any) -> ParityReport:
    return check_parity(reference, candidate, inputs or (rows(),), row_independence=True, **options)


def test_rows_that_are_their_own_are_shown_to_be() -> None:
    model = net()
    report = check(model, lambda x: model(x.flip(0).flip(0)))
    assert report.ok
    assert report.reason.endswith("No row depends on the other rows of its batch.")
    assert report.rows is not None
    assert (report.rows.ok, report.rows.alone, report.rows.batch_sizes) == (True, True, (3, 2, 5, 8))
    assert [output.name for output in report.rows.outputs] == ["logits", "label"]
    assert report.rows.without_rows == ("weights",)
    assert check_parity(model, model, (rows(),)).rows is None


class UntrackedNorm(nn.Module):
    """Uses the statistics of the batch in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.cat([x, x + 1]))[: len(x)]


MIXING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: x - 1e-4 * x.mean(0),
    "norm": UntrackedNorm(),
    "largest": lambda x: x / x.abs().amax(),
    "place": lambda x: x + torch.arange(len(x))[:, None],
    "company": lambda x: x * len(x),
    "order": lambda x: x.sort(0).values,
}


# A single batch size can't show that the size matters, as in "company".
@pytest.mark.parametrize(("kind", "sizes"), [*((kind, None) for kind in MIXING), ("norm", (3,)), ("place", (3,))])
def test_an_original_that_mixes_rows_is_an_error_that_names_the_output(kind: str, sizes: Any) -> None:
    model = MIXING[kind]
    with pytest.raises(ParityError, match=r"Row \d of output at batch size \d .*, in the original itself: "):
        check(model, model, batch_sizes=sizes)
    assert check_parity(model, model, (rows(),), batch_sizes=sizes).ok


def test_a_batch_norm_in_training_mixes_rows() -> None:
    model = net().train()
    with pytest.raises(ParityError, match="of logits at batch size 4 depends on the other rows"):
        check(model, model, rows(4), mode="training")
    still = nn.Linear(6, 4)
    assert check(still, still, rows(4), mode="training").ok


def elsewhere(model: nn.Module, mix: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Any:
    """A candidate that is correct in all compared calls, and mixes rows in all others."""
    samples = Samples((rows(),))
    known = [samples.at(size, draw).args[0] for size in (3, 1, 2, 5, 8) for draw in (0, 1)]

    def run(x: torch.Tensor) -> dict[str, torch.Tensor]:
        seen = model(x)
        return seen if any(torch.equal(x, one) for one in known) else mix(seen)

    return run


@pytest.mark.parametrize(
    ("mix", "output", "how"),
    [
        (lambda seen: seen | {"logits": seen["logits"] + 1e-3 * seen["logits"].mean(0)}, "logits", "it changes by"),
        (lambda seen: seen | {"logits": seen["logits"].roll(1, 0)}, "logits", "it changes by"),
        (lambda seen: seen | {"label": seen["label"].roll(1, 0)}, "label", "it differs when run"),
        (lambda seen: seen | {"logits": seen["logits"].log()}, "logits", "it differs when run"),
        (lambda seen: seen | {"logits": seen["logits"][:1]}, "logits", "it differs when run at another position"),
        (lambda seen: seen | {"logits": seen["logits"].double()}, "logits", "it differs when run"),
    ],
)
def test_a_candidate_that_mixes_rows_fails_with_output_row_and_size(mix: Any, output: str, how: str) -> None:
    model = net()
    report = check(model, elsewhere(model, mix))
    assert report.verdict == "failed"
    assert report.rows is not None
    assert not report.rows.ok
    assert re.match(rf"Row \d of {output} at batch size \d depends on the other rows: {how}", report.reason)


def test_a_candidate_that_raises_on_other_rows_fails() -> None:
    def refuse(seen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        raise ValueError("not this one")

    model = net()
    assert check_parity(model, elsewhere(model, refuse), (rows(),)).ok
    report = check(model, elsewhere(model, refuse))
    assert (report.verdict, report.reason) == (
        "failed",
        "Running rows alone or among other rows raises: ValueError: not this one.",
    )


def test_rows_within_the_users_tolerance_and_beyond() -> None:
    def near(x: torch.Tensor) -> torch.Tensor:
        return x + 1e-3 * x.mean(0)

    (x,) = (rows(),)
    assert check(torch.clone, near, x, atol=0.01).ok
    # Two outputs within the tolerance may differ by twice the tolerance.
    change = float((near(x[:1]) - near(x)[:1]).abs().max())
    assert change > 1e-4
    reference = measure_reference(torch.clone, Samples((x,)))
    seen = reference.compare(near, rows=independent_rows(reference, atol={}, rtol={}))
    assert seen.rows is not None
    largest = seen.rows.outputs[0].max_difference
    worst = seen.outputs[0].max_error
    assert judge(seen, atol=max(worst, largest / 2 * 1.001)).ok
    assert judge(seen, atol=worst * 1.001).ok is (largest <= 2 * worst * 1.001)
    assert not judge(seen).ok


def test_a_model_that_needs_two_rows_is_run_among_other_rows() -> None:
    def pairs(x: torch.Tensor) -> torch.Tensor:
        if len(x) < 2:
            raise ValueError("two rows or more")
        return x * 2

    report = check(pairs, pairs)
    assert report.rows is not None
    assert (report.rows.ok, report.rows.alone) == (True, False)
    with pytest.raises(ParityError, match="among other rows"):
        check(lambda x: pairs(x) + x.mean(0), pairs)


def test_an_input_that_happens_to_be_as_long_as_a_batch_has_no_rows() -> None:
    def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x[:, :5] * scale

    scale = torch.arange(1.0, 6.0)
    # At a batch of five, the scale is as long as the batch.
    assert check(scaled, scaled, rows(2), scale).ok


def test_no_rows_to_check_are_an_error() -> None:
    with pytest.raises(UsageError, match="needs a batch of two rows or more"):
        check(torch.clone, torch.clone, rows(1), batch_sizes=(1,))
    with pytest.raises(UsageError, match="No output has as many rows as the batch"):
        check(lambda x: x.sum(0) * 0 + 1, lambda x: x, rows())


def test_some_of_many_rows_run_alone_and_all_among_others() -> None:
    calls: list[int] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return x + 1

    x = rows(100)
    reference = measure_reference(torch.clone, Samples((x,)), batch_sizes=(100, 1))
    independent = independent_rows(reference, atol={}, rtol={})
    calls.clear()
    independent.measure(lambda call: {"output": counted(*call.args)})
    assert (calls.count(1), calls.count(100)) == (8, 4)

    def wrong_in_one(x: torch.Tensor) -> torch.Tensor:
        # The first rows are right, so a row that runs alone shows nothing.
        y = x.clone()
        y[51:] += 1
        return y

    seen = independent.measure(lambda call: {"output": wrong_in_one(*call.args)})
    assert seen.outputs[0].max_difference == pytest.approx(1.0)


class Mixed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, None, None, training=True) if len(x) > 1 else x


@pytest.mark.slow
def test_a_bundle_says_that_rows_are_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh()).eval()
    options: dict[str, Any] = {
        "example_inputs": (rows(),),
        "formats": ("torchscript", "onnx"),
        "row_independence": True,
    }
    bundle = export(model, output=tmp_path / "net", output_names=("scores",), **options)
    for artifact in bundle.manifest["artifacts"]:
        judged = artifact["parity"]["rows"]
        assert (judged["ok"], judged["alone"], judged["batch_sizes"]) == (True, True, [3, 2, 5, 8])
        assert [output["name"] for output in judged["outputs"]] == ["scores"]
        assert artifact["measurement"]["rows"]["outputs"][0]["name"] == "output"
    shown = as_text(bundle.manifest, terminal=False)
    assert (
        "rows of onnx: none depends on the other rows (batch sizes 3, 2, 5, 8; run alone, at other positions and"
        in shown
    )
    assert rejudge_bundle(bundle.path).ok
    report = rejudge_bundle(bundle.path, atol=1.0, factor=1e-9)
    assert report.ok, "the user's tolerance takes the place of the noise for rows, too"
    static = export(model, output=tmp_path / "static", static_batch=True, **options)
    assert static.manifest["artifacts"][0]["parity"]["rows"]["alone"] is False
    with pytest.raises(ParityError, match=r"Row \d of output at batch size \d .* in the original itself"):
        export(Mixed().eval(), output=tmp_path / "mixed", **options)
    assert not (tmp_path / "mixed").exists()
