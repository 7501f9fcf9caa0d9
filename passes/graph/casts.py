"""Forwards that compute in a half precision, and in float32 where that loses too much, around whatever else they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from passes.graph.guards import AroundForward, SealedOutput

HALF = (torch.bfloat16, torch.float16)


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


class RootCast(AroundForward):
    """Base of the forwards of a root that computes in a half precision.

    Attributes:
        dtype: the half precision.
        outputs: the dtype of each leaf of the output; None for what is no float tensor. Calls that give more or fewer
            leaves have what comes in the half precision cast to float32.
    """

    def __init__(self, owner: nn.Module, inner: Any, dtype: torch.dtype, outputs: Sequence[torch.dtype | None]) -> None:
        self.owner = owner
        self.inner = inner
        self.dtype = dtype
        self.outputs = tuple(outputs)


class AutocastForward(RootCast):
    """The forward of a root, under autocast; what it returns has the dtypes that it had without.

    Each cast of a weight is made where it is used and kept for nothing else: a cache would hold them all until the end
    of the call, and a trace would take them for constants.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(_device_type(self.owner), self.dtype, cache_enabled=False):
            outputs = self._inner_forward(*args, **kwargs)
        return _with_dtypes(outputs, self.outputs, self.dtype)


class CastForward(RootCast):
    """The forward of a root whose weights are of a half precision: float32 goes in and comes out as without.

    What it returns of its inputs is the caller's own tensor.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        lent: list[tuple[Any, Any]] = []

        def lend(leaf: Any) -> Any:
            copied = cast_leaf(leaf, (torch.float32,), self.dtype)
            if copied is not leaf:
                lent.append((leaf, copied))
            return copied

        args, kwargs = map_leaves(lend, (args, kwargs))
        outputs = self._inner_forward(*args, **kwargs)
        if lent:
            outputs = map_leaves(lambda leaf: next((own for own, copied in lent if copied is leaf), leaf), outputs)
        return _with_dtypes(outputs, self.outputs, self.dtype)


class InFloat32(AroundForward):
    """The forward of a module that computes in float32, in the midst of others in a half precision.

    Attributes:
        gives: the dtype that its float32 outputs come in; None leaves them as they are, as autocast casts them itself.
    """

    def __init__(self, owner: nn.Module, inner: Any, gives: torch.dtype | None, *, is_atom: bool) -> None:
        self.owner = owner
        self.inner = inner
        self.gives = gives
        self.is_atom = is_atom

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_leaves(lambda leaf: cast_leaf(leaf, HALF, torch.float32), (args, kwargs))
        if self.gives is None:
            with torch.autocast(_device_type(self.owner), enabled=False):
                return self._inner_forward(*args, **kwargs)
        gives = self.gives
        return map_leaves(lambda leaf: cast_leaf(leaf, (torch.float32,), gives), self._inner_forward(*args, **kwargs))


class LoweredInput(AroundForward):
    """The forward of a layer with weights of a half precision that is given float32, which it can't take.

    Attributes:
        dtype: that of the weights.
    """

    def __init__(self, owner: nn.Module, inner: Any, dtype: torch.dtype, *, is_atom: bool) -> None:
        self.owner = owner
        self.inner = inner
        self.dtype = dtype
        self.is_atom = is_atom

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_leaves(lambda leaf: cast_leaf(leaf, (torch.float32,), self.dtype), (args, kwargs))
        return self._inner_forward(*args, **kwargs)


def root_cast(root: nn.Module) -> RootCast | None:
    """What casts in the root's forward already; None for nothing."""
    installed = root.__dict__.get("forward")
    while isinstance(installed, AroundForward):
        if isinstance(installed, RootCast):
            return installed
        installed = installed.inner
    return None


def dtypes_of(outputs: Any) -> tuple[torch.dtype | None, ...]:
    """The dtype of each leaf of an output; None for what is no float tensor."""
    leaves = pytree.tree_leaves(outputs, is_leaf=_is_size)
    return tuple(leaf.dtype if _is_float(leaf) else None for leaf in leaves)


def _with_dtypes(outputs: Any, known: Sequence[torch.dtype | None], dtype: torch.dtype) -> Any:
    leaves, spec = pytree.tree_flatten(outputs, is_leaf=_is_size)
    if len(leaves) == len(known):
        wanted = list(known)
    else:
        wanted = [torch.float32 if _is_float(leaf) and leaf.dtype is dtype else None for leaf in leaves]
    given = [
        leaf if want is None else cast_leaf(leaf, (dtype,), want) for leaf, want in zip(leaves, wanted, strict=True)
    ]
    if all(mine is leaf for mine, leaf in zip(given, leaves, strict=True)):
        return outputs
    return pytree.tree_unflatten(given, spec)


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    return pytree.tree_map(change, tree, is_leaf=_is_size)


def _is_size(value: Any) -> bool:
    # Put together again from its numbers, it would be a tuple.
    return isinstance(value, torch.Size)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def cast_leaf(leaf: Any, of: Sequence[torch.dtype], to: torch.dtype) -> Any:
    """A tensor of one of the dtypes in another one, under the seal that it is in; anything else as it is."""
    if isinstance(leaf, SealedOutput):
        value = cast_leaf(leaf.sealed_value, of, to)
        return leaf if value is leaf.sealed_value else SealedOutput(value, leaf.sealed_by, leaf.sealed_dim)
    return leaf.to(to) if isinstance(leaf, torch.Tensor) and leaf.dtype in of else leaf


def _device_type(owner: nn.Module) -> str:
    """Where the module is now, which may be another place than where it was made."""
    for parameter in owner.parameters():
        # There is no autocast on meta, where nothing is computed.
        return "cpu" if parameter.is_meta else parameter.device.type
    return "cpu"
