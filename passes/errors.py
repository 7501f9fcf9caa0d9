"""The errors of the passes.

    PassesError
    ├── UnknownPass            there is no pass of that name
    ├── DuplicatePass          two packages register a pass of the same name
    ├── PassOptionError        the pass doesn't have the option, or the value is invalid
    ├── PassOrderError         a pass comes after one that must be last
    ├── RequirementNotMet      a requested pass can't run here (no compiler, no example inputs)
    └── PlansDiffer            the ranks of a distributed training have different checkpoints

Each message is one sentence for the user.
"""


class PassesError(Exception):
    """Base of the errors of the passes."""


class UnknownPass(PassesError):
    """There is no pass of that name."""


class DuplicatePass(PassesError):
    """Two packages register a pass of the same name."""


class PassOptionError(PassesError):
    """The pass doesn't have the option, or the value is invalid."""


class PassOrderError(PassesError):
    """A pass comes after one that must be last, for example because it leaves no graph to work on."""


class RequirementNotMet(PassesError):
    """A requested pass can't run here. Raise it in `check` or `rewrite`, with one sentence that says what to do."""


class PlansDiffer(PassesError, RuntimeError):
    """The ranks of a distributed training have different checkpoints."""
