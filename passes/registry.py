"""Look up passes by name: those of this package, and those that other packages register as entry points."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from passes.base import Pass, has_default
from passes.cast_precision import CastPrecision
from passes.channels_last import ChannelsLast
from passes.errors import DuplicatePass, PassOptionError, PassOrderError, UnknownPass
from passes.fold_conv_bias import FoldConvBias
from passes.fold_conv_bn import FoldConvBn
from passes.insert_checkpoints import InsertCheckpoints
from passes.jit_fusion import JitFusion
from passes.merge_linears import MergeLinears
from passes.pad_channels import PadChannels
from passes.simplify import Simplify
from passes.sync_batch_norm import SyncBatchNorm
from passes.torch_compile import TorchCompile

ENTRY_POINTS = "optimize_export.passes"

BUILT_IN: tuple[type[Pass], ...] = (
    FoldConvBias,
    FoldConvBn,
    ChannelsLast,
    Simplify,
    MergeLinears,
    PadChannels,
    JitFusion,
    CastPrecision,
    SyncBatchNorm,
    InsertCheckpoints,
    TorchCompile,
)

# Passes that are exact, support export and need no compile time.
PRESETS: dict[str, tuple[str, ...]] = {
    "inference": (FoldConvBias.name, FoldConvBn.name, ChannelsLast.name),
    "training": (FoldConvBias.name,),
}


@dataclass(frozen=True)
class PassDescription:
    """One row of the table of passes."""

    name: str  # the name on the command line
    cls: str  # the name of the class
    summary: str  # the first line of its docstring
    modes: tuple[str, ...]  # the modes that the pass supports
    options: dict[str, object]  # the default of each option
    preset: tuple[str, ...]  # the modes whose preset contains the pass


@cache
def _classes() -> dict[str, type[Pass]]:
    return register(BUILT_IN, entry_points(group=ENTRY_POINTS))


def register(own: Iterable[type[Pass]], others: Iterable[EntryPoint]) -> dict[str, type[Pass]]:
    """Return the pass classes by name.

    An entry point that can't be loaded raises nothing here. `pass_named` raises if its name is requested.

    Raises:
        DuplicatePass: two classes have the same name.
        UnknownPass: an entry point is not a pass class, or its name is not the name of its pass.
    """
    classes: dict[str, type[Pass]] = {}
    _broken.clear()
    for cls in own:
        _add(classes, cls)
    for point in others:
        try:
            loaded = point.load()
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything; other passes stay available
            _broken[point.name] = f"{point.value} can't be loaded ({type(error).__name__}: {error})"
            continue
        _add(classes, _checked(point, loaded))
    return classes


# The entry points that couldn't be loaded, each with the reason.
_broken: dict[str, str] = {}


def _add(classes: dict[str, type[Pass]], cls: type[Pass]) -> None:
    first = classes.setdefault(cls.name, cls)
    if first is not cls:
        raise DuplicatePass(
            f"The pass {cls.name!r} is registered by both {first.__module__}.{first.__qualname__} and"
            f" {cls.__module__}.{cls.__qualname__}: uninstall one, or rename it."
        )


def _checked(point: EntryPoint, loaded: object) -> type[Pass]:
    if not isinstance(loaded, type) or not issubclass(loaded, Pass):
        raise UnknownPass(f"The entry point {point.name!r} is {point.value}, which isn't a subclass of Pass.")
    if getattr(loaded, "name", None) != point.name:
        raise UnknownPass(
            f"The entry point {point.name!r} is {point.value}, whose name is {getattr(loaded, 'name', None)!r}: use "
            "the same name for both."
        )
    return loaded


def pass_names() -> tuple[str, ...]:
    """The names of all passes, those of this package first."""
    return tuple(_classes())


def pass_named(name: str) -> type[Pass]:
    """The class of the pass of that name.

    Raises:
        UnknownPass: there is no such pass; the message suggests the closest name.
    """
    classes = _classes()
    if name in classes:
        return classes[name]
    if name in _broken:
        raise UnknownPass(f"The pass {name!r} isn't available: {_broken[name]}.")
    near = difflib.get_close_matches(name, classes, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"the passes are: {', '.join(classes)}."
    raise UnknownPass(
        f"There is no pass {name!r}: {hint} A pass of your own must be installed (docs/own-passes.md, Publish)."
    )


def parse_pass(text: str) -> Pass:
    """Create a pass from `name` or `name:option=value:option=value`.

    Raises:
        UnknownPass, PassOptionError: the text is invalid; the message says why.
    """
    name, *parts = text.strip().split(":")
    cls = pass_named(name.strip())
    options: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise PassOptionError(f"{text.strip()!r} has {part!r} where option=value is expected.")
        if key.strip() in options:
            raise PassOptionError(f"{text.strip()!r} has the option {key.strip()!r} twice.")
        options[key.strip()] = value.strip()
    return cls.from_options(options)


def parse_passes(text: str) -> list[Pass]:
    """Create the passes of a list such as `fold-conv-bn,torch-compile:mode=max-autotune`; "none" or "" is no pass.

    Raises:
        UnknownPass, PassOptionError: the text is invalid; the message says why.
    """
    if text.strip() in ("", "none"):
        return []
    parts = text.split(",")
    if not all(part.strip() for part in parts):
        raise UnknownPass(f"{text!r} has an empty entry: put a pass between two commas, and none after the last pass.")
    return [parse_pass(part) for part in parts]


def make_passes(passes: Sequence[Pass | str] | Pass | str | None, mode: str) -> list[Pass]:
    """Create the passes of `optimize`'s argument.

    None means the preset of the mode. Text is a list as on the command line.

    Raises:
        UnknownPass: there is no pass of that name, or the argument is not a pass.
        PassOptionError: the pass doesn't have an option, its value is invalid, or a required option is missing.
        PassOrderError: the passes are in an order that can't work; see `check_order`.
    """
    if isinstance(passes, str):
        passes = parse_passes(passes)
    if isinstance(passes, Pass) or (isinstance(passes, type) and issubclass(passes, Pass)):
        passes = [passes]
    # A tensor is iterable too, unless it has no dims.
    if not isinstance(passes, Iterable | None) or isinstance(passes, Mapping) or hasattr(passes, "shape"):
        raise _no_pass(passes)
    made = [_made(item) for item in (PRESETS[mode] if passes is None else passes)]
    check_order(made)
    return made


def _made(item: object) -> Pass:
    if isinstance(item, str):
        return parse_pass(item)
    if isinstance(item, type) and issubclass(item, Pass):
        return item.made_with({})
    if isinstance(item, Pass):
        return item
    raise _no_pass(item)


def _no_pass(item: object) -> UnknownPass:
    return UnknownPass(
        f"passes must hold names or instances of passes, such as ['fold-conv-bn'], not {type(item).__name__}: the inputs "
        "of a call go into `example_inputs=(x,)`, and keyword arguments into `example_kwargs={'x': x}`."
    )


def check_order(passes: Sequence[Pass]) -> None:
    """Check that the passes can run in this order.

    After a pass that leaves no graph, no pass may need a graph or leave none itself. After a pass that plans calls, no
    pass may need a graph, leave none, or plan calls itself.

    Raises:
        PassOrderError: a pass comes after one that must be last.
    """
    barrier: Pass | None = None
    planner: Pass | None = None
    for item in passes:
        if planner is not None and (item.needs_graph or item.is_barrier or item.plans_calls):
            raise PassOrderError(
                f"{item.name} can't come after {planner.name}, which plans for the calls as they are at that point: "
                f"put {planner.name} "
                f"last{' and leave the other out' if item.is_barrier or item.plans_calls else ''}."
            )
        if barrier is not None and item.is_barrier:
            raise PassOrderError(f"{item.name} can't come after {barrier.name}: only one of them can be the last.")
        if barrier is not None and item.needs_graph:
            raise PassOrderError(
                f"{item.name} can't come after {barrier.name}, which leaves no graph to work on:"
                f" put {barrier.name} last."
            )
        barrier = item if item.is_barrier else barrier
        planner = item if item.plans_calls else planner


def describe_passes() -> tuple[PassDescription, ...]:
    """Describe each pass."""
    return tuple(
        PassDescription(
            name=cls.name,
            cls=cls.__name__,
            summary=cls.summary(),
            modes=cls.modes,
            options={field.name: _default(field) for field in dataclasses.fields(cls)},
            preset=tuple(mode for mode, names in PRESETS.items() if cls.name in names),
        )
        for cls in _classes().values()
    )


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default if has_default(field) else "(required)"
