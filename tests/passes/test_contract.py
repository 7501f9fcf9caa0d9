"""The contract that every registered pass must keep."""

import inspect
from typing import Any

import folding_models as models
import pytest
import torch
from folding_models import image
from pass_contract import check_pass, check_same, sentences_of, tree_of
from tiny_models import enliven
from torch import Tensor, nn

import passes
from optimizer import optimize
from passes.base import Pass
from passes.errors import RequirementNotMet
from passes.registry import pass_named, pass_names


class Mixed(nn.Module):
    """Something to change for every pass, inside and outside of an island, and places that must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.1))
        self.direct = nn.Sequential(nn.ConvTranspose2d(6, 3, 2, groups=3), models.BatchNormAct(3))
        self.island = models.Island()
        self.residual = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5), nn.BatchNorm1d(5))
        self.gate, self.value = nn.Linear(5, 5), nn.Linear(5, 5)
        enliven(self)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> dict[str, Any]:
        y = self.island(self.direct(self.stem(x)))
        kept = self.residual(y)
        y = self.norm(kept) + kept
        logits = self.head(y)
        return {"features": y, "logits": (self.gate(logits).sigmoid() * self.value(logits), 3)}


class Plain(nn.Module):
    """Nothing to change for any pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        enliven(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


# Without a compiler, and with changes that pay only on other devices.
OPTIONS = {"torch-compile": {"backend": "eager"}, "pad-channels": {"force": "true"}, "merge-linears": {"force": "true"}}


def made(name: str) -> Pass:
    """Create the pass from options as text."""
    return pass_named(name).from_options(OPTIONS.get(name, {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", pass_names())
def test_keeps_the_contract(name: str) -> None:
    done = check_pass(made(name), Mixed().eval(), (image(),), mode=pass_named(name).modes[0])
    assert done.changes, f"{name} finds nothing to do in a model that has something for every pass"


# The dtype of a model in which these passes find nothing to do.
NOTHING = {"cast-precision": torch.bfloat16}
# These passes raise if there is nothing to do, with this message.
RAISES_WHERE_THERE_IS_NOTHING = {"sync-batch-norm": "sync-batch-norm finds no BatchNorm in Plain: leave the pass out."}


@pytest.mark.parametrize("name", [name for name in pass_names() if pass_named(name).needs_graph])
def test_changes_nothing_where_there_is_nothing(name: str) -> None:
    dtype, item, mode = NOTHING.get(name, torch.float32), made(name), pass_named(name).modes[0]
    model, x = Plain().eval().to(dtype), torch.randn(2, 8, dtype=dtype)
    if name not in RAISES_WHERE_THERE_IS_NOTHING:
        assert check_pass(item, model, (x,), mode=mode).changes == ()
        return
    before = tree_of(model)
    with pytest.raises(RequirementNotMet) as raised:
        optimize(model, [item], mode=mode, example_inputs=(x,))
    assert str(raised.value) == RAISES_WHERE_THERE_IS_NOTHING[name]
    check_same(before, tree_of(model), f"{name} changed the caller's module")


@pytest.mark.parametrize("name", pass_names())
def test_a_model_in_training_stays_so(name: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(5)))
    optimize(model, [made(name)], mode=pass_named(name).modes[0], example_inputs=(image(2, 3, 8, 8),))
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("name", pass_names())
def test_runs_without_example_inputs_or_asks_for_them(name: str) -> None:
    item, model = made(name), nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    if item.needs_run:
        with pytest.raises(RequirementNotMet, match=f"The pass {name} .*: add example inputs\\."):
            optimize(model, [item], mode=item.modes[0])
        return
    done = check_pass(item, model, mode=item.modes[0])
    if isinstance(item, passes.GraphPass):
        assert list(sentences_of(done)) == [("", "it needs a run: add example inputs")]


@pytest.mark.parametrize("name", pass_names())
def test_is_a_frozen_dataclass_that_tells_what_it_is(name: str) -> None:
    cls = pass_named(name)
    assert cls.__dataclass_params__.frozen
    assert cls.summary().endswith(".")
    assert set(cls.modes) <= {"inference", "training"}
    assert not inspect.isabstract(cls)
    if cls.needs_graph:
        assert "Does not handle" in (cls.__doc__ or "")
    if cls.__module__.split(".")[0] == "passes":
        # Name, class and file derive from each other.
        assert cls.__name__ == "".join(part.capitalize() for part in name.split("-"))
        assert cls.__module__ == f"passes.{name.replace('-', '_')}"
        assert getattr(passes, cls.__name__) is cls


class _Scales(passes.ModulePass):
    """Breaks the contract in the way that `how` says."""

    name = "scales"

    def __init__(self, how: str) -> None:
        object.__setattr__(self, "how", how)

    def rewrite(self, graph: passes.ModuleRewriter, context: passes.Context) -> None:
        root = graph.tree.root
        if self.how == "caller":
            with torch.no_grad():
                root.linear.weight.mul_(1.5)
        elif self.how == "unrecorded":
            root.linear.weight = nn.Parameter(root.linear.weight.detach() * 1)
        elif self.how == "wrong":
            with graph.change("linear", "scaled by one half more"):
                ref = passes.base.TensorRef(root.linear, "weight")
                graph.set_tensor(ref, root.linear.weight.detach() * 1.5)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("caller", "changed the caller's module|still left a difference"),
        ("unrecorded", "changed nothing and still left a difference"),
        ("wrong", "computes something else"),
    ],
)
def test_the_contract_finds_who_breaks_it(how: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_pass(_Scales(how), Plain().eval(), (torch.randn(4, 8),))
