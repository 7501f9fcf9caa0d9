"""A forward captured by torch.compile: one flat graph of torch operations, with the parameters among its inputs.

Submodules are inlined: a call of a linear layer is one call of `torch._C._nn.linear`. Each node records which module
made it, and holds an example of its value without data: a FakeTensor or a symbolic size.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from passes.base import TensorRef
from passes.torch_private import (
    OpOverload,
    OpOverloadPacket,
    enter_autocast,
    has_autocast,
    module_id_of,
    without_subclasses,
)

# A line of a textual stack: the file and the number of the line.
FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = Path(torch.__file__).parent
# torch's own key in `node.meta` for the example of a node's value.
EXAMPLE = "example_value"


class Modules:
    """Look-up tables for the modules and tensors of a tree, keyed by `id`."""

    def __init__(self, root: nn.Module) -> None:
        # Stored as ids, so that captured graphs keep no module alive.
        self.paths = {id(module): path for path, module in root.named_modules()}  # the path of each module
        # The ids of the layers whose class torch.nn defines
        self.stock = {
            id(module) for module in root.modules() if type(module).__module__.startswith("torch.nn.modules.")
        }
        named = (*root.named_parameters(), *root.named_buffers())
        self.tensors = {id(tensor): path for path, tensor in named}  # the path of each parameter and buffer
        self._root = weakref.ref(root)

    def buffer_at(self, path: str) -> TensorRef | None:
        """The place of a buffer; None if there is no buffer at the path."""
        owner, _, name = path.rpartition(".")
        module = self._module_at(owner)
        return None if module is None or name not in module._buffers else TensorRef(module, name)

    def tensor_at(self, path: str) -> torch.Tensor | None:
        """The parameter or buffer that is now at a path; None if there is none."""
        owner, _, name = path.rpartition(".")
        module = self._module_at(owner)
        found = None if module is None else getattr(module, name, None)
        return found if isinstance(found, torch.Tensor) else None

    def _module_at(self, path: str) -> nn.Module | None:
        root = self._root()
        try:
            return None if root is None else root.get_submodule(path)
        except AttributeError:
            # It was replaced by other code since.
            return None


class CapturedGraph:
    """One captured graph, which passes read and rewrite."""

    def __init__(
        self,
        graph: fx.Graph,
        modules: Modules,
        around: nn.Module | None,
        inputs: Sequence[Any],
        derived: Any,
    ) -> None:
        self.graph = graph
        # Holds the subgraphs that nodes refer to, as those of torch.cond.
        self.home: nn.Module = graph.owning_module or nn.Module()
        self.modules = modules  # the look-up tables of the root module
        self.derived = derived  # the `DerivedTensors` of the model
        self._around = modules.paths.get(id(around), "")
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        # For each placeholder that is a parameter or buffer, its path, such as "layer1.0.weight"
        self.tensors = {
            node: modules.tensors[id(value)]
            for node, value in zip(placeholders, inputs, strict=True)
            if id(value) in modules.tensors
        }

    def copied(self) -> tuple[CapturedGraph, dict[fx.Node, fx.Node]]:
        """Copy the graph; also returns the mapping from the old nodes to the new ones."""
        nodes: dict[fx.Node, fx.Node] = {}
        graph = fx.Graph()
        for node in self.graph.nodes:
            nodes[node] = graph.node_copy(node, nodes.__getitem__)
        twin = copy.copy(self)
        twin.graph = graph
        twin.tensors = {nodes[node]: path for node, path in self.tensors.items() if node in nodes}
        return twin, nodes

    def is_of(self, other: CapturedGraph) -> bool:
        """Whether both are the same capture, perhaps rewritten."""
        return self.modules is other.modules

    def value_of(self, node: fx.Node) -> torch.Tensor | None:
        """The parameter or buffer itself; None for other nodes, and for a tensor that the model has dropped."""
        path = self.tensors.get(node)
        return None if path is None else self.modules.tensor_at(path)

    def path_of(self, node: fx.Node) -> str:
        """The path of the module whose forward made the node; "" for the root."""
        paths = (
            self.modules.paths.get(module_id_of(key) or 0) for key in reversed(node.meta.get("nn_module_stack") or ())
        )
        return next((path for path in paths if path is not None), self._around)

    def calls_around(self, node: fx.Node) -> tuple[tuple[str, str], ...]:
        """The calls of the root's submodules around the node, from the outermost: torch's key of each, and the path."""
        keys = node.meta.get("nn_module_stack") or ()
        paths = ((key, self.modules.paths.get(module_id_of(key) or 0)) for key in keys)
        return tuple((key, path) for key, path in paths if path)

    def line_of(self, node: fx.Node) -> str:
        """The innermost line outside torch that made the node: "net.py:17"; "" if it isn't known."""
        frames = [found for found in FRAME.finditer(node.meta.get("stack_trace") or "") if is_users(found[1])]
        return f"{Path(frames[-1][1]).name}:{frames[-1][2]}" if frames else ""

    def is_of_layer(self, node: fx.Node) -> bool:
        """Whether a torch.nn layer made the node."""
        return any(module_id_of(key) in self.modules.stock for key in node.meta.get("nn_module_stack") or ())

    def where(self, node: fx.Node) -> str:
        """The location of the node for reports: "encoder.act", or "encoder (mul)" if no torch.nn layer made it.

        In the second call of a module it is "encoder.act, call 2".
        """
        path = self.path_of(node)
        place = path if path and self.is_of_layer(node) else f"{path or 'the root'} ({name_of(node)})"
        key = next(reversed(node.meta.get("nn_module_stack") or {}), "")
        earlier = key.partition("@")[2]
        return f"{place}, call {int(earlier) + 1}" if earlier.isdecimal() else place


