"""All graphs of one module tree, and who feeds whom across them.

A `fx.Node` is a place in the program: a call of a module, of a function or of a method in the forward of some module.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase

from passes.graph.capture import Capture, Island, ModuleGraph, is_atom
from passes.graph.memory import SharedMemory, places_in
from passes.graph.named_reads import NamedReads
from passes.graph.recording import AUTOCAST, Places, Recordings
from passes.graph.tracing import writes_in_place
from passes.program.folded import is_carried
from passes.program.moved_bias import common_path
from passes.program.seals import opened_from, sealed_for


@dataclass(frozen=True)
class Coverage:
    """How much of a module passes can reach.

    Attributes:
        reached: modules with parameters of their own that some graph calls or reads from.
        parameterised: all modules with parameters of their own.
        graphs: forwards that were traced.
        recorded: islands whose recorded runs agree and stand in for a graph.
        islands: (path, reason) of each forward that couldn't be traced.
    """

    reached: int
    parameterised: int
    graphs: int
    recorded: int
    islands: tuple[tuple[str, str], ...]

    @property
    def share(self) -> float:
        """Reached by parameterised modules; 1 where no module has parameters."""
        return self.reached / self.parameterised if self.parameterised else 1.0


@dataclass
class Program:
    """The graphs of one working copy.

    Attributes:
        root: the working copy.
        mode: "inference" or "training".
        graphs: for each module with a graph, by identity; recorded ones only where there is no trace.
        unregistered: the modules that stand in plain containers and not in the tree, with their paths; of what they do,
            recorded runs alone tell.
        parts: what is known of the modules without one, whose recorded runs agree on this much.
        islands: the modules whose forward couldn't be traced.
        recordings: what recorded runs agree on; None where there were no example inputs.
        made: the parameters that passes have made, by identity: no other module than the working copy's holds them.
        other_states: in training, the programs of the same tree with all of it in training, or all in eval, where that is
            another state than the tree's own: a result answers in each. They are read, never rewritten.
        flags: the training flag of each module, by identity, that the graphs were made with.
        graph_call: what passes over captured graphs set as the root's call, with all that was captured.
    """

    root: nn.Module
    mode: str
    graphs: dict[int, ModuleGraph]
    islands: dict[int, Island]
    recordings: Recordings | None
    unregistered: Places = ()
    parts: list[ModuleGraph] = field(default_factory=list)
    made: weakref.WeakValueDictionary[int, nn.Parameter] = field(default_factory=weakref.WeakValueDictionary)
    paths: dict[int, list[str]] = field(default_factory=dict)
    other_states: tuple[Program, ...] = ()
    flags: dict[int, bool] = field(default_factory=dict)
    graph_call: Any = None
    _home: dict[fx.Graph, ModuleGraph] = field(default_factory=dict)
    _modules: dict[fx.Node, nn.Module] = field(default_factory=dict)
    _calls: dict[int, list[fx.Node]] = field(default_factory=dict)
    _reads: dict[tuple[int, str], list[fx.Node]] = field(default_factory=dict)
    _tensor_owners: dict[int, int] = field(default_factory=dict)
    _unregistered: frozenset[int] = frozenset()
    _opaque: frozenset[str] = frozenset()
    _named_reads: NamedReads | None = None
    _memory: SharedMemory | None = None
    _by_path: dict[str, ModuleGraph] = field(default_factory=dict)
    _sources: dict[fx.Graph, dict[fx.Node, frozenset[fx.Node]]] = field(default_factory=dict)

    @classmethod
    def of(cls, captured: Capture, recordings: Recordings | None, mode: str, unregistered: Places = ()) -> Program:
        graphs, islands = dict(captured.graphs), dict(captured.islands)
        for path, module in unregistered:
            if not is_atom(module):
                islands.setdefault(id(module), Island(path, module, "the tree doesn't register it"))
        for key, graph in (recordings.graphs if recordings else {}).items():
            if key in islands:
                graphs.setdefault(key, graph)
        chains = recordings.chains if recordings else []
        parts = [part for part in chains if id(part.module) in islands]
        flags = {id(module): module.training for module in captured.root.modules() if hasattr(module, "training")}
        program = cls(captured.root, mode, graphs, islands, recordings, unregistered, parts, flags=flags)
        program.refresh()
        return program

    def refresh(self) -> None:
        """Read the tree and the graphs anew, after edits."""
        self.paths = defaultdict(list)
        for path, module in self.root.named_modules(remove_duplicate=False):
            self.paths[id(module)].append(path)
        for path, module in self.unregistered:
            self.paths[id(module)].append(path)
        self._unregistered = frozenset(id(module) for _, module in self.unregistered)
        self._tensor_owners = defaultdict(int)
        for module in self.modules():
            for tensor in own_tensors(module).values():
                self._tensor_owners[id(tensor)] += 1
        self._memory = None
        self._home, self._modules, self._sources = {}, {}, {}
        self._calls, self._reads = defaultdict(list), defaultdict(list)
        for graph in (*self.graphs.values(), *self.parts):
            self._read_graph(graph)
        self._by_path = {graph.path: graph for graph in self.graphs.values()}
        self._opaque = frozenset(island.path for key, island in self.islands.items() if key not in self.graphs)
        for other in self.other_states:
            other.refresh()

    def _read_graph(self, graph: ModuleGraph) -> None:
        self._home[graph.graph] = graph
        for node in graph.graph.nodes:
            if node.op == "call_module":
                module = node.meta["module"] if not graph.traced else resolve(graph.module, node.target)
                self._modules[node] = module
                self._calls[id(module)].append(node)
            elif node.op == "get_attr":
                self.note_reader(node)

    def note_reader(self, node: fx.Node) -> None:
        """Know of a `get_attr` node: those of edits count at once, and not only when all is read anew."""
        owner, name = self._owner(self.home(node), node)
        self._reads[(id(owner), name)].append(node)

    def _owner(self, graph: ModuleGraph, node: fx.Node) -> tuple[nn.Module, str]:
        if not graph.traced:
            return node.meta["owner"], str(node.target)
        path, _, name = str(node.target).rpartition(".")
        return resolve(graph.module, path), name

    def modules(self) -> Iterator[nn.Module]:
        """Every module once: those of the tree, then those that it doesn't register."""
        yield from self.root.modules()
        yield from dict.fromkeys(module for _, module in self.unregistered)

    def is_registered(self, module: nn.Module) -> bool:
        """Whether the module stands in the tree, and not in plain containers alone."""
        return id(module) not in self._unregistered

    def nodes(self) -> Iterator[fx.Node]:
        """Every node of every graph, in the order of the tree and of each forward."""
        for graph in (*self.graphs.values(), *self.parts):
            yield from graph.graph.nodes

    def home(self, node: fx.Node) -> ModuleGraph:
        """The graph that the node stands in, here or in another state."""
        found = self._home.get(node.graph)
        return found or next(state._home[node.graph] for state in self.other_states if node.graph in state._home)

    def innermost_around(self, first: fx.Node, second: fx.Node) -> ModuleGraph | None:
        """The graph of the innermost module that both nodes stand in, or in modules below it; None where it has none."""
        home, other = self.home(first), self.home(second)
        if home is other:
            return home
        return self._by_path.get(common_path(home.path, other.path))

    def module_of(self, node: fx.Node) -> nn.Module | None:
        """The module that the node calls; None for other nodes."""
        return self._modules.get(node)

    def calls_of(self, module: nn.Module) -> list[fx.Node]:
        """Every place that calls the module, under whatever name."""
        return self._calls.get(id(module), [])

    def tensor_of(self, node: fx.Node) -> tuple[nn.Module, str, torch.Tensor | None]:
        """Owner, name and value of the parameter, buffer or attribute that a `get_attr` node reads."""
        owner, name = self._owner(self.home(node), node)
        return owner, name, getattr(owner, name, None)

    def readers_of(self, module: nn.Module, name: str) -> list[fx.Node]:
        """The nodes that read a parameter or buffer of the module, other than by calling the module."""
        return self._reads.get((id(module), name), [])

    def recorded_readers_of(self, module: nn.Module, name: str) -> set[int]:
        """The modules, by identity, whose forwards read the tensor in a recorded run, other than by calling its owner."""
        return self.recordings.reads.get((id(module), name), set()) if self.recordings else set()

    def holders_of(self, tensor: torch.Tensor) -> int:
        """Under how many modules and names the tree holds the tensor."""
        return self._tensor_owners.get(id(tensor), 0)

    def sharer_of(self, tensor: torch.Tensor) -> str | None:
        """The path of another tensor in the memory of this one that would miss a change, or change this one unseen.

        In training any does: the two are written together from then on. In inference a pass makes a new tensor, and the
        others keep their values: there it is a tensor that a forward may write to, which parameters aren't.
        """
        place = self._shared_memory().beside(tensor)
        return None if place is None else place.path

    @property
    def shares_memory(self) -> bool:
        """Whether `sharer_of` has anything to say of some tensor: most trees share nothing."""
        return self._shared_memory().is_any

    def _shared_memory(self) -> SharedMemory:
        if self._memory is None:
            # Most forwards write to nothing: then nothing has to be known.
            known = self.mode == "training" or self._may_write()
            places = places_in((self.paths[id(module)][0], module) for module in self.modules() if known)
            may_count = self.mode == "training"
            self._memory = SharedMemory(places, counts=lambda other: may_count or not isinstance(other, nn.Parameter))
        return self._memory

    def _may_write(self) -> bool:
        """Whether some forward writes to tensors that it didn't make itself, as far as the graphs tell."""
        if any(key not in self.graphs for key in self.islands):
            return True
        if not all(graph.shows_every_call for graph in self.graphs.values()):
            return True
        if any(isinstance(module, _NormBase) and module.training for module in self.modules()):
            return True
        return any(writes_in_place(graph.graph) for graph in self.graphs.values())

    @property
    def named_reads(self) -> NamedReads:
        """What the code of the forwards can reach; it is read once, in the tree as it was captured."""
        if self._named_reads is None:
            self._named_reads = NamedReads(self.root, self.unregistered)
        return self._named_reads

    def calls_in_a_run(self, module: nn.Module) -> int | None:
        """How often the module is called in each recorded run; None without runs, or where they don't agree."""
        count = self.recordings.counts.get(id(module), 0) if self.recordings else -1
        return count if count >= 0 else None

    def autocast_at(self, node: fx.Node) -> torch.dtype | None:
        """The dtype of the autocast that the operation ran under in some recorded run; None where it ran under none."""
        if self.recordings is None:
            return None
        module = self.module_of(node) or self.home(node).module
        return self.recordings.autocast.get(id(module), node.meta.get(AUTOCAST))

    def opaque_around(self, node: fx.Node) -> str | None:
        """The path of a module around the node of which nothing is known, neither by trace nor by recorded runs."""
        parts = self.home(node).path.split(".")
        around = ("", *(".".join(parts[:length]) for length in range(1, len(parts) + 1)))
        return next((path for path in around if path in self._opaque), None)

    def rank_of_input(self, node: fx.Node) -> int | None:
        """The number of dims of the one tensor that the node is given; None where it isn't known.

        It is known of called modules, and of functions on an input of their graph, where every recorded run agrees on it.
        """
        module = self.module_of(node)
        if self.recordings is None:
            return None
        if module is not None:
            ranks = self.recordings.ranks.get(id(module), ())
            return ranks[0] if len(ranks) == 1 else None
        inputs = [source for source in node.all_input_nodes if source.op == "placeholder"]
        return self._ranks_of_inputs(self.home(node)).get(inputs[0]) if len(inputs) == 1 else None

    def inputs_behind(self, node: fx.Node) -> dict[fx.Node, int]:
        """The inputs of its graph that a value is made of, each with the number of dims that every recorded run gave it."""
        home = self.home(node)
        if home.graph not in self._sources:
            self._sources[home.graph] = _sources_in(home.graph)
        behind = self._sources[home.graph].get(node, frozenset())
        return {other: rank for other, rank in self._ranks_of_inputs(home).items() if other in behind}

    def _ranks_of_inputs(self, graph: ModuleGraph) -> dict[fx.Node, int]:
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        ranks = self.recordings.ranks.get(id(graph.module), ()) if self.recordings else ()
        return dict(zip(inputs, ranks, strict=True)) if len(ranks) == len(inputs) else {}

    def producer(self, node: fx.Node) -> fx.Node:
        """The operation that makes the value, looked up across the borders of modules that are called once."""
        following: fx.Node | None = node
        while following is not None:
            node, following = following, self._one_step_back(following)
        return node

    def way_to_producer(self, node: fx.Node) -> Iterator[fx.Node]:
        """The nodes whose value this is, from the node itself to the operation that makes it."""
        following: fx.Node | None = node
        while following is not None:
            yield following
            following = self._one_step_back(following)

    def _one_step_back(self, node: fx.Node) -> fx.Node | None:
        if node.op == "placeholder":
            return self._argument_outside(node)
        # Most nodes are neither.
        if self.is_identity(node):
            return node.all_input_nodes[0]
        inner = self._inner_graph(node)
        return None if inner is None else _only_output(inner.graph)

    def users(self, node: fx.Node) -> list[fx.Node]:
        """The operations that use the value, looked up likewise; an `output` node where it leaves the known program."""
        found: list[fx.Node] = []
        waiting = list(node.users)
        while waiting:
            user = waiting.pop()
            inner = self._inner_graph(user)
            if self.is_identity(user):
                waiting.extend(user.users)
            elif inner is not None and (inside := _only_input(inner.graph)) is not None:
                waiting.extend(inside.users)
            elif user.op == "output" and (call := self._only_call(user)) is not None:
                waiting.extend(call.users)
            else:
                found.append(user)
        return found

    def is_identity(self, node: fx.Node) -> bool:
        """Whether the node gives its first argument as it is."""
        module = self.module_of(node)
        if module is None:
            return node.op == "call_function" and node.target in (sealed_for, opened_from)
        if len(node.all_input_nodes) != 1:
            return False
        if isinstance(module, nn.Identity):
            return type(module).forward is nn.Identity.forward and is_atom(module)
        return is_carried(module)

    def _inner_graph(self, node: fx.Node) -> ModuleGraph | None:
        module = self.module_of(node)
        graph = None if module is None else self.graphs.get(id(module))
        if graph is None or is_atom(graph.module) or len(self.calls_of(graph.module)) != 1:
            return None
        return graph

    def _argument_outside(self, placeholder: fx.Node) -> fx.Node | None:
        graph = self.home(placeholder)
        calls = self.calls_of(graph.module)
        if not graph.whole or len(calls) != 1 or graph.module is self.root or _only_input(graph.graph) is None:
            return None
        sources = calls[0].all_input_nodes
        return sources[0] if len(sources) == 1 else None

    def _only_call(self, output: fx.Node) -> fx.Node | None:
        graph = self.home(output)
        calls = self.calls_of(graph.module)
        if not graph.whole or len(calls) != 1 or graph.module is self.root or _only_output(graph.graph) is None:
            return None
        return calls[0]

    def where(self, node: fx.Node) -> str:
        """The path of the called module, or the path of the caller with the name of the operation."""
        module = self.module_of(node)
        if module is not None:
            return self.paths[id(module)][0] if id(module) in self.paths else str(node.target)
        home = self.home(node).path or "the root"
        return f"{home} ({operation_name(node)})"

    def coverage(self) -> Coverage:
        """What passes can reach."""
        owners = [module for module in self.modules() if any(p is not None for p in module._parameters.values())]
        read = {owner for (owner, _), nodes in self._reads.items() if nodes}
        reached = [m for m in owners if id(m) in read or (self.calls_of(m) and (is_atom(m) or id(m) in self.graphs))]
        if is_atom(self.root):
            reached = owners
        traced = [graph for graph in self.graphs.values() if graph.traced]
        return Coverage(
            reached=len(reached),
            parameterised=len(owners),
            graphs=len(traced),
            recorded=len(self.graphs) - len(traced),
            islands=tuple((island.path, island.reason) for island in self.islands.values()),
        )


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers that the module itself registers."""
    if isinstance(module, torch.jit.ScriptModule):
        return {}
    both = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def resolve(owner: nn.Module, target: Any) -> nn.Module:
    """The module that a graph of `owner` calls `target`."""
    found: nn.Module = owner
    for name in str(target).split("."):
        if name not in found._modules:
            # An attribute that the tree doesn't register, or the owner itself.
            return owner.get_submodule(str(target))
        found = found._modules[name]  # type: ignore[assignment]
    return found


def operation_name(node: fx.Node) -> str:
    """A short name for what the node does."""
    if node.op == "call_function":
        target: Any = node.target
        name = str(getattr(target, "__name__", target))
        # A run records a property of tensors as what reads it.
        return str(getattr(target.__self__, "__name__", name)) if name == "__get__" else name
    return str(node.target)


def _sources_in(graph: fx.Graph) -> dict[fx.Node, frozenset[fx.Node]]:
    """For each node, the inputs of the graph that its value is made of."""
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        behind = [found[other] for other in node.all_input_nodes]
        # Most are made of what one of their arguments is made of: they share its set.
        widest = max(behind, key=len, default=frozenset())
        joined = widest if all(other <= widest for other in behind) else widest.union(*behind)
        found[node] = frozenset({node}) if node.op == "placeholder" else joined
    return found


def _only_output(graph: fx.Graph) -> fx.Node | None:
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    leaves = output.args[0]
    if not isinstance(leaves, list | tuple) or len(leaves) != 1 or not isinstance(leaves[0], fx.Node):
        return None
    return leaves[0]


def _only_input(graph: fx.Graph) -> fx.Node | None:
    inputs = []
    for node in graph.nodes:
        if node.op != "placeholder":
            break
        inputs.append(node)
    return inputs[0] if len(inputs) == 1 else None
