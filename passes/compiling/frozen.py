"""Compile a module's call with its weights as constants (freezing)."""

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

# The maximum number of times that the current weights are compiled in.
_MOST_FREEZES = 4
# The maximum number of kinds of calls to remember as compiled.
_MOST_KINDS = 1024
_CONSTANTS = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})


class Compile(Protocol):
    """torch.compile with fixed options; calls `see` with each program that is made."""

    def __call__(
        self, function: Callable[..., Any], see: Callable[[Any], None] | None = None
    ) -> Callable[..., Any]: ...


class FrozenCall:
    """The call of a module whose weights are constants in its compiled code.

    Compiled code doesn't notice if a tensor was written to, moved, or (unless it is a parameter or buffer) replaced.
    This class checks that at every call and compiles again with the current tensors. After several changes, or if a
    tensor can't be checked, it falls back to compiled code that reads the tensors at each call. torch doesn't count
    writes through `.data`, so these are not noticed.
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
        # Frozen weights can't receive gradients.
        if torch.is_grad_enabled() or not self._is_frozen():
            return self._by_plain_code(args, kwargs)
        assert self.compiled is not None
        try:
            kind = _state_of(self.module), _kind_of(args), _kind_of(kwargs)
        except _NotTold:
            kind = None
        if kind is not None and kind in self._known:
            # If the call is compiled again, for a reason that the key doesn't include, the new code reads the weights
            # at each call.
            return self.compiled(self.module, args, kwargs)
        # torch.compile's front end reads this process-wide setting instead of the options of torch.compile. Changing it
        # takes longer than everything else in this method.
        with inductor_settings(freezing=True):
            result = self.compiled(self.module, args, kwargs)
        if kind is not None:
            self._known = {kind} if len(self._known) >= _MOST_KINDS else {*self._known, kind}
        self.baked.look_up()
        if self.baked.unwatched is not None:
            self._give_up(self.baked.unwatched)
        return result

    def _is_frozen(self) -> bool:
        """Whether there is code with the current weights; compiles again after a change, a limited number of times."""
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
        logger.warning("from now on the weights of %s are read at each call: %s", name, reason)
        # Free everything that was made from the weights.
        self.compiled = None
        self.baked = BakedTensors(self.module)

    def _by_plain_code(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.plain is None:
            self.plain = self.compile(entry_of(self.module))
        return self.plain(self.module, args, kwargs)


class _NotTold(Exception):
    """The kind of a call can't be determined, because of one of its arguments."""


def _state_of(module: nn.Module) -> Any:
    return module.training, torch.is_inference_mode_enabled(), has_autocast()


def _kind_of(value: Any) -> Any:
    """A key that is equal for arguments that use the same compiled code.

    Raises:
        _NotTold: the arguments contain something other than tensors and constants.
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