def is_users(file: str) -> bool:
    """Whether a source file belongs to the user, not to torch; generated code has no file."""
    return file.endswith(".py") and not Path(file).is_relative_to(_TORCH)


def name_of(node: Any) -> str:
    """The name of the node's function or method: "relu" for F.relu, torch.relu and Tensor.relu.

    Operators of other libraries have names with their namespace: "quantized::linear". An argument that is no node, such as
    a number, has the name "".
    """
    if not isinstance(node, fx.Node):
        return ""
    target = node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target
    if isinstance(target, OpOverloadPacket):
        return str(target._qualified_op_name).removeprefix("aten::")
    return str(target) if node.op == "call_method" else str(getattr(target, "__name__", target))


def example_of(node: Any) -> Any:
    """An example of the node's value without data; None if there is none, as of an argument that is no node."""
    return node.meta.get(EXAMPLE) if isinstance(node, fx.Node) else None


def is_tensor(node: Any) -> bool:
    """Whether the argument is a node whose value is a tensor."""
    return isinstance(example_of(node), torch.Tensor)


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of the node's call, by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def take_place(new: fx.Node, node: fx.Node) -> None:
    """Let a new node count as made where another one was: by the same modules and line."""
    new.meta.update({name: value for name, value in node.meta.items() if name in ("nn_module_stack", "stack_trace")})


def propagate(node: fx.Node) -> None:
    """Set the example value of a new node, computed from the examples of its arguments; sets nothing if that fails."""
    try:
        value = value_with(node, {})
    except Exception:  # noqa: BLE001 - the function may not support fake tensors; the node then has no example
        return
    if value is not None:
        node.meta[EXAMPLE] = value


def value_with(node: fx.Node, examples: Mapping[fx.Node, Any]) -> Any:
    """Compute an example of the node's value from the examples of its arguments; None if one of them has no example.

    Args:
        examples: examples to use for some of the arguments instead of their own.

    Raises:
        Exception: any error of the node's function.
    """
    values: list[Any] = []

    def example(argument: fx.Node) -> Any:
        values.append(examples[argument] if argument in examples else example_of(argument))
        return values[-1]

    args, kwargs = fx.map_arg(node.args, example), fx.map_arg(node.kwargs, example)
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    mode = next((tensor.fake_mode for tensor in tensors if hasattr(tensor, "fake_mode")), None)
    if mode is None and tensors and all(tensor.is_meta for tensor in tensors):
        # The examples of a recorded run.
        mode = nullcontext()
    if mode is None or any(value is None for value in values):
        return None
    with mode, torch.no_grad(), autocast_at(node):
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        function: Any = node.target
        return function(*args, **kwargs)


@contextmanager
def autocast_at(node: fx.Node) -> Iterator[None]:
    """Enter the autocasts that the graph itself opens around the node; outer ones are active already."""
    with ExitStack() as stack:
        for enter in _autocasts_at(node):
            options: Any = enter.args
            stack.enter_context(torch.autocast(*options))
        yield


