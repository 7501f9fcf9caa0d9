"""Capture the whole forward of a module as one graph.

torch.compile's front end reads the Python code. If it breaks the graph, torch.export traces the forward without it, as
exporters do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from passes.compiling.compiler import GraphBreak
from passes.errors import PassesError
from passes.graph.backend import entry_of
from passes.graph.captured import EXAMPLE, FRAME, CapturedGraph, Modules, name_of
from passes.graph.derived import DerivedTensors
from passes.torch_capture import Dim, SizeConditions, captured_call, dim_of, is_held, mark_open, shape_environment

Place = tuple[int, int]
# torch's message when a capture specializes a dynamic size.
_FIXED = re.compile(r"your code specialized it to be a constant \((\d+)\)")
# The classes of arguments that hold no further tensors.
_PLAIN = (torch.Tensor, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, type(None))
# Reads one tensor or size from the module or from the flat tensors of a call.
Read = Callable[[Sequence[torch.Tensor]], Any]


class NoWholeGraph(PassesError):
    """The forward can't be captured as one graph; the message is a clause with the reason."""


@dataclass(frozen=True)
class FlatCall:
    """One call of a module, and the functions that flatten calls like it."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    # Returns the tensors among the arguments of such a call
    inputs: Callable[[tuple[Any, ...], Mapping[str, Any]], Sequence[torch.Tensor]]
    outputs: Callable[[Any], Sequence[torch.Tensor]]  # returns the tensors in the module's output for such a call
    rebuild: Callable[[Sequence[torch.Tensor]], Any]  # builds the module's output from these tensors
    # The dynamic dims, (number of the input, dim), each with the first dim that has the same size in all calls
    sizes: Mapping[Place, Place]


def _entry(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    equal: Sequence[tuple[Place, Place]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    # This check makes sizes that are equal in all calls share one symbol in the graph.
    for (one, dim), (other, its_dim) in equal:
        if inputs[one].size(dim) != inputs[other].size(its_dim):
            raise ValueError
    return module.forward(*args, **kwargs)


class WholeCapture:
    """One capture of a module's forward on the example call."""

    origin: fx.GraphModule  # the graph from torch.compile, with the objects that it refers to
    conditions: SizeConditions  # the conditions on dynamic sizes under which the graph is valid
    outputs: Sequence[Read]  # for each output, a function that reads it, given the inputs and the values of the graph

    def __init__(self, module: nn.Module, call: FlatCall) -> None:
        self.module = module
        self.call = call
        # For each placeholder name, a function that reads its value, given the inputs of a call
        self.reads: dict[str, Read] = {}
        self.given: set[int] = set()  # the ids of the parameters and buffers among the outputs
        self._inputs = tuple(call.inputs(call.args, call.kwargs))
        self._modules = Modules(module)
        self._values: Sequence[Any] = ()

    def run(self) -> CapturedGraph:
        """Capture the forward.

        Raises:
            NoWholeGraph: the forward can't be captured as one graph.
        """
        for number, dim in self.call.sizes:
            mark_open(self._inputs[number], dim)
        equal = tuple(self.call.sizes.items())
        compiled = captured_call(entry_of(type(self.module), _entry), self._take, whole=True)
        try:
            with torch.no_grad():
                result = compiled.run(self.module, self._inputs, equal, self.call.args, dict(self.call.kwargs))
        except NoWholeGraph:
            raise
        except Exception as error:
            # torch.compile's front end may raise anything on third-party code, and so may that code.
            raise NoWholeGraph(_why(error)) from error
        self.conditions = self._checked(self._environment)
        known = {id(value): number for number, value in enumerate((*self._inputs, *self._values))}
        self.outputs = [self._output(tensor, known) for tensor in self.call.outputs(result)]
        return self._captured

    def _checked(self, environment: Any) -> SizeConditions:
        conditions = SizeConditions(environment)
        if not conditions.are_of_dims:
            raise NoWholeGraph("it depends on sizes other than those of its inputs")
        return conditions

    def _take(self, graph: fx.GraphModule, inputs: Sequence[Any], around: nn.Module | None) -> Callable[..., Any]:
        self.origin, self._environment = graph, shape_environment()
        self._captured = CapturedGraph(graph.graph, self._modules, None, inputs, DerivedTensors())
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        dims, held = [dim_of(node) for node in placeholders], [is_held(node) for node in placeholders]

        def run(*values: Any) -> Any:
            for node, value, dim, is_of_module in zip(placeholders, values, dims, held, strict=True):
                self.reads[node.name] = self._read(node, value, dim, is_of_module)
            self._values = graph.forward(*values)
            return self._values

        return run

    def _read(self, node: fx.Node, value: Any, dim: Dim | None, held: bool) -> Read:
        if dim is not None:
            _, number, place = dim
            return lambda inputs: inputs[number].size(place)
        if (path := self._captured.tensors.get(node)) is not None:
            return reader(self.module, path)
        numbers = [number for number, tensor in enumerate(self._inputs) if tensor is value]
        if numbers:
            return lambda inputs: inputs[numbers[0]]
        if held and isinstance(value, torch.Tensor):
            # A tensor that is neither a parameter nor a buffer becomes a constant of the file.
            return lambda inputs: value
        raise NoWholeGraph(f"its graph takes {node.name}, which is neither an input nor a tensor of the model")

    def _output(self, tensor: torch.Tensor, known: Mapping[int, int]) -> Read:
        if (number := known.get(id(tensor))) is not None:
            return lambda values: values[number]
        path = self._modules.tensors.get(id(tensor))
        if path is None:
            raise NoWholeGraph("it returns a tensor that its graph doesn't compute")
        self.given.add(id(tensor))
        return reader(self.module, path)


