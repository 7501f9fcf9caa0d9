"""Find out which settings make a training step faster on this machine, and whether its numbers stay right.

    python examples/tune_training.py [folder]
    optimize-export tune-training examples/tune_training.py --output tuned

The command reads the names below: `model`, `example_inputs`, `training_step`, `make_optimizer` and `make_loader`.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from optimize_export import optimize, tune_training


def block(channels_in: int, channels_out: int) -> nn.Sequential:
    """Convolution, BatchNorm, activation; the bias does nothing, because the BatchNorm subtracts it again."""
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU())


torch.manual_seed(0)
model = nn.Sequential(block(3, 16), block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
example_inputs = (torch.randn(8, 3, 32, 32),)


def training_step(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """The loss alone: the backward pass and the optimizer are the tuner's."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def make_optimizer(parameters) -> torch.optim.Optimizer:  # type: ignore[no-untyped-def]
    """An optimizer over the parameters of the model."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def make_loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Batches of random images with labels."""
    return DataLoader(TensorDataset(torch.randn(64, 3, 32, 32), torch.arange(64) % 10), batch_size=8)


def main(folder: Path) -> None:
    """Tune for a quarter of a minute, save the result, and train with the passes that it chose."""
    loader, optimizer = make_loader(), make_optimizer(model.parameters())
    tuned = tune_training(model, training_step, loader=loader, optimizer=optimizer, tune_seconds=15)
    print(tuned)
    tuned.save(folder / "tuned")

    fast = optimize(model, choices=folder / "tuned", mode="training", example_inputs=example_inputs)
    for batch in loader:
        loss = training_step(fast, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss after one epoch: {loss.item():.4f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
