"""`--if-changed`: record the inputs of a build in the manifest, and compare them with the current ones.

The comparison needs no torch and runs none of the user's code, so it finds modules without importing them.
"""

import hashlib
import math
import os
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, source_from_cache
from itertools import chain
from pathlib import Path
from typing import Any

from optimize_export.errors import BundleError
from optimize_export.manifest import (
    MANIFEST,
    PROGRAM,
    SUMS,
    damage_of,
    describe_environment,
    describe_program,
    local_roots,
    open_regular,
    read_manifest,
    sums_digest,
    sums_problem,
    version_of,
    without_local_paths,
)
from optimize_export.shadowing import OWN_PACKAGES, ROOT
from optimizer.command.early_checks import SUFFIXES, files_of, library_of, parse_target, split_library
from optimizer.option_texts import split_weights
from optimizer.options import ExportOptions

Document = dict[str, Any]

_OURS = tuple(str(ROOT / name) + os.sep for name in OWN_PACKAGES)
_MODULE = "module "
_HERE = "current folder: "
_PACKAGES = {"site-packages", "dist-packages"}
_PLUGINS = ("optimize_export.passes", "optimize_export.exporters")
_STANDARD = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_ENVIRONMENT = (sys.prefix + os.sep,) if sys.prefix != sys.base_prefix else ()
# The fields of an export's JSON document that the manifest has too.
_SHARED = ("model", "device", "passes", "coverage", "missing", "parity", "benchmark", "notes")


@dataclass(frozen=True)
class BuildInputs:
    """The options of a build, and the files that they name."""

    folder: Path
    """The folder of the model's file, or that from which the module is imported."""
    root: Path
    """The current folder."""
    files: dict[str, Path]
    """The model's own files by their names, and other files by their options, such as "--weights"."""
    options: dict[str, Any]
    """The options that shape the bundle, by their long names, as the manifest records them."""

    def record(self, before: Mapping[str, object], opened: Iterable[Path], started: float) -> Document:
        """The manifest's `build`, once the model has been loaded and has run.

        Before that, `sys.modules` was `before` and the Unix time `started`; `opened` are the files that were read since.
        A file that changed meanwhile may have been read before or after the change, so its digest is null.
        """
        modules = {
            Path(file): name
            for name, module in list(sys.modules.items())
            if before.get(name) is not module
            and isinstance(file := getattr(module, "__dict__", {}).get("__file__"), str)
        }
        files, packages = dict(self.files), set[str]()
        recorded = {path.resolve() for path in files.values()}
        for path in dict.fromkeys([*modules, *opened]):
            module, is_inside = modules.get(path), path.is_relative_to(self.folder)
            if not path.is_absolute() or path.resolve() in recorded:
                continue
            if module and _PACKAGES & set((path.relative_to(self.folder) if is_inside else path).parts):
                packages.add(module.partition(".")[0])
            elif str(path).startswith((*_OURS, *_STANDARD)):
                continue
            elif module and not is_inside:
                files[_MODULE + module] = path
            elif module or self._is_own(path):
                files[self._name(path)] = path
        known = describe_environment()["libraries"]
        # It reads the files of all installed distributions.
        found = metadata.packages_distributions() if packages else {}
        distributions = {each for package in packages for each in found.get(package, ())}
        distributions |= {
            point.dist.name for group in _PLUGINS for point in metadata.entry_points(group=group) if point.dist
        }
        return {
            "options": self.options,
            "files": {name: _digest(path, started) for name, path in sorted(files.items())},
            "versions": {name: version_of(name) or "unknown" for name in sorted(distributions - known.keys())},
            "program": _program_digest(),
        }

    def _is_own(self, path: Path) -> bool:
        """Whether a file is in the user's folders, and not in a hidden folder or that of a virtual environment."""
        # In a container, the current folder may be /.
        folders = [each for each in (self.folder, self.root) if each.parent != each]
        inside = next((path.relative_to(each) for each in folders if path.is_relative_to(each)), None)
        if inside is None or str(path).startswith(_ENVIRONMENT) or _PACKAGES & set(path.parts):
            return False
        return not any(part.startswith(".") for part in inside.parts[:-1])

    def _name(self, path: Path) -> str:
        # A path from a folder to one that isn't above it would have the names of this machine's folders.
        if path.is_relative_to(self.folder) or self.folder.is_relative_to(self.root):
            return Path(os.path.relpath(path, self.folder)).as_posix()
        return _HERE + path.relative_to(self.root).as_posix()

    def path(self, name: str) -> Path | None:
        """The current path of a recorded file; None if these inputs lack it, or Python finds no such module."""
        if name.startswith("--") or name in self.files:
            return self.files.get(name)
        if name.startswith(_MODULE):
            return _module_file(name.removeprefix(_MODULE), self.folder)
        if name.startswith(_HERE):
            return self.root / name.removeprefix(_HERE)
        return self.folder / name


