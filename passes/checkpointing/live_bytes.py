"""How many bytes of tensors are alive while a step runs, counted from what is made and what goes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from passes.checkpointing.cost import FLOPS_PER_BYTE, flops_of

# A fake tensor is asked for its device by an operator: most of all that are called.
_DEVICE = torch.ops.prim.device.default


class LiveBytes(TorchDispatchMode):
    """Counts the memory of the tensors that are made under it, on real and on fake tensors alike.

    What kernels take for the time of a call, and what an allocator rounds up, isn't in it.

    Attributes:
        live: bytes alive now; peak: the most so far, since it was last set.
        sizes: the bytes of each memory, in the order in which they were made; when_gone is told its number there.
        flops: of matmuls, convolutions and attention, as `torch.utils.flop_counter` counts them.
        cost: the time of all operators but views, as `cost` estimates it.
        is_random, is_foreign: whether an operator drew random numbers, or was none of torch's own, since they were last set.
    """

    def __init__(self, without: Iterable[Tensor] = ()) -> None:
        """`without`: tensors whose memory isn't counted (parameters, their gradients, inputs)."""
        super().__init__()
        self.live = 0
        self.peak = 0
        self.flops = 0
        self.cost = 0
        self.is_random = False
        self.is_foreign = False
        self.sizes: list[int] = []
        self.when_made: Callable[[int], None] | None = None
        self.when_gone: Callable[[int], None] | None = None
        # Held, so that no other memory takes their place.
        self._without = list(without)
        self._known: dict[int, tuple[int, weakref.ref[Any]] | None] = {
            tensor.untyped_storage()._cdata: None for tensor in self._without if tensor.layout is torch.strided
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is _DEVICE:
            return result
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in made:
            self._see(tensor)
        flops = flops_of(func._overloadpacket, args, kwargs, result)
        self.flops += flops
        if not func.is_view:
            given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            moved = sum(tensor.numel() * tensor.element_size() for tensor in (*given, *made))
            self.cost += flops + FLOPS_PER_BYTE * moved
        self.is_random |= torch.Tag.nondeterministic_seeded in func.tags
        self.is_foreign |= func.namespace not in ("aten", "prim", "prims")
        return result

    def restart(self) -> None:
        """Look for the peak anew from here on."""
        self.peak = self.live

    def number_of(self, tensor: Tensor) -> int | None:
        """Which memory a tensor lies in, by its number; None for one that isn't counted."""
        if tensor.layout is not torch.strided:
            return None
        known = self._known.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[0]

    def _see(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size, number = storage.nbytes(), len(self.sizes)
        self._known[key] = number, weakref.ref(storage, lambda _: self._gone(key))
        self.sizes.append(size)
        self.live += size
        self.peak = max(self.peak, self.live)
        if self.when_made is not None:
            self.when_made(number)

    def _gone(self, key: int) -> None:
        known = self._known.pop(key)
        assert known is not None
        number, _ = known
        self.live -= self.sizes[number]
        if self.when_gone is not None:
            self.when_gone(number)
