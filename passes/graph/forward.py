"""The forward of one module instance, run from its graph."""

from __future__ import annotations

import importlib
import itertools
import linecache
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from passes.errors import UnseenCall
from passes.graph.guards import class_code, inner_forward
from passes.graph.structure import CallStructure, binder_of, skeleton_of, spec_of

_numbers = itertools.count()


class GraphForward:
    """Stands in a module's `__dict__` as its `forward`, so that class, attributes and tree of the module stay.

    It holds one graph for each training flag that it was made for. It is copied and pickled with its module. What it
    computes never changes: a pass that changes the forward installs a new one.
    """

    def __init__(
        self,
        owner: nn.Module,
        path: str,
        structure: CallStructure,
        graphs: dict[bool, tuple[fx.Graph, pytree.TreeSpec]],
    ) -> None:
        self.owner = owner
        self.path = path
        self.structure = structure
        self.graphs = graphs
        self._plain = structure.only_positional_tensors
        self._arity = len(structure.leaves)
        self._bind = binder_of(structure.signature)
        self._functions: dict[bool, Callable[..., Any]] = {}

    def move_to(self, graph: fx.Graph, copy: fx.Graph) -> None:
        """Hold `copy` where it held `graph`, which is about to be written to; the two are equal."""
        self.graphs = {flag: (copy if held is graph else held, spec) for flag, (held, spec) in self.graphs.items()}

    def prepare(self) -> None:
        """Compile the graphs now, which else happens at the first call.

        Most forwards are replaced by a later pass before they are called once. What stays is to be ready: a tracer of
        bytecode such as torch.compile can't follow the making of a function.
        """
        for flag, (graph, _) in self.graphs.items():
            if flag not in self._functions:
                self._functions[flag] = compile_graph(graph, self.path)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        training = self.owner.training
        if training not in self._functions:
            self._prepare_for(training)
        tensors: Sequence[Any]
        if self._plain and not kwargs and len(args) == self._arity and all(isinstance(a, torch.Tensor) for a in args):
            tensors = args
        else:
            tensors = self._tensors(args, kwargs)
        leaves = self._functions[training](self.owner, *tensors)
        return pytree.tree_unflatten(leaves, self.graphs[training][1])

    def _prepare_for(self, training: bool) -> None:
        if training not in self.graphs:
            raise UnseenCall(
                f"{self._name()} was rewritten for {'training' if not training else 'inference'} and is called with"
                f" training={training}: call .{'eval' if training else 'train'}() on it, or optimize it in the other mode"
            )
        self.prepare()

    def _tensors(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
        try:
            return self.structure.tensors_of(self._bind(*args, **kwargs))
        except UnseenCall as error:
            raise UnseenCall(
                f"{self._name()} is called {error}: give optimize() example inputs that call it so"
            ) from None

    def _name(self) -> str:
        return f"{type(self.owner).__name__} at {self.path or 'the root'}"

    def __reduce__(self) -> tuple[Any, ...]:
        graphs = {flag: (_nodes_of(graph), skeleton_of(spec)) for flag, (graph, spec) in self.graphs.items()}
        # The owner comes as state, not as an argument: it holds this object, and pickle breaks the cycle at the state.
        return _empty_forward, (), (self.owner, self.path, self.structure, graphs)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        owner, path, structure, graphs = state
        self.__init__(  # type: ignore[misc]
            owner,
            path,
            structure,
            {flag: (_graph_of(nodes), spec_of(skeleton)) for flag, (nodes, skeleton) in graphs.items()},
        )
        self.prepare()

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphForward:
        twin = object.__new__(GraphForward)
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        twin.owner = memo.get(id(self.owner), self.owner)
        return twin

    @property
    def __code__(self) -> Any:
        # torch.export asks the forward of the root for it, to name its inputs.
        return class_code(self.owner)

    @property
    def __signature__(self) -> Any:
        # Code that asks a model for its arguments (transformers' generate does) reads them here.
        return self.structure.signature


def compile_graph(graph: fx.Graph, path: str) -> Callable[..., Any]:
    """The Python function `f(owner, *tensors) -> list of leaves` of a graph."""
    code = graph.python_code("self")
    name = f"<graph of {path or 'the root'} {next(_numbers)}>"
    # Tracebacks show the lines of the graph.
    linecache.cache[name] = (len(code.src), None, code.src.splitlines(keepends=True), name)
    namespace = dict(code.globals)
    exec(compile(code.src, name, "exec"), namespace)
    function: Callable[..., Any] = namespace["forward"]
    weakref.finalize(function, linecache.cache.pop, name, None)
    return function


def _empty_forward() -> GraphForward:
    return object.__new__(GraphForward)


def _nodes_of(graph: fx.Graph) -> list[tuple[str, str, Any, Any, Any]]:
    """The graph as plain tuples; other nodes among the arguments become `_Reference`s."""
    return [
        (
            node.op,
            node.name,
            _Named.of(node.target) if node.op == "call_function" else node.target,
            fx.node.map_aggregate(node.args, _portable),
            fx.node.map_aggregate(node.kwargs, _portable),
        )
        for node in graph.nodes
    ]


@dataclass(frozen=True)
class _Named:
    """An object by the module and the name that it is found under: not all of torch's own can be pickled."""

    module: str
    name: str

    @classmethod
    def of(cls, function: Any) -> Any:
        """The function by name; itself where no module has it under its name."""
        name = getattr(function, "__name__", "")
        homes = (getattr(function, "__module__", None), "torch", "torch.nn.functional", "torch._C._nn", "operator")
        for home in homes:
            if home and getattr(sys.modules.get(home), name, None) is function:
                return cls(home, name)
        return function

    def find(self) -> Any:
        """The object."""
        return getattr(importlib.import_module(self.module), self.name)


def _found(value: Any) -> Any:
    return value.find() if isinstance(value, _Named) else value


def _portable(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        return _Reference(argument.name)
    if isinstance(argument, torch.memory_format):
        # Protocols of pickle before the fourth, `torch.save` has the second, can't hold it.
        return _Named("torch", str(argument).removeprefix("torch."))
    return argument


class _Reference(str):
    """The name of a node."""


def _graph_of(nodes: list[tuple[str, str, Any, Any, Any]]) -> fx.Graph:
    graph = fx.Graph()
    known: dict[str, fx.Node] = {}

    def resolve(argument: Any) -> Any:
        return fx.node.map_aggregate(
            argument, lambda leaf: known[leaf] if isinstance(leaf, _Reference) else _found(leaf)
        )

    for op, name, target, args, kwargs in nodes:
        known[name] = graph.create_node(op, _found(target), resolve(args), resolve(kwargs), name=name)
    return graph


def prepare_forwards(root: nn.Module) -> None:
    """Make every graph that stands in for a forward in the tree ready to be run."""
    for module in root.modules():
        installed = inner_forward(module)
        if isinstance(installed, GraphForward):
            installed.prepare()
