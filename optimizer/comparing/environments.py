"""Virtual environments with other versions of the runtimes, kept in the user's cache folder.

An environment has the requirements of a set and numpy. This program isn't installed in it: its processes read a copy of the
packages that run a file, so that they import neither torch nor any other package installed here.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path

from exporters.child_process import end_session
from optimize_export.errors import DeviceError, OptimizeExportError, UsageError
from optimize_export.shadowing import ROOT
from optimize_export.wording import listed
from optimizer.option_texts import distribution_of

# `exporters` loads the files that torch runs; the others need the first one alone.
_GROUND_FLOOR = ("optimize_export", "exporters")
# Messages of pip if it can't reach its index. It then goes on, and finds no version at all.
_NO_NETWORK = re.compile(r"ConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError|Connection (?:broken|to) ")
_NO_VERSION = re.compile(r"satisfies the requirement (.+?) \(from versions: (.*?)\)")
# The newest versions that the sentence about a missing one names.
_NAMED = 5


@contextmanager
def ground_floor() -> Iterator[Path]:
    """A folder with only those packages of this program that run a file: from a checkout or an installed wheel."""
    with tempfile.TemporaryDirectory(prefix="optimize-export-") as folder:
        for name in _GROUND_FLOOR:
            shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
        yield Path(folder)


def environment(requirements: Sequence[str], runtimes: Sequence[str] = ()) -> Path:
    """The Python of an environment with these requirements and numpy, which is built unless the cache has it.

    It is built in a temporary folder, which is then renamed. So an interrupted build leaves no environment, and of two
    processes that build the same one, the slower uses the other's.

    Args:
        runtimes: packages that must be importable there.

    Raises:
        UsageError: pip finds no such versions, they exclude each other, or a runtime isn't among them.
        DeviceError: pip can't reach its index, or fails otherwise; or the folder can't be written.
    """
    place = cache_folder() / _name_of(requirements)
    # In this order: an environment that appears in between is complete.
    if place.is_dir() and not python_in(place).exists():
        # Its interpreter was removed.
        shutil.rmtree(place)
    if python_in(place).exists():
        return python_in(place)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".building-", dir=place.parent))
    except OSError as error:
        raise DeviceError(f"No environment can be built in {place.parent}: {error.strerror}.") from error
    try:
        _build(staging, requirements)
        _require(staging, requirements, runtimes)
        try:
            staging.rename(place)
        except OSError:
            if not python_in(place).exists():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return python_in(place)


def cache_folder() -> Path:
    """Where environments are kept: `optimize-export/environments` in XDG_CACHE_HOME, which is ~/.cache by default."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as error:
        raise DeviceError("This user has no home folder to keep environments in: set XDG_CACHE_HOME.") from error
    return folder / "optimize-export" / "environments"


def python_in(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _name_of(requirements: Sequence[str]) -> str:
    """The name of the folder: requirements without an exact version get a new one each day."""
    exact = all(re.search(r"==[^*]+$", each) for each in requirements)
    day = "" if exact else datetime.date.today().isoformat()
    key = "\n".join([*sorted(requirements), platform.python_version(), sys.base_prefix, day])
    words = re.sub(r"[^\w.]+", "-", "-".join(sorted(requirements))).strip("-")[:60]
    return f"{words}-py{platform.python_version()}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _build(folder: Path, requirements: Sequence[str]) -> None:
    # Packages on PYTHONPATH would count as installed.
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    # Not importlib.util's: a search for pip by setuptools' finder changes what this process gets as distutils.
    has_pip = PathFinder.find_spec("pip") is not None
    try:
        venv.EnvBuilder(symlinks=os.name != "nt", with_pip=not has_pip).create(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        raise DeviceError(f"No virtual environment can be made in {folder.parent}: {error}.") from error
    python = str(python_in(folder))
    pip = [sys.executable, "-P", "-m", "pip", "--python", python] if has_pip else [python, "-P", "-m", "pip"]
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check", "--no-warn-script-location"]
    # A wheel runs no code when it is installed.
    command = [*pip, "install", *quiet, "--only-binary", ":all:", *requirements]
    if "numpy" not in map(distribution_of, requirements):
        command.append("numpy")
    # With --python, pip starts another process, which must end too.
    with subprocess.Popen(
        command,
        env=outside,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            _, told = process.communicate()
        except BaseException:
            end_session(process)
            raise
    if process.returncode:
        raise _refusal(requirements, told)


def _require(folder: Path, requirements: Sequence[str], runtimes: Sequence[str]) -> None:
    """Raise UsageError if a runtime is missing, for example because the set names only openvino-telemetry."""
    code = "import sys, importlib.util as found; print(*(each for each in sys.argv[1:] if not found.find_spec(each)))"
    command = [str(python_in(folder)), "-I", "-c", code, *runtimes]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if lacking := done.stdout.split():
        raise UsageError(
            f"The environment of {listed([*requirements])} has no {listed(lacking)}: name it in the set. If it is named, "
            "remove `target` and `prefix` from pip's configuration."
        )


def _refusal(requirements: Sequence[str], told: str) -> OptimizeExportError:
    """The error for a failure of pip, from what it wrote to stderr."""
    named, here = (
        listed([*requirements]),
        f"Python {platform.python_version()} on {platform.system()}-{platform.machine()}",
    )
    found = _NO_VERSION.search(told)
    versions = [] if found is None or found[2] == "none" else found[2].split(", ")
    if _NO_NETWORK.search(told) and not versions:
        return DeviceError(
            f"{named} can't be installed: pip can't reach its index. Check the connection, or name another index by "
            "PIP_INDEX_URL or PIP_FIND_LINKS."
        )
    if found is not None:
        shown = f"the newest are {', '.join(versions[-_NAMED:])}" if versions else "it finds no version at all"
        return UsageError(f"pip finds no wheel of {found[1]} for {here}; {shown}.")
    errors = [line.removeprefix("ERROR: ") for line in told.splitlines() if line.startswith("ERROR: ")]
    if conflict := next((line for line in errors if "conflicting dependencies" in line), None):
        return UsageError(f"{named} can't be installed together: {conflict.rstrip('.')}.")
    if invalid := next((line for line in errors if line.startswith("Invalid requirement")), None):
        return UsageError(f"pip doesn't understand {named}: {invalid.rstrip('.')}.")
    reason = (errors or told.strip().splitlines() or ["it gives no reason"])[0]
    return DeviceError(f"{named} can't be installed: pip fails: {reason.rstrip('.')}.")
