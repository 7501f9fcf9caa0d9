"""Run pytest in forks of one process that has imported torch, because that import takes longer than most tests.

The process imports nothing of the project. So each fork reads the files as they are at that time, and whatever a run
leaves behind is gone with its fork.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

# The slow imports among those of the tests. None may start a thread, because a fork has only one.
_IMPORTED = ("pytest", "torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.onnx", "onnx", "onnxscript")


@dataclass(frozen=True)
class Run:
    """A finished run of pytest; `code` is None if it hung and was killed."""

    code: int | None
    output: str


class Forks:
    """Runs pytest in one folder, one run at a time.

    Args:
        folder: where the tests run, and where their output is kept meanwhile.
        environment: the environment variables of the runs.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *exception: object) -> None:
        # The process ends at the end of its input.
        self._process.communicate()

    def run(self, *arguments: str, limit: int = 0) -> Run:
        """Run pytest with these arguments. It counts as hung after `limit` seconds, and is killed; 0 is no limit.

        Raises:
            RuntimeError: the process that forks has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        output = self.folder / "output"
        request = {"output": str(output), "arguments": arguments, "limit": limit}
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            answer = ""
        else:
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that runs the tests has ended, with exit code {self._process.wait()}")
        return Run(json.loads(answer), output.read_text(encoding="utf-8", errors="replace"))


def _serve() -> None:
    """Fork for each request, a line of stdin, and write a line with the exit code to stdout."""
    for name in _IMPORTED:
        importlib.import_module(name)
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1, "one of the imports starts a thread"
    here = f"{Path.cwd()}{os.sep}"
    mine = [name for name, module in sys.modules.items() if str(getattr(module, "__file__", "")).startswith(here)]
    assert not mine, f"{mine[0]} is imported already, which would stay as it is now"
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _pytest(request["output"], request["arguments"])
        print(json.dumps(_code_of(child, request["limit"])), flush=True)


def _pytest(output: str, arguments: list[str]) -> NoReturn:
    """Turn this process into a run of pytest."""
    code = 70
    try:
        # Start a process group, so that the processes that it starts are killed with it.
        os.setsid()
        with open(os.devnull, "rb") as nothing, open(output, "wb") as file:
            os.dup2(nothing.fileno(), 0)
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        # As in `python -m pytest`.
        sys.path[0] = os.getcwd()
        sys.argv = ["pytest", *arguments]
        code = int(importlib.import_module("pytest").main(arguments))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _code_of(child: int, limit: int) -> int | None:
    try:
        with _alarm(limit):
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except TimeoutError:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None


@contextlib.contextmanager
def _alarm(seconds: int) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    _serve()
