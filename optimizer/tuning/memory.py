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
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self.exact = False
            self.before = self._highest()
        else:
            self.exact = True
            self.before = status("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        self.bytes = (status("VmHWM") if self.exact else self._highest()) - self.before

    @staticmethod
    def _highest() -> int:
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return highest if sys.platform == "darwin" else highest * 1024


def status(field: str) -> int:
    """A size in bytes from the status of this process, such as "VmRSS"; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def available_memory() -> int | None:
    """The memory that new programs can use without swapping, in bytes; None where the system doesn't tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
