"""Small models, each with one difficulty for the export, and calls of them at several batch sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tiny_models import enliven
from torch import nn

Call = tuple[tuple[Any, ...], dict[str, Any]]


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.bn(self.conv(image))).mean((2, 3)))


class DictOutput(nn.Module):
    """Has a constant, a None and an input among its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = self.linear(x)
        return {"logits": hidden, "hidden": (hidden.relu(), x), "loss": None, "scale": 2, "rows": hidden.argmax(1)}


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x, mask=None, *, bias=None, scale=1.0, mode="plain"):  # type: ignore[no-untyped-def]
        if mask is not None:
            x = x * mask
        hidden = self.linear(x) * scale
        hidden = hidden if bias is None else hidden + bias
        return hidden if mode == "plain" else hidden.exp()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)

    def forward(self, ids: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids).masked_fill(~keep.unsqueeze(-1), 0.0).sum(1)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Detections:
    boxes: torch.Tensor
    scores: tuple[torch.Tensor, ...]
    label: str = "cat"


class Nested(nn.Module):
    """Takes tuples, a dict and a dataclass, and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, pair, extra, earlier):  # type: ignore[no-untyped-def]
        hidden = self.linear(pair[0] + pair[1][0] + extra["shift"])
        return Detections(hidden + earlier.boxes, (hidden.sigmoid(), Pair(hidden.tanh(), hidden.sum(1)).right))


class Listed(nn.Module):
    """Holds a parameter and a layer in plain lists, where `parameters()` doesn't find them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [nn.Parameter(floats(3, 4, seed=5))]
        self.layers = [nn.Linear(4, 4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x @ self.weights[0])


class Rows(nn.Module):
    """Three of its outputs have an open dim other than a leading batch: doubled, flattened, and the batch last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = self.linear(x)
        return torch.cat([hidden, hidden]), hidden.reshape(-1), hidden.t(), hidden.mean(0)


class BatchLoop(nn.Module):
    """A Python loop over the rows, which every tracer unrolls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return torch.stack([self.linear(row) * (index + 1) for index, row in zip(range(len(x)), x, strict=True)])


class Branch(nn.Module):
    """A data-dependent branch, of which a tracer sees one side."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.linear(x)
        if bool(x.sum() > 0):
            hidden = -3 * hidden
        return {"hidden": hidden}


class Of(nn.Module):
    """Applies a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x, *others):  # type: ignore[no-untyped-def]
        return self.function(x, *others)


class Replacement:
    """A callable that replaces a module's forward, as rewritten graphs do."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.module.second(torch.tanh(self.module.first(x)))


def _encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


def _rows(sizes: tuple[int, ...], make: Callable[[int], Call]) -> tuple[Call, ...]:
    return tuple(make(size) for size in sizes)


def _nested_call(size: int) -> Call:
    earlier = Detections(floats(size, 4, seed=size), (floats(size, 4),))
    return (((floats(size, 3, seed=1), [floats(size, 3, seed=2)]), {"shift": floats(size, 3, seed=3)}, earlier), {})


def _words_call(size: int) -> Call:
    ids = torch.arange(size * 5).reshape(size, 5) % 11
    return ((ids, ids % 3 != 0), {})


# name -> (class, calls at batch sizes)
_CALLS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Call]]] = {
    "mlp": (Mlp, lambda size: ((floats(size, 3, seed=size),), {})),
    "conv_net": (ConvNet, lambda size: ((floats(size, 3, 6, 6, seed=size),), {})),
    "dict_output": (DictOutput, lambda size: ((floats(size, 3, seed=size),), {})),
    "keywords": (
        Keywords,
        lambda size: ((floats(size, 3),), {"mask": None, "bias": floats(4), "scale": 2.0, "mode": "exp"}),
    ),
    "words": (Words, _words_call),
    "nested": (Nested, _nested_call),
    "encoder": (_encoder, lambda size: ((floats(size, 5, 8, seed=size),), {})),
    "listed": (Listed, lambda size: ((floats(size, 3, seed=size),), {})),
    "rows": (Rows, lambda size: ((floats(size, 3, seed=size),), {})),
}
EXPORTABLE = tuple(_CALLS)


def exportable(name: str, sizes: tuple[int, ...] = (2, 1, 5)) -> tuple[nn.Module, tuple[Call, ...]]:
    """Make a model in eval mode and its calls, one for each batch size."""
    torch.manual_seed(0)
    make, call = _CALLS[name]
    return enliven(make()).eval(), _rows(sizes, call)


def mlp_calls(*sizes: int) -> tuple[Call, ...]:
    return _rows(sizes, _CALLS["mlp"][1])
