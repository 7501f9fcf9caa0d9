"""Passes by name: lists as text, order, and entry points of other packages."""

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import pytest
import torch

from passes import (
    ChannelsLast,
    Context,
    FoldConvBias,
    FoldConvBn,
    InsertCheckpoints,
    ModulePass,
    ModuleRewriter,
    Pass,
    TorchCompile,
    registry,
)
from passes.errors import DuplicatePass, PassesError, PassOptionError, PassOrderError, UnknownPass
from passes.registry import BUILT_IN, check_order, describe_passes, make_passes, parse_passes, pass_names, register


@dataclass(frozen=True)
class Mine(ModulePass):
    """A pass of another package."""

    name: ClassVar[str] = "mine"

    def rewrite(self, graph: ModuleRewriter, context: Context) -> None:
        """Change nothing."""


@dataclass(frozen=True)
class AlsoMine(Mine):
    """Another class with the same name."""


@dataclass(frozen=True)
class Late(Mine):
    """Needs no graph."""

    name: ClassVar[str] = "late"
    needs_graph: ClassVar[bool] = False


def entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, f"registry_entries:{value}", registry.ENTRY_POINTS)


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    module = types.ModuleType("registry_entries")
    module.__dict__.update(Mine=Mine, AlsoMine=AlsoMine, number=5)
    monkeypatch.setitem(sys.modules, "registry_entries", module)


def test_names() -> None:
    assert pass_names()[: len(BUILT_IN)] == tuple(cls.name for cls in BUILT_IN)
    assert pass_names()[:4] == ("fold-conv-bias", "fold-conv-bn", "channels-last", "simplify")
    assert make_passes(None, "inference") == [FoldConvBias(), FoldConvBn(), ChannelsLast()]
    assert [item.name for item in make_passes(None, "training")] == ["fold-conv-bias"]


def test_a_list_as_text() -> None:
    wanted = [FoldConvBn(), TorchCompile(mode="max-autotune", dynamic=True)]
    assert parse_passes(" fold-conv-bn , torch-compile:mode=max-autotune:dynamic=true") == wanted
    assert parse_passes("none") == parse_passes("") == []


def test_classes_instances_and_names_mix() -> None:
    mixed: Any = [Mine(), FoldConvBn, "channels-last"]
    assert make_passes(mixed, "inference") == [Mine(), FoldConvBn(), ChannelsLast()]
    assert make_passes(Mine(), "inference") == [Mine()]
    for alone in ("fold-conv-bn", FoldConvBn, FoldConvBn(), (name for name in ["fold-conv-bn"])):
        assert make_passes(alone, "inference") == [FoldConvBn()]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "fold-conv-nb",
            UnknownPass,
            "There is no pass 'fold-conv-nb': did you mean 'fold-conv-bn'? A pass of your own must",
        ),
        ("zzz", UnknownPass, "There is no pass 'zzz': the passes are: fold-conv-bias, fold-conv-bn"),
        ("fold-conv-bn,", UnknownPass, "an empty entry: put a pass between two commas"),
        ("torch-compile:mode", PassOptionError, "has 'mode' where option=value is expected."),
        ("torch-compile:dynamic=true:dynamic=false", PassOptionError, "has the option 'dynamic' twice."),
    ],
)
def test_bad_text_is_one_sentence(text: str, error: type[PassesError], message: str) -> None:
    with pytest.raises(error) as caught:
        parse_passes(text)
    assert message in str(caught.value)
    assert str(caught.value)[-1] in ".?"


X = torch.zeros(100)


@pytest.mark.parametrize(
    "given",
    [5, [None], X, X[0], (X,), X.numpy(), {"x": X}, lambda batch, generator: (X,), [torch.nn.ReLU()]],
    ids=lambda given: type(given).__name__,
)
def test_inputs_in_the_place_of_passes_are_refused_in_a_short_sentence(given: Any) -> None:
    with pytest.raises(UnknownPass) as caught:
        make_passes(given, "inference")
    assert "go into `example_inputs=(x,)`, and keyword arguments into" in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ([TorchCompile(), FoldConvBn()], "fold-conv-bn can't come after torch-compile, which leaves no graph"),
        ([TorchCompile(), Late(), Mine()], "mine can't come after torch-compile, which leaves no graph"),
        ([TorchCompile(), TorchCompile()], "torch-compile can't come after torch-compile: only one"),
        (
            [InsertCheckpoints(), FoldConvBias()],
            r"fold-conv-bias can't come after insert-checkpoints, .*: put insert-checkpoints last\.",
        ),
        (
            [InsertCheckpoints(), TorchCompile()],
            "torch-compile can't come after insert-checkpoints, .* last and leave the other out",
        ),
        (
            [InsertCheckpoints(), InsertCheckpoints(0.3)],
            "insert-checkpoints can't come after insert-checkpoints, .* leave the other out",
        ),
    ],
)
def test_an_impossible_order(passes: list[Pass], message: str) -> None:
    with pytest.raises(PassOrderError, match=message):
        check_order(passes)


def test_a_possible_order() -> None:
    check_order([FoldConvBn(), FoldConvBn(), TorchCompile(), Late()])
    check_order([FoldConvBias(), InsertCheckpoints(), Late()])


@pytest.mark.usefixtures("entries")
def test_entry_points() -> None:
    assert register([FoldConvBn], [entry("mine", "Mine")]) == {"fold-conv-bn": FoldConvBn, "mine": Mine}
    assert register([Mine], [entry("mine", "Mine")]) == {"mine": Mine}
    with pytest.raises(DuplicatePass) as caught:
        register([Mine], [entry("mine", "AlsoMine")])
    assert f"{__name__}.Mine and {__name__}.AlsoMine" in str(caught.value)
    for name, value in (("five", "number"), ("other", "Mine")):
        with pytest.raises(UnknownPass, match=f"The entry point '{name}' is registry_entries:{value}"):
            register([], [entry(name, value)])


@pytest.mark.usefixtures("entries")
def test_a_broken_entry_point_stands_in_nobodys_way(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [entry("broken", "missing"), entry("mine", "Mine")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    registry._classes.cache_clear()
    try:
        assert parse_passes("mine,fold-conv-bn") == [Mine(), FoldConvBn()]
        with pytest.raises(UnknownPass, match="The pass 'broken' isn't available: registry_entries:missing can't be"):
            parse_passes("broken")
        assert {row.name for row in describe_passes()} >= {"mine", "fold-conv-bn"}
    finally:
        monkeypatch.undo()
        registry._classes.cache_clear()
        registry._classes()


def test_descriptions() -> None:
    rows = {row.name: row for row in describe_passes()}
    assert rows["fold-conv-bn"].preset == ("inference",)
    assert rows["torch-compile"].options["backend"] == "inductor"
    assert all(row.summary for row in rows.values())
