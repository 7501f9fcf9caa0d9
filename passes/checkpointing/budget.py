"""Parse a memory budget, or take it from the memory that the device has free."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

# Powers of 1024 and of 1000.
_UNITS = {
    f"{letter}{rest}": base**power
    for power, letter in enumerate("KMGT", 1)
    for base, rest in ((1024, "IB"), (1000, "B"))
}
_UNITS["B"] = 1
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")

MIN = "min"
FIT = "fit"
# The share of the free memory that "fit" leaves for kernels, fragmentation, batches and other processes.
_MARGIN = 0.1
# What training keeps for each parameter besides its activations: the gradient, and two moments as AdamW has them.
_COPIES = 3


def bytes_of(budget: float | str, peak: int) -> int | None:
    """Return the budget in bytes; None for "min", the lowest peak that can be reached.

    Args:
        budget: a share of the peak, above 0 and up to 1; a whole number of bytes above 1; a size with a unit, such as
            "12GiB" or "800 MB"; or "min". ("fit" is replaced by a number of bytes before: see `fit`.)
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


class NotFree(Exception):
    """The free memory isn't known, or is too little; the message is a clause."""


def is_fit(budget: float | str) -> bool:
    """Whether the budget is what the device has free."""
    return isinstance(budget, str) and budget.strip().lower() == FIT


def fit(device: torch.device, parameters: Iterable[nn.Parameter]) -> tuple[int, str]:
    """The bytes that a step's activations may take on a device, and a sentence that says how they were found.

    That is the free memory less a tenth, less the gradients and two moments of the trained parameters. They are always
    subtracted, because it can't be seen whether an optimizer has its state already.

    Raises:
        NotFree: nothing is left, or the system doesn't tell how much is free.
    """
    free = _free_bytes(device)
    if free is None:
        raise NotFree(f"this system doesn't tell how much memory {device} has free")
    kept = _COPIES * sum(one.nbytes for one in set(parameters) if one.requires_grad)
    found = int((1 - _MARGIN) * free) - kept
    how = (
        f"{shown(free)} of {device} are free, of which a tenth stays free, and {shown(kept)} are for the gradients and "
        "the optimizer's two moments"
    )
    if found <= 1:
        raise NotFree(how)
    return found, f"the budget is {shown(found)}: {how}"


def _free_bytes(device: torch.device) -> int | None:
    """The bytes that this process may still use on a device; None if the system doesn't tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # torch holds freed memory back for its next tensors.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    machine = Path("/proc/meminfo")
    if device.type != "cpu" or not machine.exists():
        return None
    available = re.search(r"MemAvailable:\s+(\d+) kB", machine.read_text())
    if available is None:
        return None
    # A container may have less than the machine.
    limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    text = limit.read_text().strip() if limit.exists() else "max"
    free = int(available[1]) * 1024
    return free if text == "max" else max(0, min(free, int(text) - int(used.read_text())))


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
        "memory_budget must be a share of the eager peak such as 0.5, a size such as '12GiB', 'min' or 'fit', "
        f"not {budget!r}"
    )


def shown(size: float) -> str:
    """Format a number of bytes with a binary unit (powers of 1024)."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
