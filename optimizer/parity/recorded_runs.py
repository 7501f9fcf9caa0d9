"""Record runs of the original for the passes, so that one run yields both the outputs and the torch calls."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

from optimize_export.errors import LoadError
from optimize_export.wording import first_line
from optimizer.model import Call, RunsOfCopy, eager_only
from optimizer.parity.observe import Observation, observe
from passes.graph.model_tree import ModelTree
from passes.graph.recording import Recorder, Recording, Run, Runs

logger = logging.getLogger(__name__)


class RecordedRuns:
    """Makes the first run of the given calls on the working copy, whose modules the passes know, and records it.

    Attributes:
        recordings: by batch size and draw of the call.
        failures: the reasons why runs couldn't be recorded, by batch size and draw.
        runs: makes the runs on the working copy.
    """

    def __init__(self, runs: RunsOfCopy, tree: ModelTree, calls: Collection[tuple[int | None, int]]) -> None:
        self.recordings: dict[tuple[int | None, int], Recording] = {}
        self.failures: dict[tuple[int | None, int], str] = {}
        self.runs = runs
        self._tree = tree
        self._calls = calls

    def as_runs(self, calls: Sequence[tuple[int | None, int]]) -> Runs | None:
        """The recordings in the form that passes read, numbered in the order of `calls`.

        None if a recording is missing and none of the calls failed. If a call failed, the result has the reason.
        """
        made = [(number, self.recordings[key]) for number, key in enumerate(calls) if key in self.recordings]
        reasons = [self.failures[key] for key in calls if key in self.failures]
        if len(made) < len(calls) and not reasons:
            return None
        failure = f"it can't be recorded ({reasons[0]})" if reasons else ""
        return Runs(tuple(Run(number, None, recording) for number, recording in made), failure)

    def run(
        self, batch_size: int | None, draw: int, call: Call, *, seed: int, names: Sequence[str], is_first: bool
    ) -> Observation | None:
        """Run one call and record it; None if the call isn't one of the given calls, or can't be recorded.

        After a failure no further call is recorded.

        Args:
            is_first: stop the run before it writes to a shared weight, and repeat it with a private copy of the weight.

        Raises:
            LoadError: the model can't run on a copy.
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
                except Exception as error:  # noqa: BLE001 - foreign code may raise because each operator is watched
                    logger.debug("the watched run raised: %s", error)
            try:
                with self.runs.fresh() as module:
                    return run(module)
            except LoadError:
                raise
            except Exception as error:  # noqa: BLE001 - the plain run shows whether the model itself raises
                self.failures[key] = f"{type(error).__name__}: {first_line(error)}"
                return None
