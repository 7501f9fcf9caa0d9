"""The outputs of the original at all calls: which calls are made, and when their rounding noise is measured."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from optimize_export.errors import UsageError
from optimize_export.wording import a_type
from optimizer.model import (
    ENOUGH,
    Call,
    ExampleInputs,
    FurtherInputs,
    Mode,
    Samples,
    Sizes,
    Taken,
    check_numbers,
    has_fast_path,
    in_turn,
    ladder,
    leaves_of,
    one_at_a_time,
    pinned_settings,
    rebuild,
    refuse_unrunnable,
    resolved_device,
)
from optimizer.parity.noise import RoundingNoise, gives_the_same, why_no_signal
from optimizer.parity.observe import RecordedRuns, observe
from optimizer.parity.original import CallKey, Original, OriginalCall, same_inputs, without_warnings
from optimizer.parity.reference import Reference, independent_rows
from optimizer.parity.results import ParityReport
from optimizer.parity.verdict import Tolerance, by_output, judge, report_without_outputs
from passes.base import Precision

logger = logging.getLogger(__name__)
BATCH_SIZES = (1, 2, 3, 5, 8)
# Maximum number of larger batch sizes to find where the original accepts no other size.
_LARGER = 2
_FAST_PATH = (
    "The original ran without torch's fast path for attention, which eager uses here and files don't: at padded and "
    "masked positions it gives other numbers. To see those of the files in eager, call "
    "torch.backends.mha.set_fastpath_enabled(False)."
)
# The draws of calls with other values; those of the samples are smaller.
_FIRST_DRAW = 1000


def measure_reference(target: Callable[..., Any], samples: Samples, **options: Any) -> Reference:
    """The reference for candidates; arguments and errors are those of `OriginalOutputs`."""
    return OriginalOutputs(target, samples, **options).reference()


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


class OriginalOutputs:
    """The outputs of the original at all calls."""

    original: Original
    _rounding: RoundingNoise

    def __init__(
        self,
        target: Callable[..., Any],
        samples: Samples,
        *,
        batch_sizes: Sequence[int] | None = None,
        draws: int | None = None,
        mode: Mode = "inference",
        measured_sizes: int | None = 2,
        known: OriginalOutputs | None = None,
        recorded: RecordedRuns | None = None,
        or_larger: bool = False,
        other_values: bool = False,
    ) -> None:
        """Run the original at each batch size and draw.

        `reference` runs it at `measured_sizes` of them also in float64 and perturbed. A call whose outputs contain
        integers, NaN or infinity is always measured, because ties differ from call to call.

        Args:
            batch_sizes: None for 1, 2, 3, 5, 8 and the given one (in training the given one and the next). If the batch
                can't be changed, only the given one is used.
            draws: inputs per batch size; None for one, or for two if there is a single batch size or an output is the
                same at all calls.
            measured_sizes: number of batch sizes at which rounding noise is measured, 1 or 2; None for all.
            known: earlier runs of the same original, which are reused if they are still valid.
            recorded: records the first runs for the passes.
            or_larger: if the original accepts no other of these batch sizes, try some that are larger than the given
                one: rows that the inputs refer to by number must exist.
            other_values: whether to run other values of integers and masks, and keep the calls that change an output's
                size.

        Raises:
            LoadError: the original raises at every batch size.
            UsageError: `batch_sizes` is empty, or `draws` isn't a number of 1 or more.
        """
        sizes = _sizes_of(samples, batch_sizes, mode)
        count = _draws_of(draws, sizes)
        drawn = ((size, draw) for size in sizes for draw in range(count))
        keys = list(dict.fromkeys((*drawn, *samples.further)))
        # A batch of one uses other kernels than larger ones, and is the cheapest.
        other = 1 if 1 in sizes[1:] else sizes[min(1, len(sizes) - 1)]
        measured_at = None if measured_sizes is None else frozenset((sizes[0], other)[:measured_sizes])
        or_larger = or_larger and len(sizes) > 1
        ran_at = [*keys, *((size, 0) for size in ladder(samples.batch_size or 1))] if or_larger else keys
        if known is not None and known._holds_for(target, samples, ran_at, mode):
            original = known.original.twin()
            rounding = known._rounding.of(original)
            original.samples, rounding.measured_at = samples, measured_at
        else:
            original = Original(target, mode, samples.seed, samples=samples, recorded=recorded)
            rounding = RoundingNoise(original, measured_at)
        # Earlier runs at larger sizes stay after the given one.
        keys = list(dict.fromkeys((*keys, *(one.key for one in original.calls))))
        if not samples.dynamic and batch_sizes is not None and set(batch_sizes) != {samples.batch_size}:
            original.notes.append("The batch size of these inputs can't be changed: only the given inputs were run.")
        with one_at_a_time, pinned_settings() as settings:
            original.run_at(keys)
            if or_larger and not set(sizes[1:]) & set(original.batch_sizes):
                sizes += _larger_sizes(original, count, min(len(sizes) - 1, _LARGER))
            if draws is None and gives_the_same(original):
                # With few rows, labels may be equal by chance.
                count = 2
                original.run_at([(size, 1) for size in sizes])
            run_other_sizes(original)
            if other_values:
                run_other_values(original)
        original.check()
        original.forget_runs()
        self.original, self.samples = original, samples
        self._rounding, self._settings, self._draws = rounding, settings, count
        self._reference: Reference | None = None

    def reference(self) -> Reference:
        """The reference for candidates: these outputs with their truth and noise, measured once."""
        if self._reference is None:
            original = self.original
            if original.mode == "inference" and has_fast_path(original.target) and _FAST_PATH not in original.notes:
                original.notes.append(_FAST_PATH)
            with one_at_a_time, pinned_settings():
                self._reference = Reference(original, self._rounding, self._settings, self._draws)
        return self._reference

    @property
    def kept_bytes(self) -> int:
        seen = (values for one in self.original.calls for values in (one.own.values, one.truth.values))
        return sum(tensor.numel() * tensor.element_size() for values in seen for tensor in values.values())

    def unchanged(self, reason: str) -> ParityReport:
        """The report of a result that can't differ from the original; vacuous if the outputs prove nothing."""
        original = self.original
        blank = original.blank(self._settings, self._draws)
        blank = replace(blank, notes=(*blank.notes, *original.notes_on_failures()))
        why = why_no_signal(original)
        if why is None:
            return report_without_outputs(blank, "ok", reason)
        return report_without_outputs(blank, "vacuous", f"{why[0].upper()}{why[1:]}.")

    def _holds_for(self, target: Callable[..., Any], samples: Samples, keys: Sequence[CallKey], mode: Mode) -> bool:
        """Whether these are runs of the target in its present state, on equal samples and at no other calls."""
        original, calls = self.original, self.original.calls
        same = (
            target is original.target
            and mode == original.mode
            # With other `row_dims`, other inputs are made for a batch size at which the original raised.
            and all(getattr(samples, each) == getattr(self.samples, each) for each in ("seed", "further", "row_dims"))
            and original.has_run_only(keys)
            and all(same_inputs(original.inputs_of(one), samples.at(*one.key)) for one in calls)
            and original.is_unmodified()
        )
        # Changes outside of tensors, such as a number that forward reads, show only in another run.
        with one_at_a_time, pinned_settings():
            return same and original.confirm(calls[0])


