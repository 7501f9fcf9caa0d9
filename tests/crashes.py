"""Kill builds of a tiny model at random moments: the folder must hold the old bundle or the new one, and be intact.

    python tests/crashes.py --runs 20 [--seed N]

Each build is a fork of this process, so that it starts at once, and has its own `--seed`. Every other build replaces the
folder by two renames, as on systems that can't exchange folders in one step. Half of the moments are in the short time in
which the folder is replaced. `make crash` runs this.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from optimize_export.manifest import damage_of
from optimizer.bundle import exchange, open_bundle
from optimizer.command import cli
from optimizer.command.user_code import import_own_packages

# The longest time in seconds from the start of the replacement to the kill.
PUBLISHING = 0.02
NET = """
import torch
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
example_inputs = (torch.randn(2, 3, 8, 8),)
"""


def build(
    folder: Path, seed: int, *, renames: bool = False, killed_after: float | None = None, publishing: bool = False
) -> bool:
    """Build the bundle in a fork, and kill the fork after that many seconds, if any; return whether it was killed.

    Args:
        publishing: the seconds begin when the folder is about to be replaced.
    """
    is_publishing, begins = os.pipe()
    child = os.fork()
    if child == 0:
        publish = exchange._publish

        def told(*arguments: Any) -> None:
            os.write(begins, b"x")
            publish(*arguments)

        exchange._publish = told
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if renames:
            exchange._exchange_in_one_step = lambda first, second: False
        options = ["--formats", "torchscript", "--no-bench", "--force", "--quiet", "--device", "cpu"]
        os._exit(cli.main([f"{folder}/net.py", f"--output={folder}/dist/bundle", f"--seed={seed}", *options]))
    os.close(begins)
    if publishing:
        os.read(is_publishing, 1)
    if killed_after is not None:
        time.sleep(killed_after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(is_publishing)
    if status and not os.WIFSIGNALED(status):
        sys.exit(f"The build with --seed {seed} failed:\n{(folder / 'log').read_text()}")
    return os.WIFSIGNALED(status)


def content(target: Path) -> int | None:
    """The seed of the bundle that a reader finds; None if there is none. Exit if the bundle isn't intact."""
    exchange.recover(target)
    if not target.exists():
        return None
    bundle = open_bundle(target)
    if damage := damage_of(bundle.path, bundle.manifest):
        sys.exit(f"The bundle is damaged: {damage}")
    return int(bundle.manifest["seed"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    draw, outcomes = random.Random(arguments.seed), Counter[str]()
    import_own_packages()
    with tempfile.TemporaryDirectory() as name:
        folder, target = Path(name), Path(name, "dist", "bundle")
        (folder / "net.py").write_text(NET)
        started = time.perf_counter()
        build(folder, 0)
        seconds = time.perf_counter() - started
        before = content(target)
        for run in range(1, arguments.runs + 1):
            publishing = run % 4 < 2
            # Otherwise more often near the end, when the folder is written.
            moment = draw.uniform(0, PUBLISHING) if publishing else draw.triangular(0, 1.05 * seconds, seconds)
            killed = build(folder, run, renames=run % 2 == 0, killed_after=moment, publishing=publishing)
            found = content(target)
            if found not in (before, run) or (not killed and found != run):
                sys.exit(f"run {run}: the folder holds the bundle of run {found}, not that of {before} or {run}.")
            outcomes["new" if found == run else "old"] += 1
            outcomes["killed"] += killed
            before = found
        build(folder, arguments.runs + 1)
        # A hidden folder without its lock file can't be told from a user's folder, so it stays.
        left = [path.name for path in target.parent.iterdir() if (path / exchange.LOCK).exists()]
        if content(target) != arguments.runs + 1 or left:
            sys.exit(f"The last build didn't succeed, or left {left}.")
    print(f"{outcomes['killed']} of {arguments.runs} builds were killed, from 0 to {seconds:.1f} s after their start.")
    print(
        f"Each time the folder held an intact bundle: {outcomes['old']} times the old one, {outcomes['new']} the new one."
    )


if __name__ == "__main__":
    main()
