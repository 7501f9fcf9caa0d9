"""Find where a file or a module first diverges from the original: the module, and where known the line and operation.

Most files are made from a captured program, and their values have the same names as the program's. The program runs on
the original's weights, so the file's values are compared with its values, by the rule for a model's outputs. The first
wrong value in the order of the program is at fault. The file lacks some values, because their operations were merged
into others. If the next value that the file has is wrong, any of these operations may be at fault, and all are named.

For a wrong pass or result, the inputs and outputs of all module calls are recorded and judged by the same rule. Modules
are matched by path, because both models have the same tree. A correct rewrite may change intermediate values. After
conv–BN folding, the output of the convolution differs, but the output of the following BatchNorm, which only passes the
values on, doesn't. So a call that differs isn't at fault if a call that reads its output is right again. Of the remaining
calls, the first one with right inputs is at fault, and the search continues inside it.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch import nn

from exporters.base import Artifact
from exporters.places import FileValues, Place, Program, is_users, line_of_forward, source_line
from optimize_export.wording import quote
from optimizer.model import Call, eager_only, leaves_of, random_state
from optimizer.parity import (
    FACTOR,
    Flatten,
    Measurement,
    OutputParity,
    Reference,
    judged_values,
    reference_at,
    rerun,
)
from passes.graph.forwards import intercepted_calls
from passes.graph.memory import same_values

logger = logging.getLogger(__name__)

# The maximum number of calls at which a divergence is searched.
_SEARCHED = 4
# Seed of the random numbers in a file and in the program that it was made from.
_SEED = 0


@dataclass(frozen=True)
class Divergence:
    """The first value that differs from the original's."""

    # Its place in the model, as in `exporters.places.Place`.
    module: str
    call: int
    line: str
    operation: str
    # The largest error, and the rounding noise there; 0 if `problem` isn't about the size of an error.
    error: float
    noise: float
    problem: str
    """A description of the error."""
    where: str
    """The call that shows it: "batch size 3, draw 1"."""
    value: str
    """The name of the wrong value in the file; "" for the output of a module."""
    also: tuple[Place, ...] = ()
    """Other places that may be at fault instead, in the order of the model. The file has no values between them."""

    @property
    def place(self) -> Place:
        return Place(self.module, self.call, self.line, self.operation)

    def __str__(self) -> str:
        return f"first differs at {self.place}: {self.problem}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "also": [asdict(place) for place in self.also]}

    @classmethod
    def at(
        cls, place: Place, wrong: OutputParity | str, where: str, value: str = "", also: tuple[Place, ...] = ()
    ) -> Divergence:
        """The divergence at a place.

        Args:
            wrong: the judgement of the wrong value, or what happened instead of a value: "raises".
        """
        error = noise = 0.0
        if isinstance(wrong, str):
            problem = f"{wrong} at {where}"
        elif wrong.ratio > FACTOR:
            error, noise = wrong.max_error, wrong.noise
            problem = f"off by {error:.2e}, {wrong.ratio:.3g} times its rounding noise at {where}"
        else:
            problem = str(wrong.problem).removeprefix("it: ")
        return cls(**asdict(place), error=error, noise=noise, problem=problem, where=where, value=value, also=also)


@dataclass(frozen=True)
class Located:
    """The result of a search: the divergence, or the reason in `note` why none was found."""

    divergence: Divergence | None
    note: str = ""

    def __str__(self) -> str:
        if self.divergence is None:
            return f"The first difference couldn't be located: {self.note}."
        return f"It {self.divergence}."

    def to_json(self) -> dict[str, Any]:
        return {
            "divergence": None if self.divergence is None else self.divergence.to_json(),
            "divergence_note": self.note,
        }


