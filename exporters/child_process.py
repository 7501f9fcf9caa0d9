"""Load and run files in a child process first: where a runtime crashes, it takes its whole process down.

A malformed or unusual file makes a runtime raise, crash (SIGSEGV in a shape inference), exhaust the memory, or hang. So
a file is first loaded and run in a child, which imports the runtime but not torch. There is one child for a whole
export. Once a file has run there, it is loaded in this process too, where its calls cost no transfer.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from exporters import child_runtime
from exporters.child_runtime import BFLOAT16, Opener
from exporters.errors import RuntimeCrashed

# How long a child may take to load a file or to run it, in seconds: for any file, and for each GiB of it.
_LONGEST, _LONGEST_PER_GIB = 600.0, 60.0
# How long a process may take to end after its pipes are closed, in seconds.
_DYING = 10.0


class InChild:
    """A file that runs in the child process, as a `LoadedArtifact`; `runtime` names the runtime, with its version.

    Raises:
        RuntimeCrashed: the child ended, or didn't answer in time. It is raised by each later call too.
        Exception: whatever the runtime raises.
    """

    _numbers = itertools.count()

    def __init__(self, path: Path, opener: Opener, runtime: str) -> None:
        self._child = _running()
        self._number = next(self._numbers)
        self._runtime = runtime
        size = sum(each.stat().st_size for each in path.parent.glob(f"{path.name}*") if each.is_file())
        self._longest = _LONGEST + _LONGEST_PER_GIB * size / 2**30
        known = self._asked("open", pickle.dumps(opener), "loads the file")
        self.device: str = known["device"]
        self.settings: dict[str, str] = known["settings"]
        self.placement: dict[str, int] | None = known["placement"]

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sizes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        arrays = self._asked("run", [_array(tensor) for tensor in tensors], f"runs the file on inputs of {sizes}")
        return tuple(map(_tensor, arrays))

    def _asked(self, kind: str, argument: Any, does: str) -> Any:
        try:
            return self._child.asked((kind, self._number, argument), self._longest)
        except _Ended as ended:
            raise RuntimeCrashed(f"{self._runtime} {ended} while it {does}") from None

    def close(self) -> None:
        """Close the file, whose weights take memory in the child."""
        if self._child.is_running:
            self._asked("close", None, "closes the file")

    def __del__(self) -> None:
        # A file that couldn't be opened has no device.
        if hasattr(self, "device"):
            with contextlib.suppress(RuntimeCrashed):
                self.close()


class OwnChild:
    """An object in a child process of its own, called there; `close` ends the process.

    Raises:
        RuntimeCrashed: the child ended, or didn't answer in time.
        Exception: whatever the object raises.
    """

    def __init__(
        self, opener: Opener, what: str, python: Path | None = None, path: Sequence[Path] | None = None
    ) -> None:
        """Use this interpreter and its `sys.path`; or `python`, isolated, with its own packages and `path`."""
        self._child, self._what = _Child(python, path), what
        try:
            self._asked("open", pickle.dumps(opener), _LONGEST)
        except BaseException:
            self.close()
            raise

    def __call__(self, *args: Any, longest: float) -> Any:
        return self._asked("run", args, longest)

    @property
    def pid(self) -> int:
        return self._child.pid

    def _asked(self, kind: str, argument: Any, longest: float) -> Any:
        try:
            return self._child.asked((kind, 0, argument), longest)
        except _Ended as ended:
            raise RuntimeCrashed(f"{self._what} {ended}") from None

    def close(self) -> None:
        self._child.end()


@contextlib.contextmanager
def one_child() -> Iterator[None]:
    """Keep one child for all files inside; it starts with the first one, and ends with the outermost context.

    Without a context, it ends with this process.
    """
    global _contexts
    with _lock:
        _contexts += 1
    try:
        yield
    finally:
        with _lock:
            _contexts -= 1
            if not _contexts:
                _end()


def start_early() -> None:
    """Start the child, which imports while this process works on."""
    if can_start():
        _running()


@cache
def can_start() -> bool:
    """Whether a child can be started here; in an embedded interpreter and a frozen program it can't."""
    if not sys.executable or getattr(sys, "frozen", False):
        return False
    try:
        _running()
    except OSError:
        # The system refuses: a sandbox, or a limit on processes.
        return False
    return True


class _Ended(Exception):
    """The child ended without an answer; the text says how, as in "crashes (SIGSEGV)"."""


class _Child:
    def __init__(self, python: Path | None = None, path: Sequence[Path] | None = None) -> None:
        self.owner = os.getpid()
        # -P: the folder of the script isn't searched; -I: nor is PYTHONPATH. In a session of its own, Ctrl-C reaches this
        # process only.
        self._process = subprocess.Popen(
            [str(python or sys.executable), "-P" if python is None else "-I", child_runtime.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._lock = threading.Lock()
        self._how = ""
        self._send(list(sys.path) if path is None else list(map(str, path)))

    @property
    def is_running(self) -> bool:
        return not self._how and self._process.poll() is None and self.owner == os.getpid()

    def asked(self, request: Any, longest: float) -> Any:
        """The answer to a request; raises the exception that it made the child raise, or `_Ended`."""
        with self._lock:
            if self._how:
                raise _Ended(self._how)
            late = threading.Timer(longest, self._kill_late, [longest])
            late.daemon = True
            late.start()
            try:
                self._send(request)
                assert self._process.stdout is not None
                error, result = pickle.load(self._process.stdout)
            except (EOFError, BrokenPipeError, pickle.UnpicklingError):
                # It has ended, or is about to: its pipes are closed.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_DYING)
                self.end()
                self._how = self._how or how_it_ended(self._process.returncode)
                raise _Ended(self._how) from None
            except BaseException:
                # An interrupt: the answer may still come, and would be taken for that of the next request.
                self._how = "was interrupted"
                self.end()
                raise
            finally:
                late.cancel()
        if error is not None:
            raise error
        return result

    def _send(self, request: Any) -> None:
        assert self._process.stdin is not None
        pickle.dump(request, self._process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
        self._process.stdin.flush()

    def _kill_late(self, longest: float) -> None:
        self._how = f"hangs (it didn't answer in {longest:g} seconds)"
        self._process.kill()

    def end(self) -> None:
        """End the process; what it holds in memory is free afterwards."""
        if self.owner != os.getpid():
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()


_lock = threading.RLock()
_contexts = 0
_child: _Child | None = None


def _running() -> _Child:
    """The child of this process; started anew where it crashed, or where this process is a fork."""
    global _child
    with _lock:
        if _child is None or not _child.is_running:
            if _child is not None:
                _child.end()
            _child = _Child()
        return _child


@atexit.register
def _end() -> None:
    global _child
    if _child is not None:
        _child.end()
        _child = None


def end_session(process: subprocess.Popen[Any]) -> None:
    """End a process that was started in a session of its own, and everything that it started."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def how_it_ended(code: int) -> str:
    """How a process ended that should have gone on, by its exit code, as in "crashes (SIGSEGV)"."""
    if code >= 0:
        return f"ends its process (exit code {code})"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if name == "SIGKILL":
        return "is killed (SIGKILL, mostly because the memory is exhausted)"
    return f"crashes ({name})"


def _array(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu().contiguous()
    return (BFLOAT16, tensor.view(torch.uint16).numpy()) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _tensor(array: Any) -> torch.Tensor:
    if isinstance(array, tuple):
        return torch.from_numpy(array[1]).view(torch.bfloat16)
    return torch.from_numpy(array)
