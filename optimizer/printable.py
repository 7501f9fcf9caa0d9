"""Text that only says what it says: names that the user didn't choose can't move the cursor or begin a new line."""

from collections.abc import Mapping
from typing import Any


def printable(text: str) -> str:
    """The text with every character that isn't shown as itself (line breaks, escape sequences, directions) as `\\x1b`."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def all_printable(value: Any) -> Any:
    """A JSON document with every text in it printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(str(key)): all_printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [all_printable(item) for item in value]
    return value
