"""This machine's processor, and how much of it this process may use."""

import os
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


def usable_cpus() -> int:
    """The number of CPUs that this process may use: in a container often fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
