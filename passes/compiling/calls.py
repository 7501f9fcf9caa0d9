"""Compiled code in the place of a module's call."""

from __future__ import annotations

import inspect
import itertools
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from passes.compiling.blocks import COMPILED_CALL, Blocks
from passes.compiling.record import CompileRecord, GraphBreak, RecordingBackend
from passes.graph.forward import bound_forward

logger = logging.getLogger(__name__)

# How often weights that are compiled in may change before they aren't compiled in any more.
_MOST_FREEZES = 4
# Of equal blocks there may be so many kinds, each for so many blocks at least. torch.compile gives up at the ninth program of
# one code, and each kind needs one more for other shapes, and others where gradients are on.
_MOST_KINDS, _LEAST_OF_A_KIND = 2, 3

_numbers = itertools.count()

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


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


class FrozenCall:
    """Stands in for the call of a module whose weights are part of what is compiled.

    Compiled code doesn't see that a weight was written to or moved: that is looked at here, at every call, and the code made
    anew with the weights of then. Where that happens again and again, code that takes the weights at each call is as right.
    torch doesn't tell of writes by `.data`.

    Args:
        compile: torch.compile with its options.
    """

    def __init__(self, module: nn.Module, compile: Compile) -> None:
        self.module = module
        self.compile = compile
        self.plain: Callable[..., Any] | None = None
        self.times = 0
        self._freeze()

    def _freeze(self) -> None:
        self.times += 1
        self.weights = list(_weights_of(self.module))
        self.compiled = self.compile(entry_of(self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Where gradients may go to the weights nothing is compiled in.
        if torch.is_grad_enabled() or not self._is_frozen():
            return self._by_plain_code(args, kwargs)
        import torch._inductor.config as inductor

        # What reads Python's bytecode goes by the setting of the process, not by the options of torch.compile.
        with inductor.patch(freezing=True):
            return self.compiled(self.module, args, kwargs)

    def _is_frozen(self) -> bool:
        """Whether there is code with the weights as they are now; where they are others, it is made anew, a few times."""
        if self.times > _MOST_FREEZES:
            return False
        if all(
            home.get(name) is tensor and tensor._version == version and tensor.data_ptr() == place
            for home, name, tensor, version, place in self.weights
        ):
            return True
        if self.times == _MOST_FREEZES:
            self.times += 1
            name = type(self.module).__name__
            logger.warning("the weights of %s change between calls: they are read at each call from now on", name)
            return False
        self._freeze()
        return True

    def _by_plain_code(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.plain is None:
            self.plain = self.compile(entry_of(self.module))
        return self.plain(self.module, args, kwargs)


def _weights_of(root: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor, int, int]]:
    for module in root.modules():
        for home in (module._parameters, module._buffers):
            for name, tensor in home.items():
                if tensor is not None:
                    yield home, name, tensor, tensor._version, tensor.data_ptr()


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
        with _bound_forwards(m for g in self.groups for _, m in g):
            try:
                for number, group in enumerate(self.groups):
                    backend = RecordingBackend("eager", _as_it_is, self.records[number])
                    compiled = torch.compile(entry_of(group[0][1]), backend=backend)
                    for _, block in group:
                        block.__dict__[COMPILED_CALL] = self._counted(number, compiled, block)
                yield
            finally:
                for group in self.groups:
                    for _, block in group:
                        del block.__dict__[COMPILED_CALL]

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
        from torch._dynamo.exc import Unsupported

        record = CompileRecord()
        compiled = torch.compile(
            entry_of(self.root), backend=RecordingBackend("eager", _as_it_is, record), fullgraph=True
        )
        self.root.__dict__[COMPILED_CALL] = CompiledCall(compiled, self.root)
        try:
            yield
        except Unsupported as error:
            self.found = GraphBreak.of(str(error), list(getattr(error, "real_stack", None) or ()))
            raise
        finally:
            del self.root.__dict__[COMPILED_CALL]


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
