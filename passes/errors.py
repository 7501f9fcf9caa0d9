"""The errors of the passes.

PassesError
├── UnknownPass            no pass of that name
├── DuplicatePass          two owners register one name
├── PassOptionError        an option that the pass doesn't have, or a value that doesn't fit it
├── PassOrderError         a pass that needs a graph stands behind one that leaves none
├── RequirementNotMet      a pass was asked for by name and can't be had here (no compiler, no example inputs)
└── UnseenCall             what was folded is used in a way that no run showed
"""


class PassesError(Exception):
    """Base of the errors of the passes; the message is one sentence for the user."""


class UnknownPass(PassesError):
    """No pass of that name."""


class DuplicatePass(PassesError):
    """Two owners register one name."""


class PassOptionError(PassesError):
    """An option that the pass doesn't have, or a value that doesn't fit it."""


class PassOrderError(PassesError):
    """A pass that needs a graph stands behind one that leaves none."""


class RequirementNotMet(PassesError):
    """A pass that was named can't do its job here: raise it in `check` or `rewrite`, with one sentence that says what to do."""


class UnseenCall(PassesError, RuntimeError):
    """What was folded is used in a way that no run showed.

    Attributes:
        pair: the paths of the two that were folded together, where it is about their way from the first to the second.
    """

    def __init__(self, message: str, pair: tuple[str, str] | None = None) -> None:
        super().__init__(message)
        self.pair = pair
