"""What the code of a forward may write to, as it is read: too much may be found, and never too little."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.graph.named_writes import Named, named_in


class _Of(nn.Module):
    """A module whose code is that of a function."""

    def __init__(self, function: Callable[..., Any], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.inner = function, inner or nn.Linear(4, 4)


def _fresh(self: Any, q: Tensor, mask: Tensor | None = None, count: int = 4) -> Tensor:
    count //= 2
    scores = torch.matmul(q, q)
    scores += 1
    scores /= count
    scores.masked_fill_(q > 0, 0.0)
    out = torch.zeros(3)
    out[0], total = 1, 0
    total += q.shape[0]
    sizes = q.shape
    rows, columns = sizes
    rows += columns
    self.seen[0] = True
    self.count += 1
    weights = F.softmax(scores, -1)
    weights[0].mul_(2).add_(3)
    both = [q, scores]
    both[0] = scores
    q.new_zeros(3).copy_(q)
    for number in range(count):
        number += 1
    torch.nn.init.zeros_(weights.T)
    return F.relu(weights, inplace=True).reshape(-1)


def _argument(self: Any, q: Tensor) -> Tensor:
    q += 1
    return q.reshape(-1)


def _layer(self: Any, q: Tensor) -> Tensor:
    k = self.inner(q)
    k.mul_(2)
    return k.reshape(-1)


def _layer_called_as_an_operation(self: Any, q: Tensor) -> Tensor:
    k = self.mean(q)
    k[0] = 2
    return k.reshape(-1)


def _view(self: Any, q: Tensor) -> Tensor:
    k = q.reshape(-1)[1:].T
    k.clamp_(0)
    return k


def _unpacked(self: Any, q: Tensor) -> Tensor:
    (a, _), (b,) = (torch.zeros(1), q), q.split(2)
    a[0] = 1
    b[0] = 1
    return b.reshape(-1)


def _in_a_list(self: Any, q: Tensor) -> Tensor:
    parts = []
    parts.append(q)
    last = parts[-1]
    last[0] = 2
    return last.reshape(-1)


def _in_a_loop(self: Any, q: Tensor) -> Tensor:
    for one in (torch.zeros(1), q):
        one -= 1
    return q.reshape(-1)


def _of_pairs(self: Any, q: Tensor) -> Tensor:
    for _, one in enumerate([q]):
        one *= 1
    return q.reshape(-1)


def _given_out(self: Any, q: Tensor) -> Tensor:
    return torch.add(q, 1, out=q).reshape(-1)


def _function(self: Any, q: Tensor) -> Tensor:
    torch.relu_(q)
    return F.silu(q.reshape(-1), inplace=self.training)


def _attribute(self: Any, q: Tensor) -> Tensor:
    self.last = q
    self.last.mul_(2)
    return q.reshape(-1)


def _inner_function(self: Any, q: Tensor) -> Tensor:
    def scale(one: Tensor) -> None:
        one.mul_(2)

    scale(q)
    return q.reshape(-1)


def _either(self: Any, q: Tensor) -> Tensor:
    k = torch.zeros(1) if self.training else q
    k ^= 1
    return (+q).reshape(-1)


def _itself(self: Any, q: Tensor) -> Tensor:
    k = torch.zeros(1)
    for _ in range(3):
        k = k.view(-1)
    k.add_(q)
    return k.reshape(-1)


@pytest.mark.parametrize(
    ("function", "writes"),
    [
        (_fresh, set()),
        (_itself, set()),
        (_argument, {"+="}),
        (_layer, {"mul_"}),
        (_layer_called_as_an_operation, {"[]="}),
        (_view, {"clamp_"}),
        (_unpacked, {"[]="}),
        (_in_a_list, {"[]="}),
        (_in_a_loop, {"-="}),
        (_of_pairs, {"*="}),
        (_given_out, {"out="}),
        (_function, {"relu_", "silu"}),
        (_attribute, {"mul_"}),
        (_inner_function, {"mul_"}),
        (_either, {"^="}),
        (lambda self, q: q.reshape(-1).add_(1), {"add_"}),
    ],
)
def test_what_a_function_may_write_to(function: Callable[..., Any], writes: set[str]) -> None:
    found = named_in([_Of(function)])
    assert found == Named(frozenset(writes), frozenset({"reshape"}))


def test_what_is_written_without_its_text() -> None:
    space: dict[str, Any] = {}
    exec("def f(self, q):\n    s = q * 2\n    s += 1\n    return s.flatten()\n", space)
    assert named_in([_Of(space["f"])]) == Named(frozenset({"+="}), frozenset({"flatten"}))


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")
def test_layers_of_torch_and_what_cannot_be_read() -> None:
    layers = [nn.ReLU(), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(2, 2)]
    assert named_in(layers) == Named(frozenset({"ReLU"}), frozenset({"Flatten"}))
    unread = frozenset({"code of torch.jit"})
    assert named_in([torch.jit.script(nn.Linear(2, 2))]) == Named(unread, unread)
