"""Run the programs in benchmarks/ as a user runs them."""

import importlib
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from exporters.isolation import torchscript_allowed

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run_benchmark(name, *options, timeout=240):
    """Run one program, and return its finished process with the output as text; `timeout` is in seconds."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@contextmanager
def imported(name):
    """Import one program as a module."""
    # The programs import each other by their plain names, which other modules may have, too.
    before = dict(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        # With torch.fx's `fuse`, torch imports TorchScript modules of its own.
        with torchscript_allowed():
            module = importlib.import_module(name)
        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))
        for other in set(sys.modules) - set(before):
            if Path(getattr(sys.modules[other], "__file__", None) or "/").parent == BENCHMARKS:
                del sys.modules[other]
