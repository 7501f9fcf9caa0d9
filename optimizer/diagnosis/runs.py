"""Run a model, and a training step, under observation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity
from torch.utils import _pytree as pytree

from exporters.places import line_of_error
from optimize_export.errors import LoadError, UsageError
from optimize_export.wording import error_summary
from optimizer.diagnosis.evidence import Evidence, LineRecorder, PlainTensors, Step, plain_tensors
from optimizer.model import (
    Call,
    Runs,
    called,
    eager_only,
    errors_of_model,
    outside_inference_mode,
    unregistered_modules,
)
from optimizer.torch_private import is_profiling
from passes.graph.matching import STOCK_CONVOLUTIONS
from passes.graph.memory_formats import CHANNELS_LAST_FORMATS, is_channels_last
from passes.graph.model_tree import ModelTree
from passes.graph.recording import Recording
from passes.memory_format.watch import LayoutWatch, Loss

# torch's names of the ranges in which a step waits for a DataLoader.
_LOADER = "enumerate(DataLoader)"


def recorded(module: Any, call: Call, attributes: PlainTensors) -> tuple[ModelTree, Recording]:
    """Run a module once, and record its calls with their lines."""
    tree = ModelTree(module, unregistered_modules(module))
    with LineRecorder(module, tree.modules, attributes) as recorder:
        called(module, call)
    return tree, recorder.recording


def evidence_of(model: nn.Module, copied: nn.Module, call: Call, device: torch.device) -> Evidence:
    """Run a copy of the model twice, and once more if it has convolutions in channels_last.

    The second run is the evidence: what the first one made and kept costs nothing at later calls.
    """
    attributes = plain_tensors(copied)
    _, first = recorded(copied, call, attributes)
    tree, recording = recorded(copied, call, attributes)
    calls, others = recording.nodes(), first.nodes()
    if len(calls) == len(others):
        # The shorter of two times contains less of the machine's other work.
        for node, other in zip(calls, others, strict=True):
            node.meta["seconds"] = min(node.meta.get("seconds", 0.0), other.meta.get("seconds", 0.0))
    losses: Sequence[Loss] = ()
    if any(map(_is_in_channels_last, tree.modules())):
        with LayoutWatch(copied) as watch:
            called(copied, call)
        losses = watch.layouts.losses
    return Evidence(model, tree, recording, device, losses, forward=partial(called, copied, call))


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
            _, recording = recorded(copied, there, left)
            return frozenset(filter(None, (node.meta.get("attribute") for node in recording.nodes())))
        # Foreign code, such as an `_apply` of the model, may need values.
        return _paths(_left_behind(copied))


def _left_behind(moved: nn.Module) -> PlainTensors:
    held = plain_tensors(moved)
    return {key: (path, one) for key, (path, one) in held.items() if one.device.type != "meta" and one.numel() > 1}


def _paths(attributes: PlainTensors) -> frozenset[str]:
    return frozenset(path for path, _ in attributes.values())


def _is_in_channels_last(module: nn.Module) -> bool:
    if not isinstance(module, STOCK_CONVOLUTIONS):
        return False
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.dim() in CHANNELS_LAST_FORMATS and is_channels_last(weight) and not weight.is_contiguous()


def watched_step(model: nn.Module, step: Callable[[], object]) -> Step:
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
        at = f" at {line}" if (line := line_of_error(error)) else ""
        raise LoadError(f"The training step raises{at}: {error_summary(error)}.") from error
    waited = sum(event.cpu_time_total for event in profiler.key_averages() if event.key.startswith(_LOADER))
    return Step(recorder.recording, waited / 1e6 / seconds)
