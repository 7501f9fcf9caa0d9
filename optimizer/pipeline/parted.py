"""Pairs that a call parts: what one layer hands to the next is used on the way, which no recording showed."""

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

# A pass leaves at most so many pairs alone, each found in a run of its own; with more, all of it goes.
_MOST_PARTED = 8
_WITH_GRADIENTS = "with gradients enabled"


class PartedPairs:
    """Runs a pass again without the pairs that a call parts."""

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
        """Leave the pairs alone that the example calls part; whether there was one.

        An autograd function of the user's may use the value between two layers.
        """
        return any(self._leave(error, "") for error in self._runs.refused(gradients=self._in_training))

    def leave_alone_elsewhere(self) -> bool:
        """Leave the pairs alone that other likely calls part: a batch of one row, and gradients that are on."""
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
        """Calls without a reference at batch sizes that weren't run: each with its words in a sentence."""
        samples = self._samples
        found: list[tuple[Call, str]] = []
        if not samples.dynamic or samples.batch_size is None:
            return found
        known = {samples.batch_size, *self._runs.batch_sizes()}
        for size in dict.fromkeys((1, *(self._batch_sizes or ()))):
            if size not in known:
                with suppress(LoadError):  # the user's function makes no batch of that size, so the model meets none
                    found.append((samples.at(size), f"at batch size {size}"))
        if 1 not in known:
            found += ((call, "for a single row") for call in samples.rows_alone())
        return found

    def _leave(self, error: Exception | None, when: str) -> bool:
        """Run the pass again that changed the pair of a refusal, without that pair; whether there is such a pass."""
        if not isinstance(error, UnseenCall):
            return False
        transactions = self._transactions
        for done in transactions.applied:
            places = [change.place for change in done.result.changes if _is_about(change, error)]
            if not places:
                continue
            left = transactions.left_alone.setdefault(done.number, {})
            if len(left) >= _MOST_PARTED or not left.keys().isdisjoint(places):
                # A pass that ignores `left_alone` is no better in another run.
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
