"""`explain=True` tells why a graph pass' pattern doesn't match, with the file and line."""

import inspect
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import optimize, report_of
from passes import Context, GraphPass, GraphRewriter


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.alone = nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.rand(1, 4, 4, 1))
        self.head = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(torch.relu(self.conv(x)))
        y = self.alone(x[:, :, 1:-1, 1:-1]).sigmoid() * self.scale + y
        return self.head(self.conv(torch.relu(y)).mean((2, 3)) * torch.ones(()))  # type: ignore[no-any-return]


def line_of(text: str) -> str:
    lines, first = inspect.getsourcelines(Net.forward)
    return f"test_explaining.py:{next(first + number for number, line in enumerate(lines) if text in line)}"


def skips_of(name: GraphPass | str, *, explain: bool) -> list[tuple[str, str]]:
    torch.manual_seed(0)
    fast = optimize(enliven(Net()).eval(), [name], example_inputs=torch.randn(2, 4, 6, 6), explain=explain)
    return [(skip.where, skip.text) for skip in report_of(fast).passes[0].skips]


EXPLAINED = {
    "fold-conv-bn": [
        ("norm", "its input is computed by the root (relu), not by a convolution or linear layer, and its output goes to "
                 "the root (add)", "self.norm("),
        ("alone", "its input is computed by the root (getitem), not by a convolution or linear layer, and its output goes "
                  "to the root (sigmoid)", "self.alone("),
    ],
    "fold-conv-bias": [
        ("norm", "its input is computed by the root (relu), not by a convolution or linear layer, and its output goes to "
                 "the root (add)", "self.norm("),
    ],
    "merge-linears:force=true": [("head", "no other linear layer takes its input", "self.head(")],
    "pad-channels:multiple=2:force=true": [
        ("conv", "4 and 4 channels are multiples of 2", "self.norm("),
        ("head", "4 and 8 channels are multiples of 2", "self.head("),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", EXPLAINED)
def test_each_candidate_has_a_reason_and_a_line(name: str) -> None:
    found = skips_of(name, explain=True)
    for where, reason, line in EXPLAINED[name]:
        assert (where, f"{reason} ({line_of(line)})") in found


def test_without_it_only_refusals_are_reported() -> None:
    assert all("not by a convolution" not in text for _, text in skips_of("fold-conv-bn", explain=False))


def test_a_scale_that_is_not_by_channel_has_its_shape() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.scale = nn.Conv2d(4, 4, 1), nn.Parameter(torch.rand(1, 4, 6, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) * self.scale  # type: ignore[no-any-return]

    fast = optimize(Scaled().eval(), ["fold-conv-bn"], example_inputs=torch.randn(2, 4, 6, 6), explain=True)
    (skip,) = report_of(fast).passes[0].skips
    assert skip.where == "the root (mul)"
    assert skip.text.startswith("numbers of shape [1, 4, 6, 1] aren't one per channel of conv (test_explaining.py:")


def test_a_model_without_candidates_says_so() -> None:
    fast = optimize(nn.Sequential(nn.Linear(4, 4)), ["fold-conv-bn"], example_inputs=torch.randn(2, 4), explain=True)
    assert [skip.text for skip in report_of(fast).passes[0].skips] == [
        "a run of the model makes no call that the pass is for"
    ]


def test_a_users_pass_explains_and_skips_with_lines_too() -> None:
    @dataclass(frozen=True)
    class Mine(GraphPass):
        name: ClassVar[str] = "mine"

        def rewrite(self, graph: GraphRewriter, context: Context) -> None:
            for node in graph.calls("relu"):
                graph.explain(node, "it is a ReLU")
            for node in graph.calls("sigmoid"):
                graph.skip(node, "it is a sigmoid")

    sigmoid = "the root (sigmoid)", "it is a sigmoid"
    assert skips_of(Mine(), explain=False) == [sigmoid]
    found = skips_of(Mine(), explain=True)
    assert ("the root (relu)", f"it is a ReLU ({line_of('self.norm(')})") in found
    assert (sigmoid[0], f"{sigmoid[1]} ({line_of('self.alone(')})") in found


def test_an_error_of_a_users_pass_has_its_line() -> None:
    @dataclass(frozen=True)
    class Broken(GraphPass):
        name: ClassVar[str] = "broken"

        def rewrite(self, graph: GraphRewriter, context: Context) -> None:
            graph.calls("relu")[7].users.clear()

    fast = optimize(Net().eval(), [Broken()], example_inputs=torch.randn(2, 4, 6, 6))
    (record,) = report_of(fast).passes
    number = inspect.getsourcelines(test_an_error_of_a_users_pass_has_its_line)[1] + 6
    assert (record.status, record.reason) == (
        "failed",
        f"IndexError: list index out of range (test_explaining.py:{number})",
    )
