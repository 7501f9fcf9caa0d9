"""Capture the forward of a module as one rewritten graph, for tracers and exporters.

Tracers see the plain forward of a module, not the graphs that graph passes rewrite. Here the whole forward is captured
once more as a single graph, with the same dynamic sizes as in the file, and rewritten by the same passes. If
torch.compile's front end breaks the graph, torch.export traces it without that front end, as exporters do. This graph
replaces the forward. Parameters and buffers are read from the module under their own names, derived tensors become
parameters or buffers, and inputs and outputs stay those of the forward.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from passes.compiling.record import GraphBreak
from passes.errors import PassesError
from passes.program.backend import GRAPH_CALL, Applied, GraphCall, entry_of
from passes.program.captured import EXAMPLE, FRAME, CapturedGraph, Modules, is_tensor, name_of
from passes.program.derived import Derived, DerivedTensors
from passes.program.forwards import InstanceForward
from passes.program.hooks import has_hooks
from passes.torch_private import (
    COMPILED_CALL,
    Dim,
    SizeConditions,
    captured_call,
    dim_of,
    is_held,
    is_watched,
    mark_open,
    shape_environment,
    without_subclasses,
)

Place = tuple[int, int]
# torch's message when a capture specializes a dynamic size.
_FIXED = re.compile(r"your code specialized it to be a constant \((\d+)\)")
# The classes of arguments that hold no further tensors.
_PLAIN = (torch.Tensor, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, type(None))
# Reads one tensor or size from the module or from the flat tensors of a call.
_Read = Callable[[Sequence[torch.Tensor]], Any]


class NoWholeGraph(PassesError):
    """The forward can't be captured as one graph; the message is a clause with the reason."""


@dataclass(frozen=True)
class FlatCall:
    """One call of a module, and the functions that flatten calls like it.

    Attributes:
        args, kwargs: the arguments.
        inputs: returns the tensors among the arguments of such a call.
        outputs: returns the tensors in the module's output for such a call.
        rebuild: builds the module's output from these tensors.
        sizes: the dynamic dims, (number of the input, dim), each with the first dim that has the same size in all
            calls.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: Callable[[tuple[Any, ...], Mapping[str, Any]], Sequence[torch.Tensor]]
    outputs: Callable[[Any], Sequence[torch.Tensor]]
    rebuild: Callable[[Sequence[torch.Tensor]], Any]
    sizes: Mapping[Place, Place]


def steps_for_files(module: nn.Module) -> list[Applied]:
    """The graph passes of a module's call whose changes files can contain."""
    call = module.__dict__.get(GRAPH_CALL)
    steps = call.passes if isinstance(call, GraphCall) else ()
    return [step for step in steps if isinstance(step, Applied) and step.item.in_files]


def install_whole_graph(module: nn.Module, plain: nn.Module, call: FlatCall) -> list[str]:
    """Install the rewritten graph as the module's forward; returns the names of the passes that changed it.

    Tensors that only derived tensors used are removed from the module.

    Args:
        module: has the graph passes; it is modified.
        plain: an equal module, used for calls that the graph doesn't cover.
        call: an example call.

    Raises:
        NoWholeGraph: the forward can't be captured as one graph, or no pass changes that graph. The module must not be
            used then.
    """
    capture = _Capture(module, call)
    try:
        captured = capture.run()
    except NoWholeGraph as broken:
        capture = _Trace(module, call)
        try:
            captured = capture.run()
        except NoWholeGraph:
            # The first reason names a line that the user can change.
            raise broken from None
    names = []
    for step in steps_for_files(module):
        try:
            rewriter = step.rewriter(captured)
        except Exception as error:
            # A pass may be third-party code.
            raise NoWholeGraph(f"{step.item.name} raises on it ({type(error).__name__}: {error})") from error
        captured = rewriter.captured
        if rewriter.changes:
            names.append(step.item.name)
    if not names:
        raise NoWholeGraph("the graph of the whole model contains none of its changes")
    # The values that the rewriting judged; the file's own are computed below.
    captured.derived.fresh.clear()
    del module.__dict__[GRAPH_CALL]
    module.__dict__[COMPILED_CALL] = None
    for node in captured.graph.nodes:
        node.target = _AUTOCAST.get(name_of(node), node.target)
        if isinstance(node.target, Derived):
            _keep(node, module, capture, captured)
    for node in reversed(captured.graph.nodes):
        # Only other derived tensors are computed from it.
        if isinstance(node.target, _Buffer) and not node.users:
            node.target.remove()
            captured.graph.erase_node(node)
    held = {node: capture.reads[node.name](()) for node in captured.tensors}
    # A trace has a placeholder for each name of a tensor.
    in_use = {id(value) for node, value in held.items() if node.users}
    for node in [node for node in captured.graph.nodes if node.op == "placeholder" and not node.users]:
        if node in held and id(held[node]) not in in_use:
            _take_out(held[node], module, capture)
        captured.graph.erase_node(node)
    module.__dict__["forward"] = WholeForward(module, plain, capture, captured)
    return names


