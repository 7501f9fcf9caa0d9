"""Find the first module that diverges from the original, for passes and for files whose values have no known names.

The inputs and outputs of all module calls are recorded and judged by the rule for a model's outputs. Modules are matched
by path, because both models have the same tree. A correct rewrite may change intermediate values. After conv–BN folding,
the output of the convolution differs, but the output of the following BatchNorm, which only passes the values on,
doesn't. So a call that differs isn't at fault if a call that reads its output is right again. Of the remaining calls, the
first one with right inputs is at fault, and the search continues inside it.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn

from exporters.places import FileParts, FileValues, Place, is_users, line_of_forward, source_line
from optimize_export.elementwise import distance, is_exact
from optimizer.model import eager_only, leaves_of
from optimizer.parity import FACTOR, OutputParity, Reference, judged_values, reference_at, rerun
from passes.graph.forwards import intercepted_calls

# ----------------------------------------------------------------------------------------------------------- the result


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


# ------------------------------------------------------------------------------------------------------------ recording

logger = logging.getLogger(__name__)

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
    alone: bool
    """Whether its only argument is one tensor."""
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
            alone=len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor),
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


def in_order_of_ending(call: ModuleCall) -> Iterator[ModuleCall]:
    for child in call.children:
        yield from in_order_of_ending(child)
    yield call


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [tensor for _, tensor in leaves_of(tree).tensors()]


def copies_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    # Copies, because later in-place operations may change the tensors.
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


# ------------------------------------------------------------------------------------------------------------ searching

_Calls = Mapping[Key, ModuleCall]
_Name = tuple[Key, str, int, int]
"""The name of a value: the call, "inputs" or "outputs", the number of values on that side, and the index among them."""

# The values nearest to a module's output in a sample of this many elements are compared with the whole output.
_SAMPLE = 256
_NEAR = 4


def first_wrong_module(reference: Reference, candidate: nn.Module, where: str) -> Divergence | None:
    """Find the first module call of a candidate that diverges from the original's at one call of the reference."""
    if not isinstance(reference.target, nn.Module):
        return None
    own = record_calls(reference, where, reference.target)
    got = _values_of(record_calls(reference, where, candidate))
    verdicts = _Verdicts(reference, where, reference.target, own, got)
    return verdicts.divergence(verdicts.first_wrong())


def first_wrong_part(reference: Reference, exported: nn.Module, parts: FileParts, where: str) -> Divergence | None:
    """Find the first module of a file that diverges from the same module of the exported model.

    Each module of the file is called alone, on the input that the exported module gets. So an error before it has no
    effect. Only modules with one input tensor are called; an error elsewhere is reported for the innermost such module
    around it.
    """
    own = record_calls(reference, where, exported)
    got: dict[_Name, torch.Tensor] = {}
    raised: dict[Key, str] = {}
    # A call ends before its caller ends, so inner modules come first.
    order = list(in_order_of_ending(own[ROOT]))
    for call in order:
        part = parts.part(*call.key, alone=call.alone) if len(call.inputs) == 1 else None
        if part is None:
            continue
        try:
            with torch.no_grad():
                outputs = copies_of(tensors_in(part(call.inputs[0].clone())))
        except Exception as error:  # the file is foreign code, and an exception in it is a divergence
            logger.debug("a part of the file raised", exc_info=True)
            raised[call.key] = f"raises {type(error).__name__}"
            continue
        got |= _named(call.key, "outputs", outputs)
    verdicts = _Verdicts(reference, where, exported, own, got, raised)
    return verdicts.divergence(next((call.key for call in order if verdicts.is_right(call.key) is False), None))


