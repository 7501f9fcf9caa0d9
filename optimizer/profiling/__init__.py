"""Profile a model or an ONNX file: its most expensive operations with their modules, and its memory in training."""

from optimizer.profiling.operations import Operation
from optimizer.profiling.peak_memory import ModuleBytes, PeakMemory
from optimizer.profiling.profiles import Profile, profile_lines
from optimizer.profiling.profiling import profile, profile_export

__all__ = [
    "ModuleBytes",
    "Operation",
    "PeakMemory",
    "Profile",
    "profile",
    "profile_export",
    "profile_lines",
]
