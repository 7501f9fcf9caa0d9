"""Measure, prove and combine what makes a training step faster or smaller."""

from optimizer.training.results import Candidate, TrainingTuning
from optimizer.training.setup import Setup
from optimizer.training.showing import TABLE_COLUMNS, left_to_the_loop, read_setup, recommendation, table_rows
from optimizer.training.tuner import tune_training

__all__ = [
    "TABLE_COLUMNS",
    "Candidate",
    "Setup",
    "TrainingTuning",
    "left_to_the_loop",
    "read_setup",
    "recommendation",
    "table_rows",
    "tune_training",
]
