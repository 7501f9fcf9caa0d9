"""Does a candidate compute what the original computes? Measured first, judged second.

The truth is the original itself, run in float64 (`optimizer.float64`). How much rounding alone may move an output, its
*noise*, is measured: the larger of the original's own error against that truth and of its answer to changes of one unit
in the last place of its inputs and weights. A candidate may be off by `FACTOR` times that, in the largest error and in
the root mean square, each pooled over all batch sizes and draws. There is no other tolerance unless the user gives one.
Rounding has long tails where a model divides by something small, as a BatchNorm over a few rows that hardly differ: of 2,400
such models with pooled features, trained in float32 at 2 to 7 rows, 43 right results were off by 4 to 77 times a noise that
two samples showed. Where a candidate is off by more than is allowed, but not by orders of magnitude, the noise is sampled
again, with each operation inside off by one unit too: none of the 43 was off by more than `FACTOR` times that.

One number for a whole output hides a channel or column that is a million times smaller than the largest, and a mask of -1e9
hides all numbers beside it. So each channel, column and band of magnitude whose own noise is far below the output's has a
bound of its own, `SLICE_FACTOR` times that noise. It is measured alike, element by element, and no less than four units in
the last place of the slice's own scale. A fold, other kernels and sums in another order change the rounding of a channel by
the order of that: on models from ResNet to Llama through ONNX and TorchScript, and on 700 random networks with columns from
1e-8 to 100, folded or in another layout, in three dtypes, no slice was off by more than twice its noise. What they may not
keep to is each single number of an activation: sigmoid(-30) may come out as 1e-8. `Original._slice_noises` therefore adds
what that does to a slice.

What computes in bfloat16 or float16 where the original doesn't is off by orders of magnitude more. It is judged *in kind*: by
the error against the same truth that the original itself has when it is run so (`optimizer.in_kind`), times `FACTOR`. Of 120
runs of 30 architectures in both dtypes, by autocast and by the weights, 118 were off by no more than 2.3 times that, and two by
3.9 and 4.4 times, both LeViT in float16, whose error goes out of proportion to the digits: the latter is refused.

    reference = Reference.measure(model, Samples((x,)))       # runs the original, once
    measurement = reference.compare(candidate)                # runs a candidate; plain data, JSON both ways
    report = judge(measurement)                               # runs nothing
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from optimizer.difference import floors, special
from optimizer.errors import LoadError, UsageError
from optimizer.float64 import float64_mode
from optimizer.inputs import Call, ExampleInputs, FurtherInputs, Samples
from optimizer.observe import Observation
from optimizer.options import check_numbers
from optimizer.preserve import in_turn, one_at_a_time, pinned_settings
from optimizer.reference import BATCH_SIZES, Comparison, GoldenEntry, Kept, Mode, Original, Reference
from optimizer.verdict import (
    FACTOR,
    Measurement,
    OutputDifference,
    OutputNoise,
    OutputParity,
    ParityReport,
    Tolerance,
    by_output,
    judge,
)
from optimizer.weights import refuse_unrunnable
from passes.base import DeclaredError, Precision

__all__ = [
    "BATCH_SIZES",
    "FACTOR",
    "GoldenEntry",
    "Measurement",
    "OutputDifference",
    "OutputNoise",
    "OutputParity",
    "ParityReport",
    "Reference",
    "RegionParity",
    "RegionReference",
    "Tolerance",
    "by_output",
    "check_parity",
    "check_region",
    "compare_golden",
    "float64_mode",
    "judge",
]


@dataclass(frozen=True)
class RegionParity:
    """The judgement of one rewritten region at its own outputs; figures are those of the worst output.

    Attributes:
        scale: its largest magnitude.
    """

    ok: bool
    error: float
    noise: float
    ratio: float
    reason: str
    reference: str
    report: ParityReport | None = None
    scale: float = 0.0


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
    """Whether `candidate` computes what `reference` computes; any two callables.

    Modules are put in eval for the time (not with mode="training"); both are left as they were. With `device`, the
    inputs go there, and a module that lives elsewhere is copied there.

    Args:
        further_inputs: more calls of your own, each a pair (args, kwargs), which are run as they are.
        atol, rtol: tolerances in place of the measured noise; a number, or a dict by the names of the outputs.
        precision: how `candidate` computes, where that is less precise than what `reference` does: it is judged in kind, by
            what `reference` itself is off by that computes so.
        row_independence: see, too, that each row of the outputs is the same whatever the other rows of its batch are: run
            rows alone, in other places and among other rows.

    Raises:
        ParityError: the rows of the reference itself depend on each other, with `row_independence`.
        LoadError: the reference raises on the example inputs, or a module has no weights to run with yet.
        UsageError: the example inputs are no tuple, tensor or function, or an option makes no sense.
    """
    if mode not in ("inference", "training"):
        raise UsageError(f"mode must be 'inference' or 'training', not {mode!r}.")
    check_numbers(seed, batch_sizes)
    for module in (reference, candidate):
        if isinstance(module, nn.Module):
            refuse_unrunnable(module)
    samples = Samples(example_inputs, example_kwargs, further_inputs=further_inputs, seed=seed, device=device)
    measured = Reference.measure(_placed(reference, device), samples, batch_sizes=batch_sizes, draws=draws, mode=mode)
    # Of a candidate that raises no output is known.
    names = {name: name for name in measured.noises}
    absolute, relative = by_output("atol", atol, names), by_output("rtol", rtol, names)
    rows = measured.independent_rows(atol=absolute, rtol=relative) if row_independence else None
    if precision is not None:
        measured = measured.in_kind(precision)
    measurement = measured.compare(_placed(candidate, device), rows=rows)
    return judge(measurement, atol=absolute, rtol=relative, names=names)


class RegionReference:
    """A part of a model, run once on recorded inputs; any number of rewritten parts can be compared with it.

    Attributes:
        in_float64: whether the truth is the part in float64, and not in its own dtype.
    """

    def __init__(self, reference: Reference | LoadError) -> None:
        self._reference = reference
        self.in_float64 = isinstance(reference, Reference) and reference.truth_in_float64

    @classmethod
    def measure(cls, f_old: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], *, seed: int = 0) -> RegionReference:
        """Run the old part on each of the inputs.

        Raises:
            UsageError: no inputs.
        """
        if not inputs:
            raise UsageError("A region can't be checked without recorded inputs.")
        original = Original(f_old, "region", seed)
        with one_at_a_time, pinned_settings() as settings:
            for number, args in enumerate(inputs):
                original.run(number, 0, Call(tuple(args), {}), keep_call=True, label=f"recorded input {number}")
            try:
                return cls(original.finish(None, settings, 1))
            except LoadError as error:
                return cls(error)

    def allowing(self, declared: DeclaredError) -> RegionReference:
        """The same for a rewritten part that may be off by an error that its pass declares, on top of rounding."""
        reference = self._reference
        return RegionReference(reference.allowing(declared) if isinstance(reference, Reference) else reference)

    def compare(self, f_new: Callable[..., Any], *, factor: float = FACTOR, by_own_error: bool = False) -> RegionParity:
        """Whether a rewritten part answers the inputs as the old part does, by the judgement of `judge`.

        Outputs that carry no signal are no failure here: a part may well answer zero.

        Args:
            by_own_error: leave out of the noise how the old part answers to changes of one unit: what it is off by itself
                is what the new one may be off by. In float16 and bfloat16 such a change is no rounding error that the old
                part would have, where its weights are such numbers that their products cancel.
        """
        if isinstance(self._reference, LoadError):
            return RegionParity(False, math.inf, 0.0, math.inf, str(self._reference), "none")
        measurement = self._reference.compare(f_new)
        if by_own_error:
            outputs = (replace(output, noise=_own_error_alone(output.noise)) for output in measurement.outputs)
            measurement = replace(measurement, outputs=tuple(outputs))
        report = judge(measurement, factor=factor)
        failed = report.verdict == "failed"
        judged = [output for output in report.outputs if output.judged]
        worst = max(judged, key=lambda output: (not output.ok, output.ratio), default=None)
        return RegionParity(
            ok=not failed and worst is not None,
            error=worst.max_error if worst else 0.0,
            noise=worst.noise if worst else 0.0,
            ratio=worst.ratio if worst else 0.0,
            reason=report.reason if failed or worst is not None else "there is no deterministic output to compare",
            reference=report.reference,
            report=report,
            scale=next(
                (output.noise.scale for output in measurement.outputs if worst and output.noise.name == worst.name), 0.0
            ),
        )


def check_region(
    f_old: Callable[..., Any],
    f_new: Callable[..., Any],
    inputs: Sequence[tuple[Any, ...]],
    *,
    factor: float = FACTOR,
    seed: int = 0,
) -> RegionParity:
    """Whether a rewritten part of a model answers its recorded inputs as the old part does, by the same judgement.

    Raises:
        UsageError: no inputs.
    """
    return RegionReference.measure(f_old, inputs, seed=seed).compare(f_new, factor=factor)


def compare_golden(
    noises: Mapping[str, OutputNoise],
    entries: Sequence[tuple[GoldenEntry, Sequence[torch.Tensor]]],
    *,
    factor: float = FACTOR,
    device: str = "cpu",
    atol: Tolerance = None,
    rtol: Tolerance = None,
    precision: str = "",
    settings: Mapping[str, str] | None = None,
) -> ParityReport:
    """Judge stored outputs against what a candidate answers now, by the stored noise; the original isn't needed.

    Args:
        entries: each stored call with the candidate's flat outputs, in the order of `entry.outputs`.
        factor: how many times the noise an output may be off: on another device or dtype more than `FACTOR`.
        atol, rtol: the user's tolerances in place of that, as for `judge`.
        precision: the dtype, as a word, in which the original is off by the stored noise; "" where that is its rounding.
        settings: what was pinned while the candidate ran.
    """
    comparison = Comparison(noises, flat=True)
    for entry, got in entries:
        own = Observation(dict(entry.outputs), dict.fromkeys(entry.outputs, "output"))
        none = {name: torch.zeros(value.shape, dtype=torch.bool) for name, value in entry.outputs.items()}
        kept = Kept(
            entry.batch_size, entry.draw, 0, entry.call, own, own, unstable=none | entry.tied, sizes=entry.sizes
        )
        values = {f"output_{index}": value.detach().cpu() for index, value in enumerate(got)}
        comparison.add(kept, Observation(values, dict.fromkeys(values, "output")))
    sizes = tuple(dict.fromkeys(entry.batch_size for entry, _ in entries if entry.batch_size is not None))
    blank = Measurement((), (), (), "golden", "", "inference", device, sizes, 1, 0, dict(settings or {}), precision)
    report = judge(comparison.finish(blank), atol=atol, rtol=rtol, factor=factor)
    allowed = {output.name: output.tolerance for output in report.outputs}
    if report.ok and not any(_comparable(entry, noises, allowed) for entry, _ in entries):
        reason = "The golden data hold no number beyond the allowed error: zeros would pass."
        return replace(report, verdict="vacuous", reason=reason)
    return report


def _comparable(entry: GoldenEntry, noises: Mapping[str, OutputNoise], allowed: Mapping[str, float]) -> bool:
    """Whether a stored call holds a number, of an output that is judged, that zero doesn't pass for.

    A zero counts where no error at all is allowed, as of integers. Infinity, NaN and tied integers don't.
    """
    for name, value in entry.outputs.items():
        if not noises[name].deterministic:
            continue
        bound = allowed[noises[name].name]
        counts = (special(value) == 0) & ~entry.tied.get(name, torch.zeros((), dtype=torch.bool))
        if bound:
            counts &= (value if value.is_complex() else value.double()).abs() > bound
        if bool(counts.any()):
            return True
    return False


def _own_error_alone(noise: OutputNoise) -> OutputNoise:
    """The noise of an output whose answer to changes of one unit isn't looked at."""
    floor, floor_rms = floors(getattr(torch, noise.dtype), noise.scale, noise.rms)
    largest, rms = max(noise.own_error, floor), max(noise.own_error_rms, floor_rms)
    return replace(noise, noise=largest, noise_rms=rms)


def _placed(target: Callable[..., Any], device: torch.device | str | None) -> Callable[..., Any]:
    if device is None or not isinstance(target, nn.Module):
        return target
    wanted = torch.device(device).type
    if all(tensor.device.type == wanted for tensor in (*target.parameters(), *target.buffers())):
        return target
    return copy.deepcopy(target).to(device)
