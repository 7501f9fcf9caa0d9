"""The operations that a file was made from, with the location of each one in the model.

An exporter that knows them keeps them next to the file, not in it: a file contains no source paths. With them, each
value in the file can be recomputed from the values before it.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from exporters.program_writes import writes_are_unseen, written_by

_TORCH = Path(torch.__file__).parent
_OURS = tuple(Path(__file__).parents[1] / name for name in ("exporters", "optimizer", "passes"))
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_MODEL = "model"


@dataclass(frozen=True)
class Place:
    """The location of an operation in the model.

    Attributes:
        module: path of the module whose forward runs the operation; "" for the model itself.
        call: the number of that module's call, starting at 1.
        line: "modeling_bert.py:175", the innermost line outside torch; "" if it is unknown.
        operation: the name of the operation: "linear".
    """

    module: str
    call: int
    line: str
    operation: str

    def __str__(self) -> str:
        words = ", ".join(word for word in (self.line, self.operation) if word)
        again = f", call {self.call}" if self.call > 1 else ""
        return f"{self.module or 'the model itself'}{again} ({words})"


@dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        name: the name of its value. A file uses the same name, or lacks the value if it was merged into another.
        inputs: the names of the values that it reads.
        compute: computes the value from the `inputs`, passed by name.
        is_tensor: whether the value is a single tensor. Only these are looked up in a file.
        repeats: whether equal inputs always produce equal results; False for an operation that may draw random numbers.
    """

    name: str
    place: Place
    inputs: tuple[str, ...]
    compute: Callable[[Mapping[str, Any]], Any]
    is_tensor: bool
    repeats: bool


@dataclass(frozen=True)
class Program:
    """The operations that a file was made from, in an order in which they can be computed.

    Attributes:
        inputs: the program's names for the file's inputs, in the file's order.
        constants: weights, buffers and other tensors by name. They are the model's own, not copies.
        in_file: the names in the file of values that have another name there.
    """

    inputs: tuple[str, ...]
    constants: Mapping[str, Any]
    steps: tuple[Step, ...]
    in_file: Mapping[str, str]

    def name_in_file(self, step: Step) -> str:
        return self.in_file.get(step.name, step.name)


@dataclass(frozen=True)
class Seen:
    """The values of one run of a file.

    Attributes:
        values: tensors by their names in the file; if the run stopped, those computed before.
        stopped_at: if an operation raised, the requested values that depend on it directly; otherwise empty.
        error: the message of the exception.
    """

    values: Mapping[str, torch.Tensor]
    stopped_at: tuple[str, ...] = ()
    error: str = ""


class FileValues(Protocol):
    """A loaded file that can return all its values, not only its outputs."""

    @property
    def names(self) -> Collection[str]:
        """The names of the values that it can return."""

    @property
    def outputs(self) -> Sequence[str]:
        """The names of the file's outputs, in its order."""

    def run(self, tensors: Sequence[torch.Tensor]) -> Seen:
        """Run the file on these inputs and return its values."""


class FileParts(Protocol):
    """A loaded file that holds the model's modules, which can be called one by one."""

    def part(self, path: str, number: int, *, alone: bool) -> Callable[[torch.Tensor], Any] | None:
        """Return the function that one call of a module runs in the file; None if it doesn't take one tensor.

        Args:
            number: the number of the module's call, starting at 1.
            alone: whether the tensor is the module's only argument in that call.
        """


def program_of(
    exported: torch.export.ExportedProgram, model: nn.Module, output_names: Sequence[str] | None = None
) -> Program | None:
    """The steps of the exported program of an adapter around `model`.

    None if an operation writes to memory that others read, since it can't be recomputed in isolation.

    Args:
        output_names: names of the outputs in the file; None if they are those in the program.
    """
    if not writes_are_unseen(exported.graph.nodes):
        return None
    names = [str(name) for name in exported.graph_signature.user_outputs]
    outputs = {} if output_names is None else dict(zip(names, output_names, strict=True))
    return Program(
        inputs=tuple(str(name) for name in exported.graph_signature.user_inputs),
        constants=constants_of(exported),
        steps=tuple(_step(node, model) for node in exported.graph.nodes if computes(node)),
        in_file=outputs,
    )


def constants_of(exported: torch.export.ExportedProgram) -> dict[str, Any]:
    """The weights, buffers and other tensors of an exported program, by the names that its nodes use."""
    signature = exported.graph_signature
    by_target = {**exported.state_dict, **exported.constants}
    held = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    attributes = {node.name: node.target for node in exported.graph.nodes if node.op == "get_attr"}
    return {
        **{name: by_target[target] for name, target in held.items()},
        **{name: getattr(exported.graph_module, target) for name, target in attributes.items()},
    }


def computes(node: Any) -> bool:
    """Whether a node of an exported program computes a value; some nodes only assert a dtype or size."""
    return node.op == "call_function" and (bool(node.users) or node.meta.get("val") is not None)


def computing(node: Any) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function that computes a node of an exported program from the values that it reads, by name."""
    kind = type(node)

    def compute(values: Mapping[str, Any]) -> Any:
        args, kwargs = pytree.tree_map(
            lambda leaf: values[leaf.name] if isinstance(leaf, kind) else leaf, (node.args, dict(node.kwargs))
        )
        return node.target(*args, **kwargs)

    return compute


def _step(node: Any, model: nn.Module) -> Step:
    tags = getattr(node.target, "tags", ())
    written, compute = written_by(node), computing(node)

    def beside(values: Mapping[str, Any]) -> Any:
        return compute({**values, **{name: values[name].clone() for name in written}})

    return Step(
        name=node.name,
        place=_place(node, model),
        inputs=tuple(read.name for read in node.all_input_nodes),
        compute=beside if written else compute,
        is_tensor=isinstance(node.meta.get("val"), torch.Tensor),
        repeats=torch.Tag.nondeterministic_seeded not in tags,
    )


def _place(node: Any, model: nn.Module) -> Place:
    if node.target is operator.getitem:
        # One of several results: use the location of the operation that computes them.
        return _place(node.args[0], model)
    stack = list((node.meta.get("nn_module_stack") or {}).items())
    key, (path, _) = stack[-1] if stack else ("", ("", ""))
    repeated = re.search(r"@(\d+)$", key)
    module = path.split("@")[0].removeprefix(_MODEL).lstrip(".")
    line = line_of(node.meta.get("stack_trace") or "") or line_of_forward(model, module)
    return Place(module, int(repeated.group(1)) + 1 if repeated else 1, line, _operation(node.target))


def _operation(target: Any) -> str:
    """The name of an operator: `linear` for torch.ops.aten.linear.default."""
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", packet)).strip("_")


def line_of(stack_trace: str) -> str:
    """File name and line of the innermost stack frame outside torch and this program; "" if there is none."""
    frames = [(found["file"], found["line"]) for found in FRAME.finditer(stack_trace)]
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
    """The first line of the innermost forward on a path to a module that isn't torch's own; "" if there is none."""
    parts = path.split(".") if path else []
    for count in range(len(parts), -1, -1):
        kind = type(model.get_submodule(".".join(parts[:count])))
        code = getattr(inspect.unwrap(kind.forward), "__code__", None)
        if code is not None and is_users(code.co_filename):
            return source_line(code.co_filename, code.co_firstlineno)
    return ""
