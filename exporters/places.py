"""Locations in a model's source: the line, the module whose forward contains it, and the file."""

from __future__ import annotations

import inspect
import linecache
import os
import traceback
from collections.abc import Mapping
from types import FrameType

import torch
from torch import nn

from exporters.steps import FRAME, is_users, source_line

_TORCH = os.path.dirname(torch.__file__) + os.sep
_LONGEST_LINE = 80


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame outside torch."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame


def paths_of(model: nn.Module) -> dict[int, str]:
    """The path of each module, by its id."""
    return {id(module): name for name, module in model.named_modules()}


def place_of(frame: FrameType | None, line_number: int, paths: Mapping[int, str]) -> str:
    """A line of a frame as text for a message: "`x.view(2, -1)` in module `head` (net.py:17)"."""
    if frame is None:
        return "``"
    line, number = _quoted(frame.f_code.co_filename, line_number)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in paths:
            return f"{line} in {_module(paths[id(owner)])}{number}"
        frame = frame.f_back
    return f"{line}{number}"


def place_in_stack(stack: str, model: nn.Module) -> str:
    """The innermost line of the model's own source in a textual stack; empty if there is none.

    A textual stack has no modules. One is named if the innermost forward in the stack belongs to only one module.
    """
    frames = [(found["file"], int(found["line"])) for found in FRAME.finditer(stack) if is_users(found["file"])]
    if not frames:
        return ""
    line, number = _quoted(*frames[-1])
    for frame in reversed(frames):
        owners = [path for path, module in model.named_modules() if _is_in_forward(module, *frame)]
        if owners:
            return f"{line} in {_module(owners[0])}{number}" if len(owners) == 1 else f"{line}{number}"
    return f"{line}{number}"


def _is_in_forward(module: nn.Module, file: str, line_number: int) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or code.co_filename != file:
        return False
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return min(lines) <= line_number <= max(lines)


def _quoted(file: str, line_number: int) -> tuple[str, str]:
    line = linecache.getline(file, line_number).strip()
    line = line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 1]}…"
    return f"`{line}`", f" ({source_line(file, line_number)})"


def _module(path: str) -> str:
    return f"module `{path}`" if path else "the model's forward"


def place_of_error(error: BaseException, model: object) -> str:
    """The innermost line of the model's own source in an error's traceback; empty if there is none."""
    frames = [
        (frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_users(frame.f_code.co_filename)
    ]
    if not frames or not isinstance(model, nn.Module):
        return ""
    return place_of(*frames[-1], paths_of(model))
