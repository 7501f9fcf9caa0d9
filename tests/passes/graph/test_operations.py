"""What is read from torch's schemas is what its operations do."""

import pytest
import torch
from torch import Tensor

from passes.graph.operations import draws_numbers, may_give_memory, returns_tensor, schemas


@pytest.mark.parametrize("name", ["relu", "exp", "add", "arange", "index_select", "softmax", "std", "linear", "clone"])
def test_operations_that_return_a_tensor(name: str) -> None:
    assert returns_tensor(name)


@pytest.mark.parametrize(
    "name", ["size", "item", "max", "topk", "split", "where", "nonzero", "type", "append", "nothing_of_that_name", ""]
)
def test_operations_that_may_return_something_else(name: str) -> None:
    assert not returns_tensor(name)


@pytest.mark.parametrize("name", ["relu_", "add_", "copy_", "set_", "resize_", "append", "update", "__class__", "no"])
def test_what_writes_or_is_unknown_has_no_schemas(name: str) -> None:
    assert schemas(name) is None


@pytest.mark.parametrize("name", ["rand", "rand_like", "bernoulli", "dropout", "multinomial", "normal", "randperm"])
def test_draws(name: str) -> None:
    assert draws_numbers(name)
    assert not draws_numbers("relu")


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("view", (6,)),
        ("reshape", (6,)),
        ("contiguous", ()),
        ("flatten", ()),
        ("expand_as", (torch.ones(2, 3),)),
        ("type_as", (torch.ones(1),)),
        ("to", (torch.float32,)),
        ("squeeze", ()),
        ("chunk", (1,)),
        ("broadcast_to", ((2, 3),)),
        ("atleast_3d", ()),
        ("movedim", (0, 1)),
    ],
)
def test_operations_that_give_the_memory_that_they_are_given(name: str, args: tuple[object, ...]) -> None:
    given = torch.randn(2, 3)
    result = getattr(torch, name, None) or getattr(Tensor, name)
    value = getattr(given, name)(*args) if hasattr(given, name) else result(given, *args)
    first = value if isinstance(value, Tensor) else value[0]
    assert first.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    assert may_give_memory(name)


@pytest.mark.parametrize("name", ["relu", "exp", "add", "mul", "clone", "sum", "cumsum", "index_select", "bmm"])
def test_operations_with_kernels_of_their_own_make_memory(name: str) -> None:
    assert not may_give_memory(name)
