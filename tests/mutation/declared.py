"""The guards whose removal no test can detect, each with the reason.

The keys are `<file>: <function>: <sentence or code>`, as in `Guard.name`.
"""

DECLARED: dict[str, str] = {}
