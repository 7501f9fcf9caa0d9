"""Forward wrappers that set the memory format of inputs and outputs."""

import inspect
import itertools
from typing import Any

import pytest
import torch
from folding_models import image
from laid_out import NESTED, SPARSE, laid_out
from torch import Tensor, nn

from passes.graph.forwards import inner_forward
from passes.memory_format.forwards import FormattedForward, dim_order


class Formats(nn.Module):
    def forward(self, x: Tensor, count: int = 2) -> Any:
        return [x.to(memory_format=torch.channels_last) for _ in range(count)]


def test_outputs_get_the_formats_that_are_asked_for() -> None:
    model = Formats()
    model.forward = FormattedForward(model, ((0, 1, 2, 3), (0, 2, 3, 1)), None)
    x = image()
    first, second = model(x)
    assert first.is_contiguous()
    assert second.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(first, x)
    assert all(leaf.is_contiguous() for leaf in model(x, 3)), "more values than were recorded are contiguous"
    assert list(inspect.signature(model.forward).parameters) == ["x", "count"]
    assert inner_forward(model) is None


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_every_order_of_dims_is_found_and_given_back(order: tuple[int, ...]) -> None:
    sizes = (2, 5, 3)
    back = [order.index(dim) for dim in range(3)]
    original = torch.randn([sizes[dim] for dim in order]).permute(back)
    assert dim_order([original]) == order
    model = nn.Identity()
    model.forward = FormattedForward(model, (order,), None)
    for given in (original, original.contiguous(), original[:1], original.transpose(1, 2).contiguous().transpose(1, 2)):
        got = model(given)
        assert torch.equal(got, given)
        assert got.permute(order).is_contiguous()
    assert model(original) is original, "what is right already isn't copied"
    assert model(original).stride() == original.stride() == model(original.contiguous()).stride()


def test_dims_of_size_1_are_told_by_a_call_of_another_size() -> None:
    one, two = torch.randn(1, 7, 3).transpose(0, 1), torch.randn(2, 7, 3).transpose(0, 1)
    assert one.is_contiguous()
    assert dim_order([one]) == (0, 1, 2)
    assert dim_order([one, two]) == dim_order([two, one]) == (1, 0, 2)
    assert dim_order([one, two.contiguous()]) == (0, 1, 2)
    assert dim_order([two, two.contiguous()]) == (1, 0, 2), "that of the first, where no order is right for both"


@pytest.mark.parametrize(
    "leaf", [None, 3, torch.ones(3), torch.ones(()), torch.ones(4, 6)[:, ::2], torch.ones(3, 1).expand(3, 3)]
)
def test_what_has_no_order_has_none(leaf: Any) -> None:
    assert dim_order([leaf]) is None


@pytest.mark.parametrize("layout", [*SPARSE, *NESTED, "mkldnn", "quantized per channel"])
def test_what_has_no_strides_has_no_order(layout: str) -> None:
    assert dim_order([laid_out(layout, torch.eye(4))]) is None
