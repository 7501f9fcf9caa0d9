"""Write folders with `optimizer.bundle.exchange`, and kill the writer before each of its system operations.

    python exchange_steps.py FOLDER

Run this as a separate program, because it forks.
"""

import os
import signal
import sys
from pathlib import Path

from optimizer.bundle import exchange

FILES = {"a.bin": 3000, "below/b.bin": 10, "manifest": 5}
# What Python's audit hooks report before it is done. The exchange itself goes through ctypes.
STEPS = {
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "open",
    "fcntl.flock",
    "ctypes.dlsym",
    "os.listdir",
    "os.scandir",
}


def write(folder: Path, text: str) -> None:
    for name, size in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text * size, encoding="ascii")


def content(folder: Path) -> str | None:
    """The letter that fills a complete folder; None if there is no folder. Raises for half a folder or a mix."""
    if not os.path.lexists(folder):
        return None
    found = {path.relative_to(folder).as_posix(): path.read_text(encoding="ascii") for path in folder.rglob("*.*")}
    found["manifest"] = (folder / "manifest").read_text(encoding="ascii")
    letters = set("".join(found.values()))
    if found.keys() != FILES.keys() or len(letters) != 1:
        raise AssertionError(f"a mix of {letters} in {sorted(found)}")
    letter = letters.pop()
    if any(found[name] != letter * size for name, size in FILES.items()):
        raise AssertionError("half of a folder")
    return letter


def publish(target: Path, letter: str) -> None:
    with exchange.replacement(target, content) as folder:
        write(folder, letter)


def killed_before_step(target: Path, step: int) -> bool:
    """Replace `target` in a child, and kill the child before that step. Returns False if it has fewer steps."""
    child = os.fork()
    if child == 0:
        seen = 0

        def count(event: str, _: object) -> None:
            nonlocal seen
            if event in STEPS:
                seen += 1
                if seen == step:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        publish(target, "n")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status and not os.WIFSIGNALED(status):
        raise AssertionError(f"the child failed: {status}")
    return os.WIFSIGNALED(status)


def every_step(parent: Path, before: str | None) -> tuple[int, set[str | None], int]:
    """Kill at each step. Returns the number of steps, the contents afterwards, and the number of recoveries needed."""
    outcomes: set[str | None] = set()
    step = recoveries = 0
    going_on = True
    while going_on:
        step += 1
        target = parent / f"t{step}" / "made" / "target"
        target.parent.mkdir(parents=True) if before else target.parent.parent.mkdir()
        if before:
            publish(target, before)
        going_on = killed_before_step(target, step)
        recoveries += before is not None and not os.path.lexists(target)
        exchange.recover(target)
        outcomes.add(content(target))
        publish(target, "z")
        if content(target) != "z":
            raise AssertionError("the next writer didn't succeed")
        # A folder without its lock file can't be told from a user's folder, so it stays.
        if left := [path for path in target.parent.iterdir() if (path / exchange.LOCK).exists()]:
            raise AssertionError(f"left over: {left}")
    return step, outcomes, recoveries


def many_writers(parent: Path) -> None:
    """Replace one folder in eight processes, ten times each."""
    target = parent / "target"
    publish(target, "o")
    children = []
    for writer in range(8):
        child = os.fork()
        if child == 0:
            for _ in range(10):
                publish(target, "abcdefgh"[writer])
            os._exit(0)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    if failed or content(target) not in tuple("abcdefgh"):
        raise AssertionError(f"{len(failed)} writers failed; the target is {content(target)}")
    if left := [path.name for path in parent.iterdir() if path != target]:
        raise AssertionError(f"left over: {left}")


def main() -> None:
    for kind in ("fresh", "exchange", "many", "renames", "many-renames"):
        if kind == "renames":
            exchange._exchange_in_one_step = lambda first, second: False
        parent = Path(sys.argv[1]) / kind
        parent.mkdir()
        if kind.startswith("many"):
            many_writers(parent)
        else:
            steps, outcomes, recoveries = every_step(parent, None if kind == "fresh" else "o")
            print(kind, steps, "".join(sorted(letter or "-" for letter in outcomes)), recoveries, flush=True)


if __name__ == "__main__":
    main()