class WholeTrace(WholeCapture):
    """One trace of a module's forward by torch.export, which runs the Python code instead of reading it."""

    def run(self) -> CapturedGraph:
        """See `WholeCapture.run`."""
        if not all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves((self.call.args, dict(self.call.kwargs)))):
            # The trace would take whatever tensors it holds for constants.
            raise NoWholeGraph("an argument is an object of its own class")
        open_dims: list[dict[int, Any]] = [{} for _ in self._inputs]
        for number, dim in self.call.sizes:
            open_dims[number][dim] = torch.export.Dim.DYNAMIC
        try:
            with torch.no_grad():
                program = torch.export.export(
                    _Flat(self.module, self.call, self._inputs),
                    (self._inputs,),
                    dynamic_shapes=(tuple(open_dims),),
                    strict=False,
                )
        except Exception as error:
            # As in a capture by torch.compile.
            raise NoWholeGraph(_why(error)) from error
        self.origin = program.graph_module
        nodes = self.origin.graph.find_nodes(op="placeholder")
        inputs = iter(enumerate(self._inputs))
        values = [
            self._given(node, spec, inputs, program)
            for node, spec in zip(nodes, program.graph_signature.input_specs, strict=True)
        ]
        modes = [value.fake_mode for node in nodes if hasattr(value := node.meta.get("val"), "fake_mode")]
        self.conditions = self._checked(modes[0].shape_env)
        captured = CapturedGraph(self.origin.graph, self._modules, None, values, DerivedTensors())
        modules = {f"module.{path}".rstrip("."): module for path, module in self.module.named_modules()}
        for node in self.origin.graph.nodes:
            _annotate(node, modules)
        outputs: Any = self.origin.graph.output_node().args[0]
        self.given = {
            id(value) for node, value in zip(nodes, values, strict=True) if node in outputs and node in captured.tensors
        }
        count = len(self._inputs)
        self.outputs = [_item(count + number) for number in range(len(outputs))]
        return captured

    def _given(self, node: fx.Node, spec: Any, inputs: Any, program: Any) -> Any:
        """The value of a placeholder, and how to read it."""
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            self.reads[node.name] = reader(self.module, spec.target.removeprefix("module."))
            return self.reads[node.name](())
        if spec.kind is InputKind.CONSTANT_TENSOR:
            value = program.constants[spec.target]
            self.reads[node.name] = lambda _: value
            return value
        if spec.kind is InputKind.USER_INPUT and isinstance(node.meta.get("val"), torch.Tensor):
            number, value = next(inputs)
            self.reads[node.name] = _item(number)
            return value
        raise NoWholeGraph(f"its graph takes {node.name}, which is neither an input nor a tensor of the model")


def _annotate(node: fx.Node, modules: Mapping[str, nn.Module]) -> None:
    """Give a node the notes that graphs of torch.compile have: an example, and the ids of the modules around it.

    Args:
        modules: by the paths that torch.export writes.
    """
    if name_of(node) == "sym_size":
        # TorchScript's trace records a method that reads a size, and takes the operator's result for a constant.
        node.op, node.target = "call_method", "size"
    if "val" in node.meta:
        node.meta[EXAMPLE] = node.meta["val"]
    stack = {}
    for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
        if path in modules:
            earlier = key.partition("@")[2]
            number = id(modules[path])
            stack[f"{number}@{earlier}" if earlier else str(number)] = (path, kind)
    node.meta["nn_module_stack"] = stack


class _Flat(nn.Module):
    """Calls a module with the tensors among its arguments, and returns those among its outputs."""

    def __init__(self, module: nn.Module, call: FlatCall, given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.module = module
        self._flat = call
        self._leaves, self._spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
        self._places = {
            place: number for place, leaf in enumerate(self._leaves) for number, one in enumerate(given) if one is leaf
        }

    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves = [
            inputs[self._places[place]] if place in self._places else leaf for place, leaf in enumerate(self._leaves)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return tuple(self._flat.outputs(_entry(self.module, inputs, tuple(self._flat.sizes.items()), args, kwargs)))


def _item(number: int) -> Read:
    return lambda values: values[number]


def reader(module: nn.Module, path: str) -> Read:
    owner, _, name = path.rpartition(".")
    home = module.get_submodule(owner)
    return lambda inputs: getattr(home, name)


def _why(error: Exception) -> str:
    """The reason why torch.compile doesn't capture one graph, as a clause."""
    stack = getattr(error, "real_stack", None)
    found = GraphBreak.of(str(error), list(stack or ()))
    file, _, line = found.where.rpartition(":")
    if stack:
        return f"the graph breaks at {PurePath(file).name}:{line} (`{found.line}`: {found.reason})"
    if fixed := _FIXED.search(str(error)):
        *_, (file, line) = [("its source", "?"), *FRAME.findall(str(error))]
        return f"an open size is fixed to {fixed[1]} at {PurePath(file).name}:{line}"
    return f"torch.compile captures no graph of the whole model ({found.reason})"
