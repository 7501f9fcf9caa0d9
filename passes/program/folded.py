"""The forwards of torch.nn layers and BatchNorms that were folded together.

The first of the two seals its output, and only the second can open it (see `seals`).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from passes.program.forwards import AroundForward, InstanceForward
from passes.program.matching import reads_zeros
from passes.program.pairs import FoldedPair
from passes.program.seals import (
    SealedOutput,
    SealedTensor,
    given_on,
    is_captured,
    is_grad_enabled,
    opened_from,
    sealed,
    sealed_for,
)
from passes.program.tensors import is_own, source_of
from passes.program.weights import (
    FORWARDS,
    FoldedParameter,
    SealsWhileExporting,
    a_forward_runs,
    needs_unsealed,
    unsealed,
)
from passes.torch_private import (
    NOTHING,
    break_graph,
    is_exporting,
    make_subclass,
    without_subclasses,
    without_torch_function,
)

linear = nn.functional.linear


class FoldedConvForward(InstanceForward):
    """The forward of a layer that was folded with the BatchNorm after it, the one before it, or both.

    Attributes:
        pair: the pair with the BatchNorm after the layer; None if there is none.
        front: the pair with the BatchNorm before the layer; None if there is none.
    """

    is_atom = True

    def __init__(self, owner: nn.Module, pair: FoldedPair | None, front: FoldedPair | None = None) -> None:
        self.owner = owner
        self.pair = pair
        self.front = front
        weight, bias = owner._parameters.get("weight"), owner._parameters.get("bias")
        self.has_bias = bias is not None
        self.is_sealed = isinstance(weight, FoldedParameter)
        # These layers compute with their parameters directly, so the fast path can do the same with those of the fold.
        is_plain = isinstance(owner, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear)
        self.is_fast = is_plain and pair is not None and front is None
        self.weight_class, self.bias_class = type(weight), type(bias)

    def __call__(self, input: Any, *size: Any, **named: Any) -> Any:
        # This is the hot path: every call of every pair comes here.
        owner: Any = self.owner
        parameters = owner._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        is_usual = type(weight) is self.weight_class and type(bias) is self.bias_class and type(input) is torch.Tensor
        if not (is_usual and self.is_fast) or size or named or is_captured():
            return self._through(input, *size, **named)
        pair: Any = self.pair
        rank = input.dim()
        if rank != pair.rank and pair.rank is not None:
            raise pair.other_rank(input)
        with without_subclasses():
            output = owner._conv_forward(input, weight, bias) if pair.dims else linear(input, weight, bias)
        seal: Any = make_subclass(SealedTensor, NOTHING)
        seal.sealed_value = output
        seal.sealed_by = pair
        seal.sealed_dim = rank - pair.dims - 1
        seal.sealed_grad = is_grad_enabled()
        return seal

    def _through(self, input: Any, *size: Any, **named: Any) -> Any:
        """Compute the layer with all checks of the seals."""
        owner, pair, front = self.owner, self.pair, self.front
        parameters = owner._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        is_other = (bias is not None) is not self.has_bias
        if is_other or (self.is_sealed and not (is_own(weight) and (bias is None or is_own(bias)))):
            raise (pair or front).other_weight()  # type: ignore[union-attr]
        if front is not None:
            input = opened_from(input, front, front.dims)
            if _pads(owner):
                raise front.other_padding()
        if pair is not None and pair.rank is not None and input.dim() != pair.rank:
            raise pair.other_rank(input)
        output = self.compute(input, *size, **named)
        return output if pair is None else sealed(output, pair, output.dim() - pair.dims - 1)

    def compute(self, input: Any, *size: Any, **named: Any) -> torch.Tensor:
        """Compute the layer alone, without checks and without a seal on the output."""
        # Read the registered tensors: the attribute of a bias that was moved away is a placeholder.
        owner, parameters = self.owner, self.owner._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if needs_unsealed(input):
            return layer_output(owner, unsealed(weight), unsealed(bias), input, *size, **named)
        with _unguarded():
            return layer_output(owner, weight, bias, input, *size, **named)


def _unguarded() -> Any:
    """Return a context in which torch computes with folded tensors."""
    # `SealsWhileExporting` is a function mode, so all function modes must be off for it. Otherwise other modes should
    # see the call.
    is_guarded_by_mode = is_exporting() and not torch.compiler.is_dynamo_compiling()
    return without_torch_function() if is_guarded_by_mode else without_subclasses()


def layer_output(
    owner: Any, weight: Any, bias: torch.Tensor | None, input: Any, output_size: Any = None
) -> torch.Tensor:
    """Compute a torch.nn convolution, transposed convolution or linear layer with this weight and this bias."""
    output: torch.Tensor
    if isinstance(owner, nn.Linear):
        output = linear(input, weight, bias)
    elif not owner.transposed:
        output = owner._conv_forward(input, weight, bias)
    else:
        dims = len(owner.kernel_size)
        padding = owner._output_padding(
            input, output_size, owner.stride, owner.padding, owner.kernel_size, dims, owner.dilation
        )
        function = getattr(nn.functional, f"conv_transpose{dims}d")
        output = function(input, weight, bias, owner.stride, owner.padding, padding, owner.groups, owner.dilation)
    return output


def _pads(owner: Any) -> bool:
    if getattr(owner, "padding_mode", "") != "zeros":
        return False
    return reads_zeros(owner.padding, owner.kernel_size)


class FoldedNormForward(InstanceForward):
    """The forward of a BatchNorm that was folded with the layer before or after it.

    Attributes:
        carried: whether the layer does the BatchNorm's work, so that this forward only checks and returns its input.
        eps: the BatchNorm's `eps` at the time of the fold.
        is_sealed: whether the running mean contains a bias that was moved, and has a seal.
    """

    is_atom = True

    def __init__(self, owner: nn.Module, pair: FoldedPair, *, carried: bool) -> None:
        self.owner = owner
        self.pair = pair
        self.carried = carried
        self.eps = owner.eps
        self.is_sealed = getattr(owner._buffers.get("running_mean"), "sealed_pair", None) is pair

    def __call__(self, input: Any) -> Any:
        pair = self.pair
        if pair.leads:
            self._check_norm()
            return sealed_for(input if pair.farther is None else opened_from(input, pair.farther, None), pair, None)
        # Also a hot path: compare the seal inline, before the full check.
        is_seal = (
            type(input) is SealedTensor
            and input.sealed_by is pair
            and input.sealed_dim == 1
            and input.sealed_grad is is_grad_enabled()
        )
        opened = input.sealed_value if is_seal else opened_from(input, pair, None)
        if self.carried:
            self._check_norm()
            return opened if pair.farther is None else given_on(opened, pair)
        if self.is_sealed and getattr(source_of(self.owner._buffers.get("running_mean")), "sealed_pair", None) is None:
            raise pair.other_mean()
        output = self.compute(opened)
        if pair.trained and output.requires_grad and self._is_frozen():
            output.register_hook(pair.warn_of_lost_gradient)
        return output

    def _check_norm(self) -> None:
        # `functional_call` and similar functions replace tensors without calling any hook.
        owner, pair = self.owner, self.pair
        parameters, buffers = owner._parameters, owner._buffers
        if (
            parameters.get("weight") is not None
            or parameters.get("bias") is not None
            or buffers.get("running_mean") is not None
            or buffers.get("running_var") is not None
        ):
            raise pair.other_tensors(pair.norm_path)
        if owner.eps != self.eps:
            raise pair.other_eps()
        if owner.training:
            raise pair.in_training()

    def _is_frozen(self) -> bool:
        """Whether the BatchNorm uses its running mean, in eager code."""
        frozen = not self.owner.training and self.owner._buffers.get("running_mean") is not None
        return frozen and not torch.compiler.is_compiling()

    def compute(self, input: torch.Tensor) -> torch.Tensor:
        """Compute the BatchNorm alone, without checks."""
        if self.carried:
            return input
        owner: Any = self.owner
        if needs_unsealed(input) and not owner.training and owner.running_mean is not None:
            mean, var = unsealed(owner.running_mean), owner.running_var
            return nn.functional.batch_norm(input, mean, var, owner.weight, owner.bias, False, 0.0, owner.eps)
        with _unguarded():
            output: torch.Tensor = self._class_forward(input)
        return output


class NoSealsLeave(AroundForward):
    """The outermost forward of the root: raises if an output is still sealed.

    Attributes:
        is_root: False if the module has become part of a larger result, whose own root does the check.
    """

    def __init__(self, owner: nn.Module, inner: Any) -> None:
        self.owner = owner
        self.inner = inner
        self.is_root = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_exporting():
            outputs = self._exported(*args, **kwargs)
        else:
            with a_forward_runs():
                outputs = self._inner_forward(*args, **kwargs)
        if self.is_root and type(outputs) is not torch.Tensor:
            _refuse_seals(outputs, depth=4)
        return outputs

    def _exported(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            # The guard of the root covers its inside. With two guards, one would treat the calls of the other as
            # foreign code.
            guard = SealsWhileExporting(self.owner) if self.is_root else contextlib.nullcontext()
            with guard, a_forward_runs():
                return self._inner_forward(*args, **kwargs)
        if not FORWARDS.compared:
            break_graph("torch.export with strict=True can't trace how folded tensors are used: leave out strict")
        return self._inner_forward(*args, **kwargs)


def _refuse_seals(value: Any, depth: int) -> None:
    """Raise if a value, its containers or its dataclasses contain a seal."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, SealedOutput):
            raise leaf.sealed_by.went_astray()
        for name in getattr(type(leaf), "__dataclass_fields__", ()) if depth else ():
            _refuse_seals(getattr(leaf, name, None), depth - 1)
