"""What an operation does beside giving a value: whether it writes, draws random numbers, or gives memory that it was given.

What torch's own operations do is read from the schemas that torch has of them. All else may do anything.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from passes.graph.capture import is_atom
from passes.graph.casts import InFloat32, LoweredInput
from passes.graph.guards import (
    ChannelsLastInput,
    ContiguousInput,
    FoldedConvForward,
    FoldedNormForward,
    inner_forward,
)
from passes.graph.hooks import has_hooks
from passes.graph.linear_groups import SharedLinearForward
from passes.graph.match import is_parametrized
from passes.graph.operations import draws_numbers, may_give_memory, schemas
from passes.graph.padded import PaddedForward, call_wide
from passes.graph.program import Program, operation_name
from passes.graph.tracing import IS_TENSOR, METADATA, writes

# Functions of Python whose value is that of their arguments; none of them holds memory of these.
_PLAIN = frozenset({"abs", "bool", "float", "int", "len", "max", "min", "round", "slice", "str", "sum"})
# Operators that give a part of what they are given.
_PARTS = frozenset({"getitem", "itemgetter", "attrgetter"})
# Properties of tensors that give one in the same memory.
_VIEWS = frozenset({"H", "T", "data", "imag", "mH", "mT", "real"})
# Functions in Python that torch has no schema of.
_COMPOSED = frozenset({
    "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "cosine_similarity", "gaussian_nll_loss",
    "interpolate", "max_pool1d", "max_pool2d", "max_pool3d", "normalize", "softmin", "tanhshrink", "unfold", "upsample",
})  # fmt: skip
# Composed of others, which are what torch has kernels for; their values are in memory of their own all the same.
_FRESH = frozenset({
    "arange", "bilinear", "cat", "celu", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "batch_norm", "eye", "full", "group_norm", "interpolate", "layer_norm", "linear", "linspace",
    "log_softmax", "matmul", "mish", "ones", "rms_norm", "scaled_dot_product_attention", "selu", "softmax", "stack", "zeros",
})  # fmt: skip
# What stops a run where it doesn't like what it sees, is no value of its arguments, or waits for another.
_ACTING = frozenset({
    "_assert", "_assert_async", "_assert_scalar", "_assert_tensor_metadata", "_functional_assert_async",
    "_functional_assert_scalar", "backward", "from_file", "record_stream", "retain_grad", "sym_constrain_range",
    "sym_constrain_range_for_size",
})  # fmt: skip
# What nobody has written to yet.
_UNWRITTEN = frozenset({
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
})  # fmt: skip


def is_pure(program: Program, node: fx.Node) -> bool:
    """Whether the node gives a value of its arguments and does nothing else, as far as that can be known.

    It may be left out where nobody uses that value, and computed once where it is computed twice.
    """
    if node.op == "get_attr":
        return True
    if node.op == "call_module":
        return _is_pure_module(program, program.module_of(node), frozenset())
    if node.op not in ("call_function", "call_method"):
        return False
    return not writes(node) and _is_known(node) and not _draws(node)


def is_repeatable(program: Program, node: fx.Node) -> bool:
    """Whether the node is pure and gives the same value each time."""
    return is_pure(program, node) and not (node.op != "call_module" and operation_name(node) in _UNWRITTEN)


def may_share(program: Program, node: fx.Node) -> bool:
    """Whether the node's value may lie in the memory of something that it is given."""
    if node.op == "call_module":
        module = program.module_of(node)
        return module is None or not _makes_memory(module)
    name = operation_name(node)
    if node.op == "call_function" and _home_of(node) in ("math", "builtins"):
        return name == "getattr" and str(node.args[1]) not in METADATA
    if node.op == "call_function" and _home_of(node) == "_operator":
        return name in _PARTS or name.startswith("i") or not _is_tensor_operator(name)
    if name in METADATA:
        return False
    return name not in _FRESH and may_give_memory(name)


def written_by(program: Program, node: fx.Node) -> bool:
    """Whether the node may write to what it is given."""
    if node.op == "call_module":
        module = program.module_of(node)
        return not (_is_pure_module(program, module, frozenset()) or (module is not None and _only_reads(module)))
    # It writes zeros to channels that were added, which nobody reads.
    if node.op in ("placeholder", "get_attr", "output") or node.target is call_wide:
        return False
    return writes(node) or not _is_known(node)


def _home_of(node: fx.Node) -> str:
    return getattr(node.target, "__module__", None) or ""


