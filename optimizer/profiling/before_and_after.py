"""Profile what an export starts from and what it makes: the original, the optimized module, and the ONNX file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exporters.onnx_session import profile_nodes
from optimizer.model import Samples, in_turn
from optimizer.profiling.module_runs import RUNS
from optimizer.profiling.operations import Place, Spent, operations_of
from optimizer.profiling.profiles import Profile
from optimizer.profiling.profiling import new_folder, profile_module, write_json
from optimizer.report import Progress, ProgressFunction


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

    Raises:
        LoadError: a module raises.
        BundleError: the folder can't be written.
    """
    found: dict[str, Any] = {}
    with new_folder(directory) as folder:
        for number, (name, module) in enumerate((("original", original), ("optimized", optimized))):
            progress(Progress("profile", number, 3, name, name))
            trace = _trace(folder, name)
            found[name] = profile_module(module, samples.given, "inference", device, trace=trace).to_json()
        if onnx is not None:
            progress(Progress("profile", 2, 3, "onnx", "onnx"))
            found["onnx"] = _profile_file(onnx, inputs, device, folder).to_json()
        write_json(folder / "profile.json", found)
    progress(Progress("profile", 3, 3, str(directory)))
    return found


def _profile_file(path: Path, inputs: Sequence[torch.Tensor], device: torch.device, folder: Path) -> Profile:
    seconds, nodes = profile_nodes(path, device, tuple(inputs), _trace(folder, "onnx"), runs=RUNS)
    spent: dict[Place, Spent] = {}
    for node in nodes:
        each = spent.setdefault((node.op_type, node.name), Spent(shapes=node.shapes))
        each.calls += 1
        each.seconds += node.seconds
    return Profile(seconds, operations_of(spent, seconds=seconds, runs=RUNS), device.type)


def _trace(folder: Path, name: str) -> Path:
    return folder / f"{name}.trace.json"
