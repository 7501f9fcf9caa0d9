"""The work of `diagnose`: load the model and diagnose it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from optimize_export.errors import FindingsFound, failure_document
from optimize_export.wording import listed
from optimizer.command.build import Document, chosen_device
from optimizer.command.first_run import load_and_run
from optimizer.command.loading import required_arguments
from optimizer.command.own_errors import own_errors, unlogged
from optimizer.command.user_code import hard_exits_raise, names_restored
from optimizer.diagnosis import Diagnosis, diagnose
from optimizer.model import in_turn
from optimizer.options import DiagnoseOptions
from optimizer.report import Progress


@in_turn
def diagnose_model(options: DiagnoseOptions, progress: Callable[[Progress], None]) -> Document:
    """Diagnose a model.

    With `fail_on`, the `exit_code` is 10 if there is a finding of that level or a higher one.

    Raises:
        OptimizeExportError: the model can't be loaded or doesn't run.
    """
    with own_errors(), names_restored(), hard_exits_raise(), unlogged():
        load = options.load
        device = chosen_device(load.device, require_gpu=load.require_gpu)
        loaded = load_and_run(
            replace(
                load,
                input_files=tuple(path.absolute() for path in load.input_files),
                weights=None if load.weights is None else load.weights.absolute(),
            ),
            progress,
        )
        step, notes = loaded.training_step, list(loaded.notes)
        if step is not None and (needed := required_arguments(step)):
            step = None
            notes.append(
                f"The training step was left out: training_step needs {listed(needed)}; it is called without arguments."
            )
        progress(Progress("diagnose", 0, 1, loaded.source))
        found = diagnose(
            loaded.model,
            loaded.example_inputs,
            example_kwargs=loaded.example_kwargs,
            training_step=step,
            device=device,
        )
        progress(Progress("diagnose", 1, 1, loaded.source))
    return {**_outcome(found, options.fail_on), "diagnosis": found.to_json(), "notes": notes}


def _outcome(found: Diagnosis, fail_on: Any) -> Document:
    failing = () if fail_on is None else found.at_least(fail_on)
    if not failing:
        return {"ok": True, "exit_code": 0}
    count = len(failing)
    level = f"level {fail_on}" if fail_on == "error" else f"level {fail_on} or higher"
    message = f"The diagnosis has {count} finding{'s' if count > 1 else ''} of {level}: fix them, or change --fail-on."
    return failure_document(FindingsFound.exit_code, FindingsFound.__name__, message)
