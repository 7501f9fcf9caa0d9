"""What a pass is."""

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
from passes.program.changes import Change, Place, Remark, Skip
from passes.program.edits import Edit
from passes.program.model_tree import ModelTree

RunInside = Callable[[AbstractContextManager[Any]], str | None]
RunEach = Callable[[AbstractContextManager[Any], int], str | None]
# (old, new, values) -> what was found of them, in the words of `optimizer.parity`: the algebra and, where it counts, the
# rounding, of each way in which they were compared.
Judge = Callable[[Callable[..., Any], Callable[..., Any], tuple[Any, ...]], Sequence[tuple[Any, Any]]]
Apart = Callable[[], AbstractContextManager[tuple[tuple[Any, ...], dict[str, Any]]]]


@dataclass(frozen=True)
class Context:
    """What a pass may know of the run it is part of.

    Attributes:
        mode: "inference" or "training".
        device: where the model's parameters are.
        example_calls: (args, kwargs) at several batch sizes; empty where the user gave no example inputs.
        left_alone: the changes, of those that an earlier run of the pass made, that it has to leave alone, each with the
            reason. What a pass writes with sees to that.
        run_inside: runs the root as it stands, on the first of the calls, inside of a context that watches it, and leaves
            no trace; gives the clause why it couldn't, or None. None where nothing is run.
        run_each: the same on the example call of a number.
        run_compiled: the same on each of the calls, where calls that were set to be compiled are compiled.
        apart: a context in which a pass may run the root, with gradients, and leaves no trace; it yields the arguments of the
            first of the calls. None where nothing is run.
        judge: compares what a part of the model computed with what stands in its place; None where nothing is run.
    """

    mode: str
    device: torch.device
    example_calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]] = ()
    left_alone: Mapping[Place, str] = field(default_factory=dict)
    run_inside: RunInside | None = None
    run_each: RunEach | None = None
    run_compiled: RunInside | None = None
    apart: Apart | None = None
    judge: Judge | None = None


