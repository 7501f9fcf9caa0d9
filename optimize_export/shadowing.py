"""Find a user's own modules that Python imports in place of ours, and import ours next to them.

`optimizer`, `passes` and `exporters` are common names: a user's folder may hold an `optimizer.py` or a `passes/`, and
Python takes the first one on its path.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
OWN_PACKAGES = ("optimize_export", "optimizer", "passes", "exporters")


def own_package(name: str) -> ModuleType:
    """Import one of our packages from this installation; `sys.path`, which may have the user's first, isn't searched."""
    present = sys.modules.get(name)
    if present is not None and lies_in(present, {ROOT}):
        return present
    spec = PathFinder.find_spec(name, [str(ROOT)])
    if spec is None or spec.loader is None:
        raise ImportError(f"The installation of optimize-export is incomplete: {ROOT / name} is missing.", name=name)
    package = module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)
    return package


def lies_in(module: ModuleType | None, folders: set[Path]) -> bool:
    """Whether this top-level module is a file or a package directly in one of the folders."""
    origin = getattr(module, "__file__", None)
    if origin is not None:
        file = Path(origin).resolve()
        return (file.parent.parent if file.stem == "__init__" else file.parent) in folders
    return any(Path(place).resolve().parent in folders for place in getattr(module, "__path__", ()))


def refuse_shadowing_modules(wanted: str) -> None:
    """Raise ImportError if Python finds a user's module in place of one of our packages, which `wanted` needs."""
    for name in OWN_PACKAGES[1:]:
        if (theirs := _shadowing_file(name)) is not None:
            raise ImportError(
                f"optimize_export.{wanted} needs the package {name} of optimize-export, but Python finds {theirs} first: "
                f"rename it, or put its folder after {ROOT} on sys.path.",
                name=name,
                path=theirs,
            )


def _shadowing_file(name: str) -> str | None:
    """The user's file or folder that Python imports under the name of one of our packages; None if it imports ours."""
    spec = getattr(sys.modules.get(name), "__spec__", None) or find_spec(name)
    if spec is None:
        return None
    theirs = spec.origin if spec.has_location else next(iter(spec.submodule_search_locations or ()), None)
    is_ours = theirs is None or Path(theirs).resolve().is_relative_to(ROOT / name)
    return None if is_ours else theirs


@contextmanager
def our_package(name: str) -> Iterator[None]:
    """Import from our package of this name inside, also where the user has a module of that name.

    Our modules import each other when they are imported, so those that are imported inside work afterwards, when the name
    is the user's again.
    """
    if _shadowing_file(name) is None:
        yield
        return
    theirs = _taken_out(name)
    try:
        own_package(name)
        yield
    finally:
        _taken_out(name)
        sys.modules.update(theirs)


def _taken_out(name: str) -> dict[str, ModuleType]:
    """Remove a package and its modules from `sys.modules`, and return them."""
    return {each: sys.modules.pop(each) for each in list(sys.modules) if each == name or each.startswith(f"{name}.")}
