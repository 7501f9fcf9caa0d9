"""The guards that no test can miss, each with the reason: `<file>: <function>: <sentence or code>`, as `Guard.name`."""

DECLARED: dict[str, str] = {}
