"""What the code of forwards can reach: found where it may be, and not where only a kind is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from passes.graph import named_reads
from passes.graph.named_reads import Access, NamedReads, accesses_in, asks_for_types
from passes.graph.side_effects import values_in


def _names(function: Callable[..., Any]) -> set[tuple[bool, tuple[str, ...], str]]:
    return {(access.of_self, access.path, access.name) for access in accesses_in(function.__code__)}


def test_a_chain_of_attributes_is_known_by_where_it_starts() -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.stem.conv.weight + x.weight

    found = _names(forward)
    assert (True, ("stem", "conv"), "weight") in found
    assert (False, (), "weight") in found
    assert Access(True, (), "stem") in accesses_in(forward.__code__)


def test_functions_inside_and_texts_count() -> None:
    def forward(self: Any) -> Any:
        def inner() -> Any:
            return self.conv.bias

        return inner() + getattr(self.conv, "weight") + sum(getattr(self, n) for n in ("a.b",))  # noqa: B009

    found = _names(forward)
    assert {(False, ("conv",), "bias"), (False, (), "weight"), (False, ("a",), "b")} <= found


@pytest.mark.parametrize(
    "asks",
    [
        lambda self: next(self.parameters()).dtype,
        lambda self: next(self.encoder.parameters()).device,
        lambda self: next(p.dtype for p in self.parameters() if p.is_floating_point()),
    ],
)
def test_asking_for_a_kind_is_no_access(asks: Callable[..., Any]) -> None:
    assert not [access for access in accesses_in(asks.__code__) if access.name in ("parameters", "weight")]


@pytest.mark.parametrize(
    "reads",
    [
        lambda self: next(self.parameters()).sum(),
        lambda self: list(self.parameters()),
        lambda self: next(iter(self.parameters())).dtype,
        lambda self: next(p + 1 for p in self.parameters()),
    ],
)
def test_what_may_be_the_value_is_an_access(reads: Callable[..., Any]) -> None:
    assert "parameters" in {access.name for access in accesses_in(reads.__code__)}


def test_asking_for_a_type_is_seen_unless_it_is_that_of_self() -> None:
    assert asks_for_types((lambda self, y: type(y) is Tensor).__code__)
    assert asks_for_types((lambda self, y: [type(v) for v in y]).__code__)
    assert not asks_for_types((lambda self, y: f"{type(self).__name__} {y}").__code__)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
        self.head, self.tail = nn.Linear(2, 2), nn.Linear(2, 2)
        self.kept = (self.tail,)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.head.weight + self.tail(x)

    def unused(self) -> Any:
        return self.tail.weight


class IndirectReader(Reader):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x @ block[0].weight
        return x


def test_reads_are_looked_up_by_place() -> None:
    tree = nn.Sequential(Reader(), nn.Linear(2, 2))
    reads = NamedReads(tree)
    none = frozenset[int]()
    assert reads.reader_of("0.head", "weight", none) == "0"
    assert reads.reader_of("0.head", "weight", frozenset({id(tree[0])})) is None
    assert reads.reader_of("0.head", "bias", none) is None
    assert reads.reader_of("0.tail", "weight", none) is None
    assert reads.reader_of("1", "weight", none) is None
    assert reads.holder_of(tree[0].tail) == "0"
    assert reads.holder_of(tree[0].head) is None

    reads = NamedReads(nn.Sequential(IndirectReader(), nn.Linear(2, 2)))
    assert reads.reader_of("0.blocks.1.0", "weight", none) == "0"
    assert reads.reader_of("1", "weight", none) is None


def test_containers_that_hold_each_other_are_looked_through() -> None:
    tree = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    children: list[Any] = [tree[1]]
    parent = (children,)
    children.append(parent)
    tree[0].parent = parent
    assert NamedReads(tree).holder_of(tree[1]) == "0"


def test_who_holds_a_module_or_one_around_it_may_read_it() -> None:
    class Reader(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.held[0].weight

    shared: list[nn.Module] = []
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 1)), Reader(), Reader(), Reader())
    model[1].held, model[2].held = [model[0]], shared
    reads = NamedReads(model)
    assert reads.reader_of("0.0", "weight", frozenset()) == "1"
    shared.append(model[0][0])
    reads = NamedReads(model)
    assert reads.reader_of("0.0", "weight", frozenset({id(model[1])})) == "2"
    assert reads.reader_of("0.0", "weight", frozenset({id(model[1]), id(model[2])})) is None
    model[3].held = shared
    reads = NamedReads(model)
    assert reads.reader_of("0.0", "weight", frozenset({id(model[1]), id(model[2])})) == "3"


def test_who_keeps_which_method_of_a_module() -> None:
    class Own(nn.Linear):
        pass

    tree = nn.Sequential(nn.Linear(2, 2), Own(2, 2), nn.Linear(2, 2), nn.ReLU())
    tree.calls = [tree[0].__call__, tree[0]._call_impl, tree[0]]  # type: ignore[assignment]
    tree[3].methods = {"a": functools.partial(tree[1].extra_repr), "b": functools.partial(nn.Linear.forward, tree[1])}
    tree[2].register_load_state_dict_post_hook(tree[2].extra_repr)
    reads = NamedReads(tree)
    assert reads.keepers_of(tree[0]) == reads.keepers_of(tree[2]) == {}
    assert reads.keepers_of(tree[1]) == {"extra_repr": "3", "forward": "3"}


class Runs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Bilinear(2, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return nn.Linear.forward(self.inner[0], x)  # type: ignore[arg-type]


def test_who_runs_a_module_by_the_forward_of_its_class() -> None:
    tree = nn.Sequential(Runs(), nn.Linear(2, 2))
    reads = NamedReads(tree)
    none = frozenset[int]()
    assert reads.runner_of(tree[0].inner[0], "0.inner.0", none) == "0"
    assert reads.runner_of(tree[0].inner[0], "0.inner.0", frozenset({id(tree[0])})) is None
    assert reads.runner_of(tree[0].inner[2], "0.inner.2", none) is None
    assert reads.runner_of(tree[1], "1", none) is None


def test_what_holds_much_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = [nn.Linear(2, 2)]
    for _ in range(3):
        held = [held] * 10
    tree = nn.Sequential(nn.Linear(2, 2))
    tree.held = lambda: held  # type: ignore[assignment]
    looked_into = list[Any]()
    monkeypatch.setattr(named_reads, "values_in", lambda value: looked_into.append(value) or values_in(value))
    assert NamedReads(tree).holder_of(tree[0]) is None
    assert len([value for value in looked_into if isinstance(value, list)]) == 4


def test_functions_that_name_each_other_in_a_long_row() -> None:
    source = "".join(f"def f{n}(x): return f{n + 1}(x)\n" for n in range(3000)) + "def f3000(x): return x.weight"
    scope: dict[str, Any] = {"__name__": "script"}
    exec(source, scope)
    tree = nn.Sequential(nn.Linear(2, 2))
    tree.kept = scope["f0"]
    assert NamedReads(tree).reader_of("0", "weight", frozenset()) == ""
