"""Exclude pairs of layers if a call uses the value between the two in a way that no recording showed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from optimizer.errors import LoadError
from optimizer.model import Call, Samples
from optimizer.pipeline.copy_runs import CopyRuns
from optimizer.pipeline.transactions import Transactions
from optimizer.wording import first_line
from passes.errors import UnseenCall
from passes.program.changes import Change, Place

# Maximum number of pairs to exclude before rolling back the pass; each one is found in a separate run.
_MOST_PARTED = 8
_WITH_GRADIENTS = "with gradients enabled"


class PartedPairs:
    """Runs a pass again without pairs whose value between the two layers is used elsewhere."""

    def __init__(
        self,
        transactions: Transactions,
        runs: CopyRuns,
        samples: Samples,
        batch_sizes: Sequence[int] | None,
        *,
        in_training: bool,
    ) -> None:
        self._transactions = transactions
        self._runs = runs
        self._samples = samples
        self._batch_sizes = batch_sizes
        self._in_training = in_training

    def leave_alone(self) -> bool:
        """Exclude a pair that is refused at the example calls; return whether there was one.

        For example, a user's autograd function may use the value between two layers.
        """
        return any(self._leave(error, "") for error in self._runs.refused(gradients=self._in_training))

    def leave_alone_elsewhere(self) -> bool:
        """Exclude a pair that is refused at other likely calls: with another batch size, or with gradients enabled."""
        pairs = any(change.between for done in self._transactions.applied for change in done.result.changes)
        if self._in_training or not pairs:
            return False
        has_run = False
        for call, when in self._further_calls():
            error = self._runs.error_at(call, gradients=True)
            if error is None:
                has_run = True
                continue
            without_gradients = self._runs.error_at(call, gradients=False)
            if self._leave(without_gradients, when) or self._leave(error, _WITH_GRADIENTS):
                return True
        return not has_run and self._leave(self._runs.error_at(self._runs.smallest(), gradients=True), _WITH_GRADIENTS)

    def _further_calls(self) -> list[tuple[Call, str]]:
        """Calls at batch sizes at which the original wasn't run, each with a description for a sentence."""
        samples = self._samples
        found: list[tuple[Call, str]] = []
        if not samples.dynamic or samples.batch_size is None:
            return found
        known = {samples.batch_size, *self._runs.batch_sizes()}
        for size in dict.fromkeys((1, *(self._batch_sizes or ()))):
            if size not in known:
                with suppress(LoadError):  # if the user's function can't make a batch of that size, none will occur
                    found.append((samples.at(size), f"at batch size {size}"))
        if 1 not in known:
            found += ((call, "for a single row") for call in samples.rows_alone())
        return found

    def _leave(self, error: Exception | None, when: str) -> bool:
        """If a seal refused the call, run the pass that sealed the pair again without it; return whether it did."""
        if not isinstance(error, UnseenCall):
            return False
        transactions = self._transactions
        for done in transactions.applied:
            places = [change.place for change in done.result.changes if _is_about(change, error)]
            if not places:
                continue
            left = transactions.left_alone.setdefault(done.number, {})
            if len(left) >= _MOST_PARTED or not left.keys().isdisjoint(places):
                # There are too many pairs, or the pass ignores `left_alone`, so another run wouldn't help.
                line = first_line(error)
                transactions.take_back(done, f"{when}: {line}" if when else line)
            else:
                left.update((place, _reason(place, error, when)) for place in places)
                transactions.run_again(done)
            return True
        return False


def _is_about(change: Change, error: UnseenCall) -> bool:
    """Whether the call is refused because of this change."""
    return error.pair is not None and change.between is not None and set(change.between) == set(error.pair)


def _reason(place: Place, error: UnseenCall, when: str) -> str:
    assert error.pair is not None
    first, second = error.pair
    if when:
        return (
            f"undone ({place.what}), because {when} the output of {first} isn't the input of {second}, or is also "
            "used elsewhere"
        )
    return (
        f"undone ({place.what}), because the output of {first} is used on its way to {second}, as by a reentrant "
        "checkpoint or another autograd function"
    )
