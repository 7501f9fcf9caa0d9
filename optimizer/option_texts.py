"""Parse the texts of options: each function takes the option's name, for its error, and the text.

An option that may be repeated has several texts.
"""

import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from optimize_export.errors import LoadError, UsageError

# One number for all outputs, or one per output by its name in the files.
Tolerance = float | dict[str, float] | None


def parse_names(option: str, text: str) -> tuple[str, ...]:
    """Parse `"a,b"`; raise `UsageError` for an empty or repeated name."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UsageError(f"{option} {text!r} has an empty entry; separate the entries by single commas.")
    if twice := [part for part in dict.fromkeys(parts) if parts.count(part) > 1]:
        raise UsageError(f"{option} has {', '.join(twice)} twice.")
    return tuple(parts)


def whole_number(least: int, most: int, example: str) -> Callable[[str, str], int]:
    """Make a parser of whole numbers in this range; it raises `UsageError` for anything else."""

    def parse(option: str, text: str) -> int:
        # Python refuses to parse a number with thousands of digits.
        if not (text.isascii() and text.isdigit() and len(text) < 100 and least <= int(text) <= most):
            raise UsageError(
                f"{option}: {text!r} is not a whole number from {least} to {most}; use for example {example}."
            )
        return int(text)

    return parse


_batch_size = whole_number(1, 1 << 20, "1,2,3,5,8")


def parse_batch_sizes(option: str, text: str) -> tuple[int, ...]:
    """Parse `"1,2,3,5,8"`; raise `UsageError` unless all are different whole numbers from 1 to 2**20."""
    return tuple(_batch_size(option, part) for part in parse_names(option, text))


def above_zero(option: str, text: str) -> float:
    """Parse a finite number above 0; raise `UsageError` for anything else."""
    value = number_in(text)
    if not 0 < value < math.inf:
        raise UsageError(f"{option}: {text!r} is not a number above 0.")
    return value


_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(option: str, text: str) -> float:
    """Parse a time such as `20ms`, `90s` or `10m` into seconds; raise `UsageError` for anything else, and for 0."""
    found = _DURATION.fullmatch(text.strip())
    seconds = 0.0 if found is None else float(found[1]) * _SECONDS[found[2].lower()]
    if not 0 < seconds < math.inf:
        raise UsageError(f"{option}: {text!r} is not a time such as 20ms, 90s or 10m.")
    return seconds


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)


def parse_size(option: str, text: str) -> int:
    """Parse a size such as `16GiB`, `800 MB` or a number of bytes; raise `UsageError` for anything else, and for 0."""
    found = _SIZE.fullmatch(text.strip())
    prefix = "" if found is None else (found[2] or "").lower()
    base = 1024 if prefix.endswith("i") else 1000
    size = 0 if found is None else int(float(found[1]) * base ** (" kmgt".index(prefix[0]) if prefix else 0))
    if not size:
        raise UsageError(f"{option}: {text!r} is not a size; use for example 16GiB, 800MB or a number of bytes.")
    return size


def number_in(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def path_of(what: str) -> Callable[[str, str], Path]:
    """Make a parser of paths. A shell expands no `~` after `=`, and none is there for a config: so it is expanded here."""

    def parse(option: str, text: str) -> Path:
        if not text.strip():
            raise UsageError(f"{option} names no {what}: add one, or leave out the option.")
        return Path(os.path.expanduser(text))

    return parse


def file_ending(*endings: str) -> Callable[[str, str], Path]:
    """Make a parser of paths with one of these suffixes, so that a mistyped call replaces no other file."""

    def parse(option: str, text: str) -> Path:
        path = path_of("file")(option, text)
        if not path.name.endswith(endings):
            raise UsageError(f"{option}: {text!r} doesn't end with {' or '.join(endings)}.")
        return path

    return parse


def parse_files(option: str, texts: Sequence[str]) -> tuple[Path, ...]:
    return tuple(path_of("file")(option, text) for text in texts)


def parse_passes(option: str, text: str) -> str:
    if not text.strip():
        raise UsageError(f"{option} names no pass: list passes, use none for no pass, or leave out the option.")
    return "" if text.strip() == "none" else text


def parse_cluster(option: str, text: str) -> str:
    if text != "ray" and not re.fullmatch(r"ray://[^\s/]+:[0-9]{1,5}", text):
        raise UsageError(f"{option}: {text!r} is neither ray nor the address of a cluster, such as ray://head:10001.")
    return text


def parse_shard(option: str, text: str) -> tuple[int, int]:
    """Parse "I/N"; raise `UsageError` unless I is a whole number from 1 to N."""
    found = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
    number, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= count:
        raise UsageError(f"{option}: {text!r} is not I/N with I from 1 to N; use for example {option} 1/2.")
    return number, count


_VERSIONS = r"(?:===?|[<>!~]=|[<>])[\w.*+!-]+"
_REQUIREMENT = re.compile(rf"[a-z0-9](?:[\w.-]*[a-z0-9])?(?:{_VERSIONS}(?:,{_VERSIONS})*)?", re.IGNORECASE | re.ASCII)


def parse_sets(option: str, texts: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Parse `["torch==2.12 numpy>=2,<3"]` to the requirements of each set; raise `UsageError` for anything else."""
    found = []
    for text in texts:
        # A comma before an operator belongs to the requirement.
        parts = re.split(r"\s+|,(?![<>=!~])", re.sub(r"\s*([<>=!~]+|,)\s*", r"\1", text.strip()))
        if wrong := [part for part in parts if not _REQUIREMENT.fullmatch(part)]:
            raise UsageError(
                f"{option}: {wrong[0]!r} is not a package with its versions; use for example {option} onnxruntime==1.24.1."
            )
        found.append(tuple(parts))
    return tuple(dict.fromkeys(found))


