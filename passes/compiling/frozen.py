"""Compile a module's call with its weights as constants (freezing)."""

from __future__ import annotations

import itertools
import logging
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from passes.graph.backend import entry_of
from passes.torch_private import has_autocast, inductor_settings


class BakedTensors:
    """The tensors that are constants of compiled code, and the attributes that hold the tensors and modules of a module.

    A tensor counts as unchanged if the same attributes still hold the same objects, its memory address is the same, and
    torch counts no write to it. The tensors are not kept alive.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        # Why the tensors can't be watched; None if they can be.
        self.unwatched: str | None = None
        self._found: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        self._looked_up = True
        self._put([])

    def add(self, program: Any) -> None:
        """Add the constant tensors of one program, in their current state."""
        if self.unwatched is not None:
            return
        for node in program.graph.nodes:
            value = _attribute_of(program, str(node.target)) if node.op == "get_attr" else None
            if not isinstance(value, torch.Tensor) or id(value) in self._found:
                continue
            if value.is_inference() or value.layout is not torch.strided:
                kind = "an inference tensor" if value.is_inference() else f"of the layout {value.layout}"
                self.unwatched = f"a tensor of shape {tuple(value.shape)} is {kind}: torch doesn't track writes to it"
                return
            self._found[id(value)] = weakref.ref(value), value._version, value.data_ptr()
            self._looked_up = False

    def look_up(self) -> None:
        """Find the attributes that hold the tensors that were added."""
        if self._looked_up or self.unwatched is not None:
            return
        self._looked_up = True
        places = [
            (home, key, value)
            for module in self.root.modules()
            for home in (module._parameters, module._buffers, module._modules, vars(module))
            for key, value in home.items()
            if isinstance(value, torch.Tensor | nn.Module)
        ]
        held = {id(value) for *_, value in places}
        unheld = next((reference() for key, (reference, *_) in self._found.items() if key not in held), None)
        if not held.issuperset(self._found):
            shape = "" if unheld is None else f" of shape {tuple(unheld.shape)}"
            self.unwatched = f"a tensor{shape} that it reads is not an attribute of it or of a module in it"
            places = []
        self._put(places)

    def _put(self, places: Sequence[tuple[dict[str, Any], str, Any]]) -> None:
        # Stored in parallel lists, because they are compared at every call.
        self._homes, self._keys = [home for home, *_ in places], [key for _, key, _ in places]
        self._values = [weakref.ref(value) for *_, value in places]
        found = self._found.values()
        self._tensors = [tensor for tensor, _, _ in found]
        self._versions, self._pointers = [version for _, version, _ in found], [pointer for _, _, pointer in found]

    @property
    def hold(self) -> bool:
        """Whether all tensors are unchanged."""
        tensors: list[Any] = [reference() for reference in self._tensors]
        return (
            all(map(operator.is_, map(dict.get, self._homes, self._keys), [value() for value in self._values]))
            and all(map(operator.is_not, tensors, itertools.repeat(None)))
            and list(map(_version_of, tensors)) == self._versions
            and list(map(torch.Tensor.data_ptr, tensors)) == self._pointers
        )


_version_of = operator.attrgetter("_version")


def _attribute_of(program: Any, path: str) -> Any:
    value = program
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


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
        self.compiled = self.compile(entry_of(type(self.module)), self.baked.add)

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
            self.plain = self.compile(entry_of(type(self.module)))
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
