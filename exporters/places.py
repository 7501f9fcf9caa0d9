"""Locations in a model's source, and the values of files and captured programs with their locations.

A location is a line, the module whose forward contains it, and the file. An exporter keeps the program that a file was
made from next to the file, not in it: a file contains no source paths. The program runs on the model's own weights, so
its values are the expected values of the file.
"""

from __future__ import annotations

import inspect
import linecache
import operator
import os
import re
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

_TORCH = Path(torch.__file__).parent
_IN_TORCH = f"{_TORCH}{os.sep}"
_OURS = tuple(Path(__file__).parents[1] / name for name in ("exporters", "optimize_export", "optimizer", "passes"))
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_LONGEST_LINE = 80
# The name of the model in its adapter.
_MODEL = "model"


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
    return f"{line}{_in_module(frame, paths)}{number}"


def users_line(frame: FrameType | None, paths: Mapping[int, str]) -> str:
    """The innermost line of user code: " in module `head` (net.py:17)"; empty if there is none."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{_in_module(frame, paths)} ({source_line(frame.f_code.co_filename, frame.f_lineno)})"


def _in_module(frame: FrameType | None, paths: Mapping[int, str]) -> str:
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in paths:
            return f" in {_module(paths[id(owner)])}"
        frame = frame.f_back
    return ""


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
    frames = [(found["file"], found["line"]) for found in _FRAME.finditer(stack_trace) if is_users(found["file"])]
    return source_line(*frames[-1]) if frames else ""


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


class FileValues(Protocol):
    """A loaded file that can return all its values, not only its outputs."""

    @property
    def names(self) -> Collection[str]:
        """The names of the values that it can return."""

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[dict[str, torch.Tensor], str]:
        """The values by name, on the CPU, and "". If the run raises, those until then, and the exception's message."""


class ProgramValues(torch.fx.Interpreter):
    """An exported program that returns its values with the given names, or all, in the order of the program.

    The names `in_file` replace those in the program.
    """

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        names: Collection[str] | None = None,
        in_file: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(program.module(check_guards=False))
        self.extra_traceback = False
        renamed = in_file or {}
        computed = [node for node in self.graph.nodes if node.op == "call_function" and _computes_tensor(node)]
        known = {node: str(renamed.get(node.name, node.name)) for node in computed}
        self._wanted = {node: name for node, name in known.items() if names is None or name in names}
        self._found: dict[str, torch.Tensor] = {}
        self.names = tuple(self._wanted.values())
        held = (*self.module.parameters(), *self.module.buffers())
        self._device = next((tensor.device for tensor in held), None)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the values in the order of `names`, on the device of the program."""
        self._found = {}
        super().run(*(tensor.to(self._device) for tensor in tensors), enable_io_processing=False)
        return tuple(self._found[name] for name in self.names)

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[dict[str, torch.Tensor], str]:  # type: ignore[override]
        error = ""
        try:
            with torch.no_grad():
                self(*tensors)
        except Exception as raised:  # noqa: BLE001 - operators can raise anything, and the error is the result
            error = f"{type(raised).__name__}: {raised}"
        return {name: value.cpu() for name, value in self._found.items()}, error

    def run_node(self, n: Any) -> Any:
        # Nodes without users or a tensor only assert a dtype or size.
        if n.op == "call_function" and not (n.users or _computes_tensor(n)):
            return None
        value = super().run_node(n)
        if n.op == "get_attr" and isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            # A copy of a buffer, because an operation may write to it.
            return value.clone()
        if n in self._wanted:
            # A copy, because a later operation may write to the value.
            self._found[self._wanted[n]] = value.clone()
        return value


def _computes_tensor(node: Any) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


@dataclass(frozen=True)
class Program:
    """The program that a file was made from. Its values have their names in the file."""

    exported: torch.export.ExportedProgram
    # The place of each value in the model.
    places: Mapping[str, Place]
    # The names of the values that each value is computed from.
    inputs: Mapping[str, Sequence[str]]
    # The names in the file of values that have another name in the program.
    in_file: Mapping[str, str]

    @classmethod
    def of(
        cls, exported: torch.export.ExportedProgram, model: nn.Module, in_file: Mapping[str, str] | None = None
    ) -> Program:
        """The exported program of an adapter around `model`, with the places that its nodes name now."""
        in_file = in_file or {}
        # All but sizes: tensors, and operations with several results.
        nodes = {
            in_file.get(node.name, node.name): node
            for node in exported.graph.nodes
            if node.op == "call_function" and not isinstance(node.meta.get("val"), int | torch.SymInt)
        }
        reads = {
            name: tuple(in_file.get(read.name, read.name) for read in nodes[name].all_input_nodes) for name in nodes
        }
        return cls(exported, {name: _place(node, model) for name, node in nodes.items()}, reads, in_file)

    def values(self, names: Collection[str] | None = None) -> ProgramValues:
        """The program, loaded so that it returns the values with these names, or all."""
        return ProgramValues(self.exported, names, self.in_file)

    def merged_into(self, name: str, known: Collection[str]) -> tuple[Place, ...]:
        """The places of the values that the file lacks, because they were merged into this one; it has those `known`."""
        found, pending = set[str](), list(self.inputs[name])
        while pending:
            before = pending.pop()
            if before in self.places and before not in known and before not in found:
                found.add(before)
                pending.extend(self.inputs[before])
        places = dict.fromkeys(place for other, place in self.places.items() if other in found)
        return tuple(place for place in places if place != self.places[name])


def operations_of(exported: torch.export.ExportedProgram) -> list[tuple[str, str]]:
    """The operations on tensors in a program of an adapter: the path of the module, and the operation's name."""
    nodes = [node for node in exported.graph.nodes if node.op == "call_function" and _computes_tensor(node)]
    return [(_module_of(node)[1], _operation(node.target)) for node in nodes if node.target is not operator.getitem]


def _module_of(node: Any) -> tuple[str, str]:
    """torch's key for the call of the innermost module around a node, and the path of the module in the model."""
    stack = list((node.meta.get("nn_module_stack") or {}).items())
    key, (path, _) = stack[-1] if stack else ("", ("", ""))
    return key, path.split("@")[0].removeprefix(_MODEL).lstrip(".")


def _place(node: Any, model: nn.Module) -> Place:
    if node.target is operator.getitem:
        # One of several results: use the location of the operation that computes them.
        return _place(node.args[0], model)
    key, module = _module_of(node)
    repeated = re.search(r"@(\d+)$", key)
    line = line_of(node.meta.get("stack_trace") or "") or line_of_forward(model, module)
    return Place(module, int(repeated.group(1)) + 1 if repeated else 1, line, _operation(node.target))


def _operation(target: Any) -> str:
    """The name of an operator: `linear` for torch.ops.aten.linear.default."""
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", packet)).strip("_")
