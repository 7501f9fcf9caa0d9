"""Count the bytes of tensors that are alive while a step runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from passes.checkpointing.cost import FLOPS_PER_BYTE, flops_of

# The operator that reads the device of a fake tensor. Most operator calls are calls of this one.
_DEVICE = torch.ops.prim.device.default


class LiveBytes(TorchDispatchMode):
    """Counts the storage of the tensors that are made under this mode, real or fake.

    The temporary memory of kernels isn't included, nor what an allocator adds when it rounds up.

    Attributes:
        live, peak: the bytes that are alive now, and their maximum since the last `restart`.
        sizes: the bytes of each storage, in the order of creation; the index is the number of the storage.
        when_made, when_gone: called with the number of a storage that is made or freed; None for no call.
        flops: the FLOPs of matmuls, convolutions and attention, as `torch.utils.flop_counter` counts them.
        cost: the time of all operators except views, as `passes.checkpointing.cost` estimates it.
        is_random, is_foreign: whether an operator drew random numbers, or wasn't one of torch's own, since the flag was
            last reset.
    """

    def __init__(self, without: Iterable[Tensor] = ()) -> None:
        """Start with no memory counted.

        Args:
            without: tensors whose memory isn't counted: parameters, their gradients, inputs.
        """
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
        # Kept alive, so that no other storage gets their address.
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
        """Set the peak to the bytes that are alive now."""
        self.peak = self.live

    def number_of(self, tensor: Tensor) -> int | None:
        """The number of the storage of a tensor; None if the storage isn't counted."""
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
