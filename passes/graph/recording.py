"""Record an eager run of a module: every torch call in one flat graph, with its module and tensors.

A `TorchFunctionMode` sees each torch call, and module hooks keep the stack of the current module calls. This works for
any forward: branches, decorators, loops, keyword arguments. A recording shows only what happened in that run.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from passes.base import Context, ModelTree, TensorRef, training_flags

Node = fx.Node
"""A torch call, or the read of a parameter or buffer, in the graph of a run."""


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module."""

    module: nn.Module
    number: int  # the index of the call in the run, counted from 1; 0 stands for the caller of the root
    around: ModuleCall | None  # the enclosing module call; None for the outermost


@dataclass(frozen=True)
class Shape:
    """The sizes and dtype of a tensor that a call returned."""

    sizes: tuple[int, ...]
    dtype: torch.dtype


class Recording:
    """The torch calls of one run."""

    def __init__(self) -> None:
        # A flat graph. A `get_attr` node reads a parameter or buffer; each occurs once. A `placeholder` node is another
        # tensor that no recorded call made. A `call_function` node is a torch call; tensor methods are functions too.
        self.graph = fx.Graph()
        self._reads: dict[tuple[int, str], fx.Node] = {}

    def nodes(self) -> list[Node]:
        """All nodes, in the order of execution."""
        return list(self.graph.nodes)

    def uses(self, ref: TensorRef) -> list[Node]:
        """The calls that use the values of a parameter or buffer."""
        node = self._reads.get((id(ref.owner), ref.name))
        return [] if node is None else users_of(node)


def users_of(node: Node) -> list[Node]:
    """The calls that use the values of a node, and not just its shape or dtype."""
    reading = (user for user in node.users if not user.meta["asks"])
    return [user for user in reading if operation_name(user) not in SHAPED_AS or user.args[0] is node]


def tensor_of(node: Any) -> TensorRef | None:
    """The parameter or buffer that a node of a recorded run reads; None for anything else."""
    return node.meta["tensor"] if isinstance(node, fx.Node) and node.op == "get_attr" else None


def call_of(node: Node) -> ModuleCall:
    """The module call in which a recorded torch call was made: `.module`, and the enclosing call `.around`."""
    call: ModuleCall = node.meta["call"]
    return call


def shape_of(node: Node) -> Shape | None:
    """The shape (`.sizes`, `.dtype`) of a recorded node's value; None if the value isn't one tensor."""
    return node.meta.get("shape")


def shape_of_each(node: Node) -> Shape | None:
    """The shape that all tensors in a recorded node's value have, as those of `unbind`; None if they differ."""
    return node.meta.get("shape_of_each", shape_of(node))


def operation_name(node: Node) -> str:
    """A short name for the node's operation."""
    target: Any = node.target
    name = str(getattr(target, "__name__", target))
    # Reading a tensor property calls its `__get__`.
    name = str(getattr(target.__self__, "__name__", name)) if name == "__get__" else name
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


# Methods that use only the shape of their second argument.
SHAPED_AS = frozenset({"reshape_as", "view_as", "expand_as"})
# Attributes and methods that don't read the values of a tensor.
METADATA = frozenset({
    "shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_floating_point",
    "is_complex", "size", "dim", "ndimension", "numel", "nelement", "element_size", "itemsize", "nbytes", "get_device",
    "is_meta", "is_mkldnn", "is_nested", "requires_grad", "is_leaf", "stride", "is_contiguous", "__len__", "is_mps",
    "is_xpu", "names", "has_names", "is_tensor", "is_same_size", "grad_fn",
})  # fmt: skip
# The operations of a run that ask for no values.
_ASKING = METADATA | {"is_conj", "is_inference", "is_neg", "len", "result_type", "storage_offset", "type"}


def name_of(func: Callable[..., Any]) -> str:
    """The name of a torch function, without its overload."""
    name = getattr(func, "__name__", "")
    # An overload in `torch.ops` is named, for example, `add.Tensor`.
    return name.split(".", 1)[0] if isinstance(name, str) else ""


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str, default: Any) -> Any:
    """An argument given by name or by position."""
    return kwargs.get(name, args[index] if len(args) > index else default)


@dataclass(frozen=True)
class Run:
    """One recorded run of the model."""

    number: int  # the index of the example call
    flag: bool | None  # the training flag of all modules; None for their own flags
    # The torch calls of the run, in order: `.nodes()`, and `.uses(ref)` of a parameter
    recording: Recording


@dataclass(frozen=True)
class Runs:
    """The recorded runs of a model."""

    # One run per example call and, in training mode, per state of the training flags; up to the first failure
    runs: tuple[Run, ...] = ()
    failure: str = ""  # the reason why a run couldn't be recorded, as a clause


