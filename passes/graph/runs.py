"""Record runs of a working copy once, for all passes that read them."""

from __future__ import annotations

from torch import nn

from passes.base import Context
from passes.graph.model_tree import ModelTree, training_flags
from passes.graph.recording import WHEN, Recorder, Run, Runs, autocast_dtype


def recorded_runs(tree: ModelTree, context: Context) -> Runs | None:
    """The recordings of the example calls on the current tree; None if the model must not be run."""
    if tree.runs is None and context.run_inside is not None:
        tree.runs = _record(tree, context)
    return tree.runs


def _record(tree: ModelTree, context: Context) -> Runs:
    assert context.run_inside is not None
    runs: list[Run] = []
    for flag in _states(tree.root, context.mode):
        for number in range(len(context.example_calls)):
            recorder = Recorder(tree.root, tree.modules)
            with training_flags(tree.root, flag):
                failure = context.run_inside(recorder, number)
            if failure is not None:
                return Runs(tuple(runs), " ".join(filter(None, ("it can't be recorded", WHEN[flag], f"({failure})"))))
            runs.append(Run(number, flag, recorder.recording))
    return Runs(tuple(runs))


def _states(root: nn.Module, mode: str) -> list[bool | None]:
    if mode != "training":
        return [None]
    flags = {module.training for module in root.modules() if hasattr(module, "training")}
    return [None, *(flag for flag in (False, True) if flag not in flags or len(flags) > 1)]


def is_under_autocast(tree: ModelTree) -> bool:
    """Whether autocast is on for a device that holds parameters of the model."""
    return autocast_dtype({parameter.device.type for parameter in tree.root.parameters()}) is not None