def locate_in_file(
    artifact: Artifact,
    reference: Reference,
    measurement: Measurement,
    exported: nn.Module,
    flatten: Flatten,
    device: str,
) -> Located:
    """Find where an artifact that failed the comparison with the reference first diverges.

    An exception in the search goes into the note and isn't raised, because it would hide the failure of the artifact.

    Args:
        measurement: of the artifact; the calls that it names are searched first.
        exported: the module that the artifact was made from.
        flatten: returns the artifact's input tensors for (args, kwargs).
    """
    nowhere = f"no values inside this {artifact.format} file can be compared with the model's"
    if artifact.program is not None and artifact.values is not None:
        nowhere = "every value in the file is that of the captured program"

    def find() -> Iterator[Divergence | None]:
        wheres = suspect_calls(reference, measurement)[:_SEARCHED]
        calls = dict(reference.calls())
        for where in wheres:
            yield _by_value(artifact, device, tuple(flatten(calls[where].args, calls[where].kwargs)), where)
        if exported is not reference.target:
            yield from (first_wrong_module(reference, exported, where) for where in wheres)

    return _first_of(find(), nowhere)


def locate_in_refused(
    artifact: Artifact,
    tensors: Sequence[torch.Tensor],
    *,
    reference: Reference,
    flatten: Flatten,
    device: str,
) -> str:
    """Find where a file that its exporter refused first diverges at given inputs of the file.

    An exception in the search isn't raised, as in `locate_in_file`.

    Returns:
        A clause; "" if no divergence was found.
    """

    def find() -> Iterator[Divergence | None]:
        known = ((where, tuple(flatten(call.args, call.kwargs))) for where, call in reference.calls())
        same = (where for where, given in known if all(same_values(*pair) for pair in zip(given, tensors, strict=True)))
        where = next(same, None)
        sizes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        yield _by_value(artifact, device, tensors, where or f"inputs of {sizes}")

    found = _first_of(find(), "").divergence
    return "" if found is None else str(found)


def locate_in_module(reference: Reference, measurement: Measurement, candidate: nn.Module) -> Located:
    """Find where a module that failed the comparison first diverges; an exception goes into the note."""
    wheres = suspect_calls(reference, measurement)[:_SEARCHED]
    found = (first_wrong_module(reference, candidate, where) for where in wheres)
    return _first_of(found, "every module returns the same as in the original")


def _by_value(artifact: Artifact, device: str, tensors: Sequence[torch.Tensor], where: str) -> Divergence | None:
    """The first value that differs from the value of the same name in the program that the file was made from."""
    program = artifact.program
    if program is None or artifact.values is None:
        return None
    return first_wrong_value(program, artifact.values(artifact.path, device, program.places), tensors, where)


def first_wrong_value(
    program: Program, file: FileValues, tensors: Sequence[torch.Tensor], where: str
) -> Divergence | None:
    """Find the first value of a file that differs from the value of the same name in its program.

    If the file raises, and all values before are right, the first value that it didn't compute is reported.

    Args:
        tensors: the inputs of the file.
        where: a description of the call.
    """
    values = program.values(file.names)
    expected = reference_at(values, Call(tuple(tensors), {}), where, seed=_SEED)
    with random_state(_SEED):
        got, error = file.run(tensors)
    for name, found in zip(values.names, judged_values(expected, list(map(got.get, values.names))), strict=True):
        wrong = found or ("raises" if error else None)
        if wrong is not None and (isinstance(wrong, str) or not wrong.ok):
            also = program.merged_into(name, values.names)
            return Divergence.at(program.places[name], wrong, where, value=name, also=also)
    return None


def fault_of_runtime(artifact: Artifact, is_right: Callable[[Artifact], bool]) -> str:
    """Test whether a failed artifact is right without its runtime's graph optimizations.

    An exception of that run goes into the sentence and isn't raised, as in `locate_in_file`.

    Returns:
        A sentence; "" if the artifact can't be loaded without optimizations.
    """
    if artifact.unoptimized is None:
        return ""
    try:
        right = is_right(replace(artifact, loader=artifact.unoptimized))
    except Exception as error:  # the runtime is foreign code, and its error must not hide the failure
        logger.debug("the run without optimizations raised", exc_info=True)
        return f"Without the runtime's graph optimizations, it raised {type(error).__name__}: {quote(error)}."
    if right:
        return (
            "Without the runtime's graph optimizations the file is correct: the optimizations are at fault, not "
            "the file."
        )
    return "Without the runtime's graph optimizations it is wrong too."


