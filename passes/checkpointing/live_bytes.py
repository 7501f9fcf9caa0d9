"""How many bytes of tensors are alive while a step runs, counted from what is made and what goes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class LiveBytes(TorchDispatchMode):
    """Counts the memory of the tensors that are made under it, on real and on fake tensors alike.

    What kernels take for the time of a call, and what an allocator rounds up, isn't in it.

    Attributes:
        live: bytes alive now; peak: the most so far, since it was last set.
        flops: of matmuls, convolutions and attention, as `torch.utils.flop_counter` counts them.
        moved: bytes of the arguments and results of all operators but views.
        is_random, is_foreign: whether an operator drew random numbers, or was none of torch's own, since they were last set.
    """

    def __init__(self, without: Iterable[Tensor] = ()) -> None:
        """`without`: tensors whose memory isn't counted (parameters, their gradients, inputs)."""
        super().__init__()
        self.live = 0
        self.peak = 0
        self.flops = 0
        self.moved = 0
        self.is_random = False
        self.is_foreign = False
        self.when_gone: Callable[[int], None] | None = None
        # Held, so that no other memory takes their place.
        self._without = list(without)
        self._known: dict[int, weakref.ref[Any] | None] = {
            tensor.untyped_storage()._cdata: None for tensor in self._without if tensor.layout is torch.strided
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in made:
            self._see(tensor)
        counted = flop_registry.get(func._overloadpacket)
        if counted is not None:
            self.flops += counted(*args, **kwargs, out_val=result)
        if not func.is_view:
            given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self.moved += sum(tensor.numel() * tensor.element_size() for tensor in (*given, *made))
        self.is_random |= torch.Tag.nondeterministic_seeded in func.tags
        self.is_foreign |= func.namespace not in ("aten", "prim", "prims")
        return result

    def restart(self) -> None:
        """Look for the peak anew from here on."""
        self.peak = self.live

    def _see(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known[key] = weakref.ref(storage, lambda _: self._gone(key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int, size: int) -> None:
        self.live -= size
        del self._known[key]
        if self.when_gone is not None:
            self.when_gone(key)
