"""Decide whether a layer and its affine operation can be folded together.

The conditions here hold for every fold: nothing else uses the value between the two, and nothing else uses their
tensors. They are checked on recorded runs. Calls that no recorded run showed are refused by the seals when they happen.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from passes.program.forwards import dtype_inside
from passes.program.hooks import has_global_hooks, has_hooks, is_parametrized
from passes.program.matching import (
    BATCH_NORMS,
    CONVOLUTIONS,
    BatchNorm,
    ChannelScale,
    Pair,
    arguments_of,
    channels_at_end,
    computed_scale_at,
    layer_arguments,
)
from passes.program.model_tree import ModelTree
from passes.program.recording import (
    ModuleCall,
    Node,
    Recording,
    autocast_of,
    call_of,
    escapes,
    is_returned,
    operation_name,
    shape_of,
    tensor_of,
    users_of,
)
from passes.program.storage import kind_of
from passes.program.tensors import TensorRef
from passes.program.weights import PLAIN_TENSORS
from passes.torch_private import AnyBatchNorm, AnyConvolution

# The in-place operators, such as `iadd`: `y += x` calls `y.__iadd__(x)`.
_WRITES = frozenset(
    name[2:-2] for name in dir(torch.Tensor) if name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}")
)
_WRITES |= {"setitem"}


@dataclass(frozen=True)
class Judge:
    """Checks the pairs of one model. In the reasons, "it" is the first of the two, whose output the second takes.

    Attributes:
        tree: the model's modules and tensors.
        mode: "inference" or "training".
    """

    tree: ModelTree
    mode: str

    def where(self, node: Node) -> str:
        """The path of the layer that makes the call, or the path of the module around it with the operation's name."""
        module = call_of(node).module
        path = self.tree.path(module)
        if _is_layer(module):
            return path
        return f"{path or 'the root'} ({operation_name(node)})"

    def why_not(self, found: Sequence[Pair], recording: Recording) -> str | None:
        """The reason why the two can't be folded together, as a clause; None if they can.

        Args:
            found: the pair, once for each of its calls in the run.
            recording: the run.
        """
        if has_global_hooks():
            return "hooks for all modules are registered, and see its output: remove them and optimize again"
        own = {node for pair in found for node in (pair.conv.node, pair.affine.node)}
        reasons = (
            self._why_not_value(pair)
            or self._why_not_modules(pair)
            or self._why_not_tensors(pair, recording, own)
            or self._why_not_channels(pair)
            or self._why_not_autocast(pair)
            for pair in found
        )
        return next(filter(None, reasons), None)

    def why_alone(self, node: Node) -> str | None:
        """The reason why an affine operation after a layer makes no pair with it, as a clause; None for other calls."""
        names = BATCH_NORMS.get(node.target) if node.op == "call_function" else None
        if names is None:
            return self._why_computed(node)
        given = arguments_of(node, names)
        source = given.get("input")
        if not isinstance(source, Node) or source.target not in CONVOLUTIONS:
            return None
        name = next(
            (name for name in names[1:] if isinstance(given.get(name), Node) and not tensor_of(given[name])), ""
        )
        if name:
            return f"its {name} is computed or set by other code, and is not a parameter or buffer"
        given = arguments_of(source, layer_arguments(source.target))
        name = next((name for name in ("weight", "bias") if given.get(name) and not tensor_of(given[name])), "")
        where = self.where(source)
        return (
            f"the {name} of {where} is computed or set by other code, and is not a parameter or buffer"
            if name
            else None
        )

    def _why_computed(self, node: Node) -> str | None:
        """The reason for a product or sum with what a call computes from tensors of the model, as in FrozenBatchNorm."""
        found = computed_scale_at(node)
        if found is None:
            return None
        names = ", ".join(map(self.tree.path_of, found.tensors))
        return (
            f"it scales or shifts the output of {self.where(found.layer)} by numbers that each call computes from {names}: "
            "a fold needs an nn.BatchNorm, or the finished numbers as a parameter or buffer"
        )

    def _why_not_value(self, pair: Pair) -> str | None:
        for value, following in itertools.pairwise(pair.way):
            if is_returned(value):
                return f"its output is also used by the caller of {self._around(value)}, which returns it"
            other = next((user for user in users_of(value) if not _leads_to(user, following)), None)
            if other is not None:
                return f"its output is also used by {self.where(other)}"
            if escapes(value):
                return "its output is kept somewhere outside the graph"
        for module in dict.fromkeys(_modules_between(pair)):
            if has_hooks(module):
                return f"its output passes through the hooks of {self.tree.path(module) or 'the root'}"
        return None

    def _around(self, node: Node) -> str:
        call = call_of(node)
        while _is_layer(call.module) and call.around is not None:
            call = call.around
        return self.tree.path(call.module) or "the root"

    def _why_not_modules(self, pair: Pair) -> str | None:
        for role, place in (("the convolution", pair.conv), ("the BatchNorm", pair.affine)):
            module = place.module or _layer_around(place.node)
            if module is None:
                continue
            path = self.tree.path(module)
            if has_hooks(module):
                return f"{role} {path} has hooks{_what_hooks_set(module)}"
            if is_parametrized(module):
                return f"{role} {path} has parametrizations"
        return None

    def _why_not_tensors(self, pair: Pair, recording: Recording, own: Collection[Node]) -> str | None:
        for ref in (*pair.conv.tensors, *pair.affine.tensors):
            if reason := self._why_not_tensor(ref, recording, own):
                return f"{self.tree.path_of(ref)} {reason}"
        if self.mode == "training":
            # In training, the other tensors stay those of the caller.
            mean = pair.affine.mean if isinstance(pair.affine, BatchNorm) else None
            moved = [ref for ref in (pair.conv.bias, mean) if ref is not None]
        else:
            moved = [*pair.conv.tensors, *pair.affine.tensors] if _writes(recording) else []
        for ref in moved:
            sharer = None if ref.value is None else self.tree.sharer_of(ref.value)
            if sharer is not None and (self.mode == "training" or not isinstance(sharer[1], nn.Parameter)):
                return f"{self.tree.path_of(ref)} shares its memory with {sharer[0]}"
        return None

    def _why_not_tensor(self, ref: TensorRef, recording: Recording, own: Collection[Node]) -> str | None:
        tensor = ref.value
        assert tensor is not None
        if type(tensor) not in PLAIN_TENSORS:
            return f"is a {type(tensor).__name__}, which has its own arithmetic"
        if kind := kind_of(tensor):
            return f"is {kind}: a fold needs dense tensors"
        if not tensor.is_floating_point():
            return f"has dtype {str(tensor.dtype).removeprefix('torch.')}"
        if self.tree.holders_of(tensor) > 1:
            return "is shared with another module"
        other = next((user for user in recording.uses(ref) if user not in own), None)
        if other is None:
            return None
        again = call_of(other).module is ref.owner
        return (
            f"is also used by another call of {self.where(other)}" if again else f"is also read by {self.where(other)}"
        )

    def _why_not_channels(self, pair: Pair) -> str | None:
        if isinstance(pair.affine, ChannelScale):
            return self._why_not_dtype(pair)
        return self._why_not_dims(pair)

    def _why_not_dtype(self, pair: Pair) -> str | None:
        """Refuse a factor of another dtype than the weight, because it would change the dtype of the product."""
        assert isinstance(pair.affine, ChannelScale)
        weight, tensor = pair.conv.weight.value, pair.affine.tensor.value
        assert weight is not None
        assert tensor is not None
        if tensor.dtype != weight.dtype:
            return f"{self.tree.path_of(pair.affine.tensor)} has a different dtype than its weight"
        # Under autocast the layer gives bfloat16, and its product with a float32 parameter is float32.
        given, made = shape_of(pair.conv.node), shape_of(pair.affine.node)
        if not pair.affine.leads and given is not None and made is not None and given.dtype != made.dtype:
            names = [str(one.dtype).removeprefix("torch.") for one in (given, made)]
            return f"{self.where(pair.affine.node)} converts its {names[0]} input to {names[1]}"
        return None

    def _why_not_dims(self, pair: Pair) -> str | None:
        """Refuse ranks at which dim 1, BatchNorm's channel dim, is not the layer's channel dim."""
        conv, norm = pair.conv, pair.affine
        channels = channels_at_end(pair)
        way = f"its output passes through {', '.join(map(self.where, norm.moves))}, " if norm.moves else ""
        if channels is None:
            return f"{way}after which its channels aren't known" if way else "the rank of its input isn't known"
        if channels.dim == (channels.rank - conv.dims - 1 if norm.leads else 1):
            return None
        if way:
            taker = self.where(conv.node) if norm.leads else "the BatchNorm"
            return f"{way}after which its channels are not those of {taker}"
        kind, ends = "convolution" if conv.dims else "linear layer", "inputs" if norm.leads else "outputs"
        owner = f"the input of {self.where(conv.node)}" if norm.leads else "its input"
        return f"{owner} is {channels.rank}-D, where the BatchNorm's channels are not the {ends} of the {kind}"

    def _why_not_autocast(self, pair: Pair) -> str | None:
        for role, node in (("it", pair.conv.node), (f"the BatchNorm {self.where(pair.affine.node)}", pair.affine.node)):
            dtype = autocast_of(node)
            # An autocast that a pass set for the whole model is allowed: each change is also checked under it.
            if dtype is not None and dtype is not dtype_inside(self.tree.root):
                name = str(dtype).removeprefix("torch.")
                return f"{role} runs under autocast to {name}, where a fold changes the dtypes of the computation"
        return None