def inputs_of(options: ExportOptions) -> BuildInputs:
    """Find the inputs of a build. Call it before the user's code runs, which may change the current folder."""
    model, folder, files = _model_of(options)
    if options.weights is not None:
        files["--weights"], _ = split_weights(options.weights)
    files |= {f"--inputs {number}": each for number, each in enumerate(options.input_files, 1)}
    if options.calibration is not None:
        further = () if library_of(options.model) is None else tuple(chain.from_iterable(SUFFIXES.values()))
        files |= {f"--calibration {each.name}": each for each in files_of(options.calibration, further)}
    if options.choices is not None:
        files["--choices"] = options.choices / MANIFEST if options.choices.is_dir() else options.choices
    given = {"model": model, **options.given}
    if options.weights is not None and (key := split_weights(options.weights)[1]):
        given["weights"] = key
    # The manifest has no local paths, so options that contain some are compared without them.
    return BuildInputs(folder, Path.cwd(), files, without_local_paths(given, local_roots()))


def _model_of(options: ExportOptions) -> tuple[str, Path, dict[str, Path]]:
    """The model's name as recorded, the folder of its sources, and its own files."""
    if (library := split_library(options.model, options.name)) is not None:
        saved = sorted(Path(library[1]).glob("*")) if library[0] == "transformers" else []
        return ":".join(library), Path.cwd(), {f"MODEL {each.name}": each for each in saved if each.is_file()}
    target = parse_target(options.model, options.name)
    model = target.label if target.name is None else f"{target.label}:{target.name}"
    if target.file is None:
        return model, _source_folder(target.label), {}
    return model, target.folder, {target.label: target.file}


def changes(options: ExportOptions) -> list[str]:
    """The differences between the bundle at `output` and one built now, as short texts; none if it is up to date.

    Weights, inputs and sources are compared by their hashes. The files of the bundle are compared by their sizes, and
    the manifest by its hash in SHA256SUMS.
    """
    if not os.path.lexists(options.output / MANIFEST):
        return [f"there is no bundle at {options.output}"]
    try:
        manifest = read_manifest(options.output)
    except BundleError as error:
        return [str(error).rstrip(".")]
    if problem := sums_problem(options.output, manifest):
        return [problem.rstrip(".")]
    if "build" not in manifest:
        return ["the bundle doesn't say what it was built from"]
    inputs = inputs_of(options)
    return [
        *_changed_options(manifest["build"]["options"], inputs.options),
        *_changed_files(manifest["build"]["files"], inputs),
        *_changed_versions(manifest),
        *_changed_program(manifest),
        *(f"the bundle lacks the format {name}" for name in manifest.get("missing", {})),
        *(problem.rstrip(".") for problem in damage_of(options.output, manifest, hashed=False).values()),
    ]


def compared_files(output: Path) -> dict[str, tuple[int, bytes]]:
    """What `changes` compares of a bundle: the size of each file by its path, and the contents of those that it reads."""
    read = {output / MANIFEST, output / SUMS}
    paths = [path for path in output.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_size, path.read_bytes() if path in read else b"") for path in paths}


def up_to_date_document(output: Path) -> Document:
    """The JSON document for a bundle that is up to date; it has the fields of an export that the manifest has too."""
    manifest = read_manifest(output)
    return {
        "ok": True,
        "exit_code": 0,
        "up_to_date": True,
        "changed": [],
        "bundle": str(output),
        "sha256sums": sums_digest(output),
        **{name: manifest[name] for name in _SHARED if name in manifest},
        "artifacts": [{**artifact, "measurement": None} for artifact in manifest["artifacts"]],
    }


def _source_folder(module: str) -> Path:
    """The folder from which the top-level package of a module is imported; the current one if it isn't found."""
    spec = find_package(module.partition(".")[0], Path.cwd())
    places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
    return Path(places[0]).resolve().parent if places and places[0] else Path.cwd()


def find_package(name: str, folder: Path) -> ModuleSpec | None:
    """Find a top-level module in a folder, or else where Python imports it from; nothing is imported."""
    found = PathFinder.find_spec(name, [str(folder)])
    if found and found.origin:
        return found
    try:
        # A folder without __init__.py is only found if there is no module of this name elsewhere.
        return find_spec(name) or found
    except (ImportError, ValueError):
        return None


