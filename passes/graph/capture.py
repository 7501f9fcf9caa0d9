"""One FX graph for the forward of every module that can be traced, with its children as calls.

A module whose forward can't be traced is an island: it stays as it is, and the reason is kept. Its children have graphs
of their own. Nothing that a trace would freeze or lose goes into a graph: what is drawn, created or switched in a
forward is recorded as a node where FX can express it, and makes an island where it can't.
"""

from __future__ import annotations

import copy
import gc
import inspect
import os
import threading
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from passes.graph.baked import Baked
from passes.graph.fingerprint import TooMuch
from passes.graph.forward import GraphForward
from passes.graph.side_effects import (
    REGISTRIES,
    contains,
    forget,
    holds_generator,
    names_generator,
    names_in,
    random_state,
    set_random_state,
    with_helpers,
)
from passes.graph.snapshot import Snapshot
from passes.graph.structure import CallStructure, Unstructured, signature_of
from passes.graph.tracing import (
    IS_TENSOR,
    RANK,
    ForwardTracer,
    Interception,
    Tree,
    Untraceable,
    always_tensor,
    assigns_outside,
    function_of,
    why_not_traced,
)
from passes.program.forwards import InstanceForward, inner_forward
from passes.program.pairs import FoldedPair

# By these a code reads what an object has without asking the object for it.
_PAST_ATTRIBUTES = frozenset({"__dict__", "vars"})

# nn.Module is patched for the time of a capture: one at a time.
_capturing = threading.Lock()
# Whether this thread captures: a forward that captures a module while it is traced would wait for itself.
_busy = threading.local()


def _free_in_child() -> None:
    # The thread that captures doesn't exist in a process that another one forked.
    if not getattr(_busy, "capturing", False):
        _capturing._at_fork_reinit()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_in_child)


@dataclass
class ModuleGraph:
    """The graph of one module's forward.

    Attributes:
        path: where the module stands in the tree; "" for the root.
        module: the module of the working copy that owns the graph; the graph's targets are relative to it.
        graph: its inputs are the tensors of a call, its output a list of the leaves of what the module returns.
        structure: what the calls look like that the graph answers.
        outputs: the tree of the outputs.
        traced: true for a trace, which is what the forward does for every call of that structure, or of that and the
            `ranks` that it branches on; false for a recorded
            run, which shows what it did and is never executed.
        whole: false for a part of what recorded runs did: what its values are made of, and where they go, isn't known.
        flags: the values of `training` that the graph holds for; none for the one that the module has.
        baked: the attributes and globals that a trace read: the graph holds for these values.
        gives_way: whether the forward of the class is as right as the graph, as long as no pass has written to the tensors
            that both read.
    """

    path: str
    module: nn.Module
    graph: fx.Graph
    structure: CallStructure
    outputs: pytree.TreeSpec
    traced: bool = True
    whole: bool = True
    flags: tuple[bool, ...] = ()
    baked: tuple[Baked, ...] = ()
    gives_way: bool = False

    @property
    def ranks(self) -> tuple[tuple[int, int], ...]:
        """The ranks that the graph holds for, each with the place of the input; others go another way, or none."""
        return tuple((i, node.meta[RANK]) for i, node in enumerate(_inputs_of(self.graph)) if RANK in node.meta)

    @property
    def shows_every_call(self) -> bool:
        """Whether it is all that the forward does, of whatever rank its inputs are."""
        return self.traced and not self.ranks

    def forward(
        self,
        others: Mapping[bool, ModuleGraph] | None = None,
        baked: Iterable[Baked] = (),
        lost: Iterable[FoldedPair] = (),
        *,
        gives_way: bool = False,
    ) -> GraphForward:
        """The graph as a forward for its module.

        Args:
            others: the graphs that are to run for values of `training` other than the module's of now.
            baked: what the forward counts on beside what the graphs do.
            lost: the pairs in it that had a bias that was trained.
            gives_way: whether the forward of the class, where it is as right, answers the calls that the graph doesn't
                hold for.
        """
        flags = self.flags or (self.module.training,)
        graphs = dict.fromkeys(flags, (self.graph, self.outputs))
        for flag, other in (others or {}).items():
            graphs.setdefault(flag, (other.graph, other.outputs))
        ranks = {rank: None for each in (self, *(others or {}).values()) for rank in each.ranks}
        read = (*self.baked, *(item for other in (others or {}).values() for item in other.baked), *baked)
        gives_way &= self.gives_way and all(other.gives_way for other in (others or {}).values())
        return GraphForward(
            self.module, self.path, self.structure, graphs, read, tuple(ranks), tuple(lost), gives_way=gives_way
        )


