"""The name of this machine's processor."""

import platform
from pathlib import Path


def processor() -> str:
    """The name of the processor, such as "AMD EPYC 7B13"; the architecture where the system doesn't tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
