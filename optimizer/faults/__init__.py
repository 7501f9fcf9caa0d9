"""Diagnose a wrong result: find the module and the operation where it first diverges from the original."""

from optimizer.faults.locating import (
    Located,
    fault_of_runtime,
    locate_in_file,
    locate_in_module,
    locate_in_refused,
    suspect_calls,
)
from optimizer.faults.reproducing import write_reproduction

__all__ = [
    "Located",
    "fault_of_runtime",
    "locate_in_file",
    "locate_in_module",
    "locate_in_refused",
    "suspect_calls",
    "write_reproduction",
]
