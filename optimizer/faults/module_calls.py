"""Record the calls of a model's modules during one run: their inputs, outputs, and the lines that make them."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn

from exporters.places import is_users, source_line
from optimizer.model import Runs, eager_only, leaves_of, one_at_a_time, pinned_settings
from optimizer.parity import Reference, rerun
from passes.graph.interception import intercepted_calls

logger = logging.getLogger(__name__)

Key = tuple[str, int]
"""The path of a module, and the number of its call, counted from 1."""

ROOT: Key = ("", 1)


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
    reads: frozenset[Key]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor] = field(default_factory=list)
    children: list[ModuleCall] = field(default_factory=list)
    beside: Any = None

    @property
    def key(self) -> Key:
        return self.path, self.number


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
        leaves = leaves_of((args, kwargs))
        given = [tensor for _, tensor in leaves.tensors()]
        reads = frozenset(key for tensor in given for key in self._givers.get(id(tensor), (tensor, ()))[1])
        number, kind = self._numbers[path], type(module).__name__
        alone = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
        beside = leaves.structure, [value for value in leaves.values if isinstance(value, float)]
        made = ModuleCall(path, number, self._line(), kind, alone, reads, copies_of(given), beside=beside)
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


def watched_calls(
    reference: Reference, where: str, target: Runs | nn.Module, *, may_raise: bool = False
) -> dict[Key, ModuleCall]:
    """The module calls of one run of a module at one call of the reference.

    Args:
        where: one of the reference's `calls`.
        may_raise: if the run raises, return the calls up to then; those that didn't end have no outputs.
    """
    watch = Watch()
    runs, run = rerun(reference, where, target)
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


def in_order_of_ending(call: ModuleCall) -> Iterator[ModuleCall]:
    for child in call.children:
        yield from in_order_of_ending(child)
    yield call


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [tensor for _, tensor in leaves_of(tree).tensors()]


def copies_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    # Copies, because later in-place operations may change the tensors.
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]
