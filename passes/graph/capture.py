"""One FX graph for the forward of every module that can be traced, with its children as calls.

A module whose forward can't be traced is an island: it stays as it is, and the reason is kept. Its children have graphs
of their own. Nothing that a trace would freeze or lose goes into a graph: what is drawn, created or switched in a
forward is recorded as a node where FX can express it, and makes an island where it can't.
"""

from __future__ import annotations

import copy
import dis
import inspect
import random
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils import _pytree as pytree

from passes.graph.forward import GraphForward
from passes.graph.guards import InstanceForward, inner_forward
from passes.graph.structure import CallStructure, Unstructured, flatten_outputs, signature_of

# FX patches nn.Module for the time of a trace, for all threads: one trace at a time.
_tracing = threading.Lock()

# What may be asked of a tensor that exists while tracing: the answer is the same for every input.
METADATA = {
    "shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized",
    "is_mkldnn", "is_nested", "is_complex", "is_floating_point", "requires_grad", "itemsize", "nbytes", "is_leaf",
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "is_contiguous", "get_device",
    "__len__", "is_mps", "is_xpu", "names", "has_names", "is_tensor", "is_same_size", "grad_fn",
}  # fmt: skip


class Untraceable(Exception):
    """The forward does what a graph can't hold; the message, a clause about the forward, says what."""


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
    """

    path: str
    module: nn.Module
    graph: fx.Graph
    structure: CallStructure
    outputs: pytree.TreeSpec
    traced: bool = True


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
        root: a module that may be traced, which is to say run on symbols: a working copy.
        structures: for the modules, by identity, that a recorded run called: the structure of their calls, or the reason
            why they have none. The others are traced for a tensor at each parameter without a default.
        uncalled: modules, by identity, that a recorded run didn't call: nothing is known of their calls, and they are
            left out.
    """
    result = Capture(root)
    known = structures or {}
    with _tracing:
        for path, module in root.named_modules():
            if is_atom(module) or id(module) in uncalled or not _has_forward(module):
                continue
            structure = known.get(id(module))
            try:
                if isinstance(structure, str):
                    raise Untraceable(structure)
                result.graphs[id(module)] = _trace(path, module, structure)
            except Untraceable as error:
                result.islands[id(module)] = Island(path, module, str(error))
    _find_leaks(result)
    return result


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _trace(path: str, module: nn.Module, structure: CallStructure | None) -> ModuleGraph:
    installed = inner_forward(module)
    if isinstance(installed, GraphForward):
        return _installed_graph(path, module, installed)
    if type(module).__call__ is not nn.Module.__call__:
        raise Untraceable("its class has a __call__ of its own")
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is not None and _enters_context(code):
        raise Untraceable("its forward enters a context ('with'), which a graph doesn't hold")
    try:
        asked = structure or CallStructure.by_default(signature_of(module))
    except Unstructured as error:
        raise Untraceable(str(error)) from error
    tracer = _Tracer(asked)
    containers = _own_containers(module)
    draws = _random_state()
    try:
        with _refuse_side_effects(tracer, module):
            graph = tracer.trace(module)
    except Untraceable:
        raise
    except Exception as error:  # noqa: BLE001 - a forward that runs on symbols may raise anything: it is an island
        raise Untraceable(f"its forward can't be traced ({_first_line(error)})") from None
    finally:
        changed = _restore_containers(containers)
        drawn = draws != _random_state()
        if drawn:
            _set_random_state(draws)
    if changed:
        raise Untraceable("its forward changes a container of the module")
    if drawn:
        raise Untraceable("its forward draws random numbers that a graph would freeze")
    assert tracer.output_spec is not None
    return ModuleGraph(path, module, graph, asked, tracer.output_spec)


def _installed_graph(path: str, module: nn.Module, forward: GraphForward) -> ModuleGraph:
    """The graph that an earlier run made the module's forward."""
    if module.training not in forward.graphs:
        raise Untraceable("its forward was rewritten in the other mode")
    graph, outputs = forward.graphs[module.training]
    return ModuleGraph(path, module, copy.deepcopy(graph), forward.structure, outputs)


