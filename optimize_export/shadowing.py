"""Find a user's own modules that Python imports in place of ours, and import ours next to them.

`optimizer`, `passes` and `exporters` are common names: a user's folder may hold an `optimizer.py` or a `passes/`, and
Python takes the first one on its path.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).resolve().parent.parent
_COMMON_NAMES = ("optimizer", "passes", "exporters")


def refuse_shadowing_modules(wanted: str) -> None:
    """Raise ImportError if Python finds a user's module in place of one of our packages, which `wanted` needs."""
    for name in _COMMON_NAMES:
        if (theirs := _shadowing_file(name)) is not None:
            raise ImportError(
                f"optimize_export.{wanted} needs the package {name} of optimize-export, but Python finds {theirs} first: "
                f"rename it, or put its folder after {_ROOT} on sys.path.",
                name=name,
                path=theirs,
            )


def _shadowing_file(name: str) -> str | None:
    """The user's file or folder that Python imports under the name of one of our packages; None if it imports ours."""
    spec = getattr(sys.modules.get(name), "__spec__", None) or find_spec(name)
    if spec is None:
        return None
    theirs = spec.origin if spec.has_location else next(iter(spec.submodule_search_locations or ()), None)
    is_ours = theirs is None or Path(theirs).resolve().is_relative_to(_ROOT / name)
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
    sys.path.insert(0, str(_ROOT))
    try:
        importlib.invalidate_caches()
        yield
    finally:
        sys.path.remove(str(_ROOT))
        _taken_out(name)
        sys.modules.update(theirs)


def _taken_out(name: str) -> dict[str, ModuleType]:
    """Remove a package and its modules from `sys.modules`, and return them."""
    return {each: sys.modules.pop(each) for each in list(sys.modules) if each == name or each.startswith(f"{name}.")}
