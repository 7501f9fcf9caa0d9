"""Diagnose a model: run it under observation, and let each rule read what was seen."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity
from torch.utils import _pytree as pytree

from exporters.places import line_of_error
from optimize_export.errors import LoadError, OptimizeExportError, UsageError
from optimize_export.wording import error_summary
from optimizer.diagnosis import chains, kernels, layers, settings, values
from optimizer.diagnosis.evidence import Evidence, LineRecorder, PlainTensors, Step, plain_tensors
from optimizer.diagnosis.findings import LEVELS, Diagnosis, Rule
from optimizer.model import (
    Call,
    ExampleInputs,
    Runs,
    batch_of,
    called,
    check_model,
    eager_only,
    endless,
    errors_of_model,
    in_turn,
    is_script,
    loss_from,
    moved,
    on_device,
    one_call,
    optimizer_over,
    outside_inference_mode,
    random_state,
    required_arguments,
    unregistered_modules,
    unsynchronised,
    working_copy,
)
from optimizer.torch_private import is_profiling
from passes.base import ModelTree
from passes.graph.recording import Recording

# In the order in which their findings of one level are reported.
RULES = tuple(
    each
    for file in (layers, values, chains, kernels, settings)
    for each in vars(file).values()
    if isinstance(each, Rule)
)


@in_turn
def diagnose(
    model: nn.Module,
    example_inputs: ExampleInputs | None = None,
    *,
    example_kwargs: dict[str, Any] | None = None,
    training_step: Callable[..., object] | None = None,
    loader: Iterable[Any] | None = None,
    batch: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
) -> Diagnosis:
    """Find what good practice would change in the model's own code.

    A copy of the model runs in eval mode, three times and for a few measurements. Each torch call is recorded
    with its line, and each rule reads the recording. The caller's module isn't changed, except by a `training_step` without
    arguments.

    Args:
        model: any module.
        example_inputs, example_kwargs: as for `optimize`.
        training_step: a function of the model and a batch that returns the loss. It runs twice on a copy of the model,
            once to warm up, each time with a backward pass, a step of the optimizer, and `zero_grad()`. Or a function
            without arguments that does all of this; it trains the model.
        loader: a DataLoader or another iterable of batches, for a step that takes one.
        batch: the batch, if there is no loader; by default the example inputs.
        optimizer: over the parameters of the model; a copy of it makes the steps. None for no steps.
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
    step = None
    if training_step is not None and required_arguments(training_step):
        if batch is None and loader is None:
            batch = batch_of(call)
        with random_state(0):
            step = record_step(*copied_step(model, training_step, batch, loader, optimizer, target), loader)
    elif batch is not None or loader is not None or optimizer is not None:
        raise UsageError("batch, loader and optimizer go with a training step that takes the model and a batch.")
    elif training_step is not None:
        step = record_step(model, training_step)
    with outside_inference_mode(), random_state(0), unsynchronised(), torch.no_grad(), eager_only():
        runs = Runs(on_device(model, target), in_eval=True)
        with errors_of_model(call):
            # This run finds the parameters that forward writes to, and warms up.
            runs.first(partial(record, call=call, attributes={}))
        with runs.fresh() as copied:
            assert isinstance(copied, nn.Module)
            with errors_of_model(call):
                evidence = collect_evidence(model, copied, call, target)
            evidence = replace(evidence, step=step, unmoved=unmoved_tensors(runs, call))
            findings = [finding for rule in RULES for finding in rule.findings(evidence)]
    findings.sort(key=lambda each: LEVELS.index(each.level))
    return Diagnosis(type(model).__name__, target.type, tuple(findings))


# -------------------------------------------------------------------------------------------- running under observation

# torch's names of the ranges in which a step waits for a DataLoader.
_LOADER = "enumerate(DataLoader)"


def record(module: Any, call: Call, attributes: PlainTensors) -> tuple[ModelTree, Recording]:
    """Run a module once, and record its calls with their lines."""
    tree = ModelTree(module, unregistered_modules(module))
    with LineRecorder(module, tree.modules, attributes) as recorder:
        called(module, call)
    return tree, recorder.recording


def collect_evidence(model: nn.Module, copied: nn.Module, call: Call, device: torch.device) -> Evidence:
    """Run a copy of the model twice.

    The second run is the evidence: what the first one made and kept costs nothing at later calls.
    """
    attributes = plain_tensors(copied)
    _, first = record(copied, call, attributes)
    tree, recording = record(copied, call, attributes)
    calls, others = recording.nodes(), first.nodes()
    if len(calls) == len(others):
        # The shorter of two times contains less of the machine's other work.
        for node, other in zip(calls, others, strict=True):
            node.meta["seconds"] = min(node.meta.get("seconds", 0.0), other.meta.get("seconds", 0.0))
    return Evidence(model, tree, recording, device, forward=partial(called, copied, call))


def unmoved_tensors(runs: Runs, call: Call) -> frozenset[str]:
    """The paths of the plain tensors that are on the old device still when the model is called after `.to()`.

    A model may move them in its own `_apply`, or where forward first needs them. So a copy moves to the meta device,
    where it takes neither memory nor time, and is called twice. If it can't run without values, these are all plain
    tensors that `.to()` leaves behind.
    """
    assert isinstance(runs.target, nn.Module)
    if runs.is_run_itself:
        return _paths(plain_tensors(runs.target))
    with runs.fresh() as copied:
        assert isinstance(copied, nn.Module)
        with suppress(LoadError), errors_of_model(call):
            copied.to("meta")
            if not (left := _left_behind(copied)):
                return frozenset()
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda one: one.to("meta"), (call.args, call.kwargs))
            there = replace(call, args=args, kwargs=kwargs)
            called(copied, there)
            _, recording = record(copied, there, left)
            return frozenset(filter(None, (node.meta.get("attribute") for node in recording.nodes())))
        # Foreign code, such as an `_apply` of the model, may need values.
        return _paths(_left_behind(copied))


def _left_behind(moved: nn.Module) -> PlainTensors:
    held = plain_tensors(moved)
    return {key: (path, one) for key, (path, one) in held.items() if one.device.type != "meta" and one.numel() > 1}


def _paths(attributes: PlainTensors) -> frozenset[str]:
    return frozenset(path for path, _ in attributes.values())


def copied_step(
    model: nn.Module,
    step: Callable[..., object],
    batch: Any,
    loader: Iterable[Any] | None,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
) -> tuple[nn.Module, Callable[[], object]]:
    """A copy of the model with weights of its own, and a whole training step on it. Arguments as for `diagnose`."""
    copied = working_copy(model, private=[name for name, _ in model.named_parameters()]).root.to(device)
    stepped = None if optimizer is None else optimizer_over(optimizer, model, copied)
    batches = itertools.repeat(moved(batch, device)) if loader is None else endless(loader)

    def whole() -> None:
        loss_from(step(copied, moved(next(batches), device))).backward()
        if stepped is not None:
            stepped.step()
        copied.zero_grad()

    return copied, whole


def record_step(model: nn.Module, step: Callable[[], object], loader: Iterable[Any] | None = None) -> Step:
    """Run a training step twice: the first run is recorded, the second is timed. `loader`: what it draws from, if known."""
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
    except OptimizeExportError:
        raise
    except Exception as error:  # the step is foreign code
        at = f" at {line}" if (line := line_of_error(error)) else ""
        raise LoadError(f"The training step raises{at}: {error_summary(error)}.") from error
    waited = sum(event.cpu_time_total for event in profiler.key_averages() if event.key.startswith(_LOADER))
    return Step(recorder.recording, waited / 1e6 / seconds, loader)
