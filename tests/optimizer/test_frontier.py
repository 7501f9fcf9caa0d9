"""The pairs of error and size that decide every tolerance, compared with their definition."""

from __future__ import annotations

import pytest
import torch

from optimizer.parity import comparison
from optimizer.parity.comparison import frontier

KINDS = ("any", "in proportion", "often equal", "no error", "falling")


def pairs(kind: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Errors and sizes, both float64 of shape (count // 20, 20)."""
    generator = torch.Generator().manual_seed(7)
    sizes = torch.randn(count, generator=generator, dtype=torch.float64).abs()
    errors = torch.rand(count, generator=generator, dtype=torch.float64)
    if kind == "in proportion":
        errors = errors * sizes
    elif kind == "often equal":
        sizes, errors = sizes.mul(4).round(), errors.mul(4).add(sizes).mul(2).round()
    elif kind == "no error":
        errors = torch.zeros_like(errors)
    elif kind == "falling":
        errors = (-sizes).exp()
    return errors.reshape(-1, 20), sizes.reshape(-1, 20)


def by_definition(points: set[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The points that no other point dominates, by an error at least as large at a size that is no larger."""
    kept = [
        (error, size)
        for error, size in points
        if not any((e, s) != (error, size) and e >= error and s <= size for e, s in points)
    ]
    return tuple(sorted(kept, key=lambda point: point[1]))


@pytest.mark.parametrize("at_once", [8, 50, 1 << 16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_frontier_holds_the_pairs_that_no_other_dominates(
    kind: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "_SORTED_AT_ONCE", at_once)
    errors, sizes = pairs(kind, 1000)
    expected = by_definition(set(zip(errors.flatten().tolist(), sizes.flatten().tolist(), strict=True)))
    assert len(expected) == 1 if kind in ("no error", "falling") else len(expected) > 2

    assert frontier(errors, sizes, ()) == expected
    assert frontier(errors[20:], sizes[20:], frontier(errors[:20], sizes[:20], ())) == expected


def test_a_long_frontier_refuses_what_a_pair_refuses_and_little_more() -> None:
    generator = torch.Generator().manual_seed(11)
    sizes = torch.rand(20_000, generator=generator, dtype=torch.float64).mul(40).sub(30).exp2()
    errors = sizes * 1e-3 * torch.rand(20_000, generator=generator, dtype=torch.float64).mul(0.2).add(0.8)
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


def test_the_frontier_of_nothing_keeps_the_known_pairs() -> None:
    none = torch.empty(0, dtype=torch.float64)
    assert frontier(none, none, ()) == ()
    assert frontier(none, none, [(2.0, 1.0)]) == ((2.0, 1.0),)
