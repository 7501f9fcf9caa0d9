"""The base class of all passes, and the types that it shares with the optimizer."""

from __future__ import annotations

import dataclasses
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from passes.errors import PassOptionError, RequirementNotMet
from passes.graph.changes import Change, Edit, Place, Remark, Skip
from passes.graph.model_tree import ModelTree

RunCompiled = Callable[[AbstractContextManager[Any]], str | None]
# (old, new, values) -> one result per comparison, as a pair of `optimizer.parity` measures: the error in exact
# arithmetic and, if it is relevant, the rounding error.
Judge = Callable[[Callable[..., Any], Callable[..., Any], tuple[Any, ...]], Sequence[tuple[Any, Any]]]
Apart = Callable[[], AbstractContextManager[tuple[tuple[Any, ...], dict[str, Any]]]]


# (graph pass, tree, context) -> its result
TryOnGraphs = Callable[[Any, ModelTree, "Context"], "PassResult"]


class RunInside(Protocol):
    """The type of `Context.run_inside`."""

    def __call__(self, watch: AbstractContextManager[Any], number: int = 0, /) -> str | None: ...


@dataclass(frozen=True)
class Context:
    """The settings and services that the optimizer gives to a pass.

    Attributes:
        mode: "inference" or "training".
        device: the device of the model's parameters.
        example_calls: (args, kwargs) at several batch sizes; empty if the user gave no example inputs.
        left_alone: changes that an earlier run of this pass made and that it must not make again, each with the reason.
            The rewriters enforce this.
        run_inside: runs the root on the example call with the given index (the first by default) inside a given
            context, for example a recorder, and restores all state. Returns the error as a clause, or None on success.
            None if the model must not be run.
        run_compiled: runs all example calls inside a given context. Unlike `run_inside`, it runs calls that are set up
            to be compiled as compiled code.
        try_on_graphs: captures the graphs of the example calls, has a graph pass rewrite them and checks its changes; None
            if the model must not be run.
        apart: a context in which a pass may run the root with gradients; it restores all state and yields the arguments
            of the first example call. None if the model must not be run.
        judge: compares the original part of the model with its replacement on given values; None if the model must not
            be run.
        explain: whether to record also why candidates don't match a pass' pattern, with their file and line.
    """

    mode: str
    device: torch.device
    example_calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]] = ()
    left_alone: Mapping[Place, str] = field(default_factory=dict)
    run_inside: RunInside | None = None
    run_compiled: RunCompiled | None = None
    try_on_graphs: TryOnGraphs | None = None
    apart: Apart | None = None
    judge: Judge | None = None
    explain: bool = False

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
    """The reduced precision of a result, which its comparison with the original must allow for.

    Attributes:
        dtype: torch.bfloat16 or torch.float16.
        everywhere: whether the weights have this dtype too; False if only autocast casts.
        kept: the paths of the modules that compute in float32, including their submodules.
        bare: the paths among `kept` whose outputs are not rounded to `dtype` either.
    """

    dtype: torch.dtype
    everywhere: bool = False
    kept: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()

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


@dataclass(frozen=True)
class PassResult:
    """The record of one run of a pass.

    Attributes:
        changes: the changes that were made, in order.
        skips: the candidates that were not changed, each with the reason.
        rewriter: the object that made the changes; it can undo them.
        remarks: places that cost performance and that only the user can fix.
        detail: a pass-specific part of the report; None for nothing.
        precision: the reduced precision of the result. Its error is then compared with the original's own error at that
            precision. None if the precision is unchanged.
        checked: the results of `Context.judge` for the changes that the pass had checked.
    """

    changes: tuple[Change, ...]
    skips: tuple[Skip, ...]
    rewriter: Written
    remarks: tuple[Remark, ...] = ()
    detail: Detail | None = None
    precision: Precision | None = None
    checked: tuple[tuple[Change, Sequence[tuple[Any, Any]]], ...] = ()


@dataclass(frozen=True)
class Pass(ABC):
    """A step of `optimize`: a frozen dataclass whose fields are the options of the pass.

    Attributes:
        name: the name on the command line and in reports.
        modes: the modes that the pass supports.
        needs_graph: whether the pass must run before passes such as `torch-compile`, whose result has no graph any
            more.
        is_barrier: whether the result has no graph and can't be exported.
        plans_calls: whether the pass plans around the forward as it is at that point; no later pass may change the
            forward.
        is_guarantee: whether the user relies on the effect of the pass. If it fails or is rolled back, this is an error
            even without `strict`.
        lowers_precision: whether the result may compute at a lower precision; see `PassResult.precision`.
        max_error: the error that the pass introduces on purpose: the largest absolute error of an output, relative to
            the largest magnitude in that output, between 0 and 1 exclusive. Each change and the final result may have
            this error plus rounding. None allows rounding only.
        needs_run: what the pass needs to run the model for, in a few words; "" if it works without example inputs.
    """

    name: ClassVar[str]
    modes: ClassVar[tuple[str, ...]] = ("inference", "training")
    needs_graph: ClassVar[bool] = True
    is_barrier: ClassVar[bool] = False
    plans_calls: ClassVar[bool] = False
    is_guarantee: ClassVar[bool] = False
    lowers_precision: ClassVar[bool] = False
    max_error: ClassVar[float | None] = None
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
    if typing.get_origin(kind) is typing.Literal:
        choices = {str(choice): choice for choice in typing.get_args(kind)}
        if text not in choices:
            raise PassOptionError(f"{owner}:{name} must be one of {', '.join(choices)}, not {text!r}.")
        return choices[text]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return _parse_union(owner, name, text, kind)
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise PassOptionError(f"{owner}:{name} must be true or false, not {text!r}.")
        return text.lower() == "true"
    if kind not in (int, float, str):
        raise PassOptionError(f"{owner}:{name} can't be set as text: create the pass in Python.")
    try:
        return kind(text)
    except ValueError:
        raise PassOptionError(f"{owner}:{name} takes {kind.__name__}, not {text!r}.") from None


def _parse_union(owner: str, name: str, text: str, kind: Any) -> Any:
    kinds = typing.get_args(kind)
    if type(None) in kinds and text.lower() == "none":
        return None
    wanted = [one for one in kinds if one is not type(None)]
    # Any text is a valid str, so str is tried last.
    for one in sorted(wanted, key=lambda one: one is str):
        try:
            return _parse(owner, name, text, one)
        except PassOptionError:
            continue
    names = " or ".join(getattr(one, "__name__", str(one)) for one in wanted)
    raise PassOptionError(f"{owner}:{name} takes {names}, not {text!r}.")


def device_of(module: nn.Module) -> torch.device:
    """The device of the first parameter or buffer; the CPU if there is none."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


def fewest_rows(calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> int:
    """The index of the call with the smallest batch size."""
    return min(range(len(calls)), key=lambda number: rows_of(calls[number]))


def rows_of(call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> int:
    """The batch size of a call: the first dim of its first tensor that has dims; 0 if there is none."""
    tensors = (leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor))
    return next((len(tensor) for tensor in tensors if tensor.dim()), 0)
