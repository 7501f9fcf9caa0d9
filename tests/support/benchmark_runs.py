"""The programs in benchmarks/, run as a user runs them."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run_benchmark(name, *options, timeout=240):
    """The finished process of one program, with its output as text; `timeout` in seconds."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
