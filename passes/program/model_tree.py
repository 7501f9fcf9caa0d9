"""Where the modules and tensors of a model are: under which paths, in how many places, and over whose memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from passes.graph.memory import SharedMemory, places_in
from passes.program.tensors import TensorRef


class ModelTree:
    """The modules of a model with those that only plain containers hold, and their tensors, as they are now.

    Attributes:
        root: the model.
        unregistered: (path, module) of those in plain containers.
    """

    def __init__(self, root: nn.Module, unregistered: Sequence[tuple[str, nn.Module]]) -> None:
        self.root = root
        self.unregistered = unregistered
        self._paths: dict[int, list[str]] = defaultdict(list)
        self._modules: dict[int, nn.Module] = {}
        for path, module in (*root.named_modules(remove_duplicate=False), *unregistered):
            self._paths[id(module)].append(path)
            self._modules[id(module)] = module
        self._holders: dict[int, int] = defaultdict(int)
        for module in self.modules():
            for tensor in _registered_in(module):
                self._holders[id(tensor)] += 1
        self._memory: SharedMemory | None = None

    def modules(self) -> Iterable[nn.Module]:
        """Every module once."""
        return self._modules.values()

    def path(self, module: nn.Module) -> str:
        """The first path of a module; "" for the root."""
        return self._paths[id(module)][0] if id(module) in self._paths else type(module).__name__

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