class Detail(Protocol):
    """What one pass has to show of its own; as text it is shown to people."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""


@dataclass(frozen=True)
class DeclaredError:
    """The error that a pass brings on purpose.

    Attributes:
        by: the name of the pass.
        max_error: the largest absolute error of an output, as a share of the largest magnitude of that output.
    """

    by: str
    max_error: float


@dataclass(frozen=True)
class Precision:
    """How a result computes that isn't as precise as the original: what its comparison has to allow for.

    Attributes:
        dtype: torch.bfloat16 or torch.float16.
        everywhere: whether weights and all that is made of them are of the dtype, and not just what autocast casts.
        kept: the paths of the modules that compute in float32, with all below them.
        bare: those of them whose outputs aren't rounded either.
    """

    dtype: torch.dtype
    everywhere: bool = False
    kept: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The dtype in a word: "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")


class Written(Protocol):
    """What the changes of a pass were made with."""

    @property
    def edits(self) -> Sequence[Edit]:
        """All edits of modules, in the order they were made."""

    def roll_back(self) -> None:
        """Take everything back; passes that came later have to be taken back before."""


@dataclass(frozen=True)
class PassResult:
    """What one pass did.

    Attributes:
        changes: the rewrites, in order.
        skips: the places it left alone.
        rewriter: what the changes were made with; it can take them back.
        remarks: places that cost something and that the user may mend.
        detail: what else there is to show of it; None for nothing.
        precision: how the result computes, where that is less precise than what the original does: it is judged in kind,
            by what the original itself is off by where it computes so. None for a result that is as precise.
        checked: what `Context.judge` found of changes that the pass had it look at.
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
    """A step of `optimize`: a frozen dataclass, whose fields are its options.

    Attributes:
        name: what it is called on the command line and in reports.
        modes: the modes that it is made for.
        needs_graph: whether it works on graphs, and so can't stand behind a barrier.
        is_barrier: whether what it returns has no graph and can't be exported.
        plans_calls: whether what it makes is for the calls that the forward makes then, which no later pass may change.
        is_guarantee: whether a result that it did nothing to isn't what was asked for: where it fails or is rolled back, that
            is an error, without `strict` too.
        lowers_precision: whether what it makes may compute less precisely than the original, as `PassResult.precision` says.
        max_error: the error that the pass brings on purpose: the largest absolute error of an output as a share of the
            largest magnitude of that output, above 0 and below 1. Each change, and the result, may be off by that and by
            rounding; None allows for rounding alone.
        needs_run: what it needs a run of the root for, in a few words; "" where it can do without example inputs.
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
        """The error that the pass declares; None for rounding alone."""
        return None if self.max_error is None else DeclaredError(self.name, self.max_error)

    @abstractmethod
    def run(self, tree: ModelTree, context: Context) -> PassResult:
        """Rewrite the working copy.

        Raises:
            PassesError: with one sentence for the user.
        """

    def check(self, context: Context) -> None:
        """Look, before any work, whether the pass can do what it is asked to.

        Raises:
            RequirementNotMet: it can't.
            PassOptionError: `max_error` is no share.
        """
        if self.max_error is not None and not 0 < self.max_error < 1:
            raise PassOptionError(
                f"{self.name}: max_error is a share of an output's largest magnitude, above 0 and below 1, not"
                f" {self.max_error!r}."
            )
        if context.mode not in self.modes:
            raise RequirementNotMet(
                f"The pass {self.name} is for {' and '.join(self.modes)}: leave it out, or use mode={self.modes[0]!r} of"
                " optimize() in Python."
            )
        if self.needs_run and not context.example_calls:
            raise RequirementNotMet(f"The pass {self.name} {self.needs_run}: give example inputs.")

    def would_apply(self, tree: ModelTree, context: Context) -> bool:
        """Whether a run would change something that exported files hold, too; it leaves the program as it was.

        Asked of passes that the user didn't name, where the named ones changed nothing. False where only a run tells.
        """
        return False

    @property
    def options(self) -> dict[str, Any]:
        """The fields with their values."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def summary(cls) -> str:
        """The first line of the docstring."""
        return (cls.__doc__ or "").strip().splitlines()[0]

    @classmethod
    def from_options(cls, options: dict[str, str]) -> Pass:
        """Make the pass from options as text, as the command line has them.

        Raises:
            PassOptionError: an option that the pass doesn't have, or a value that doesn't fit it.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        values = {}
        for name, text in options.items():
            key = name.replace("-", "_")
            if key not in fields:
                known = ", ".join(fields) or "none"
                raise PassOptionError(f"{cls.name} has no option {name!r}: its options are: {known}.")
            if key in values:
                raise PassOptionError(f"{cls.name} is given the option {name!r} twice.")
            values[key] = _parse(cls.name, key, text, typing.get_type_hints(cls)[key])
        return cls.made_with(values)

    @classmethod
    def made_with(cls, values: dict[str, Any]) -> Pass:
        """Make the pass with values for its fields.

        Raises:
            PassOptionError: a field without a default is missing, or the pass refuses a value with a ValueError.
        """
        needed = [field for field in dataclasses.fields(cls) if not has_default(field) and field.name not in values]
        if needed:
            raise PassOptionError(f"{cls.name} needs the option {needed[0].name!r}.")
        try:
            return cls(**values)
        except ValueError as error:
            raise PassOptionError(f"{cls.name}: {error}") from error


def has_default(field: dataclasses.Field[Any]) -> bool:
    """Whether an option may be left out."""
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _parse(owner: str, name: str, text: str, kind: Any) -> Any:
    if typing.get_origin(kind) is typing.Literal:
        choices = {str(choice): choice for choice in typing.get_args(kind)}
        if text not in choices:
            raise PassOptionError(f"{owner}:{name} is one of {', '.join(choices)}, not {text!r}.")
        return choices[text]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return _parse_union(owner, name, text, kind)
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise PassOptionError(f"{owner}:{name} is true or false, not {text!r}.")
        return text.lower() == "true"
    if kind not in (int, float, str):
        raise PassOptionError(f"{owner}:{name} can't be given as text: make the pass in Python.")
    try:
        return kind(text)
    except ValueError:
        raise PassOptionError(f"{owner}:{name} takes {kind.__name__}, not {text!r}.") from None


def _parse_union(owner: str, name: str, text: str, kind: Any) -> Any:
    kinds = typing.get_args(kind)
    if type(None) in kinds and text.lower() == "none":
        return None
    wanted = [one for one in kinds if one is not type(None)]
    # Text is what every value is at first: the narrower kinds are tried before it.
    for one in sorted(wanted, key=lambda one: one is str):
        try:
            return _parse(owner, name, text, one)
        except PassOptionError:
            continue
    names = " or ".join(getattr(one, "__name__", str(one)) for one in wanted)
    raise PassOptionError(f"{owner}:{name} takes {names}, not {text!r}.")


def device_of(module: nn.Module) -> torch.device:
    """The device of the first parameter or buffer; the CPU where there is none."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


def rows_of(call: tuple[tuple[Any, ...], dict[str, Any]]) -> int:
    """The rows of the first tensor among the arguments of a call; 0 for none."""
    tensors = (leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor))
    return next((len(tensor) for tensor in tensors if tensor.dim()), 0)