class _SealedProxy(fx.Proxy):
    """A symbol that takes no attributes: FX would lose an assignment without a word."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node"):
            raise Untraceable(f"its forward assigns the attribute {name!r} of a value")
        object.__setattr__(self, name, value)


class _Tracer(fx.Tracer):
    def __init__(self, structure: CallStructure) -> None:
        super().__init__(param_shapes_constant=True)
        self.structure = structure
        self.output_spec: pytree.TreeSpec | None = None
        self.tensor_names: dict[int, str] = {}

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        for name, parameter in root.named_parameters(remove_duplicate=False):
            self.tensor_names.setdefault(id(parameter), name)
        for name, buffer in root.named_buffers(remove_duplicate=False):
            self.tensor_names.setdefault(id(buffer), name)
        return super().trace(root, concrete_args)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        inputs = [self.create_proxy("placeholder", name, (), {}) for name in self.structure.tensor_names]

        def forward(*tensors: Any) -> list[Any]:
            args, kwargs = self.structure.arguments(tensors)
            with _RecordEverything(self):
                outputs = self.root.forward(*args, **kwargs)
            try:
                leaves, self.output_spec = flatten_outputs(outputs, fx.Proxy)
            except Unstructured as error:
                raise Untraceable(str(error)) from error
            return leaves

        return forward, inputs

    def create_node(
        self,
        kind: str,
        target: Any,
        args: Any,
        kwargs: Any,
        name: str | None = None,
        type_expr: Any = None,
    ) -> fx.Node:
        # The code of a graph calls its module `self`: a node of that name, after a child of that name, would hide it.
        own_name = "self_" if name is None and isinstance(target, str) and target.split(".")[-1] == "self" else name
        return super().create_node(kind, target, args, kwargs, own_name, type_expr)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if not isinstance(attr_val, torch.Tensor):
            return attr_val
        name = self.tensor_names.get(id(attr_val))
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            proxy = self.create_proxy("get_attr", name, (), {}, proxy_factory_fn=self._tensor_proxy(name, attr_val))
            parameter_proxy_cache[name] = proxy
        return parameter_proxy_cache[name]

    def _tensor_proxy(self, name: str, tensor: torch.Tensor) -> Callable[[fx.Node], fx.Proxy] | None:
        if not isinstance(tensor, nn.Parameter):
            return None
        return lambda node: fx.proxy.ParameterProxy(self, node, name, tensor)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _SealedProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor) and id(a) not in self.tensor_names and not self._is_attribute(a):
            raise Untraceable("its forward uses a tensor that it finds outside of the module")
        if isinstance(a, nn.Parameter | torch.Tensor) and id(a) in self.tensor_names:
            return self.create_node("get_attr", self.tensor_names[id(a)], (), {})
        return super().create_arg(a)

    def _is_attribute(self, tensor: torch.Tensor) -> bool:
        return tensor in self.tensor_attrs


class _RecordEverything(TorchFunctionMode):
    """Puts into the graph what FX would run while tracing and freeze: factories, random draws, work on constants."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        if name in ("_set_grad_enabled", "set_grad_enabled", "_enter_inference_mode"):
            raise Untraceable("its forward switches gradients on or off")
        leaves = pytree.tree_leaves((args, kwargs))
        symbolic = any(isinstance(leaf, fx.Proxy) for leaf in leaves)
        if not symbolic and name in METADATA:
            return func(*args, **kwargs)
        if func in (torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__):
            raise Untraceable("its forward reads the value of a constant tensor")
        if name == "__get__":
            return self._property(func, args)
        if is_tensor_method_or_property(func):
            return self.tracer.create_proxy("call_method", name, args, kwargs)
        return self.tracer.create_proxy("call_function", func, args, kwargs)

    def _property(self, func: Any, args: Any) -> Any:
        name = func.__self__.__name__
        if isinstance(args[0], fx.Proxy):
            return getattr(args[0], name)
        if name in METADATA:
            return func(*args)
        return self.tracer.create_proxy("call_function", getattr, (args[0], name), {})


