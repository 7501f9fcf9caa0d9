"""Find the BatchNorms that one eager run shows to be foldable, into the layer before them or the layer after them.

This doesn't use the passes or their matcher. It watches the torch calls, and determines for each value which call made
it and which calls use it.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

# The number of spatial dims; 0 for a linear layer.
_CONVOLUTIONS: dict[Any, int] = {
    **{getattr(F, f"conv{dims}d"): dims for dims in (1, 2, 3)},
    **{getattr(F, f"conv_transpose{dims}d"): dims for dims in (1, 2, 3)},
    F.linear: 0,
}
_TRANSPOSED = frozenset(getattr(F, f"conv_transpose{dims}d") for dims in (1, 2, 3))
_CONVOLUTION = ("input", "weight", "bias")
_NORMS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training"),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training"),
}
# Calls that read no values.
_QUESTIONS = frozenset({"size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "data_ptr"}) | {
    *("is_contiguous", "is_floating_point", "is_complex", "is_inference", "element_size", "get_device", "__len__"),
    *("is_tensor", "result_type", "__hash__", "__format__", "__repr__"),
}
# Calls that read only the shape or dtype of arguments: of all but the first (`_SHAPED_AS`), or of all (`_MADE_LIKE`).
_SHAPED_AS = frozenset({"reshape_as", "view_as", "expand_as", "type_as"})
_MADE_LIKE = frozenset({"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"}) | {
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
}


@dataclass(frozen=True)
class Pair:
    """A BatchNorm that can be folded into the layer before it, or else into the layer after it.

    Attributes:
        norm: the path of the module that holds the running statistics.
        layer: the path of the module that holds the weight of the convolution or linear layer.
        way: the names of the operations between the two, which only move elements.
    """

    norm: str
    layer: str
    way: tuple[str, ...]


@dataclass(frozen=True)
class _Call:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    def named(self, names: Sequence[str]) -> dict[str, Any]:
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    def tensors(self) -> list[torch.Tensor]:
        """The tensors whose values the call uses."""
        name = getattr(self.function, "__name__", "")
        if name in _MADE_LIKE:
            return []
        leaves = pytree.tree_leaves(self.args[:1] if name in _SHAPED_AS else (self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


class _Watch(TorchFunctionMode):
    """Records every torch call that reads values, in order. It keeps all tensors alive, so that no id is reused."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _is_question(func, result):
            self.calls.append(_Call(func, args, kwargs or {}, result))
        return result


def _is_question(function: Any, result: Any) -> bool:
    name = getattr(function, "__name__", "")
    return name in _QUESTIONS or (name == "__get__" and not isinstance(result, torch.Tensor))


def foldable_pairs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Pair]:
    """The foldable pairs that one call of the model shows.

    A BatchNorm counts if all of these hold:

    - It uses running statistics.
    - Its input is the output of one convolution or linear layer, or a rearrangement of it that keeps the channels.
    - Nothing else uses that output or a value in between, and the model doesn't return it.
    - Every tensor of the BatchNorm and of the layer is a parameter or buffer that nothing else uses.

    A BatchNorm whose output is the input of such a layer counts under the same conditions, unless the layer is
    transposed or pads with zeros.
    """
    watch = _Watch()
    with torch.no_grad(), watch:
        output = model(*args, **kwargs)
    return list(_Run(model, watch.calls, output).pairs())


