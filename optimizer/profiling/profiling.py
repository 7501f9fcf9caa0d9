"""Profile a module, or an export before and after: its time by operation, and in training its memory by module."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from exporters.onnx_session import profile_nodes
from exporters.places import paths_of
from optimize_export.errors import BundleError, UsageError, printable_lines
from optimizer.model import (
    Call,
    ExampleInputs,
    Mode,
    Runs,
    Samples,
    called,
    check_model,
    clone,
    eager_only,
    errors_of_model,
    gradients_by_backward,
    in_turn,
    on_device,
    one_call,
    outside_inference_mode,
    random_state,
    unsynchronised,
)
from optimizer.options import check_new_folder
from optimizer.profiling.operations import (
    RUNS,
    Arguments,
    Operation,
    Place,
    Spent,
    call_root,
    one_path,
    operations_of,
    profile_runs,
    without_numbers,
)
from optimizer.report import Progress, ProgressFunction
from optimizer.showing import profile_rows
from optimizer.torch_private import is_profiling
from passes.checkpointing.live_bytes import LiveBytes
from passes.checkpointing.profile import NoProfile, loss_of, there_before
from passes.graph.forwards import intercepted_calls

# The table has the most expensive ones; the data has all.
_SHOWN = 10
_MOST_NAMED = 3


@dataclass(frozen=True)
class ModuleBytes:
    """The bytes that one module holds at the peak; `module` is its path, "" for the root."""

    module: str
    bytes: int


@dataclass(frozen=True)
class PeakMemory:
    """The memory at the peak of a training step, without parameters, buffers, inputs and older gradients.

    Each storage counts once, and belongs to the innermost module whose forward made it: mostly to be saved for the
    backward pass. The temporary memory of kernels isn't included, nor what an allocator adds when it rounds up.
    """

    bytes: int
    """The bytes of all tensors that are alive at the peak."""
    modules: tuple[ModuleBytes, ...]
    """The modules that hold some of them, the largest first."""
    outside: int
    """The bytes that belong to no module: the loss, and the gradients."""

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        return {**asdict(self), "modules": list(map(asdict, self.modules))}


@dataclass(frozen=True)
class Profile:
    """The time of one run by operation and module."""

    seconds: float
    """The time of one run under the profiler, which itself takes some: on a CPU the wall-clock time, on a GPU the sum
    of its kernels' times."""
    operations: tuple[Operation, ...]
    """The most expensive first. On a CPU the rest of the time is spent between them, in Python."""
    device: str
    mode: Mode = "inference"
    """In "inference", a run is a forward without gradients, and in "training" a training step."""
    peak_memory: PeakMemory | None = None
    """The memory of a training step; None in inference."""

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        return {
            "seconds": self.seconds,
            "device": self.device,
            "mode": self.mode,
            "operations": [operation.to_json() for operation in self.operations],
            "peak_memory": None if self.peak_memory is None else self.peak_memory.to_json(),
        }

    def __str__(self) -> str:
        return printable_lines("\n".join(profile_lines(self.to_json(), "profile")))


@in_turn
def profile(
    model: nn.Module,
    *,
    example_inputs: ExampleInputs | None = None,
    example_kwargs: dict[str, Any] | None = None,
    mode: Mode = "inference",
    directory: str | Path | None = None,
    device: torch.device | str | None = None,
) -> Profile:
    """Find the most expensive operations of a module, and in training also the modules that hold most memory.

    A copy of the module runs under `torch.profiler`, after runs to warm up. The caller's module isn't changed, its
    hooks run as in any call, and other threads may use it meanwhile. Parts that `torch.compile` compiled run as
    compiled code, and their operations belong to the module around them.

    Args:
        model: any module, also a result of `optimize`.
        example_inputs, example_kwargs: as for `optimize`.
        mode: "inference" runs the forward in eval mode without gradients. "training" runs a training step: the forward
            in the module's own mode, a loss, and the backward pass. The loss is the sum of the scalar outputs, or else
            the mean square of each output.
        directory: a folder that doesn't exist yet. It gets `model.trace.json` for chrome://tracing or Perfetto, and
            `profile.json`.
        device: where to run; by default the module's device. For another device, the weights are copied.

    Raises:
        UsageError: an argument is invalid, the directory exists, no output needs a gradient in training, or another
            profiler is running.
        DeviceError: the device is a GPU, and torch finds none.
        LoadError: the model can't be copied, or raises on the example inputs.
        BundleError: the directory can't be written.
    """
    check_model(model, runs=True)
    if mode not in ("inference", "training"):
        raise UsageError(f"mode must be 'inference' or 'training', not {mode!r}.")
    check_new_folder(directory, "the profile")
    call, target = one_call("profile", model, example_inputs, example_kwargs, device)
    if directory is None:
        return profile_module(model, call, mode, target)
    with new_folder(Path(directory).absolute()) as folder:
        found = profile_module(model, call, mode, target, trace=folder / "model.trace.json")
        write_json(folder / "profile.json", found.to_json())
    return found


