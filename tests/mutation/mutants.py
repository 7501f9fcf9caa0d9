"""Remove each guard of the judge of a fold, one at a time, and show the test that fails without it.

    python tests/mutation/mutants.py --only passes/graph/layers.py --reached /tmp/reached.json

All work is done in copies of the project in a temporary folder. First the tests run once with a note at every guard.
This tells which guards refuse in which test: only these tests can detect that a guard is missing. Then each guard is
removed in turn, and its tests run, the fastest first, until one fails. Each run is a fork of a process that has
imported torch.

The exit code is 1 if a guard survives that `declared.py` doesn't name, or if `declared.py` names one that is killed or
doesn't exist any more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.table
from declared import DECLARED
from forks import Forks, Run
from guards import FILES, Guard, edited, guards_in, noting
from rich.console import Console
from rich.markup import escape

ROOT = Path(__file__).parents[2]
# The parts of the project that the tests of the judge need.
_COPIED = ("passes", "optimizer", "exporters", "benchmarks", "tests", "pyproject.toml")
# The tests that are closest to the judge.
_TESTS = (
    "tests/passes/graph/test_derived.py",
    "tests/passes/test_fold_conv_bias.py",
    "tests/passes/test_fold_conv_bn.py",
    "tests/passes/test_hard_cases.py",
    "tests/passes/test_unseen_branches.py",
)
_PYTEST = ("-q", "-p", "no:cacheprovider", "--timeout", "120")
# The prefixes of lines about failed tests.
_FAILED = ("FAILED ", "ERROR ")
# A run that takes longer than this, in seconds, counts as hung.
_LIMIT = 600
# The exit code of pytest if all tests were run, and some failed.
_TESTS_FAILED = 1
# The exit codes if pytest got no tests, or couldn't start.
_NOT_RUN = (4, 5, 70)


@dataclass(frozen=True)
class Verdict:
    """The result of the tests on a project without one guard.

    Attributes:
        guard: the removed guard.
        status: "killed" by a test, "timed out", "survived" all of its tests, or "unreached" if it refuses in no test.
        test: the first test that failed; empty if none did.
        declared: why the guard may survive; empty if it isn't declared.
        tests: the number of tests in which the guard refuses.
        seconds: how long they ran.
    """

    guard: Guard
    status: str
    test: str
    declared: str
    tests: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether a guard that isn't declared was killed, or a declared one wasn't."""
        return (self.status in ("killed", "timed out")) != bool(self.declared)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", metavar="FILE", action="append", help=f"of {', '.join(FILES)}; may be repeated")
    parser.add_argument(
        "--matching", metavar="TEXT", default="", help="only guards with this in their function or text"
    )
    parser.add_argument("--tests", metavar="PATH", nargs="+", default=_TESTS, help="other tests than those near")
    parser.add_argument(
        "--reached",
        type=Path,
        metavar="PATH",
        help="keep there which test makes which guard say no, and take it from there if it is there",
    )
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (2)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the verdicts there too")
    options = parser.parse_args(arguments)
    if unknown := set(options.only or ()) - set(FILES):
        parser.error(f"{', '.join(sorted(unknown))} is no file of the judge: choose from {', '.join(FILES)}")
    every = [guard for file in FILES for guard in guards_in(ROOT, file)]
    if gone := sorted(DECLARED.keys() - {guard.name for guard in every}):
        print("declared.py names guards that aren't there:", *gone, sep="\n  ", file=sys.stderr)
        return 1
    chosen = [guard for guard in every if guard.file in (options.only or FILES) and options.matching in guard.name]
    verdicts = judged(chosen, options.tests, options.jobs, options.reached, _progress)
    _show(verdicts)
    if options.json is not None:
        options.json.write_text(
            json.dumps([_as_json(verdict) for verdict in verdicts], indent=1) + "\n", encoding="utf-8"
        )
    return 0 if all(verdict.ok for verdict in verdicts) else 1