def _first_of(found: Iterator[Divergence | None], nowhere: str) -> Located:
    """The first divergence of a search; if there is none, the note is `nowhere` or the exception of the search."""
    try:
        first = next(filter(None, found), None)
    except Exception as error:  # the search runs foreign code, whose error must not hide the failure
        logger.debug("locating raised", exc_info=True)
        return Located(None, f"the search raised {type(error).__name__}: {quote(error)}")
    return Located(first, nowhere if first is None else "")


def suspect_calls(reference: Reference, measurement: Measurement) -> list[str]:
    """The calls of the reference; those that a measurement names come first."""
    told = (*measurement.problems, *(text for each in measurement.outputs for text in (*each.problems, each.where)))
    return sorted((where for where, _ in reference.calls()), key=lambda where: not any(where in text for text in told))


# -------------------------------------------------------------------------------------------- the calls of all modules

Key = tuple[str, int]
"""The path of a module, "" for the root, and the number of its call, counted from 1."""

ROOT: Key = ("", 1)


@dataclass
class ModuleCall:
    """One call of a module."""

    key: Key
    line: str
    """The line of the call, such as "modeling_resnet.py:66"; "" if unknown."""
    kind: str
    """The class name of the module."""
    reads: frozenset[Key]
    """The calls whose output tensors are its inputs, unchanged."""
    # Copies on the CPU; no outputs if the call raised.
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor] = field(default_factory=list)
    children: list[ModuleCall] = field(default_factory=list)
    """The calls that it makes, in order."""

    @property
    def path(self) -> str:
        return self.key[0]


