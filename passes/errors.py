"""The errors of the passes.

PassesError
├── UnknownPass            no pass of that name
├── DuplicatePass          two owners register one name
├── PassOptionError        an option that the pass doesn't have, or a value that doesn't fit it
├── PassOrderError         a pass that needs a graph stands behind one that leaves none
├── RequirementNotMet      a pass was asked for by name and can't be had here (no compiler, no example inputs)
└── UnseenCall             a rewritten module is called in a way that its graph wasn't made for
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
    """A pass was asked for by name and can't be had here."""


class UnseenCall(PassesError, RuntimeError):
    """A rewritten module is called in a way that its graph wasn't made for.

    Attributes:
        pair: the paths of the two that were folded together, where it is about their way from the first to the second.
        rewritten: the path of the module, where it is about a call of that one's forward.
    """

    def __init__(self, message: str, pair: tuple[str, str] | None = None, rewritten: str | None = None) -> None:
        super().__init__(message)
        self.pair = pair
        self.rewritten = rewritten
