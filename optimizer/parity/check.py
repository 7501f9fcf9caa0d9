"""`check_parity`: whether two callables compute the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from optimize_export.errors import UsageError
from optimize_export.wording import a_type
from optimizer.model import ExampleInputs, FurtherInputs, Mode, Samples, in_turn, refuse_unrunnable, resolved_device
from optimizer.options import check_numbers
from optimizer.parity.outputs import measure_reference
from optimizer.parity.reference import independent_rows
from optimizer.parity.results import ParityReport
from optimizer.parity.verdict import Tolerance, by_output, judge
from passes.base import Precision


@in_turn
def check_parity(
    reference: Callable[..., Any],
    candidate: Callable[..., Any],
    example_inputs: ExampleInputs,
    *,
    example_kwargs: dict[str, Any] | None = None,
    further_inputs: FurtherInputs = (),
    batch_sizes: Sequence[int] | None = None,
    draws: int = 2,
    seed: int = 0,
    atol: Tolerance = None,
    rtol: Tolerance = None,
    device: torch.device | str | None = None,
    mode: Mode = "inference",
    precision: Precision | None = None,
    row_independence: bool = False,
) -> ParityReport:
    """Compare two callables: does `candidate` compute what `reference` computes?

    Neither is changed.

    Args:
        reference, candidate: modules, or functions of the same arguments.
        example_inputs: the positional arguments of one call of `reference`: a tuple, a tensor, or a function
            `f(batch_size, generator) -> tuple`.
        example_kwargs: the keyword arguments of that call.
        further_inputs: more calls, each a pair (args, kwargs), which are run unchanged.
        batch_sizes: the batch sizes to compare at. The default is 1, 2, 3, 5, 8 and that of the example inputs; in training,
            that and the next.
        draws: the number of samples of the inputs at each batch size.
        seed: the seed of the drawn inputs.
        mode: "inference" runs modules in eval mode, "training" in training mode, and then compares gradients and
            buffers too.
        device: the inputs are moved there, and a module on another device is copied there; by default everything stays
            where it is.
        atol, rtol: tolerances instead of the measured noise; a number, or a dict by output name.
        precision: the precision of `candidate` if it is lower than that of `reference`. The error of `reference` at
            that precision then counts as its noise.
        row_independence: also check that no row of the outputs depends on the other rows of its batch, by running rows
            alone, at other positions and among other rows.

    Returns:
        The verdict, with the judgement of each output. It doesn't raise if `candidate` is wrong: see `ParityReport.ok`.

    Raises:
        DeviceError: the device is a GPU, and torch finds none.
        ParityError: with `row_independence`, rows of the reference itself depend on each other.
        LoadError: the reference raises on the example inputs, or a module can't run because it has no weights yet.
        UsageError: the example inputs aren't a tuple, tensor or function, or an option is invalid.
    """
    if mode not in ("inference", "training"):
        raise UsageError(f"mode must be 'inference' or 'training', not {mode!r}.")
    check_numbers(seed, batch_sizes)
    for name, given in (("reference", reference), ("candidate", candidate)):
        if not callable(given):
            raise UsageError(
                f"{name} must be a module or a function, not {a_type(given)}: call check_parity(reference, candidate, (x,))."
            )
    if device is not None:
        device = resolved_device(str(device), require_gpu=False)
    for module in (reference, candidate):
        if isinstance(module, nn.Module):
            refuse_unrunnable(module)
    samples = Samples(example_inputs, example_kwargs, further_inputs=further_inputs, seed=seed, device=device)
    measured = measure_reference(_placed(reference, device), samples, batch_sizes=batch_sizes, draws=draws, mode=mode)
    # Take the names from the reference, because a candidate that raises has no outputs.
    names = {name: name for name in measured.noises}
    absolute, relative = by_output("atol", atol, names), by_output("rtol", rtol, names)
    rows = independent_rows(measured, atol=absolute, rtol=relative) if row_independence else None
    if precision is not None:
        measured = measured.at_precision(precision)
    measurement = measured.compare(_placed(candidate, device), rows=rows)
    return judge(measurement, atol=absolute, rtol=relative, names=names)


def _placed(target: Callable[..., Any], device: torch.device | str | None) -> Callable[..., Any]:
    if device is None or not isinstance(target, nn.Module):
        return target
    wanted = torch.device(device).type
    if all(tensor.device.type == wanted for tensor in (*target.parameters(), *target.buffers())):
        return target
    return copy.deepcopy(target).to(device)
