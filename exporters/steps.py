"""What a file was made from, one operation at a time, and where in the model each operation stands.

An exporter that can tell keeps this beside the file and not in it: a file carries no source paths. With it, each value in
the file can be computed again from those before it.
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
    """Where in the model an operation stands.

    Attributes:
        module: path of the module whose forward does it; "" for the model itself.
        call: the how-manieth call of that module, from 1 on.
        line: "modeling_bert.py:175", the innermost line outside of torch; "" where it isn't known.
        operation: its name: "linear".
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
        name: of its value; a file has it under that name, or not at all where it was merged into another.
        inputs: the names of what it reads.
        compute: its value, from those of `inputs` by name.
        is_tensor: whether the value is one tensor: only such is looked up in a file.
        repeats: whether it surely gives the same for the same inputs; one that may draw random numbers doesn't.
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
        inputs: the names of the file's inputs in the program, in the file's order.
        constants: the weights, buffers and other tensors by name; those of the model, not copied.
        in_file: the name in the file of a value that has another one there.
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
        values: by their names in the file; where the run stopped, those before.
        stopped_at: where an operation raised, the asked values that follow from it directly; empty where none did.
        error: its message.
    """

    values: Mapping[str, torch.Tensor]
    stopped_at: tuple[str, ...] = ()
    error: str = ""


class FileValues(Protocol):
    """A file, ready to give all its values and not only its outputs."""

    @property
    def names(self) -> Collection[str]:
        """The names of the values that it can give."""

    @property
    def outputs(self) -> Sequence[str]:
        """The names of those that are the file's outputs, in its order."""

    def run(self, tensors: Sequence[torch.Tensor]) -> Seen:
        """The values for these inputs."""


class FileParts(Protocol):
    """A file that holds the model's modules, which can be called one by one."""

    def part(self, path: str, number: int, *, alone: bool) -> Callable[[torch.Tensor], Any] | None:
        """What the file computes at the how-manieth call of a module, from 1 on; None where it doesn't take one tensor.

        Args:
            alone: whether the tensor is all that the module is given in that call.
        """


def program_of(
    exported: torch.export.ExportedProgram, model: nn.Module, output_names: Sequence[str] | None = None
) -> Program | None:
    """The steps of an exported program of an adapter around `model`; None where one writes to what others read, which can't
    be computed again by itself.

    Args:
        output_names: those of the file; None where they are the program's.
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
    """The weights, buffers and other tensors of an exported program, by the names that its steps read them by."""
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
    """Whether a node of an exported program gives something: some only see to it that a dtype or size is as it was."""
    return node.op == "call_function" and (bool(node.users) or node.meta.get("val") is not None)


def computing(node: Any) -> Callable[[Mapping[str, Any]], Any]:
    """Computes a node of an exported program from the values by name that it reads."""
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
        # One of several results: what is computed is computed there.
        return _place(node.args[0], model)
    stack = list((node.meta.get("nn_module_stack") or {}).items())
    key, (path, _) = stack[-1] if stack else ("", ("", ""))
    repeated = re.search(r"@(\d+)$", key)
    module = path.split("@")[0].removeprefix(_MODEL).lstrip(".")
    line = line_of(node.meta.get("stack_trace") or "") or line_of_forward(model, module)
    return Place(module, int(repeated.group(1)) + 1 if repeated else 1, line, _operation(node.target))


def _operation(target: Any) -> str:
    """`linear` for torch.ops.aten.linear.default."""
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", packet)).strip("_")


def line_of(stack_trace: str) -> str:
    """File name and line of the innermost frame of a Python stack that is in a file of neither torch nor ours."""
    frames = [(found["file"], found["line"]) for found in FRAME.finditer(stack_trace)]
    own = [frame for frame in frames if is_users(frame[0])]
    return source_line(*own[-1]) if own else ""


def source_line(file: str, line: int | str) -> str:
    """A line as places name it: without the folder, which is of one machine."""
    return f"{Path(file).name}:{line}"


def is_users(file: str) -> bool:
    """Whether a file of code is neither torch's nor ours."""
    # What passes generate has no file.
    path = Path(file)
    return path.suffix == ".py" and not any(path.is_relative_to(folder) for folder in (_TORCH, *_OURS))


def line_of_forward(model: nn.Module, path: str) -> str:
    """Where the forward begins of the innermost module around a path that isn't torch's own."""
    parts = path.split(".") if path else []
    for count in range(len(parts), -1, -1):
        kind = type(model.get_submodule(".".join(parts[:count])))
        code = getattr(inspect.unwrap(kind.forward), "__code__", None)
        if code is not None and is_users(code.co_filename):
            return source_line(code.co_filename, code.co_firstlineno)
    return ""