class Recorder(TorchFunctionMode):
    """Records one run. It keeps no tensor of the run alive, so that tensors which outlive the run can be found."""

    def __init__(self, root: nn.Module, modules: Callable[[], Iterable[nn.Module]]) -> None:
        super().__init__()
        self.recording = Recording()
        self._root = root
        self._modules = modules
        self._thread = threading.get_ident()
        self._calls = ModuleCall(root, 0, None)
        self._count = 0
        self._places: dict[int, TensorRef] = {}
        self._values: dict[int, tuple[weakref.ref[torch.Tensor], list[fx.Node]]] = {}
        self._output: Any = None
        self._hooks = ExitStack()

    def __enter__(self) -> Any:
        for module in self._modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self._places.setdefault(id(tensor), TensorRef(module, name))
        self._hooks.callback(register_module_forward_pre_hook(self._enter_module).remove)
        self._hooks.callback(register_module_forward_hook(self._leave_module, always_call=True).remove)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()
        if error[0] is None:
            self._finish()
        self._values.clear()
        self._output = None

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._count += 1
        self._calls = ModuleCall(module, self._count, self._calls)
        if isinstance(module, torch.jit.ScriptModule):
            # The operations inside aren't Python calls, so the module call is recorded as one operation.
            self._add(call_script, args, {}, None)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        call: ModuleCall | None = self._calls
        while call is not None and call.module is not module:
            call = call.around
        if call is not None and call.around is not None:
            self._calls = call.around
        if module is self._root:
            self._output = output

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._add(func, args, kwargs, result)
        return result

    def _add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> fx.Node | None:
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not leaves and not made:
            return None
        mapped_args, mapped_kwargs = fx.node.map_aggregate((args, kwargs), self._argument)
        node = self.recording.graph.call_function(func, mapped_args, mapped_kwargs)
        node.meta.update(call=self._calls, asks=not made and operation_name(node) in _ASKING)
        if len(shapes := set(map(_shape, made))) == 1:
            node.meta["shape" if len(made) == 1 else "shape_of_each"] = shapes.pop()
        for leaf in made:
            if id(leaf) not in self._places:
                self._remember(leaf, node)
        return node

    def _argument(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        ref = self._places.get(id(leaf))
        if ref is not None:
            return self._read(ref, leaf)
        known = self._values.get(id(leaf))
        if known is not None and known[0]() is leaf:
            return known[1][-1]
        node = self.recording.graph.placeholder(f"value_{len(self._values)}")
        node.meta.update(call=self._calls, asks=False, shape=_shape(leaf))
        self._remember(leaf, node)
        return node

    def _read(self, ref: TensorRef, tensor: torch.Tensor) -> fx.Node:
        key = id(ref.owner), ref.name
        node = self.recording._reads.get(key)
        if node is None:
            node = self.recording.graph.create_node("get_attr", ref.name)
            node.meta.update(call=self._calls, asks=False, tensor=ref, shape=_shape(tensor))
            self.recording._reads[key] = node
        return node

    def _remember(self, tensor: torch.Tensor, node: fx.Node) -> None:
        known = self._values.get(id(tensor))
        if known is not None and known[0]() is tensor:
            # The call wrote to its argument in place, or returned it.
            known[1].append(node)
        else:
            self._values[id(tensor)] = weakref.ref(tensor), [node]

    def _finish(self) -> None:
        """Called after a run that didn't raise, while the output of the root is known."""


def _shape(tensor: torch.Tensor) -> Shape | None:
    # Nested tensors have no fixed sizes.
    return None if tensor.is_nested else Shape(tuple(tensor.shape), tensor.dtype)


def call_script(*args: Any) -> None:
    """Represents the call of a scripted module in a graph."""


def recorded_runs(tree: ModelTree, context: Context) -> Runs | None:
    """The recordings of the example calls on the current tree; None if the model must not be run."""
    if tree.runs is None and context.run_inside is not None:
        tree.runs = _record(tree, context)
    return tree.runs


def _record(tree: ModelTree, context: Context) -> Runs:
    assert context.run_inside is not None
    runs: list[Run] = []
    when = {None: "", False: "in eval", True: "in training"}
    for flag in _states(tree.root, context.mode):
        for number in range(len(context.example_calls)):
            recorder = Recorder(tree.root, tree.modules)
            with training_flags(tree.root, flag):
                failure = context.run_inside(recorder, number)
            if failure is not None:
                return Runs(tuple(runs), " ".join(filter(None, ("it can't be recorded", when[flag], f"({failure})"))))
            runs.append(Run(number, flag, recorder.recording))
    return Runs(tuple(runs))


def _states(root: nn.Module, mode: str) -> list[bool | None]:
    if mode != "training":
        return [None]
    flags = {module.training for module in root.modules() if hasattr(module, "training")}
    return [None, *(flag for flag in (False, True) if flag not in flags or len(flags) > 1)]
