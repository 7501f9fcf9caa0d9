"""Import the user's modules next to ours, even if they have the same names.

The three packages of the program have common names. A user's folder may contain its own `optimizer.py`, `passes/` or
`exporters/`. In a process that runs the user's file, `import optimizer` there must find the user's module, and the
program must keep its own modules.

So the program first imports all of its modules (`import_own_packages`). Each of them then has references to everything
it needs. After that, the program gives up the names that the user's folder claims (`put_first`). `names_restored`
undoes all of this.
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

from optimize_export.shadowing import OWN_PACKAGES, ROOT, lies_in, own_package


def import_own_packages() -> None:
    """Import every module of the three packages, only from the folder of this installation.

    `python -m` and PYTHONPATH can put a user's `passes/` before ours, so `sys.path` isn't searched.
    """
    packages = [own_package(name) for name in OWN_PACKAGES]  # import all three before any of their modules
    for package in packages:
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith(".__main__"):
                importlib.import_module(found.name)


def put_first(folder: Path) -> None:
    """Make `folder` the first place to search for modules, even for the names of our packages."""
    folder = folder.resolve()
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    for name in OWN_PACKAGES:
        spec = _claim(name, folder)
        if spec is not None:
            _give_up(name, spec)


@contextmanager
def names_restored() -> Iterator[None]:
    """Undo, at the end, all changes of `put_first` and the user's code to `sys.modules`, `sys.path` and `sys.argv`."""
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
        theirs = {top for top in map(_top, new) if lies_in(sys.modules.get(top), folders)}
        for name in new:
            if _top(name) in theirs:
                del sys.modules[name]
        sys.modules.update(own)
        importlib.invalidate_caches()


def _claim(name: str, folder: Path) -> ModuleSpec | None:
    """The user's module or package that takes this name from ours; None if there is none.

    It is in `folder`, or in a folder that Python searches before ours, such as one on PYTHONPATH.
    """
    if folder == ROOT:
        return None
    spec = PathFinder.find_spec(name, [str(folder)])
    if spec is not None and spec.origin is not None:
        return spec
    # A folder without __init__.py is a namespace package only if it contains code: `optimizer/` may hold checkpoints.
    place = folder / name
    if spec is not None and (any(place.glob("*.py")) or any(place.glob("*/*.py"))):
        return spec
    before_ours = list(takewhile(lambda entry: Path(entry).resolve() != ROOT, sys.path))
    spec = PathFinder.find_spec(name, before_ours)
    return spec if spec is not None and spec.origin is not None else None


def _give_up(name: str, spec: ModuleSpec) -> None:
    """Free the name, and the names of our submodules that the user's package has too.

    The other submodules keep their names, because pickle and torch look up ours by their full names.
    """
    places = list(spec.submodule_search_locations or ())
    for full_name in [full_name for full_name in sys.modules if full_name.startswith(f"{name}.")]:
        relative = full_name.removeprefix(f"{name}.").replace(".", os.sep)
        if any(os.path.exists(os.path.join(place, relative + end)) for place in places for end in (".py", "")):
            del sys.modules[full_name]
    sys.modules.pop(name, None)
    if spec.origin is None:
        # Python prefers a regular package anywhere on the path to a namespace package, so it would import ours again.
        namespace = sys.modules[name] = module_from_spec(spec)
        # `inspect` may have cached our package's file under this name, and fails on a package whose `__file__` is None.
        del namespace.__file__


def _top(name: str) -> str:
    return name.partition(".")[0]