def distribution_of(requirement: str) -> str:
    """The normalized name in a requirement: "numpy" for "NumPy>=2"."""
    return re.split(r"[<>=!~]", re.sub(r"[-_.]+", "-", requirement).lower())[0]


def parse_metadata(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Parse `["author=Jane"]` to texts by key; raise `UsageError` for a missing key or value, or a repeated key."""
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals and key.strip():
            raise UsageError(f"{option} {text!r} has no value; add one, such as {option} {key.strip()}=Jane.")
        if not key.strip():
            raise UsageError(f"{option} {text!r} has no key; add one, such as {option} author=Jane.")
        if key in found:
            raise UsageError(f"{option} sets {key} twice.")
        found[key] = value
    return found


def parse_tolerance(option: str, texts: Sequence[str]) -> Tolerance:
    """Parse `["1e-3"]` to a number, and `["logits=1e-3", "boxes=0.1"]` to numbers by output; otherwise UsageError."""
    found: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.rpartition("=")
        name, number = name.strip(), number_in(value)
        if equals and not name:
            raise UsageError(f"{option} {text!r} names no output; use for example {option} logits=1e-3.")
        if name in found:
            raise UsageError(f"{option} is given twice for {name or 'all outputs'}.")
        if not 0 <= number < math.inf:
            raise UsageError(
                f"{option}: {value!r} is not a number of 0 or more; use for example {option} 1e-3 or logits=1e-3."
            )
        found[name] = number
    if "" in found and len(found) > 1:
        named = next(name for name in found if name)
        raise UsageError(f"{option} is set for all outputs and for {named}: use one number for all, or one for each.")
    return found.get("", found or None)


def parse_dynamic(option: str, texts: Sequence[str]) -> dict[str, dict[int, str | None]]:
    """Parse the open dims of the inputs; raise `UsageError` for anything else.

    `["x:0,2"]` gives {"x": {0: None, 2: None}}, and `["x:0=batch,2=time"]` gives {"x": {0: "batch", 2: "time"}}.
    """
    found: dict[str, dict[int, str | None]] = {}
    for text in texts:
        name, colon, dims = text.rpartition(":")
        name = name.strip()
        if not colon or not name or not dims.strip():
            raise UsageError(f"{option} {text!r} opens no dim: pass an input and its dims, such as {option} x:0,2.")
        pairs = [[piece.strip() for piece in part.partition("=")] for part in dims.split(",")]
        for number, equals, size in pairs:
            if not (number.isascii() and number.isdigit() and len(number) < 10):
                raise UsageError(f"{option} {text!r}: {number!r} is not a dim; dims are whole numbers, counted from 0.")
            if equals and not size.isidentifier():
                raise UsageError(f"{option} {text!r}: {size!r} is not a name for a size; use a word such as 2=time.")
            if int(number) in found.setdefault(name, {}):
                raise UsageError(f"{option} lists dim {int(number)} of {name} twice.")
            found[name][int(number)] = size or None
    return found


def split_weights(path: Path) -> tuple[Path, str]:
    """Split `w.pt:net` into the file and the key of the state dict in it, which is "" in `w.pt`."""
    name, _, key = str(path).rpartition(":")
    if not name or not key or "/" in key or "\\" in key or path.exists():
        return path, ""
    return Path(name), key


def refuse_missing_weights(path: Path) -> None:
    """Raise `LoadError` if the path, without the key after a colon, isn't a file."""
    path, _ = split_weights(path)
    if not path.is_file():
        kind = "is a folder; use the file in it" if path.is_dir() else "is not a file"
        raise LoadError(f"The weights file {path} " + (f"{kind}." if path.exists() else "doesn't exist."))
