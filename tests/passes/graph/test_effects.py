"""What an operation does beside giving a value."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pass_contract import captured
from tiny_models import enliven
from torch import Tensor, nn

from passes.graph.effects import Aliases, is_pure, is_repeatable, may_share, written_by
from passes.graph.program import Program, operation_name


class Around(nn.Module):
    def __init__(self, function: Callable[..., Any], **children: Any) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(6, 6), nn.Embedding(6, 6)
        for name, child in children.items():
            setattr(self, name, child)
        enliven(self)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def node_of(function: Callable[..., Any], name: str, **children: Any) -> tuple[Program, Any]:
    """The last node of that name in the graph of a module that computes this."""
    program, _ = captured(Around(function, **children).eval())
    graph = program.graphs[id(program.root)].graph
    return program, [node for node in graph.nodes if operation_name(node) == name][-1]


class Wrapped(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x).exp()


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda self, x: x.relu(), "relu"),
        (lambda self, x: F.gelu(x), "gelu"),
        (lambda self, x: x + 1, "add"),
        (lambda self, x: 1 - x, "sub"),
        (lambda self, x: x @ x.t(), "matmul"),
        (lambda self, x: x[0], "getitem"),
        (lambda self, x: x.view(x.shape[0], 6), "getattr"),
        (lambda self, x: x.view(x.size(0), 6), "size"),
        (lambda self, x: F.scaled_dot_product_attention(x, x, x), "scaled_dot_product_attention"),
        (lambda self, x: F.dropout(x, 0.1, False), "dropout"),
        (lambda self, x: F.interpolate(x[None], 3), "interpolate"),
        (lambda self, x: F.batch_norm(x, x.mean(0), x.var(0), training=False), "batch_norm"),
        (lambda self, x: self.linear(x), "linear"),
        (lambda self, x: F.embedding(x.long(), self.table.weight), "embedding"),
        (lambda self, x: torch.arange(6) + x, "arange"),
    ],
)
def test_what_gives_a_value_and_does_nothing_else_is_pure(function: Callable[..., Any], name: str) -> None:
    program, node = node_of(function, name)
    assert is_pure(program, node)
    assert is_repeatable(program, node)
    assert not written_by(program, node)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda self, x: x.add_(1), "add_"),
        (lambda self, x: F.relu(x, inplace=True), "relu"),
        (lambda self, x: torch.add(x, 1, out=x), "add"),
        (lambda self, x: F.batch_norm(x, x.mean(0), x.var(0), training=True), "batch_norm"),
        (lambda self, x: F.embedding(x.long(), self.table.weight, max_norm=1.0), "embedding"),
        (lambda self, x: F.embedding(x.long(), self.table.weight, None, 1.0), "embedding"),
    ],
)
def test_what_writes_is_not_pure(function: Callable[..., Any], name: str) -> None:
    program, node = node_of(function, name)
    assert not is_pure(program, node)
    assert written_by(program, node)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda self, x: F.dropout(x, 0.1), "dropout"),
        (lambda self, x: torch.rand_like(x), "rand_like"),
        (lambda self, x: torch.bernoulli(x), "bernoulli"),
        (lambda self, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), "scaled_dot_product_attention"),
        (lambda self, x: F.scaled_dot_product_attention(x, x, x, None, 0.1), "scaled_dot_product_attention"),
        (lambda self, x: F.rrelu(x, training=True), "rrelu"),
    ],
)
def test_what_draws_is_not_pure(function: Callable[..., Any], name: str) -> None:
    program, node = node_of(function, name)
    assert not is_pure(program, node)


def test_memory_that_nobody_has_written_to_may_be_left_out_and_is_no_value() -> None:
    program, node = node_of(lambda self, x: torch.empty_like(x) * 0 + x, "empty_like")
    assert is_pure(program, node)
    assert not is_repeatable(program, node)


@pytest.mark.parametrize(
    "child",
    [
        nn.Linear(6, 6),
        nn.Dropout(),
        nn.GELU(),
        nn.LayerNorm(6),
        nn.BatchNorm1d(6),
        nn.Sequential(nn.Linear(6, 6), nn.ReLU()),
        Wrapped(nn.Linear(6, 6)),
    ],
)
def test_layers_in_eval_and_modules_of_them_are_pure(child: nn.Module) -> None:
    program, node = node_of(lambda self, x: self.child(x), "child", child=child)
    assert is_pure(program, node)


@pytest.mark.parametrize(
    "child",
    [
        nn.ReLU(inplace=True),
        hooked(nn.Linear(6, 6)),
        Wrapped(hooked(nn.Linear(6, 6))),
        Wrapped(nn.ReLU(inplace=True)),
        nn.Sequential(Branching()),
        Branching(),
        nn.Embedding(6, 6, max_norm=1.0),
        torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
        nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
    ],
)
def test_what_writes_is_watched_or_unknown_is_not_pure(child: nn.Module) -> None:
    program, node = node_of(lambda self, x: self.child(x), "child", child=child)
    assert not is_pure(program, node)
    assert written_by(program, node)


@pytest.mark.parametrize(
    ("function", "name", "wanted"),
    [
        (lambda self, x: x.view(-1), "view", True),
        (lambda self, x: x[0], "getitem", True),
        (lambda self, x: x.T, "getattr", True),
        (lambda self, x: x.contiguous(), "contiguous", True),
        (lambda self, x: F.dropout(x, 0.1, False), "dropout", True),
        (lambda self, x: self.child(x), "child", True),
        (lambda self, x: x.exp(), "exp", False),
        (lambda self, x: x + 1, "add", False),
        (lambda self, x: self.linear(x), "linear", False),
        (lambda self, x: F.softmax(x, -1), "softmax", False),
        (lambda self, x: x.view(x.shape), "getattr", False),
    ],
)
def test_whose_value_may_lie_in_the_memory_of_another(function: Callable[..., Any], name: str, wanted: bool) -> None:
    program, node = node_of(function, name, child=nn.Identity())
    assert may_share(program, node) is wanted


def test_aliases_follow_views_and_what_is_written_through_them() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        written = x.exp()
        written.view(-1)[0].zero_()
        given = written.sin().view(-1)
        return x.cos().sum() + given

    program, node = node_of(function, "view")
    aliases = Aliases(program, node.graph)
    by_name = {operation_name(one): one for one in node.graph.nodes}
    assert aliases.may_be_written([by_name["exp"]])
    assert not aliases.may_be_written([by_name["sin"], by_name["cos"], by_name["sum"]])
    assert not aliases.may_leave(by_name["sin"]), "what is returned is a sum of it"


def test_what_a_child_of_unknown_code_is_given_and_holds_may_be_written_to() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        a = x.exp()
        return self.child(a) + self.linear.weight.sin() + x.cos()

    program, node = node_of(function, "sin", child=Branching())
    aliases = Aliases(program, node.graph)
    by_name = {operation_name(one): one for one in node.graph.nodes}
    assert aliases.may_be_written([by_name["exp"]])
    assert aliases.may_be_written(by_name["sin"].all_input_nodes)
    assert not aliases.may_be_written([by_name["cos"], node])
