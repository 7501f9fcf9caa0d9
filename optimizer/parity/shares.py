"""The error of a candidate as a share of the allowed error, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optimizer.parity.verdict import FACTOR, SLICE_FACTOR


def allowed_share(parity: Mapping[str, Any]) -> float | None:
    """The largest error as a share of the allowed error; None if no output was judged by its noise.

    An output counts with the larger share of two: that of the whole output, and that of its worst channel, column or
    band.

    Args:
        parity: a `ParityReport` as JSON.
    """
    factor = parity.get("factor", FACTOR)
    judged = [each for each in parity.get("outputs", ()) if each.get("judged", True) and not each.get("by_user")]
    return max((_share(output, factor) for output in judged), default=None)


def _share(output: Mapping[str, Any], factor: float) -> float:
    whole, part = (float(output.get(name) or 0) for name in ("ratio", "slice_ratio"))
    return max(whole / factor, part / (factor / FACTOR * SLICE_FACTOR))
