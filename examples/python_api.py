"""Optimize, export and verify from Python.

    python examples/python_api.py [folder]

The model returns a dict and takes an argument that isn't a tensor. Its class, attributes and keys are kept. The report
names every place that was changed or skipped.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from optimize_export import check_parity, export, optimize, verify_bundle


class Block(nn.Module):
    """Convolution, BatchNorm, activation."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    """Two blocks and a head; returns the features along with the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(3, 16), Block(16, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, image: torch.Tensor, temperature: float = 1.0) -> dict[str, torch.Tensor]:
        features = self.blocks(image).mean((2, 3))
        return {"logits": self.head(features) / temperature, "features": features}


def give_real_values(model: nn.Module) -> None:
    """Set BatchNorm statistics as training would; those of a new module are almost the identity."""
    with torch.no_grad():
        for _ in range(20):
            model(torch.randn(16, 3, 32, 32))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.3, 0.3)


def main(folder: Path) -> None:
    """Optimize, compare, export and verify, and print the results."""
    torch.manual_seed(0)
    model = Net()
    give_real_values(model)
    images = torch.randn(4, 3, 32, 32)

    fast = optimize(model, example_inputs=(images,))
    print(fast.report)
    for record in fast.report.passes:
        for place in record.changes:
            print(f"  {record.name}: {place.where or 'the root'}: {place.text}")

    assert type(fast) is Net
    print(check_parity(model, fast, (images,)))

    bundle = export(fast, example_inputs=(images,), output=folder / "net")
    for artifact in bundle.artifacts:
        shapes = {spec.name: spec.shape for spec in (*artifact.inputs, *artifact.outputs)}
        print(f"{artifact.path.name} by {artifact.route}: {shapes}")
    print(verify_bundle(bundle.path))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
