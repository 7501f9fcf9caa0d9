"""The pairs of error and size that decide every tolerance."""

import pytest
import torch

from optimizer.parity.comparison import frontier


def drawn(count, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(count, generator=generator, dtype=torch.float64) for _ in range(2))


@pytest.mark.parametrize("errors", [(2.0, 1.0, 3.0), (0.0, 0.0, 0.0)])
def test_a_pair_is_dropped_where_one_of_smaller_size_has_its_error(errors):
    sizes = torch.tensor([0.5, 2.0, 4.0], dtype=torch.float64)
    expected = tuple((error, size) for error, size in ((errors[0], 0.5), (errors[2], 4.0)) if error or size == 0.5)
    assert frontier(torch.tensor(errors, dtype=torch.float64).reshape(1, 3), sizes.reshape(1, 3), ()) == expected
    assert frontier(torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.float64), expected) == expected


def test_a_long_frontier_refuses_what_a_pair_refuses_and_little_more():
    sizes, errors = drawn(20_000, seed=11)
    sizes = sizes.mul(40).sub(30).exp2()
    errors = sizes * 1e-3 * errors.mul(0.2).add(0.8)
    sizes[0], errors[0] = 0, 1e-15
    kept = ()
    for some in torch.arange(20_000).chunk(7):
        kept = frontier(errors[some], sizes[some], kept)
    assert 100 < len(kept) <= 256
    at_once = frontier(errors, sizes, ())
    for rtol in (5e-4, 9e-4, 1e-3, 1.2e-3):
        for atol in (0.0, 1e-15, 1e-9, 1e-6, 1e-3):
            within = bool((errors <= atol + rtol * sizes).all())
            wider = bool((errors <= atol + rtol / 1.2 * sizes).all())
            for points in (kept, at_once):
                allowed = all(error <= atol + rtol * size for error, size in points)
                assert within or not allowed
                assert allowed or not wider
