"""Locations in a model's source: the line, the module whose forward contains it, and the file."""

from __future__ import annotations

import inspect
import linecache
import os
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch import nn

_TORCH = Path(torch.__file__).parent
_IN_TORCH = f"{_TORCH}{os.sep}"
_OURS = tuple(Path(__file__).parents[1] / name for name in ("exporters", "optimize_export", "optimizer", "passes"))
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_LONGEST_LINE = 80


@dataclass(frozen=True)
class Place:
    """The location of an operation in the model."""

    # The path of the module whose forward runs the operation; "" for the model itself.
    module: str
    # The number of that module's call, starting at 1.
    call: int
    # "modeling_bert.py:175", the innermost line outside torch; "" if it is unknown.
    line: str
    # The name of the operation: "linear".
    operation: str

    def __str__(self) -> str:
        words = ", ".join(word for word in (self.line, self.operation) if word)
        again = f", call {self.call}" if self.call > 1 else ""
        return f"{self.module or 'the model itself'}{again} ({words})"


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame outside torch."""
    while frame is not None and frame.f_code.co_filename.startswith(_IN_TORCH):
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
    frames = [(found["file"], int(found["line"])) for found in _FRAME.finditer(stack) if is_users(found["file"])]
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
    frames = _users_frames(error)
    if not frames or not isinstance(model, nn.Module):
        return ""
    return place_of(*frames[-1], paths_of(model))


def line_of_error(error: BaseException) -> str:
    """File name and line of the innermost frame of an error outside torch and this program; "" if there is none."""
    frames = _users_frames(error)
    return source_line(frames[-1][0].f_code.co_filename, frames[-1][1]) if frames else ""


def called_in_torch(error: BaseException) -> str:
    """The name of torch's function that the innermost line of the user calls in an error's traceback, such as "cond"."""
    name = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        own = frame.f_code.co_name
        if is_users(frame.f_code.co_filename):
            name = ""
        elif not (name or own.startswith("_")):
            name = own
    return name


def _users_frames(error: BaseException) -> list[tuple[FrameType, int]]:
    frames = traceback.walk_tb(error.__traceback__)
    return [(frame, line) for frame, line in frames if is_users(frame.f_code.co_filename)]


def line_of(stack_trace: str) -> str:
    """File name and line of the innermost stack frame outside torch and this program; "" if there is none."""
    frames = [(found["file"], found["line"]) for found in _FRAME.finditer(stack_trace)]
    own = [frame for frame in frames if is_users(frame[0])]
    return source_line(*own[-1]) if own else ""


def source_line(file: str, line: int | str) -> str:
    """A line for messages: without the folder, which differs between machines."""
    return f"{Path(file).name}:{line}"


def is_users(file: str) -> bool:
    """Whether a source file belongs neither to torch nor to this program."""
    # Code that passes generate has no file.
    path = Path(file)
    return path.suffix == ".py" and not any(path.is_relative_to(folder) for folder in (_TORCH, *_OURS))


def line_of_forward(model: nn.Module, path: str) -> str:
    """On the path to a module, the first line of the innermost forward that is user code; "" if there is none."""
    parts = path.split(".") if path else []
    for count in range(len(parts), -1, -1):
        kind = type(model.get_submodule(".".join(parts[:count])))
        code = getattr(inspect.unwrap(kind.forward), "__code__", None)
        if code is not None and is_users(code.co_filename):
            return source_line(code.co_filename, code.co_firstlineno)
    return ""