def profile_module(
    model: nn.Module, call: Call, mode: Mode, device: torch.device, *, trace: Path | None = None
) -> Profile:
    """Profile a module at one call, and write the Chrome trace to `trace`, if that is given."""
    if is_profiling():
        raise UsageError("Another profiler is running in this thread: profile() needs it to end first.")
    training = mode == "training"
    runs = Runs(on_device(model, device), in_eval=not training)
    with (
        outside_inference_mode(),
        random_state(0),
        unsynchronised(),
        torch.set_grad_enabled(training),
        errors_of_model(call),
    ):
        try:
            # This run finds the parameters that forward writes to.
            with eager_only():
                runs.first(partial(called, call=call))
            memory = _memory(runs, call) if training else None
            with runs.fresh() as module:
                assert isinstance(module, nn.Module)
                run = partial(_step if training else call_root, module)
                seconds, operations, profiler = profile_runs(module, run, partial(_copies, call), device)
        except NoProfile as error:
            raise UsageError(f"The model can't be profiled in training: {error}.") from error
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    return Profile(seconds, operations, device.type, mode, memory)


def _copies(call: Call) -> Arguments:
    """Copies of the inputs, because forward may write to them."""
    args, kwargs = clone((call.args, call.kwargs))
    return args, kwargs


def _memory(runs: Runs, call: Call) -> PeakMemory:
    with eager_only(), runs.fresh() as module:
        assert isinstance(module, nn.Module)
        arguments = _copies(call)
        return peak_memory_of(module, *arguments, lambda: _step(module, arguments))


def _step(module: nn.Module, arguments: Arguments) -> None:
    """One training step; the gradients of the parameters stay as they were."""
    loss = loss_of(call_root(module, arguments))
    gradients_by_backward([get_gradient_edge(loss)], [], [torch.ones_like(loss)], list(module.parameters()))


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Make a folder that doesn't exist yet, for the files that the block writes; without one, it is removed again."""
    try:
        path.mkdir(parents=True)
        yield path
    except OSError as error:
        raise BundleError(f"The profile couldn't be written to {path}: {error.strerror or error}.") from error
    finally:
        # Fails if the block wrote a file.
        with suppress(OSError):
            path.rmdir()


def write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, allow_nan=False) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------ memory in training


def peak_memory_of(
    root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], step: Callable[[], object]
) -> PeakMemory:
    """Run one training step, and attribute the tensors that are alive at its peak.

    Args:
        root, args, kwargs: the call of the step; their tensors aren't counted.
        step: runs forward and backward pass.

    Hooks on saved tensors would tell which module saves a tensor. But insert-checkpoints keeps everything if there are
    any, so that this would be another step.
    """
    owners = _Owners(root)
    live = LiveBytes(without=there_before(root, args, kwargs))
    live.when_made, live.when_gone = owners.made, owners.gone
    try:
        with intercepted_calls(root, owners.around), live:
            step()
    finally:
        live.when_made = live.when_gone = None
    return owners.at_peak(live.sizes)


