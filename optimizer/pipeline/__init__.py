"""`optimize` as a pipeline: passes as transactions, each checked where it changed something, then the whole."""

from optimizer.pipeline.optimizing import notes_on_modes, optimized
from optimizer.pipeline.provenance import Provenance, detach, kind_of, provenance_of, report_of

__all__ = [
    "Provenance",
    "detach",
    "kind_of",
    "notes_on_modes",
    "optimized",
    "provenance_of",
    "report_of",
]