def judged(
    guards: Sequence[Guard], tests: Sequence[str], jobs: int, kept: Path | None, progress: Callable[[str], None]
) -> list[Verdict]:
    """The verdict on each guard.

    Args:
        guards: the guards to remove, one at a time.
        tests: files of tests, or tests, as pytest takes them.
        jobs: the number of runs at a time.
        kept: a file with the tests in which each guard refuses. If it exists, the tests don't run with notes again.
        progress: called with a line about each verdict.

    Raises:
        RuntimeError: the tests can't be run.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-"))
        trees: queue.SimpleQueue[Forks] = queue.SimpleQueue()
        for number in range(max(1, jobs)):
            trees.put(stack.enter_context(_forks_in(_copy_to(Path(folder, str(number))))))
        if kept is not None and kept.exists():
            reaching = json.loads(kept.read_text(encoding="utf-8"))
        else:
            forks = trees.get()
            reaching = _reaching(forks, guards, tests, jobs)
            trees.put(forks)
            if kept is not None:
                kept.write_text(json.dumps(reaching, indent=1) + "\n", encoding="utf-8")
        lock = threading.Lock()
        done: list[str] = []

        def one(number: int) -> Verdict:
            mine = trees.get()
            try:
                verdict = _without(mine, guards[number], reaching.get(guards[number].name, []))
            finally:
                trees.put(mine)
            with lock:
                done.append(verdict.guard.name)
                progress(f"{len(done)}/{len(guards)} {verdict.status}: {verdict.guard.name} {verdict.test}")
            return verdict

        with ThreadPoolExecutor(max(1, jobs)) as pool:
            return list(pool.map(one, range(len(guards))))


def _forks_in(tree: Path) -> Forks:
    # Write no bytecode: Python would take it for current after a second edit within a second that keeps the size.
    own = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
    paths = f"{tree}{os.pathsep}{tree / 'tests' / 'mutation'}"
    # Options of the surrounding pytest would change the output that is read.
    own |= {"PYTHONPATH": paths, "REACHED": str(tree / "notes"), "PYTEST_ADDOPTS": ""}
    return Forks(tree, {**os.environ, **own})


def _copy_to(tree: Path) -> Path:
    for name in _COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy2(ROOT / name, tree / name)
    return tree


def _reaching(forks: Forks, guards: Sequence[Guard], tests: Sequence[str], jobs: int) -> dict[str, list[str]]:
    """The tests in which each guard refuses, the fastest first, by the name of the guard."""
    tree = forks.folder
    numbered: dict[str, dict[int, Guard]] = defaultdict(dict)
    for number, guard in enumerate(guards):
        numbered[guard.file][number] = guard
    originals = {file: (tree / file).read_bytes() for file in numbered}
    for file, mine in numbered.items():
        (tree / file).write_bytes(noting(originals[file], mine))
    notes = tree / "notes"
    notes.mkdir()
    spread = ["-n", str(jobs), "--dist", "worksteal"] if jobs > 1 and len(tests) > 1 else []
    run = forks.run(*_PYTEST, "-p", "reached", "--tb", "no", *spread, *tests)
    if run.code not in (0, _TESTS_FAILED):
        unread = "\n".join(test for test, _ in _failed_in(run))
        raise RuntimeError(f"the tests can't be run:\n{unread or run.output[-2000:]}")
    for file, original in originals.items():
        (tree / file).write_bytes(original)
    records: dict[str, dict[str, Any]] = {}
    for file in notes.iterdir():
        records |= json.loads(file.read_text(encoding="utf-8"))
    failed = [test for test, record in records.items() if not record["passed"]]
    red = _red(forks, failed) if failed else set()
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for test in records.keys() - red:
        for number in records[test].get("guards", []):
            found[guards[number].name][test] = records[test]["seconds"]
    return {name: sorted(seconds, key=lambda test: seconds[test]) for name, seconds in found.items()}


def _red(forks: Forks, tests: Sequence[str]) -> set[str]:
    """The tests that fail with all guards in place.

    A test that fails only because of the notes, as it compiles the noted code, is as good as any other.
    """
    run = forks.run(*_PYTEST, "--no-header", "--tb", "no", *tests)
    red = {test for test, _ in _failed_in(run)}
    if run.code != 0 and not red:
        raise RuntimeError(f"the tests can't be run:\n{run.output[-2000:]}")
    for test in sorted(red):
        _progress(f"left out, as it fails with all guards in place: {test}")
    return red


def _without(forks: Forks, guard: Guard, tests: Sequence[str]) -> Verdict:
    """Run the guard's tests in a tree without the guard."""
    declared = DECLARED.get(guard.name, "")
    if not tests:
        return Verdict(guard, "unreached", "", declared, 0, 0.0)
    path = forks.folder / guard.file
    original = path.read_bytes()
    begun = time.monotonic()
    try:
        path.write_bytes(edited(original, guard.edits))
        status, test = _status(forks.run(*_PYTEST, "-x", "--no-header", "--tb", "no", *tests, limit=_LIMIT))
    finally:
        path.write_bytes(original)
    return Verdict(guard, status, test, declared, len(tests), round(time.monotonic() - begun, 1))


def _status(run: Run) -> tuple[str, str]:
    """The status, and the first test that failed."""
    if run.code is None:
        return "timed out", ""
    if run.code == 0:
        return "survived", ""
    failed = _failed_in(run)
    if failed:
        test, why = failed[0]
        return ("timed out" if "Timeout" in why else "killed"), test
    if run.code in _NOT_RUN:
        raise RuntimeError(f"the tests can't be run:\n{run.output[-2000:]}")
    # The process died. Its last line of output says how.
    return "killed", (run.output.strip().splitlines() or [f"exit code {run.code}"])[-1]


def _failed_in(run: Run) -> list[tuple[str, str]]:
    """Each test that failed, or file that couldn't be imported, and why."""
    lines = [line.split(" ", 1)[1] for line in run.output.splitlines() if line.startswith(_FAILED)]
    return [(test, why) for test, _, why in (line.partition(" - ") for line in lines)]


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(verdicts: Sequence[Verdict]) -> None:
    """Print the table."""
    counts: dict[str, int] = defaultdict(int)
    table = rich.table.Table(title="Guards of the judge of a fold", title_justify="left", caption_justify="left")
    for heading in ("guard", "function", "what it says, or its code", "without it", "killed by, or why it may survive"):
        table.add_column(heading, overflow="fold")
    for verdict in verdicts:
        guard = verdict.guard
        counts[f"{verdict.status}{' (declared)' if verdict.declared else ''}"] += 1
        status = verdict.status if verdict.ok else f"{verdict.status} !"
        cells = (f"{guard.file}:{guard.line}", guard.function, guard.text, status, verdict.test or verdict.declared)
        table.add_row(*(escape(cell) for cell in cells))
    table.caption = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    console = Console()
    # A file or a pipe gets a large width, because nobody can widen it later.
    Console(width=None if console.is_terminal else 240).print(table)


def _as_json(verdict: Verdict) -> dict[str, object]:
    guard = verdict.guard
    place = {"file": guard.file, "line": guard.line, "function": guard.function, "text": guard.text}
    return {
        **place,
        **{name: getattr(verdict, name) for name in ("status", "test", "declared", "tests", "seconds", "ok")},
    }


if __name__ == "__main__":
    sys.exit(main())
