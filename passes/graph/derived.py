"""What a pass writes to derive a tensor from parameters and buffers, such as a folded weight, and its arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from passes.torch_private import has_autocast, without_subclasses

Usable = Callable[[torch.Tensor], str | None]


class Derived:
    """The call in a graph that computes a derived tensor."""

    # torch.fx requires a name for functions in a graph.
    __name__ = "derived"
    takes_and_gives = True

    def __init__(
        self,
        function: Callable[..., Any],
        what: str,
        usable: Usable | None = None,
        *,
        in_autocast: bool = True,
        each_call: bool = False,
    ) -> None:
        try:
            hash(function)
        except TypeError:
            raise TypeError(
                f"derived() takes a hashable function, and {type(function).__name__} isn't: write a function, or a frozen "
                "dataclass with __call__."
            ) from None
        # Computes the tensor; differentiable. Equal functions of the same sources share one value, so a frozen
        # dataclass with `__call__` is better than a closure.
        self.function = function
        self.what = what  # a description of the tensor, for reports
        self.usable = usable  # the reason why a value must not be used, as a clause; None for values that may
        # Whether the function is part of the forward and follows an active autocast. If False, it is always run without
        # autocast.
        self.in_autocast = in_autocast
        # Whether it is computed in the graph at each call, because gradients flow through it
        self.each_call = each_call

    def __call__(self, *sources: torch.Tensor) -> torch.Tensor:
        off = not self.in_autocast and has_autocast()
        with torch.autocast(sources[0].device.type, enabled=False) if off else nullcontext(), without_subclasses():
            value: torch.Tensor = self.function(*sources)
        return value


class Unusable(Exception):
    """A value that the pass can't use; the message is a clause with the reason."""


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without gradients, in its own dtype; a tensor on MPS, which has no float64, is copied to the CPU.

    A product or sum with a float64 tensor is then computed in float64, without a float64 copy of a large weight. This
    doesn't hold for a float64 scalar tensor, unless this tensor is a scalar too.
    """
    tensor = tensor.detach()
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def float64(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor in float64, without gradients; on the CPU if its device has no float64."""
    return exact(tensor).double()


def why_not_finite(tensor: torch.Tensor) -> str | None:
    """The reason not to use the tensor, as a clause, if it holds NaN or infinity; None otherwise.

    A rewrite that reorders operations isn't exact on such tensors.
    """
    # A NaN or an infinity makes the sum non-finite. The sum of finite values may overflow too, so check them one by one
    # then.
    is_finite = math.isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())
    return None if is_finite else "the new weights wouldn't be finite"
