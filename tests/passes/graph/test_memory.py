"""Tensors without strides: their kind, the location of their values, and comparison."""

from __future__ import annotations

import math

import pytest
import torch
from laid_out import LAYOUTS, NESTED, SPARSE, laid_out
from torch import nn

from passes.graph.layouts import has_strides, kind_of
from passes.graph.memory import parts_of, same_values, storages_of

DENSE = torch.tensor([[1.0, 0.0, 2.0, 0.0], [0.0, 0.5, 0.0, 0.0], [0.0, 0.0, 3.0, 0.0], [1.0, 0.0, 0.0, 4.0]])
KINDS = {**dict.fromkeys(SPARSE, "sparse"), **dict.fromkeys(NESTED, "nested"), "mkldnn": "in mkldnn's own layout"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_tensor_without_strides_is(layout: str) -> None:
    tensor = laid_out(layout, DENSE)
    assert kind_of(tensor) == KINDS.get(layout)
    assert has_strides(tensor) is (layout in ("quantized", "empty"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_the_same_only_to_the_bit(layout: str) -> None:
    mine, other = laid_out(layout, DENSE), laid_out(layout, DENSE.clone())
    assert same_values(mine, other)
    assert same_values(mine, mine.clone())
    assert not same_values(mine, DENSE)
    if layout != "empty":
        assert not same_values(mine, laid_out(layout, DENSE + 0.1 * (DENSE == 4)))
        assert not same_values(mine, laid_out(layout, DENSE[:2]))
    if layout in SPARSE:
        assert not same_values(mine, laid_out(layout, DENSE.t().contiguous()))


@pytest.mark.parametrize("layout", [*SPARSE, *NESTED, "mkldnn"])
def test_a_nan_is_the_same_as_a_nan(layout: str) -> None:
    with_nan = DENSE.where(DENSE != 4, math.nan)
    assert same_values(laid_out(layout, with_nan), laid_out(layout, with_nan.clone()))
    assert not same_values(laid_out(layout, with_nan), laid_out(layout, DENSE))


def test_values_of_other_dtypes_and_those_that_arent_there() -> None:
    assert not same_values(DENSE, DENSE.double())
    assert same_values(DENSE.to("meta"), torch.empty(4, 4, device="meta"))
    assert not same_values(DENSE.to("meta"), torch.empty(4, 3, device="meta"))
    assert same_values(DENSE.to(torch.complex64) * math.nan, DENSE.to(torch.complex64) * math.nan)


@pytest.mark.parametrize("layout", [*SPARSE, *NESTED])
def test_the_parts_lie_in_the_tensors_own_memory(layout: str) -> None:
    tensor = laid_out(layout, DENSE)
    parts_of(tensor)[-1].mul_(2)
    assert not same_values(tensor, laid_out(layout, DENSE))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_part_of_a_tensor_has_its_storage(layout: str) -> None:
    tensor = laid_out(layout, DENSE)
    wanted = [part.untyped_storage()._cdata for part in parts_of(tensor)]
    assert list(storages_of(tensor)) == ([] if layout == "mkldnn" else wanted)


def test_what_has_no_values_has_no_storage() -> None:
    assert storages_of(torch.zeros(3, device="meta")) == ()
    assert storages_of(nn.UninitializedParameter()) == ()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", [torch.complex32, torch.float8_e4m3fn, torch.uint16])
def test_values_of_dtypes_for_which_torch_lacks_functions(dtype: torch.dtype) -> None:
    ones, zeros = (torch.full((8,), byte, dtype=torch.uint8).view(dtype) for byte in (1, 0))
    assert same_values(ones, ones.clone())
    assert not same_values(ones, zeros)
