"""Measure the ways to run a model, prove their accuracy, and recommend one."""

from optimizer.tuning.benchmark import (
    EAGER,
    Benchmark,
    Candidate,
    Figure,
    Opened,
    Refused,
    Run,
    attempted,
    budget_text,
    chosen,
    dropped_figure,
    opened_all,
    recommendation,
    timed,
)
from optimizer.tuning.bundle_bench import bench_bundle
from optimizer.tuning.files import Files, calling, candidate_name, frozen, open_in_child
from optimizer.tuning.memory import PeakMemory, available_memory
from optimizer.tuning.timing import Latency, Ratio, interleaved, ratio, settle

__all__ = [
    "EAGER",
    "Benchmark",
    "Candidate",
    "Figure",
    "Files",
    "Latency",
    "Opened",
    "PeakMemory",
    "Ratio",
    "Refused",
    "Run",
    "attempted",
    "available_memory",
    "bench_bundle",
    "budget_text",
    "calling",
    "candidate_name",
    "chosen",
    "dropped_figure",
    "frozen",
    "interleaved",
    "open_in_child",
    "opened_all",
    "ratio",
    "recommendation",
    "settle",
    "timed",
]
