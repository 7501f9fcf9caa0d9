"""A slow training step is compared and proven at few rows, at which it runs and which make it faster."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from tuned_steps import as_timed, images, mlp, of_mlp, of_rows, small_net, step, without_slow_choices

from optimize_export import tune_training
from optimizer.training import batches, tuner
from optimizer.training.results import DECLARED, WITHIN_ROUNDING


def contrastive(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A loss of pairs of rows: one row has no other, and so no gradient."""
    made = nn.functional.normalize(model(batch))
    return nn.functional.cross_entropy(made @ made.T, torch.arange(len(batch)))


@pytest.mark.parametrize(
    ("model", "loss", "rows"),
    [
        (small_net, step, 1),
        (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.BatchNorm1d(8), nn.Linear(8, 4)), step, 2),
        (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(8)), lambda model, batch: contrastive(model, batch[0]), 2),
    ],
    ids=["each row by itself", "a BatchNorm without maps", "a loss of pairs"],
)
def test_a_slow_step_is_compared_at_the_fewest_rows(
    monkeypatch: pytest.MonkeyPatch, model: Callable[[], nn.Module], loss: Any, rows: int
) -> None:
    without_slow_choices(monkeypatch)
    as_timed(monkeypatch, lambda setup: 1.0)
    monkeypatch.setattr(batches, "_SLOW_SECONDS", 1e-9)
    made, seen = model(), set[int]()
    made(images()[0])

    def counted(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.add(len(batch[0]))
        time.sleep(0.02 * len(batch[0]))
        return loss(model, batch)

    tuning = tune_training(made, counted, images(), tune_seconds=60)
    assert tuning.batch == 8
    assert 8 not in seen
    compared = "1 row," if rows == 1 else f"{rows} rows,"
    assert any(f"so all are compared at {compared} where the optimizer's" in note for note in tuning.notes)


def test_a_step_that_few_rows_make_no_faster_is_compared_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_choices(monkeypatch)
    as_timed(monkeypatch, lambda setup: 1.0)
    monkeypatch.setattr(batches, "_SLOW_SECONDS", 1e-9)
    seen: list[int] = []

    def constant(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(len(batch[0]))
        time.sleep(0.1)
        return step(model, batch)

    tuning = tune_training(small_net(), constant, images(), tune_seconds=20)
    assert seen[:3] == [1, 1, 2]
    assert 8 in seen
    assert not any("all are compared" in note for note in tuning.notes)


def test_the_estimate_of_a_step_has_what_each_row_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_choices(monkeypatch)
    as_timed(monkeypatch, lambda setup: 1.0)

    def slow(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.3 + 0.1 * len(x))
        return of_mlp(model, x)

    # 3 times the forward's: 0.9 s, and 0.3 s for each row.
    tuning = tune_training(mlp(), slow, torch.randn(20, 16), tune_seconds=5)
    (note,) = [note for note in tuning.notes if "all are compared at 1 row," in note]
    assert 6 <= int(note.split("takes about ")[1].split(" s")[0]) <= 8


@pytest.mark.parametrize("rows", [2, 3, 4, 8])
def test_a_step_that_needs_several_rows_is_proven_on_as_many(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """By an error on fewer, and by a loss that padding makes NaN."""
    without_slow_choices(monkeypatch)
    as_timed(monkeypatch, lambda setup: 0.5 if setup.precision == "bf16" else 1.0)
    monkeypatch.setattr(tuner, "_PROOF_SHARE", 1e-9)

    def needing(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        assert len(x) >= rows
        return of_mlp(model, x)

    mask = torch.arange(8) >= rows - 1

    def padded(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, mask = batch
        return (model(x).square().mean(1) * mask).sum() / mask.sum()

    x = torch.randn(8, 16)
    for own, batch in ((needing, x), (padded, (x, mask))):
        tuning = tune_training(mlp(), own, batch, tune_seconds=20)
        assert of_rows(tuning)["bf16 autocast"].standing == DECLARED


def test_a_part_of_a_slow_batch_leaves_its_rows_to_accumulation_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_choices(monkeypatch)
    as_timed(monkeypatch, lambda setup: 1.0)
    monkeypatch.setattr(batches, "_SLOW_SECONDS", 1e-9)
    # Each batch of the proof has one row.
    monkeypatch.setattr(tuner, "_PROOF_SHARE", 1e-9)

    def slow(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002 * len(x))
        return of_mlp(model, x)

    tuning = tune_training(mlp(), slow, torch.randn(8, 16), batch_size=16, tune_seconds=60)
    assert any("all are compared at 1 row," in note for note in tuning.notes)
    assert of_rows(tuning)["accumulation of 2 parts"].standing == WITHIN_ROUNDING
    # Its BatchNorm doesn't run on one row, of which half a batch of two is.
    normed = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    tuning = tune_training(normed, slow, torch.randn(8, 16), memory="1GiB", tune_seconds=60)
    assert any("all are compared at 2 rows," in note for note in tuning.notes)
    assert (of_rows(tuning)["largest batch"].setup.batch_size or 0) > 8


def test_the_largest_batch_of_an_odd_one_takes_no_half_that_fails() -> None:
    """Of 3 rows, the larger half was tried before."""
    normed = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    tuning = tune_training(normed, of_mlp, torch.randn(3, 16), memory="1GiB", tune_seconds=0.1)
    assert (of_rows(tuning)["largest batch"].setup.batch_size or 0) > 3
