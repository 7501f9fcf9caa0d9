"""Find where feature maps lose the channels_last format on their way through a module, by watching one run.

A feature map is a tensor of 4 or 5 dims, (batch, channels, …). Convolutions with channels_last weights return maps in
that format, and most operations keep it. After an operation that returns a contiguous map, the next such convolution
has to convert it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from passes.graph.forwards import intercepted_calls
from passes.graph.layouts import CONTIGUOUS, EITHER, LAST, is_channels_last, kind_of, layout_of
from passes.graph.recording import METADATA, name_of
from passes.memory_format.forwards import draws_for_last, enters_channels_last, is_kept_contiguous
from passes.torch_private import share_storage, without_torch_function

__all__ = ["CONTIGUOUS", "EITHER", "LAST", "LayoutWatch", "Layouts", "Loss", "layout_of"]

_CONVOLUTIONS = frozenset({"conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d", "convolution"})
# Operations that copy only if the format requires it.
_COPIES = frozenset({"contiguous", "reshape", "flatten", "to"})


_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass
class Loss:
    """A place where an operation returns feature maps in another format than it received."""

    where: str  # the path of the innermost module call, and the operation: "encoder.layer1 (view)"
    elements: int = 0  # the number of elements of these maps, over all calls
    converted: int = 0  # the number of elements that later convolutions convert back to channels_last
    convolutions: list[str] = field(default_factory=list)  # the paths of these convolutions, in the order of execution
    goes_on: bool = False  # whether an operation computes further maps from these
    # Whether the operation reads a channels_last map and writes a new one; a view alone costs nothing
    copies: bool = False

    @property
    def counts(self) -> bool:
        """Whether the loss makes something slower: a conversion, or operations in the other format."""
        return self.converted > 0 or (self.goes_on and self.copies)

    @property
    def text(self) -> str:
        """What is lost, as a clause."""
        first, *others = self.convolutions or [""]
        which = f"{first} and {len(others)} more" if others else first
        lost = f"channels_last is lost here for {self.elements:,} elements"
        if self.converted:
            return f"{lost}: {which} convert{'' if others else 's'} {self.converted:,} elements back"
        return f"{lost}: the operations after it run in contiguous format"


@dataclass
class Layouts:
    """The result of watching one run."""

    moved: int = 0  # the number of elements that were copied only to change the format
    # The paths of the convolutions with `ChannelsLastInput` that converted their input, in the order of execution
    entries: list[str] = field(default_factory=list)
    # The paths of the modules that drew random numbers for channels_last maps
    draws: list[str] = field(default_factory=list)
    scripted: list[str] = field(default_factory=list)  # the paths of TorchScript modules, whose inside can't be watched
    _losses: dict[str, Loss] = field(default_factory=dict)

    @property
    def losses(self) -> list[Loss]:
        """The losses that make something slower, those with the most converted elements first."""
        found = [loss for loss in self._losses.values() if loss.counts]
        return sorted(found, key=lambda loss: (-loss.converted, -loss.elements))


@dataclass(frozen=True)
class _State:
    """What is known about one tensor."""

    was_last: bool = False  # whether it is in channels_last, or was made from a tensor that was
    # Where this map lost the format; None if it didn't, if that was intended, or if it is no map now
    loss: Loss | None = None
    # Whether it is contiguous on purpose: made by a convolution that was kept contiguous, or from such a map
    is_meant: bool = False


_NOTHING = _State()
_MEANT = _State(is_meant=True)


def _unseen(function: _Function) -> _Function:
    """Decorate a function so that its operations on tensors are invisible to this mode and all others."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with without_torch_function():
            return function(*args, **kwargs)

    return cast(_Function, call)


