"""Compiled code in the place of a module's call."""

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
from passes.program.forwards import bound_forward
from passes.torch_private import graph_break

# Of equal blocks there may be so many kinds, each for so many blocks at least. torch.compile gives up at the ninth program of
# one code, and each kind needs one more for other shapes, and others where gradients are on.
_MOST_KINDS, _LEAST_OF_A_KIND = 2, 3

_numbers = itertools.count()


def _call(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return block._call_impl(*args, **kwargs)


def entry_of(module: nn.Module) -> Callable[..., Any]:
    """A function `f(module, args, kwargs)` that calls the module, or an equal one, with code of its own.

    torch.compile keeps what it makes, and counts how often it did, by the code of a function, and what it learns of sizes by
    its name: what is compiled elsewhere in the process doesn't count here.
    """
    cls = type(module)
    code = _call.__code__.replace(co_name=f"call_{next(_numbers)}_of_{cls.__name__}")
    # It finds the names of what it looks into by importing their module, which needn't be possible, but for those of the
    # function itself.
    around = getattr(inspect.unwrap(cls.forward), "__globals__", _call.__globals__)
    return types.FunctionType(code, around)


class CompiledCall:
    """Stands in for one module's call."""

    def __init__(self, compiled: Callable[..., Any], module: nn.Module) -> None:
        self.compiled = compiled
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(self.module, args, kwargs)


class BlocksTrial:
    """Runs blocks by what torch.compile's front end makes of them, and sees whether those of a group share it.

    Nothing is generated: what it makes is run by eager kernels. That takes the time of a few calls.
    """

    def __init__(self, groups: Sequence[Blocks]) -> None:
        self.groups = groups
        self.records = [CompileRecord() for _ in groups]
        self.calls: list[list[int]] = [[] for _ in groups]

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Inside, the blocks run so."""
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
        """The groups that few programs do for, after so many runs of other sizes."""
        found = []
        for group, calls in zip(self.groups, self.calls, strict=True):
            kinds = sum(made > 0 for made in calls)
            if 0 < kinds <= min(_MOST_KINDS * runs, len(calls) // _LEAST_OF_A_KIND):
                found.append(group)
        return found


class WholeTrial:
    """Finds, in the same way, the first place where the whole can't be one program.

    Attributes:
        found: that place; None for none.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.found: GraphBreak | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Inside, the root runs so."""
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
    """Inside, the forwards of these modules and those below them are bound methods where they are objects of ours."""
    found = [(module.__dict__, module.__dict__["forward"], bound) for module, bound in bound_forwards(modules)]
    for home, _, bound in found:
        home["forward"] = bound
    try:
        yield
    finally:
        for home, forward, _ in found:
            home["forward"] = forward


def bound_forwards(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, Any]]:
    """The modules among these and those below them whose forward is an object of ours, each with the bound method of it."""
    inner = {id(one): one for module in modules for one in module.modules()}
    for module in inner.values():
        if (bound := bound_forward(module.__dict__.get("forward"))) is not None:
            yield module, bound
