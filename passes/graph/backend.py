"""Run the graph passes of a model as one torch.compile backend, installed as the module's call.

torch.compile's front end captures the module's forward as one or more graphs and guards each of them. It captures again
when a guard fails: changed attributes, hooks, dtypes, argument types or shapes. The passes rewrite each captured graph
in order, and eager kernels run the result.

Tracers, exporters, the user's own torch.compile and vmap must see single operations, so they get the plain forward.
`whole_graph` makes the version for exporters.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from passes.base import PLAIN_TENSORS, Place
from passes.graph.captured import CapturedGraph, Modules, example_of
from passes.graph.derived import DerivedInputs, DerivedTensors, lifted
from passes.graph.forwards import has_global_hooks
from passes.graph.graph_pass import GraphRewriter
from passes.torch_capture import as_captured, captured_call
from passes.torch_private import COMPILED_CALL, DISPATCHES_AGAIN, forget_sources, is_watched, without_subclasses

# A second attribute that holds the GraphCall, because copies and pickles of a module leave out its compiled call.
GRAPH_CALL = "_graph_call"
_numbers = itertools.count()


class Step(Protocol):
    """One pass in the list of passes of a `GraphCall`."""

    @property
    def token(self) -> object:
        """Identifies the step; steps with the same token rewrite a graph in the same way."""

    def done(self, graph: fx.Graph) -> None:
        """Called after each rewriting, with the graph as torch.compile captured it; may end the run."""

    def rewrite(self, captured: CapturedGraph, inputs: Sequence[Any]) -> CapturedGraph:
        """Return the graph as rewritten by the pass; the given graph is not changed."""


@dataclass(frozen=True)
class Applied:
    """A pass whose changes were checked and found correct."""

    item: Any
    context: Any  # the settings with which it was run
    kept: frozenset[Place]  # the places of the accepted changes; the pass makes no other change
    token: object = field(default_factory=object, compare=False)

    def rewrite(self, captured: CapturedGraph, inputs: Sequence[Any]) -> CapturedGraph:
        """See `Step.rewrite`."""
        return self.rewriter(captured).captured

    def done(self, graph: fx.Graph) -> None:
        """See `Step.done`."""

    def rewriter(self, captured: CapturedGraph) -> GraphRewriter:
        """Rewrite the graph, and return the rewriter with the new graph and the record."""
        graph = GraphRewriter(captured, self._why_not, self.context.mode)
        self.item.rewrite(graph, self.context)
        return graph

    def _why_not(self, place: Place) -> str | None:
        return None if place in self.kept else ""


class GraphCall:
    """Replaces a module's call the way `Module.compile()` does; the module's class, tree and attributes stay the same.

    Deep copies and pickles of the module include it, and capture again. A shallow copy uses the plain call of its
    class.
    """

    def __init__(
        self,
        owner: nn.Module,
        passes: tuple[Step, ...] = (),
        open_dims: Sequence[tuple[int, int]] = (),
        hooked: Sequence[str] = (),
    ) -> None:
        self.owner = owner
        self.passes = passes  # the steps that rewrite its graphs, in order
        # The dims whose sizes vary between calls: the index of the tensor among the arguments, and the dim
        self.open_dims = tuple(open_dims)
        self.hooked = tuple(hooked)  # the paths of the models that register hooks in their first call (`hooked_in`)
        self.is_for_files = False  # whether only files hold the rewritten graph, because calls are faster as written

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_for_files or is_watched() or has_global_hooks() or self._is_trained_under_a_plan():
            return self.owner._call_impl(*args, **kwargs)
        if self.hooked:
            self._register_hooks()
        return compilation_of(self).compiled.run(self.owner, args, kwargs)

    def _register_hooks(self) -> None:
        """Register the hooks that transformers otherwise registers inside of the first call.

        It does so under a lock, at which torch.compile breaks the graph; and it would capture the next call anew.
        """
        module = sys.modules.get("transformers.utils.output_capturing")
        register: Any = getattr(module, "maybe_install_capturing_hooks", None)
        for path in () if register is None else self.hooked:
            register(self.owner.get_submodule(path))

    def _is_trained_under_a_plan(self) -> bool:
        watches = getattr(self.owner.__dict__.get("forward"), "watches_training", False)
        return bool(watches) and torch.is_grad_enabled() and self.owner.training

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphCall:
        owner = memo.get(id(self.owner), self.owner)
        twin = memo[id(self)] = GraphCall(owner, self.passes, self.open_dims, self.hooked)
        twin.is_for_files = self.is_for_files
        if owner is not self.owner:
            owner.__dict__[COMPILED_CALL] = twin
        return twin

    def __getstate__(self) -> tuple[Any, ...]:
        return self.owner, self.passes, self.open_dims, self.hooked, self.is_for_files

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.owner, self.passes, self.open_dims, self.hooked, self.is_for_files = state
        self.owner.__dict__[COMPILED_CALL] = self


def hooked_in(root: nn.Module) -> tuple[str, ...]:
    """The paths of the models whose calls have registered hooks that collect outputs, as transformers' do since 5.0.

    Such as SegFormer, whose decoder reads the hidden states of its encoder in this way.
    """
    name = "_output_capturing_hooks_installed"
    return tuple(path for path, module in root.named_modules() if module.__dict__.get(name) is True)


def names_of_graph_passes(module: nn.Module) -> str:
    """The names of the passes that rewrite a module's graphs, with commas between them; "" for none."""
    call = module.__dict__.get(GRAPH_CALL)
    steps = call.passes if isinstance(call, GraphCall) else ()
    return ", ".join(step.item.name for step in steps if isinstance(step, Applied))


