"""Find the first module that diverges from the original. Modules are matched by path, because both have the same tree.

The outputs of all module calls are compared as the outputs of the model are: with the original in float64, in its own
dtype, and off by one ulp. A correct rewrite may change intermediate values. After conv–BN folding the output of the
convolution differs, but the output of the BatchNorm after it, which only passes the values on, doesn't. So a call that
differs isn't at fault if a call that reads its output is right again. Of the remaining calls, the first one with right
inputs is at fault, and the search goes on inside it.
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
from optimizer.faults.divergence import Divergence, Off, how_far_off
from optimizer.model import Runs, eager_only, leaves_of, one_at_a_time, pinned_settings
from optimizer.parity import Reference, distance, is_exact, reference_of, reruns, wide
from passes.program.interception import intercepted_calls
from passes.program.seals import opened

logger = logging.getLogger(__name__)


@dataclass
class ModuleCall:
    """One call of a module.

    Attributes:
        path: the path of the module; "" for the root.
        number: the index of this call among the calls of the module, counted from 1.
        line: the line of the call, such as "modeling_resnet.py:66"; "" if unknown.
        kind: the class name of the module.
        alone: whether its only argument is one tensor.
        reads: the calls whose output tensors are its inputs, unchanged.
        inputs, outputs: copies on the CPU; no outputs if the call raised.
        children: the calls that it makes, in order.
        beside: its arguments other than tensors: the structure of the arguments, and the float numbers in them.
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
    """Records the module calls of one run. Another run of the module, or of a copy, starts a new record."""

    def __init__(self) -> None:
        self.root: nn.Module | None = None
        self.calls: dict[tuple[str, int], ModuleCall] = {}
        self._paths: dict[int, str] = {}
        self._numbers: Counter[str] = Counter()
        self._open: list[ModuleCall] = []
        self._frames: list[FrameType] = []
        # By the id of a returned tensor: the tensor, and the calls that returned it. Keeping the tensor alive keeps its
        # id unique.
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


def first_wrong_module(reference: Reference, candidate: nn.Module, wheres: Sequence[str]) -> Divergence | None:
    """Find the first module call that diverges from the original's, at the first of the calls that shows one.

    Args:
        wheres: the calls of the reference to search, by their names there.
    """
    original = reference.target
    if not isinstance(original, nn.Module):
        return None
    for where in wheres:
        runs = reruns(reference, where, candidate)
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
    """Find the first module of a file that diverges from the same module of the exported model.

    Each module of the file is called alone, on the input that the exported module gets. So an error before it has no
    effect. Only modules with one input tensor are called; an error elsewhere is reported for the innermost such module
    around it.

    Args:
        exported: the module that the file was made from.
        wheres: the calls of the reference to search, by their names there.
    """
    for where in wheres:
        runs = reruns(reference_of(exported, reference, where), where, exported)
        own, truth, off = (watched_calls(runs.original, run) for run in (runs.own, runs.in_float64, runs.perturbed))
        # A call ends before its caller ends, so inner modules come first.
        for call in in_order_of_ending(own["", 1]):
            part = parts.part(*call.key, alone=call.alone) if len(call.inputs) == 1 else None
            if part is None or call.key not in truth or call.key not in off:
                continue
            # The part gets the inputs of the own run. Rounding before the module therefore only adds to the noise.
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
    except Exception as error:  # the file is foreign code, and an exception in it is a divergence
        logger.debug("a part of the file raised", exc_info=True)
        return Off(problem=f"raises {type(error).__name__}")
    four = FourRuns(*({call.key: each} for each in (call, call, noisy, got)))
    return four.worst(call.key, "outputs")


def line_in(original: object, key: tuple[str, int], reference: Reference, where: str) -> str:
    """The line of the original's code that makes a call, because code that passes generate has no lines."""
    if not isinstance(original, nn.Module):
        return ""
    runs = reruns(reference, where, original)
    call = watched_calls(runs.original, runs.own).get(key)
    return "" if call is None else call.line


def watched_calls(
    runs: Runs, run: Callable[[], object], *, may_raise: bool = False
) -> dict[tuple[str, int], ModuleCall]:
    """The module calls of one run.

    Args:
        runs: provides the module that `run` runs.
        run: makes one run.
        may_raise: if the run raises, return the calls up to then; those that didn't end have no outputs.
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
    """The module calls of three runs of the original and of one run of the candidate.

    Attributes:
        own, truth, off: of the original in its own dtype, in float64, and off by one ulp.
        got: of the candidate.
    """

    own: dict[tuple[str, int], ModuleCall]
    truth: dict[tuple[str, int], ModuleCall]
    off: dict[tuple[str, int], ModuleCall]
    got: dict[tuple[str, int], ModuleCall]

    def worst(self, key: tuple[str, int], side: str) -> Off | None:
        """The worst error among the inputs or outputs of a call; None if they can't be compared.

        Args:
            side: "inputs" or "outputs".
        """
        if any(key not in calls for calls in (self.got, self.own, self.truth, self.off)):
            return None
        values, *of_original = (getattr(calls[key], side) for calls in (self.got, self.own, self.truth, self.off))
        if len({len(values), *map(len, of_original)}) > 1 or not values:
            return None
        found = [how_far_off(*four) for four in zip(values, *of_original, strict=True)]
        return max(found, key=lambda one: (bool(one.problem), one.ratio))


def first_wrong_call(key: tuple[str, int], four: FourRuns) -> tuple[str, int] | None:
    """Find the first wrong call at or below a call, as deep as possible.

    Returns:
        The key of the call; None if the given call is right, or can't be compared.
    """
    whole = four.worst(key, "outputs")
    if whole is None or not whole.problem:
        return None
    suspects: list[tuple[str, int]] = []
    for child in four.got.get(key, four.own[key]).children:
        outputs, inputs = four.worst(child.key, "outputs"), four.worst(child.key, "inputs")
        if outputs is None:
            continue
        if not outputs.problem:
            # Its output is right, so different values in its inputs are only a rewrite.
            suspects = [suspect for suspect in suspects if suspect not in child.reads]
        elif inputs is None or not inputs.problem:
            suspects.append(child.key)
    return (first_wrong_call(suspects[0], four) or suspects[0]) if suspects else key


def divergence_at(call: ModuleCall, worst: Off, original: nn.Module, where: str) -> Divergence:
    """Describe the divergence at a call of the original whose worst error is given."""
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
    """The outputs of a call, each element moved by its largest distance from the other calls' outputs."""
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
    # Copies, because later in-place operations may change the tensors.
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]
