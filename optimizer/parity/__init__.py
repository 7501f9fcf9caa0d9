"""Proof that a candidate computes what the original computes. Measured first, judged second.

The truth is the original itself, with every torch call raised to float64. The *noise* of an output is the larger of two
measured numbers: the original's own error against that truth, and its response to a change of one ulp in its inputs and
weights. A candidate's error may be `FACTOR` times the noise, both in the largest error and in the root mean square,
pooled over all batch sizes and draws. There is no other tolerance unless the user gives one. docs/proof.md explains the
rule.

    reference = measure_reference(model, Samples((x,)))       # runs the original, once
    measurement = reference.compare(candidate)                # runs a candidate; plain data, JSON both ways
    report = judge(measurement)                               # runs nothing
"""

from optimizer.parity.accuracy import WITHIN_BUDGET, Accuracy, Metric, accuracy_between, accuracy_of, accuracy_text
from optimizer.parity.carried_state import describe_carried_state, measure_in_sequence
from optimizer.parity.golden import GoldenEntry, compare_golden, golden_entries, golden_entry
from optimizer.parity.observe import Flatten, Observation, RecordedRuns, input_names, observe
from optimizer.parity.orders import RowOrder
from optimizer.parity.outputs import BATCH_SIZES, OriginalOutputs, check_parity, measure_reference
from optimizer.parity.reference import Reference, independent_rows, outputs_on
from optimizer.parity.regions import (
    RegionParity,
    check_change,
    compare_region,
    judged_values,
    reference_at,
    region_at,
    rerun,
)
from optimizer.parity.results import (
    CallErrors,
    Measurement,
    OutputNoise,
    OutputParity,
    ParityReport,
    from_json,
    to_json,
)
from optimizer.parity.rows import Rows
from optimizer.parity.verdict import FACTOR, Tolerance, allowed_share, by_output, judge, why_vacuous

__all__ = [
    "BATCH_SIZES",
    "FACTOR",
    "WITHIN_BUDGET",
    "Accuracy",
    "CallErrors",
    "Flatten",
    "GoldenEntry",
    "Measurement",
    "Metric",
    "Observation",
    "OriginalOutputs",
    "OutputNoise",
    "OutputParity",
    "ParityReport",
    "RecordedRuns",
    "Reference",
    "RegionParity",
    "RowOrder",
    "Rows",
    "Tolerance",
    "accuracy_between",
    "accuracy_of",
    "accuracy_text",
    "allowed_share",
    "by_output",
    "check_change",
    "check_parity",
    "compare_golden",
    "compare_region",
    "describe_carried_state",
    "from_json",
    "golden_entries",
    "golden_entry",
    "independent_rows",
    "input_names",
    "judge",
    "judged_values",
    "measure_in_sequence",
    "measure_reference",
    "observe",
    "outputs_on",
    "reference_at",
    "region_at",
    "rerun",
    "to_json",
    "why_vacuous",
]
