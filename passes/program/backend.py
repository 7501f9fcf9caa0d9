"""Graph passes as one backend of torch.compile's front end, in the place of a module's call.

torch.compile captures the module's forward as graphs, guards each by what it was made of, and captures anew where that
changes: other attributes, hooks, dtypes, kinds of arguments, shapes. Each captured graph is rewritten by the passes, in
order, and run by eager kernels. What looks at single operations (a tracer, an exporter, the user's own torch.compile, vmap)
gets the plain forward; `whole_graph` makes what exporters are given.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx, nn

from passes.program.captured import CapturedGraph, Modules
from passes.program.changes import Place
from passes.program.graph_rewriting import GraphRewriter
from passes.program.hooks import has_global_hooks
from passes.torch_private import COMPILED_CALL, captured_call, is_watched

# The name in a module's `__dict__` under which its call goes with copies and pickles.
GRAPH_CALL = "_graph_call"
_numbers = itertools.count()


class Step(Protocol):
    """A pass in the list of a call."""

    def rewrite(self, captured: CapturedGraph, inputs: Sequence[Any]) -> CapturedGraph:
        """The graph as the pass makes it; the given one stays as it is."""


@dataclass(frozen=True)
class Applied:
    """A pass whose changes were found to be right.

    Attributes:
        item: the pass.
        context: the settings that it was run in.
        kept: the places of its changes; none is made anywhere else.
    """

    item: Any
    context: Any
    kept: frozenset[Place]

    def rewrite(self, captured: CapturedGraph, inputs: Sequence[Any]) -> CapturedGraph:
        """As said there."""
        return self.rewriter(captured).captured

    def rewriter(self, captured: CapturedGraph) -> GraphRewriter:
        """What the graph was rewritten with, once it is."""
        graph = GraphRewriter(captured, self._why_not)
        self.item.rewrite(graph, self.context)
        return graph

    def _why_not(self, place: Place) -> str | None:
        return None if place in self.kept else ""


class GraphCall:
    """Stands in the slot of a module's call, as `Module.compile()` sets it; class, tree and attributes stay.

    It goes with deep copies and pickles of the module, which capture anew. A shallow copy has the plain call of its class.

    Attributes:
        owner: the module.
        passes: what rewrites its graphs, in order.
    """

    def __init__(self, owner: nn.Module, passes: tuple[Step, ...] = ()) -> None:
        self.owner = owner
        self.passes = passes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_watched() or has_global_hooks():
            return self.owner._call_impl(*args, **kwargs)
        return compilation_of(self).compiled.run(self.owner, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphCall:
        owner = memo.get(id(self.owner), self.owner)
        twin = memo[id(self)] = GraphCall(owner, self.passes)
        if owner is not self.owner:
            owner.__dict__[COMPILED_CALL] = twin
        return twin

    def __getstate__(self) -> tuple[Any, ...]:
        return self.owner, self.passes

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.owner, self.passes = state
        self.owner.__dict__[COMPILED_CALL] = self


def rewritten(call: GraphCall, graph: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """A graph that another backend of torch.compile was given, as the passes of a call make it."""
    captured = CapturedGraph(graph.graph, Modules(call.owner), None, inputs)
    for step in call.passes:
        captured = step.rewrite(captured, inputs)
    return fx.GraphModule(graph, captured.graph)


@contextmanager
def without_graph_call(root: nn.Module) -> Iterator[GraphCall | None]:
    """Inside, the root is called as its class says; gives what stands in the slot otherwise, None for nothing of ours."""
    call = root.__dict__.get(COMPILED_CALL)
    if not isinstance(call, GraphCall):
        yield None
        return
    root.__dict__[COMPILED_CALL] = None
    try:
        yield call
    finally:
        root.__dict__[COMPILED_CALL] = call


class Compilation:
    """What was captured for one call.

    Attributes:
        compiled: f(module, args, kwargs), the call by captured graphs.
        graphs: them, in the order of their capture.
        error: what a pass raised while it rewrote one.
    """

    def __init__(self, call: GraphCall) -> None:
        self._call = weakref.ref(call)
        self.graphs: list[_Program] = []
        self.error: Exception | None = None
        this = weakref.ref(self)

        def capture(graph: fx.GraphModule, inputs: Sequence[Any], around: nn.Module | None) -> Callable[..., Any]:
            compilation = this()
            return graph.forward if compilation is None else compilation._captured(graph, inputs, around)

        self.compiled = captured_call(entry_of(type(call.owner)), capture)

    def why_nothing(self) -> str:
        """A clause why no graph was captured."""
        error = self.compiled.error
        if error is None:
            return "torch.compile captures no graph of it: its forward runs no operation of torch that can be captured"
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"torch.compile captures no graph of it ({lines[0].rstrip('.')})"

    def _captured(self, graph: fx.GraphModule, inputs: Sequence[Any], around: nn.Module | None) -> Callable[..., Any]:
        call = self._call()
        assert call is not None
        captured = CapturedGraph(graph.graph, Modules(call.owner), around, inputs)
        program = _Program(graph, captured, self._call, weakref.ref(self))
        self.graphs.append(program)
        return program


class _Program:
    """One captured graph as it runs: rewritten by the passes that the call has at the time."""

    def __init__(
        self,
        origin: fx.GraphModule,
        captured: CapturedGraph,
        call: weakref.ref[GraphCall],
        compilation: weakref.ref[Compilation],
    ) -> None:
        self.origin = origin
        self.captured = captured
        self._call = call
        self._compilation = compilation
        self._lock = threading.Lock()
        # The passes, and what they made.
        self._made: tuple[tuple[Step, ...], Callable[..., Any]] | None = None

    def __call__(self, *inputs: Any) -> Any:
        call, made = self._call(), self._made
        if made is None or (call is not None and made[0] is not call.passes):
            made = self._make(() if call is None else call.passes, inputs)
        return made[1](*inputs)

    def _make(self, passes: tuple[Step, ...], inputs: Sequence[Any]) -> tuple[tuple[Step, ...], Callable[..., Any]]:
        with self._lock:
            try:
                captured = self.captured
                for step in passes:
                    captured = step.rewrite(captured, inputs)
                captured.graph.lint()
                function = fx.GraphModule(self.origin, captured.graph).forward
            except Exception as error:  # noqa: BLE001 - a pass may be anybody's: without it the graph is right all the same
                if (compilation := self._compilation()) is not None:
                    compilation.error = error
                function = self.origin.forward
            self._made = passes, function
            return self._made


# Not in the calls themselves: whoever copies or puts back what modules hold sees nothing of it.
_compilations: weakref.WeakKeyDictionary[GraphCall, Compilation] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def compilation_of(call: GraphCall) -> Compilation:
    """What was captured for a call, so far."""
    found = _compilations.get(call)
    if found is None:
        with _lock:
            found = _compilations.setdefault(call, Compilation(call))
    return found


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module._call_impl(*args, **kwargs)


def entry_of(cls: type[nn.Module], call: Any = _call) -> Callable[..., Any]:
    """A function with a code of its own, by which torch.compile keeps what it captures, and counts it."""
    code = call.__code__.replace(co_name=f"call_{next(_numbers)}_of_{cls.__name__}")
    # Names are found by importing the module that they are in, which needn't be possible, but for those of the function's.
    around = getattr(inspect.unwrap(cls.forward), "__globals__", _call.__globals__)
    return types.FunctionType(code, around)


__all__ = [
    "GRAPH_CALL",
    "Applied",
    "Compilation",
    "GraphCall",
    "Step",
    "compilation_of",
    "entry_of",
    "rewritten",
    "without_graph_call",
]