def function_name(func: Any) -> str:
    return str(getattr(func, "__name__", ""))


@contextmanager
def _refuse_side_effects(tracer: _Tracer, root: nn.Module) -> Iterator[None]:
    """Make an island of a forward that assigns attributes of modules or enters autocast."""
    inside = {id(module) for module in root.modules()}
    module_setattr = nn.Module.__setattr__
    enter_autocast = torch.autocast.__enter__

    def refuse_setattr(module: nn.Module, name: str, value: Any) -> None:
        if id(module) in inside:
            raise Untraceable(f"its forward assigns the attribute {name!r} of a module")
        module_setattr(module, name, value)

    def refuse_autocast(self: Any) -> Any:
        raise Untraceable("its forward enters autocast")

    nn.Module.__setattr__ = refuse_setattr  # type: ignore[method-assign, assignment]
    torch.autocast.__enter__ = refuse_autocast  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__setattr__ = module_setattr  # type: ignore[method-assign]
        torch.autocast.__enter__ = enter_autocast  # type: ignore[method-assign]


_contexts: dict[types.CodeType, bool] = {}


def _enters_context(code: types.CodeType) -> bool:
    if code not in _contexts:
        _contexts[code] = any(
            instruction.opname in ("BEFORE_WITH", "SETUP_WITH", "LOAD_SPECIAL", "BEFORE_ASYNC_WITH")
            for instruction in dis.get_instructions(code)
        )
    return _contexts[code]


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    line = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    return line if len(line) <= 160 else f"{line[:157]}..."


def _random_state() -> tuple[Any, ...]:
    kind, keys, *rest = numpy.random.get_state()
    return bytes(torch.random.get_rng_state().numpy()), random.getstate(), (kind, numpy.asarray(keys).tobytes(), *rest)


def _set_random_state(state: tuple[Any, ...]) -> None:
    torch.random.set_rng_state(torch.frombuffer(bytearray(state[0]), dtype=torch.uint8))
    random.setstate(state[1])
    kind, keys, *rest = state[2]
    numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


_Containers = list[tuple[Any, Any]]


def _own_containers(module: nn.Module) -> _Containers:
    """The lists, dicts, sets and deques among a module's attributes, two levels deep, each with a shallow copy."""
    found: _Containers = []
    for name, value in module.__dict__.items():
        if isinstance(value, list | dict | set | deque) and value is not None:
            found.append((value, value.copy()))
            if name not in ("_parameters", "_buffers", "_modules"):
                inner = value.values() if isinstance(value, dict) else value
                found.extend((item, item.copy()) for item in inner if isinstance(item, list | dict | set | deque))
    return found


def _restore_containers(containers: _Containers) -> bool:
    """Put back what changed; true where anything did."""
    changed = False
    for container, before in containers:
        if _same_items(container, before):
            continue
        changed = True
        container.clear()
        (container.update if isinstance(container, dict | set) else container.extend)(before)
    return changed


def _same_items(container: Any, before: Any) -> bool:
    if len(container) != len(before):
        return False
    if isinstance(container, dict):
        return all(key in before and before[key] is value for key, value in container.items())
    if isinstance(container, set):
        return all(item in before for item in container)
    return all(mine is theirs for mine, theirs in zip(container, before, strict=True))


def _find_leaks(result: Capture) -> None:
    """Find symbols that a trace left in a module, and make an island of the module whose trace it was."""
    for module in result.root.modules():
        for name, value in list(module.__dict__.items()):
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            for leaf in _leaves(value, depth=4):
                if isinstance(leaf, fx.Proxy) and isinstance(leaf.tracer, _Tracer):
                    result.leaks.append((module, name))
                    _make_island(result, leaf.tracer.root)


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, fx.Proxy):
        yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item, depth - 1)
    elif depth and isinstance(value, list | tuple | set | deque):
        for item in value:
            yield from _leaves(item, depth - 1)


def _make_island(result: Capture, module: nn.Module) -> None:
    graph = result.graphs.pop(id(module), None)
    if graph is not None:
        reason = "its forward keeps values of a call in a module"
        result.islands[id(module)] = Island(graph.path, module, reason)
