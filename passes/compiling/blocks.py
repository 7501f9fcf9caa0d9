"""Find repeated blocks in a model, such as the blocks of a transformer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from passes.compiling.compiler import CompileRecord, GraphBreak, RecordingBackend
from passes.graph.backend import entry_of
from passes.graph.forwards import AroundForward, bound_forward, has_hooks
from passes.torch_private import COMPILED_CALL, graph_break, schema_of

# With fewer blocks, the saved compile time doesn't make up for the cost of separate calls.
FEWEST = 3

Block = tuple[str, nn.Module]
Blocks = Sequence[Block]


def repeated_blocks(root: nn.Module) -> list[Blocks]:
    """Find groups of sibling modules with the same structure: the outermost ones, in the order of the tree.

    Two modules have the same structure if they agree, at all levels, in class, training flag and forward, and in the
    names, shapes, dtypes, devices and gradient flags of their tensors. Forwards that passes installed are compared by
    class. Other attributes are not compared, because the guards of compiled code check them. Blocks with hooks are left
    out, because compiled code doesn't check for hooks.
    """
    search = _Search()
    search.below("", root)
    return search.found


@contextmanager
def calls_set(calls: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Install a compiled call on each module for the block; the modules must have none."""
    with ExitStack() as stack:
        for module, call in calls:
            stack.callback(module.__dict__.pop, COMPILED_CALL)
            module.__dict__[COMPILED_CALL] = call
        yield


class FusibleWork(TorchDispatchMode):
    """Count, in an eager run, the elements written by all operations except matrix products and convolutions.

    This is the work that compiling can save: products and convolutions use the same kernels in compiled code.

    Args:
        groups: the blocks whose share is wanted.
    """

    def __init__(self, groups: Iterable[Blocks]) -> None:
        super().__init__()
        self.blocks = [block for group in groups for _, block in group]
        self.total = 0
        self.in_blocks = 0
        self._depth = 0

    @property
    def share(self) -> float:
        """The share of the blocks in all elements written, 0 to 1."""
        return self.in_blocks / self.total if self.total else 0.0

    def __enter__(self) -> Self:
        self._set = calls_set((block, self._counted(block)) for block in self.blocks)
        self._set.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._set.__exit__(*error)

    def _counted(self, block: nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return block._call_impl(*args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket not in flop_registry:
            results = result if isinstance(result, tuple | list) else (result,)
            for value, declared in zip(results, schema_of(func).returns, strict=False):
                is_view = declared.alias_info is not None and not declared.alias_info.is_write
                if isinstance(value, torch.Tensor) and not is_view:
                    self.total += value.numel()
                    self.in_blocks += value.numel() if self._depth else 0
        return result


class _Search:
    def __init__(self) -> None:
        self.found: list[Blocks] = []
        self._seen: set[int] = set()
        self._builds: dict[int, int] = {}
        self._numbers: dict[Any, int] = {}

    def below(self, path: str, parent: nn.Module) -> None:
        alike: dict[Any, list[Block]] = defaultdict(list)
        for name, child in parent._modules.items():
            if child is not None and id(child) not in self._seen:
                self._seen.add(id(child))
                alike[self._build_of(child)].append((f"{path}.{name}" if path else name, child))
        for group in alike.values():
            if len(group) >= FEWEST and all(_is_block(child) for _, child in group):
                self.found.append(group)
                continue
            for where, child in group:
                self.below(where, child)

    def _build_of(self, module: nn.Module) -> int:
        """A number that is equal for modules with the same structure."""
        if id(module) not in self._builds:
            children = tuple((n, None if c is None else self._build_of(c)) for n, c in module._modules.items())
            tensors = tuple(
                (
                    name,
                    None
                    if tensor is None or is_lazy(tensor)
                    else (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad),
                )
                for name, tensor in (*module._parameters.items(), *module._buffers.items())
            )
            # A number instead of the nested tuple, which would be hashed recursively at each look-up.
            build = (
                type(module),
                module.training,
                has_hooks(module),
                _forward_key(module.__dict__.get("forward")),
                tensors,
                children,
            )
            self._builds[id(module)] = self._numbers.setdefault(build, len(self._numbers))
        return self._builds[id(module)]


def _is_block(module: nn.Module) -> bool:
    """Whether the module has a forward, several layers and no hooks; module lists and single layers are no blocks."""
    layers = sum(any(True for _ in each.parameters(recurse=False)) for each in module.modules())
    return layers > 1 and type(module).forward is not nn.Module.forward and not any(map(has_hooks, module.modules()))


def _forward_key(forward: Any) -> Any:
    if isinstance(forward, AroundForward):
        return type(forward), _forward_key(forward.inner)
    if forward is None or type(forward).__module__.startswith("passes."):
        return type(forward)
    return id(getattr(forward, "__func__", forward))


# Blocks count as sharing their code if they need at most `_MOST_KINDS` programs per run, and no more than one for
# `_LEAST_OF_A_KIND` calls. torch.compile gives up at the ninth program of one code object, and other shapes and
# gradients need further programs.
_MOST_KINDS, _LEAST_OF_A_KIND = 2, 3


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
            compiled = torch.compile(entry_of(type(group[0][1])), backend=backend)
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
    """Find the first graph break of the whole model, in the same way."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.found: GraphBreak | None = None  # the first graph break; None if there is none

    @contextmanager
    def watch(self) -> Iterator[None]:
        """While the context is active, run the root by its captured graph."""
        record = CompileRecord()
        compiled = torch.compile(
            entry_of(type(self.root)), backend=RecordingBackend("eager", _as_it_is, record), fullgraph=True
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