def _is_layer(module: nn.Module) -> bool:
    """Whether the module is a torch.nn layer without submodules, which reports treat as one operation."""
    return type(module).__module__.startswith("torch.nn.modules.") and not module._modules


def _layer_around(node: Node) -> nn.Module | None:
    """The layer in whose forward the call is made, if it is a subclass with its own forward."""
    module = call_of(node).module
    return module if isinstance(module, AnyConvolution | AnyBatchNorm | nn.Linear) else None


def _leads_to(user: Node, following: Node) -> bool:
    """Whether the user is the next call on the path, or a call that pads the input of the next one."""
    return user is following or following.args[:1] == (user,)


def _modules_between(pair: Pair) -> Iterator[nn.Module]:
    """The modules that the value enters or leaves between the two calls."""
    own = {id(module) for module in (pair.conv.module, pair.affine.module) if module is not None}
    for one, other in itertools.pairwise(pair.way):
        before, behind = _calls_around(one), _calls_around(other)
        apart = [*(c for c in before if c not in behind), *(c for c in behind if c not in before)]
        yield from (call.module for call in apart if id(call.module) not in own)


def _calls_around(node: Node) -> list[ModuleCall]:
    calls = []
    call: ModuleCall | None = call_of(node)
    while call is not None:
        calls.append(call)
        call = call.around
    return calls


def _what_hooks_set(module: nn.Module) -> str:
    """The tensor that a module's hooks set, as a clause; the older weight_norm and spectral_norm are such hooks."""
    names = [name for name in ("weight", "bias") if isinstance(module.__dict__.get(name), torch.Tensor)]
    return f", which set its {names[0]} at every call" if names else ""


def _writes(recording: Recording) -> bool:
    """Whether the run wrote to any tensor in place."""
    return any(node.op == "call_function" and _is_write(node) for node in recording.graph.nodes)


def _is_write(node: Node) -> bool:
    """Whether the name says so: `add_`, `__iadd__`, `__setitem__`."""
    name = operation_name(node)
    return name.endswith("_") or name in _WRITES or "out" in node.kwargs
