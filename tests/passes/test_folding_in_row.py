"""Fold several BatchNorms in a row into one convolution, so that the values between them are no longer right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folding_models import BatchNormAct, image
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import check_parity, export, optimize, report_of
from passes.errors import UnseenCall
from passes.program.seals import SealedOutput

IMAGE = image(2, 4, 8, 8)
Layer = Callable[[], nn.Module]


class OwnConv(nn.Conv2d):
    """A convolution with its own forward."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, self.weight, self.bias)


class OwnNorm(nn.BatchNorm2d):
    """A BatchNorm with its own forward."""

    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias)


class Row(nn.Module):
    """Runs its layers one after the other; with `branches`, it also has a data-dependent branch."""

    def __init__(self, *layers: Layer, branches: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for layer in layers)
        self.branches = branches
        enliven(self)

    def forward(self, x: Tensor, *, until: int | None = None) -> Tensor:
        if self.branches and x.sum() > 1e6:
            return x
        for layer in self.layers[:until]:
            x = layer(x)
        return x


class Moved(Row):
    """A transpose and a copy are between the two BatchNorms."""

    def forward(self, x: Tensor, *, until: int | None = None) -> Tensor:
        conv, first, second = self.layers
        return second(first(conv(x)).transpose(2, 3).clone()).relu()


def conv() -> nn.Module:
    return nn.Conv2d(4, 4, 3)


def own_conv() -> nn.Module:
    return OwnConv(4, 4, 3)


def norm() -> nn.Module:
    return nn.BatchNorm2d(4)


def own_norm() -> nn.Module:
    return OwnNorm(4)


def activated() -> nn.Module:
    return BatchNormAct(4)


# The layers, and the number of BatchNorms that are folded.
ROWS: dict[str, tuple[tuple[Layer, ...], int]] = {
    "behind": ((conv, norm, norm), 2),
    "three behind": ((conv, norm, norm, norm), 3),
    "in front": ((norm, norm, conv), 2),
    "three in front": ((norm, norm, norm, conv), 3),
    "both sides": ((norm, norm, conv, norm, norm), 4),
    "module, function": ((conv, norm, own_norm), 2),
    "module, function with an activation": ((conv, norm, activated), 2),
    "function, module": ((conv, own_norm, norm), 2),
    "functions": ((own_conv, own_norm, own_norm), 2),
    "function, modules": ((own_conv, norm, norm), 2),
    "functions in front": ((own_norm, own_norm, own_conv), 2),
    "module, function in front": ((norm, own_norm, conv), 2),
    "function, module in front": ((own_norm, norm, conv), 2),
    "modules in front of a function": ((norm, norm, own_conv), 2),
    "mixed": ((own_norm, norm, own_conv, norm, own_norm), 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("passes", [["fold-conv-bn"], ["fold-conv-bias", "fold-conv-bn"], ["fold-conv-bn"] * 2])
@pytest.mark.parametrize("kind", ROWS)
def test_all_are_folded_and_no_part_answers_wrong(kind: str, passes: list[str], branches: bool) -> None:
    layers, folded = ROWS[kind]
    model = Row(*layers, branches=branches).eval()
    fast = optimize(model, passes, example_inputs=(IMAGE,))
    record = next(record for record in report_of(fast).passes if record.name == "fold-conv-bn")
    assert len(record.changes) == folded, record.skips
    report = check_parity(model, copy.deepcopy(fast), (IMAGE,), batch_sizes=(1, 2, 5))
    assert report.ok, report.reason
    _check_parts(model, fast)


def _check_parts(model: Row, fast: Row) -> None:
    wanted = made = IMAGE
    for mine, theirs in zip(model.layers, fast.layers, strict=True):
        # A part alone raises, or returns a sealed value that only the next part opens.
        with pytest.raises(UnseenCall):
            theirs(wanted) + 1
        wanted, made = mine(wanted), theirs(made)
        if theirs is not fast.layers[-1]:
            assert isinstance(made, SealedOutput)
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["behind", "in front"])
def test_leaving_one_out_raises(kind: str) -> None:
    model = Row(*ROWS[kind][0], branches=True).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(IMAGE,))
    for until in (1, 2):
        with pytest.raises(UnseenCall):
            fast(IMAGE, until=until)


def test_folds_over_moves_between_two() -> None:
    model = Moved(conv, norm, norm).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(IMAGE,))
    assert len(report_of(fast).passes[0].changes) == 2
    assert check_parity(model, fast, (IMAGE,), batch_sizes=(1, 2, 5)).ok
    assert isinstance(fast.layers[1](fast.layers[0](IMAGE)), SealedOutput)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["behind", "in front", "mixed"])
def test_what_is_folded_can_be_exported_and_compiled(kind: str, tmp_path: Any) -> None:
    model = Row(*ROWS[kind][0]).eval()
    fast = optimize(model, example_inputs=(IMAGE,))
    bundle = export(fast, example_inputs=(IMAGE,), output=tmp_path / "out", formats=("torchscript", "onnx"))
    assert bundle.parity.ok
    compiled = torch.compile(fast, backend="eager")
    torch.testing.assert_close(compiled(IMAGE), model(IMAGE), rtol=1e-4, atol=1e-4)