def first_module_without_value(
    reference: Reference, exported: nn.Module, file: FileValues, tensors: Sequence[torch.Tensor], where: str
) -> Divergence | None:
    """Find the first module of the exported model whose output isn't among the values of a file.

    The nearest value counts as the module's output in the file, under any name and in any shape.

    Args:
        tensors: the file's inputs at that call.
    """
    own = record_calls(reference, where, exported)
    values, error = file.run(tensors)
    got: dict[_Name, torch.Tensor] = {}
    for name, tensor in _values_of(own).items():
        nearest = _nearest(tensor, (*values.values(), *tensors))
        # The file's constants aren't among its values. So an input without a similar value proves nothing, and neither
        # does an integer input, such as indices.
        if nearest is not None and (name[1] == "outputs" or not is_exact(tensor)):
            got[name] = nearest
    outputs = [values[name] for name in file.outputs if name in values]
    if len(outputs) == len(own[ROOT].outputs):
        got |= _named(ROOT, "outputs", outputs)
    raised = dict.fromkeys(own, "the file raises there") if error else {}
    verdicts = _Verdicts(reference, where, exported, own, got, raised)
    return verdicts.divergence(verdicts.first_wrong())


class _Verdicts:
    """The judgements of the inputs and outputs of all module calls.

    Args:
        target: the module that is right.
        own: its calls.
        got: the values to judge; values without a counterpart in `own` are ignored.
        raised: by call, what happened instead of outputs that are missing in `got`.
    """

    def __init__(
        self,
        reference: Reference,
        where: str,
        target: nn.Module,
        own: _Calls,
        got: Mapping[_Name, torch.Tensor],
        raised: Mapping[Key, str] | None = None,
    ) -> None:
        self._reference, self._where, self._target = reference, where, target
        self._own, self._raised = own, raised or {}
        names = list(_values_of(own))
        one = reference.call_at(where)
        with eager_only():
            # A capture of a graph would break at every module that is watched.
            expected = reference_at(_AllValues(target), reference.original.inputs_of(one), where, seed=one.seed)
        judged = judged_values(expected, [got.get(name) for name in names])
        self._worst: dict[tuple[Key, str], OutputParity] = {}
        for (key, side, *_), found in zip(names, judged, strict=True):
            worst = self._worst.get((key, side))
            if found is not None and (worst is None or (worst.ok, -worst.ratio) > (found.ok, -found.ratio)):
                self._worst[key, side] = found

    def is_right(self, key: Key, side: str = "outputs") -> bool | None:
        """Whether the inputs or outputs of a call are right; None if they are unknown."""
        worst = self._worst.get((key, side))
        if worst is None:
            return False if side == "outputs" and key in self._raised else None
        return worst.ok

    def first_wrong(self, key: Key = ROOT) -> Key | None:
        """Find the first wrong call at or below a call, as deep as possible; None if that call isn't wrong."""
        if self.is_right(key) is not False:
            return None
        suspects: list[Key] = []
        for child in self._own[key].children:
            right = self.is_right(child.key)
            if right:
                # Its output is right, so different values in its inputs are only a rewrite.
                suspects = [suspect for suspect in suspects if suspect not in child.reads]
            elif right is False and self.is_right(child.key, "inputs") is not False:
                suspects.append(child.key)
        return (self.first_wrong(suspects[0]) or suspects[0]) if suspects else key

    def divergence(self, key: Key | None) -> Divergence | None:
        """Describe a wrong call; None for None."""
        if key is None:
            return None
        call, original = self._own[key], self._reference.target
        line = call.line
        if isinstance(original, nn.Module) and original is not self._target:
            # Code that passes generate has no lines, but the original's code has.
            same = record_calls(self._reference, self._where, original).get(key)
            line = same.line if same is not None and same.line else line
        place = Place(*call.key, line or line_of_forward(self._target, call.path), call.kind)
        return Divergence.at(place, self._raised.get(key) or self._worst[key, "outputs"], self._where)


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


def _nearest(tensor: torch.Tensor, values: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """The value with the dtype and number of elements of a tensor that is nearest to it, in its shape."""
    alike = [
        value.cpu().reshape(tensor.shape)
        for value in values
        if value.dtype == tensor.dtype and value.numel() == tensor.numel()
    ]
    near = sorted(alike, key=lambda value: _total_distance(_sample(value), _sample(tensor)))[:_NEAR]
    return min(near, key=lambda value: _total_distance(value, tensor), default=None)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1)[:: max(1, tensor.numel() // _SAMPLE)]


def _total_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nan_to_num(distance(a, b), nan=torch.inf).sum())
