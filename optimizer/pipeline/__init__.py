"""`optimize` as a pipeline: passes as transactions, each checked where it changed something, then the whole."""

from optimizer.pipeline.optimizing import notes_on_modes, optimize_model
from optimizer.pipeline.results import Provenance, class_of_pass, detach, provenance_of, report_of

__all__ = [
    "Provenance",
    "class_of_pass",
    "detach",
    "notes_on_modes",
    "optimize_model",
    "provenance_of",
    "report_of",
]
