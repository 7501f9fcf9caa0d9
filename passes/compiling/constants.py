"""Track the tensors that compiled code contains as constants, and check that they are unchanged."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from passes.compiling.holdings import Holding, holdings_from
from passes.torch_private import COMPILED_CALL


class BakedTensors:
    """The tensors that are constants of compiled code, with all references that lead to them from a module.

    A tensor counts as unchanged if the references still lead to it, its memory address is the same, and torch counts no
    write to it. The tensors are not kept alive.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.unwatched: str | None = None
        self._found: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        self._looked_up = True
        self._put([])

    def add(self, program: Any) -> None:
        """Add the constant tensors of one program, in their current state."""
        if self.unwatched is not None:
            return
        for node in program.graph.nodes:
            value = _attribute_of(program, str(node.target)) if node.op == "get_attr" else None
            if not isinstance(value, torch.Tensor) or id(value) in self._found:
                continue
            if value.is_inference() or value.layout is not torch.strided:
                kind = "an inference tensor" if value.is_inference() else f"of the layout {value.layout}"
                self.unwatched = f"a tensor of shape {tuple(value.shape)} is {kind}: torch doesn't track writes to it"
                return
            self._found[id(value)] = weakref.ref(value), value._version, value.data_ptr()
            self._looked_up = False

    def look_up(self) -> None:
        """Find the references to the tensors that were added."""
        if self._looked_up or self.unwatched is not None:
            return
        self._looked_up = True
        into: dict[int, list[Holding]] = defaultdict(list)
        # The compiled call of a module is not part of its state.
        for place in holdings_from(self.root, without=(COMPILED_CALL,)):
            for value in place.values:
                into[id(value)].append(place)
        waiting, seen, ways = list(self._found), set(self._found), []
        for key in waiting:
            if key in self._found and key not in into:
                tensor = self._found[key][0]()
                shape = "" if tensor is None else f" of shape {tuple(tensor.shape)}"
                self.unwatched = f"a tensor{shape} that it reads is not an attribute of it or of a module in it"
                self._put([])
                return
            for place in into[key]:
                ways.append(place)
                if id(place.owner) not in seen:
                    seen.add(id(place.owner))
                    waiting.append(id(place.owner))
        self._put(ways)

    def _put(self, ways: list[Holding]) -> None:
        # Stored in parallel lists, because they are compared at every call.
        places = {(id(place.home), place.key): place for place in ways}.values()
        single = [place for place in places if not place.is_row]
        self._homes, self._keys = [place.home for place in single], [place.key for place in single]
        self._values = [_reference(*place.values) for place in single]
        self._rows = [(place.home, [_reference(item) for item in place.values]) for place in places if place.is_row]
        found = self._found.values()
        self._tensors = [tensor for tensor, _, _ in found]
        self._versions, self._pointers = [version for _, version, _ in found], [pointer for _, _, pointer in found]

    @property
    def hold(self) -> bool:
        """Whether all tensors are unchanged."""
        tensors: list[Any] = [reference() for reference in self._tensors]
        return (
            all(map(operator.is_, map(dict.get, self._homes, self._keys), [value() for value in self._values]))
            and all(map(operator.is_not, tensors, itertools.repeat(None)))
            and list(map(_version_of, tensors)) == self._versions
            and list(map(torch.Tensor.data_ptr, tensors)) == self._pointers
            and all(
                len(row) == len(items) and all(map(operator.is_, row, [item() for item in items]))
                for row, items in self._rows
            )
        )


_version_of = operator.attrgetter("_version")


def _attribute_of(program: Any, path: str) -> Any:
    value = program
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def _reference(value: Any) -> Callable[[], Any]:
    """Make a function that returns the value; tensors and modules are referenced weakly."""
    return weakref.ref(value) if isinstance(value, torch.Tensor | nn.Module) else lambda: value
