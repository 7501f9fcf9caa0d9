"""Room for the user's modules beside ours.

The three packages of the program have common names, and a user's folder may hold an `optimizer.py`, a `passes/` or an
`exporters/` of its own. In a process that runs the user's file, `import optimizer` there must find the user's file,
while the program goes on with its own modules. So the program imports all of its modules first
(`import_own_packages`), each of which holds what it needs by reference, and then gives up the names that the user's
folder claims (`put_first`). `names_restored` takes everything back.
"""

import importlib
import os
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import NoReturn

OWN_PACKAGES = ("optimizer", "passes", "exporters")
ROOT = Path(__file__).resolve().parent.parent


def import_own_packages() -> None:
    """Import every module of the three packages, from where this file lies and from nowhere else.

    `python -m` and PYTHONPATH can put a user's `passes/` before ours, so the packages aren't looked up on `sys.path`.
    """
    packages = [_own_package(name) for name in OWN_PACKAGES]  # all three before the first of their modules
    for package in packages:
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith(".__main__"):
                importlib.import_module(found.name)


def put_first(folder: Path) -> None:
    """Make `folder` the first place where modules are looked for, also in place of modules of ours."""
    folder = folder.resolve()
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    for name in OWN_PACKAGES:
        spec = _claim(name, folder)
        if spec is not None:
            _give_up(name, spec)


@contextmanager
def names_restored() -> Iterator[None]:
    """Take back, at the end, what `put_first` and the user's code did to `sys.modules`, `sys.path` and `sys.argv`."""
    path, argv, write_bytecode = list(sys.path), list(sys.argv), sys.dont_write_bytecode
    known = set(sys.modules)
    own = {name: module for name, module in sys.modules.items() if _top(name) in OWN_PACKAGES}
    try:
        yield
    finally:
        folders = {Path(entry).resolve() for entry in sys.path if entry not in path}
        sys.path[:], sys.argv[:], sys.dont_write_bytecode = path, argv, write_bytecode
        new = [
            name for name in sys.modules if name not in known or (name in own and sys.modules[name] is not own[name])
        ]
        theirs = {top for top in map(_top, new) if _lies_in(sys.modules.get(top), folders)}
        for name in new:
            if _top(name) in theirs:
                del sys.modules[name]
        sys.modules.update(own)
        importlib.invalidate_caches()


class HardExit(SystemExit):
    """Raised where the user's code called `os._exit`, which would end the process without a word, with any code."""


@contextmanager
def hard_exits_raise() -> Iterator[None]:
    """Make `os._exit` in this process raise `HardExit`; a forked child goes on ending by it."""
    end, process = os._exit, os.getpid()

    def raise_or_end(status: int) -> NoReturn:
        if os.getpid() != process:
            end(status)
        raise HardExit(status)

    os._exit = raise_or_end
    try:
        yield
    finally:
        os._exit = end


def _own_package(name: str) -> ModuleType:
    present = sys.modules.get(name)
    if present is not None and _lies_in(present, {ROOT}):
        return present
    spec = PathFinder.find_spec(name, [str(ROOT)])
    if spec is None or spec.loader is None:
        raise ImportError(f"The installation of optimize-export is incomplete: {ROOT / name} is missing.", name=name)
    package = module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)
    return package


def _claim(name: str, folder: Path) -> ModuleSpec | None:
    """The user's module or package that takes the name from ours; None where there is none.

    It is in `folder`, or in a folder that Python searches before ours, as those of PYTHONPATH.
    """
    if folder == ROOT:
        return None
    spec = PathFinder.find_spec(name, [str(folder)])
    if spec is not None and spec.origin is not None:
        return spec
    # A folder without __init__.py is a namespace package only where it holds code; `optimizer/` may hold checkpoints.
    place = folder / name
    if spec is not None and (any(place.glob("*.py")) or any(place.glob("*/*.py"))):
        return spec
    before_ours = list(takewhile(lambda entry: Path(entry).resolve() != ROOT, sys.path))
    spec = PathFinder.find_spec(name, before_ours)
    return spec if spec is not None and spec.origin is not None else None


def _give_up(name: str, spec: ModuleSpec) -> None:
    """Free the name and those submodules of ours that the user's package has too.

    The other submodules keep their entries: pickle and torch look ours up by their full names.
    """
    places = list(spec.submodule_search_locations or ())
    for full_name in [full_name for full_name in sys.modules if full_name.startswith(f"{name}.")]:
        relative = full_name.removeprefix(f"{name}.").replace(".", os.sep)
        if any(os.path.exists(os.path.join(place, relative + end)) for place in places for end in (".py", "")):
            del sys.modules[full_name]
    sys.modules.pop(name, None)
    if spec.origin is None:
        # A regular package anywhere on the path would win over a namespace package: ours would be imported again.
        namespace = sys.modules[name] = module_from_spec(spec)
        # `inspect` may remember the file of our package under this name, and then refuses a package whose file is None.
        del namespace.__file__


def _lies_in(module: ModuleType | None, folders: set[Path]) -> bool:
    """Whether this top-level module is a file or a package directly in one of the folders."""
    origin = getattr(module, "__file__", None)
    if origin is not None:
        file = Path(origin).resolve()
        return (file.parent.parent if file.stem == "__init__" else file.parent) in folders
    return any(Path(place).resolve().parent in folders for place in getattr(module, "__path__", ()))


def _top(name: str) -> str:
    return name.partition(".")[0]
