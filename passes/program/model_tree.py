"""A working copy as passes see it: its modules and tensors, where they are, over whose memory, and what runs of it do."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from passes.program.recording import Runs
from passes.program.shared_memory import SharedMemory, places_in
from passes.program.tensors import TensorRef


class ModelTree:
    """The modules of a model with those that only plain containers hold, and their tensors.

    Attributes:
        root: the model.
        unregistered: (path, module) of those in plain containers.
        made: the parameters that passes have made, by identity: no other module than the working copy's holds them.
        graph_call: what passes over captured graphs set as the root's call, with all that was captured; None for none.
        runs: what recorded runs of the tree as it is now show; None where nobody has recorded it.
    """

    def __init__(self, root: nn.Module, unregistered: Sequence[tuple[str, nn.Module]] = ()) -> None:
        self.root = root
        self.unregistered = unregistered
        self.made: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
        self.graph_call: Any = None
        self.runs: Runs | None = None
        self.refresh()

    def refresh(self) -> None:
        """Read the tree anew, after edits."""
        self._paths: dict[int, list[str]] = defaultdict(list)
        self._modules: dict[int, nn.Module] = {}
        for path, module in (*self.root.named_modules(remove_duplicate=False), *self.unregistered):
            self._paths[id(module)].append(path)
            self._modules[id(module)] = module
        self._holders: dict[int, int] = defaultdict(int)
        for module in self.modules():
            for tensor in _registered_in(module):
                self._holders[id(tensor)] += 1
        self._memory: SharedMemory | None = None
        self.runs = None

    def modules(self) -> Iterable[nn.Module]:
        """Every module once: those of the tree, then those that it doesn't register."""
        return self._modules.values()

    def path(self, module: nn.Module) -> str:
        """The first path of a module; "" for the root."""
        return self._paths[id(module)][0] if id(module) in self._paths else type(module).__name__

    def paths(self, module: nn.Module) -> Sequence[str]:
        """All its paths."""
        return self._paths[id(module)]

    def aliases(self, module: nn.Module) -> list[str]:
        """Its further paths."""
        return self._paths[id(module)][1:]

    def is_registered(self, module: nn.Module) -> bool:
        """Whether the module is in the tree, and not in plain containers alone."""
        return all(module is not other for _, other in self.unregistered)

    def path_of(self, ref: TensorRef) -> str:
        """The path of a tensor: "layer1.conv.weight"."""
        path = self.path(ref.owner)
        return f"{path}.{ref.name}" if path else ref.name

    def holders_of(self, tensor: torch.Tensor) -> int:
        """Under how many modules and names the tensor is registered."""
        return self._holders.get(id(tensor), 0)

    def sharer_of(self, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Path and tensor of another one in the memory of this one; None where it is alone there."""
        if self._memory is None:
            self._memory = SharedMemory(places_in((self.path(module), module) for module in self.modules()))
        place = self._memory.beside(tensor)
        return None if place is None else (place.path, place.tensor)


def _registered_in(module: nn.Module) -> Iterator[torch.Tensor]:
    if not isinstance(module, torch.jit.ScriptModule):
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                yield tensor


@contextmanager
def training_flags(root: nn.Module, flag: bool | None) -> Iterator[None]:
    """All modules of the tree in training or in eval for the time of the block, whatever `.train()` of their classes does.

    None leaves them, and puts back what the block does to them.
    """
    flags = [(module, module.__dict__["training"]) for module in root.modules() if "training" in module.__dict__]
    try:
        for module, own in flags:
            module.__dict__["training"] = own if flag is None else flag
        yield
    finally:
        for module, own in flags:
            module.__dict__["training"] = own
