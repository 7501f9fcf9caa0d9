"""The open dims of the inputs in the files: `dynamic` and `--dynamic`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from optimize_export.errors import UsageError
from optimize_export.wording import listed

Dynamic = Mapping[str, Sequence[int] | Mapping[int, str | None]]

# Sizes of open dims except the batch, by name, as a hashable key: (("time", 17),).
Sizes = tuple[tuple[str, int], ...]

BATCH = "batch"


@dataclass(frozen=True)
class OpenDims:
    """The open dims of a call's tensors.

    A tensor that isn't named here has the default open dim: dim 0, if that is the batch.
    """

    # By the name of an input in the files, its open dims, each with the name of its size.
    of: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    # The name of the batch size: "batch" if a dim has that name, otherwise that of dim 0 of the first tensor.
    batch: str = BATCH
    # The batch size in the example inputs; None if no tensor has dims.
    rows: int | None = None
    # The size of each other name in the example inputs.
    given: Mapping[str, int] = field(default_factory=dict)

    def places(self, size: str) -> str:
        """The dims with this size, as text: "dim 1 of ids, dim 1 of mask"."""
        return listed([f"dim {dim} of {name}" for name, dims in self.of.items() for dim in dims if dims[dim] == size])


def open_dims(
    dynamic: Dynamic | None,
    inputs: Mapping[str, torch.Tensor],
    *,
    first: torch.Tensor | None,
    static_batch: bool = False,
) -> OpenDims:
    """Check the declared dims, and name the dims that have no name.

    Args:
        inputs: the tensors of the example inputs by their names in the files.
        first: the first tensor with dims; its dim 0 is the batch, unless another dim has the name "batch".
        static_batch: whether the batch size is fixed; then no declared dim may be the batch.
    """
    default = None if first is None else first.shape[0]
    if dynamic is None:
        return OpenDims()
    if not isinstance(dynamic, Mapping):
        raise UsageError(
            f"dynamic must be a dict such as {{'x': (0, 2)}} or {{'x': {{0: 'batch', 2: 'time'}}}}, not {dynamic!r}."
        )
    if not dynamic:
        raise UsageError("dynamic opens no dim: list the dims of an input, such as {'x': (0, 2)}, or leave it out.")
    declared = {name: _named_dims(name, dims) for name, dims in dynamic.items()}
    if unknown := [name for name in declared if name not in inputs]:
        raise UsageError(f"dynamic names {unknown[0]}, but the inputs in the files are {listed(list(inputs))}.")
    _refuse_one_tensor_for_two(declared, inputs)
    for name, dims in declared.items():
        _refuse_absent(name, dims, inputs[name])
    batch, rows, place = BATCH, default, f"the {BATCH}"
    named_batch = ((name, dim) for name, dims in declared.items() for dim in dims if dims[dim] == BATCH)
    if (called := next(named_batch, None)) is not None:
        rows, place = inputs[called[0]].shape[called[1]], f"dim {called[1]} of {called[0]}"
    else:
        batch = next((dims.get(0) for name, dims in declared.items() if inputs[name] is first), None) or BATCH
    named: dict[str, dict[int, str]] = {}
    for name, dims in declared.items():
        is_batch = inputs[name].shape[:1] == (rows,) and batch not in dims.values()
        own = batch if is_batch else f"{name}_dim_0"
        named[name] = {dim: symbol or (f"{name}_dim_{dim}" if dim else own) for dim, symbol in dims.items()}
    sizes: dict[str, tuple[int, str]] = {} if rows is None else {batch: (rows, place)}
    for name, named_dims in named.items():
        for dim, size_name in named_dims.items():
            size, place = inputs[name].shape[dim], f"dim {dim} of {name}"
            if static_batch and size_name == batch:
                raise UsageError(
                    f"static_batch fixes the batch size, but dynamic opens {place}: use only one of the two."
                )
            known, elsewhere = sizes.setdefault(size_name, (size, place))
            if known != size:
                raise UsageError(
                    f"dynamic gives {place} and {elsewhere} the same name, {size_name}, but their sizes in the example inputs are"
                    f" {size} and {known}: use two names, or inputs of equal size."
                )
    return OpenDims(named, batch, rows, {symbol: size for symbol, (size, _) in sizes.items() if symbol != batch})


def _named_dims(name: object, dims: object) -> dict[int, str | None]:
    listed_dims = isinstance(dims, Sequence) and not isinstance(dims, str)
    if not isinstance(name, str) or not (listed_dims or isinstance(dims, Mapping)):
        raise UsageError(
            f"dynamic must map each input to a tuple of dims, or to a dict of dims and names, not {dims!r}."
        )
    assert isinstance(dims, Sequence | Mapping)
    if not dims:
        raise UsageError(f"dynamic lists no dim of {name}: add one such as 0, or leave {name} out.")
    found: dict[int, str | None] = {}
    for dim in dims:
        if not isinstance(dim, int) or isinstance(dim, bool) or dim < 0:
            raise UsageError(f"dynamic lists {dim!r} as a dim of {name}: dims must be whole numbers, counted from 0.")
        if dim in found:
            raise UsageError(f"dynamic lists dim {dim} of {name} twice.")
        symbol = dims[dim] if isinstance(dims, Mapping) else None
        if symbol is not None and (not isinstance(symbol, str) or not symbol.isidentifier()):
            raise UsageError(
                f"dynamic uses {symbol!r} as the name for the size of dim {dim} of {name}: use a word such as time."
            )
        found[dim] = symbol
    return found


def _refuse_absent(name: str, dims: Mapping[int, str | None], tensor: torch.Tensor) -> None:
    shape = list(tensor.shape)
    for dim in dims:
        if dim >= len(shape):
            last = f"its dims are 0 to {len(shape) - 1}" if shape else "it has no dims"
            raise UsageError(f"dynamic opens dim {dim} of {name}, which is {shape} in the example inputs: {last}.")
        if shape[dim] == 0:
            raise UsageError(f"dynamic opens dim {dim} of {name}, which is empty in the example inputs: {shape}.")


def _refuse_one_tensor_for_two(
    declared: Mapping[str, Mapping[int, str | None]], inputs: Mapping[str, torch.Tensor]
) -> None:
    by_tensor: dict[int, str] = {}
    for name, tensor in inputs.items():
        other = by_tensor.setdefault(id(tensor), name)
        if declared.get(other) != declared.get(name):
            raise UsageError(
                f"{other} and {name} are the same tensor in the example inputs, but dynamic opens different dims of "
                "them: use separate tensors, or the same dims with the same names."
            )
