"""Where a module first computes something else than the original: by path, as both have the same tree.

The outputs of all module calls are compared, as the outputs of the whole are: with the original in float64, in its own dtype
and off by one unit. What a pass rewrites gives other values on the way, and is right all the same: a convolution that a
BatchNorm was folded into differs, and the BatchNorm behind it, which passes that on, doesn't. So a call that differs is no
fault where what reads its output is right again. Of those that are left the first is named whose inputs are right, and
inside of it the first again.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch import nn

from exporters.steps import FileParts, is_users, line_of_forward, source_line
from optimizer.divergence import Divergence, Off, how_far_off
from optimizer.parity import Reference, distance, is_exact, wide
from optimizer.preserve import eager_only, one_at_a_time, pinned_settings
from optimizer.runs import Runs
from optimizer.structure import leaves_of
from passes.program.interception import intercepted_calls
from passes.program.seals import opened

logger = logging.getLogger(__name__)


@dataclass
class ModuleCall:
    """One call of a module.

    Attributes:
        line: where it is called, such as "modeling_resnet.py:66"; "" where that isn't known.
        alone: whether it is given one tensor and nothing else.
        reads: the calls whose outputs it is given as they are.
        children: the calls that it makes, in order.
        beside: what it is given beside tensors: the structure of its arguments, with the numbers in it.
    """

    path: str
    number: int
    line: str
    kind: str
    alone: bool
    reads: frozenset[tuple[str, int]]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor] = field(default_factory=list)
    children: list[ModuleCall] = field(default_factory=list)
    beside: Any = None

    @property
    def key(self) -> tuple[str, int]:
        return self.path, self.number


class _Watch:
    """Gathers the calls of one run of a module; a further run of it, or of a copy, starts anew."""

    def __init__(self) -> None:
        self.root: nn.Module | None = None
        self.calls: dict[tuple[str, int], ModuleCall] = {}
        self._paths: dict[int, str] = {}
        self._numbers: Counter[str] = Counter()
        self._open: list[ModuleCall] = []
        self._frames: list[FrameType] = []
        # By the tensor that a call gave; the tensors are held, else another could have the id of one.
        self._givers: dict[int, tuple[torch.Tensor, set[tuple[str, int]]]] = {}

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
        leaves = leaves_of(opened((args, kwargs)))
        given = [tensor for _, tensor in leaves.tensors()]
        reads = frozenset(key for tensor in given for key in self._givers.get(id(tensor), (tensor, ()))[1])
        number, kind = self._numbers[path], type(module).__name__
        alone = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
        beside = leaves.structure, [value for value in leaves.values if isinstance(value, float)]
        made = ModuleCall(path, number, self._line(), kind, alone, reads, _copies(given), beside=beside)
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
        made.outputs = _copies(gave)
        for tensor in gave:
            self._givers.setdefault(id(tensor), (tensor, set()))[1].add(made.key)
        return result

    def _line(self) -> str:
        """The innermost line of a user's file between here and the call of the root: what torch's own containers call has
        that of the container's call."""
        frame = sys._getframe(1)
        end = self._frames[0] if self._frames else frame
        while frame is not end and frame.f_back is not None:
            if is_users(frame.f_code.co_filename):
                return source_line(frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back
        return ""


def first_wrong_module(reference: Reference, candidate: nn.Module, wheres: Sequence[str]) -> Divergence | None:
    """The first module whose call gives something else than the original's, at the first of the calls that shows one.

    Args:
        wheres: which calls of the reference to look at, as it names them.
    """
    original = reference.target
    if not isinstance(original, nn.Module):
        return None
    for where in wheres:
        runs = reference.reruns(where, candidate)
        own, truth, off = (watched_calls(runs.original, run) for run in (runs.own, runs.in_float64, runs.perturbed))
        got = watched_calls(runs.other, runs.candidate)
        four = FourRuns(own, truth, off, got)
        found = first_wrong_call(("", 1), four)
        worst = None if found is None else four.worst(found, "outputs")
        if found is not None and worst is not None:
            return divergence_at(own[found], worst, original, where)
    return None


def first_wrong_part(
    reference: Reference, exported: nn.Module, parts: FileParts, wheres: Sequence[str]
) -> Divergence | None:
    """The first module of a file that gives something else than the module that the file was made from.

    Each is called by itself, on what the module is given: an error in front of it doesn't show. Only modules that take one
    tensor are; an operation of a forward is found at the innermost of them around it.
    """
    for where in wheres:
        runs = reference.of(exported, where).reruns(where, exported)
        own, truth, off = (watched_calls(runs.original, run) for run in (runs.own, runs.in_float64, runs.perturbed))
        # A call ends before the one that makes it: the innermost come first.
        for call in in_order_of_ending(own["", 1]):
            part = parts.part(*call.key, alone=call.alone) if len(call.inputs) == 1 else None
            if part is None or call.key not in truth or call.key not in off:
                continue
            # What rounding in front of it does is in the noise: the call itself was given what the part is.
            noisy = replace(call, outputs=_farthest(call, truth[call.key], off[call.key]))
            worst = _off_in_part(part, call, noisy)
            if worst is not None and worst.problem:
                found = divergence_at(call, worst, exported, where)
                return replace(found, line=line_in(reference.target, call.key, reference, where) or found.line)
    return None


def _off_in_part(part: Callable[[torch.Tensor], Any], call: ModuleCall, noisy: ModuleCall) -> Off | None:
    try:
        with torch.no_grad():
            got = replace(call, outputs=_copies(tensors_in(part(call.inputs[0].clone()))))
    except Exception as error:  # what a file raises where the model doesn't is what is looked for
        logger.debug("a part of the file raised", exc_info=True)
        return Off(problem=f"raises {type(error).__name__}")
    four = FourRuns(*({call.key: each} for each in (call, call, noisy, got)))
    return four.worst(call.key, "outputs")


def line_in(original: object, key: tuple[str, int], reference: Reference, where: str) -> str:
    """The line of the original that makes a call: what passes write has none."""
    if not isinstance(original, nn.Module):
        return ""
    runs = reference.reruns(where, original)
    call = watched_calls(runs.original, runs.own).get(key)
    return "" if call is None else call.line


def watched_calls(
    runs: Runs, run: Callable[[], object], *, may_raise: bool = False
) -> dict[tuple[str, int], ModuleCall]:
    """The calls of one run; up to where it raises, if it may: those that didn't end have no outputs.

    Args:
        runs: gives what `run` runs.
    """
    watch = _Watch()
    with one_at_a_time, pinned_settings(), eager_only():
        runs.watch = watch.watching
        try:
            run()
        except Exception as error:  # the module is foreign code
            if not may_raise:
                raise
            logger.debug("the module raised while it was watched: %s", error)
        finally:
            runs.watch = None
    return watch.calls


@dataclass(frozen=True)
class FourRuns:
    """The calls of the original three times over, and those of the candidate."""

    own: dict[tuple[str, int], ModuleCall]
    truth: dict[tuple[str, int], ModuleCall]
    off: dict[tuple[str, int], ModuleCall]
    got: dict[tuple[str, int], ModuleCall]

    def worst(self, key: tuple[str, int], side: str) -> Off | None:
        """How far the inputs or outputs of a call are off; None where they can't be compared."""
        if any(key not in calls for calls in (self.got, self.own, self.truth, self.off)):
            return None
        values, *of_original = (getattr(calls[key], side) for calls in (self.got, self.own, self.truth, self.off))
        if len({len(values), *map(len, of_original)}) > 1 or not values:
            return None
        found = [how_far_off(*four) for four in zip(values, *of_original, strict=True)]
        return max(found, key=lambda one: (bool(one.problem), one.ratio))


def first_wrong_call(key: tuple[str, int], four: FourRuns) -> tuple[str, int] | None:
    """The innermost first wrong call at or below one; None where that one is right."""
    whole = four.worst(key, "outputs")
    if whole is None or not whole.problem:
        return None
    suspects: list[tuple[str, int]] = []
    for child in four.got.get(key, four.own[key]).children:
        outputs, inputs = four.worst(child.key, "outputs"), four.worst(child.key, "inputs")
        if outputs is None:
            continue
        if not outputs.problem:
            # What it reads is another number on the way to the same.
            suspects = [suspect for suspect in suspects if suspect not in child.reads]
        elif inputs is None or not inputs.problem:
            suspects.append(child.key)
    return (first_wrong_call(suspects[0], four) or suspects[0]) if suspects else key


def divergence_at(call: ModuleCall, worst: Off, original: nn.Module, where: str) -> Divergence:
    """The divergence of a call of the original that is off like this."""
    return Divergence(
        module=call.path,
        call=call.number,
        line=call.line or line_of_forward(original, call.path),
        operation=call.kind,
        error=worst.error,
        noise=worst.noise,
        problem=f"{worst.problem} at {where}",
        where=where,
        value="",
    )


def in_order_of_ending(call: ModuleCall) -> Iterator[ModuleCall]:
    for child in call.children:
        yield from in_order_of_ending(child)
    yield call


def _farthest(call: ModuleCall, *others: ModuleCall) -> list[torch.Tensor]:
    """The outputs of a call, each number of them as far off as it is in the farthest of the others."""
    outputs = []
    for index, own in enumerate(call.outputs):
        known = [other.outputs[index] for other in others if len(other.outputs) == len(call.outputs)]
        fitting = [value for value in known if value.shape == own.shape and not is_exact(own)]
        far = [torch.nan_to_num(distance(value, own)) for value in fitting]
        outputs.append(wide(own) + torch.stack(far).amax(0) if far else own)
    return outputs


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [tensor for _, tensor in leaves_of(opened(tree)).tensors()]


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    # In place operations behind it would change what a call gave.
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]
