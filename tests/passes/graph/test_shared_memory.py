"""Find tensors that overlap in memory."""

from __future__ import annotations

import pytest
import torch
from laid_out import laid_out
from torch import Tensor, nn

from passes.graph.memory import copied_together, groups_of

FLAT, WHOLE = torch.zeros(8), laid_out("coo", torch.eye(4))


@pytest.mark.parametrize(
    ("tensors", "groups"),
    [
        ([FLAT, FLAT[2:4], torch.zeros(8)], [[0, 1], [2]]),
        ([FLAT[:5], FLAT[4:]], [[0, 1]]),
        ([FLAT.view(2, 4).t(), FLAT[7:]], [[0, 1]]),
        ([FLAT[:4], FLAT[4:], FLAT[2:3]], [[0, 2], [1]]),
        ([FLAT[:2], FLAT[5:], FLAT[1:6], FLAT[6:7]], [[0, 1, 2, 3]]),
        ([FLAT[4:], FLAT.view(torch.float64)[:2]], [[0], [1]]),
        ([FLAT[4:], FLAT.view(torch.float64)[:3]], [[0, 1]]),
        ([WHOLE, WHOLE._values()], [[0, 1]]),
        ([torch.zeros(4, device="meta"), FLAT[:0], nn.UninitializedParameter(), laid_out("mkldnn", torch.eye(2))],
         [[0], [1], [2], [3]]),
    ],
    ids=["views", "parts", "transposed", "apart", "by a third one", "of other dtypes", "overlapping dtypes", "sparse", "no memory"],
)  # fmt: skip
def test_groups_share_no_bytes(tensors: list[Tensor], groups: list[list[int]]) -> None:
    found = groups_of([*tensors, tensors[0]])
    assert [[id(one) for one in group] for group in found] == [[id(tensors[n]) for n in group] for group in groups]


def test_copies_share_what_the_tensors_shared() -> None:
    flat = torch.arange(20.0)[1:]
    group = [flat[3:9].view(2, 3).t(), flat[4:5], flat[2:]]
    copies = copied_together(group)
    for copied, tensor in zip(copies, group, strict=True):
        assert copied.dtype is tensor.dtype
        assert (copied.shape, copied.stride()) == (tensor.shape, tensor.stride())
        assert torch.equal(copied, tensor)
    copies[0].mul_(0)
    assert (copies[1].item(), copies[2].tolist()[:8]) == (0, [3, 0, 0, 0, 0, 0, 0, 10])
    assert torch.equal(flat, torch.arange(20.0)[1:])


def test_copies_of_several_dtypes_share_bytes() -> None:
    whole = torch.randn(4, dtype=torch.complex64)
    group = [torch.view_as_real(whole)[1:], whole]
    real, both = copied_together(group)
    assert torch.equal(both, whole)
    real.zero_()
    assert both.tolist() == [whole[0].item(), 0, 0, 0]


def test_a_copy_is_written_to_as_any_tensor_is() -> None:
    flat = torch.zeros(4)
    _, half = copied_together([flat, flat[:2]])
    weight = torch.ones(2, requires_grad=True)
    half.add_(weight)
    half.sum().backward()
    assert weight.grad is not None


def test_what_can_not_be_laid_anew_is_copied_for_itself() -> None:
    sparse = laid_out("coo", torch.eye(4))
    copies = copied_together([sparse, sparse._values()])
    copies[1].zero_()
    assert torch.equal(copies[0].to_dense(), torch.eye(4))