class LayoutWatch(TorchFunctionMode):
    """A context that watches one call of `root`; it keeps no tensor of the run alive."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.root = root
        self.layouts = Layouts()  # the result, complete after the block
        self._frames: list[nn.Module] = []
        self._states: dict[int, tuple[weakref.ref[torch.Tensor], _State]] = {}
        self._paths = {id(module): path for path, module in root.named_modules()}
        self._stack = ExitStack()

    def __enter__(self) -> LayoutWatch:
        self._stack.enter_context(intercepted_calls(self.root, self._around))
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._stack.close()
        self._states.clear()

    def _around(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._frames.append(module)
        try:
            outputs = call(*args, **kwargs)
            if isinstance(module, torch.jit.ScriptModule):
                self.layouts.scripted.append(self._path)
                self._see("TorchScript", args, kwargs, outputs)
        finally:
            self._frames.pop()
        return outputs

    @property
    def _path(self) -> str:
        return self._paths.get(id(self._frames[-1]), "") or "the root"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name == "__get__":
            name = name_of(func.__self__)
        if not self._frames or name in METADATA:
            return func(*args, **kwargs)
        if name in _CONVOLUTIONS:
            self._convolve(args, kwargs)
        elif name == "clone" and enters_channels_last(self._frames[-1]):
            self._enter(args[0])
        elif draws_for_last(name, args, kwargs):
            self._note_in(self.layouts.draws)
        result = func(*args, **kwargs)
        self._see(name, args, kwargs, result)
        return result

    @_unseen
    def _convolve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a convolution that has to convert a contiguous map because its weight is in channels_last."""
        given = {**dict(zip(("input", "weight"), args, strict=False)), **kwargs}
        input, weight = given.get("input"), given.get("weight")
        if not isinstance(input, torch.Tensor) or not isinstance(weight, torch.Tensor):
            return
        if layout_of(input) == CONTIGUOUS and layout_of(weight) is not None and is_channels_last(weight):
            self._convert(input)

    @_unseen
    def _enter(self, input: torch.Tensor) -> None:
        """Record a convolution that converts its input to channels_last although its weight is contiguous."""
        self._note_in(self.layouts.entries)
        self._convert(input)

    def _note_in(self, paths: list[str]) -> None:
        path = self._paths[id(self._frames[-1])]
        if path not in paths:
            paths.append(path)

    def _convert(self, input: torch.Tensor) -> None:
        elements = input.numel()
        self.layouts.moved += elements
        state = self._state_of(input)
        if state.loss is not None:
            state.loss.converted += elements
            if self._path not in state.loss.convolutions:
                state.loss.convolutions.append(self._path)

    @_unseen
    def _see(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Record the formats of an operation's results, given those of its arguments."""
        made = _tensors_in(result)
        if not made:
            return
        given = _tensors_in((args, kwargs))
        states = [self._state_of(leaf) for leaf in given]
        for leaf in made:
            self._keep(leaf, self._state_after(name, leaf, given, states))
        if name in _COPIES and given and made[0].numel() == given[0].numel() and not _shares(made[0], given[0]):
            self.layouts.moved += made[0].numel()

    def _state_after(self, name: str, made: torch.Tensor, given: list[torch.Tensor], states: list[_State]) -> _State:
        layout = layout_of(made)
        is_view = any(_shares(made, leaf) for leaf in given)
        if is_kept_contiguous(self._frames[-1]):
            # A wrapper made this convolution leave the format on purpose.
            return _MEANT
        for state in states if layout is not None and not is_view else ():
            if state.loss is not None:
                state.loss.goes_on = True
        if layout == LAST:
            return _State(was_last=True)
        if layout == CONTIGUOUS and any(state.is_meant for state in states):
            return _MEANT
        if layout == EITHER or not any(state.was_last for state in states):
            return _NOTHING
        if layout is None:
            # Tokens (more than 2 dims) may become a map again; rows of features don't.
            return _State(was_last=made.dim() > 2)
        alike = [(leaf, state) for leaf, state in zip(given, states, strict=True) if leaf.dim() == made.dim()]
        loss = next((state.loss for _, state in alike if state.loss is not None), None)
        was_map = any(layout_of(leaf) == LAST for leaf, _ in alike)
        if loss is None and (was_map or self._is_map_again(made, given, states)):
            loss = self._loss_at(name, made)
            loss.copies |= was_map and not is_view
        return _State(was_last=True, loss=loss)

    def _is_map_again(self, made: torch.Tensor, given: list[torch.Tensor], states: list[_State]) -> bool:
        """Whether the operation makes a map from a tensor that isn't one but was made from one, as `view` and back.

        A tensor with other dims than the original map counts as an intermediate value as long as it has these dims.
        """
        return not any(
            state.was_last and (leaf.dim() == made.dim() or state.loss is not None or layout_of(leaf) == LAST)
            for leaf, state in zip(given, states, strict=True)
        )

    def _loss_at(self, name: str, made: torch.Tensor) -> Loss:
        where = f"{self._path} ({name})"
        loss = self.layouts._losses.setdefault(where, Loss(where))
        loss.elements += made.numel()
        return loss

    def _keep(self, tensor: torch.Tensor, state: _State) -> None:
        self._states[id(tensor)] = weakref.ref(tensor), state

    def _state_of(self, tensor: torch.Tensor) -> _State:
        reference, state = self._states.get(id(tensor), (None, _NOTHING))
        return state if reference is not None and reference() is tensor else _NOTHING


def _tensors_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _shares(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both tensors use the same storage."""
    if tensor is other:
        return True
    both_plain = kind_of(tensor) is None is kind_of(other)
    return both_plain and share_storage(tensor, other)
