"""Runs of the original that are recorded for the passes: one run shows what comes out and how it is computed."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

from optimizer.errors import LoadError
from optimizer.inputs import Call
from optimizer.parity.observe import Observation, observe
from optimizer.preserve import eager_only
from optimizer.runs import RunsOfCopy
from optimizer.sentences import first_line
from passes.program.model_tree import ModelTree
from passes.program.recording import Recorder, Recording, Run, Runs

logger = logging.getLogger(__name__)


class RecordedRuns:
    """Makes the first run of some calls on the working copy, whose modules the passes know, and records it.

    Attributes:
        recordings: by batch size and draw of the call.
        failures: why a run couldn't be recorded, likewise.
    """

    def __init__(self, runs: RunsOfCopy, tree: ModelTree, calls: Collection[tuple[int | None, int]]) -> None:
        self.recordings: dict[tuple[int | None, int], Recording] = {}
        self.failures: dict[tuple[int | None, int], str] = {}
        self.runs = runs
        self._tree = tree
        self._calls = calls

    def as_runs(self, calls: Sequence[tuple[int | None, int]]) -> Runs | None:
        """The recordings as passes read them, the calls numbered in this order; None where one is missing."""
        made = [(number, self.recordings[key]) for number, key in enumerate(calls) if key in self.recordings]
        reasons = [self.failures[key] for key in calls if key in self.failures]
        if len(made) < len(calls) and not reasons:
            return None
        failure = f"it can't be recorded ({reasons[0]})" if reasons else ""
        return Runs(tuple(Run(number, None, recording) for number, recording in made), failure)

    def run(
        self, batch_size: int | None, draw: int, call: Call, *, seed: int, names: Sequence[str], is_first: bool
    ) -> Observation | None:
        """What comes out of one call; None for a call that isn't to be recorded, or can't be.

        Args:
            is_first: end it before a write to a weight, and run it again on a copy that has this weight of its own.

        Raises:
            LoadError: the model can't be run on a copy.
        """
        key = batch_size, draw
        if key not in self._calls or self.failures or self.runs.is_run_itself:
            return None

        def run(module: Any) -> Observation:
            recorder = Recorder(self._tree.root, self._tree.modules)

            def recorded(*args: Any, **kwargs: Any) -> Any:
                with recorder:
                    return module(*args, **kwargs)

            seen = observe(recorded, call, seed=seed, names=names)
            self.recordings[key] = recorder.recording
            return seen

        with eager_only():
            if is_first:
                try:
                    return self.runs.first(run)
                except LoadError:
                    raise
                except Exception as error:  # noqa: BLE001 - foreign code may raise for being watched at each operator
                    logger.debug("the watched run raised: %s", error)
            try:
                with self.runs.fresh() as module:
                    return run(module)
            except LoadError:
                raise
            except Exception as error:  # noqa: BLE001 - the plain run tells whether the model raises by itself
                self.failures[key] = f"{type(error).__name__}: {first_line(error)}"
                return None
