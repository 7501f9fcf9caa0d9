"""How far a user's own metric drops from the original to a candidate, with a bound that holds at a stated confidence."""

from optimizer.accuracy.drops import PairedTest, Search
from optimizer.accuracy.evaluation import Evaluation
from optimizer.accuracy.rows import RowDims
from optimizer.accuracy.scores import Aggregate, Evaluate, EvaluateError, NotScored, Task, check_evaluate, misfit

__all__ = [
    "Aggregate",
    "Evaluate",
    "EvaluateError",
    "Evaluation",
    "NotScored",
    "PairedTest",
    "RowDims",
    "Search",
    "Task",
    "check_evaluate",
    "misfit",
]
