"""Profile a model or an ONNX file: its most expensive operations with their modules, and its memory in training."""

from optimizer.profiling.operations import Operation
from optimizer.profiling.profiling import ModuleBytes, PeakMemory, Profile, profile, profile_export, profile_lines

__all__ = [
    "ModuleBytes",
    "Operation",
    "PeakMemory",
    "Profile",
    "profile",
    "profile_export",
    "profile_lines",
]
