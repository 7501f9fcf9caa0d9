"""Make TorchScript archives with non-ASCII names of classes, files or attributes readable for torch.

torch writes such names but can't read them: its parser accepts only ASCII identifiers, and it escapes the bytes of an
attribute's name as signed numbers, `"\\0)+"` for the byte 0xc3.
"""

import re

# A text in double quotes, or non-ASCII letters outside any text.
_TEXT_OR_LETTERS = re.compile(rb'"(?:\\.|[^"\\])*"|[\x80-\xff]+', re.DOTALL)
_LETTERS = re.compile(rb"[\x80-\xff]+")
# An escaped byte has three octal digits. The digits of a negative number run from "0" down to ")".
_ESCAPE = re.compile(rb"\\([)-7]{3}|.)", re.DOTALL)
# The opcode that names a class in a pickle. The classes of a TorchScript module are below `__torch__`.
_CLASS = re.compile(rb"c__torch__\.[^\n]*\n[^\n]*\n")


def ascii_name(name: str) -> str:
    """The name of a record or class in ASCII, with `_e9_` for an é."""
    return _LETTERS.sub(_spelled, name.encode()).decode()


def readable(name: str, content: bytes) -> bytes:
    """The content of a record (source or pickled attributes), readable for torch; attributes keep their names."""
    if name.endswith(".py"):
        return _TEXT_OR_LETTERS.sub(lambda found: _escaped(found) if found[0][:1] == b'"' else _spelled(found), content)
    return _CLASS.sub(lambda found: _LETTERS.sub(_spelled, found[0]), content)


def _spelled(letters: re.Match[bytes]) -> bytes:
    return "".join(f"_{ord(letter):x}_" for letter in letters[0].decode()).encode()


def _escaped(text: re.Match[bytes]) -> bytes:
    return _ESCAPE.sub(_octal, text[0])


def _octal(escape: re.Match[bytes]) -> bytes:
    if len(escape[1]) < 3:
        return escape[0]
    high, middle, low = (digit - ord("0") for digit in escape[1])
    return b"\\%03o" % (64 * high + 8 * middle + low & 0xFF)
