"""Run the original on other values of its inputs that change the size of an output, such as shorter lengths.

A trace fixes such a size. Rows that are permuted or repeated keep the largest length, so no other call shows it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch

from optimizer.model import Call, leaves_of, rebuild
from optimizer.parity.observe import observe
from optimizer.parity.original import Original, OriginalCall, without_warnings

logger = logging.getLogger(__name__)

# The draws of these calls; those of the samples are smaller.
_FIRST_DRAW = 1000


def run_other_values(original: Original) -> None:
    """Run the original on other values, and keep the calls in which an output has another shape."""
    assert original.samples is not None
    given = original.samples.batch_size
    first = next((one for one in original.calls if one.key == (given, 0) and not one.sizes), None)
    if first is None:
        return
    for number, (what, call) in enumerate(_other_values(original.inputs_of(first))):
        try:
            with without_warnings(), original.runs.fresh() as module:
                own = observe(module, call, seed=first.seed, training=False, names=first.names)
        except Exception as error:  # noqa: BLE001 - the original is foreign code, and the values may make no sense to it
            logger.debug("the original raises with %s: %s", what, error)
            continue
        if own.values.keys() == first.own.values.keys() and any(
            value.shape != first.own.values[name].shape for name, value in own.values.items()
        ):
            where = what if given is None else f"batch size {given}, {what}"
            draw = _FIRST_DRAW + number
            original.calls.append(OriginalCall(given, draw, first.seed, call, own, own, first.names, where))


def _other_values(call: Call) -> Iterator[tuple[str, Call]]:
    """The call with smaller numbers and lengths, and with the ends of its sequences and masks cleared."""
    for what, changed in (("smaller lengths", _smaller), ("shorter masks", _shorter)):
        found = False

        def change(
            tensor: torch.Tensor, changed: Callable[[torch.Tensor], torch.Tensor | None] = changed
        ) -> torch.Tensor:
            nonlocal found
            if tensor.layout is not torch.strided or tensor.is_floating_point() or tensor.is_complex():
                return tensor
            other = changed(tensor) if tensor.numel() and not tensor.is_quantized else None
            found |= other is not None
            return tensor if other is None else other

        args, kwargs = rebuild((call.args, call.kwargs), change)
        if found and leaves_of((args, kwargs)).structure == leaves_of((call.args, call.kwargs)).structure:
            yield what, Call(args, kwargs)


def _smaller(tensor: torch.Tensor) -> torch.Tensor | None:
    """Each number as the smallest, but at least 1; or one less where all are equal."""
    if tensor.dim() > 1 or tensor.dtype == torch.bool:
        return None
    least = max(int(tensor.min()), 1)
    largest = int(tensor.max())
    bound = least if least < largest else largest - 1
    return tensor.clamp(max=bound) if bound > 0 else None


def _shorter(tensor: torch.Tensor) -> torch.Tensor | None:
    """The second half of the last dim has the smallest value: False in a mask, usually the padding in token ids."""
    size = tensor.shape[-1] if tensor.dim() else 0
    if size < 2 or (tensor.dim() < 2 and tensor.dtype != torch.bool):
        return None
    other = tensor.clone()
    other[..., size // 2 :] = False if tensor.dtype == torch.bool else int(tensor.min())
    return other
