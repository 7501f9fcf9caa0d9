"""The forward of one module instance, run from its graph."""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import linecache
import sys
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from passes.errors import UnseenCall
from passes.graph.baked import Baked, BakedShape, found_again, portable
from passes.graph.structure import CallStructure, binder_of, skeleton_of, spec_of
from passes.program.forwards import InstanceForward, class_code, inner_forward
from passes.program.pairs import FoldedPair
from passes.program.seals import SealedOutput, SealedTensor, TracedOutput, opened_from

_numbers = itertools.count()
# The functions of graphs, by their text and what it names.
_known_functions: weakref.WeakValueDictionary[Any, Callable[..., Any]] = weakref.WeakValueDictionary()
# A quick look at something that a graph counts on, and that itself.
_Look = tuple[Callable[[], bool] | None, Baked]
# What is given to a graph without a look at the structure of the call, which most of all calls are.
_AS_THEY_ARE = frozenset({torch.Tensor, SealedTensor, TracedOutput})


class GraphForward:
    """Stands in a module's `__dict__` as its `forward`, so that class, attributes and tree of the module stay.

    It holds one graph for each training flag that it was made for. It is copied and pickled with its module. What it
    computes never changes: a pass that changes the forward installs a new one. Where an attribute or global that the
    forward read when it was traced isn't what it was, or a call is of another structure, the graph doesn't hold: the call
    raises, or the forward of the class answers it.

    Attributes:
        baked: what the forward read.
        ranks: by the place of an input among the tensors of a call, the number of dims that a rewrite holds for.
        lost: the pairs in the graphs whose bias was trained and went into the running mean.
        gives_way: whether the forward of the class is as right as the graph, and answers where that doesn't hold.
    """

    def __init__(
        self,
        owner: nn.Module,
        path: str,
        structure: CallStructure,
        graphs: dict[bool, tuple[fx.Graph, pytree.TreeSpec]],
        baked: tuple[Baked, ...] = (),
        ranks: tuple[tuple[int, int], ...] = (),
        lost: tuple[FoldedPair, ...] = (),
        *,
        gives_way: bool = False,
    ) -> None:
        self.lost = lost
        self.gives_way = gives_way
        self.owner = owner
        self.path = path
        self.structure = structure
        self.graphs = graphs
        self.baked = baked
        self.ranks = ranks
        self._checked = _to_check(baked, owner, tuple(graphs))
        self._bind = binder_of(structure.signature)
        self._read = structure.reader(_AS_THEY_ARE)
        self._looks: Sequence[_Look] = ()
        self._functions: dict[bool, Callable[..., Any]] = {}
        self._single = {flag: outputs.is_leaf() for flag, (_, outputs) in graphs.items()}

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
                self._functions[flag] = compile_graph(graph, self._title)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        training = self.owner.training
        try:
            tensors = self._admitted(training, args, kwargs)
        except UnseenCall:
            if not self.gives_way:
                raise
            return type(self.owner).forward(self.owner, *args, **kwargs)
        leaves = self._functions[training](self.owner, *tensors)
        if self.lost and not training:
            self._watch_gradients(leaves)
        # Most modules return one value.
        return leaves[0] if self._single[training] else pytree.tree_unflatten(leaves, self.graphs[training][1])

    def _admitted(self, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """The tensors of a call that the graph holds for.

        Raises:
            UnseenCall: it doesn't hold.
        """
        if training not in self._functions:
            self._prepare_for(training)
        changed = self._changed_item()
        if changed is not None:
            raise UnseenCall(
                f"{self._name_of(changed)} was changed after optimize(), which put its value into the graph of"
                f" {self._name()}: put it back, or change it in the original model and optimize that again."
            )
        tensors = self._read(*args, **kwargs) if self._read is not None else None
        if tensors is None:
            tensors = self._tensors(args, kwargs)
        for index, rank in self.ranks:
            if tensors[index].dim() != rank:
                raise UnseenCall(
                    f"{self._name()} was rewritten for {rank}-D input and is given {tensors[index].dim()}-D input for"
                    f" {self.structure.tensor_names[index]}: give optimize() example inputs that call it so.",
                    rewritten=self.path,
                )
        return tensors

    def _changed_item(self) -> Baked | None:
        """What of the things that the forward read isn't what it was; None for nothing."""
        if torch.compiler.is_compiling():
            for item in self._checked:
                if not item.holds:
                    return item
            return None
        for look, item in self._looks or self._look():
            if (look is None or not look()) and not item.holds:
                return item
        return None

    def _look(self) -> Sequence[_Look]:
        """What is compared at every call, each with the quick look that mostly does."""
        self._looks = tuple((item.look(), item) for item in self._checked)
        return self._looks

    def _watch_gradients(self, leaves: Sequence[Any]) -> None:
        if torch.compiler.is_compiling():
            return
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                for pair in self.lost:
                    leaf.register_hook(pair.warn_of_lost_gradient)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """What the module alone computes, wherever its inputs come from, with nobody looking where its outputs go."""
        self._prepare_for(self.owner.training)
        graph, outputs = self.graphs[self.owner.training]
        if not any(node.target is opened_from for node in graph.nodes):
            return pytree.tree_map(_unsealed, self(*args, **kwargs))
        function = compile_graph(_opening(graph), self._title)
        leaves = function(self.owner, *self._tensors(args, kwargs))
        return pytree.tree_unflatten([_unsealed(leaf) for leaf in leaves], outputs)

    def _prepare_for(self, training: bool) -> None:
        if training not in self.graphs:
            raise UnseenCall(
                f"{self._name()} was rewritten for {'training' if not training else 'inference'} and is called with"
                f" training={training}: call .{'eval' if training else 'train'}() on it, or optimize it in the other mode"
            )
        self.prepare()

    def _tensors(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        try:
            return tuple(self.structure.tensors_of(self._bind(*args, **kwargs)))
        except UnseenCall as error:
            raise UnseenCall(
                f"{self._name()} is called {error}: give optimize() example inputs that call it so", rewritten=self.path
            ) from None

    def changed(self) -> str | None:
        """What of the things that the forward read isn't what it was; None for nothing."""
        item = self._changed_item()
        return None if item is None else self._name_of(item)

    def _name_of(self, item: Baked) -> str:
        if isinstance(item.holder, type):
            return f"{item.name} of the class {item.holder.__name__}"
        if not isinstance(item.holder, nn.Module):
            return f"the global {item.name}" if isinstance(item.holder, dict) else "a variable around the forward"
        path = ".".join(item.path)
        name = "the list of children" if item.name == "_modules" else item.name
        name = f"the shape of {name}" if isinstance(item, BakedShape) else name
        return f"{name} of {'.'.join(filter(None, (self.path, path))) or 'the root'}"

    @property
    def functions(self) -> Mapping[bool, Callable[..., Any]]:
        """The function of the graph for each training flag; equal graphs have the same."""
        self.prepare()
        return self._functions

    @property
    def _title(self) -> str:
        return type(self.owner).__name__

    def _name(self) -> str:
        return f"{type(self.owner).__name__} at {self.path or 'the root'}"

    def __reduce__(self) -> tuple[Any, ...]:
        graphs = {flag: (nodes_of(graph), skeleton_of(spec)) for flag, (graph, spec) in self.graphs.items()}
        # The owner comes as state, not as an argument: it holds this object, and pickle breaks the cycle at the state.
        baked, checked = (
            [moved for item in items if (moved := portable(item)) is not None] for items in (self.baked, self._checked)
        )
        state = (self.owner, self.path, self.structure, graphs, self.ranks, self.lost, self.gives_way, baked, checked)
        return _empty_forward, (), state

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        owner, path, structure, graphs, ranks, lost, gives_way, baked, checked = state
        self.__init__(  # type: ignore[misc]
            owner,
            path,
            structure,
            {flag: (graph_of(nodes), spec_of(skeleton)) for flag, (nodes, skeleton) in graphs.items()},
            ranks=ranks,
            lost=lost,
            gives_way=gives_way,
        )
        # The owner has nothing yet that could be looked at.
        self.baked, self._checked = (
            tuple(found for item in items if (found := found_again(item)) is not None) for items in (baked, checked)
        )
        self.prepare()

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphForward:
        twin = object.__new__(GraphForward)
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        twin.owner = memo.get(id(self.owner), self.owner)
        twin._looks = ()
        if twin.owner is not self.owner:
            # The modules that it reads from are copied with their owner, if only later.
            twin.baked = tuple(_copied(item, memo) for item in self.baked)
            twin._checked = tuple(_copied(item, memo) for item in self._checked)
        return twin

    @property
    def __code__(self) -> Any:
        # torch.export asks the forward of the root for it, to name its inputs.
        return class_code(self.owner)

    @property
    def __signature__(self) -> Any:
        # Code that asks a model for its arguments (transformers' generate does) reads them here.
        return self.structure.signature


def _to_check(baked: tuple[Baked, ...], owner: nn.Module, flags: tuple[bool, ...]) -> tuple[Baked, ...]:
    """What has to be compared at a call; what a graph reads anew at every call hasn't."""
    found = (
        item.of_now() for item in baked if item.name != "training" or (item.home() is not owner and len(flags) == 1)
    )
    return tuple(item for item in found if item is not None)


def _copied(item: Baked, memo: dict[int, Any]) -> Baked:
    return item.moved(copy.deepcopy(item.holder, memo)) if isinstance(item.holder, nn.Module) else item


def compile_graph(graph: fx.Graph, title: str) -> Callable[..., Any]:
    """The Python function `f(owner, *tensors) -> list of leaves` of a graph, which is one for all equal graphs.

    What is compiled for one of many equal modules is then right for the others too: torch.compile tells functions apart by
    their code. Tracebacks show the lines of the graph, under the title of the first that it was made for.
    """
    code = graph.python_code("self")
    key = code.src, tuple((name, id(value)) for name, value in code.globals.items())
    known = _known_functions.get(key)
    if known is not None:
        return known
    name = f"<graph of {title} {next(_numbers)}>"
    linecache.cache[name] = (len(code.src), None, code.src.splitlines(keepends=True), name)
    namespace = dict(code.globals)
    exec(compile(code.src, name, "exec"), namespace)
    function: Callable[..., Any] = namespace["forward"]
    weakref.finalize(function, linecache.cache.pop, name, None)
    # The function holds its names, so that what the key tells by identity lives as long.
    _known_functions[key] = function
    return function


def _opening(graph: fx.Graph) -> fx.Graph:
    """The same graph, that takes a value also without the seal that it checks."""
    copy = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        twin = nodes[node] = copy.node_copy(node, nodes.__getitem__)
        if twin.target is opened_from:
            twin.target = _unsealed
            twin.args = twin.args[:1]
    return copy


def _unsealed(value: Any) -> Any:
    return value.sealed_value if isinstance(value, SealedOutput) else value


def _empty_forward() -> GraphForward:
    return object.__new__(GraphForward)


def nodes_of(graph: fx.Graph) -> list[tuple[str, str, Any, Any, Any]]:
    """The graph as plain tuples, which can be pickled; other nodes among the arguments become `_Reference`s."""
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


def graph_of(nodes: list[tuple[str, str, Any, Any, Any]]) -> fx.Graph:
    """The reverse of `nodes_of`."""
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


def bound_forward(forward: Any) -> types.MethodType | None:
    """The forward of one instance as a method bound to it, by whose code torch.compile goes.

    An object it tells by its identity alone, so that what is compiled for one module is wrong for any other. None where it
    is no object of ours.
    """
    if not isinstance(forward, GraphForward | InstanceForward):
        return None
    run = type(forward).__call__
    function = types.FunctionType(run.__code__, run.__globals__, run.__name__, run.__defaults__, run.__closure__)
    function.__kwdefaults__ = run.__kwdefaults__
    signature = inspect.Signature.from_callable(forward)  # type: ignore[arg-type]
    owner = inspect.Parameter("_self", inspect.Parameter.POSITIONAL_ONLY)
    function.__dict__["__signature__"] = signature.replace(parameters=[owner, *signature.parameters.values()])
    return types.MethodType(function, forward)


def unbound_forward(forward: Any) -> Any:
    """The reverse of `bound_forward`; anything else as it is."""
    if type(forward) is not types.MethodType or not isinstance(forward.__self__, GraphForward | InstanceForward):
        return forward
    return forward.__self__
