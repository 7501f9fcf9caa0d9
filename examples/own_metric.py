"""Allow a loss of accuracy as you measure it: by the answers of a classifier on its validation data.

    optimize-export examples/own_metric.py --accuracy "drop<=1%"

A lossy file, such as one in int8, is shipped only if at most 1 % of the right answers are lost, at 95 % confidence. The data
are drawn here: ten patterns with noise.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

CLASSES, SIZE = 10, 16


def drawn(patterns: torch.Tensor, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images with the numbers of their patterns; the order says nothing about them."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randn(count, 1, SIZE, SIZE, generator=generator)
    return patterns[labels] + 4.0 * noise, labels


torch.manual_seed(0)
PATTERNS = torch.randn(CLASSES, 1, SIZE, SIZE)
VALIDATION = drawn(PATTERNS, 8000, seed=1)


def build_model() -> nn.Module:
    """A network that is trained for some seconds."""
    layers = [nn.Flatten(), nn.Linear(SIZE * SIZE, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(512, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(40):
        images, labels = drawn(PATTERNS, 256, seed=2 + step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model.eval()


example_inputs = VALIDATION[0][:2]


def evaluate(run: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[torch.Tensor]:
    """Whether each answer is right; `run` is the original, then each candidate."""
    for images, labels in zip(*(each.split(64) for each in VALIDATION), strict=True):
        yield run(images).argmax(1) == labels


# The order says nothing about the examples, so the final test may end before the last one.
evaluate.shuffled = True  # type: ignore[attr-defined]