def operations_of_whole_graph(module: nn.Module) -> list[tuple[str, str]]:
    """The operations on tensors in an installed graph: the path of the module, and the operation's name."""
    forward = module.__dict__["forward"]
    assert isinstance(forward, WholeForward)
    return forward.operations


class WholeForward(InstanceForward):
    """Runs the graph for tracers and exporters, at sizes for which it is valid; otherwise the plain forward.

    A comparison of a file with the module is therefore a comparison with the user's own code.

    Attributes:
        operations: as `operations_of_whole_graph` returns.
    """

    def __init__(self, owner: nn.Module, plain: nn.Module, capture: _Capture, captured: CapturedGraph) -> None:
        graph = captured.graph
        self.owner = owner
        self._plain = plain
        self._call = capture.call
        self._conditions = capture.conditions
        self._reads = [capture.reads[node.name] for node in graph.nodes if node.op == "placeholder"]
        self._outputs = capture.outputs
        calls = [node for node in graph.nodes if is_tensor(node) and _computes(node)]
        self.operations = [(captured.path_of(node), name_of(node)) for node in calls]
        self._graph = _InModules(owner, captured, fx.GraphModule(capture.origin, graph))

    @property
    def __signature__(self) -> inspect.Signature:
        return self._class_signature()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_watched():
            inputs = self._call.inputs(args, kwargs)
            if self._conditions.hold(lambda dim: inputs[dim[1]].size(dim[2])):
                values = self._graph.run(*(read(inputs) for read in self._reads))
                return self._call.rebuild([read((*inputs, *values)) for read in self._outputs])
        return self._plain.forward(*args, **kwargs)


