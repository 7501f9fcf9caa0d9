"""The pairs of error and size that decide every tolerance, compared with their definition."""

import pytest
import torch

from optimizer.parity.comparison import frontier


def drawn(count, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(count, generator=generator, dtype=torch.float64) for _ in range(2))


def by_definition(points):
    """The points that no other point dominates, by an error at least as large at a size that is no larger."""
    kept = [
        (error, size)
        for error, size in points
        if not any((e, s) != (error, size) and e >= error and s <= size for e, s in points)
    ]
    return tuple(sorted(kept, key=lambda point: point[1]))


@pytest.mark.parametrize("kind", ["in proportion", "often equal", "no error"])
def test_the_frontier_holds_the_pairs_that_no_other_dominates(kind):
    errors, sizes = drawn(600)
    if kind == "in proportion":
        errors = errors * sizes
    elif kind == "often equal":
        sizes, errors = sizes.mul(9).round(), errors.mul(4).add(sizes * 5).mul(2).round()
    else:
        errors = torch.zeros_like(errors)
    expected = by_definition(set(zip(errors.tolist(), sizes.tolist(), strict=True)))
    assert frontier(errors.reshape(-1, 20), sizes.reshape(-1, 20), ()) == expected
    assert frontier(errors[20:], sizes[20:], frontier(errors[:20], sizes[:20], ())) == expected
    assert frontier(errors[:0], sizes[:0], expected) == expected


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
