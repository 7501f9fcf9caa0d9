"""What a person looks at beside the verdict: the usual figures of one output at one call.

Nothing is judged by these. The largest error and the root mean square, which are, are gathered in `optimizer.difference`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from optimizer.difference import wide

# Elements that are looked at in one go where a copy in float64 is needed.
_PIECE = 1 << 20
# So many elements tell about which value is the percentile.
_LOOKED_AT_FIRST = 1 << 16
# The largest error of all but one in so many elements is the 99.9th percentile.
_ONE_IN = 1000


def errors_between(errors: torch.Tensor, value: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    """The figures of a float output over the elements that are finite on both sides; none where there are none.

    Args:
        errors: |value - target|, float64; all three have one shape.
        value, target: what the candidate and the reference gave, of any float or complex dtype.
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
    """The 99.9th percentile of a float64 tensor of shape (elements,): the smallest of its values that at least 999 of 1000
    elements don't exceed.

    It is exact: one of the elements. Few of them show a bound that more than a thousandth of all stands above, and only
    what does is sorted; where the few mislead, more is.
    """
    above = errors.numel() // _ONE_IN + 1
    few = errors[:: -(-errors.numel() // _LOOKED_AT_FIRST)]
    for share in (0.995, 0.95):
        bound = few.kthvalue(max(1, int(share * few.numel()))).values
        larger = errors[errors > bound]
        if larger.numel() >= above:
            return _largest_but(larger, above - 1)
        if int((errors >= bound).sum()) >= above:
            return float(bound)
    return _largest_but(errors, above - 1)


def _largest_but(values: torch.Tensor, count: int) -> float:
    """The largest of the values but for so many."""
    return float(values.kthvalue(values.numel() - count).values)


def cosine(value: torch.Tensor, target: torch.Tensor) -> float:
    """The cosine of the angle between two tensors of shape (elements,), in float64; 1 where both are zero, 0 where one is."""
    scales = [max(float(wide(piece).abs().max()) for piece in tensor.split(_PIECE)) for tensor in (value, target)]
    if 0.0 in scales:
        return 1.0 if scales == [0.0, 0.0] else 0.0
    both = own = other = 0.0
    for pieces in zip(value.split(_PIECE), target.split(_PIECE), strict=True):
        # As they are, the squares of large numbers overflow and those of small ones vanish.
        a, b = (wide(piece) / scale for piece, scale in zip(pieces, scales, strict=True))
        both += float(torch.vdot(a, b).real)
        own += float(torch.vdot(a, a).real)
        other += float(torch.vdot(b, b).real)
    return max(-1.0, min(1.0, both / math.sqrt(own * other)))


def agreement_of_integers(value: torch.Tensor, own: torch.Tensor, ties: torch.Tensor) -> tuple[float | None, int]:
    """The share of elements that are equal, and how many are ties of the original and left out."""
    compared = own.numel() - int(ties.sum())
    equal = int(((value == own) & ~ties).sum())
    return equal / compared if compared else None, own.numel() - compared


def has_classes(name: str, value: torch.Tensor) -> bool:
    """Whether an output is one score per class along its last dim: a float output of shape (rows, classes), or of shape
    (rows, positions, classes) that is called logits."""
    dims = (2, 3) if name.rpartition(".")[2].endswith("logits") else (2,)
    return value.is_floating_point() and value.dim() in dims and value.shape[-1] > 1


def top1_agreement(value: torch.Tensor, target: torch.Tensor, noise: float) -> tuple[float | None, int]:
    """The share of rows in which both have the largest score at the same class, and how many rows were left out.

    Left out is a row whose two largest scores are no further apart in the reference than both may be off by, and one that
    has no largest score (NaN, several infinite ones). A row of the candidate with NaN doesn't agree.

    Args:
        value, target: shape (…, classes) each.
        noise: what rounding alone does to a score.
    """
    classes = target.shape[-1]
    rows, decided, agreeing = target.numel() // classes, 0, 0
    step = max(1, _PIECE // classes)
    for start in range(0, rows, step):
        mine, theirs = (wide(tensor.reshape(rows, classes)[start : start + step]) for tensor in (value, target))
        top = theirs.topk(2)
        clear = top.values[:, 0] - top.values[:, 1] > 2 * noise
        same = (mine.argmax(1) == top.indices[:, 0]) & ~mine.isnan().any(1)
        decided += int(clear.sum())
        agreeing += int((clear & same).sum())
    return agreeing / decided if decided else None, rows - decided
