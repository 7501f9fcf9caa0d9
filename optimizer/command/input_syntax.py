"""The syntax of `--input`, which is checked before torch is imported."""

import math
import re
from typing import NoReturn

from optimize_export.errors import UsageError

INPUT_EXAMPLE = "2x3x224x224, float32[2,3,224,224], mask=bool[2,128] or ids=int64[2,128]:0..30000"

_SIZES = re.compile(r"[0-9]+(x[0-9]+)*")
_TYPED = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[^\]]*)\]")
_MOST_ELEMENTS = 2**40
_MOST_DIGITS = 100


def parts_of_input(text: str) -> tuple[str | None, str, tuple[int, ...], str | None]:
    """The name, the dtype as it is written, the shape and the range of one `--input`; None for no name or range.

    Raises:
        UsageError: it quotes the text, and shows a valid example.
    """
    head, equals, rest = text.strip().partition("=")
    name, body = (head.strip(), rest.strip()) if equals else (None, head)
    if name is not None and not name.isidentifier():
        refuse_input(text, f"{name!r} is not the name of an argument")
    body, colon, range_text = body.partition(":")
    dtype_name, sizes = _split_body(text, body)
    if any(len(size) > _MOST_DIGITS for size in sizes):
        refuse_input(text, "one of its sizes is too large")
    shape = tuple(map(int, sizes))
    if 0 in shape:
        refuse_input(text, "every size must be 1 or more")
    if math.prod(shape) > _MOST_ELEMENTS:
        refuse_input(text, f"{math.prod(shape)} elements are too many")
    return name, dtype_name, shape, range_text if colon else None


def refuse_input(text: str, reason: str) -> NoReturn:
    raise UsageError(f"--input {text!r}: {reason}; a valid one looks like {INPUT_EXAMPLE}.")


def _split_body(text: str, body: str) -> tuple[str, list[str]]:
    if _SIZES.fullmatch(body):
        return "float32", body.split("x")
    typed = _TYPED.fullmatch(body)
    if typed is None:
        refuse_input(text, "the syntax is invalid")
    sizes = [size.strip() for size in typed["shape"].split(",")] if typed["shape"].strip() else []
    wrong = [size for size in sizes if not re.fullmatch("[0-9]+", size)]
    if wrong:
        refuse_input(text, f"{wrong[0]!r} is not a size; every size must be 1 or more")
    return typed["dtype"], sizes
