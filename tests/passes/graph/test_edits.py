"""Undoing edits restores the very same objects."""

from typing import Any

import pytest
import torch
from pass_contract import tree_of
from torch import nn

from passes.graph import edits
from passes.graph.edits import (
    AttributeEdit,
    ClassEdit,
    Edit,
    FormatEdit,
    TensorEdit,
    in_place,
    taken_back,
)


def tree() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))


def edits_of(root: Any) -> list[Edit]:
    return [
        TensorEdit(root[0], "weight", nn.Parameter(torch.zeros(1, 1, 1, 1))),
        TensorEdit(root[0], "bias", None),
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
    assert root[0].bias is None
    assert root[0].weight.item() == root[0].new.item() == 1
    for edit in reversed(edits):
        edit.undo()
    assert tree_of(root) == before


def test_names_without_a_tensor_stand_last_and_go_back() -> None:
    root = tree()[1]
    names = list(root._buffers)
    edits = [TensorEdit(root, "running_mean", None), TensorEdit(root, "new", nn.Parameter(torch.ones(1)))]
    for edit in edits:
        edit.apply()
    after = ["running_var", "num_batches_tracked", "running_mean"]
    assert list(root._buffers) == after
    with taken_back(edits):
        assert list(root._buffers) == names
    assert list(root._buffers) == after
    assert list(root._parameters) == ["weight", "bias", "new"]
    for edit in reversed(edits):
        edit.undo()
    assert list(root._buffers) == names


def test_a_buffer_stays_a_buffer() -> None:
    root = tree()
    edit = TensorEdit(root[1], "running_mean", None)
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


def test_taking_back_an_earlier_edit_keeps_a_later_one_of_the_same_place() -> None:
    root = tree()
    first, second = (TensorEdit(root[0], "weight", nn.Parameter(torch.full((1, 1, 1, 1), float(n)))) for n in (1, 2))
    first.apply()
    second.apply()
    with taken_back([first]):
        assert root[0].weight.item() not in (1, 2)
    assert root[0].weight is second.new
    second.undo()
    assert root[0].weight is first.new


def test_a_format_holds_the_values_once_and_comes_back_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits, "_ELEMENTS", 30)
    parameter = nn.Parameter(torch.randn(4, 3, 2, 2))
    values, strides = parameter.detach().clone(), parameter.stride()
    edit = FormatEdit(parameter, torch.channels_last)
    edit.apply()
    wanted = parameter.stride()
    assert parameter.is_contiguous(memory_format=torch.channels_last)
    address = parameter.data_ptr()
    with taken_back([edit]):
        assert parameter.stride() == strides
        assert parameter.data_ptr() == address, "a second place for the values"
        assert torch.equal(parameter, values)
    assert parameter.stride() == wanted
    edit.undo()
    assert parameter.stride() == strides
    assert torch.equal(parameter, values)
    assert not [held for held in vars(edit).values() if isinstance(held, torch.Tensor) and held is not parameter]


@pytest.mark.parametrize(
    "shape", [(4, 3, 2, 2), (1, 3, 2, 2), (5, 1, 3, 3), (600, 40, 5, 5), (3, 4, 1, 1), (2, 3, 2, 2, 2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_format_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    memory_format = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    values = torch.randn(shape).to(dtype)
    for first in (torch.contiguous_format, memory_format):
        parameter = nn.Parameter(values.clone().contiguous(memory_format=first))
        strides = parameter.stride()
        edit = FormatEdit(parameter, memory_format)
        edit.apply()
        wanted = parameter.stride()
        assert parameter.is_contiguous(memory_format=memory_format)
        assert torch.equal(parameter, values)
        put_back = edit.keep()
        edit.undo()
        assert parameter.stride() == strides
        assert torch.equal(parameter, values)
        put_back()
        assert parameter.stride() == wanted
        assert torch.equal(parameter, values)


def test_a_weight_whose_rows_are_not_in_a_row_is_moved_to_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits, "_ELEMENTS", 30)
    values = torch.randn(3, 2, 2, 4)
    parameter = nn.Parameter(values.permute(3, 0, 1, 2))
    edit = FormatEdit(parameter, torch.channels_last)
    edit.apply()
    assert parameter.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(parameter, values.permute(3, 0, 1, 2))
    edit.undo()
    assert parameter.stride() == values.permute(3, 0, 1, 2).stride()
    assert torch.equal(parameter, values.permute(3, 0, 1, 2))