def _inputs_of(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


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
    ranks: Mapping[int, tuple[int, ...]] | None = None,
) -> Capture:
    """Trace the forward of every module of the tree that is no atom.

    Args:
        root: a module that may be traced, which is to say run on symbols: a working copy. What a trace changes in it,
            or in globals and containers that its forwards name, is put back.
        structures: for the modules, by identity, that a recorded run called: the structure of their calls, or the reason
            why they have none. The others are traced for a tensor at each parameter without a default.
        uncalled: modules, by identity, that a recorded run didn't call: nothing is known of their calls, and they are
            left out.
        ranks: for the modules, by identity, whose recorded calls agree on it: the number of dims of each tensor of a call.
    """
    if getattr(_busy, "capturing", False):
        raise Untraceable("its forward captures a module while it is traced")
    with _capturing, _marked_busy():
        codes = _codes_of(root, verified=bool(structures))
        before = _Before(root.modules(), {f: None for code in codes.values() for f in code.functions})
        leaked: list[_Symbols] = []
        for closely in (False, True):
            work = _Work(root, structures or {}, uncalled, ranks or {}, codes, leaked, closely=closely)
            try:
                work.run()
            finally:
                changed = before.restore()
            if not changed:
                break
            # Some forward changes what outlives the call, or draws numbers that a graph would freeze: each is now
            # looked at on its own.
        work.clean()
        return work.result


@contextmanager
def _marked_busy() -> Iterator[None]:
    _busy.capturing = True
    try:
        yield
    finally:
        _busy.capturing = False


@dataclass(frozen=True)
class _Code:
    """What a forward runs.

    Attributes:
        functions: the forward and the functions of its own package that it names.
        reason: the reason, seen in their code, why it can't be traced; None where there is none.
    """

    functions: tuple[types.FunctionType, ...]
    reason: str | None


def _codes_of(root: nn.Module, *, verified: bool) -> dict[int, _Code]:
    """The code of every module that is no atom, by identity.

    Args:
        verified: whether the graphs are compared with the forwards in a run afterwards: it shows what a trace froze.
    """
    found: dict[int, _Code] = {}
    known: dict[tuple[types.FunctionType | None, type], _Code] = {}
    for module in root.modules():
        if is_atom(module):
            continue
        own = function_of(module)
        key = own, type(module)
        if key not in known:
            functions = with_helpers(own, type(module))
            reasons = (_reason_in(function, whole=function is own or not verified) for function in functions)
            known[key] = _Code(tuple(functions), next((reason for reason in reasons if reason), None))
        found[id(module)] = known[key]
    return found


def _reason_in(function: types.FunctionType, *, whole: bool) -> str | None:
    if names_generator(function):
        return "it has a random generator of its own"
    if not _PAST_ATTRIBUTES.isdisjoint(names_in(function.__code__)):
        return "its forward reads attributes from a __dict__, where it isn't seen which"
    return (why_not_traced if whole else assigns_outside)(function.__code__)


class _Before:
    """What forwards may change beside their outputs: what modules hold, what their code names, random generators."""

    def __init__(self, modules: Iterable[nn.Module], functions: Iterable[types.FunctionType]) -> None:
        plain = (module for module in modules if not isinstance(module, torch.jit.ScriptModule))
        self.snapshot = Snapshot(*plain, functions=functions)
        self.draws = random_state()

    def restore(self) -> str | None:
        """Put everything back; the clause about the forward that changed something, None where nothing was changed."""
        changed = self.snapshot.restore()
        if self.draws != random_state():
            set_random_state(self.draws)
            return "its forward draws random numbers that a graph would freeze"
        return "its forward changes attributes or containers that outlive the call" if changed else None


# A module and the symbols that its trace made.
_Symbols = tuple[nn.Module, list[weakref.ref[fx.Proxy]]]


