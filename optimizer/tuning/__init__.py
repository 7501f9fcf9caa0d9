"""Measure the ways to run a model, prove their accuracy, and recommend one."""

from optimizer.tuning.benchmark import Benchmark, Latency, PeakMemory, Ratio, in_turn, interleaved, ratio
from optimizer.tuning.calibration import CalibrationCalls, calibration_of, evaluation_of, rows_in, some_of, spread
from optimizer.tuning.choice import bench_bundle, choose, read_choices
from optimizer.tuning.soak import soak_bundle
from optimizer.tuning.throughput import bench_throughput

__all__ = [
    "Benchmark",
    "CalibrationCalls",
    "Latency",
    "PeakMemory",
    "Ratio",
    "bench_bundle",
    "bench_throughput",
    "calibration_of",
    "choose",
    "evaluation_of",
    "in_turn",
    "interleaved",
    "ratio",
    "read_choices",
    "rows_in",
    "soak_bundle",
    "some_of",
    "spread",
]
