"""Linear layers that take one tensor, computed together: their weights are rows of one.

The weights stay where they are by name: consecutive rows of the joint one are the parameters of the layers, so that
whoever reads or writes these reads or writes that. A layer that is called computes for all of its group, as long as the
forward of the module around them runs, and the others take their shares if they are given the very same tensor, with
nothing written to it or to a weight since. Anything else is computed as if there were no group.
"""

from __future__ import annotations

import copy
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from passes.graph.casts import LoweredInput, lowering
from passes.graph.guards import AroundForward, InstanceForward, standing_around


class _Part(NamedTuple):
    """One parameter of a layer, as it lies in the joint tensor; no parameter where there is no bias."""

    layer: nn.Linear
    name: str
    parameter: nn.Parameter | None
    pointer: int
    like: tuple[Any, ...]


class Joined(NamedTuple):
    """Weights of several layers in one.

    Attributes:
        weight: (sum of out, in).
        bias: (sum of out,), or None.
        parts: for each layer and each of its two names, the parameter that is a part of it.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    parts: Sequence[tuple[nn.Linear, str, nn.Parameter]]


class LinearGroup:
    """Some Linear layers on one input, whose weights are consecutive rows of one tensor, and whose biases are of another.

    Where they aren't any more, as parameters were replaced or cast one by one, nothing is computed together from then on.
    Copied, pickled, moved and cast with the module around them, they are brought together again.

    Attributes:
        layers: the layers, in the order of their rows.
        own: the weight and the bias of each layer, as they were when they became parts of one.
        wanted: the layers, by number, that compute for each other: those in a row that took their shares in the last run, so
            that nothing is computed for a branch that is off, or for a layer that was replaced, but once.
        bits: the same as a bit for each by its number.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = tuple(layers)
        self.want((1 << len(self.layers)) - 1)
        self._forget()

    def _forget(self) -> None:
        self._weight: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._in_autocast: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._parts: tuple[_Part, ...] = ()
        self._sizes: list[int] = []
        self.own: list[torch.Tensor | None] = []
        # The parameters that were parts until others took their places, which may be for a while only.
        self._former: list[weakref.ref[torch.Tensor] | None] = []

    @property
    def weight(self) -> torch.Tensor | None:
        """The joint weight, (sum of out, in); None while the layers' own aren't parts of one."""
        return self._weight

    def want(self, takers: int) -> None:
        """Have these layers, a bit for each by its number, compute for each other, if they are two or more in a row."""
        first = (takers & -takers).bit_length() - 1
        count = takers.bit_count()
        is_row = count > 1 and takers >> first == (1 << count) - 1
        self.wanted = range(first, first + count) if is_row else range(0)
        self.bits = takers if is_row else 0

    def joined(self) -> Joined:
        """A new place for all weights and biases."""
        parts: list[tuple[nn.Linear, str, nn.Parameter]] = []
        with torch.no_grad():
            weight = torch.cat([layer.weight for layer in self.layers])
            bias = _joint_bias(self.layers, weight)
            for layer, name, old, rows in self._parts_in(weight, bias):
                new = nn.Parameter(rows, requires_grad=old.requires_grad)
                new.__dict__.update(old.__dict__)
                parts.append((layer, name, new))
        return Joined(weight, bias, parts)

    def cast(self, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The parameters that are parts of one, each with what it is in the dtype: parts of another one."""
        if not self.holds:
            return []
        assert self._weight is not None
        weight = self._weight.detach().to(dtype)
        bias = None if self._bias is None else self._bias.detach().to(dtype)
        return [(old, rows) for _, _, old, rows in self._parts_in(weight, bias)]

    def _parts_in(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Iterator[tuple[nn.Linear, str, torch.Tensor, torch.Tensor]]:
        """For each parameter that a layer has, of which name, and what is its part of a joint weight or bias."""
        for joint, name in ((weight, "weight"), (bias, "bias")):
            for (start, stop), layer in zip(self._rows(), self.layers, strict=True):
                old = layer._parameters.get(name)
                if joint is not None and old is not None:
                    yield layer, name, old, joint[start:stop]

    def _rows(self) -> Iterator[tuple[int, int]]:
        return itertools.pairwise(itertools.accumulate((len(layer.weight) for layer in self.layers), initial=0))

    def link(self) -> bool:
        """Take the layers' parameters for parts of one, if that is what they are; whether they are."""
        self._forget()
        if not all(map(_is_plain, self.layers)):
            return False
        weight, bias = _joint([layer.weight for layer in self.layers]), None
        biases = [layer.bias for layer in self.layers]
        if weight is None:
            return False
        if any(one is not None for one in biases):
            bias = self._bias_behind(biases, weight)
            if bias is None:
                return False
        self.take(weight, bias)
        return True

    def take(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Compute with these, of which the layers' parameters are parts."""
        self._weight, self._bias, self._in_autocast = weight, bias, None
        self._sizes = [len(layer.weight) for layer in self.layers]
        parameters = (
            (layer, name, layer._parameters.get(name)) for layer in self.layers for name in ("weight", "bias")
        )
        self._parts = tuple(
            _Part(layer, name, None, 0, ())
            if one is None
            else _Part(layer, name, one, one.data_ptr(), (one.shape, one.stride(), one.dtype))
            for layer, name, one in parameters
        )
        self.own = self.parameters()

    def _bias_behind(self, biases: Sequence[torch.Tensor | None], weight: torch.Tensor) -> torch.Tensor | None:
        """The joint bias that these are parts of; a layer without one has zeros there, which nobody else reads."""
        if not any(bias is None for bias in biases):
            found = _joint([bias for bias in biases if bias is not None])
            return found if found is not None and found.dtype is weight.dtype else None
        first = next(bias for bias in biases if bias is not None)
        starts = [start for start, _ in self._rows()]
        start = first.storage_offset() - starts[biases.index(first)]
        total = sum(len(layer.weight) for layer in self.layers)
        storage = first.untyped_storage()
        if first.dtype is not weight.dtype or start < 0 or storage.nbytes() < (start + total) * first.element_size():
            return None
        joint = torch.empty(0, dtype=first.dtype, device=first.device).set_(storage, start, (total,), (1,))
        for bias, (begin, end) in zip(biases, self._rows(), strict=True):
            part = joint[begin:end]
            if bias is None and bool(part.any()):
                return None
            if bias is not None and not _lies_at(bias, part):
                return None
        return joint

    def bring_together(self) -> None:
        """Make one of parameters that came apart, where that can be done to the parameters as they are.

        Only for parameters that nobody else computes with at the moment: fresh copies, or those that are being moved.
        """
        if self.holds or self.link() or not all(map(_is_plain, self.layers)) or not _are_alike(self.layers):
            return
        weight, bias, parts = self.joined()
        for layer, name, new in parts:
            layer._parameters[name].data = new.data  # type: ignore[union-attr]
        self.take(weight, bias)

    @property
    def holds(self) -> bool:
        """Whether the parameters of the layers are still the parts that they were."""
        return self.versions() is not None

    def versions(self) -> list[int] | None:
        """How often the weight and the bias of each layer were written to; None where they are no parts any more."""
        if self._weight is None and not self._are_back():
            return None
        found = []
        # Asked for at every call: the cheapest first.
        for layer, name, parameter, pointer, like in self._parts:
            now = layer._parameters.get(name)
            if now is not parameter:
                return self.versions() if self._has_others() else None
            if now is None:
                found.append(0)
                continue
            if now.data_ptr() != pointer or (now.shape, now.stride(), now.dtype) != like:
                return None
            found.append(now._version)
        return found

    def _has_others(self) -> bool:
        """Whether the parameters that took the places of the parts are parts of one as well.

        If not, none of the former is held any more: they may be as large as the model.
        """
        former = [None if one is None else weakref.ref(one) for one in self.own]
        if self.link():
            return True
        self._forget()
        self._former = former
        return False

    def _are_back(self) -> bool:
        """Whether the parameters that were parts are in their places again, as they are after a functional call."""
        if not self._former:
            return False
        pairs = zip(self._former, self.parameters(), strict=True)
        return all(now is (None if one is None else one()) for one, now in pairs) and self.link()

    def parameters(self) -> list[torch.Tensor | None]:
        """The weight and the bias of each layer, as they are now."""
        return [layer._parameters.get(name) for layer in self.layers for name in ("weight", "bias")]

    def compute(self, input: torch.Tensor, wanted: range) -> Sequence[torch.Tensor]:
        """What each wanted layer gives for the input, as parts of one tensor that don't overlap."""
        weight, bias, sizes, parts = self._weight, self._bias, self._sizes, self._parts
        assert weight is not None
        input = self._as_taken(input)
        if torch._C._is_any_autocast_enabled() and not torch.is_grad_enabled() and self._are_trained(parts):
            weight, bias = self._cached_by_autocast(weight, bias)
        if len(wanted) < len(sizes):
            first, end = sum(sizes[: wanted.start]), sum(sizes[: wanted.stop])
            weight, bias = weight[first:end], None if bias is None else bias[first:end]
            sizes, parts = sizes[wanted.start : wanted.stop], parts[2 * wanted.start : 2 * wanted.stop]
        if torch.is_grad_enabled() and (input.requires_grad or self._are_trained(parts)):
            parameters = [part.parameter for part in parts]
            found: Sequence[torch.Tensor] = _Linears.apply(weight, bias, sizes, input, *parameters)
            return found
        return _computed(weight, bias, sizes, input)

    def _as_taken(self, input: torch.Tensor) -> torch.Tensor:
        """The input in the dtype of the weights, where each of the layers would bring it there."""
        forward = self.layers[0].__dict__.get("forward")
        cast = forward.cast if isinstance(forward, SharedLinearForward) else None
        taken: torch.Tensor = input if cast is None else cast.lowered(input)
        return taken

    @staticmethod
    def _are_trained(parts: Sequence[_Part]) -> bool:
        return any(part.parameter is not None and part.parameter.requires_grad for part in parts)

    def _cached_by_autocast(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same weights as what autocast casts once, and not at each call: leaves that take gradients, and no views."""
        if self._in_autocast is None:
            twin = None if bias is None else _over(bias).requires_grad_()
            self._in_autocast = _over(weight).requires_grad_(), twin
        return self._in_autocast

    def compute_in_export(self, input: torch.Tensor, wanted: range) -> list[torch.Tensor]:
        """The same as operations that a file can hold, whose weights are the layers' own."""
        layers = [self.layers[number] for number in wanted]
        joint = torch.cat([layer.weight for layer in layers])
        output = F.linear(self._as_taken(input), joint, _joint_bias(layers, joint))
        return list(torch.split(output, [len(layer.weight) for layer in layers], -1))

    def can_be_exported(self) -> bool:
        """Whether the layers have parameters that may be laid behind each other."""
        return _are_alike(self.layers)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unlinked_group, (), (self.layers, self.holds)

    def __setstate__(self, state: tuple[tuple[nn.Linear, ...], bool]) -> None:
        layers, held = state
        self.__init__(layers)  # type: ignore[misc]
        if held:
            self.bring_together()

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearGroup:
        twin = LinearGroup(copy.deepcopy(self.layers, memo))
        memo[id(self)] = twin
        if self.holds and not twin.link() and self._is_apart_from(twin):
            twin.bring_together()
        return twin

    def _is_apart_from(self, twin: LinearGroup) -> bool:
        """Whether the other one's parameters are copies in memory of their own, which may be laid anew."""
        if not all(map(_is_plain, twin.layers)):
            return False
        pairs = [
            (one._parameters.get(name), other._parameters.get(name))
            for one, other in zip(self.layers, twin.layers, strict=True)
            for name in ("weight", "bias")
        ]
        return all(
            new is None or (old is not None and _storage(new) != _storage(old) and _fills_its_storage(new))
            for old, new in pairs
        )


def _joint_bias(layers: Sequence[nn.Linear], weight: torch.Tensor) -> torch.Tensor | None:
    """The biases in one, with zeros for a layer that has none; None where no layer has one."""
    biases = [layer.bias for layer in layers]
    if all(bias is None for bias in biases):
        return None
    counts = [len(layer.weight) for layer in layers]
    return torch.cat(
        [weight.new_zeros(count) if bias is None else bias for count, bias in zip(counts, biases, strict=True)]
    )


def _unlinked_group() -> LinearGroup:
    return object.__new__(LinearGroup)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr()) if tensor.layout is torch.strided and not tensor.is_meta else 0


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _is_plain(layer: nn.Linear) -> bool:
    """Whether weight and bias are parameters of torch's own class, with values."""
    own = layer.__dict__.get("_parameters", {})
    if type(own.get("weight")) is not nn.Parameter or "weight" in layer.__dict__ or "bias" in layer.__dict__:
        return False
    return all(
        one is None or (type(one) is nn.Parameter and one.layout is torch.strided and not one.is_meta)
        for one in (own.get("weight"), own.get("bias"))
    )


def _are_alike(layers: Sequence[nn.Linear]) -> bool:
    """Whether all weights are of one dtype, on one device and for one input, and the biases fit."""
    weights = [layer._parameters.get("weight") for layer in layers]
    first = weights[0]
    if first is None:
        return False
    for weight, layer in zip(weights, layers, strict=True):
        bias = layer._parameters.get("bias")
        if weight is None or weight.dim() != 2 or weight.shape[1] != first.shape[1]:
            return False
        if weight.dtype is not first.dtype or weight.device != first.device:
            return False
        if bias is not None and (
            bias.shape != weight.shape[:1] or bias.dtype is not first.dtype or bias.device != first.device
        ):
            return False
    return True


def _joint(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensor whose rows these are, one behind the other; None where they are none."""
    first = parts[0]
    row = first.shape[1:]
    total = sum(map(len, parts))
    storage = first.untyped_storage()
    size = row.numel()
    if storage.nbytes() < (first.storage_offset() + total * size) * first.element_size():
        return None
    shape, strides = (total, *row), (*([size] if row else []), 1)
    joint = torch.empty(0, dtype=first.dtype, device=first.device).set_(storage, first.storage_offset(), shape, strides)
    start = 0
    for part in parts:
        if part.shape[1:] != row or not _lies_at(part, joint[start : start + len(part)]):
            return None
        start += len(part)
    return joint


def _over(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor over the same numbers, which is no view."""
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _lies_at(tensor: torch.Tensor, place: torch.Tensor) -> bool:
    return (
        tensor.dtype is place.dtype
        and tensor.device == place.device
        and tensor.shape == place.shape
        and tensor.stride() == place.stride()
        and tensor.data_ptr() == place.data_ptr()
    )


def _computed(
    weight: torch.Tensor, bias: torch.Tensor | None, sizes: Sequence[int], input: torch.Tensor
) -> Sequence[torch.Tensor]:
    # Parts that know of each other as views can't be written to where gradients are on; those of this split can.
    return torch.unsafe_split_with_sizes(F.linear(input, weight, bias), sizes, -1)


class _Linears(torch.autograd.Function):
    """What all layers give, whose gradients go to the input and to the layers' own parameters.

    The backward pass is that of the layers one by one: it is differentiable again, and sees writes to each weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sizes: list[int],
        input: torch.Tensor,
        *parameters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, *parameters[::2])
        return tuple(_computed(weight, bias, sizes, input))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        input, *weights = ctx.saved_tensors
        needs_input, needed = ctx.needs_input_grad[3], ctx.needs_input_grad[4:]
        to_input, to_parameters = None, list[torch.Tensor | None]()
        for gradient, weight, of_weight, of_bias in zip(gradients, weights, needed[::2], needed[1::2], strict=True):
            if gradient is None:
                to_parameters += [None, None]
                continue
            if needs_input:
                part = gradient @ weight
                to_input = part if to_input is None else to_input + part
            rows = gradient.reshape(-1, gradient.shape[-1])
            to_parameters.append(rows.t() @ input.reshape(-1, input.shape[-1]) if of_weight else None)
            to_parameters.append(rows.sum(0) if of_bias else None)
        return None, None, None, to_input, *to_parameters


class _Kept:
    """What one layer computed for the others.

    Attributes:
        input: what it was given, weakly.
        version: how often that had been written to.
        place: as `_place` gives it; none in an export, whose tensors are symbols.
        state: as `_state` gives it.
        parameters, versions: the weight and the bias of each layer, and how often they had been written to.
        shares: what is each layer's, until it is taken; None as long as nothing is computed.
        takers: a bit for each layer, by its number, that took its share, or would have if it had been computed.
    """

    __slots__ = ("input", "parameters", "place", "shares", "state", "takers", "version", "versions")

    def __init__(
        self,
        input: torch.Tensor,
        place: tuple[Any, ...],
        parameters: list[torch.Tensor | None],
        versions: list[int],
    ) -> None:
        self.input = weakref.ref(input)
        self.version, self.place, self.state = input._version, place, _state(input)
        self.parameters, self.versions = parameters, versions
        self.shares: list[torch.Tensor | None] | None = None
        self.takers = 0


class _Counted:
    """An input that nothing is computed for, held weakly, with the layers that took it, as in `_Kept`."""

    __slots__ = ("input", "takers")

    def __init__(self, input: torch.Tensor) -> None:
        self.input = weakref.ref(input)
        self.takers = 0


class _Shares:
    """The shares of one group for the time of one run of the forward around it."""

    __slots__ = ("counted", "group", "hooks", "is_over", "kept", "takers")

    def __init__(self, group: LinearGroup, hooks: Any) -> None:
        self.group = group
        self.hooks = hooks
        self.kept: _Kept | None = None
        self.counted: _Counted | None = None
        # Whether the layers turned out to be called otherwise than was seen.
        self.is_over = False
        # A bit for each layer, by its number, that took its share of every input that some computed for; -1 before the first.
        self.takers = -1

    def of(self, index: int, input: Any) -> torch.Tensor | None:
        """What the layer of this number gives for the input; None where it has to compute that by itself."""
        group = self.group
        if not group.bits:
            self._count(index, input)
            return None
        if torch._C._len_torch_function_stack():
            # A mode that watches what is computed has nothing to see in looks.
            with torch._C.DisableTorchFunction():
                kept = self._found(index, input)
        else:
            kept = self._found(index, input)
        if kept is None:
            return None
        if self.kept is not kept:
            self._leave()
            self.kept = kept
        bit = 1 << index
        if kept.shares is None and bit & group.bits and not kept.takers & group.bits:
            kept.shares = self._computed(input, is_exported=not kept.place)
        kept.takers |= bit
        shares = kept.shares
        if shares is None:
            return None
        share, shares[index] = shares[index], None
        return share

    def _computed(self, input: torch.Tensor, *, is_exported: bool) -> list[torch.Tensor | None]:
        group, wanted = self.group, self.group.wanted
        found = (group.compute_in_export if is_exported else group.compute)(input, wanted)
        left = len(group.layers) - wanted.stop
        return [*(None for _ in range(wanted.start)), *found, *(None for _ in range(left))]

    def _count(self, index: int, input: Any) -> None:
        """See whether the layers would take their shares, in as few steps as can be: none is computed."""
        counted = self.counted
        if counted is None or counted.input() is not input:
            if not isinstance(input, torch.Tensor):
                return
            self._leave()
            counted = self.counted = _Counted(input)
        counted.takers |= 1 << index

    def _leave(self) -> None:
        """Note who took a share of the input until now."""
        kept: _Kept | _Counted | None = self.kept or self.counted
        if kept is not None:
            self.kept = self.counted = None
            takers = kept.takers
            # One that is given another input computes by itself, which says nothing of the others.
            if takers & (takers - 1) or takers & self.group.bits:
                self.takers &= takers

    def close(self) -> None:
        """Have the next run compute for those layers that took their shares in this one."""
        self._leave()
        if self.takers not in (-1, self.group.bits):
            self.group.want(self.takers)

    def _found(self, index: int, input: Any) -> _Kept | None:
        """What is kept, or about to be computed, with a share for the layer; None where there is none."""
        if _saving_hooks() is not self.hooks:
            return None
        kept = self.kept
        if kept is not None and kept.input() is input:
            return kept if self._can_be_taken(kept, index, input) else None
        if self.is_over:
            return None
        if kept is not None and kept.shares is not None and any(share is not None for share in kept.shares):
            # Another branch than was seen: to compute for the others is for nothing here.
            self.is_over = True
            self._leave()
            return None
        group = self.group
        if not _is_exported():
            versions = group.versions() if _may_share(input) else None
            if versions is None:
                return None
            parameters, place = group.own, _place(input)
        elif isinstance(input, torch.Tensor) and not input.is_inference() and group.can_be_exported():
            parameters, place = group.parameters(), ()
            versions = [0 if one is None else one._version for one in parameters]
        else:
            return None
        return _Kept(input, place, parameters, versions)

    def _can_be_taken(self, kept: _Kept, index: int, input: Any) -> bool:
        if input is None or input._version != kept.version or _state(input) != kept.state:
            return False
        if kept.place and _place(input) != kept.place:
            return False
        own = self.group.layers[index]._parameters
        for place, name in enumerate(("weight", "bias"), 2 * index):
            now = own.get(name)
            if now is not kept.parameters[place] or (now is not None and now._version != kept.versions[place]):
                return False
        return True


def _is_exported() -> bool:
    """Whether the call becomes part of an ONNX file."""
    return (torch.compiler.is_compiling() or torch._C._is_tracing()) and torch.onnx.is_in_onnx_export()


def _may_share(input: Any) -> bool:
    """Whether writes to the input can be seen, and nothing but torch's own kernels computes with it."""
    return (
        type(input) is torch.Tensor
        and not input.is_inference()
        and input.layout is torch.strided
        and not input.is_nested
        and (input.is_cpu or input.is_cuda)
        and not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        # What is cast for the forward would have to be cast for the backward pass too.
        and not (torch._C._is_any_autocast_enabled() and torch.is_grad_enabled())
    )


def _saving_hooks() -> Any:
    """What is called for each tensor that is saved for the backward pass; None for nothing.

    Where it came in the middle of a forward, the part of that behind it may be run again in the backward pass, which is
    what torch.utils.checkpoint does: no other part may compute for it, or the reverse.
    """
    found = torch._C._autograd._top_saved_tensors_default_hooks(True) if torch.is_grad_enabled() else None
    return None if found is None else found[0]


def _place(input: torch.Tensor) -> tuple[Any, ...]:
    """Where the numbers lie: who sets `.data` has others there, and torch counts no write."""
    return input.data_ptr(), input.shape, input.stride()


def _state(input: torch.Tensor) -> tuple[Any, ...]:
    """What else than the numbers a result depends on, and who may read it."""
    autocast = None
    if torch._C._is_any_autocast_enabled():
        kind = input.device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    queue = torch._C._cuda_getCurrentRawStream(input.device.index) if input.is_cuda else 0
    return torch.is_grad_enabled(), input.requires_grad, torch.is_inference_mode_enabled(), autocast, queue


class _Scope:
    """One run of a forward around groups of Linears.

    Attributes:
        places: for each layer, by identity, the number of its group and its own number there.
        outer: the run that this one is part of, in the same thread.
        hooks: as `_saving_hooks` gives it.
    """

    __slots__ = ("groups", "hooks", "outer", "places", "shares")

    def __init__(
        self, groups: Sequence[LinearGroup], places: Mapping[int, tuple[int, int]], outer: _Scope | None
    ) -> None:
        self.groups = groups
        self.places = places
        self.outer = outer
        self.hooks = _saving_hooks()
        self.shares: list[_Shares | None] = [None] * len(groups)

    def share(self, place: tuple[int, int], input: Any) -> torch.Tensor | None:
        """What the layer of this place gives for the input; None where it has to compute that by itself."""
        number, index = place
        shares = self.shares[number]
        if shares is None:
            shares = self.shares[number] = _Shares(self.groups[number], self.hooks)
        return shares.of(index, input)

    def close(self) -> None:
        """See, at the end of the run, which shares were taken."""
        for shares in self.shares:
            if shares is not None:
                shares.close()


class _Open(threading.local):
    """The innermost run of a forward around groups of Linears, in this thread."""

    scope: _Scope | None = None


_open = _Open()


def _places_in(groups: Sequence[LinearGroup]) -> dict[int, tuple[int, int]]:
    return {id(layer): (number, n) for number, group in enumerate(groups) for n, layer in enumerate(group.layers)}


@contextmanager
def computing_together(groups: Sequence[LinearGroup]) -> Iterator[None]:
    """Inside, the layers of the groups that are called by this thread compute for each other."""
    outer = _open.scope
    _open.scope = _Scope(groups, _places_in(groups), outer)
    try:
        yield
    finally:
        _open.scope = outer


class SharedLinearForward(InstanceForward):
    """The forward of a Linear that computes together with others as long as the forward around them runs.

    Attributes:
        cast: what brings the input to the dtype of the weight; None for nothing.
    """

    is_atom = True

    def __init__(self, owner: nn.Linear, cast: LoweredInput | None = None) -> None:
        self.owner = owner
        self.cast = cast

    @classmethod
    def of(cls, layer: nn.Linear) -> SharedLinearForward:
        """That of a layer, in the place of what casts for it alone."""
        return cls(layer, lowering(layer))

    def __call__(self, input: Any) -> torch.Tensor:
        owner = self.owner
        # torch.compile sees what is written in the class, and its compiler may well join them by itself.
        if not torch.compiler.is_dynamo_compiling():
            scope = _open.scope
            while scope is not None:
                place = scope.places.get(id(owner))
                if place is None:
                    scope = scope.outer
                    continue
                share = scope.share(place, input)
                if share is not None:
                    return share
                break
        output: torch.Tensor = type(owner).forward(owner, input) if self.cast is None else self.cast(input)
        return output


class SharingForward(AroundForward):
    """The forward around some groups of Linears, in which the layers of each compute together.

    Attributes:
        groups: the groups.
    """

    def __init__(self, owner: nn.Module, groups: Sequence[LinearGroup], inner: Any) -> None:
        self.owner = owner
        self.groups = tuple(groups)
        self.inner = inner
        self._places: dict[int, tuple[int, int]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self._inner_forward(*args, **kwargs)
        if self._places is None:
            self._places = _places_in(self.groups)
        # As `computing_together`, in fewer steps: it stands around every call.
        outer = _open.scope
        scope = _open.scope = _Scope(self.groups, self._places, outer)
        try:
            outputs = self._inner_forward(*args, **kwargs)
        finally:
            _open.scope = outer
        scope.close()
        return outputs

    def __getstate__(self) -> dict[str, Any]:
        # The layers of a copy are others.
        return {**self.__dict__, "_places": None}


class JoiningApply:
    """Stands in a module's `__dict__` as its `_apply`, by which torch moves and casts its parameters one by one: brings
    those of its groups together again.

    Attributes:
        groups: the groups.
    """

    def __init__(self, owner: nn.Module, groups: Sequence[LinearGroup]) -> None:
        self.owner = owner
        self.groups = tuple(groups)

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        # What came apart before, as somebody gave a layer another weight, is left so: it may be tied to others.
        held = [group for group in self.groups if group.holds]
        applied: nn.Module = type(self.owner)._apply(self.owner, fn, recurse)
        for group in held:
            group.bring_together()
        return applied


def sharing_forwards(around: nn.Module, group: LinearGroup) -> Iterator[tuple[nn.Module, InstanceForward]]:
    """The modules with the forwards that have the layers compute together as long as that of the module around them runs."""
    for layer in group.layers:
        yield layer, SharedLinearForward.of(layer)
    groups, installed = (*shared_by(around), group), around.__dict__.get("forward")
    if isinstance(installed, SharingForward):
        # One around all of them: a call deep for each would be too deep for a forward with hundreds.
        installed = installed.inner
    yield around, SharingForward(around, groups, installed)


def shared_by(module: nn.Module) -> tuple[LinearGroup, ...]:
    """The groups of Linears that compute together in the module's forward."""
    found = standing_around(module, SharingForward)
    return () if found is None else found.groups
