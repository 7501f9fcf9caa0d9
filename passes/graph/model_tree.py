"""The modules and tensors of a working copy: their paths, shared memory and recorded runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class TensorRef:
    """A parameter or buffer, identified by its place rather than by the tensor.

    Attributes:
        owner: the module that registers it.
        name: its name there, such as "weight".
    """

    owner: nn.Module
    name: str

    @property
    def value(self) -> torch.Tensor | None:
        """The tensor; None if none is registered."""
        parameter = self.owner._parameters.get(self.name)
        return self.owner._buffers.get(self.name) if parameter is None else parameter


class ModelTree:
    """All modules of a model, including those held only in plain containers, and their tensors.

    Attributes:
        root: the model.
        unregistered: (path, module) of the modules held only in plain containers.
        graph_call: the `GraphCall` of the root with its captured graphs, for reuse by the next graph pass; None if
            there is none.
        runs: the recorded `Runs` of the current tree; None if it hasn't been recorded.
    """

    def __init__(self, root: nn.Module, unregistered: Sequence[tuple[str, nn.Module]] = ()) -> None:
        self.root = root
        self.unregistered = unregistered
        self.graph_call: Any = None
        self.runs: Any = None
        self.refresh()

    def refresh(self) -> None:
        """Read the tree again after edits."""
        self._paths: dict[int, list[str]] = defaultdict(list)
        self._modules: dict[int, nn.Module] = {}
        for path, module in (*self.root.named_modules(remove_duplicate=False), *self.unregistered):
            self._paths[id(module)].append(path)
            self._modules[id(module)] = module
        self._holders: dict[int, int] = defaultdict(int)
        for module in self.modules():
            for tensor in _registered_in(module):
                self._holders[id(tensor)] += 1
        self.forget_runs()

    def forget_runs(self) -> None:
        """Drop the recorded runs, which may no longer match the edited model."""
        self.runs = None

    def modules(self) -> Iterable[nn.Module]:
        """Every module once: the registered ones first, then the others."""
        return self._modules.values()

    def path(self, module: nn.Module) -> str:
        """The first path of a module; "" for the root."""
        return self._paths[id(module)][0] if id(module) in self._paths else type(module).__name__

    def paths(self, module: nn.Module) -> Sequence[str]:
        """All paths of a module."""
        return self._paths[id(module)]

    def aliases(self, module: nn.Module) -> list[str]:
        """The paths of a module other than the first."""
        return self._paths[id(module)][1:]

    def is_registered(self, module: nn.Module) -> bool:
        """Whether the module is registered in the tree, and not only held in plain containers."""
        return all(module is not other for _, other in self.unregistered)

    def path_of(self, ref: TensorRef) -> str:
        """The path of a tensor: "layer1.conv.weight"."""
        path = self.path(ref.owner)
        return f"{path}.{ref.name}" if path else ref.name

    def holders_of(self, tensor: torch.Tensor) -> int:
        """The number of places where the tensor is registered."""
        return self._holders.get(id(tensor), 0)


def _registered_in(module: nn.Module) -> Iterator[torch.Tensor]:
    if not isinstance(module, torch.jit.ScriptModule):
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                yield tensor


def paths_matching(paths: Iterable[str], pattern: str) -> set[str]:
    """The paths that match a pattern such as `"stem|layers.*"`.

    `|` separates alternatives, and `*` matches one name of a path or a part of it: "layers.*" matches "layers.0", but
    not "layers" or "layers.0.norm".
    """
    wanted = [one.strip().split(".") for one in pattern.split("|")]
    return {path for path in paths if any(_matches(path.split("."), one) for one in wanted)}


def _matches(path: list[str], wanted: list[str]) -> bool:
    return len(path) == len(wanted) and all(map(fnmatchcase, path, wanted))


@contextmanager
def training_flags(root: nn.Module, flag: bool | None) -> Iterator[None]:
    """Set the `training` attribute of all modules under `root` for the block, without calling their `.train()`.

    None sets nothing. Afterwards each module has its old flag again, even if the block changed it.
    """
    flags = [(module, module.__dict__["training"]) for module in root.modules() if "training" in module.__dict__]
    try:
        for module, own in flags:
            module.__dict__["training"] = own if flag is None else flag
        yield
    finally:
        for module, own in flags:
            module.__dict__["training"] = own
