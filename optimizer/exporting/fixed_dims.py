"""Find sequence lengths that the files fix although the model accepts others: dims of tokens and of masks."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

import torch

from optimizer.errors import UsageError
from optimizer.model import BATCH, Samples, keeps_values, open_dims
from optimizer.parity import Reference, runs_on

_NAME = "time"


def note_on_fixed_dims(
    inputs: Mapping[str, torch.Tensor], samples: Samples, reference: Reference, *, open_batch: bool
) -> list[str]:
    """A note on the fixed dims of integer inputs and masks, with the option that opens them.

    There is no note if the model itself accepts only the given sizes. Dims of other inputs, such as images, are left
    out: users expect those to be fixed, and the shapes in the files show them.

    Args:
        inputs: the tensors of the example inputs, by their names in the files.
        samples: the example inputs.
        reference: runs the original at other sizes.
        open_batch: whether the batch is open in the files.
    """
    found = _lengths(inputs, samples.batch_size)
    # Dims of equal size are the same length, such as those of the tokens and their mask.
    sizes = dict.fromkeys(size for dims in found.values() for size in dims.values())
    rows = samples.batch_size if open_batch else None
    taken = [size for size in sizes if _takes_others(_only(found, [size]), inputs, samples, reference, rows)]
    if not taken:
        return []
    names = {size: f"{_NAME}_{number}" if number > 1 else _NAME for number, size in enumerate(taken, 1)}
    found = _only(found, taken)
    declared = {name: {dim: names[size] for dim, size in dims.items()} for name, dims in found.items()}
    declared = _with_batch(declared, inputs, rows)
    fixed = [f"dim {dim} of {name} ({size})" for name, dims in found.items() for dim, size in dims.items()]
    return [
        f"fixed in the files, although the model takes other sizes: {', '.join(fixed)}; `{_option(declared)}` makes "
        f"{'them' if len(fixed) > 1 else 'it'} dynamic (dynamic= in Python)"
    ]


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
    lengths = {size for name, dims in dims_of.items() if not inputs[name].is_floating_point() for size in dims.values()}
    # A float tensor that looks like a mask may be a blank image. It is a mask if it has the length of an integer input.
    return _only(dims_of, list(lengths))


def _with_batch(
    declared: Mapping[str, dict[int, str]], inputs: Mapping[str, torch.Tensor], rows: int | None
) -> dict[str, dict[int, str]]:
    """The open dims with the batch dim of each input that has `rows` rows; unchanged if `rows` is None."""
    return {
        name: {0: BATCH, **dims} if rows is not None and inputs[name].shape[0] == rows else dims
        for name, dims in declared.items()
    }


def _takes_others(
    dims: Mapping[str, Mapping[int, int]],
    inputs: Mapping[str, torch.Tensor],
    samples: Samples,
    reference: Reference,
    rows: int | None,
) -> bool:
    """Whether the model runs with another size of one length, which is the size of all of `dims`.

    Args:
        rows: the batch size of the example inputs if the batch is open. Then one row is run if the model accepts one.
    """
    declared = _with_batch({name: dict.fromkeys(each, _NAME) for name, each in dims.items()}, inputs, rows)
    opened_dims = open_dims(declared, inputs, first=samples.first, static_batch=rows is None)
    opened = samples.opened(opened_dims, inputs)
    given = opened_dims.given[_NAME]
    rows = 1 if rows is not None and 1 in reference.batch_sizes else opened.batch_size
    try:
        return any(runs_on(reference, opened.at(rows, 0, ((_NAME, size),))) for size in (given // 2, given + 1))
    except UsageError:
        # The user's function for the example inputs doesn't always return the same length.
        return False


def _option(declared: Mapping[str, Mapping[int, str]]) -> str:
    texts = (f"{name}:{','.join(f'{dim}={size}' for dim, size in dims.items())}" for name, dims in declared.items())
    return " ".join(f"--dynamic {shlex.quote(text)}" for text in texts)