def _module_file(name: str, folder: Path) -> Path | None:
    """The file of a module that Python would import now; None if there is none. It imports nothing."""
    top, *inner = name.split(".")
    spec, full_name = find_package(top, folder), top
    for part in inner:
        full_name += f".{part}"
        spec = PathFinder.find_spec(full_name, spec.submodule_search_locations) if spec else None
    return Path(spec.origin) if spec and spec.origin else None


def _digest(path: Path, unchanged_since: float = math.inf) -> str | None:
    """The SHA-256 of a file; None if it isn't a regular file, can't be read, or changed after that Unix time."""
    try:
        with open_regular(path, follow=True) as file:
            status = os.fstat(file.fileno())
            # A time in the future, as in some archives, says nothing: the file would always seem to have changed. The
            # clock of a file server may be a minute ahead.
            if any(unchanged_since < each <= time.time() + 60 for each in (status.st_mtime, status.st_ctime)):
                return None
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


# Which files the user's code opens -----------------------------------------------------------------------------------


@dataclass
class OpenedFiles:
    """The absolute paths that Python opened: `open`, imports, `torch.load`, but not libraries that open files in C."""

    read: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    """Opened for writing, or replaced by another file."""

    def data(self) -> set[Path]:
        """The regular files that were read and not written; of compiled sources, the sources."""
        # Opening some of them failed.
        return {Path(path) for path in map(_source, self.read - self.written) if os.path.isfile(path)}


_watching: list[OpenedFiles] = []


@contextmanager
def opened_files() -> Iterator[OpenedFiles]:
    """Watch all threads of this process. Python can't remove an audit hook, so one stays, and does nothing later."""
    _add_hook()
    found = OpenedFiles()
    _watching.append(found)
    try:
        yield found
    finally:
        _watching.remove(found)


@cache
def _add_hook() -> None:
    sys.addaudithook(_hook)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("open", "os.rename") or not _watching:
        return
    # The target of a rename gets the contents of another file.
    path, flags = (arguments[0], arguments[2] or 0) if event == "open" else (arguments[1], os.O_WRONLY)
    # Other paths are descriptors of files that are open already.
    if isinstance(path, str | bytes | os.PathLike):
        full = os.path.abspath(os.fsdecode(path))
        for each in _watching:
            (each.written if flags & (os.O_WRONLY | os.O_RDWR) else each.read).add(full)


def _source(path: str) -> str:
    if path.endswith(".pyc"):
        with suppress(ValueError):
            return source_from_cache(path)
    return path


# Differences ----------------------------------------------------------------------------------------------------------


def _changed_options(then: Document, now: Document) -> Iterator[str]:
    for name in sorted(then.keys() | now.keys()):
        old, new = (_shown(options.get(name)) for options in (then, now))
        if old != new:
            yield f"{'MODEL' if name == 'model' else f'--{name}'} changed from {old} to {new}"


def _changed_program(manifest: Document) -> Iterator[str]:
    # Between two releases, the version stays the same.
    same_version = manifest["program"]["version"] == describe_program()["version"]
    if same_version and manifest["build"].get("program") != _program_digest():
        yield f"the code of {PROGRAM} changed"


def _program_digest() -> str:
    sources = sorted(path for name in OWN_PACKAGES for path in (ROOT / name).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return "the default" if value is None else "on" if value is True else str(value)


def _changed_files(then: Mapping[str, str | None], inputs: BuildInputs) -> Iterator[str]:
    for name in sorted(then.keys() | inputs.files.keys()):
        path = inputs.path(name)
        shown = f"{path} ({name.split()[0]})" if path and name.startswith("--") else name
        if name not in then:
            yield f"{shown} is new"
        elif path is None or not path.is_file():
            yield f"{shown} is gone"
        elif then[name] is None or _digest(path) != then[name]:
            yield f"{shown} changed{'' if then[name] else ' during the build'}"


def _changed_versions(manifest: Document) -> Iterator[str]:
    then, now = ({**each["environment"]} for each in (manifest, {"environment": describe_environment()}))
    recorded = {**then.pop("libraries"), **manifest["build"]["versions"]}
    current = {**{name: version_of(name) for name in recorded}, **now.pop("libraries")}
    old = {**then, **recorded, PROGRAM: manifest["program"]["version"]}
    new = {**now, **current, PROGRAM: describe_program()["version"]}
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield f"{name} {new.get(name) or 'is not installed'}, was {old.get(name) or 'not installed'}"