def _larger_sizes(original: Original, draws: int, count: int) -> list[int | None]:
    """Run the original at batch sizes larger than the given one until it accepted `count`; return these."""
    assert original.samples is not None
    given = original.samples.batch_size
    found: list[int | None] = []
    for size in ladder(given) if given else ():
        if size > (given or 0) and len(found) < count:
            original.run_at([*(one.key for one in original.calls), *((size, draw) for draw in range(draws))])
            found += [size] if size in original.batch_sizes else []
    return found


def _sizes_of(samples: Samples, batch_sizes: Sequence[int] | None, mode: str) -> list[int | None]:
    """The batch sizes to run; by default the given one comes first."""
    if batch_sizes is not None and not batch_sizes:
        raise UsageError("batch_sizes is empty: there would be nothing to compare.")
    given = samples.batch_size
    if not samples.dynamic or given is None:
        return [given]
    if batch_sizes is not None:
        return list(dict.fromkeys(batch_sizes))
    return [given, given + 1] if mode == "training" else list(dict.fromkeys((given, *BATCH_SIZES)))


def _draws_of(draws: int | None, sizes: Sequence[int | None]) -> int:
    if draws is None:
        # One call alone doesn't show whether the outputs depend on the inputs.
        return 1 if len(sizes) > 1 else 2
    if not isinstance(draws, int) or draws < 1:
        raise UsageError(f"draws must be 1 or more, not {draws!r}.")
    return draws


def run_other_sizes(original: Original) -> None:
    """Run the original at other sizes of its open dims except the batch: each dim alone, then all growing together."""
    samples = original.samples
    assert samples is not None
    batches = [one.batch_size for one in original.calls if one.batch_size is not None]
    larger = sorted(size for size in batches if size > 1)
    batch = samples.batch_size if samples.batch_size in larger or not larger else larger[0]
    original.taken = taken = Taken(batch, samples.sizes)
    if not original.calls:
        return

    def runs_at(batch_size: int | None, sizes: Sizes) -> bool:
        return original.run(batch_size, 0, samples.at(batch_size, 0, sizes), sizes=sizes)

    for name, given in samples.sizes.items():
        worked = taken.alone.setdefault(name, [])
        for size in ladder(given):
            if len(worked) < ENOUGH and runs_at(batch, ((name, size),)):
                worked.append(size)
    step, steps = taken.steps(batch, batches)
    if samples.sizes and (step > 0) + sum(size > 0 for size in steps.values()) > 1:
        for count in (1, 2):
            sizes = tuple((name, taken.base(name) + count * size) for name, size in steps.items())
            rows = None if batch is None else batch + count * step
            if not runs_at(rows, sizes):
                break
            taken.together.append((rows, sizes))
    for name, worked in taken.alone.items():
        checked = ", ".join(map(str, sorted({taken.given[name], *worked})))
        original.notes.append(f"{name} was checked at the sizes {checked}.")


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
