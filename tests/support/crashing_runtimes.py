"""Openers of files for the tests of the child process: each stands for a runtime that does what its name says."""

import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

from exporters.onnx_plain import PlainSession
from optimize_export.runtime import Route, Runner, open_route


class Runs:
    """Adds one to its inputs; bfloat16 comes back as it is."""

    device = "cpu"
    settings: ClassVar[dict[str, str]] = {}
    placement = None

    def __init__(self, path: str, optimize: bool = True) -> None:
        self.path = path

    def __call__(self, *arrays: Any) -> list[Any]:
        return [array if isinstance(array, tuple) else array + 1 for array in arrays]


class CrashesAtLoad(Runs):
    def __init__(self, path: str, optimize: bool = True) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class CrashesAtThreeRows(Runs):
    def __call__(self, *arrays: Any) -> list[Any]:
        if len(arrays[0]) == 3:
            os.abort()
        return super().__call__(*arrays)


class SessionCrashesAtThreeRows(PlainSession):
    """onnxruntime, but for one batch size."""

    def __call__(self, *arrays: Any) -> list[Any]:
        if len(arrays[0]) == 3:
            os.abort()
        return super().__call__(*arrays)


class RunsOutOfMemory(Runs):
    def __init__(self, path: str, optimize: bool = True) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Exits(Runs):
    def __init__(self, path: str, optimize: bool = True) -> None:
        os._exit(3)


class Hangs(Runs):
    def __init__(self, path: str, optimize: bool = True) -> None:
        time.sleep(60)


class PrintsAndRaises(Runs):
    def __init__(self, path: str, optimize: bool = True) -> None:
        os.write(1, b"a line of the runtime")

    def __call__(self, *arrays: Any) -> list[Any]:
        raise ValueError("Got invalid dimensions")


class RaisesWhatCannotBePickled(Runs):
    def __call__(self, *arrays: Any) -> list[Any]:
        class OfExtensionError(Exception):
            pass

        raise OfExtensionError("not a runtime's own name")


class ImportsWave(Runs):
    """Says which file it imports under the name of a package."""

    def __init__(self, path: str, optimize: bool = True) -> None:
        import wave

        self.imported = wave.__file__

    def __call__(self, *arrays: Any) -> list[Any]:
        raise ValueError(self.imported)


def crash_unless_torch(path: Path, route: Route, device: str) -> Runner:
    """As `open_route`, but every runtime crashes except torch."""
    if route.runtime != "torch":
        os.kill(os.getpid(), signal.SIGSEGV)
    return open_route(path, route, device)