class _Owners:
    """Records when each storage is made and freed, and the module that makes it."""

    def __init__(self, root: nn.Module) -> None:
        self._paths = paths_of(root)
        self._running: list[str] = []
        # By the number of a storage; None outside of the modules.
        self._makers: list[str | None] = []
        # The numbers of the storages that are made, and the complements (~number) of those that are freed.
        self._events: list[int] = []

    def around(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._running.append(self._paths[id(module)])
        try:
            return forward(*args, **kwargs)
        finally:
            self._running.pop()

    def made(self, number: int) -> None:
        self._makers.append(self._running[-1] if self._running else None)
        self._events.append(number)

    def gone(self, number: int) -> None:
        self._events.append(~number)

    def at_peak(self, sizes: list[int]) -> PeakMemory:
        total = peak = end = 0
        for position, event in enumerate(self._events, 1):
            total += sizes[event] if event >= 0 else -sizes[~event]
            if total > peak:
                peak, end = total, position
        alive = Counter(event if event >= 0 else ~event for event in self._events[:end])
        held: Counter[str] = Counter()
        outside = 0
        for number, events in alive.items():
            owner = self._makers[number]
            if events == 2:
                continue  # made and freed
            if owner is None:
                outside += sizes[number]
            else:
                held[owner] += sizes[number]
        modules = tuple(ModuleBytes(module, size) for module, size in held.most_common() if size)
        return PeakMemory(peak, modules, outside)


# ------------------------------------------------------------------------------------------------------------ an export


@in_turn
def profile_export(
    original: nn.Module,
    optimized: nn.Module,
    samples: Samples,
    *,
    onnx: Path | None,
    inputs: Sequence[torch.Tensor],
    device: torch.device,
    directory: Path,
    progress: ProgressFunction,
) -> dict[str, Any]:
    """Profile inference before and after, at the example inputs, and write the profiles.

    Args:
        onnx: an ONNX file to profile too, if there is one.
        inputs: its inputs, in its order.
        directory: a folder that doesn't exist yet. It gets one Chrome trace of each, and `profile.json`.

    Returns:
        The content of `profile.json`: by "original", "optimized" and "onnx", the JSON of a `Profile`.
    """
    found: dict[str, Any] = {}
    with new_folder(directory) as folder:
        for number, (name, module) in enumerate((("original", original), ("optimized", optimized))):
            progress(Progress("profile", number, 3, name, name))
            trace = folder / f"{name}.trace.json"
            found[name] = profile_module(module, samples.given, "inference", device, trace=trace).to_json()
        if onnx is not None:
            progress(Progress("profile", 2, 3, "onnx", "onnx"))
            found["onnx"] = _profile_file(onnx, inputs, device, folder).to_json()
        write_json(folder / "profile.json", found)
    progress(Progress("profile", 3, 3, str(directory)))
    return found


def _profile_file(path: Path, inputs: Sequence[torch.Tensor], device: torch.device, folder: Path) -> Profile:
    seconds, nodes = profile_nodes(path, device, tuple(inputs), folder / "onnx.trace.json", runs=RUNS)
    spent: dict[Place, Spent] = {}
    for node in nodes:
        each = spent.setdefault((node.op_type, node.name), Spent(shapes=node.shapes))
        each.calls += 1
        each.seconds += node.seconds
    return Profile(seconds, operations_of(spent, seconds=seconds, runs=RUNS), device.type)


# ------------------------------------------------------------------------------------------------------------- as text


def profile_lines(profile: Mapping[str, Any], title: str, unit: str = "module") -> Iterator[str]:
    """The table of a profile in its JSON form: the ten most expensive operations, and the ten largest modules.

    Args:
        unit: the heading of the column with the modules, or with the nodes of a file.
    """
    run = "training step" if profile["mode"] == "training" else "run"
    yield f"{title}: {_milliseconds(profile['seconds'])} a {run} on {profile['device']}"
    operations = profile["operations"]
    kinds: Counter[str] = Counter()
    for each in operations:
        kinds[each["name"]] += each["share"]
    if kinds:
        yield f"mostly {', '.join(f'{name} {_percent(share)}' for name, share in kinds.most_common(_MOST_NAMED))}"
    rows = [
        (_percent(row["share"]), _milliseconds(row["seconds"]), str(row["calls"]), row["name"], row["where"])
        for row in profile_rows(profile)
    ]
    yield from _aligned(("share", "time", "calls", "operation", unit), rows)
    if (memory := profile["peak_memory"]) is not None:
        yield ""
        yield from _memory_lines(memory)


def _memory_lines(memory: Mapping[str, Any]) -> Iterator[str]:
    total, modules = memory["bytes"], memory["modules"]
    yield f"peak memory: {total:,} bytes, without parameters, buffers and inputs"
    groups: dict[tuple[str, int], list[str]] = {}
    for each in modules:
        groups.setdefault((without_numbers(each["module"]), each["bytes"]), []).append(each["module"])
    held = [(size * len(paths), len(paths), one_path(paths)) for (_, size), paths in groups.items()]
    held.sort(key=lambda row: -row[0])
    rows = held[:_SHOWN]
    if others := held[_SHOWN:]:
        rows.append((sum(size for size, _, _ in others), sum(count for _, count, _ in others), "others"))
    cells = [(_percent(size / total), f"{size:,}", str(count), path) for size, count, path in rows]
    if outside := memory["outside"]:
        cells.append((_percent(outside / total), f"{outside:,}", "", "loss and gradients"))
    yield from _aligned(("share", "bytes", "modules", "module"), cells)


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Align the rows; the first three columns to the right."""
    widths = [max(len(row[number]) for row in (columns, *rows)) for number in range(len(columns))]
    for row in (columns, *rows):
        cells = [
            cell.rjust(width) if number < 3 else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _milliseconds(seconds: float) -> str:
    shown = 1000 * seconds
    return f"{shown:.{0 if shown >= 100 else 1 if shown >= 10 else 2 if shown >= 1 else 3}f} ms"
