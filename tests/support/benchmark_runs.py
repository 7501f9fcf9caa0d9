"""Run the programs in benchmarks/ as a user runs them."""

import importlib
import json
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


def written(name, folder, *options, timeout=240):
    """Run one program, which must succeed, and return its figures, its tables as Markdown, and the process."""
    # It makes folders that don't exist.
    paths = {"json": folder / "new" / f"{name}.json", "markdown": folder / f"{name}.md"}
    process = run_benchmark(name, *options, *(f"--{kind}={path}" for kind, path in paths.items()), timeout=timeout)
    assert process.returncode == 0, process.stderr
    return json.loads(paths["json"].read_text()), paths["markdown"].read_text(), process


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
