"""Replace the forward of a module by one rewritten graph, for tracers and exporters.

Tracers see the plain forward of a module, not the graphs that graph passes rewrite. Here the whole forward is captured
once more as a single graph, with the same dynamic sizes as in the file, and rewritten by the same passes. This graph
replaces the forward. Parameters and buffers are read from the module under their own names, derived tensors become
parameters or buffers, and inputs and outputs stay those of the forward.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from passes.graph.backend import GRAPH_CALL, Applied, GraphCall
from passes.graph.captured import CapturedGraph, Derived, example_of, is_tensor, name_of
from passes.graph.forwards import InstanceForward, has_hooks
from passes.graph.whole_captures import FlatCall, NoWholeGraph, WholeCapture, WholeTrace, reader
from passes.torch_private import COMPILED_CALL, FUNCTIONS, OpOverload, is_tracing, is_watched, without_subclasses


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
    capture = WholeCapture(module, call)
    try:
        captured = capture.run()
    except NoWholeGraph as broken:
        capture = WholeTrace(module, call)
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
        is_of_torch = isinstance(node.target, OpOverload) and node.target.namespace == "aten"
        if is_of_torch and any(isinstance(example_of(source), torch.SymInt) for source in node.all_input_nodes):
            node.target = _SizedOperator(node.target)
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
    """

    def __init__(self, owner: nn.Module, plain: nn.Module, capture: WholeCapture, captured: CapturedGraph) -> None:
        graph = captured.graph
        self.owner = owner
        self._plain = plain
        self._call = capture.call
        self._conditions = capture.conditions
        self._reads = [capture.reads[node.name] for node in graph.nodes if node.op == "placeholder"]
        self._outputs = capture.outputs
        calls = [node for node in graph.nodes if is_tensor(node) and _computes(node)]
        # As `operations_of_whole_graph` returns
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


def _keep(node: fx.Node, module: nn.Module, capture: WholeCapture, captured: CapturedGraph) -> None:
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


class _SizedOperator:
    """An operator that takes sizes; while TorchScript traces, torch's Python function for it.

    The trace records sizes in calls of Python functions only. It would take those of an operator for constants.
    """

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        # torch.fx requires a name for functions in a graph.
        self.__name__ = name = operator._schema.name.removeprefix("aten::")
        if name == "slice":
            self._in_python: Any = _sliced
        else:
            homes = (*FUNCTIONS, torch.Tensor)
            self._in_python = next((getattr(home, name) for home in homes if hasattr(home, name)), operator)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._in_python if is_tracing() else self._operator)(*args, **kwargs)


def _sliced(tensor: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> torch.Tensor:
    return tensor[(*[slice(None)] * (dim % tensor.dim()), slice(start, end, step))]


class _Buffer:
    """A call in a graph that reads a parameter or buffer."""

    # torch.fx requires a name for functions in a graph.
    __name__ = "buffer"

    def __init__(self, module: nn.Module, name: str) -> None:
        self._read = reader(module, name)
        self._module, self._name = module, name

    def remove(self) -> None:
        """Remove it from its module."""
        delattr(self._module, self._name)

    def __call__(self) -> torch.Tensor:
        value: torch.Tensor = self._read(())
        return value


def _computes(node: fx.Node) -> bool:
    return node.op.startswith("call_") and not isinstance(node.target, _Buffer)


def _take_out(gone: torch.Tensor, module: nn.Module, capture: WholeCapture) -> None:
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