def _autocasts_at(node: fx.Node) -> Iterator[fx.Node]:
    for enter in node.graph.find_nodes(op="call_function", target=enter_autocast):
        # The user of an enter node's value is the matching exit node.
        if enter < node and all(node < user for user in enter.users):
            yield enter


def is_under_autocast(node: fx.Node) -> bool:
    """Whether the graph itself opens an autocast around the node."""
    return any(True for _ in _autocasts_at(node))


def computing(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that call a function, method or module."""
    return (node for node in graph.nodes if node.op in ("call_function", "call_method", "call_module"))


def subgraph(wanted: Sequence[fx.Node], stops: Sequence[fx.Node], also: Sequence[fx.Node] = ()) -> fx.Graph:
    """Copy the nodes that compute `wanted` from `stops`; the stops become placeholders, the output is a tuple.

    Args:
        also: further nodes to copy, which write in place.

    Raises:
        KeyError: a value depends on an input of the graph that isn't in `stops`.
    """
    graph = fx.Graph()
    nodes = {stop: graph.placeholder(f"value_{number}") for number, stop in enumerate(stops)}
    for node in sorted(between([*wanted, *also], nodes)):
        nodes[node] = graph.node_copy(node, nodes.__getitem__)
    graph.output(tuple(nodes[node] for node in wanted))
    return graph


@dataclass(frozen=True)
class GraphFunction:
    """The Python function of a graph; it returns one value, or a tuple of several.

    Functions with equal code of the same operations are equal, unless they refer to subgraphs or constants of `home`.
    """

    code: str
    targets: tuple[Any, ...]
    home: nn.Module | None
    forward: Callable[..., tuple[Any, ...]] = field(compare=False)

    def __call__(self, *values: Any) -> Any:
        """Compute the graph's outputs from its inputs."""
        outputs = self.forward(*values)
        return outputs[0] if len(outputs) == 1 else outputs


def function_of(graph: fx.Graph, home: nn.Module) -> GraphFunction:
    """The function of a graph that `subgraph` made; `home` holds the subgraphs and constants that its nodes refer to."""
    module = fx.GraphModule(home, graph)
    targets = tuple(node.target for node in graph.nodes if node.op == "call_function")
    refers = any(node.op in ("get_attr", "call_module") for node in graph.nodes)
    return GraphFunction(module.code, targets, home if refers else None, module.forward)


def before(nodes: Iterable[fx.Node], is_inside: Callable[[fx.Node], bool]) -> dict[fx.Node, None]:
    """The nodes and all that compute them, up to and including the first on each way that isn't inside."""
    found: dict[fx.Node, None] = {}
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            waiting += node.all_input_nodes if is_inside(node) else ()
    return found


def between(wanted: Iterable[fx.Node], stops: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes that compute `wanted` from `stops`, including `wanted` and excluding `stops`."""
    return {node for node in before(wanted, lambda node: node not in stops) if node not in stops}


# Derived tensors --------------------------------------------------------------------------------------------------------

Usable = Callable[[torch.Tensor], str | None]


class Derived:
    """The call in a graph that computes a derived tensor.

    Args:
        function: computes the tensor; differentiable. Equal functions of the same sources share one value, so a frozen
            dataclass with `__call__` is better than a closure.
        what: a description of the tensor, for reports.
        usable: the reason why a value must not be used, as a clause; None for values that may.
        in_autocast: whether the function is part of the forward and follows an active autocast. If False, it is always
            run without autocast.
        each_call: whether it is computed in the graph at each call, because gradients flow through it.
    """

    # torch.fx requires a name for functions in a graph.
    __name__ = "derived"
    takes_and_gives = True

    def __init__(
        self,
        function: Callable[..., Any],
        what: str,
        usable: Usable | None = None,
        *,
        in_autocast: bool = True,
        each_call: bool = False,
    ) -> None:
        try:
            hash(function)
        except TypeError:
            raise TypeError(
                f"derived() takes a hashable function, and {type(function).__name__} isn't: write a function, or a frozen "
                "dataclass with __call__."
            ) from None
        self.function = function
        self.what = what
        self.usable = usable
        self.in_autocast = in_autocast
        self.each_call = each_call

    def __call__(self, *sources: torch.Tensor) -> torch.Tensor:
        off = not self.in_autocast and has_autocast()
        with torch.autocast(sources[0].device.type, enabled=False) if off else nullcontext(), without_subclasses():
            value: torch.Tensor = self.function(*sources)
        return value


class Unusable(Exception):
    """A value that the pass can't use; the message is a clause with the reason."""
