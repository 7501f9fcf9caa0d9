"""Install compiled code as the call of a module."""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from passes.compiling.blocks import Blocks, calls_set
from passes.compiling.record import CompileRecord, GraphBreak, RecordingBackend
from passes.graph.forwards import bound_forward
from passes.torch_private import graph_break

# Blocks count as sharing their code if they need at most `_MOST_KINDS` programs per run, and no more than one for
# `_LEAST_OF_A_KIND` calls. torch.compile gives up at the ninth program of one code object, and other shapes and
# gradients need further programs.
_MOST_KINDS, _LEAST_OF_A_KIND = 2, 3

_numbers = itertools.count()


def _call(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return block._call_impl(*args, **kwargs)


def entry_of(module: nn.Module) -> Callable[..., Any]:
    """Make a function `f(module, args, kwargs)` that calls the module, or an equal one, with its own code object.

    torch.compile caches programs and counts recompilations per code object, and learns dynamic sizes per function name.
    With its own code and name, the function is independent of everything else that the process compiles.
    """
    cls = type(module)
    code = _call.__code__.replace(co_name=f"call_{next(_numbers)}_of_{cls.__name__}")
    # torch.compile resolves global names by importing their module, which may be impossible. The globals of the
    # function itself need no import.
    around = getattr(inspect.unwrap(cls.forward), "__globals__", _call.__globals__)
    return types.FunctionType(code, around)


class CompiledCall:
    """The compiled call of one module."""

    def __init__(self, compiled: Callable[..., Any], module: nn.Module) -> None:
        self.compiled = compiled
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(self.module, args, kwargs)


class BlocksTrial:
    """Capture blocks with torch.compile's front end, to find out whether the blocks of a group share their programs.

    No kernels are generated: eager kernels run the captured graphs. This takes the time of a few calls.
    """

    def __init__(self, groups: Sequence[Blocks]) -> None:
        self.groups = groups
        self.records = [CompileRecord() for _ in groups]
        self.calls: list[list[int]] = [[] for _ in groups]

    @contextmanager
    def watch(self) -> Iterator[None]:
        """While the context is active, run each block by its captured graphs."""
        with _bound_forwards(m for g in self.groups for _, m in g), calls_set(self._calls()):
            yield

    def _calls(self) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        for number, group in enumerate(self.groups):
            backend = RecordingBackend("eager", _as_it_is, self.records[number])
            compiled = torch.compile(entry_of(group[0][1]), backend=backend)
            for _, block in group:
                yield block, self._counted(number, compiled, block)

    def _counted(self, number: int, compiled: Callable[..., Any], block: nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = self.records[number].programs
            try:
                return compiled(block, args, kwargs)
            finally:
                self.calls[number].append(self.records[number].programs - before)

        return call

    def shared(self, runs: int) -> list[Blocks]:
        """The groups for which few programs suffice, given the number of runs with different sizes."""
        found = []
        for group, calls in zip(self.groups, self.calls, strict=True):
            kinds = sum(made > 0 for made in calls)
            if 0 < kinds <= min(_MOST_KINDS * runs, len(calls) // _LEAST_OF_A_KIND):
                found.append(group)
        return found


class WholeTrial:
    """Find the first graph break of the whole model, in the same way.

    Attributes:
        found: the first graph break; None if there is none.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.found: GraphBreak | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """While the context is active, run the root by its captured graph."""
        record = CompileRecord()
        compiled = torch.compile(
            entry_of(self.root), backend=RecordingBackend("eager", _as_it_is, record), fullgraph=True
        )
        try:
            with calls_set([(self.root, CompiledCall(compiled, self.root))]):
                yield
        except graph_break() as error:
            self.found = GraphBreak.of(str(error), list(getattr(error, "real_stack", None) or ()))
            raise


def _as_it_is(graph: Any, inputs: Sequence[Any]) -> Any:
    return graph.forward


@contextmanager
def _bound_forwards(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Replace the forward objects of these modules and their submodules by bound methods for the block."""
    found = [(module.__dict__, module.__dict__["forward"], bound) for module, bound in bound_forwards(modules)]
    for home, _, bound in found:
        home["forward"] = bound
    try:
        yield
    finally:
        for home, forward, _ in found:
            home["forward"] = forward


def bound_forwards(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, Any]]:
    """The modules, and submodules, whose forward is an `InstanceForward`, each with that forward as a bound method."""
    inner = {id(one): one for module in modules for one in module.modules()}
    for module in inner.values():
        if (bound := bound_forward(module.__dict__.get("forward"))) is not None:
            yield module, bound
