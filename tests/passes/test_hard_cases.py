"""Fold the hard cases of `benchmarks/correctness.py`: never wrong, and all that can be folded exactly."""

import sys
from pathlib import Path

import pytest

from exporters.isolation import torchscript_allowed

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
# With torch.fx's `fuse`, torch imports TorchScript modules of its own.
with torchscript_allowed():
    from correctness import CASES, CONTENDERS, OURS, REFUSED, RIGHT, outcome_of

# What torch.compile doesn't capture, so that nothing is folded.
NOT_CAPTURED = {
    "modules in a list": "torch.compile's parameters of modules that aren't in the tree are no parameters of the model",
    "scripted submodule": "torch.compile runs a forward that calls a scripted module as it is written",
    "checkpoint": "torch.compile captures what the user's own checkpoint runs as a graph inside of the graph",
}
# Less precise than a fold of exact numbers may be.
LOSES_TOO_MUCH = {"bfloat16, cancelling weights", "float16, cancelling weights"}


# Kinds of layers and spellings that `test_fold_conv_bn.py` folds in float64, copies and pickles.
FOLDED_THERE = {
    "conv1d", "conv3d", "grouped conv", "reflect padding", "transposed conv", "grouped transposed conv",
    "transposed conv1d", "transposed conv3d", "linear, 2-D", "linear, 3-D", "linear, 3-D, transposed",
    "no scale and shift", "no running statistics", "BatchNorm with activation", "F.batch_norm",
    "F.conv2d and F.batch_norm", "conv subclass, kept forward", "BatchNorm before, padding",
    "BatchNorm before, no padding", "BatchNorm before linear", "two BatchNorms", "block called twice", "across modules",
    "nested Sequential",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CASES if name not in FOLDED_THERE])
def test_a_hard_case_is_right_or_refused(name: str) -> None:
    case = CASES[name]
    outcome = outcome_of(CONTENDERS[OURS], case)
    assert outcome.verdict in (RIGHT, REFUSED), outcome.reason
    if name not in NOT_CAPTURED:
        assert (outcome.folded or 0) >= case.folds, outcome.notes
    if name in LOSES_TOO_MUCH:
        assert outcome.verdict == REFUSED
        assert "loses too much to rounding" in outcome.reason
    elif outcome.verdict == REFUSED and "left as it was" not in outcome.reason:
        assert outcome.notes


def test_the_cases_that_nothing_is_captured_of_are_named() -> None:
    assert NOT_CAPTURED.keys() | FOLDED_THERE <= CASES.keys()
    assert sum(CASES[name].folds for name in NOT_CAPTURED) == 3
    assert sum(case.folds for case in CASES.values()) == 51
