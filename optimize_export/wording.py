"""Short texts for messages: errors on one line, lists, and the names of types and dtypes."""

import re
from collections.abc import Sequence

import torch

_MOST_NAMED = 5
_LONGEST_QUOTE = 400
# A message that goes on with a place, as in "could not be resolved. At" before the lines of a file.
_BEFORE_A_PLACE = re.compile(r"[.,:;]?\s+(?:at|in|from|here|see|where)\s*:?$", re.IGNORECASE)
# The message of torch's CPU allocator; the size is in bytes.
_NO_MEMORY = re.compile(r"(?:can't allocate memory|not enough memory): you tried to allocate (\d+) bytes")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if there is no message.

    If memory ran out, the text says so instead.
    """
    if lack := lack_of_memory(error):
        return lack
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def error_summary(error: BaseException) -> str:
    """The type of an error and the first line of its message.

    If memory ran out, the text says so instead.
    """
    if lack := lack_of_memory(error):
        return lack
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return f"{type(error).__name__}: {first_clause(lines).rstrip('.:')}"


def one_line(error: BaseException) -> str:
    """The whole message, without line breaks."""
    return " ".join(str(error).split())


def quote(error: BaseException, *, with_type: bool = False) -> str:
    """The message on one line, without its final full stop and TorchScript's traceback, cut after 400 characters.

    If memory ran out, the text says so, and how much was requested.
    """
    if lack := lack_of_memory(error):
        return lack
    message = _message(error).strip()
    if "TorchScript interpreter" in message:
        # The cause is on the last line, after the traceback of the interpreter.
        message = message.splitlines()[-1]
    text = " ".join(message.split()).rstrip(".")
    if len(text) > _LONGEST_QUOTE:
        text = text[:_LONGEST_QUOTE].rstrip() + "…"
    if with_type:
        return f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text or type(error).__name__


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the `__str__` of a user's error may raise anything
        return ""


def lack_of_memory(error: BaseException) -> str:
    """Say that memory ran out, and how much was requested; empty for any other error."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of GPU memory"
    asked = _NO_MEMORY.search(_message(error)) if isinstance(error, RuntimeError) else None
    if asked is not None:
        return f"out of memory while allocating {int(asked[1]) / 2**30:,.1f} GiB"
    return "out of memory" if isinstance(error, MemoryError) else ""


def listed(names: Sequence[str], most: int = _MOST_NAMED) -> str:
    """The first `most` names, and the number of the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def append_once(sentences: list[str], sentence: str) -> None:
    """Append a sentence that isn't there yet."""
    if sentence not in sentences:
        sentences.append(sentence)


def type_name(value: object) -> str:
    return "None" if value is None else type(value).__name__


def a_type(value: object) -> str:
    """The type with its article: "an int", "a list", "None"."""
    name = type_name(value)
    return name if value is None else f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def described(tensor: torch.Tensor) -> str:
    """The dtype and the shape: "float32[2, 3]"."""
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def first_clause(lines: list[str]) -> str:
    """The first line of a message of torch, or the line with its cause, without words that belong to the next line."""
    line = lines[0] if lines else ""
    if "TorchScript interpreter" in line:
        return lines[-1]
    if len(lines) == 1:
        return line
    before_a_place = _BEFORE_A_PLACE.sub("", line)
    if before_a_place != line:
        return before_a_place
    return f"{line} {lines[1]}" if line.endswith(":") and not lines[1].startswith("File ") else line
