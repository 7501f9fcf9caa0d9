"""The passes by name: those of this package and the entry points of others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from passes.base import Pass
from passes.channels_last import ChannelsLast
from passes.errors import DuplicatePass, PassOptionError, PassOrderError, UnknownPass
from passes.fold_conv_bias import FoldConvBias
from passes.fold_conv_bn import FoldConvBn
from passes.torch_compile import TorchCompile

ENTRY_POINTS = "optimize_export.passes"

_OWN: tuple[type[Pass], ...] = (FoldConvBias, FoldConvBn, ChannelsLast, TorchCompile)

# All that is exact, exportable and free of compile time.
PRESETS: dict[str, tuple[str, ...]] = {
    "inference": (FoldConvBias.name, FoldConvBn.name, ChannelsLast.name),
    "training": (),
}


@dataclass(frozen=True)
class PassDescription:
    """One row of the table of passes.

    Attributes:
        name: on the command line.
        cls: the name of the class.
        summary: the first line of its docstring.
        modes: the modes that it is made for.
        options: option -> default.
        preset: the modes whose preset holds it.
    """

    name: str
    cls: str
    summary: str
    modes: tuple[str, ...]
    options: dict[str, object]
    preset: tuple[str, ...]


@cache
def _classes() -> dict[str, type[Pass]]:
    return register(_OWN, entry_points(group=ENTRY_POINTS))


def register(own: Iterable[type[Pass]], others: Iterable[EntryPoint]) -> dict[str, type[Pass]]:
    """The classes by name.

    Raises:
        DuplicatePass: two owners have one name.
    """
    classes: dict[str, type[Pass]] = {}
    for cls in (*own, *(point.load() for point in others)):
        if cls.name in classes and classes[cls.name] is not cls:
            first = classes[cls.name]
            raise DuplicatePass(
                f"the pass {cls.name!r} is registered by both {first.__module__}.{first.__qualname__} and"
                f" {cls.__module__}.{cls.__qualname__}: uninstall one, or rename it"
            )
        classes[cls.name] = cls
    return classes


def pass_names() -> tuple[str, ...]:
    """The names of all passes, those of this package first."""
    return tuple(_classes())


def pass_named(name: str) -> type[Pass]:
    """The class of that name.

    Raises:
        UnknownPass: there is none; the message names the closest.
    """
    classes = _classes()
    if name not in classes:
        near = get_close_matches(name, classes, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"the passes are: {', '.join(classes)}"
        raise UnknownPass(f"there is no pass {name!r}: {hint}")
    return classes[name]


def parse_pass(text: str) -> Pass:
    """A pass from `name` or `name:option=value:option=value`.

    Raises:
        UnknownPass, PassOptionError: what is wrong with the text.
    """
    name, *parts = text.strip().split(":")
    cls = pass_named(name.strip())
    options: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise PassOptionError(f"{text!r} has {part!r} where option=value is expected")
        options[key.strip()] = value.strip()
    return cls.from_options(options)


def parse_passes(text: str) -> list[Pass]:
    """The passes of a list such as `fold-conv-bn,torch-compile:mode=max-autotune`; "none" or "" is no pass."""
    if text.strip() in ("", "none"):
        return []
    return [parse_pass(part) for part in text.split(",")]


def make_passes(passes: Sequence[Pass | str] | None, mode: str) -> list[Pass]:
    """The passes of `optimize`'s argument; None is the preset of the mode.

    Raises:
        UnknownPass: a name that there is none of, or something that is no pass.
        PassOrderError: a pass that needs a graph stands behind one that leaves none.
    """
    if isinstance(passes, str):
        passes = parse_passes(passes)
    asked = PRESETS[mode] if passes is None else passes
    made = []
    for item in asked:
        if isinstance(item, type) and issubclass(item, Pass):
            item = item()
        if not isinstance(item, str | Pass):
            raise UnknownPass(f"{item!r} is neither the name of a pass nor an instance of one")
        made.append(parse_pass(item) if isinstance(item, str) else item)
    check_order(made)
    return made


def check_order(passes: Sequence[Pass]) -> None:
    """See that no pass that needs a graph stands behind one that leaves none.

    Raises:
        PassOrderError: one does.
    """
    barrier: Pass | None = None
    for item in passes:
        if barrier is not None:
            raise PassOrderError(
                f"{item.name} can't come after {barrier.name}, which leaves no graph to work on:"
                f" put {barrier.name} last"
            )
        barrier = item if item.is_barrier else None


def describe_passes() -> tuple[PassDescription, ...]:
    """One description for each pass."""
    return tuple(
        PassDescription(
            name=cls.name,
            cls=cls.__name__,
            summary=cls.summary(),
            modes=cls.modes,
            options={field.name: field.default for field in dataclasses.fields(cls)},
            preset=tuple(mode for mode, names in PRESETS.items() if cls.name in names),
        )
        for cls in _classes().values()
    )
