"""The side effects of operations in a captured graph: writes, random numbers, shared memory, stopping the run.

They are read from torch: schemas tell which operations write, tags tell which draw random numbers, and the example
values tell which values share memory.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from passes.graph.captured import argument, example_of, is_tensor, name_of
from passes.graph.recording import METADATA
from passes.torch_private import OpOverloadPacket, beneath_transforms, has_kernel, is_transformed

# torch functions written in Python, which have no schema.
_COMPOSED = frozenset({
    "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "cosine_similarity", "dropout1d", "dropout2d",
    "dropout3d", "interpolate", "max_pool1d", "max_pool2d", "max_pool3d", "normalize", "softmin", "tanhshrink", "unfold",
    "upsample",
})  # fmt: skip
# Operations that may stop the run, or that act on something outside of the graph.
_ACTING = frozenset({
    "_assert", "_assert_async", "_assert_scalar", "_assert_tensor_metadata", "_check", "backward", "from_file", "record_stream",
    "retain_grad", "sym_constrain_range", "sym_constrain_range_for_size",
})  # fmt: skip
# Operations that return uninitialized memory, so that two results differ.
_UNWRITTEN = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
# The key in `node.meta` for the storages of the nodes that this node replaced.
ALSO_IN = "optimize_export_also_in"
# Python operators that write to their left operand.
_IN_PLACE = frozenset({
    "iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub", "itruediv", "ixor",
})  # fmt: skip
# Operations that return something else for other strides.
_SHOWING_STRIDES = frozenset({"stride", "is_contiguous", "storage_offset", "storage", "untyped_storage", "data_ptr"})
_PYTHON = frozenset({"builtins", "math", "_operator"})


def is_pure(node: fx.Node) -> bool:
    """Whether the node only computes a value from its arguments, as far as torch's schemas and tags tell."""
    if node.op == "get_attr":
        return True
    return node.op in ("call_function", "call_method") and not _may_write(node) and is_known(node) and not draws(node)


def is_repeatable(node: fx.Node) -> bool:
    """Whether the node is pure and computes the same value each time."""
    return is_pure(node) and name_of(node) not in _UNWRITTEN


def _may_write(node: fx.Node) -> bool:
    """Whether a function or method may write to one of its arguments."""
    if _is_of_passes(node) or node.op not in ("call_function", "call_method"):
        return False
    name = str(node.target) if node.op == "call_method" else str(getattr(node.target, "__name__", ""))
    if "out" in node.kwargs or node.kwargs.get("inplace"):
        return True
    if name in ("batch_norm", "instance_norm"):
        return bool(_written_by(node))
    if node.kwargs.get("training") and "dropout" not in name:
        # It may update running statistics.
        return True
    if name.endswith("_") and not name.endswith("__"):
        return True
    if node.op == "call_method":
        return name == "__setitem__" or name.strip("_") in _IN_PLACE
    home = getattr(node.target, "__module__", None) or ""
    if home == "_operator":
        return name in ("setitem", "delitem", *_IN_PLACE)
    # A user's own function may do anything.
    return not home.startswith(("torch", "math")) and home != "builtins" and bool(home)


def _written_by(node: fx.Node) -> Sequence[fx.Node]:
    """The inputs of a node that may write to some of them."""
    flags = {"batch_norm": ("training", False), "instance_norm": ("use_input_stats", True)}
    if (flag := flags.get(name_of(node))) is None:
        return node.all_input_nodes
    if argument(node, 5, *flag) is False:
        return []
    # They update the running statistics, which the functions of torch.nn.functional take before weight and bias, and
    # those of `torch` after.
    first = 1 if getattr(node.target, "__module__", None) == "torch.nn.functional" else 3
    statistics = argument(node, first, "running_mean"), argument(node, first + 1, "running_var")
    return [each for each in statistics if isinstance(each, fx.Node)]


def _is_of_passes(node: fx.Node) -> bool:
    """Whether a pass made the operation, which then has no side effects."""
    return getattr(node.target, "takes_and_gives", False) is True


