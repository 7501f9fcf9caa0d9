"""The part of `build --on ray` that runs on a machine of the cluster. Ray sends this file there as it is.

It must start where optimize-export isn't installed, and where a user's file has the name of one of our packages. So it
needs only the standard library until `Builder.problem` has found the same version.
"""

import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

# The signal SIGTERM ends a build whose worker was killed. Linux only: elsewhere, such a build runs to its end.
ENDS_WITH_PARENT = "import ctypes, os, sys; sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"


class Builder:
    """Builds one model in a copy of the working directory."""

    def __init__(self) -> None:
        self._sent, self._top = Path.cwd(), tempfile.mkdtemp(prefix="optimize-export-")
        self._folder = Path(shutil.copytree(self._sent, Path(self._top, "work"), symlinks=True))
        os.chdir(self._folder)
        self._processes: Any = None
        self._parent = os.getppid()
        threading.Thread(target=self._end_with_parent, daemon=True).start()

    def _end_with_parent(self) -> None:
        # A method that runs keeps this process when the raylet, its parent, is lost.
        while os.getppid() == self._parent:
            time.sleep(1)
        self.stop()
        os._exit(1)

    def problem(self, version: str | None, named: list[str]) -> str | None:
        """A sentence if this machine has another version, or lacks a file that the options name."""
        own = next((each.version for each in metadata.distributions(name="optimize-export")), None)
        if own != version:
            has = f"optimize-export {own}" if own else "no optimize-export"
            return f"The machine of the build has {has}: install {version} there, the version of this machine."
        lacking = next((path for path in named if not os.path.exists(path)), None)
        return lacking and (
            f"The machine of the build has no {lacking}: Ray sends the current folder without outputs, virtual environments "
            "and the files in .gitignore or .rayignore; other paths must exist on each machine."
        )

    def compared(self, options: bytes, old: dict[str, tuple[int, bytes]]) -> tuple[list[str], dict[str, Any]] | None:
        """The changes since the old bundle, and the document if there are none; None for an error, which the build will report.

        Args:
            options: pickled `ExportOptions`.
            old: the size of each file of the old bundle, and the contents of those that are read.
        """
        from optimize_export.errors import OptimizeExportError
        from optimize_export.shadowing import our_package

        with our_package("optimizer"):
            from optimizer.command.early_checks import check_early
            from optimizer.command.up_to_date import changes, up_to_date_document

            asked = pickle.loads(options)
        for path, (size, data) in old.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(data)
            os.truncate(path, size)
        try:
            check_early(asked)
            found = changes(asked)
            return found, {} if found else up_to_date_document(asked.output)
        except OptimizeExportError:
            return None
        finally:
            shutil.rmtree(asked.output, ignore_errors=True)

    def build(
        self, arguments: list[str], environment: dict[str, str | None], folders: list[str], here: str
    ) -> tuple[str, int, str, dict[str, int]]:
        """Return stdout, exit code and stderr of the command, and the sizes of the files in the folders.

        Args:
            environment: variables besides those of this machine; None removes one.
            here: the current folder of the caller, which replaces the path of the copy in stdout and stderr.
        """
        from optimize_export.shadowing import our_package

        with our_package("optimizer"):
            from optimizer.command.build import Processes, command_line
        self._processes = Processes()
        command = [sys.executable, "-S", "-c", ENDS_WITH_PARENT, *command_line(arguments)]
        # Ray adds the working directory, of which the build has its own copy.
        own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != str(self._sent)]
        paths = os.pathsep.join(filter(None, [environment["PYTHONPATH"], *own]))
        given = {**os.environ, **environment, "PYTHONPATH": paths}
        variables = {name: value for name, value in given.items() if value is not None}
        out, code, log = self._processes.run(command, variables)
        while os.getppid() != self._parent:
            # The command was terminated, and `_end_with_parent` ends this process: that is no result of the build.
            time.sleep(1)
        out, log = (text.replace(str(self._folder), here) for text in (out, log))
        files = [path for folder in folders for path in Path(folder).rglob("*") if path.is_file()]
        return out, code, log, {str(path): path.stat().st_size for path in files}

    def part(self, path: str, start: int, length: int) -> bytes:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(length)

    def stop(self) -> None:
        if self._processes is not None:
            self._processes.stop()
        os.chdir(self._sent)
        shutil.rmtree(self._top, ignore_errors=True)