def refresh(module: nn.Module) -> None:
    """Compute the derived tensors of a module's graphs anew at its next call."""
    call = module.__dict__.get(GRAPH_CALL)
    if isinstance(call, GraphCall):
        compilation_of(call).derived.forget()


Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def compiled(call: GraphCall, compiler: Compiler, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph of torch.compile, rewritten by the passes of a call. Derived tensors are inputs of the code."""
    captured = CapturedGraph(graph.graph, Modules(call.owner), None, inputs, compilation_of(call).derived)
    for step in call.passes:
        captured = step.rewrite(captured, inputs)
    rewritten, derived = lifted(captured)
    if derived is None:
        return compiler(as_captured(fx.GraphModule(graph, rewritten), graph), inputs)
    if derived.of(inputs) is None:
        return compiler(graph, inputs)
    further = rewritten.find_nodes(op="placeholder")[len(inputs) :]
    code = compiler(as_captured(fx.GraphModule(graph, rewritten), graph), [*inputs, *map(example_of, further)])
    return _with_derived(code, graph.forward, derived)


@contextmanager
def without_graph_call(root: nn.Module) -> Iterator[GraphCall | None]:
    """Restore the plain call of the root's class for the block; yields the `GraphCall` that was removed, or None."""
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
    """The captured graphs of one `GraphCall`."""

    def __init__(self, call: GraphCall) -> None:
        self._call = weakref.ref(call)
        self.graphs: list[_Program] = []  # the captured graphs, in the order of their capture
        # The last error that a pass raised while it rewrote a graph; None if there was none
        self.error: Exception | None = None
        self.is_complete = False  # whether a run of all example calls has captured these graphs
        self._is_noting = False  # whether `noting_calls` runs
        self.derived = DerivedTensors(call.owner)  # the derived tensors of these graphs
        this = weakref.ref(self)

        def capture(graph: fx.GraphModule, inputs: Sequence[Any], around: nn.Module | None) -> Callable[..., Any]:
            compilation = this()
            return graph.forward if compilation is None else compilation._captured(graph, inputs, around)

        def open_dims(names: Mapping[str, Any]) -> list[tuple[torch.Tensor, int]]:
            compilation = this()
            call = None if compilation is None else compilation._call()
            leaves = dict(enumerate(pytree.tree_leaves((names["args"], names["kwargs"]))))
            dims = [(leaves.get(number), dim) for number, dim in (() if call is None else call.open_dims)]
            return [(leaf, dim) for leaf, dim in dims if isinstance(leaf, torch.Tensor) and leaf.dim() > dim]

        # f(module, args, kwargs), which runs the call by its captured graphs
        self.compiled = captured_call(entry_of(type(call.owner)), capture, open_dims=open_dims)

    @property
    def read(self) -> set[str]:
        """The paths of the parameters and buffers that the graphs read in `noting_calls`."""
        return {path for program in self.graphs for call in program.calls for path in call if path}

    @contextmanager
    def noting_calls(self) -> Iterator[None]:
        """Note the parameters and buffers with which the graphs are called in the block, as `_Program.calls`."""
        call = self._call()
        assert call is not None
        # Some forwards replace their buffers, and a run of the examples works on copies of all.
        paths = Modules(call.owner).tensors
        self._is_noting = True
        for program in self.graphs:
            program.noted = set()
        try:
            yield
        finally:
            self._is_noting = False
            paths |= Modules(call.owner).tensors
            for program in self.graphs:
                program.end_noting(paths)

    def why_nothing(self) -> str:
        """The reason why no graph was captured, as a clause."""
        error = self.compiled.error
        if error is None:
            return "torch.compile captures no graph of it: its forward runs no operation of torch that can be captured"
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"torch.compile captures no graph of it ({lines[0].rstrip('.')})"

    def _captured(self, graph: fx.GraphModule, inputs: Sequence[Any], around: nn.Module | None) -> Callable[..., Any]:
        call = self._call()
        assert call is not None
        captured = CapturedGraph(graph.graph, Modules(call.owner), around, inputs, self.derived)
        program = _Program(graph, captured, self._call, weakref.ref(self))
        program.noted = set() if self._is_noting else None
        self.graphs.append(program)
        return program


class _Program:
    """One captured graph in its runnable form; rewritten again whenever the passes of the call change."""

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
        # The paths of the inputs of each kind of call, as far as they were noted; "" for other inputs
        self.calls: set[tuple[str, ...]] = set()
        self.noted: set[tuple[int, ...]] | None = None  # where each call adds the ids of its inputs
        self._lock = threading.Lock()
        # The passes, and the function that their rewritten graph compiled to.
        self._made: tuple[tuple[Step, ...], Callable[..., Any]] | None = None
        self._derived: DerivedInputs | None = None
        # The token of each step of the last rewriting, and the graph after it.
        self._stages: list[tuple[object, CapturedGraph]] = []

    def end_noting(self, paths: Mapping[int, str]) -> None:
        """Add the calls since `noted` was set to `calls`; `paths` are those of parameters and buffers by `id`."""
        noted, self.noted = self.noted or set(), None
        self.calls |= {tuple(paths.get(number, "") for number in call) for call in noted}

    def other_owners(self) -> Iterator[dict[str, str]]:
        """For each further set of parameters and buffers with which the graph was called, their paths by those of the first.

        torch.compile calls one graph for equal modules after a graph break in each.
        """
        first = tuple(self.captured.tensors.get(node, "") for node in self.captured.graph.find_nodes(op="placeholder"))
        for others in sorted(self.calls - {first}):
            yield {old: new for old, new in zip(first, others, strict=True) if old and new}

    def __call__(self, *inputs: Any) -> Any:
        if self.noted is not None:
            self.noted.add(tuple(map(id, inputs)))
        call, made = self._call(), self._made
        if made is None or (call is not None and made[0] is not call.passes):
            made = self._make(() if call is None else call.passes, inputs)
        return made[1](*inputs)

    def _make(self, passes: tuple[Step, ...], inputs: Sequence[Any]) -> tuple[tuple[Step, ...], Callable[..., Any]]:
        with self._lock:
            forget_sources(map(example_of, self.captured.tensors))
            try:
                captured = self._rewritten(passes, inputs)
                captured.graph.lint()
                function, self._derived = _function_of(captured, self.origin, inputs)
            except Exception as error:  # noqa: BLE001 - a pass may be anyone's code; the original graph is correct
                if (compilation := self._compilation()) is not None:
                    compilation.error = error
                function = self.origin.forward
            if DISPATCHES_AGAIN and not _are_plain(inputs):
                function = _without_subclasses(function)
            self._made = passes, function
            return self._made

    def _rewritten(self, passes: Sequence[Step], inputs: Sequence[Any]) -> CapturedGraph:
        captured = self.captured
        for number, step in enumerate(passes):
            token, known = self._stages[number] if number < len(self._stages) else (None, captured)
            if token is not step.token:
                del self._stages[number:]
                known = step.rewrite(captured, inputs)
                self._stages.append((step.token, known))
                step.done(self.captured.graph)
            captured = known
        return captured


def _function_of(
    captured: CapturedGraph, origin: fx.GraphModule, inputs: Sequence[Any]
) -> tuple[Callable[..., Any], DerivedInputs | None]:
    """Compile a captured graph to a function that gets its derived tensors."""
    graph, derived = lifted(captured)
    function = fx.GraphModule(origin, graph).forward
    if derived is not None:
        function = _with_derived(function, origin.forward, derived)
    # With other classes, the graph may need their `__torch_function__`.
    return (_without_subclasses(function) if _are_plain(inputs) else function), derived


def _with_derived(function: Callable[..., Any], as_written: Callable[..., Any], derived: DerivedInputs) -> Any:
    def run(*inputs: Any) -> Any:
        values = derived.of(inputs)
        return as_written(*inputs) if values is None else function(*inputs, *values)

    return run


def _are_plain(inputs: Sequence[Any]) -> bool:
    return all(type(value) in PLAIN_TENSORS for value in inputs if isinstance(value, torch.Tensor))


def _without_subclasses(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        with without_subclasses():
            return forward(*inputs)

    return run


# Kept outside of the calls, so that code which copies or restores the state of modules doesn't touch the captures.
_compilations: weakref.WeakKeyDictionary[GraphCall, Compilation] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def compilation_of(call: GraphCall) -> Compilation:
    """The compilation that belongs to a call; created at the first request."""
    found = _compilations.get(call)
    if found is None:
        with _lock:
            found = _compilations.setdefault(call, Compilation(call))
    return found


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module._call_impl(*args, **kwargs)


def entry_of(cls: type[nn.Module], call: Any = _call) -> Callable[..., Any]:
    """Make a function `f(module, args, kwargs)` with its own code object, which calls a module of this class.

    torch.compile caches programs and counts recompilations per code object, and learns dynamic sizes per function name.
    With its own code and name, the function is independent of everything else that the process compiles.
    """
    code = call.__code__.replace(co_name=f"call_{next(_numbers)}_of_{cls.__name__}")
    # torch.compile resolves global names by importing their module, which may be impossible. The globals of the
    # function itself need no import.
    around = getattr(inspect.unwrap(cls.forward), "__globals__", _call.__globals__)
    return types.FunctionType(code, around)
