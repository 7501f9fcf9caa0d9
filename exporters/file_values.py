"""The intermediate values of a file, and of the program that it was made from, with their places in the model.

An exporter keeps that program next to the file, not in it: a file contains no source paths. The program runs on the
model's own weights, so its values are the expected values of the file.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from exporters.places import Place, line_of, line_of_forward

_MODEL = "model"


class FileValues(Protocol):
    """A loaded file that can return all its values, not only its outputs."""

    @property
    def names(self) -> Collection[str]:
        """The names of the values that it can return."""

    @property
    def outputs(self) -> Sequence[str]:
        """The names of the file's outputs, in its order."""

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[dict[str, torch.Tensor], str]:
        """Run the file on these inputs.

        Returns:
            The values by name, on the CPU, and "". If the run raises, the values computed until then, and the message
            of the exception.
        """


class FileParts(Protocol):
    """A loaded file that holds the model's modules, which can be called one by one."""

    def part(self, path: str, number: int, *, alone: bool) -> Callable[[torch.Tensor], Any] | None:
        """Return the function that one call of a module runs in the file; None if it doesn't take one tensor.

        Args:
            number: the number of the module's call, starting at 1.
            alone: whether the tensor is the module's only argument in that call.
        """


class ProgramValues:
    """An exported program that returns its values with the given names, or all, in the order of the program.

    Args:
        in_file: names that replace those in the program.
    """

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        names: Collection[str] | None = None,
        in_file: Mapping[str, str] | None = None,
    ) -> None:
        renamed = in_file or {}
        self._module = program.module(check_guards=False)
        # Nodes without users or a tensor only assert a dtype or size.
        self._nodes = [
            node
            for node in self._module.graph.nodes
            if node.op == "placeholder" or node.users or _computes_tensor(node)
        ]
        computed = [node for node in self._nodes if node.op == "call_function" and _computes_tensor(node)]
        known = {node: str(renamed.get(node.name, node.name)) for node in computed}
        self._wanted = {node: name for node, name in known.items() if names is None or name in names}
        self.names = tuple(self._wanted.values())
        self.outputs = tuple(str(renamed.get(name, name)) for name in program.graph_signature.user_outputs)
        held = (*self._module.parameters(), *self._module.buffers())
        self._device = next((tensor.device for tensor in held), None)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the values in the order of `names`, on the device of the program."""
        values = dict(self._computed(tensors))
        return tuple(values[name] for name in self.names)

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[dict[str, torch.Tensor], str]:
        values: dict[str, torch.Tensor] = {}
        try:
            with torch.no_grad():
                for name, value in self._computed(tensors):
                    values[name] = value.cpu()
        except Exception as error:  # noqa: BLE001 - operators can raise anything, and the error is the result
            return values, f"{type(error).__name__}: {error}"
        return values, ""

    def _computed(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        given = iter(tensors)
        known: dict[Any, Any] = {}
        for node in self._nodes:
            if node.op == "placeholder":
                known[node] = next(given).to(self._device)
            elif node.op == "get_attr":
                held = operator.attrgetter(node.target)(self._module)
                # Copy a buffer, because an operation may write to it.
                is_buffer = isinstance(held, torch.Tensor) and not isinstance(held, nn.Parameter)
                known[node] = held.clone() if is_buffer else held
            elif node.op == "call_function":
                known[node] = _computed_from(known, node)
                if node in self._wanted:
                    # A copy, because a later operation may write to the value.
                    yield self._wanted[node], known[node].clone()


def _computed_from(known: Mapping[Any, Any], node: Any) -> Any:
    """The result of a node's operation, with known results in place of other nodes among its arguments."""
    args, kwargs = pytree.tree_map(
        lambda leaf: known[leaf] if isinstance(leaf, type(node)) else leaf, (node.args, dict(node.kwargs))
    )
    return node.target(*args, **kwargs)


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
        """The places of the values that the file lacks, because they were merged into this one.

        Args:
            known: the names of the values that the file has.
        """
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
