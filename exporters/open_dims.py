"""The open dims of the calls: which sizes change between them, and together with which others."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from exporters.errors import StructureError

# Default name for the size of dim 0.
BATCH = "batch"

OpenDims = dict[tuple[int, int], tuple[str, tuple[int, ...]]]
"""Name and size in each call of an open dim, by (input, dim)."""


@dataclass(frozen=True)
class Direction:
    """Calls in which certain open dims change while the others keep their size."""

    # Indices of the calls; the first one is always call 0.
    calls: tuple[int, ...]
    # The (input, dim) pairs that change.
    dims: tuple[tuple[int, int], ...]
    # Where several sizes grow together, the step number of each call, starting at 1; otherwise empty.
    steps: tuple[int, ...] = ()


def open_inputs(
    names: tuple[str, ...],
    inputs: tuple[tuple[torch.Tensor, ...], ...],
    dynamic: bool,
    declared: Mapping[str, Mapping[int, str]],
) -> OpenDims:
    """The open dims; undeclared ones share a name where their sizes are equal in all calls."""
    found = _declared_inputs(names, inputs, declared)
    symbols = {sizes: symbol for symbol, sizes in found.values()}
    for index, name in enumerate(names):
        shapes = [tensors[index].shape for tensors in inputs]
        if len({tensors[index].dtype for tensors in inputs}) > 1:
            raise StructureError(f"Input `{name}` changes its dtype between the calls.")
        if name in declared:
            continue
        if len({len(shape) for shape in shapes}) > 1 or len({shape[1:] for shape in shapes}) > 1:
            raise StructureError(f"Input `{name}` changes more than its first dim between the calls.")
        if len(set(shapes)) == 1:
            continue
        if not dynamic:
            raise StructureError(f"Input `{name}` changes its shape between the calls of a static export.")
        sizes = tuple(shape[0] for shape in shapes)
        if sizes[0] < 2:
            raise StructureError(
                f"Input `{name}` has batch size {sizes[0]} in the first call; tracing needs two rows or more."
            )
        symbol = symbols.setdefault(sizes, f"{name}_batch" if BATCH in symbols.values() else BATCH)
        found[index, 0] = (symbol, sizes)
    return dict(sorted(found.items()))


def _declared_inputs(
    names: tuple[str, ...], inputs: tuple[tuple[torch.Tensor, ...], ...], declared: Mapping[str, Mapping[int, str]]
) -> OpenDims:
    found: OpenDims = {}
    sizes_of: dict[str, tuple[int, ...]] = {}
    for index, name in enumerate(names):
        if name not in declared:
            continue
        shapes = [tensors[index].shape for tensors in inputs]
        if len({len(shape) for shape in shapes}) > 1:
            raise StructureError(f"Input `{name}` changes its number of dims between the calls.")
        for dim, sizes in enumerate(zip(*shapes, strict=True)):
            symbol = declared[name].get(dim)
            if symbol is None and len(set(sizes)) > 1:
                raise StructureError(f"Input `{name}` changes dim {dim} between the calls, but that dim isn't open.")
            if symbol is None:
                continue
            if len(set(sizes)) == 1:
                raise StructureError(f"Dim {dim} of input `{name}` is open, but has the same size in all calls.")
            if sizes[0] < 2:
                raise StructureError(
                    f"Dim {dim} of input `{name}` has the size {sizes[0]} in the first call; tracing needs two or more."
                )
            if sizes_of.setdefault(symbol, sizes) != sizes:
                raise StructureError(f"Dims named {symbol} have different sizes in the same call.")
            found[index, dim] = (symbol, sizes)
    return found


def directions_of(open_dims: OpenDims, named: Collection[str]) -> tuple[Direction, ...]:
    """The ways in which sizes change from the first call: each by itself, then all together.

    Empty where only one size changes. Sizes without a declared name change with the batch.

    Raises:
        StructureError: a size doesn't change by itself in any call.
    """
    dims_of: dict[str, list[tuple[int, int]]] = {}
    for place, (symbol, _) in open_dims.items():
        dims_of.setdefault(symbol if symbol in named else BATCH, []).append(place)
    if len(dims_of) < 2:
        return ()
    changed: dict[str, frozenset[int]] = {}
    for name, dims in dims_of.items():
        sizes = [open_dims[place][1] for place in dims]
        changed[name] = frozenset(call for each in sizes for call, size in enumerate(each) if size != each[0])
    found = []
    for name, calls in changed.items():
        alone = calls.difference(*(changed[other] for other in changed if other != name))
        if not alone:
            raise StructureError(f"No call changes the size {name} alone.")
        found.append(Direction((0, *sorted(alone)), tuple(dims_of[name])))
    shared = frozenset(call for one, other in itertools.combinations(changed.values(), 2) for call in one & other)
    if shared:
        together = tuple(place for name, dims in dims_of.items() if shared <= changed[name] for place in dims)
        found.append(Direction((0, *sorted(shared)), together, tuple(range(1, len(shared) + 2))))
    return tuple(found)
