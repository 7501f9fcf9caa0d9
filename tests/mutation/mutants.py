"""Remove each guard of the judge of a fold, one at a time, and show the test that fails without it.

    python tests/mutation/mutants.py --only passes/graph/layers.py

All work is done in copies of the project in a temporary folder. First the tests run once under coverage, which tells
which tests run which lines: only a test that runs the line of a guard can detect that it is missing. Then each guard is
removed in turn, and its tests run until one fails.

The exit code is 1 if a guard survives.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from coverage import CoverageData
from guards import FILES, Guard, guards_in, without

ROOT = Path(__file__).parents[2]
# The parts of the project that the tests of the judge need.
_COPIED = ("optimize_export", "passes", "optimizer", "exporters", "benchmarks", "examples", "tests", "pyproject.toml")
# The tests that are closest to the judge.
_TESTS = (
    "tests/passes/graph/test_derived.py",
    "tests/passes/test_fold_conv_bias.py",
    "tests/passes/test_fold_conv_bn.py",
    "tests/passes/test_hard_cases.py",
    "tests/passes/test_unseen_branches.py",
)
# A run that takes longer than this, in seconds, counts as hung.
_LIMIT = 600


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", metavar="FILE", action="append", choices=FILES, help=f"of {', '.join(FILES)}")
    parser.add_argument("--matching", metavar="TEXT", default="", help="only guards with this in their name")
    parser.add_argument("--tests", metavar="PATH", nargs="+", default=_TESTS, help="other tests than those near")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (2)")
    options = parser.parse_args(arguments)
    chosen = [guard for file in options.only or FILES for guard in guards_in(ROOT, file)]
    chosen = [guard for guard in chosen if options.matching in guard.name]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(max(1, options.jobs)):
            trees.put(_copy_to(Path(folder, str(number))))
        first = trees.get()
        reaching = tests_by_guard(first, chosen, options.tests)
        trees.put(first)

        def verdict(guard: Guard) -> str:
            tree = trees.get()
            try:
                return _verdict(tree, guard, reaching[guard])
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(max(1, options.jobs)) as pool:
            verdicts = []
            for guard, said in zip(chosen, pool.map(verdict, chosen), strict=True):
                print(f"{guard.file}:{guard.line}: {guard.function}: {guard.text}: {said}", flush=True)
                verdicts.append(said.partition(" ")[0])
    print(", ".join(f"{count} {status}" for status, count in sorted(Counter(verdicts).items())))
    return 0 if set(verdicts) <= {"killed", "hung"} else 1


def tests_by_guard(tree: Path, guards: Sequence[Guard], tests: Sequence[str]) -> dict[Guard, list[str]]:
    """The tests that run the line at which each guard refuses."""
    code, output = pytest_in(tree, "--cov=passes", "--cov-context=test", "--cov-report=", *tests)
    if code:
        raise RuntimeError(f"the tests can't be run, or fail with all guards in place:\n{output[-2000:]}")
    data = CoverageData(str(tree / ".coverage"))
    data.read()
    lines = {file: data.contexts_by_lineno(str(tree / file)) for file in {guard.file for guard in guards}}
    return {
        guard: sorted({each.partition("|")[0] for each in lines[guard.file].get(guard.refuses_at, ()) if each})
        for guard in guards
    }


def _verdict(tree: Path, guard: Guard, tests: Sequence[str]) -> str:
    """What the tests say of the project without a guard."""
    if not tests:
        return "unreached"
    path = tree / guard.file
    original = path.read_bytes()
    try:
        path.write_bytes(without(original, guard))
        return status_of(*pytest_in(tree, "-x", "--tb=no", *tests))
    finally:
        path.write_bytes(original)


def status_of(code: int | None, output: str) -> str:
    """The status of a guard after a run of its tests without it, and the first test that failed."""
    if code is None:
        return "hung"
    if code == 0:
        return "survived"
    failed = [line.split(" ", 1)[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if failed:
        test, _, why = failed[0].partition(" - ")
        return f"{'hung in' if 'Timeout' in why else 'killed by'} {test}"
    # pytest got no tests, or couldn't start.
    if code in (4, 5):
        raise RuntimeError(f"the tests can't be run:\n{output[-2000:]}")
    return f"killed by exit code {code}"


def pytest_in(tree: Path, *arguments: str) -> tuple[int | None, str]:
    """The exit code, None if the run hung, and the output."""
    # Write no bytecode: Python would take it for current after a second edit within a second that keeps the size.
    own = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "1000", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=120", *arguments]
    environment = {**os.environ, **own, "PYTHONPATH": str(tree)}
    limit = _LIMIT if "-x" in arguments else None
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout


def _copy_to(tree: Path) -> Path:
    for name in _COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy2(ROOT / name, tree / name)
    return tree


if __name__ == "__main__":
    sys.exit(main())
