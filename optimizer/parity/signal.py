"""What the outputs of the original prove: those without signal, and notes on what isn't compared."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from optimizer.parity.differences import Pool, all_finite, is_exact, lost_in_noise, special
from optimizer.parity.original import Original, OriginalCall, shared_rows
from optimizer.parity.results import OutputNoise
from optimizer.parity.verdict import no_signal


def missing_signal(original: Original, name: str, rms: float, noise_rms: float) -> str | None:
    """Why an output proves nothing; None if it proves something.

    Args:
        rms: root mean square of the output, 0 for integers; infinite if it isn't known.
        noise_rms: of its rounding noise.
    """
    here = [one for one in original.calls if name in one.own.values]
    values = [one.own.values[name] for one in here]
    exact = is_exact(values[0])
    if sum(value.numel() for value in values) == 0:
        return "empty"
    if exact and all(_is_tied(one, name) for one in here):
        return "decided by rounding alone in every element"
    if not exact and all(name in one.excluded and bool(one.excluded[name].all()) for one in here):
        return "chosen by equal scores alone in every element"
    if not exact and all(_has_no_finite(value) for value in values):
        return "NaN or infinite in every element"
    if rms in (0.0, math.inf) and all(not bool(value.any()) for value in values):
        return "all zero"
    if not exact and lost_in_noise(rms, noise_rms):
        return "hardly larger than its rounding noise"
    if (
        not original.inputs_vary
        or len(original.calls) < 2
        or original.calls[0].own.kinds.get(name) not in ("output", "number")
    ):
        return None
    changed = _change(original, name)
    if changed is None:
        return None
    if changed.largest == 0:
        return "the same for every input"
    return "changed less by its inputs than by rounding" if not exact and changed.rms <= noise_rms else None


def why_no_signal(original: Original) -> str | None:
    """Why the outputs prove nothing, as far as it shows without measured noise; None if they may prove something."""
    own = original.calls[0].own
    names = [*own.of_kind("output"), *own.of_kind("number")]
    reasons = {name: why for name in names if (why := missing_signal(original, name, math.inf, 0.0)) is not None}
    return no_signal(reasons) if reasons and len(reasons) == len(names) else None


def gives_the_same(original: Original) -> bool:
    """Whether an output is the same at all calls, though their inputs differ."""
    if not original.inputs_vary or not original.calls:
        return False
    changes = (_change(original, name) for name in original.calls[0].own.of_kind("output"))
    return any(change is not None and change.largest == 0 for change in changes)


def _has_no_finite(value: torch.Tensor) -> bool:
    return not value.numel() or (not all_finite(value) and bool((special(value) != 0).all()))


def _is_tied(one: OriginalCall, name: str) -> bool:
    unstable = one.unstable.get(name)
    value = one.own.values[name]
    return not is_exact(value) or not value.numel() or (unstable is not None and bool(unstable.all()))


def _change(original: Original, name: str) -> Pool | None:
    """The change of an output between successive calls, in the rows that they share; None if the other dims differ."""
    here = [one.own.values[name] for one in original.calls if name in one.own.values and not one.sizes]
    pairs = [shared_rows(a, b) for a, b in itertools.pairwise(here)]
    change = Pool()
    for pair in pairs:
        if pair is None:
            return None
        if is_exact(pair[0]):
            change.add((pair[0] != pair[1]).to(torch.float64), of=pair[0])
        else:
            change.add_distance(*pair)
    return change if pairs else None


def notes_on_outputs(original: Original, noises: Mapping[str, OutputNoise]) -> list[str]:
    """Notes on outputs that aren't compared or prove nothing."""
    notes = []
    for noise in noises.values():
        if not noise.deterministic:
            notes.append(f"{noise.name} is not deterministic in the original and was not judged.")
        if noise.signal is not None and noise.kind == "output":
            notes.append(f"{noise.name} is {noise.signal} and proves nothing.")
        excluded = sum(
            int(one.excluded[noise.name].count_nonzero()) for one in original.calls if noise.name in one.excluded
        )
        if count := noise.tied - excluded * noise.is_exact:
            notes.append(
                f"{count} elements of {noise.name} weren't compared: rounding alone changes them in the original."
            )
    notes += _notes_on_ties(original.calls)
    for name in noises:
        values = (one.own.values[name] for one in original.calls if name in one.own.values)
        odd = (value for value in values if not is_exact(value) and not all_finite(value))
        if count := sum(int((special(value) == 1).count_nonzero()) for value in odd):
            notes.append(f"{name} of the original has NaN in {count} elements on these inputs.")
    return notes


def _notes_on_ties(calls: Sequence[OriginalCall]) -> list[str]:
    ordered, chosen, by = Counter[str](), Counter[str](), dict[str, set[str]]()
    for one in calls:
        for tie in one.ties:
            for name in tie.names:
                ordered[name] += int(tie.spread(tie.groups > 0, one.own.values[name]).count_nonzero())
                by.setdefault(name, set()).add(tie.by)
        for name, mask in one.excluded.items():
            chosen[name] += int(mask.count_nonzero())
            by.setdefault(name, set()).update(one.excluded_by)
    return [
        *(
            f"{count} elements of {name} were compared as sets: equal scores ({', '.join(sorted(by[name]))}) put "
            "them in order, and the original doesn't decide how."
            for name, count in ordered.items()
            if count
        ),
        *(
            f"{count} elements of {name} weren't compared: equal scores ({', '.join(sorted(by[name]))}) choose "
            "or order them, and the original doesn't decide how."
            for name, count in chosen.items()
        ),
    ]
