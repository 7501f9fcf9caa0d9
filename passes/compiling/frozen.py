"""Compiled code that the weights are part of, in the place of a module's call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from passes.compiling.calls import entry_of
from passes.compiling.constants import BakedTensors
from passes.torch_private import has_autocast, inductor_settings

logger = logging.getLogger(__name__)

# How often weights that are compiled in may change before they aren't compiled in any more.
_MOST_FREEZES = 4
# Of how many kinds of call it is known that there is code for them.
_MOST_KINDS = 1024
_CONSTANTS = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})


class Compile(Protocol):
    """torch.compile with its options; `see` is given each program that is made."""

    def __call__(
        self, function: Callable[..., Any], see: Callable[[Any], None] | None = None
    ) -> Callable[..., Any]: ...


class FrozenCall:
    """Stands in for the call of a module whose weights are part of what is compiled.

    Compiled code doesn't see that a tensor was written to, moved or, where it is no parameter or buffer, replaced: that is
    looked at here, at every call, and the code made anew with the tensors of then. Where that happens again and again, and
    where a tensor can't be watched, code that takes the tensors at each call is as right. torch doesn't tell of writes by
    `.data`.
    """

    def __init__(self, module: nn.Module, compile: Compile) -> None:
        self.module = module
        self.compile = compile
        self.plain: Callable[..., Any] | None = None
        self.compiled: Callable[..., Any] | None = None
        self.times = 0
        self._freeze()

    def _freeze(self) -> None:
        self.times += 1
        self.baked = BakedTensors(self.module)
        self._known: set[Any] = set()
        self.compiled = self.compile(entry_of(self.module), self.baked.add)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Where gradients may go to the weights nothing is compiled in.
        if torch.is_grad_enabled() or not self._is_frozen():
            return self._by_plain_code(args, kwargs)
        assert self.compiled is not None
        try:
            kind = _state_of(self.module), _kind_of(args), _kind_of(kwargs)
        except _NotTold:
            kind = None
        if kind is not None and kind in self._known:
            # Where code is made nevertheless, for what no kind tells, it takes the weights at each call.
            return self.compiled(self.module, args, kwargs)
        # What reads Python's bytecode goes by the setting of the process, not by the options of torch.compile. To set it
        # takes longer than all else that is done here.
        with inductor_settings(freezing=True):
            result = self.compiled(self.module, args, kwargs)
        if kind is not None:
            self._known = {kind} if len(self._known) >= _MOST_KINDS else {*self._known, kind}
        self.baked.look_up()
        if self.baked.unwatched is not None:
            self._give_up(self.baked.unwatched)
        return result

    def _is_frozen(self) -> bool:
        """Whether there is code with the weights as they are now; where they are others, it is made anew, a few times."""
        if self.compiled is None:
            return False
        if self.baked.hold:
            return True
        if self.times == _MOST_FREEZES:
            self._give_up("its tensors change between calls")
            return False
        self._freeze()
        return True

    def _give_up(self, reason: str) -> None:
        name = type(self.module).__name__
        logger.warning("the weights of %s are read at each call from now on: %s", name, reason)
        # Nothing that was made of the weights is needed any more.
        self.compiled = None
        self.baked = BakedTensors(self.module)

    def _by_plain_code(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.plain is None:
            self.plain = self.compile(entry_of(self.module))
        return self.plain(self.module, args, kwargs)


class _NotTold(Exception):
    """An argument of which nothing tells whether there is code for it."""


def _state_of(module: nn.Module) -> Any:
    return module.training, torch.is_inference_mode_enabled(), has_autocast()


def _kind_of(value: Any) -> Any:
    """What is the same for arguments that take the same code.

    Raises:
        _NotTold: there is something else than tensors and constants among them.
    """
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return value.shape, value.stride(), value.dtype, value.device
    kind = type(value)
    if kind in (tuple, list):
        return kind, *map(_kind_of, value)
    if kind is dict:
        return *value, *map(_kind_of, value.values())
    if kind not in _CONSTANTS:
        raise _NotTold
    return kind, value
