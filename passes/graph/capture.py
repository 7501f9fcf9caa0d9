"""One FX graph for the forward of every module that can be traced, with its children as calls.

A module whose forward can't be traced is an island: it stays as it is, and the reason is kept. Its children have graphs
of their own. Nothing that a trace would freeze or lose goes into a graph: what is drawn, created or switched in a
forward is recorded as a node where FX can express it, and makes an island where it can't.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from passes.graph.baked import Baked, TooMuch
from passes.graph.forward import GraphForward
from passes.graph.guards import InstanceForward, inner_forward
from passes.graph.side_effects import Snapshot, contains, forget, holds_generator, random_state, set_random_state
from passes.graph.structure import CallStructure, Unstructured, signature_of
from passes.graph.tracing import (
    IS_TENSOR,
    ForwardTracer,
    Interception,
    Tree,
    Untraceable,
    always_tensor,
    function_of,
    why_not_traced,
)

# nn.Module is patched for the time of a capture: one at a time.
_capturing = threading.Lock()


@dataclass
class ModuleGraph:
    """The graph of one module's forward.

    Attributes:
        path: where the module stands in the tree; "" for the root.
        module: the module of the working copy that owns the graph; the graph's targets are relative to it.
        graph: its inputs are the tensors of a call, its output a list of the leaves of what the module returns.
        structure: what the calls look like that the graph answers.
        outputs: the tree of the outputs.
        traced: true for a trace, which is what the forward does for every call of that structure; false for a recorded
            run, which shows what it did and is never executed.
        flags: the values of `training` that the graph holds for; none for the one that the module has.
        baked: the attributes and globals that a trace read: the graph holds for these values.
    """

    path: str
    module: nn.Module
    graph: fx.Graph
    structure: CallStructure
    outputs: pytree.TreeSpec
    traced: bool = True
    flags: tuple[bool, ...] = ()
    baked: tuple[Baked, ...] = ()

    def forward(self) -> GraphForward:
        """The graph as a forward for its module."""
        flags = self.flags or (self.module.training,)
        graphs = dict.fromkeys(flags, (self.graph, self.outputs))
        return GraphForward(self.module, self.path, self.structure, graphs, self.baked)


@dataclass
class Island:
    """A module whose forward stays as it is.

    Attributes:
        path: where the module stands.
        reason: a clause about its forward.
    """

    path: str
    module: nn.Module
    reason: str


@dataclass
class Capture:
    """The graphs and islands of one tree.

    Attributes:
        leaks: (module, attribute) where a trace left a value of its own in a module; to be copied from the original.
    """

    root: nn.Module
    graphs: dict[int, ModuleGraph] = field(default_factory=dict)
    islands: dict[int, Island] = field(default_factory=dict)
    leaks: list[tuple[nn.Module, str]] = field(default_factory=list)


def is_atom(module: nn.Module) -> bool:
    """Whether a call of the module is one operation: it runs a forward of torch.nn's own, or has no Python forward."""
    instance_forward = module.__dict__.get("forward")
    if isinstance(module, torch.jit.ScriptModule):
        return True
    if isinstance(instance_forward, InstanceForward) and instance_forward.is_atom:
        return True
    if isinstance(module, nn.Sequential | fx.GraphModule) or "forward" in module.__dict__:
        return False
    home = getattr(type(module).forward, "__module__", None) or ""
    return home.startswith(("torch.nn.", "torch.ao.nn."))


def capture(
    root: nn.Module,
    structures: Mapping[int, CallStructure | str] | None = None,
    uncalled: frozenset[int] = frozenset(),
) -> Capture:
    """Trace the forward of every module of the tree that is no atom.

    Args:
        root: a module that may be traced, which is to say run on symbols: a working copy. What a trace changes in it,
            or in globals and containers that its forwards name, is put back.
        structures: for the modules, by identity, that a recorded run called: the structure of their calls, or the reason
            why they have none. The others are traced for a tensor at each parameter without a default.
        uncalled: modules, by identity, that a recorded run didn't call: nothing is known of their calls, and they are
            left out.
    """
    with _capturing:
        draws = random_state()
        work = _Work(root, structures or {}, uncalled)
        work.run()
        if draws != random_state():
            # Some forward draws numbers from Python or numpy: each is looked at on its own.
            set_random_state(draws)
            work = _Work(root, structures or {}, uncalled, watch_draws=True)
            work.run()
        if root.training:
            work.compare_with_eval()
        return work.result


