"""The time of a run by operation and module: run under `torch.profiler`, sum up, and put repeated blocks in one row."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function

from exporters.places import paths_of
from passes.graph.forwards import intercepted_calls, is_compiled
from passes.torch_private import COMPILED_CALL

# ------------------------------------------------------------------------------------------------------------- the sums

_NUMBER = re.compile(r"(\d+)")
# More numbers or ranges than this become a star.
_MOST_NUMBERS = 5


@dataclass(frozen=True)
class Operation:
    """One kind of operation, on inputs of the same shapes, in modules whose paths differ only in numbers."""

    name: str
    """Such as "aten::conv2d" or "ConvolutionBackward0"; the operator of an ONNX file."""
    modules: tuple[str, ...]
    """The paths of the modules that call it, "" for the root; the names of the nodes of an ONNX file. Empty for
    operations outside of the model, such as those of the loss."""
    calls: int
    """The number of calls in one run."""
    seconds: float
    """The time of these calls."""
    share: float
    """`seconds` divided by the time of the run, from 0 to 1."""

    @property
    def where(self) -> str:
        """All modules as one path, such as "layers.{0..3,5}.conv1"."""
        return one_path(self.modules) if self.modules else "outside of the model"

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        return {"name": self.name, "where": self.where, **vars(self), "modules": list(self.modules)}


def without_numbers(path: str) -> str:
    """The path with a star for each number."""
    return _NUMBER.sub("*", path)


def one_path(paths: Sequence[str]) -> str:
    """Write paths that differ only in numbers as one: "layers.{0..3,5}.conv1", or "layers.*.conv1" for many numbers."""
    columns = zip(*(_NUMBER.split(path) for path in paths), strict=True)
    return "".join(map(_one_of, columns)) or "the model itself"


def _one_of(texts: Sequence[str]) -> str:
    different = set(texts)
    if len(different) == 1:
        return texts[0]
    ranges: list[list[int]] = []
    for number in sorted(map(int, different)):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    shown = [f"{one[0]}..{one[-1]}" if len(one) > 2 else ",".join(map(str, one)) for one in ranges]
    return "*" if len(shown) > _MOST_NUMBERS else f"{{{','.join(shown)}}}"


@dataclass
class Spent:
    """The calls of one operation in one module, over all runs."""

    calls: int = 0
    seconds: float = 0.0
    """Their time, without that of modules that they call."""
    shapes: Any = ()
    """The shapes of the inputs of the first call."""


Place = tuple[str, str | None]
"""The name of an operation, and the path of a module; None outside of the model."""


def operations_of(spent: Mapping[Place, Spent], *, seconds: float, runs: int) -> tuple[Operation, ...]:
    """Put repeated blocks together, and sort by time, the most expensive first; `spent` has the sums of all runs."""
    groups: dict[tuple[Any, ...], list[Place]] = {}
    for place, each in spent.items():
        name, path = place
        groups.setdefault((name, path if path is None else without_numbers(path), str(each.shapes)), []).append(place)
    operations = []
    for places in groups.values():
        own = sum(spent[place].seconds for place in places) / runs
        calls = max(1, round(sum(spent[place].calls for place in places) / runs))
        modules = tuple(path for _, path in places if path is not None)
        operations.append(Operation(places[0][0], modules, calls, own, own / seconds if seconds else 0.0))
    return tuple(sorted(operations, key=lambda operation: -operation.seconds))


# ------------------------------------------------------------------------------------------------------------- the runs

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


def profile_runs(
    module: nn.Module,
    run: Callable[[Arguments], object],
    arguments: Callable[[], Arguments],
    device: torch.device,
) -> tuple[float, tuple[Operation, ...], torch.profiler.profile]:
    """Profile some runs of `module` after one run to warm up.

    Args:
        run: one run; it calls `call_root` where it calls the module.
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


def call_root(module: nn.Module, arguments: Arguments) -> Any:
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


class _Around(NamedTuple):
    """What an event is in: the path of a module, and the outermost operation that the module calls, if any."""

    path: str | None = None
    operation: Place | None = None


class _Times:
    """Sums up the events of a profile.

    An operation has the time of all operations inside it, except those of modules that it calls. A node of the backward
    pass belongs to the module that made it, as the last event of the forward with its sequence number tells.
    """

    def __init__(self, *, on_device: bool) -> None:
        self._on_device = on_device
        self.spent: dict[Place, Spent] = {}
        # Of all runs: on a CPU their duration, on a GPU the sum over the kernels.
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
            # The time of the fused kernels; the operations inside are added one by one.
            each = self.spent.setdefault(("compiled code", around.path), Spent())
            each.calls += event.name.startswith(_REGION)
            self._add_time(event, each)
            return around
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

    def _begun(self, event: Any, around: _Around) -> _Around:
        path, shapes = around.path, event.input_shapes
        if event.name.startswith(_BACKWARD):
            path, shapes = self._makers.get((event.fwd_thread, event.sequence_nr), (None, ()))
        operation = event.name.removeprefix(_BACKWARD), path
        self.spent.setdefault(operation, Spent(shapes=shapes)).calls += 1
        return _Around(path, operation)
