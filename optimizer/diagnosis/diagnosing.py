"""Diagnose a model: run it under observation, and let each rule read what was seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from optimize_export.errors import UsageError
from optimizer.diagnosis.findings import LEVELS, Diagnosis
from optimizer.diagnosis.rules import RULES
from optimizer.diagnosis.runs import evidence_of, recorded, unmoved_tensors, watched_step
from optimizer.model import (
    ExampleInputs,
    Runs,
    check_model,
    eager_only,
    errors_of_model,
    in_turn,
    is_script,
    on_device,
    one_call,
    outside_inference_mode,
    random_state,
    unsynchronised,
)


@in_turn
def diagnose(
    model: nn.Module,
    example_inputs: ExampleInputs | None = None,
    *,
    example_kwargs: dict[str, Any] | None = None,
    training_step: Callable[[], object] | None = None,
    device: torch.device | str | None = None,
) -> Diagnosis:
    """Find what good practice would change in the model's own code.

    A copy of the model runs in eval mode, three times and for a few measurements. Each torch call is recorded
    with its line, and each rule reads the recording. The caller's module isn't changed, except by `training_step`.

    Args:
        model: any module.
        example_inputs, example_kwargs: as for `optimize`.
        training_step: a function without arguments that runs one training step as usual: batch, forward, backward,
            optimizer. It is called twice, once to warm up, and trains the model.
        device: where to run; by default the module's device. For another device, the weights are copied.

    Raises:
        UsageError: an argument is invalid, the model is TorchScript, or a profiler is running.
        DeviceError: the device is a GPU, and torch finds none.
        LoadError: the model can't be copied, or raises on the example inputs; or the training step raises.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    check_model(model, runs=True)
    if is_script(model):
        raise UsageError(
            "The model is TorchScript, whose operations have no lines: diagnose the module it was made from."
        )
    call, target = one_call("diagnose", model, example_inputs, example_kwargs, device)
    step = None if training_step is None else watched_step(model, training_step)
    with outside_inference_mode(), random_state(0), unsynchronised(), torch.no_grad(), eager_only():
        runs = Runs(on_device(model, target), in_eval=True)
        with errors_of_model(call):
            # This run finds the parameters that forward writes to, and warms up.
            runs.first(partial(recorded, call=call, attributes={}))
        with runs.fresh() as copied:
            assert isinstance(copied, nn.Module)
            with errors_of_model(call):
                evidence = evidence_of(model, copied, call, target)
            evidence = replace(evidence, step=step, unmoved=unmoved_tensors(runs, call))
            findings = [finding for rule in RULES for finding in rule.findings(evidence)]
    findings.sort(key=lambda each: LEVELS.index(each.level))
    return Diagnosis(type(model).__name__, target.type, tuple(findings))
