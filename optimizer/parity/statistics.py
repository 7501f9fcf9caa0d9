"""Error statistics of one output at one call, for people to read. The verdict doesn't depend on them."""

from __future__ import annotations

import math
from typing import Any

import torch

from optimizer.parity.tensors import PIECE, wide

# Number of elements in the sample that estimates the percentile.
_SAMPLE = 1 << 16
# One in this many elements may exceed the 99.9th percentile.
_ONE_IN = 1000


def error_statistics(errors: torch.Tensor, value: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    """The statistics of a float output over the elements that are finite on both sides; empty where there are none.

    Args:
        errors: |value - target|, float64; all three have one shape.
        value, target: the outputs of the candidate and of the reference, of any float or complex dtype.
    """
    if errors.numel() == 0:
        return {}
    errors, value, target = errors.reshape(-1), value.reshape(-1), target.reshape(-1)
    return {
        "max_error": float(errors.max()),
        "mean_error": float(errors.mean()),
        "p999_error": percentile_999(errors),
        "cosine": cosine(value, target),
    }


def percentile_999(errors: torch.Tensor) -> float:
    """The 99.9th percentile of a float64 tensor of shape (elements,).

    It is the smallest value that at least 999 of 1000 elements don't exceed. The result is exact, and one of the
    elements. A sample suggests a bound that more than a thousandth of the elements exceed, so that only those are
    sorted. Where the sample misleads, more elements are sorted.
    """
    above = errors.numel() // _ONE_IN + 1
    sample = errors[:: -(-errors.numel() // _SAMPLE)]
    for share in (0.995, 0.95):
        bound = sample.kthvalue(max(1, int(share * sample.numel()))).values
        larger = errors[errors > bound]
        if larger.numel() >= above:
            return _largest_but(larger, above - 1)
        if int((errors >= bound).count_nonzero()) >= above:
            return float(bound)
    return _largest_but(errors, above - 1)


def _largest_but(values: torch.Tensor, count: int) -> float:
    """The largest value after leaving out the `count` largest."""
    return float(values.kthvalue(values.numel() - count).values)


def cosine(value: torch.Tensor, target: torch.Tensor) -> float:
    """The cosine of the angle between two tensors of shape (elements,), in float64; 1 if both are zero, 0 if one is."""
    scales = [max(_largest(piece) for piece in tensor.split(PIECE)) for tensor in (value, target)]
    if 0.0 in scales:
        return 1.0 if scales == [0.0, 0.0] else 0.0
    both = own = other = 0.0
    for pieces in zip(value.split(PIECE), target.split(PIECE), strict=True):
        # Without the scales, the squares of large numbers overflow and those of small numbers underflow.
        a, b = (wide(piece) / scale for piece, scale in zip(pieces, scales, strict=True))
        both += float(torch.vdot(a, b).real)
        own += float(torch.vdot(a, a).real)
        other += float(torch.vdot(b, b).real)
    return max(-1.0, min(1.0, both / math.sqrt(own * other)))


def _largest(piece: torch.Tensor) -> float:
    # Magnitudes of real numbers are exact in any dtype.
    return float((wide(piece) if piece.is_complex() else piece).abs().max())


def integer_agreement(value: torch.Tensor, own: torch.Tensor, ties: torch.Tensor) -> tuple[float | None, int]:
    """The share of equal elements, None where all are ties, and the number of ties, which are not compared.

    Args:
        value, own: the outputs of the candidate and of the original, integers or booleans of one shape.
        ties: bool, same shape, the elements that the original itself changes within its noise.
    """
    compared = own.numel() - int(ties.count_nonzero())
    equal = int(((value == own) & ~ties).count_nonzero())
    return equal / compared if compared else None, own.numel() - compared


def has_classes(name: str, value: torch.Tensor) -> bool:
    """Whether the last dim of an output holds one score per class.

    True for a float output of shape (rows, classes), and for one of shape (rows, positions, classes) whose name ends in
    "logits".
    """
    dims = (2, 3) if name.rpartition(".")[2].endswith("logits") else (2,)
    return value.is_floating_point() and value.dim() in dims and value.shape[-1] > 1


def top1_agreement(value: torch.Tensor, target: torch.Tensor, noise: float) -> tuple[float | None, int]:
    """The share of rows whose largest score is at the same class on both sides, and the number of undecided rows.

    A row is undecided, and not compared, where the two largest scores of the reference differ by no more than twice the
    noise, or where it has no largest score (NaN, several infinite scores). A candidate's row with NaN doesn't agree.

    Args:
        value, target: the outputs of the candidate and of the reference, shape (…, classes) each.
        noise: the error that rounding alone causes in a score.
    """
    classes = target.shape[-1]
    rows, decided, agreeing = target.numel() // classes, 0, 0
    step = max(1, PIECE // classes)
    for start in range(0, rows, step):
        mine, theirs = (wide(tensor.reshape(rows, classes)[start : start + step]) for tensor in (value, target))
        top = theirs.topk(2)
        clear = top.values[:, 0] - top.values[:, 1] > 2 * noise
        same = (mine.argmax(1) == top.indices[:, 0]) & ~mine.isnan().any(1)
        decided += int(clear.count_nonzero())
        agreeing += int((clear & same).count_nonzero())
    return agreeing / decided if decided else None, rows - decided
