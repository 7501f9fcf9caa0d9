"""Options as text, modes, and the state of the model after a pass raises."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest
import torch
from folding_models import Pair, image
from pass_contract import captured, tree_of
from torch import nn

from passes import FoldConvBn, GraphRewriter
from passes.base import Context, device_of
from passes.errors import PassOptionError, RequirementNotMet
from passes.graph.module_pass import ModulePass, ModuleRewriter


@dataclass(frozen=True)
class Tuned(ModulePass):
    """A pass with options of every kind."""

    name: ClassVar[str] = "tuned"
    modes: ClassVar[tuple[str, ...]] = ("training",)
    budget: float
    steps: int = 3
    kind: Literal["fast", "small"] = "fast"
    level: Literal[1, 2] = 1
    dynamic: bool | None = None
    limit: int | str = 0
    places: tuple[str, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if self.budget < 0:
            raise ValueError("budget is a share from 0 on")

    def rewrite(self, graph: ModuleRewriter, context: Context) -> None:
        """Do nothing."""


def test_options_from_text() -> None:
    made = Tuned.from_options(
        {"budget": "0.4", "steps": "7", "kind": "small", "level": "2", "dynamic": "True", "limit": "all"}
    )
    assert made == Tuned(0.4, 7, "small", 2, True, "all")
    assert Tuned.from_options({"budget": "1", "dynamic": "none", "limit": "5"}) == Tuned(1.0, limit=5)
    assert made.options["steps"] == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budge": "1"}, "tuned has no option 'budge'; its options are: budget, steps, kind"),
        ({"budget": "much"}, "tuned:budget takes float, not 'much'."),
        ({"budget": "1", "steps": "2.5"}, "tuned:steps takes int, not '2.5'."),
        ({"budget": "1", "kind": "slow"}, "tuned:kind takes one of fast, small, not 'slow'."),
        ({"budget": "1", "level": "3"}, "tuned:level takes one of 1, 2, not '3'."),
        ({"budget": "1", "dynamic": "perhaps"}, "tuned:dynamic takes true or false, not 'perhaps'."),
        ({"budget": "1", "places": "a"}, "tuned:places can't be set as text: create the pass in Python."),
        ({"budget": "-1"}, "tuned: budget is a share from 0 on"),
        ({}, "tuned needs the option 'budget'."),
    ],
)
def test_bad_options_are_one_sentence(options: dict[str, str], message: str) -> None:
    with pytest.raises(PassOptionError) as caught:
        Tuned.from_options(options)
    assert message in str(caught.value)


def test_the_mode_is_checked() -> None:
    Tuned(1.0).check(Context("training", torch.device("cpu")))
    with pytest.raises(RequirementNotMet, match="The pass tuned is for training: leave it out, or use mode='training'"):
        Tuned(1.0).check(Context("inference", torch.device("cpu")))


@dataclass(frozen=True)
class Breaking(FoldConvBn):
    """Folds correctly and then raises, or raises in the middle of a change."""

    name: ClassVar[str] = "breaking"
    where: Literal["at the end", "in the middle"] = "at the end"

    def rewrite(self, graph: GraphRewriter, context: Context) -> None:
        if self.where == "at the end":
            super().rewrite(graph, context)
            raise ZeroDivisionError(self.where)
        (norm,) = graph.calls("batch_norm")
        with graph.change(norm, "half a change"):
            graph.call(norm, torch.relu, norm.args[:1])
            raise ZeroDivisionError(self.where)


@pytest.mark.parametrize("where", ["at the end", "in the middle"])
def test_a_pass_that_raises_leaves_nothing(where: Any) -> None:
    tree, context = captured(Pair().eval(), image())
    before = tree_of(tree.root)
    with pytest.raises(ZeroDivisionError, match=where):
        Breaking(where).run(tree, context)
    assert tree_of(tree.root) == before
    assert len(FoldConvBn().run(tree, context).changes) == 1


def test_the_device_is_that_of_the_first_tensor() -> None:
    assert device_of(nn.Linear(1, 1)) == torch.device("cpu")
    assert device_of(nn.ReLU()) == torch.device("cpu")
    with torch.device("meta"):
        assert device_of(nn.BatchNorm1d(1, affine=False)).type == "meta"
