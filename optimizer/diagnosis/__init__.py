"""Diagnose a model: what good practice would change in its own code, with the line, the effect and the remedy."""

from optimizer.diagnosis.diagnosing import RULES, diagnose
from optimizer.diagnosis.findings import LEVELS, Diagnosis, Finding, diagnosis_lines

__all__ = ["LEVELS", "RULES", "Diagnosis", "Finding", "diagnose", "diagnosis_lines"]
