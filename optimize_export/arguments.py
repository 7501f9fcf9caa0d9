"""Checks of arguments that `load`, `export` and the command share."""

import difflib
import re
from collections.abc import Iterable

from optimize_export.errors import UsageError


def other_gpu(device: str) -> str:
    """How to take a GPU by its number, as a clause; empty for any other device."""
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number.isdecimal():
        return ""
    return f"set CUDA_VISIBLE_DEVICES={number} before Python starts, and use 'cuda'"


def no_such_pass(name: str, known: Iterable[str]) -> str:
    """The sentences for a pass that isn't among the known ones."""
    if near := difflib.get_close_matches(name, [*known], 1):
        hint = f"did you mean {near[0]!r}?"
    else:
        hint = f"the passes are: {', '.join(known)}."
    return f"There is no pass {name!r}: {hint} A pass of your own must be installed (docs/own-passes.md, Publish)."


def parse_digest(option: str, text: str) -> str:
    """Parse a SHA-256 and convert it to lower case; raise `UsageError` for anything else."""
    if not isinstance(text, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", text.strip()):
        raise UsageError(
            f"{option}: {text!r} is not a SHA-256, which has 64 hexadecimal digits; use the one that the export of "
            "the bundle printed."
        )
    return text.strip().lower()