class _Work:
    """One capture of one tree."""

    def __init__(
        self,
        root: nn.Module,
        structures: Mapping[int, CallStructure | str],
        uncalled: frozenset[int],
        *,
        watch_draws: bool = False,
    ) -> None:
        self.result = Capture(root)
        self.structures = structures
        self.uncalled = uncalled
        self.watch_draws = watch_draws
        self.interception = Interception(Tree(root))
        self.leaked: list[tuple[nn.Module, list[weakref.ref[fx.Proxy]]]] = []

    def run(self) -> None:
        with self.interception.installed():
            modules = list(self.result.root.named_modules())
            # Children first: what they return is then known to those that call them.
            for path, module in reversed(modules):
                if is_atom(module) or id(module) in self.uncalled or not _has_forward(module):
                    continue
                try:
                    self.result.graphs[id(module)] = self._graph_of(path, module)
                except Untraceable as error:
                    self.result.islands[id(module)] = Island(path, module, str(error))
        order = {id(module): index for index, (_, module) in enumerate(modules)}
        self.result.graphs = dict(sorted(self.result.graphs.items(), key=lambda item: order[item[0]]))
        self.result.islands = dict(sorted(self.result.islands.items(), key=lambda item: order[item[0]]))
        self._clean()

    def _returns_tensor(self, module: nn.Module) -> bool:
        graph = self.result.graphs.get(id(module))
        if graph is None:
            return always_tensor(module)
        (output,) = (node for node in reversed(graph.graph.nodes) if node.op == "output")
        leaves = output.args[0]
        return graph.outputs.is_leaf() and isinstance(leaves[0], fx.Node) and IS_TENSOR in leaves[0].meta

    def compare_with_eval(self) -> None:
        """Find the graphs that hold in eval just so: those of forwards that don't look at `training`."""
        with _all_in_eval(self.result.root), self.interception.installed():
            for graph in self.result.graphs.values():
                if isinstance(inner_forward(graph.module), GraphForward):
                    continue
                try:
                    other = self._trace(graph.path, graph.module, graph.structure)
                except Untraceable:
                    continue
                if other.outputs == graph.outputs and same_graphs(graph.graph, other.graph):
                    graph.flags = (True, False)
        self._clean()

    def _graph_of(self, path: str, module: nn.Module) -> ModuleGraph:
        installed = inner_forward(module)
        if isinstance(installed, GraphForward):
            return _installed_graph(path, module, installed)
        if type(module).__call__ is not nn.Module.__call__ and not isinstance(module, fx.GraphModule):
            raise Untraceable("its class has a __call__ of its own")
        if holds_generator(module):
            raise Untraceable("it has a random generator of its own")
        structure = self.structures.get(id(module))
        if isinstance(structure, str):
            raise Untraceable(structure)
        try:
            structure = structure or CallStructure.by_default(signature_of(module))
        except Unstructured as error:
            raise Untraceable(str(error)) from error
        return self._trace(path, module, structure)

    def _trace(self, path: str, module: nn.Module, structure: CallStructure) -> ModuleGraph:
        function = function_of(module)
        if function is not None and (reason := why_not_traced(function.__code__)):
            raise Untraceable(reason)
        before = Snapshot(module, function)
        draws = random_state() if self.watch_draws else None
        self.interception.wrap_imported(function)
        tracer = ForwardTracer(self.interception.tree, module, structure, self._returns_tensor)
        found: tuple[fx.Graph, pytree.TreeSpec] | None = None
        reason = ""
        self.interception.tracer = tracer
        try:
            found = tracer.trace_forward()
        except Untraceable as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - a forward that runs on symbols may raise anything: it is an island
            reason = f"its forward can't be traced ({_first_line(error)})"
        finally:
            self.interception.tracer = None
            changed = before.restore()
        symbols = tracer.symbols
        tracer.close()
        if any(symbol() is not None for symbol in symbols):
            self.leaked.append((module, symbols))
        if draws is not None and draws != random_state():
            set_random_state(draws)
            raise Untraceable("its forward draws random numbers that a graph would freeze")
        if changed:
            raise Untraceable(reason or "its forward changes attributes or containers that outlive the call")
        if found is None:
            raise Untraceable(reason)
        try:
            baked = tracer.reads.baked()
        except TooMuch:
            raise Untraceable("its forward reads an object that holds too much to be compared at every call") from None
        return ModuleGraph(path, module, found[0], structure, found[1], baked=baked)

    def _clean(self) -> None:
        """Take symbols that traces left somewhere out of there, and make islands of the modules whose traces it were."""
        if not self.leaked:
            return
        gc.collect()
        left = []
        for module, symbols in self.leaked:
            alive = [symbol for reference in symbols if (symbol := reference()) is not None]
            if alive:
                left += alive
                self._make_island(module)
        self.leaked.clear()
        if left:
            self.result.leaks += _places_in(self.result.root)
            forget(left)

    def _make_island(self, module: nn.Module) -> None:
        graph = self.result.graphs.pop(id(module), None)
        if graph is not None:
            reason = "its forward keeps values of a call somewhere"
            self.result.islands[id(module)] = Island(graph.path, module, reason)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _installed_graph(path: str, module: nn.Module, forward: GraphForward) -> ModuleGraph:
    """The graph that an earlier run made the module's forward."""
    if module.training not in forward.graphs:
        raise Untraceable("its forward was rewritten in the other mode")
    if (changed := forward.changed()) is not None:
        raise Untraceable(f"its forward was rewritten when {changed} was another")
    graph, outputs = forward.graphs[module.training]
    flags = tuple(forward.graphs)
    return ModuleGraph(path, module, copy.deepcopy(graph), forward.structure, outputs, flags=flags, baked=forward.baked)


@contextmanager
def _all_in_eval(root: nn.Module) -> Iterator[None]:
    flags = [(module, module.__dict__["training"]) for module in root.modules() if "training" in module.__dict__]
    try:
        for module, _ in flags:
            module.__dict__["training"] = False
        yield
    finally:
        for module, flag in flags:
            module.__dict__["training"] = flag


def same_graphs(first: fx.Graph, second: fx.Graph) -> bool:
    """Whether two graphs are the same operations on the same arguments in the same order."""
    if len(first.nodes) != len(second.nodes):
        return False
    return all(_node_key(mine) == _node_key(theirs) for mine, theirs in zip(first.nodes, second.nodes, strict=True))


def _node_key(node: fx.Node) -> tuple[object, ...]:
    # Names are made in the order of the nodes: in equal graphs they are equal too. The text of an argument tells apart
    # what compares equal, such as 1 and True.
    return node.op, node.target, node.name, repr(node.args), repr(node.kwargs)


def _places_in(root: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (module, name)
        for module in root.modules()
        for name, value in module.__dict__.items()
        if name not in ("_parameters", "_buffers", "_modules") and contains(value, fx.Proxy)
    ]


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    line = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    return line if len(line) <= 160 else f"{line[:157]}..."
