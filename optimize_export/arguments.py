"""Checks of arguments that `load`, `export` and the command share."""

import re

from optimize_export.errors import UsageError


def other_gpu(device: str) -> str:
    """How to take a GPU by its number, as a clause; empty for any other device."""
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number.isdecimal():
        return ""
    return f"set CUDA_VISIBLE_DEVICES={number} before Python starts, and use 'cuda'"


def parse_digest(option: str, text: str) -> str:
    """Parse a SHA-256 and convert it to lower case; raise `UsageError` for anything else."""
    if not isinstance(text, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", text.strip()):
        raise UsageError(
            f"{option}: {text!r} is not a SHA-256, which has 64 hexadecimal digits; use the one that the export of "
            "the bundle printed."
        )
    return text.strip().lower()
