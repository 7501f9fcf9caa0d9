"""Parse a memory budget."""

from __future__ import annotations

import math
import re

# Powers of 1024 and of 1000.
_UNITS = {
    f"{letter}{rest}": base**power
    for power, letter in enumerate("KMGT", 1)
    for base, rest in ((1024, "IB"), (1000, "B"))
}
_UNITS["B"] = 1
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")

MIN = "min"


def bytes_of(budget: float | str, peak: int) -> int | None:
    """Return the budget in bytes; None for "min", the lowest peak that can be reached.

    Args:
        budget: a share of the peak, above 0 and up to 1; a whole number of bytes above 1; a size with a unit, such as
            "12GiB" or "800 MB"; or "min".
        peak: the peak of the eager step, in bytes.

    Raises:
        ValueError: the budget is none of these.
    """
    if isinstance(budget, str):
        return _of_text(budget, peak)
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise ValueError(_wrong(budget))
    if 0 < budget <= 1:
        return max(1, int(budget * peak))
    if budget > 1 and math.isfinite(budget) and budget == int(budget):
        return int(budget)
    raise ValueError(_wrong(budget))


def is_share(budget: float | str) -> bool:
    """Whether a budget is a share of the eager peak."""
    return not isinstance(budget, str) and budget <= 1


def _of_text(text: str, peak: int) -> int | None:
    text = text.strip()
    if text.lower() == MIN:
        return None
    found = _SIZE.fullmatch(text)
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or not float(found[1]):
        raise ValueError(_wrong(text))
    return max(1, int(float(found[1]) * unit))


def _wrong(budget: object) -> str:
    return (
        f"memory_budget must be a share of the eager peak such as 0.5, a size such as '12GiB', or 'min', not {budget!r}"
    )


def shown(size: float) -> str:
    """Format a number of bytes with a binary unit (powers of 1024)."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
