"""Golden data: stored calls with reference outputs, by which a candidate is judged without the original."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from optimize_export.elementwise import is_exact, special
from optimizer.model import Call, Sizes
from optimizer.parity.comparison import Comparison
from optimizer.parity.observe import Observation
from optimizer.parity.orders import RowOrder
from optimizer.parity.original import OriginalCall
from optimizer.parity.reference import Reference
from optimizer.parity.results import NOTHING_MEASURED, OutputNoise, ParityReport
from optimizer.parity.verdict import FACTOR, Tolerance, judge

# The number of stored calls that differ in the batch size, or were given by the user.
_CALLS = 3


@dataclass(frozen=True)
class GoldenEntry:
    """One stored call."""

    batch_size: int | None
    draw: int
    call: Call
    outputs: dict[str, torch.Tensor]
    """The float64 reference rounded once to the output's own dtype."""
    tied: dict[str, torch.Tensor]
    """Bool tensors by name: True where rounding or equal scores decide an element, which isn't compared."""
    sizes: Sizes = ()
    """The sizes of open dims other than the batch, where they differ from the given call."""
    seed: int | None = None
    """The seed of torch's random numbers; None if the original draws none."""


def golden_entries(reference: Reference) -> tuple[GoldenEntry, ...]:
    """The calls to store: all further inputs of the user, and calls of different sizes.

    Of the latter, there is one call per batch size, at least one, and three with those of the user; and for each other open
    dim, at most two calls with another size.
    """
    original = reference.original
    own = [one for one in original.calls if one.key in original.asked and not one.sizes]
    drawn = [one for one in original.calls if one.draw == 0 and one not in own]
    rows = [one for one in drawn if not one.sizes][: max(1, _CALLS - len(own))]
    resized = [
        one
        for name in reference.taken.given
        for one in [each for each in drawn if [named for named, _ in each.sizes] == [name]][:2]
    ]
    return tuple(_entry(reference, one) for one in (*rows, *resized, *own))


def golden_entry(reference: Reference, where: str) -> GoldenEntry:
    return _entry(reference, reference.call_at(where))


def _entry(reference: Reference, one: OriginalCall) -> GoldenEntry:
    outputs, tied = {}, {}
    for name in one.own.of_kind("output"):
        own, truth = one.own.values[name], one.truth.values[name]
        undecided = one.undecided(name)
        if is_exact(own):
            outputs[name] = own
            if bool((mask := one.unstable[name] | undecided).any()):
                tied[name] = mask
            continue
        if bool(undecided.any()):
            tied[name] = undecided
        rounded = truth.to(own.dtype)
        plain = (special(own) == 0) & (special(rounded) == 0)
        outputs[name] = torch.where(plain, rounded, own)
    call = reference.original.inputs_of(one)
    return GoldenEntry(one.batch_size, one.draw, call, outputs, tied, one.sizes, one.seed if one.own.draws else None)


def compare_stored(
    noises: Mapping[str, OutputNoise],
    entries: Sequence[tuple[GoldenEntry, Sequence[torch.Tensor]]],
    orders: Sequence[RowOrder] = (),
) -> Comparison:
    """Compare a candidate's flat outputs with stored outputs, in the order of `entry.outputs`.

    Args:
        orders: of a lossy candidate, by the names of the stored outputs.
    """
    comparison = Comparison(noises, flat=True)
    for entry, got in entries:
        own = Observation(dict(entry.outputs), dict.fromkeys(entry.outputs, "output"))
        none = {name: torch.zeros(value.shape, dtype=torch.bool) for name, value in entry.outputs.items()}
        one = OriginalCall(entry.batch_size, entry.draw, 0, entry.call, own, own, sizes=entry.sizes, orders=orders)
        one.unstable = none | entry.tied
        one.excluded = {name: mask for name, mask in entry.tied.items() if not is_exact(entry.outputs[name])}
        values = {f"output_{index}": value.detach().cpu() for index, value in enumerate(got)}
        comparison.add(one, Observation(values, dict.fromkeys(values, "output")))
    return comparison


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
    """Judge a candidate's outputs by stored outputs and noises; the original isn't needed.

    Args:
        entries: each stored call with the candidate's flat outputs, in the order of `entry.outputs`.
        factor: allowed error in units of the noise; larger than `FACTOR` on another device or in another dtype.
        atol, rtol: the user's tolerances instead, as for `judge`.
        precision: the half precision that the stored noise belongs to; "" for plain rounding noise.
        settings: the settings that were pinned while the candidate ran.
    """
    sizes = tuple(dict.fromkeys(entry.batch_size for entry, _ in entries if entry.batch_size is not None))
    blank = replace(
        NOTHING_MEASURED, device=device, batch_sizes=sizes, settings=dict(settings or {}), precision=precision
    )
    measurement = compare_stored(noises, entries).finish(blank)
    report = judge(measurement, atol=atol, rtol=rtol, factor=factor)
    allowed = {output.name: output.tolerance for output in report.outputs}
    if report.ok and not any(_has_signal(entry, noises, allowed) for entry, _ in entries):
        reason = "The golden data contain no number larger than the allowed error: zeros would pass."
        return replace(report, verdict="vacuous", reason=reason)
    return report


def _has_signal(entry: GoldenEntry, noises: Mapping[str, OutputNoise], allowed: Mapping[str, float]) -> bool:
    """Whether a stored call has a number that proves something, because it is larger than the allowed error.

    If no error at all is allowed, as for integers, zeros count too. Infinity, NaN and tied integers never count.
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
