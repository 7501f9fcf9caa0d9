"""Undoing edits restores the very same objects."""

from typing import Any

import pytest
import torch
from pass_contract import tree_of
from torch import nn

from passes.base import Edit
from passes.graph.edits import AttributeEdit, ClassEdit, TensorEdit, in_place, taken_back


def tree() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))


def edits_of(root: Any) -> list[Edit]:
    return [
        TensorEdit(root[0], "weight", nn.Parameter(torch.zeros(1, 1, 1, 1))),
        TensorEdit(root[0], "new", nn.Parameter(torch.ones(1))),
        TensorEdit(root[1], "running_mean", torch.ones(1)),
        AttributeEdit(root[0], "forward", len),
        AttributeEdit(root[1], "eps", 0.5),
        ClassEdit(root[1], nn.SyncBatchNorm),
        TensorEdit(root[0], "weight", nn.Parameter(torch.ones(1, 1, 1, 1))),
    ]


def test_undone_in_reverse_nothing_is_left() -> None:
    root = tree()
    before = tree_of(root)
    edits = edits_of(root)
    for edit in edits:
        edit.apply()
    assert type(root[1]) is nn.SyncBatchNorm
    assert root[0].weight.item() == root[0].new.item() == 1
    for edit in reversed(edits):
        edit.undo()
    assert tree_of(root) == before


def test_a_buffer_stays_a_buffer() -> None:
    root = tree()
    edit = TensorEdit(root[1], "running_mean", torch.ones(3))
    edit.apply()
    assert "running_mean" in root[1]._buffers
    assert "running_mean" not in root[1]._parameters


@pytest.mark.parametrize("fails", [False, True])
def test_in_place_is_for_the_block(fails: bool) -> None:
    root = tree()
    before = tree_of(root)
    try:
        with in_place(edits_of(root)):
            assert type(root[1]) is nn.SyncBatchNorm
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert fails
    assert tree_of(root) == before


def test_in_place_undoes_what_it_did_when_one_fails() -> None:
    root = tree()
    before = tree_of(root)

    class Broken(AttributeEdit):
        def apply(self) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), in_place([*edits_of(root), Broken(root, "x", 1)]):
        pass
    assert tree_of(root) == before


def test_taken_back_is_for_the_block() -> None:
    root = tree()
    before = tree_of(root)
    edits = edits_of(root)
    for edit in edits:
        edit.apply()
    after = tree_of(root)
    with taken_back(edits):
        assert tree_of(root) == before
    assert tree_of(root) == after