def is_known(node: fx.Node) -> bool:
    """Whether torch or Python documents the effects of the operation."""
    name = name_of(node)
    if name in _ACTING:
        return False
    if node.op == "call_method":
        return is_tensor(node.args[0]) and (name in METADATA or schemas(name) is not None)
    if _is_of_passes(node):
        return True
    home = getattr(node.target, "__module__", None) or ""
    if home in _PYTHON:
        return not name.startswith(("set", "del", "i")) or name in ("invert", "inv", "int", "is_", "is_not")
    if not home.startswith("torch") and not isinstance(node.target, type(torch.relu)):
        return False
    if name == "embedding" and argument(node, 3, "max_norm") is not None:
        # It rescales rows of its weight in place.
        return False
    return name in _COMPOSED or name.startswith("sym_") or schemas(name) is not None


def takes_any_strides(node: fx.Node) -> bool:
    """Whether torch documents the operation, and its result doesn't depend on the strides of its inputs.

    It may still fail with other strides, as `view` does.
    """
    name = name_of(node)
    if name.startswith("as_strided") or name in _SHOWING_STRIDES or draws(node):
        return False
    if is_known(node):
        return True
    home = getattr(node.target, "__module__", None) or ""
    if home == "_operator":
        return name == "setitem" or name in _IN_PLACE
    is_torchs = is_tensor(node.args[0]) if node.op == "call_method" else home.startswith("torch") or not home
    return is_torchs and kind_of_operator(name) == "writes"


def is_setting(node: fx.Node) -> bool:
    """Whether the node enters or leaves an autocast, or switches gradients on or off, for the following nodes."""
    name = name_of(node).lstrip("_")
    return node.op == "call_function" and name.startswith(("enter_", "exit_", "set_grad_enabled"))


def draws(node: fx.Node) -> bool:
    """Whether the node draws random numbers."""
    name = name_of(node)
    if name == "scaled_dot_product_attention":
        return bool(argument(node, 4, "dropout_p", 0.0) != 0)
    return not is_dropout_off(node) if "dropout" in name else draws_numbers(name)


def is_dropout_off(node: fx.Node) -> bool:
    """Whether a dropout returns its input unchanged: outside of training, or with a probability of 0.

    The functions of torch.nn.functional are `dropout(input, p=0.5, training=True, inplace=False)`. For `alpha_dropout`
    and `feature_alpha_dropout`, `training` is False by default.
    """
    by_default = "alpha" not in name_of(node)
    train = argument(node, 2, "training", node.kwargs.get("train", by_default))
    p = argument(node, 1, "p", 0.5)
    return train is False or (isinstance(p, int | float) and p == 0)


class Memory:
    """Which values of a captured graph share memory, may be written to in place, or are returned.

    The answers are for the graph at the time when this object was made, and for nodes that replaced others since.

    Args:
        graph: the graph.
        tensors: its parameters and buffers, which share no memory with the other inputs of the graph.
    """

    def __init__(self, graph: fx.Graph, tensors: Collection[fx.Node] = ()) -> None:
        # A union-find forest; the storages of one tree may share memory.
        self._parents: dict[Any, Any] = {}
        for node in graph.nodes:
            self._join(*_places_of(example_of(node)), *node.meta.get(ALSO_IN, ()))
            if node.op in ("placeholder", "get_attr") and node not in tensors:
                # Inputs may share memory with each other.
                self._join(_OUTSIDE, *_places_of(example_of(node)))
            elif "dropout" in name_of(node) and is_dropout_off(node):
                # On fake tensors torch copies here, but on real ones it returns its input.
                self._join(*_places_of(example_of(node)), *_places_of(example_of(node.all_input_nodes[0])))
        self._writes: list[tuple[fx.Node, frozenset[Any]]] = []
        leaving: set[Any] = set()
        for node in graph.nodes:
            if node.op == "output":
                leaving.update(*map(self._of, node.all_input_nodes))
            elif node.op not in ("placeholder", "get_attr") and (_may_write(node) or not is_known(node)):
                self._writes.append((node, frozenset().union(*map(self._of, _written_by(node)))))
        self._leaving = leaving

    def _join(self, *places: Any) -> None:
        for place in places[1:]:
            self._parents[self._root(place)] = self._root(places[0])

    def _root(self, place: Any) -> Any:
        while (above := self._parents.get(place, place)) != place:
            place = above
        return place

    def may_be_written(self, nodes: Iterable[fx.Node], between: tuple[fx.Node, fx.Node] | None = None) -> bool:
        """Whether an operation of the graph may write to the memory of one of the values.

        Args:
            between: count only operations after the first node and before the second one.
        """
        places = frozenset[Any]().union(*map(self._of, nodes))
        return any(
            places & written for writer, written in self._writes if between is None or between[0] < writer < between[1]
        )

    def may_leave(self, node: fx.Node) -> bool:
        """Whether the graph returns the memory of the value, so that the caller may write to it."""
        return bool(self._of(node) & self._leaving)

    def shares(self, node: fx.Node) -> bool:
        """Whether the node's value shares memory with one of its inputs."""
        return any(self._of(node) & self._of(source) for source in node.all_input_nodes)

    def _of(self, node: fx.Node) -> frozenset[Any]:
        return frozenset(map(self._root, places_of(node)))


