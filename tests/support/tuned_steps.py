"""Small networks with their training steps, as a user of `tune_training` writes them, and steps of known time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optimizer.training import TrainingTuning, batches, tuner
from optimizer.training.stepping import RunnableStep, TrainingJob, check_optimizer
from optimizer.tuning import Latency

CPU = torch.device("cpu")


def small_net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8, 4))


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def images(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 3, 8, 8, generator=generator), torch.arange(rows) % 4


def job_of(model: nn.Module, own: Any = step, batch: Any = None, optimizer: Any = None) -> TrainingJob:
    batch = images() if batch is None else batch
    return TrainingJob(model, own, check_optimizer(model, optimizer), batch, CPU)


def of_rows(tuning: TrainingTuning) -> dict[str, Any]:
    return {each.name: each for each in tuning.candidates}


def as_timed(monkeypatch: pytest.MonkeyPatch, seconds: Any) -> None:
    """Steps take the seconds that a function says of their setups."""

    def times(steps: Mapping[str, RunnableStep], allowed: float, job: Any) -> dict[str, Latency]:
        found = {}
        for name, each in steps.items():
            each()
            taken = seconds(each.setup)
            found[name] = Latency(taken, taken, (taken,) * 9)
        return found

    monkeypatch.setattr(tuner, "timed", times)
    monkeypatch.setattr(batches, "timed", times)


def without_slow_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what needs neither a compiler nor a capture."""
    every = tuner.choices_for
    monkeypatch.setattr(tuner, "choices_for", lambda job: [one for one in every(job) if not one.seconds])


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16)) for _ in range(4)))


def of_mlp(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss
