"""The base class of all passes, and the types that it shares with the optimizer."""

from __future__ import annotations

import dataclasses
import types
import typing
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from passes.errors import PassOptionError, RequirementNotMet

# (old, new, values) -> one result per comparison, as a pair of `optimizer.parity` measures: the error in exact
# arithmetic and, if it is relevant, the rounding error.
Judge = Callable[[Callable[..., Any], Callable[..., Any], tuple[Any, ...]], Sequence[tuple[Any, Any]]]


# The tensor classes whose stored values torch's operations use unchanged.
PLAIN_TENSORS: frozenset[type[torch.Tensor]] = frozenset({torch.Tensor, nn.Parameter})


@dataclass(frozen=True)
class TensorRef:
    """A parameter or buffer, identified by its place rather than by the tensor."""

    owner: nn.Module  # the module that registers it
    name: str  # its name there, such as "weight"

    @property
    def value(self) -> torch.Tensor | None:
        """The tensor; None if none is registered."""
        parameter = self.owner._parameters.get(self.name)
        return self.owner._buffers.get(self.name) if parameter is None else parameter


class ModelTree:
    """All modules of a model, including those held only in plain containers, and their tensors."""

    def __init__(self, root: nn.Module, unregistered: Sequence[tuple[str, nn.Module]] = ()) -> None:
        self.root = root
        self.unregistered = unregistered  # (path, module) of the modules held only in plain containers
        # The `GraphCall` of the root with its captured graphs, for reuse by the next graph pass
        self.graph_call: Any = None
        self.hooked: tuple[str, ...] = ()  # the paths of the modules that register hooks in their first call
        self.runs: Any = None  # the recorded `Runs` of the current tree; None if it hasn't been recorded
        self.refresh()

    def refresh(self) -> None:
        """Read the tree again after edits."""
        self._paths: dict[int, list[str]] = defaultdict(list)
        self._modules: dict[int, nn.Module] = {}
        for path, module in (*self.root.named_modules(remove_duplicate=False), *self.unregistered):
            self._paths[id(module)].append(path)
            self._modules[id(module)] = module
        self.forget_runs()

    def forget_runs(self) -> None:
        """Drop the recorded runs, which may no longer match the edited model."""
        self.runs = None

    def modules(self) -> Iterable[nn.Module]:
        """Every module once: the registered ones first, then the others."""
        return self._modules.values()

    def path(self, module: nn.Module) -> str:
        """The first path of a module; "" for the root."""
        return self._paths[id(module)][0] if id(module) in self._paths else type(module).__name__

    def paths(self, module: nn.Module) -> Sequence[str]:
        """All paths of a module."""
        return self._paths[id(module)]

    def is_registered(self, module: nn.Module) -> bool:
        """Whether the module is registered in the tree, and not only held in plain containers."""
        return all(module is not other for _, other in self.unregistered)

    def path_of(self, ref: TensorRef) -> str:
        """The path of a tensor: "layer1.conv.weight"."""
        path = self.path(ref.owner)
        return f"{path}.{ref.name}" if path else ref.name


class Edit(Protocol):
    """One change at one place in a module, which can be undone; `passes.graph.edits` has the kinds."""

    def apply(self) -> None:
        """Write the new value, and remember the current one."""

    def undo(self) -> None:
        """Restore the value from before `apply`."""


@dataclass(frozen=True)
class Skip:
    """A candidate that a pass checked and did not change."""

    where: str  # the module path
    reason: str  # a sentence without the full stop


class Place(NamedTuple):
    """Identifies one change of a pass, also across repeated runs of the pass."""

    # where, what: as in the change
    where: str
    what: str
    number: int  # the index of the change among those with the same `where` and `what`


@dataclass(frozen=True)
class Remark:
    """A place that costs performance and that only the user can fix."""

    where: str  # the module path, with the operation if the remark is about one: "encoder.layer1 (view)"
    text: str  # a sentence without the full stop


@dataclass
class Change:
    """One rewrite."""

    where: str  # the module path
    what: str  # what was done, in a few words
    number: int = 0  # as in `Place`
    edits: list[Edit] = field(default_factory=list)  # the edits of the modules
    sources: list[TensorRef] = field(
        default_factory=list
    )  # what new tensors were computed from, in the caller's module
    left_alone: bool = False  # whether this change is excluded, so that nothing of it is kept

    @property
    def place(self) -> Place:
        """The key that identifies the change among those of the pass."""
        return Place(self.where, self.what, self.number)


@dataclass(frozen=True)
class Context:
    """The settings and services that the optimizer gives to a pass.

    The services are None if the model must not be run.
    """

    mode: str  # "inference" or "training"
    device: torch.device  # the device of the model's parameters
    # (args, kwargs) at several batch sizes; empty if the user gave no example inputs
    example_calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]] = ()
    # The changes that an earlier run of this pass made and that it must not make again, each with the reason; the
    # rewriters enforce this
    left_alone: Mapping[Place, str] = field(default_factory=dict)
    # Runs the root on the example call with the given index (the first by default) inside a given context, for example
    # a recorder, and restores all state; returns the error as a clause, or None on success
    run_inside: Callable[..., str | None] | None = None
    # Runs all example calls inside a given context. Unlike `run_inside`, it runs calls that are set up to be compiled
    # as compiled code
    run_compiled: Callable[[AbstractContextManager[Any]], str | None] | None = None
    # (graph pass, tree, context) -> its result: captures the graphs of the example calls, has the pass rewrite them and
    # checks its changes
    try_on_graphs: Callable[[Any, ModelTree, Context], PassResult] | None = None
    # A context in which a pass may run the root with gradients; it restores all state and yields the arguments of the
    # first example call
    apart: Callable[[], AbstractContextManager[tuple[tuple[Any, ...], dict[str, Any]]]] | None = None
    # Compares the original part of the model with its replacement on given values
    judge: Judge | None = None
    # Whether to record also why candidates don't match a pass' pattern, with their file and line
    explain: bool = False
    # Whether a pass may time its changes and leave out those that don't pay
    may_time: bool = False

    @property
    def smallest_call(self) -> int:
        """The index of the example call with the fewest rows."""
        return fewest_rows(self.example_calls)


class Detail(Protocol):
    """The pass-specific part of a report; `str()` gives the text for the user."""

    def to_json(self) -> dict[str, Any]:
        """Return the detail as JSON-serializable data."""


@dataclass(frozen=True)
class DeclaredError:
    """The error that a pass introduces on purpose."""

    by: str  # the name of the pass
    max_error: float  # the largest absolute error of an output, relative to the largest magnitude in that output


@dataclass(frozen=True)
class Precision:
    """The reduced precision of a result, which its comparison with the original must allow for."""

    dtype: torch.dtype  # torch.bfloat16 or torch.float16
    everywhere: bool = False  # whether the weights have this dtype too; False if only autocast casts
    kept: tuple[str, ...] = ()  # the paths of the modules that compute in float32, including their submodules
    bare: tuple[str, ...] = ()  # the paths among `kept` whose outputs are not rounded to `dtype` either

    @property
    def name(self) -> str:
        """The name of the dtype: "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")


class Written(Protocol):
    """The rewriter that made the changes of a pass."""

    @property
    def edits(self) -> Sequence[Edit]:
        """All edits of modules, in the order in which they were made."""

    def roll_back(self) -> None:
        """Undo all changes; later passes must be rolled back first."""


class NothingWritten:
    """The rewriter of a pass that changed nothing."""

    edits: Sequence[Edit] = ()

    def roll_back(self) -> None:
        """See `Written`."""


@dataclass(frozen=True)
class PassResult:
    """The record of one run of a pass."""

    changes: tuple[Change, ...]  # in the order in which they were made
    skips: tuple[Skip, ...]
    rewriter: Written  # can undo the changes
    remarks: tuple[Remark, ...] = ()
    detail: Detail | None = None  # a pass-specific part of the report
    # The reduced precision of the result, whose error is then compared with the original's own error at that precision;
    # None if the precision is unchanged
    precision: Precision | None = None
    # The results of `Context.judge` for the changes that the pass had checked
    checked: tuple[tuple[Change, Sequence[tuple[Any, Any]]], ...] = ()


@dataclass(frozen=True)
class Pass(ABC):
    """A step of `optimize`: a frozen dataclass whose fields are the options of the pass."""

    name: ClassVar[str]  # the name on the command line and in reports
    modes: ClassVar[tuple[str, ...]] = ("inference", "training")  # the modes that the pass supports
    # Whether the pass must run before passes such as `torch-compile`, whose result has no graph any more
    needs_graph: ClassVar[bool] = True
    is_barrier: ClassVar[bool] = False  # whether the result has no graph and can't be exported
    # Whether the pass plans around the forward as it is at that point; no later pass may change the forward
    plans_calls: ClassVar[bool] = False
    # Whether the user relies on the effect of the pass: if it fails or is rolled back, this is an error even without
    # `strict`
    is_guarantee: ClassVar[bool] = False
    lowers_precision: ClassVar[bool] = False  # whether the result may compute at a lower precision
    # The error that the pass introduces on purpose: the largest absolute error of an output, relative to the largest
    # magnitude in that output, between 0 and 1 exclusive. Each change and the final result may have this error plus
    # rounding. None allows rounding only.
    max_error: ClassVar[float | None] = None
    # What the pass needs to run the model for, in a few words; "" if it works without example inputs
    needs_run: ClassVar[str] = ""

    @property
    def declared_error(self) -> DeclaredError | None:
        """The error that the pass declares; None if it allows rounding only."""
        return None if self.max_error is None else DeclaredError(self.name, self.max_error)

    @abstractmethod
    def run(self, tree: ModelTree, context: Context) -> PassResult:
        """Rewrite the working copy of the model.

        Raises:
            PassesError: with a one-sentence message for the user.
        """

    def check(self, context: Context) -> None:
        """Check before any work that the pass can run with this context.

        Raises:
            RequirementNotMet: the pass doesn't support the mode, or needs example inputs and has none.
            PassOptionError: `max_error` is not between 0 and 1.
        """
        if self.max_error is not None and not 0 < self.max_error < 1:
            raise PassOptionError(
                f"{self.name}: max_error must be a share of an output's largest magnitude, above 0 and below 1, not "
                f"{self.max_error!r}."
            )
        if context.mode not in self.modes:
            raise RequirementNotMet(
                f"The pass {self.name} is for {' and '.join(self.modes)}: leave it out, or use mode={self.modes[0]!r} of"
                " optimize() in Python."
            )
        if self.needs_run and not context.example_calls:
            raise RequirementNotMet(f"The pass {self.name} {self.needs_run}: add example inputs.")

    @property
    def options(self) -> dict[str, Any]:
        """The fields and their values."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def summary(cls) -> str:
        """The first line of the docstring."""
        return (cls.__doc__ or "").strip().splitlines()[0]

    @classmethod
    def from_options(cls, options: dict[str, str]) -> Pass:
        """Create the pass from options given as text on the command line.

        Raises:
            PassOptionError: an unknown option, or a value of the wrong type.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        values = {}
        for name, text in options.items():
            key = name.replace("-", "_")
            if key not in fields:
                known = ", ".join(fields) or "none"
                raise PassOptionError(f"{cls.name} has no option {name!r}; its options are: {known}.")
            if key in values:
                raise PassOptionError(f"{cls.name} has the option {name!r} twice.")
            values[key] = _parse(cls.name, key, text, typing.get_type_hints(cls)[key])
        return cls.made_with(values)

    @classmethod
    def made_with(cls, values: dict[str, Any]) -> Pass:
        """Create the pass with values for its fields.

        Raises:
            PassOptionError: a field without a default is missing, or the class rejects a value with a ValueError.
        """
        needed = [field for field in dataclasses.fields(cls) if not has_default(field) and field.name not in values]
        if needed:
            raise PassOptionError(f"{cls.name} needs the option {needed[0].name!r}.")
        try:
            return cls(**values)
        except ValueError as error:
            raise PassOptionError(f"{cls.name}: {error}") from error


def has_default(field: dataclasses.Field[Any]) -> bool:
    """Whether the option can be omitted."""
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _parse(owner: str, name: str, text: str, kind: Any) -> Any:
    """Convert text to the type of a field: bool, int, float, str, a Literal, or a union of these and None."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    kinds = typing.get_args(kind) if is_union else (kind,)
    if types.NoneType in kinds and text.lower() == "none":
        return None
    names = []
    # Any text is a valid str, so str is tried last.
    for one in sorted(kinds, key=lambda one: one is str):
        if one is bool or typing.get_origin(one) is typing.Literal:
            choices = {str(choice): choice for choice in typing.get_args(one) or (True, False)}
            if (found := text.capitalize() if one is bool else text) in choices:
                return choices[found]
            names.append("true or false" if one is bool else f"one of {', '.join(choices)}")
        elif one in (int, float, str):
            with suppress(ValueError):
                return one(text)
            names.append(one.__name__)
        elif one is not types.NoneType:
            raise PassOptionError(f"{owner}:{name} can't be set as text: create the pass in Python.")
    raise PassOptionError(f"{owner}:{name} takes {' or '.join(names)}, not {text!r}.")


def device_of(module: nn.Module) -> torch.device:
    """The device of the first parameter or buffer; the CPU if there is none."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


def fewest_rows(calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> int:
    """The index of the call with the fewest rows, by dim 0 of its first tensor that has dims."""

    def rows(number: int) -> int:
        leaves = pytree.tree_leaves(calls[number])
        return next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)

    return min(range(len(calls)), key=rows)


def paths_matching(paths: Iterable[str], pattern: str) -> set[str]:
    """The paths that match a pattern such as `"stem|layers.*"`.

    `|` separates alternatives, and `*` matches one name of a path or a part of it: "layers.*" matches "layers.0", but
    not "layers" or "layers.0.norm".
    """

    def matches(path: list[str], wanted: list[str]) -> bool:
        return len(path) == len(wanted) and all(map(fnmatchcase, path, wanted))

    wanted = [one.strip().split(".") for one in pattern.split("|")]
    return {path for path in paths if any(matches(path.split("."), one) for one in wanted)}


@contextmanager
def training_flags(root: nn.Module, flag: bool | None) -> Iterator[None]:
    """Set the `training` attribute of all modules under `root` for the block, without calling their `.train()`.

    None sets nothing. Afterwards each module has its old flag again, even if the block changed it.
    """
    flags = [(module, module.__dict__["training"]) for module in root.modules() if "training" in module.__dict__]
    try:
        for module, own in flags:
            module.__dict__["training"] = own if flag is None else flag
        yield
    finally:
        for module, own in flags:
            module.__dict__["training"] = own