class Watch:
    """Records the module calls of one run. Another run of the module, or of a copy, starts a new record."""

    def __init__(self) -> None:
        self.root: nn.Module | None = None
        self.calls: dict[Key, ModuleCall] = {}
        self._paths: dict[int, str] = {}
        self._numbers: Counter[str] = Counter()
        self._open: list[ModuleCall] = []
        self._frames: list[FrameType] = []
        # By the id of a returned tensor: the tensor, and the calls that returned it. Keeping the tensor alive keeps its
        # id unique.
        self._givers: dict[int, tuple[torch.Tensor, set[Key]]] = {}

    @contextmanager
    def watching(self, root: nn.Module) -> Iterator[None]:
        self.root, self._paths = root, {id(module): path for path, module in root.named_modules()}
        with intercepted_calls(self.root, self._around):
            yield

    def _around(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if module is self.root and not self._open:
            self.calls, self._givers = {}, {}
            self._numbers.clear()
        path = self._paths[id(module)]
        self._numbers[path] += 1
        given = tensors_in((args, kwargs))
        reads = frozenset(key for tensor in given for key in self._givers.get(id(tensor), (tensor, ()))[1])
        made = ModuleCall(
            key=(path, self._numbers[path]),
            line=self._line(),
            kind=type(module).__name__,
            reads=reads,
            inputs=copies_of(given),
        )
        self.calls[made.key] = made
        if self._open:
            self._open[-1].children.append(made)
        self._open.append(made)
        self._frames.append(sys._getframe())
        try:
            result = call(*args, **kwargs)
        finally:
            self._open.pop()
            self._frames.pop()
        gave = tensors_in(result)
        made.outputs = copies_of(gave)
        for tensor in gave:
            self._givers.setdefault(id(tensor), (tensor, set()))[1].add(made.key)
        return result

    def _line(self) -> str:
        """The innermost line of user code between here and the call of the root.

        A module that a torch container calls has the line of the container's call.
        """
        frame = sys._getframe(1)
        end = self._frames[0] if self._frames else frame
        while frame is not end and frame.f_back is not None:
            if is_users(frame.f_code.co_filename):
                return source_line(frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back
        return ""


def record_calls(reference: Reference, where: str, target: nn.Module) -> dict[Key, ModuleCall]:
    """The module calls of one run of a module at one of the reference's `calls`."""
    watch = Watch()
    rerun(reference, where, target, watch.watching)
    return watch.calls


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [tensor for _, tensor in leaves_of(tree).tensors()]


def copies_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    # Copies, because later in-place operations may change the tensors.
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


# ------------------------------------------------------------------------------------------------------ the first wrong one

_Calls = Mapping[Key, ModuleCall]
_Name = tuple[Key, str, int, int]
"""The name of a value: the call, "inputs" or "outputs", the number of values on that side, and the index among them."""


def first_wrong_module(reference: Reference, candidate: nn.Module, where: str) -> Divergence | None:
    """Find the first module call of a candidate that diverges from the original's at one call of the reference."""
    original = reference.target
    if not isinstance(original, nn.Module):
        return None
    own = record_calls(reference, where, original)
    judged = _judgements(reference, where, original, own, _values_of(record_calls(reference, where, candidate)))
    if (key := _first_wrong(own, judged, ROOT)) is None:
        return None
    call = own[key]
    place = Place(*key, call.line or line_of_forward(original, call.path), call.kind)
    return Divergence.at(place, judged[key, "outputs"], where)


def _judgements(
    reference: Reference, where: str, original: nn.Module, own: _Calls, got: Mapping[_Name, torch.Tensor]
) -> dict[tuple[Key, str], OutputParity]:
    """The worst judgement of the inputs and of the outputs of each call; values that only `got` has are ignored."""
    names = list(_values_of(own))
    one = reference.call_at(where)
    with eager_only():
        # A capture of a graph would break at every module that is watched.
        expected = reference_at(_AllValues(original), reference.original.inputs_of(one), where, seed=one.seed)
    found: dict[tuple[Key, str], OutputParity] = {}
    for (key, side, *_), each in zip(names, judged_values(expected, [got.get(name) for name in names]), strict=True):
        worst = found.get((key, side))
        if each is not None and (worst is None or (worst.ok, -worst.ratio) > (each.ok, -each.ratio)):
            found[key, side] = each
    return found


def _first_wrong(own: _Calls, judged: Mapping[tuple[Key, str], OutputParity], key: Key) -> Key | None:
    """Find the first wrong call at or below a call, as deep as possible; None if that call isn't known to be wrong."""

    def is_wrong(key: Key, side: str = "outputs") -> bool:
        return (key, side) in judged and not judged[key, side].ok

    if not is_wrong(key):
        return None
    suspects: list[Key] = []
    for child in own[key].children:
        if is_wrong(child.key):
            if not is_wrong(child.key, "inputs"):
                suspects.append(child.key)
        elif (child.key, "outputs") in judged:
            # Its output is right, so different values in its inputs are only a rewrite.
            suspects = [suspect for suspect in suspects if suspect not in child.reads]
    return (_first_wrong(own, judged, suspects[0]) or suspects[0]) if suspects else key


class _AllValues(nn.Module):
    """Returns the inputs and outputs of all module calls of a model, in place of its outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        watch = Watch()
        with watch.watching(self.model):
            self.model(*args, **kwargs)
        return tuple(_values_of(watch.calls).values())


def _values_of(calls: _Calls) -> dict[_Name, torch.Tensor]:
    values: dict[_Name, torch.Tensor] = {}
    for key, call in calls.items():
        values |= _named(key, "inputs", call.inputs)
        values |= _named(key, "outputs", call.outputs)
    return values


def _named(key: Key, side: str, tensors: Sequence[torch.Tensor]) -> dict[_Name, torch.Tensor]:
    return {(key, side, len(tensors), index): tensor for index, tensor in enumerate(tensors)}