def _is_known(node: fx.Node) -> bool:
    """Whether torch or Python says what the operation does."""
    name = operation_name(node)
    if name in _ACTING:
        return False
    if node.op == "call_method":
        # What isn't a tensor for certain may have any method: a cache of keys has `update`.
        receiver = node.args[0] if node.args else None
        of_tensor = isinstance(receiver, fx.Node) and IS_TENSOR in receiver.meta
        return name in METADATA or (of_tensor and schemas(name) is not None)
    home = _home_of(node)
    if home == "builtins":
        return name in _PLAIN or (name == "getattr" and str(node.args[1]) in METADATA | _VIEWS)
    if home == "math":
        return True
    if home == "_operator":
        return name in _PARTS or _is_tensor_operator(name)
    if not home.startswith("torch") and not isinstance(node.target, type(torch.relu)):
        return False
    if name == "embedding" and _max_norm(node) is not None:
        # It scales rows of the weight that it is given.
        return False
    return name in _COMPOSED or schemas(name) is not None


def _max_norm(node: fx.Node) -> Any:
    return node.args[3] if len(node.args) > 3 else node.kwargs.get("max_norm")


def _is_tensor_operator(name: str) -> bool:
    return not name.startswith(("set", "del")) and name.strip("_") in _OPERATORS


_OPERATORS = frozenset(name.strip("_") for name in dir(operator)) - {"call", "setitem", "delitem", "methodcaller"}


def _draws(node: fx.Node) -> bool:
    name = operation_name(node)
    if name == "scaled_dot_product_attention":
        given = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return not (isinstance(given, int | float) and given == 0)
    if name.endswith("dropout") or name in ("dropout1d", "dropout2d", "dropout3d"):
        return not is_dropout_off(node)
    return draws_numbers(name)


def is_dropout_off(node: fx.Node) -> bool:
    """Whether a functional dropout gives what it is given: out of training, or with a probability of 0.

    Their signatures are `dropout(input, p=0.5, training=True, inplace=False)` in torch.nn.functional, and without defaults
    in torch; `alpha_dropout` and `feature_alpha_dropout` are out of training by default.
    """
    name = operation_name(node)
    by_default = "alpha" not in name
    train = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", node.kwargs.get("train", by_default))
    p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    return train is False or (isinstance(p, int | float) and p == 0)


_FRESH_LAYERS = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.modules.conv._ConvNd, _NormBase)


def _makes_memory(module: nn.Module) -> bool:
    # A BatchNorm that was folded gives what it is given.
    is_folded = isinstance(inner_forward(module), FoldedNormForward)
    return isinstance(module, _FRESH_LAYERS) and is_atom(module) and not is_folded


def _is_pure_module(program: Program, module: nn.Module | None, around: frozenset[int]) -> bool:
    """Whether a call of the module gives a value of its arguments, and of its tensors, and does nothing else."""
    if module is None or has_hooks(module) or type(module).__call__ is not nn.Module.__call__ or id(module) in around:
        return False
    if is_atom(module):
        return _is_pure_layer(module)
    graph = program.graphs.get(id(module))
    if graph is None or not graph.shows_every_call or "forward" in module.__dict__ or graph.unwatched() is not None:
        return False
    inner = around | {id(module)}
    return all(
        node.op in ("placeholder", "output")
        or (
            _is_pure_module(program, program.module_of(node), inner)
            if node.op == "call_module"
            else is_pure(program, node)
        )
        for node in graph.graph.nodes
    )


# What earlier passes put in the place of a layer's forward, or around it, and what writes to nothing that comes in.
_READERS = (
    ChannelsLastInput, ContiguousInput, FoldedConvForward, FoldedNormForward, InFloat32, LoweredInput, PaddedForward,
    SharedLinearForward,
)  # fmt: skip


def _only_reads(layer: nn.Module) -> bool:
    """Whether a layer, whatever earlier passes made of it, writes to nothing that it is given."""
    installed = layer.__dict__.get("forward")
    while isinstance(installed, _READERS):
        installed = getattr(installed, "inner", None)
    is_own = installed is not None or type(layer).__call__ is not nn.Module.__call__
    return is_atom(layer) and not is_own and not has_hooks(layer) and _is_pure_class(layer)


def _is_pure_layer(module: nn.Module) -> bool:
    # One that computes together with others gives what it gives alone.
    return isinstance(module.__dict__.get("forward"), SharedLinearForward | None) and _is_pure_class(module)


