"""Run the artifacts of a bundle. An ONNX file needs numpy and onnxruntime only, not torch."""

from optimize_export.runtime.batching import BatchedModel, Batching, QueueFull, is_batched
from optimize_export.runtime.cpus import processor, usable_cpus
from optimize_export.runtime.loading import LoadedModel, load
from optimize_export.runtime.openvino_runner import openvino_precisions
from optimize_export.runtime.route import (
    SETTINGS,
    Route,
    Runner,
    Setting,
    is_installed,
    open_route,
    own_routes,
    require_runtime,
)

__all__ = [
    "SETTINGS",
    "BatchedModel",
    "Batching",
    "LoadedModel",
    "QueueFull",
    "Route",
    "Runner",
    "Setting",
    "is_batched",
    "is_installed",
    "load",
    "open_route",
    "openvino_precisions",
    "own_routes",
    "processor",
    "require_runtime",
    "usable_cpus",
]
