"""Facts about torch's operations that are read from their schemas."""

import pytest

from passes.graph.effects import draws_numbers, schemas


@pytest.mark.parametrize("name", ["relu_", "add_", "copy_", "set_", "resize_", "append", "update", "__class__", "no"])
def test_what_writes_or_is_unknown_has_no_schemas(name: str) -> None:
    assert schemas(name) is None


@pytest.mark.parametrize("name", ["rand", "rand_like", "bernoulli", "dropout", "multinomial", "normal", "randperm"])
def test_draws(name: str) -> None:
    assert draws_numbers(name)
    assert not draws_numbers("relu")
