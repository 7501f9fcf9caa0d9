"""Capture a forward as one rewritten graph, or report why that failed."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from optimizer import optimize
from passes import Simplify
from passes.graph.whole_captures import FlatCall, NoWholeGraph
from passes.graph.whole_graph import install_whole_graph, steps_for_files


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.second(self.drop(self.first(x)))
        return y if mask is None else y * mask


class Keeping(Twice):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x, mask)
        return y if mask is None else Kept.of(y)


class Kept:
    """Calls a function that breaks the graph in torch.compile's front end, and asks for what only a real run has."""

    @staticmethod
    def of(y: Tensor) -> Tensor:
        torch.compiler.set_stance("default")
        y.data_ptr()
        return y


class Boxed(Twice):
    def forward(self, x: Tensor, box: Any = None) -> Tensor:
        y = super().forward(x)
        return y if box is None else y * box.mask


class Fixed(Twice):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x, mask)
        return y if mask is None else y.view(3, 4)


class Box:
    def __init__(self, mask: Tensor) -> None:
        self.mask = mask


def flat_call(args: tuple[Any, ...]) -> FlatCall:
    def inputs(args: Any, kwargs: Any) -> list[Tensor]:
        return [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]

    return FlatCall(args, {}, inputs, pytree.tree_leaves, lambda outputs: outputs[0], {(0, 0): (0, 0)})


def simplified(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = kind().eval()
    return optimize(model, ["simplify"], example_inputs=(torch.randn(3, 4),))


def test_the_graph_answers_tracers_and_the_plain_forward_all_others() -> None:
    fast = simplified(Twice)
    module, plain = copy.deepcopy(fast), copy.deepcopy(fast)
    assert install_whole_graph(module, plain, flat_call((torch.randn(3, 4),))) == ["simplify"]
    assert list(module.state_dict()) == list(fast.state_dict())
    program = torch.export.export(module, (torch.randn(3, 4),), dynamic_shapes={"x": {0: torch.export.Dim.DYNAMIC}})
    assert [node.target for node in program.graph.nodes if node.op == "call_function"] == [
        torch.ops.aten.linear.default
    ] * 2
    with torch.no_grad():
        plain.second.weight.zero_()
        assert torch.equal(module(torch.ones(2, 4)), plain.second.bias.expand(2, 4))


@pytest.mark.parametrize(
    ("kind", "second", "reason"),
    [
        (Boxed, Box(torch.ones(4)), "which is neither an input nor a tensor of the model"),
        (Fixed, torch.ones(4), r"an open size is fixed to 3 at test_whole_graph\.py:\d+"),
        (Keeping, torch.ones(4), r"the graph breaks at test_whole_graph\.py:\d+"),
    ],
)
def test_why_there_is_none(kind: type[nn.Module], second: Any, reason: str) -> None:
    fast = simplified(kind)
    call = flat_call((torch.randn(3, 4), second))
    with pytest.raises(NoWholeGraph, match=reason):
        install_whole_graph(copy.deepcopy(fast), copy.deepcopy(fast), call)


def test_a_graph_without_the_places_that_were_changed() -> None:
    fast = simplified(Twice)
    fast.drop = nn.Identity()
    with pytest.raises(NoWholeGraph, match="none of its changes"):
        install_whole_graph(copy.deepcopy(fast), copy.deepcopy(fast), flat_call((torch.randn(3, 4),)))


def test_a_pass_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = simplified(Twice)

    def fail(*_: Any) -> None:
        raise KeyError("nothing")

    monkeypatch.setattr(Simplify, "rewrite", fail)
    with pytest.raises(NoWholeGraph, match="simplify raises on it \\(KeyError: 'nothing'\\)"):
        install_whole_graph(copy.deepcopy(fast), copy.deepcopy(fast), flat_call((torch.randn(3, 4),)))


def test_steps_for_files() -> None:
    assert [step.item.name for step in steps_for_files(simplified(Twice))] == ["simplify"]
    assert steps_for_files(Twice()) == []


def test_the_choice_of_a_convolutions_kernel_is_no_condition() -> None:
    """torch asks for a batch of 16 or more when it chooses; files were then proven below and above this size."""
    x = torch.randn(2, 3, 32, 32)
    model = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 8, 1)).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=x)
    module, plain = copy.deepcopy(fast), copy.deepcopy(fast)
    assert install_whole_graph(module, plain, flat_call((x,))) == ["fold-conv-bn"]
    conditions = module.__dict__["forward"]._conditions
    assert all(conditions.hold(lambda dim, size=size: size) for size in (2, 15, 16, 100))
    assert not conditions.hold(lambda dim: 1)


def test_a_module_whose_weights_are_all_derived_has_parameters_left() -> None:
    """Models of transformers ask their first parameter for the device, also when torch.jit.trace looks at them."""

    class Asks(nn.Sequential):
        @property
        def device(self) -> torch.device:
            return next(parameter.device for parameter in self.parameters())

    x = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(Asks(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=x)
    module = copy.deepcopy(fast)
    assert install_whole_graph(module, copy.deepcopy(fast), flat_call((x,))) == ["fold-conv-bn"]
    assert module[0].device == torch.device("cpu")
    assert {name for name, _ in module.named_parameters()} == {"0.0.folded_weight", "0.0.folded_bias"}
