"""A small convolutional network with its training step, as a user of `tune_training` writes it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from optimizer.training.stepping import TrainingJob, check_optimizer

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
