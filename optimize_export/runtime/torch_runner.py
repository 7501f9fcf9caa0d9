"""Run a file in torch: TorchScript, torch.export's programs, compiled packages, and formats of other packages."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

import numpy
import torch

from optimize_export.errors import DeviceError
from optimize_export.gpu_settings import GpuSettings
from optimize_export.runtime.cpus import own_threads, quota_threads
from optimize_export.runtime.cuda_graphs import Graphed
from optimize_export.runtime.route import Route
from optimize_export.shadowing import our_package


class TorchRunner:
    """A file that torch runs. Calls may run in several threads at once.

    `threads` of the route is set for the process, since torch has one pool of threads; without it, torch's threads are cut
    to the quota of the process's control group, unless OMP_NUM_THREADS sets them. On a GPU, each call also sets the
    process's TF32 settings and `cudnn.benchmark`, and leaves them so: another thread may run meanwhile.
    """

    def __init__(self, path: Path, route: Route, device: str) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise DeviceError("The bundle is to run on a GPU, but torch finds none here: pass device='cpu'.")
        settings = route.settings
        keep_to_quota(settings.get("threads"))
        in_graphs = bool(settings.get("cuda_graph")) and device == "cuda"
        with _one_at_a_time:
            loaded = _load(path, route, device, in_graphs=in_graphs)
        self.device = device
        self.placement = loaded.placement
        self.settings = dict(loaded.settings)
        tf32 = bool(settings.get("tf32"))
        self._gpu_settings = GpuSettings(tf32, tf32, bool(settings.get("cudnn_benchmark")))
        if device == "cuda":
            self.settings["torch_tf32"] = "on" if tf32 else "off"
        self.graphs = Graphed(loaded) if in_graphs else None
        self._run: Any = loaded if self.graphs is None else self.graphs

    def __call__(self, *tensors: Any) -> tuple[Any, ...]:
        arrays = [each for each in tensors if isinstance(each, numpy.ndarray)]
        given = tensors
        if arrays:
            given = tuple([_of_numpy(each) if isinstance(each, numpy.ndarray) else each for each in tensors])
        # The loaded file runs without gradients, but not in inference mode: nobody can write to the tensors of that mode
        # or train with them afterwards.
        outputs = self._run(*given) if self.device == "cpu" else self._on_gpu(given)
        as_numpy = arrays and len(arrays) == len(tensors)
        return tuple([output.numpy(force=True) for output in outputs]) if as_numpy else outputs

    def _on_gpu(self, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        # Those of the proof; other code of the process may have changed them.
        self._gpu_settings.put_in_force()
        home = given[0].device if given else torch.device("cuda")
        # From pinned memory, a copy doesn't wait for the GPU. torch keeps the pinned memory for the next call.
        there = [each if each.is_cuda else each.pin_memory().to("cuda", non_blocking=True) for each in given]
        with torch.no_grad():
            outputs = self._run(*there)
        if home.type == "cuda":
            return tuple(outputs)
        back = tuple(output.to("cpu", non_blocking=True) for output in outputs)
        torch.cuda.current_stream().synchronize()
        return back


# While ours is imported, a user's own `exporters` is gone; and torch reads one pt2 file at a time.
_one_at_a_time = Lock()


def keep_to_quota(chosen: object = None) -> None:
    """Set torch's threads to those chosen; else cut them to the quota of this process, unless OMP_NUM_THREADS sets them."""
    threads = own_threads(chosen, None if os.environ.get("OMP_NUM_THREADS") else quota_threads())
    if threads is not None and (chosen is not None or threads < torch.get_num_threads()):
        torch.set_num_threads(threads)


def _load(path: Path, route: Route, device: str, *, in_graphs: bool) -> Any:
    # As `exported_format` of the registry, whose import takes long.
    name = route.format.removesuffix("-float16").removesuffix("-bfloat16")
    if name not in _EXPORTERS:
        return _registry().load_artifact(route.format, path, device)
    exporter = _exporter(name)
    if name == "torchscript" and route.settings.get("freeze"):
        return exporter.frozen(path, device)
    if name == "aoti" and in_graphs:
        return exporter.for_graphs(path, device)
    return exporter.load(path, device)


# Each in the module of its name. The others import torch.onnx and more, which files of these formats don't need.
_EXPORTERS = {"torchscript": "TorchScriptExporter", "pt2": "Pt2Exporter", "aoti": "AotiExporter"}


@cache
def _exporter(name: str) -> Any:
    with our_package("exporters"):
        return getattr(import_module(f"exporters.{name}"), _EXPORTERS[name])


@cache
def _registry() -> Any:
    with our_package("exporters"):
        return import_module("exporters.registry")


def _of_numpy(array: numpy.ndarray) -> torch.Tensor:
    flags = array.flags
    # torch shares the memory. It warns if it may not write there, and refuses negative strides (a flipped image).
    shared = flags.c_contiguous and flags.writeable
    return torch.from_numpy(array if shared else array.copy())
