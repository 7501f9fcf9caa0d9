"""Measure the ways to run a model, prove their accuracy, and recommend one."""

from optimizer.tuning.benchmark import Benchmark, Latency, PeakMemory, Ratio, interleaved, ratio
from optimizer.tuning.choice import bench_bundle, choose, read_choices
from optimizer.tuning.lossy import CalibrationCall, calibration_of, evaluation_of

__all__ = [
    "Benchmark",
    "CalibrationCall",
    "Latency",
    "PeakMemory",
    "Ratio",
    "bench_bundle",
    "calibration_of",
    "choose",
    "evaluation_of",
    "interleaved",
    "ratio",
    "read_choices",
]
