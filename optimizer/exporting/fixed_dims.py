"""Find the `dynamic` under which the original runs, where the default fixes dims or doesn't fit it.

There are two cases: lengths of tokens and masks that are fixed although the model takes others, and a batch that isn't
dim 0. Lengths are suggested if the original ran at another one.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from optimize_export.errors import UsageError
from optimizer.model import BATCH, Call, Samples, keeps_values, open_dims, rebuild
from optimizer.parity import Reference, outputs_on

_TIME = "time"

# A slice whose values change less than this, relative to the largest of the output, doesn't depend on the changed one.
_INDEPENDENT = 1e-4

Names = dict[str, dict[int, str]]
"""The open dims of inputs with the names of their sizes, as in `OpenDims.of`."""


def _only(found: Mapping[str, Mapping[int, int]], sizes: Sequence[int]) -> dict[str, dict[int, int]]:
    kept = {name: {dim: size for dim, size in dims.items() if size in sizes} for name, dims in found.items()}
    return {name: dims for name, dims in kept.items() if dims}


def _lengths(inputs: Mapping[str, torch.Tensor], batch_size: int | None) -> dict[str, dict[int, int]]:
    """The dims of tokens, flags and masks with their sizes, by input name, without the batch dim."""
    dims_of = {
        # A dim of size 1 is for broadcasting.
        name: {dim: size for dim, size in enumerate(tensor.shape) if size > 1 and (dim or size != batch_size)}
        for name, tensor in inputs.items()
        if keeps_values(tensor)
    }
    lengths = {size for name, dims in dims_of.items() if _counts(inputs[name]) for size in dims.values()}
    # A float tensor that looks like a mask may be a blank image. It is a mask if it has the length of an integer input.
    return _only(dims_of, list(lengths))


def _counts(tensor: torch.Tensor) -> bool:
    """Whether these are tokens or flags: not floats, and not the pixels of an image."""
    return not tensor.is_floating_point() and not (tensor.dtype is torch.uint8 and tensor.dim() > 2)


def option_text(declared: Mapping[str, Mapping[int, str]]) -> str:
    """The dims as options of the command."""
    texts = (f"{name}:{','.join(f'{dim}={size}' for dim, size in dims.items())}" for name, dims in declared.items())
    return " ".join(f"--dynamic {shlex.quote(text)}" for text in texts)


@dataclass(frozen=True)
class Suggestions:
    """Tries other open dims on the original."""

    inputs: Mapping[str, torch.Tensor]
    """The tensors of the example inputs, by their names in the files."""
    samples: Samples
    """The example inputs, opened with the declared dims."""
    reference: Reference
    """Runs the original."""

    def note_on_fixed_dims(self, *, open_batch: bool) -> list[str]:
        """A note on the fixed dims of integer inputs and masks, with the option that opens them.

        There is no note if the model itself accepts only the given sizes. Dims of other inputs, such as images, are left
        out: users expect those to be fixed, and the shapes in the files show them.
        """
        found = _lengths(self.inputs, self.samples.batch_size)
        # Dims of equal size are the same length, such as those of the tokens and their mask.
        sizes = dict.fromkeys(size for dims in found.values() for size in dims.values())
        rows = self.samples.batch_size if open_batch else None
        taken = [size for size in sizes if self._takes_others(_only(found, [size]), rows)]
        if not taken:
            return []
        names = {size: f"{_TIME}_{number}" if number > 1 else _TIME for number, size in enumerate(taken, 1)}
        found = _only(found, taken)
        declared = self._with_batch(
            {name: {dim: names[size] for dim, size in dims.items()} for name, dims in found.items()}, rows
        )
        fixed = [f"dim {dim} of {name} ({size})" for name, dims in found.items() for dim, size in dims.items()]
        return [
            f"fixed in the files, although the model takes other sizes: {', '.join(fixed)}; `{option_text(declared)}` may "
            f"make {'them' if len(fixed) > 1 else 'it'} dynamic (dynamic= in Python; the original runs so, files weren't tried)"
        ]

    def _with_batch(self, declared: Names, rows: int | None) -> Names:
        """The open dims with the batch dim of each input that has `rows` rows; unchanged if `rows` is None."""
        return {
            name: {0: BATCH, **dims} if rows is not None and self.inputs[name].shape[0] == rows else dims
            for name, dims in declared.items()
        }

    def _takes_others(self, dims: Mapping[str, Mapping[int, int]], rows: int | None) -> bool:
        """Whether the original runs with another size of one length, which is the size of all of `dims`.

        Args:
            rows: the batch size of the example inputs if the batch is open. Then one row is run if the model accepts one.
        """
        declared = self._with_batch({name: dict.fromkeys(each, _TIME) for name, each in dims.items()}, rows)
        opened_dims = open_dims(declared, self.inputs, first=self.samples.first, static_batch=rows is None)
        opened = self.samples.opened(opened_dims, self.inputs)
        given = opened_dims.given[_TIME]
        rows = 1 if rows is not None and 1 in self.reference.batch_sizes else opened.batch_size

        def runs(size: int) -> bool:
            return outputs_on(self.reference, opened.at(rows, 0, ((_TIME, size),))) is not None

        try:
            # A model that reads rows by number, as the two of a graph's edges, ignores further ones but takes no fewer. A
            # dim of size 1 is broadcast, also where other sizes aren't accepted.
            if given == 2:
                return runs(1) and runs(3)
            return any(runs(size) for size in (given // 2, given - 1) if size > 1)
        except UsageError:
            # The user's function for the example inputs doesn't always return the same length.
            return False

    def batch_elsewhere(self, model: nn.Module) -> str:
        """A note where dim 0 of the first input isn't the batch and dim 1 is; "" otherwise.

        Recurrent and attention layers of torch expect that by default. To be the batch, slices must not influence each
        other.
        """
        first = self.samples.first
        if not any(getattr(module, "batch_first", True) is False for module in model.modules()):
            return ""
        name = next((name for name, tensor in self.inputs.items() if tensor is first), None)
        if name is None or first is None or first.dim() < 2 or min(first.shape[:2]) < 2 or self.samples.further:
            return ""
        if self._is_independent(first, 0) is not False or not self._is_independent(first, 1):
            return ""
        return (
            f"dim 0 of {name} isn't the batch: its slices influence each other, and those of dim 1 don't; "
            f"`{option_text({name: {0: _TIME, 1: BATCH}})}` makes dim 1 the batch (dynamic= in Python); also name the "
            "dims of other inputs that have either size"
        )

    def _is_independent(self, tensor: torch.Tensor, dim: int) -> bool | None:
        """Whether slices of the outputs depend on the slice with the same index of an input alone; None if unknown."""
        changed = tensor.detach().clone()
        changed.select(dim, 0).copy_(tensor.detach().select(dim, 1))
        given = self.samples.given
        other = Call(*rebuild((given.args, given.kwargs), lambda each: changed if each is tensor else each))
        before, after = outputs_on(self.reference, given), outputs_on(self.reference, other)
        if before is None or after is None or before.keys() != after.keys():
            return None
        moved = [_moved(before[name], after[name]) for name in before]
        if not any(bool(each.any()) for each in moved):
            return None
        return all(_only_first(each, tensor.shape[dim]) for each in moved)


def _moved(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Where two outputs differ, as a bool tensor."""
    if before.shape != after.shape:
        return torch.ones_like(before, dtype=torch.bool)
    if not before.is_floating_point():
        return before != after
    largest = before.abs().nan_to_num(posinf=0.0).amax() if before.numel() else 0.0
    return (before - after).abs() > _INDEPENDENT * largest


def _only_first(moved: torch.Tensor, size: int) -> bool:
    """Whether only the first slice along a dim of this size has moved."""
    return any(
        moved.shape[dim] == size and not bool(moved.narrow(dim, 1, size - 1).any()) for dim in range(moved.dim())
    )