_OUTSIDE = "outside"


def is_in_transform(node: fx.Node) -> bool:
    """Whether the node's value is wrapped by a transform of torch.func, such as `vmap`."""
    tensors = (leaf for leaf in pytree.tree_leaves(example_of(node)) if isinstance(leaf, torch.Tensor))
    return any(map(is_transformed, tensors))


def places_of(node: fx.Node) -> frozenset[Any]:
    """The storages of the node's value."""
    return _places_of(example_of(node)) | node.meta.get(ALSO_IN, frozenset())


def _places_of(value: Any) -> frozenset[Any]:
    # In a call of `torch.vmap` the values of a graph are wrapped.
    tensors = (beneath_transforms(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return frozenset(leaf.untyped_storage()._cdata for leaf in tensors if leaf.layout is torch.strided)


# Tensor methods that are `to` with a fixed dtype.
_CASTS = frozenset({
    "bfloat16", "bool", "byte", "cdouble", "cfloat", "chalf", "char", "double", "float", "half", "int", "long", "short",
})  # fmt: skip


def _packet(name: str) -> Any:
    return getattr(torch.ops.aten, name, None) if name.isidentifier() and not name.startswith("__") else None


@functools.lru_cache(maxsize=4096)
def schemas(name: str) -> tuple[Any, ...] | None:
    """torch's operators of that name; None if there are none, or if one of them writes to an input.

    Variants with an `out` argument, and TorchScript's variants on plain numbers, are left out.
    """
    name = "to" if name in _CASTS else name
    packet = _packet(name)
    found = []
    for overload in packet.overloads() if isinstance(packet, OpOverloadPacket) else ():
        qualified = f"aten::{name}" if overload == "default" else f"aten::{name}.{overload}"
        if not has_kernel(qualified):
            continue
        operation = getattr(packet, overload)
        if any(argument.is_out for argument in operation._schema.arguments):
            continue
        if operation._schema.is_mutable:
            return None
        found.append(operation)
    return tuple(found) or None


@functools.lru_cache(maxsize=4096)
def draws_numbers(name: str) -> bool:
    """Whether an operator of that name may draw random numbers."""
    packet = _packet(name)
    overloads = packet.overloads() if isinstance(packet, OpOverloadPacket) else ()
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in overloads)


@functools.cache
def kind_of_operator(name: str) -> str:
    """Classify an operator of ATen by its schemas: "aliases" inputs, "writes" to one, or "computes" a tensor; "answers" for other names."""
    packet = _packet(name)
    if packet is None:
        return "answers"
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads() if not overload.endswith("out")]
    returns = [result for schema in schemas for result in schema.returns if "Tensor" in str(result.type)]
    if any(result.alias_info is None for result in returns):
        return "computes"
    if any(result.alias_info.is_write for result in returns):
        return "writes"
    return "aliases" if returns else "answers"
