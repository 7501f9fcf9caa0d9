"""Measure the ways to run a model, prove their accuracy, and recommend one."""

from optimizer.tuning.benchmark import Benchmark, Candidate, Figure, Refused, recommendation
from optimizer.tuning.choice import choose, read_choices
from optimizer.tuning.files import Files, bench_bundle
from optimizer.tuning.lossy import CalibrationCall, calibration_of
from optimizer.tuning.timing import Latency, PeakMemory, Ratio, available_memory, settle

__all__ = [
    "Benchmark",
    "CalibrationCall",
    "Candidate",
    "Figure",
    "Files",
    "Latency",
    "PeakMemory",
    "Ratio",
    "Refused",
    "available_memory",
    "bench_bundle",
    "calibration_of",
    "choose",
    "read_choices",
    "recommendation",
    "settle",
]
