"""Run a module under `torch.profiler`, and sum up the time of each operation by the module that calls it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function

from exporters.places import paths_of
from optimizer.profiling.operations import Operation, Place, Spent, operations_of
from passes.graph.interception import intercepted_calls, is_compiled
from passes.torch_private import COMPILED_CALL

# The names of ranges in the trace: one run, and the call of the module with this path.
_RUN, _MODULE = "one run", "module "
# torch's prefix for the range of one node in the backward pass.
_BACKWARD = "autograd::engine::evaluate_function: "
# torch's names of the ranges of compiled code. Its fused kernels on a CPU have no events of their own.
_REGION, _COMPILED = "Torch-Compiled Region", ("Torch-Compiled Region", "## Call CompiledFxGraph")
RUNS = 3
# If a run takes longer than this, one is enough.
_LONG = 10.0

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional arguments of a call, and its keyword arguments."""


def timed(
    module: nn.Module,
    run: Callable[[Arguments], object],
    arguments: Callable[[], Arguments],
    device: torch.device,
) -> tuple[float, tuple[Operation, ...], torch.profiler.profile]:
    """Profile some runs after one run to warm up.

    Args:
        module: the module that `run` calls.
        run: one run; it calls `named_call` where it calls the module.
        arguments: makes the arguments of one run; its time doesn't count.

    Returns:
        The seconds of one run, its operations, and the profiler, which can write the trace.
    """
    started = time.perf_counter()
    run(arguments())
    _wait_for(device)
    runs = 1 if time.perf_counter() - started > _LONG else RUNS
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # Without `acc_events`, torch 2.11 warns that only the events of the last cycle are kept. There is one cycle.
    profile = torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True)
    with _named_calls(module), profile as profiler:
        for _ in range(runs):
            given = arguments()
            with record_function(_RUN):
                run(given)
        _wait_for(device)
    times = _Times(on_device=device.type == "cuda")
    times.add(profiler.events())
    seconds = times.seconds / runs
    return seconds, operations_of(times.spent, seconds=seconds, runs=runs), profiler


def named_call(module: nn.Module, arguments: Arguments) -> Any:
    """Call the root of a model, and record a range in which the operations belong to it."""
    args, kwargs = arguments
    with record_function(_MODULE):
        return module(*args, **kwargs)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _named_calls(root: nn.Module) -> Iterator[None]:
    """Record a range with its path for each module call of this thread.

    Compiled modules and those inside them are left out: another forward would be compiled again. Their operations
    belong to the module around them.
    """
    paths = paths_of(root)

    def around(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with record_function(_MODULE + paths[id(module)]):
            return forward(*args, **kwargs)

    compiled = [
        module for module in root.modules() if is_compiled(module) or getattr(module, COMPILED_CALL, None) is not None
    ]
    apart = {id(inner) for module in compiled for inner in module.modules()}
    with intercepted_calls(root, around, leave=apart):
        yield


@dataclass(frozen=True)
class _Around:
    """What an event is in: a module, and the outermost operation that the module calls.

    Attributes:
        path: of the module; None outside of the model.
        operation: None directly in the module.
    """

    path: str | None = None
    operation: Place | None = None


class _Times:
    """Sums up the events of a profile.

    An operation has the time of all operations inside it, except those of modules that it calls. A node of the backward
    pass belongs to the module that made it, as the last event of the forward with its sequence number tells.

    Attributes:
        spent: the calls and seconds of each operation in each module.
        seconds: of all runs: on a CPU their duration, on a GPU the sum over the kernels.
    """

    def __init__(self, *, on_device: bool) -> None:
        self._on_device = on_device
        self.spent: dict[Place, Spent] = {}
        self.seconds = 0.0
        # By thread and sequence number: the path of the module, and the shapes of the inputs.
        self._makers: dict[tuple[int, int], tuple[str | None, Any]] = {}

    def add(self, events: Any) -> None:
        """Add the events of a profile, which are in the order of their start."""
        roots = [event for event in events if event.cpu_parent is None and event.device_type.name == "CPU"]
        # On a GPU, the backward pass has a thread of its own. Outside of the runs, the thread of the model copies inputs.
        threads = {event.thread for event in roots if event.name == _RUN}
        roots = [event for event in roots if event.name == _RUN or event.thread not in threads]
        waiting = [(event, _Around()) for event in reversed(roots)]
        while waiting:
            event, around = waiting.pop()
            inside = self._see(event, around)
            waiting.extend((child, inside) for child in reversed(event.cpu_children))

    def _see(self, event: Any, around: _Around) -> _Around:
        """Add one event, and return what its children are in."""
        if event.name == _RUN:
            self.seconds += 0.0 if self._on_device else event.time_range.elapsed_us() / 1e6
            return _Around()
        if event.name.startswith(_MODULE):
            return _Around(event.name.removeprefix(_MODULE))
        if around.operation is None and event.name.startswith(_COMPILED):
            return self._compiled(event, around)
        if around.operation is None and not event.is_user_annotation:
            around = self._begun(event, around)
        if around.operation is None:
            return around
        each = self.spent[around.operation]
        self._add_time(event, each)
        if event.sequence_nr >= 0 and not event.fwd_thread:
            self._makers[event.thread, event.sequence_nr] = around.path, each.shapes
        return around

    def _add_time(self, event: Any, to: Spent) -> None:
        own = (event.self_device_time_total if self._on_device else event.self_cpu_time_total) / 1e6
        to.seconds += own
        self.seconds += own if self._on_device else 0.0

    def _compiled(self, event: Any, around: _Around) -> _Around:
        """Add the time of the fused kernels; the operations inside are added one by one."""
        each = self.spent.setdefault(("compiled code", around.path), Spent())
        each.calls += event.name.startswith(_REGION)
        self._add_time(event, each)
        return around

    def _begun(self, event: Any, around: _Around) -> _Around:
        path, shapes = around.path, event.input_shapes
        if event.name.startswith(_BACKWARD):
            path, shapes = self._makers.get((event.fwd_thread, event.sequence_nr), (None, ()))
        operation = event.name.removeprefix(_BACKWARD), path
        self.spent.setdefault(operation, Spent(shapes=shapes)).calls += 1
        return _Around(path, operation)
