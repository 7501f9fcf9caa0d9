"""Profile a module, or an export before and after: its time by operation, and in training its memory by module."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from exporters.onnx_session import profile_nodes
from optimize_export.errors import BundleError, UsageError
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
from optimizer.profiling.operations import RUNS, Arguments, Place, Spent, call_root, operations_of, profile_runs
from optimizer.profiling.peak_memory import PeakMemory, peak_memory_of
from optimizer.profiling.profiles import Profile
from optimizer.report import Progress, ProgressFunction
from optimizer.torch_private import is_profiling
from passes.checkpointing.profile import NoProfile, loss_of


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
    """Write plain data as strict JSON."""
    path.write_text(json.dumps(data, indent=2, allow_nan=False) + "\n", encoding="utf-8")


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
