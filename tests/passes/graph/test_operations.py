"""What is read from torch's schemas is what its operations do."""

import pytest

from passes.graph.operations import draws_numbers, returns_tensor, schemas


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
