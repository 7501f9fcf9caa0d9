"""The peak memory of a block of code, in this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from optimizer.model import release_memory


class PeakMemory:
    """Measures how far the resident memory of this process rises above its level at the start of the block.

    Attributes:
        before: the resident memory at the start of the block, in bytes; its highest value so far if not `exact`.
        bytes: the rise to the peak, in bytes; set at the end of the block.
        exact: False if the system can't reset its high-water mark. Then a rise that stays below an earlier peak isn't
            seen.
    """

    before: int
    bytes: int
    exact: bool

    def __enter__(self) -> PeakMemory:
        # Otherwise the allocator would reuse freed memory that it kept, and this use wouldn't be seen.
        release_memory()
        before = status("VmRSS") if _reset_peak() else None
        self.exact = before is not None
        self.before = self._highest() if before is None else before
        return self

    def __exit__(self, *error: object) -> None:
        peak = status("VmHWM") if self.exact else None
        self.exact = peak is not None
        # The kernel's counters lag by some pages, and under memory pressure it takes pages away: the peak that it tells
        # can be below the level that it told before.
        self.bytes = max(0, (self._highest() if peak is None else peak) - self.before)

    @staticmethod
    def _highest() -> int:
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return highest if sys.platform == "darwin" else highest * 1024


def _reset_peak() -> bool:
    """Set the high-water mark of this process to its current memory; False where the system can't."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def status(field: str) -> int | None:
    """A size in bytes from the status of this process, such as "VmRSS"; None where the system doesn't tell."""
    return _size_in(Path("/proc/self/status"), field)


def available_memory() -> int | None:
    """The memory that new programs can use without swapping, in bytes; None where the system doesn't tell."""
    return _size_in(Path("/proc/meminfo"), "MemAvailable")


def _size_in(path: Path, field: str) -> int | None:
    try:
        # The name of the process stands there too, in any bytes.
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)
