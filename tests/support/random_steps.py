"""Random training steps: modules that apply a list of operations to a few tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8
ROWS = 6

_Operation = Callable[[Any, Tensor, Tensor], Tensor]


class _Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradient


def _attended(layers: Any, a: Tensor, b: Tensor) -> Tensor:
    heads = [tensor.view(1, ROWS, 2, -1).transpose(1, 2) for tensor in (layers.linear(a), b, b)]
    dropped = 0.2 if layers.training else 0.0
    return F.scaled_dot_product_attention(*heads, dropout_p=dropped).transpose(1, 2).reshape(ROWS, -1)


def _without_gradient(layers: Any, a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        scale = b.sigmoid().mean(0)
    return a * scale


def _in_bfloat16(layers: Any, a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.gelu(layers.linear(a)).float()


def _recurrent(layers: Any, a: Tensor, b: Tensor) -> Tensor:
    return layers.recurrent(a[None])[0][0]


def _written_to(layers: Any, a: Tensor, b: Tensor) -> Tensor:
    made = a * 2
    made.add_(b.tanh())
    made[1:3] = 0.5
    return made


def _embedded(layers: Any, a: Tensor, b: Tensor) -> Tensor:
    return layers.embedding(b.argmax(1)) + a


def _checkpointed(layers: Any, a: Tensor, b: Tensor) -> Tensor:
    return checkpoint(lambda x: F.dropout(layers.linear(x).tanh(), 0.3, layers.training), a, use_reentrant=False)


def _largest(layers: Any, a: Tensor, b: Tensor) -> Tensor:
    values, places = a.sort(1)
    return values.gather(1, places.argsort(1)) * b


OPERATIONS: dict[str, _Operation] = {
    "linear": lambda layers, a, b: layers.linear(a),
    "shared linear": lambda layers, a, b: layers.shared(a),
    "tied": lambda layers, a, b: F.linear(a, layers.linear.weight.t()),
    "gelu": lambda layers, a, b: F.gelu(a),
    "tanh": lambda layers, a, b: a.tanh(),
    "relu in place": lambda layers, a, b: F.relu_(a * 1.5),
    "softmax": lambda layers, a, b: a.softmax(-1),
    "sum": lambda layers, a, b: a + b,
    "product": lambda layers, a, b: a * b,
    "cat": lambda layers, a, b: layers.wide(torch.cat((a, b), 1)),
    "halves": lambda layers, a, b: torch.cat([half.sin() for half in a.chunk(2, 1)][::-1], 1),
    "view": lambda layers, a, b: a.t().contiguous().t() + b.view(-1, 2, 4).flip(1).flatten(1),
    "expanded": lambda layers, a, b: a * b.mean(0, keepdim=True).expand_as(a),
    "where": lambda layers, a, b: torch.where(a > 0, a, b.exp().clamp(max=2.0)),
    "dropout": lambda layers, a, b: F.dropout(a, 0.3, layers.training),
    "dropout in place": lambda layers, a, b: F.dropout(a * 1.5, 0.3, layers.training, inplace=True),
    "random": lambda layers, a, b: a * (torch.rand(len(a), 1) < 0.7),
    "leaky": lambda layers, a, b: F.rrelu(a, training=layers.training),
    "norm": lambda layers, a, b: layers.norm(a),
    "norm of layers": lambda layers, a, b: F.layer_norm(a, (WIDTH,), layers.scale),
    "attention": _attended,
    "no gradient": _without_gradient,
    "detached": lambda layers, a, b: a + b.detach().cos(),
    "bfloat16": _in_bfloat16,
    "recurrent": _recurrent,
    "written to": _written_to,
    "embedded": _embedded,
    "checkpoint": _checkpointed,
    "function": lambda layers, a, b: _Cubed.apply(a.tanh()),
    "sorted": _largest,
    "double": lambda layers, a, b: (a.double() * b.double()).float(),
    "parameter": lambda layers, a, b: a + layers.scale,
}


@dataclass(frozen=True)
class Step:
    """The description of a module.

    Attributes:
        operations: the name of each operation, and its two arguments among the last tensors, counted from the end.
        returned: which of the last tensors are returned in addition to the last one.
        frozen: the numbers of the operations whose own parameters need no gradient.
        seed: of the weights.
    """

    operations: tuple[tuple[str, int, int], ...]
    returned: tuple[int, ...] = ()
    frozen: frozenset[int] = frozenset()
    seed: int = 0


_NAMES = st.sampled_from(sorted(OPERATIONS))
_BEHIND = st.sampled_from([0, 0, 0, 0, 1, 1, 2, 3, 5])
STEPS = st.builds(
    Step,
    st.lists(st.tuples(_NAMES, _BEHIND, _BEHIND), min_size=2, max_size=14).map(tuple),
    st.lists(st.integers(0, 3), max_size=2).map(tuple),
    st.frozensets(st.integers(0, 13), max_size=3),
    st.integers(0, 99),
)


class _Layers(nn.Module):
    """The layers and parameters of one operation."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.linear, self.wide, self.shared = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH), shared
        self.norm, self.scale = nn.BatchNorm1d(WIDTH), nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.embedding = nn.Embedding(WIDTH, WIDTH)


class RandomStep(nn.Module):
    """The described module. It takes a tensor of shape (ROWS, WIDTH), and returns a dict of such tensors."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        torch.manual_seed(step.seed)
        self.step = step
        shared = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(_Layers(shared) for _ in step.operations)
        for number in step.frozen:
            if number < len(self.layers):
                self.layers[number].requires_grad_(False)
        shared.requires_grad_(True)

    def forward(self, x: Tensor) -> Any:
        made = [x]
        for (name, first, second), layers in zip(self.step.operations, self.layers, strict=True):
            a, b = (made[-1 - min(behind, len(made) - 1)] for behind in (first, second))
            made.append(OPERATIONS[name](layers, a, b))
        others = {f"behind {behind}": made[-1 - min(behind, len(made) - 1)] for behind in self.step.returned}
        return {"last": made[-1], **others}


def rows_of(step: Step) -> Tensor:
    """The example input of a step."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step.seed + 1))
