"""The guards that no test can miss, each with the reason: `<file>: <function>: <sentence or code>`, as `Guard.name`."""

DECLARED: dict[str, str] = {
    "passes/program/tensors.py: value: name in owner._parameters and name not in owner.__dict__": (
        "the look by getattr, which it spares, finds the same None"
    ),
}
