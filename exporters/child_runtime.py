"""The child process of `child_process.py`: opens files in their runtimes, and runs them on arrays.

It is started as a script, so it imports the standard library only; the runtimes are imported with the first file. It
never imports torch, which takes seconds.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

# numpy has no bfloat16: such an array is the pair of this name and its bits as uint16.
BFLOAT16 = "bfloat16"

Opener = Callable[[], Callable[..., Any]]
"""Opens a file and returns its call on arrays. It is pickled, so it is a `functools.partial` of a class or function."""


def main() -> None:
    """Answer the requests on stdin until it ends. An answer is (exception, result), one of them None."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # What a runtime prints must not get into the answers.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    _write_no_core()
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    # After the own entries: the folder of a user's model may have a file that is called like a package.
    sys.path += [entry for entry in pickle.load(requests) if entry not in sys.path]
    opened: dict[int, Callable[..., Any]] = {}
    while True:
        try:
            kind, number, argument = pickle.load(requests)
        except EOFError:
            return
        answer: tuple[BaseException | None, Any]
        try:
            answer = None, _answer(opened, kind, number, argument)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            answer = _sendable(error), None
        pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()


def _answer(opened: dict[int, Callable[..., Any]], kind: str, number: int, argument: Any) -> Any:
    if kind == "open":
        opened[number] = runner = pickle.loads(argument)()
        return {name: getattr(runner, name, None) for name in ("device", "settings", "placement")}
    if kind == "run":
        return opened[number](*argument)
    del opened[number]
    return None


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - exceptions of extensions can't all be pickled
        return RuntimeError("".join(traceback.format_exception_only(error)).strip())
    return error


def _end_with_parent(parent: int) -> None:
    """End a run that nobody waits for any more; between runs, the end of stdin does."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _write_no_core() -> None:
    """Keep a crash from leaving a memory dump in the user's folder."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