class _InModules(fx.Interpreter):
    """Runs a graph, and calls the modules around its operations, so that files name them after these modules.

    Args:
        owner: the root of the modules.
    """

    def __init__(self, owner: nn.Module, captured: CapturedGraph, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self._owner = owner
        calls = {node.name: captured.calls_around(node) for node in captured.graph.nodes}
        self._calls = {node: calls[node.name] if _computes(node) else () for node in self.graph.nodes}
        for node in self.graph.nodes:
            # Tracers take over these entries. The paths of modules come from the calls.
            node.meta = {key: value for key, value in node.meta.items() if key == "stack_trace"}

    def run(self, *args: Any, **_: Any) -> Any:
        self.args_iter, self.env = iter(args), {}
        try:
            with torch.fx.traceback.preserve_node_meta():
                self._run(list(self.graph.nodes), 0)
            return self.env[self.graph.output_node()]
        finally:
            self.env = {}

    def _run(self, nodes: Sequence[fx.Node], depth: int) -> None:
        """Run consecutive nodes that have the same `depth` calls around them."""
        for call, group in itertools.groupby(nodes, lambda node: self._calls[node][depth : depth + 1]):
            inside = list(group)
            module = self._owner.get_submodule(call[0][1]) if call else None
            if module is not None and _can_be_entered(module):
                self._enter(module, inside, depth + 1)
            elif call:
                self._run(inside, depth + 1)
            else:
                for node in inside:
                    self.env[node] = self.run_node(node)
                    for last in self.user_to_last_uses.get(node, ()):
                        del self.env[last]

    def _enter(self, module: nn.Module, nodes: Sequence[fx.Node], depth: int) -> None:
        installed = module.__dict__.get("forward")
        module.__dict__["forward"] = lambda: self._run(nodes, depth)
        try:
            module()
        finally:
            del module.__dict__["forward"]
            if installed is not None:
                module.__dict__["forward"] = installed


def _can_be_entered(module: nn.Module) -> bool:
    """Whether a call of the module only runs its forward."""
    is_plain = type(module).__call__ is nn.Module.__call__ and not isinstance(module, torch.jit.ScriptModule)
    return is_plain and not has_hooks(module)


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


class _Capture:
    """One capture of a module's forward on the example call.

    Attributes:
        origin: the graph from torch.compile, with the objects that it refers to.
        conditions: the conditions on dynamic sizes under which the graph is valid.
        reads: for each placeholder name, a function that reads its value, given the inputs of a call.
        outputs: for each output, a function that reads it, given the inputs and the values of the graph.
        given: the ids of the parameters and buffers among the outputs.
    """

    origin: fx.GraphModule
    conditions: SizeConditions
    outputs: Sequence[_Read]

    def __init__(self, module: nn.Module, call: FlatCall) -> None:
        self.module = module
        self.call = call
        self.reads: dict[str, _Read] = {}
        self.given: set[int] = set()
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

    def _read(self, node: fx.Node, value: Any, dim: Dim | None, held: bool) -> _Read:
        if dim is not None:
            _, number, place = dim
            return lambda inputs: inputs[number].size(place)
        if (path := self._captured.tensors.get(node)) is not None:
            return _reader(self.module, path)
        numbers = [number for number, tensor in enumerate(self._inputs) if tensor is value]
        if numbers:
            return lambda inputs: inputs[numbers[0]]
        if held and isinstance(value, torch.Tensor):
            # A tensor that is neither a parameter nor a buffer becomes a constant of the file.
            return lambda inputs: value
        raise NoWholeGraph(f"its graph takes {node.name}, which is neither an input nor a tensor of the model")

    def _output(self, tensor: torch.Tensor, known: Mapping[int, int]) -> _Read:
        if (number := known.get(id(tensor))) is not None:
            return lambda values: values[number]
        path = self._modules.tensors.get(id(tensor))
        if path is None:
            raise NoWholeGraph("it returns a tensor that its graph doesn't compute")
        self.given.add(id(tensor))
        return _reader(self.module, path)


class _Trace(_Capture):
    """One trace of a module's forward by torch.export, which runs the Python code instead of reading it."""

    def run(self) -> CapturedGraph:
        """See `_Capture.run`."""
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
            self.reads[node.name] = _reader(self.module, spec.target.removeprefix("module."))
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


def _item(number: int) -> _Read:
    return lambda values: values[number]


def _reader(module: nn.Module, path: str) -> _Read:
    owner, _, name = path.rpartition(".")
    home = module.get_submodule(owner)
    return lambda inputs: getattr(home, name)


def _keep(node: fx.Node, module: nn.Module, capture: _Capture, captured: CapturedGraph) -> None:
    """Turn the value of a derived node into a parameter or buffer."""
    assert isinstance(node.target, Derived)
    sources = []
    # Not `all_input_nodes`, which has a source only once that is given twice.
    arguments: Any = node.args
    for source in arguments:
        if source in captured.tensors:
            sources.append(capture.reads[source.name](()))
        elif isinstance(source.target, _Buffer):
            sources.append(source.target())
        else:
            return
    with torch.no_grad(), without_subclasses():
        value = node.target.function(*sources)
    owner = module.get_submodule(captured.path_of(node))
    stem = re.sub(r"\W+", "_", node.target.what.removeprefix("the "))
    numbered = (f"{stem}_{number}" if number else stem for number in itertools.count())
    name = next(name for name in numbered if not hasattr(owner, name))
    if value.is_floating_point() or value.is_complex():
        # A parameter, since modules may ask the first one for its device, and may have no other left.
        owner.register_parameter(name, nn.Parameter(value.detach(), requires_grad=False))
    else:
        # Persistent, since exporters write other buffers as constants, which no external file can hold.
        owner.register_buffer(name, value.detach())
    node.args, node.target = (), _Buffer(owner, name)


class _Buffer:
    """A call in a graph that reads a parameter or buffer."""

    # torch.fx requires a name for functions in a graph.
    __name__ = "buffer"

    def __init__(self, module: nn.Module, name: str) -> None:
        self._read = _reader(module, name)
        self._module, self._name = module, name

    def remove(self) -> None:
        """Remove it from its module."""
        delattr(self._module, self._name)

    def __call__(self) -> torch.Tensor:
        value: torch.Tensor = self._read(())
        return value


def _computes(node: fx.Node) -> bool:
    return node.op.startswith("call_") and not isinstance(node.target, _Buffer)


def _take_out(gone: torch.Tensor, module: nn.Module, capture: _Capture) -> None:
    if id(gone) in capture.given:
        return
    for each in module.modules():
        for held in (each._parameters, each._buffers):
            held.update((name, None) for name, tensor in held.items() if tensor is gone)


def _enter_autocast(*options: Any) -> torch.autocast:
    context = torch.autocast(*options)
    context.__enter__()
    return context


def _exit_autocast(context: torch.autocast) -> None:
    context.__exit__(None, None, None)


# torch.export records the autocast functions of a captured graph but doesn't run them. These replacements enter and
# exit the autocast, as the code of a forward does.
_AUTOCAST = {"_enter_autocast": _enter_autocast, "_exit_autocast": _exit_autocast}


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
