"""Run the artifacts of a bundle. An ONNX file needs numpy and onnxruntime only, not torch."""

from optimizer.runtime.loading import LoadedModel, Runner, load, open_route
from optimizer.runtime.openvino_runner import openvino_precisions
from optimizer.runtime.processor import processor, usable_cpus
from optimizer.runtime.route import SETTINGS, Route, Setting, is_installed, own_routes, require_runtime

__all__ = [
    "SETTINGS",
    "LoadedModel",
    "Route",
    "Runner",
    "Setting",
    "is_installed",
    "load",
    "open_route",
    "openvino_precisions",
    "own_routes",
    "processor",
    "require_runtime",
    "usable_cpus",
]
