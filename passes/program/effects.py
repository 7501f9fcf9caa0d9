"""What the operations of a captured graph do beside giving a value: write, draw numbers, share memory, stop the run.

All of it is asked of torch: schemas say what writes, tags what draws, and the examples of values what lies in one memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from passes.program.captured import argument, example_of, is_tensor, name_of
from passes.program.operations import draws_numbers, schemas
from passes.program.torch_calls import METADATA

# Functions of torch in Python, of which it has no schema.
_COMPOSED = frozenset({
    "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "cosine_similarity", "interpolate", "max_pool1d",
    "max_pool2d", "max_pool3d", "normalize", "softmin", "tanhshrink", "unfold", "upsample",
})  # fmt: skip
# What stops a run where it doesn't like what it sees, or tells others of it.
_ACTING = frozenset({
    "_assert", "_assert_async", "_assert_scalar", "_assert_tensor_metadata", "_check", "backward", "from_file", "record_stream",
    "retain_grad", "sym_constrain_range", "sym_constrain_range_for_size",
})  # fmt: skip
# What nobody has written to yet: two of them are two.
_UNWRITTEN = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
# In the `meta` of a node that stands for others: the storages of these.
ALSO_IN = "optimize_export_also_in"
# Operators of Python that write to what stands in front of them.
_IN_PLACE = frozenset({
    "iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub", "itruediv", "ixor",
})  # fmt: skip
_PYTHON = frozenset({"builtins", "math", "_operator"})


def is_pure(node: fx.Node) -> bool:
    """Whether the node gives a value of its arguments and does nothing else, as far as torch says."""
    if node.op == "get_attr":
        return True
    return node.op in ("call_function", "call_method") and not _may_write(node) and _is_known(node) and not _draws(node)


def is_repeatable(node: fx.Node) -> bool:
    """Whether the node is pure and gives the same value each time."""
    return is_pure(node) and name_of(node) not in _UNWRITTEN


def _may_write(node: fx.Node) -> bool:
    """Whether a function or method may write to one of its arguments."""
    if _is_of_passes(node) or node.op not in ("call_function", "call_method"):
        return False
    name = str(node.target) if node.op == "call_method" else str(getattr(node.target, "__name__", ""))
    if "out" in node.kwargs or node.kwargs.get("inplace"):
        return True
    if node.kwargs.get("training") and "dropout" not in name:
        # What counts statistics.
        return True
    if name.endswith("_") and not name.endswith("__"):
        return True
    if name in ("batch_norm", "instance_norm"):
        # In training they move the running statistics, which `instance_norm` does unless it is told otherwise.
        by_place = node.args[5] if len(node.args) > 5 else name == "instance_norm"
        return node.kwargs.get("use_input_stats", node.kwargs.get("training", by_place)) is not False
    if node.op == "call_method":
        return name == "__setitem__" or name.strip("_") in _IN_PLACE
    home = getattr(node.target, "__module__", None) or ""
    if home == "_operator":
        return name in ("setitem", "delitem", *_IN_PLACE)
    # A function of the user's own may do anything.
    return not home.startswith(("torch", "math")) and home != "builtins" and bool(home)


def _is_of_passes(node: fx.Node) -> bool:
    """Whether a pass made the operation, which gives a value and does nothing else."""
    return getattr(node.target, "takes_and_gives", False) is True


def _is_known(node: fx.Node) -> bool:
    """Whether torch or Python says what the operation does."""
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
        # It scales rows of the weight that it is given.
        return False
    return name in _COMPOSED or name.startswith("sym_") or schemas(name) is not None


def is_setting(node: fx.Node) -> bool:
    """Whether the node enters or leaves an autocast, or sets whether gradients are on, for the nodes behind it."""
    name = name_of(node).lstrip("_")
    return node.op == "call_function" and name.startswith(("enter_", "exit_", "set_grad_enabled"))


def _draws(node: fx.Node) -> bool:
    name = name_of(node)
    if name == "scaled_dot_product_attention":
        return bool(argument(node, 4, "dropout_p", 0.0) != 0)
    return not is_dropout_off(node) if "dropout" in name else draws_numbers(name)


def is_dropout_off(node: fx.Node) -> bool:
    """Whether a dropout gives what it is given: out of training, or with a probability of 0.

    The functions of torch.nn.functional are `dropout(input, p=0.5, training=True, inplace=False)`; `alpha_dropout` and
    `feature_alpha_dropout` are out of training by default.
    """
    by_default = "alpha" not in name_of(node)
    train = argument(node, 2, "training", node.kwargs.get("train", by_default))
    p = argument(node, 1, "p", 0.5)
    return train is False or (isinstance(p, int | float) and p == 0)


class Memory:
    """Which values of a graph lie in one memory, which of them may be written to, and which leave the graph."""

    def __init__(self, graph: fx.Graph) -> None:
        # A forest of storages, each tree of which may be one memory.
        self._parents: dict[Any, Any] = {}
        for node in graph.nodes:
            self._join(*_places_of(example_of(node)), *node.meta.get(ALSO_IN, ()))
            if node.op in ("placeholder", "get_attr"):
                # What comes from outside may be one and the same, or parts of it.
                self._join(_OUTSIDE, *_places_of(example_of(node)))
            elif "dropout" in name_of(node) and is_dropout_off(node):
                # Without numbers torch makes a copy here, and with them it gives the very tensor.
                self._join(*_places_of(example_of(node)), *_places_of(example_of(node.all_input_nodes[0])))
        written: set[Any] = set()
        leaving: set[Any] = set()
        for node in graph.nodes:
            if node.op == "output":
                leaving.update(*map(self._of, node.all_input_nodes))
            elif node.op not in ("placeholder", "get_attr") and (_may_write(node) or not _is_known(node)):
                written.update(*map(self._of, node.all_input_nodes))
        self._written, self._leaving = written, leaving

    def _join(self, *places: Any) -> None:
        for place in places[1:]:
            self._parents[self._root(place)] = self._root(places[0])

    def _root(self, place: Any) -> Any:
        while (above := self._parents.get(place, place)) != place:
            place = above
        return place

    def may_be_written(self, nodes: Iterable[fx.Node]) -> bool:
        """Whether the memory of one of the values may be written to while the graph runs."""
        return any(self._of(node) & self._written for node in nodes)

    def may_leave(self, node: fx.Node) -> bool:
        """Whether the memory of the value is given out, to somebody who may write to it."""
        return bool(self._of(node) & self._leaving)

    def shares(self, node: fx.Node) -> bool:
        """Whether the value lies in the memory of something that the node is given."""
        return any(self._of(node) & self._of(source) for source in node.all_input_nodes)

    def _of(self, node: fx.Node) -> frozenset[Any]:
        return frozenset(map(self._root, _places_of(example_of(node))))


_OUTSIDE = "outside"


def places_of(node: fx.Node) -> frozenset[Any]:
    """The storages that the node's value lies in."""
    return _places_of(example_of(node)) | node.meta.get(ALSO_IN, frozenset())


def _places_of(value: Any) -> frozenset[Any]:
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return frozenset(leaf.untyped_storage()._cdata for leaf in tensors if leaf.layout is torch.strided)