class _Run:
    def __init__(self, model: nn.Module, calls: Sequence[_Call], output: Any) -> None:
        self.calls = calls
        self.uses: Counter[int] = Counter()
        self.users: dict[int, list[_Call]] = defaultdict(list)
        self.makers: dict[int, list[_Call]] = defaultdict(list)
        for call in calls:
            used = {id(tensor) for tensor in call.tensors()}
            self.uses.update(used)
            for key in used:
                self.users[key].append(call)
            if isinstance(call.result, torch.Tensor):
                self.makers[id(call.result)].append(call)
        self.returned = {id(value) for value in _values(output)}
        self.owners: dict[int, list[str]] = defaultdict(list)
        for path, module in model.named_modules(remove_duplicate=False):
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    self.owners[id(tensor)].append(path)

    def pairs(self) -> Iterator[Pair]:
        for call in self.calls:
            if call.function not in _NORMS:
                continue
            norm = call.named(_NORMS[call.function])
            statistics = [norm.get("running_mean"), norm.get("running_var")]
            if norm.get("training") or any(tensor is None for tensor in statistics):
                continue
            affine = [norm[name] for name in ("weight", "bias") if norm.get(name) is not None]
            found = self._layer_before(norm["input"]) or self._layer_behind(call.result)
            if found is not None and all(map(self._is_its_own, (*statistics, *affine))):
                layer, way = found
                yield Pair(self.owners[id(statistics[0])][0], layer, way)

    def _layer_before(self, value: torch.Tensor) -> tuple[str, tuple[str, ...]] | None:
        moves: list[tuple[_Call, torch.Tensor]] = []
        norm_input = value
        while True:
            makers = self.makers[id(value)]
            if len(makers) != 1 or self.uses[id(value)] != 1 or id(value) in self.returned:
                return None
            (maker,) = makers
            if maker.function in _CONVOLUTIONS:
                break
            sources = [tensor for tensor in maker.tensors() if tensor.is_floating_point()]
            if len(sources) != 1 or sources[0] is value:
                return None
            moves.append((maker, sources[0]))
            value = sources[0]
        given = maker.named(_CONVOLUTION)
        tensors = [given["weight"], *([given["bias"]] if given.get("bias") is not None else [])]
        dims = _CONVOLUTIONS[maker.function]
        channel = value.dim() - 1 - dims
        if channel < 0 or not all(map(self._is_its_own, tensors)):
            return None
        if not _keep_channels(value, channel, list(reversed(moves)), norm_input, 1):
            return None
        way = tuple(getattr(move.function, "__name__", str(move.function)) for move, _ in reversed(moves))
        return self.owners[id(given["weight"])][0], way

    def _layer_behind(self, output: torch.Tensor) -> tuple[str, tuple[str, ...]] | None:
        moves: list[tuple[_Call, torch.Tensor]] = []
        value = output
        while True:
            users = self.users[id(value)]
            if len(users) != 1 or len(self.makers[id(value)]) != 1 or id(value) in self.returned:
                return None
            (user,) = users
            if user.function in _CONVOLUTIONS:
                break
            if not isinstance(user.result, torch.Tensor) or user.result is value:
                return None
            moves.append((user, value))
            value = user.result
        given = user.named(_CONVOLUTION)
        tensors = [given["weight"], *([given["bias"]] if given.get("bias") is not None else [])]
        if given["input"] is not value or _may_pad(user) or not all(map(self._is_its_own, tensors)):
            return None
        channel = value.dim() - 1 - _CONVOLUTIONS[user.function]
        if channel < 0 or not _keep_channels(output, 1, moves, value, channel):
            return None
        way = tuple(getattr(move.function, "__name__", str(move.function)) for move, _ in moves)
        return self.owners[id(given["weight"])][0], way

    def _is_its_own(self, tensor: torch.Tensor) -> bool:
        return len(self.owners[id(tensor)]) == 1 and self.uses[id(tensor)] == 1


def _may_pad(call: _Call) -> bool:
    """Whether outputs near the border may depend on fewer inputs than the others."""
    if call.function is F.linear:
        return False
    padding = call.named(("input", "weight", "bias", "stride", "padding")).get("padding", 0)
    sides = padding if isinstance(padding, list | tuple) else [padding]
    return call.function in _TRANSPOSED or (padding != "valid" and any(side != 0 for side in sides))


def _keep_channels(
    value: torch.Tensor, channel: int, moves: Sequence[tuple[_Call, torch.Tensor]], taken: torch.Tensor, into: int
) -> bool:
    """Whether the moves take every element of a channel to the same channel of `taken`, without changing values.

    The moves are tried on elements that encode their own position.
    """
    if taken.dim() < 2 or taken.shape[into] != value.shape[channel]:
        return False
    places = torch.arange(1, value.numel() + 1, dtype=torch.float64).reshape(value.shape)
    moved = _moved(places, moves)
    # Operations that select by value (a maximum) or clip treat the negated values differently.
    opposite = _moved(-places, moves)
    if moved is None or opposite is None or moved.shape != taken.shape or not torch.equal(moved, -opposite):
        return False
    if not torch.isin(moved, places).all():
        return False
    before = torch.arange(value.shape[channel]).reshape(-1, *[1] * (value.dim() - 1 - channel)).expand(value.shape)
    after = torch.arange(taken.shape[into]).reshape(-1, *[1] * (taken.dim() - 1 - into)).expand(taken.shape)
    return torch.equal(before.reshape(-1)[moved.long() - 1], after)


def _moved(places: torch.Tensor, moves: Sequence[tuple[_Call, torch.Tensor]]) -> torch.Tensor | None:
    for move in moves:
        # An operation that fails on these values is no move.
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            places = _again(places, *move)
            continue
        return None
    return places


def _again(places: torch.Tensor, call: _Call, source: torch.Tensor) -> torch.Tensor:
    args, kwargs = pytree.tree_map(lambda leaf: places if leaf is source else leaf, (call.args, call.kwargs))
    moved: torch.Tensor = call.function(*args, **kwargs)
    return moved


def _values(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in the output of a model, in any container."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _values(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _values(value)
    elif hasattr(output, "__dict__"):
        for value in vars(output).values():
            yield from _values(value)