class _Work:
    """One capture of one tree."""

    def __init__(
        self,
        root: nn.Module,
        structures: Mapping[int, CallStructure | str],
        uncalled: frozenset[int],
        ranks: Mapping[int, tuple[int, ...]],
        codes: Mapping[int, _Code],
        leaked: list[_Symbols],
        *,
        closely: bool,
    ) -> None:
        self.result = Capture(root)
        self.structures = structures
        self.uncalled = uncalled
        self.ranks = ranks
        self.codes = codes
        self.leaked = leaked
        self.closely = closely
        self.interception = Interception(Tree(root))

    def run(self) -> None:
        with self._intercepted():
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
        if self.result.root.training:
            self._compare_with_eval()

    @contextmanager
    def _intercepted(self) -> Iterator[None]:
        with self.interception.installed():
            for function in {function: None for code in self.codes.values() for function in code.functions}:
                self.interception.follow_imports(function)
            yield

    def _returns_tensor(self, module: nn.Module) -> bool:
        graph = self.result.graphs.get(id(module))
        if graph is None:
            return always_tensor(module)
        output = next(node for node in reversed(graph.graph.nodes) if node.op == "output")
        leaves = output.args[0]
        return graph.outputs.is_leaf() and isinstance(leaves[0], fx.Node) and IS_TENSOR in leaves[0].meta

    def _compare_with_eval(self) -> None:
        """Find the graphs that hold in eval just so: those of forwards that don't look at `training`."""
        # What is in eval already wasn't traced in training.
        trained = [graph for graph in self.result.graphs.values() if graph.module.training]
        with training_flags(self.result.root, False), self._intercepted():
            for graph in trained:
                if isinstance(inner_forward(graph.module), GraphForward):
                    continue
                try:
                    other = self._trace(graph.path, graph.module, graph.structure)
                except Untraceable:
                    continue
                same = other.outputs == graph.outputs and other.ranks == graph.ranks
                if same and same_graphs(graph.graph, other.graph):
                    graph.flags = (True, False)

    def _graph_of(self, path: str, module: nn.Module) -> ModuleGraph:
        installed = inner_forward(module)
        if isinstance(installed, GraphForward):
            return _installed_graph(path, module, installed)
        if type(module).__call__ is not nn.Module.__call__ and not isinstance(module, fx.GraphModule):
            raise Untraceable("its class has a __call__ of its own")
        if holds_generator(module):
            raise Untraceable("it has a random generator of its own")
        if inspect.isdatadescriptor(inspect.getattr_static(type(module), "forward")):
            raise Untraceable("its class computes its forward, which no other can stand in for")
        structure = self.structures.get(id(module))
        if isinstance(structure, str):
            raise Untraceable(structure)
        try:
            structure = structure or CallStructure.by_default(signature_of(module))
        except Unstructured as error:
            raise Untraceable(str(error)) from error
        return self._trace(path, module, structure)

    def _trace(self, path: str, module: nn.Module, structure: CallStructure) -> ModuleGraph:
        code = self.codes[id(module)]
        if code.reason:
            raise Untraceable(code.reason)
        before = _Before(module.modules(), code.functions) if self.closely else None
        ranks = self.ranks.get(id(module), ())
        tracer = ForwardTracer(self.interception.tree, module, structure, self._returns_tensor, ranks)
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
            changed = before.restore() if before is not None else None
        symbols = tracer.symbols
        tracer.close()
        if any(symbol() is not None for symbol in symbols):
            self.leaked.append((module, symbols))
        if found is None or changed:
            raise Untraceable(reason or changed or "")
        try:
            baked = tracer.reads.baked(tracer.path_of)
        except TooMuch:
            raise Untraceable("its forward reads an object that holds too much to be compared at every call") from None
        return ModuleGraph(
            path,
            module,
            found[0],
            structure,
            found[1],
            baked=baked,
            gives_way=inner_forward(module) is None,
        )

    def clean(self) -> None:
        """Take symbols that traces left somewhere out of there, and make islands of the modules whose traces it were."""
        if not self.leaked:
            return
        gc.collect()
        left: list[fx.Proxy] = []
        for module, symbols in self.leaked:
            known = len(left)
            left += (symbol for reference in symbols if (symbol := reference()) is not None)
            if len(left) > known:
                self._make_island(module)
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
    flags = tuple(flag for flag, (held, _) in forward.graphs.items() if held is graph)
    own = copy.deepcopy(graph)
    inputs = _inputs_of(own)
    for index, rank in forward.ranks:
        inputs[index].meta[RANK] = rank
    return ModuleGraph(
        path, module, own, forward.structure, outputs, flags=flags, baked=forward.baked, gives_way=forward.gives_way
    )


@contextmanager
def training_flags(root: nn.Module, flag: bool) -> Iterator[None]:
    """All modules of the tree in training or in eval for the time of the block, whatever `.train()` of their classes does."""
    flags = [(module, module.__dict__["training"]) for module in root.modules() if "training" in module.__dict__]
    try:
        for module, _ in flags:
            module.__dict__["training"] = flag
        yield
    finally:
        for module, before in flags:
            module.__dict__["training"] = before


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
        if name not in REGISTRIES and contains(value, fx.Proxy)
    ]


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    line = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    return line if len(line) <= 160 else f"{line[:157]}..."
