"""Diagnose a model: run it under observation, and let each rule read what was seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity

from optimizer.diagnosis.evidence import Evidence, LineRecorder, Step
from optimizer.diagnosis.findings import LEVELS, Diagnosis
from optimizer.diagnosis.rules import RULES
from optimizer.errors import LoadError, OptimizeExportError, UsageError
from optimizer.model import (
    Call,
    ExampleInputs,
    Runs,
    check_model,
    clone,
    eager_only,
    in_turn,
    on_device,
    outside_inference_mode,
    random_state,
    resolved_device,
    samples_of,
    unregistered_modules,
    unsynchronised,
)
from optimizer.torch_private import is_profiling
from optimizer.wording import error_summary
from passes.base import device_of
from passes.memory_format.watch import LayoutWatch, Loss
from passes.program.matching import STOCK_CONVOLUTIONS
from passes.program.memory_formats import CHANNELS_LAST_FORMATS, is_channels_last
from passes.program.model_tree import ModelTree
from passes.program.recording import Recording

# torch's names of the ranges in which a step waits for a DataLoader.
_LOADER = "enumerate(DataLoader)"


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
        UsageError: an argument is invalid, or a profiler is running.
        DeviceError: the device is a GPU, and torch finds none.
        LoadError: the model can't be copied, or raises on the example inputs; or the training step raises.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    check_model(model, runs=True)
    target = device_of(model) if device is None else resolved_device(str(device), require_gpu=False)
    samples = samples_of(example_inputs, example_kwargs, (), 0, target)
    if samples is None:
        raise UsageError("diagnose() needs example_inputs (or example_kwargs): the tensors of one call of the model.")
    step = None if training_step is None else _watched_step(model, training_step)
    with outside_inference_mode(), random_state(0), unsynchronised(), torch.no_grad(), eager_only():
        runs = Runs(on_device(model, target), in_eval=True)
        try:
            # This run finds the parameters that forward writes to, and warms up.
            runs.first(partial(_recorded, call=samples.given))
            with runs.fresh() as copied:
                assert isinstance(copied, nn.Module)
                evidence = replace(_evidence(model, copied, samples.given, target), step=step)
                findings = [finding for rule in RULES for finding in rule.findings(evidence)]
        except OptimizeExportError:
            raise
        except Exception as error:  # the module is foreign code
            raise LoadError(f"The model raises on the example inputs: {error_summary(error)}.") from error
    findings.sort(key=lambda each: LEVELS.index(each.level))
    return Diagnosis(type(model).__name__, target.type, tuple(findings))


def _called(module: Callable[..., Any], call: Call) -> Any:
    # Copies of the inputs, because forward may write to them.
    args, kwargs = clone((call.args, call.kwargs))
    return module(*args, **kwargs)


def _recorded(module: Any, call: Call) -> tuple[ModelTree, Recording]:
    tree = ModelTree(module, unregistered_modules(module))
    with LineRecorder(module, tree.modules) as recorder:
        _called(module, call)
    return tree, recorder.recording


def _evidence(model: nn.Module, copied: nn.Module, call: Call, device: torch.device) -> Evidence:
    tree, recording = _recorded(copied, call)
    _, again = _recorded(copied, call)
    calls, others = recording.nodes(), again.nodes()
    if len(calls) == len(others):
        # One run alone times whatever else the machine did meanwhile.
        for node, other in zip(calls, others, strict=True):
            node.meta["seconds"] = min(node.meta.get("seconds", 0.0), other.meta.get("seconds", 0.0))
    losses: Sequence[Loss] = ()
    if any(map(_is_in_channels_last, tree.modules())):
        with LayoutWatch(copied) as watch:
            _called(copied, call)
        losses = watch.layouts.losses
    return Evidence(model, tree, recording, device, losses, forward=partial(_called, copied, call))


def _is_in_channels_last(module: nn.Module) -> bool:
    if not isinstance(module, STOCK_CONVOLUTIONS):
        return False
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.dim() in CHANNELS_LAST_FORMATS and is_channels_last(weight) and not weight.is_contiguous()


def _watched_step(model: nn.Module, step: Callable[[], object]) -> Step:
    """Run a training step twice: the first run is recorded, the second is timed.

    Raises:
        UsageError: another profiler is running.
        LoadError: the step raises.
    """
    if is_profiling():
        raise UsageError("Another profiler is running in this thread: diagnose() needs it to end first.")
    tree = ModelTree(model, unregistered_modules(model))
    try:
        with outside_inference_mode(), torch.enable_grad(), eager_only():
            with LineRecorder(model, tree.modules) as recorder:
                step()
            # Without `acc_events`, torch warns that only the events of the last cycle are kept. There is one cycle.
            with torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
                started = time.perf_counter()
                step()
                seconds = time.perf_counter() - started
    except Exception as error:  # the step is foreign code
        raise LoadError(f"The training step raises: {error_summary(error)}.") from error
    waited = sum(event.cpu_time_total for event in profiler.key_averages() if event.key.startswith(_LOADER))
    return Step(recorder.recording, waited / 1e6 / seconds)