def _is_pure_class(module: nn.Module) -> bool:
    """Whether the forward of the layer's class gives a value of what it is given, and does nothing else."""
    if not type(module).__module__.startswith("torch.nn.modules.") or is_parametrized(module):
        return False
    if getattr(module, "inplace", False) or getattr(module, "max_norm", None) is not None:
        return False
    if isinstance(module, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d | nn.modules.lazy.LazyModuleMixin):
        return False
    if module._modules and not isinstance(module, nn.MultiheadAttention):
        # Its children may be of the user's own classes.
        return False
    # In training they draw, or count statistics.
    counts = isinstance(module, _NormBase | _DropoutNd | nn.RReLU | nn.RNNBase | nn.MultiheadAttention)
    return not (module.training and counts) and not any(map(has_hooks, module.children()))


# What gives a view, or the value itself, however what it is given lies in memory.
_ALWAYS_VIEWS = frozenset({
    "H", "T", "adjoint", "alias", "alpha_dropout", "bfloat16", "broadcast_tensors", "broadcast_to", "chunk", "data", "detach",
    "diagonal", "double", "dropout", "dropout1d", "dropout2d", "dropout3d", "dsplit", "expand", "expand_as",
    "feature_alpha_dropout", "float", "getitem", "half", "hsplit", "imag", "mH", "mT", "moveaxis", "movedim", "narrow",
    "permute", "real", "requires_grad", "select", "slice", "split", "split_with_sizes", "squeeze", "swapaxes", "swapdims",
    "t", "tensor_split", "transpose", "type", "type_as", "unbind", "unflatten", "unfold", "unsafe_chunk", "unsafe_split",
    "unsqueeze", "view", "view_as", "vsplit", "__getitem__",
})  # fmt: skip


def copies_by_strides(program: Program, node: fx.Node) -> bool:
    """Whether a function or method may give the memory that it is given, or a copy, as that lies in strides or not."""
    name = operation_name(node)
    if name == "to":
        return "memory_format" in node.kwargs
    if name == "getattr":
        return False
    return name not in _ALWAYS_VIEWS and not writes(node) and may_share(program, node)


def operation_writes(node: fx.Node, *, is_recorded: bool) -> bool:
    """Whether a function or method may write to what it is given; what a run recorded are operations of torch alone."""
    if is_recorded:
        schema = getattr(node.target, "_schema", None)
        return writes(node) or bool(schema is not None and schema.is_mutable)
    return writes(node) or not _is_known(node)


class Aliases:
    """Which values of one graph may lie in one piece of memory, which of them may be written to, and which leave it."""

    def __init__(self, program: Program, graph: fx.Graph) -> None:
        self._nodes = tuple(graph.nodes)
        self._parents: dict[fx.Node, fx.Node] = {}
        written: set[fx.Node] = set()
        outside: fx.Node | None = None
        writes_outside = False
        leaving: dict[fx.Node, None] = {}
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                # What comes from outside may be one and the same, or parts of it.
                outside = outside or node
                self._join(node, outside)
            elif node.op == "output":
                leaving.update(dict.fromkeys(node.all_input_nodes))
            else:
                if may_share(program, node):
                    for source in node.all_input_nodes:
                        self._join(node, source)
                if written_by(program, node):
                    written.update(node.all_input_nodes)
                    # A child may write to what it holds, which the graph may read.
                    writes_outside |= node.op == "call_module"
        if writes_outside and outside is not None:
            written.add(outside)
        self._written = {self._root(node) for node in written}
        self._leaving = {self._root(node) for node in leaving}

    def may_be_written(self, nodes: Iterable[fx.Node]) -> bool:
        """Whether the memory of one of the values may be written to while the graph runs."""
        return any(self._root(node) in self._written for node in nodes)

    def may_leave(self, node: fx.Node) -> bool:
        """Whether the memory of the value may be given out, to somebody who may write to it."""
        return self._root(node) in self._leaving

    def together(self, node: fx.Node) -> Mapping[fx.Node, None]:
        """The values whose memory may be that of this one, and this one, in order; of one piece always the same object."""
        return self._groups[self._root(node)]

    @functools.cached_property
    def _groups(self) -> dict[fx.Node, dict[fx.Node, None]]:
        groups: dict[fx.Node, dict[fx.Node, None]] = {}
        for node in self._nodes:
            groups.setdefault(self._root(node), {})[node] = None
        return groups

    def _root(self, node: fx.Node) -> fx.Node:
        root = node
        while (above := self._parents.get(root, root)) is not root:
            root = above
        while node is not root:
            above, self._parents[node] = self._parents[node], root
            node = above
        return root

    def _join(self, node: fx.Node, other: fx.Node) -> None:
        mine, theirs = self._root(node), self._root(other)
        if mine is not theirs:
            self._parents[mine] = theirs
