"""Measure, prove and combine what makes a training step faster or smaller."""

from optimizer.training.results import Candidate, TrainingTuning
from optimizer.training.setup import Setup

__all__ = ["Candidate", "Setup", "TrainingTuning"]
