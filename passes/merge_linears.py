"""Linears on one input are one Linear, whose outputs lie side by side."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from passes.base import Context, GraphPass
from passes.graph.capture import ModuleGraph
from passes.graph.casts import InFloat32, LoweredInput
from passes.graph.edits import AttributeEdit, Edit, TensorEdit, in_place
from passes.graph.effects import Aliases, copies_by_strides, may_share, operation_writes
from passes.graph.forward import GraphForward
from passes.graph.guards import InstanceForward, inner_forward, standing_around
from passes.graph.hooks import has_hooks
from passes.graph.linear_groups import JoiningApply, LinearGroup, SharedLinearForward, sharing_forwards
from passes.graph.match import Node, is_parametrized, is_stock
from passes.graph.named_writes import BY_PLACE, PAST_COUNTS, Named, named_in, named_of
from passes.graph.program import Program, operation_name
from passes.graph.rewriter import Rewriter
from passes.graph.storage import kind_of
from passes.graph.tracing import function_name
from passes.program.tensors import TensorRef


@dataclass(frozen=True)
class MergeLinears(GraphPass):
    """Compute linear layers on one input as one: query, key and value, or the gate of a gated unit.

        q = x @ Wq.T + bq;  k = x @ Wk.T + bk;  v = x @ Wv.T + bv      3 products
        q, k, v  ==  split(x @ W.T + b)      W = [Wq; Wk; Wv],  b = [bq; bk; bv]      1 product, and 3 views

    The weights stay under their names, in both directions: Wq, Wk and Wv become consecutive rows of one tensor, which holds
    their values once. Checkpoints of the original can be loaded and the reverse, writes to one weight reach the joint one,
    hooks fire, and a layer called on its own computes what it did. A layer without a bias has zeros in the joint one.

    The first of the layers that is called computes for all as long as the forward around them runs. Another one takes its
    part if it is given the very same tensor and nothing was written to that, or to its weight, since; else it computes by
    itself. So forwards that can't be traced may go any way: what a run computes for nothing, the next one doesn't, in which
    those compute for each other that took their parts in the last one.

    Torch counts writes, but for those by `.data`, numpy and dlpack: what names these stays as it is. A write past torch,
    between two of the calls, by code that isn't read (C++, other packages that the forward calls) isn't seen.

    Where weights were replaced (`load_state_dict(assign=True)`, a parametrization, a cast of one layer alone), all compute by
    themselves from then on. Copies, and what is moved or cast as a whole (`.to()`, `.half()`), are joined anew.

    The parts lie in rows of the wider result. A layer stays as it is where that shows: its output leaves the forward, or a
    `view` on the way takes no such tensor, as one run shows.

    Each layer computes by itself in what torch.compile makes, whose compiler sees the layers as they were; in calls under
    torch.inference_mode whose input was made there, as torch counts no writes to it; in what is traced, TorchScript files
    too, but for ONNX files, which hold one product with the weights behind each other; under vmap and the like, and with
    gradients under autocast; in the part of a forward that torch.utils.checkpoint computes again.

    What it costs: each call looks at the weights and the input, some microseconds for each layer. On a CPU nothing makes up
    for that: one product of all took 0.95 to 1.05 times as long as theirs from 64 rows of 256 on, and up to 1.9 times below
    (float32, one thread; files in onnxruntime 0.98 to 1.15 times), so that nothing is merged there unless `force` asks for
    it. The outputs of all stay in memory as long as one of them does. A layer that another one takes the place of stays, too.
    Pickled without torch.save, each weight is written with all of the joint one.

    Args:
        force: merge on any device, also where it only costs.

    Does not handle: linear layers that are functions, or of a class with a forward of its own (LoRA, quantized layers); layers
    with hooks or parametrizations, called twice in one forward, under two names, or with tied weights; other dtypes or
    devices than those beside; layers on one input in two modules; code that names `as_strided`, or what else goes by how
    numbers lie in memory; outputs that may be written to through what `reshape` or `contiguous` gives, which is their memory
    or a copy. For that the code of the forward is read, and that of the functions of its package that it names.
    """

    force: bool = False

    name: ClassVar[str] = "merge-linears"
    modes: ClassVar[tuple[str, ...]] = ("inference",)

    def rewrite(self, graph: Rewriter) -> None:
        """Only `rewrite_in` knows the device."""
        self.rewrite_in(graph, Context("inference", torch.device("cpu")))

    def rewrite_in(self, graph: Rewriter, context: Context) -> None:
        """Merge every group of layers that can be merged, where it can pay."""
        found = [found for home in list(graph.program.graphs.values()) for found in _candidates(graph, home)]
        if found and not self.force and context.device.type != "cuda":
            graph.skip_module(
                "",
                f"of its layers {len(found)} groups take one input, and the model is on a device where one product for all"
                f" only costs ({context.device}): merge-linears:force=true has it anyway",
            )
            return
        if context.run_inside is None:
            found = [fit for each in found if (fit := _without_strict_readers(graph, each)) is not None]
        else:
            found = _fit(graph, context, found)
        for each in found:
            home = each.home
            with graph.change(home.path, each.what(graph.program), each.nodes, all_outputs=True) as change:
                for layer in each.layers:
                    refs = (TensorRef(layer, name) for name in ("weight", "bias"))
                    change.sources += [ref for ref in refs if ref.value is not None]
                graph.share_input(change, home.module, each.group)


@dataclass
class _Candidate:
    """Layers that one forward gives the same value.

    Attributes:
        home: the graph of the forward.
        nodes: the calls, in order.
        layers: for each call, the layer.
    """

    home: ModuleGraph
    nodes: tuple[Node, ...]
    layers: tuple[nn.Linear, ...]

    def __post_init__(self) -> None:
        self.group = LinearGroup(self.layers)

    def what(self, program: Program) -> str:
        """What is done to them."""
        prefix = f"{self.home.path}." if self.home.path else ""
        *names, last = (program.where(node).removeprefix(prefix) for node in self.nodes)
        return f"{', '.join(names)} and {last} computed together"

    def without(self, numbers: Sequence[int]) -> _Candidate | None:
        """The same without some of the layers; None where no two are left."""
        if not numbers:
            return self
        kept = [number for number in range(len(self.nodes)) if number not in numbers]
        if len(kept) < 2:
            return None
        return _Candidate(
            self.home, tuple(self.nodes[number] for number in kept), tuple(self.layers[number] for number in kept)
        )

    def edits(self) -> Iterator[Edit]:
        """What makes the layers compute together."""
        for layer, name, parameter in self.group.joined().parts:
            yield TensorEdit(layer, name, parameter)
        for module, forward in sharing_forwards(self.home.module, self.group):
            yield AttributeEdit(module, "forward", forward)


# Which layers take one value ------------------------------------------------------------------------------------------


def _candidates(graph: Rewriter, home: ModuleGraph) -> Iterator[_Candidate]:
    """The layers of one graph that can be merged; the others that share an input are skipped."""
    program = graph.program
    by_input: dict[Node, list[Node]] = defaultdict(list)
    for node in home.graph.nodes:
        if (source := _linear_input(program, node)) is not None:
            by_input[source].append(node)
    groups = [nodes for nodes in by_input.values() if len(nodes) > 1]
    if not groups:
        return
    memory, around = _Memory(program, home), _why_not_around(program, home)
    for nodes in groups:
        judged = [(node, _why_not(program, node, memory) or around) for node in nodes]
        for node, reason in judged:
            if reason:
                graph.skip(node, reason)
        kept = [node for node, reason in judged if reason is None]
        for alike in _by_kind(graph, kept):
            yield _Candidate(home, tuple(alike), tuple(_layer_of(program, node) for node in alike))


def _linear_input(program: Program, node: Node) -> Node | None:
    """What a linear layer is given, of whatever class or spelling; None for other nodes."""
    module = program.module_of(node)
    if module is not None:
        if not isinstance(module, nn.Linear) or isinstance(inner_forward(module), SharedLinearForward):
            return None
    elif node.op != "call_function" or node.target is not F.linear:
        return None
    given = (*node.args, *node.kwargs.values())
    return given[0] if given and isinstance(given[0], Node) else None


def _layer_of(program: Program, node: Node) -> nn.Linear:
    module = program.module_of(node)
    assert isinstance(module, nn.Linear)
    return module


def _by_kind(graph: Rewriter, nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """The calls in groups of two or more whose weights can be rows of one."""
    kinds: dict[Any, list[Node]] = defaultdict(list)
    for node in nodes:
        weight = _layer_of(graph.program, node).weight
        kinds[weight.dtype, weight.device, weight.shape[1]].append(node)
    for alike in kinds.values():
        if len(alike) > 1:
            yield alike
        elif len(nodes) > 1:
            graph.skip(alike[0], "its weight is of another dtype, device or width than those beside it")


# Whether they may become one ------------------------------------------------------------------------------------------


def _why_not(program: Program, node: Node, memory: _Memory) -> str | None:
    module = program.module_of(node)
    if module is None:
        return "it is called as a function, and others that take the same input can't stand in for that"
    assert isinstance(module, nn.Linear)
    return (
        _why_not_module(program, node, module)
        or next(filter(None, (_why_not_tensor(program, module, name) for name in ("weight", "bias"))), None)
        or memory.why_not(node)
    )


def _why_not_module(program: Program, node: Node, module: nn.Linear) -> str | None:
    if isinstance(inner_forward(module), InstanceForward):
        return "it was folded together with another layer"
    if standing_around(module, InFloat32) is not None:
        return "it stays in float32, in the midst of others that don't"
    if not isinstance(module.__dict__.get("forward"), LoweredInput | None):
        return "an earlier pass changed its forward: put merge-linears in front of that"
    if not is_stock(module, (nn.Linear,)) or len(node.args) + len(node.kwargs) != 1:
        return f"it is of the class {type(module).__name__} or has a forward of its own, and may compute anything"
    if has_hooks(module):
        return "it has hooks"
    if is_parametrized(module):
        return "it has parametrizations"
    path, *aliases = program.paths[id(module)]
    if aliases:
        return f"it stands in the tree under two names, {path} and {aliases[0]}"
    if len(program.calls_of(module)) > 1:
        return f"it is called {len(program.calls_of(module))} times"
    return None


def _why_not_tensor(program: Program, module: nn.Linear, name: str) -> str | None:
    tensor = module._parameters.get(name)
    if tensor is None:
        is_missing = name == "weight" or getattr(module, name, None) is not None
        return f"its {name} is computed or set by other code, and is no parameter" if is_missing else None
    if is_lazy(tensor):
        return "it is not initialised yet: run the model once first"
    if tensor.is_meta:
        return f"its {name} is on the meta device and has no values"
    if type(tensor) is not nn.Parameter or name in module.__dict__:
        return f"its {name} is a {type(tensor).__name__}, which has an arithmetic of its own"
    if kind := kind_of(tensor):
        return f"its {name} is {kind}"
    if not tensor.is_floating_point() or not tensor.numel():
        return f"its {name} is of dtype {str(tensor.dtype).removeprefix('torch.')} and shape {list(tensor.shape)}"
    if name == "bias" and (tensor.dtype, tensor.device) != (module.weight.dtype, module.weight.device):
        return "its bias is of another dtype or device than its weight"
    if program.holders_of(tensor) > 1:
        return f"its {name} is shared with another module"
    if program.shares_memory and (sharer := program.sharer_of(tensor)) is not None:
        return f"its {name} shares its memory with {sharer}"
    return None


def _why_not_around(program: Program, home: ModuleGraph) -> str | None:
    around = home.module
    where = home.path or "the root"
    installed = inner_forward(around)
    if installed is not None and not isinstance(installed, InstanceForward | GraphForward):
        return f"the module around it, {where}, has a forward of its instance"
    if isinstance(around, torch.jit.ScriptModule):
        return f"the module around it, {where}, is compiled by torch.jit"
    if not isinstance(around.__dict__.get("_apply"), JoiningApply | None):
        return f"the module around it, {where}, has a way of its own to be moved"
    for module in around.modules():
        for names, what in ((BY_PLACE, _GOES_BY_PLACE), (PAST_COUNTS, _WRITES_UNSEEN)):
            name = named_of(names, module)
            if name is not None:
                path = program.paths[id(module)][0] if id(module) in program.paths else type(module).__name__
                return f"the code of {path or 'the root'} names {name}, {what}"
    operations = (node for node in home.graph.nodes if node.op in ("call_function", "call_method"))
    done = {str(node.args[1]) if node.target is getattr else operation_name(node) for node in operations}
    if unseen := done & PAST_COUNTS:
        return f"{where} does {min(unseen)}, {_WRITES_UNSEEN}"
    return None


_GOES_BY_PLACE = "which may go by how its output lies in memory"
_WRITES_UNSEEN = "by which its input may be written to between the layers without torch counting that"


class _Memory:
    """What one forward does, or may do in other branches, with the memory of its layers' outputs."""

    def __init__(self, program: Program, home: ModuleGraph) -> None:
        self.program = program
        self.home = home
        self.aliases = Aliases(program, home.graph)
        called = {id(program.module_of(node)) for node in home.graph.nodes if node.op == "call_module"}
        # What no run calls may be given anything in another branch.
        uncalled = [
            child for child in home.module.children() if not any(id(each) in called for each in child.modules())
        ]
        below = (module for child in uncalled for module in child.modules())
        self._named_anywhere = named_in([home.module]) | named_in(dict.fromkeys(below))
        # By the first of the values that may share one piece of memory.
        self._known: dict[Node, Named] = {}

    def why_not(self, node: Node) -> str | None:
        """Why the output of the layer has to lie in memory of its own."""
        if self.aliases.may_leave(node):
            return "its output may leave the forward, and would lie in memory otherwise than it did"
        if node.meta.get("escapes"):
            return "its output is kept somewhere outside of the graph, and would lie in memory otherwise than it did"
        named = self._done_to(node)
        if named.writes and named.copies:
            return (
                f"its output may be written to (by {min(named.writes)}) through what {min(named.copies)} gives, which is a"
                " copy of rows that are parts of wider ones"
            )
        return None

    def _done_to(self, node: Node) -> Named:
        """What may write to the output, and what may give a copy of it where it gave its memory."""
        together = self.aliases.together(node)
        users = dict.fromkeys(user for each in together for user in each.users)
        if node in users:
            del users[node]
            return self._named_by(users)
        first = next(iter(together))
        if first not in self._known:
            self._known[first] = self._named_by(users)
        return self._known[first]

    def _named_by(self, users: Iterable[Node]) -> Named:
        children = [child for user in users if (child := self.program.module_of(user)) is not None]
        operations = [user for user in users if user.op in ("call_function", "call_method")]
        is_recorded = not self.home.traced
        named = Named(
            frozenset(operation_name(user) for user in operations if operation_writes(user, is_recorded=is_recorded)),
            frozenset(operation_name(user) for user in operations if copies_by_strides(self.program, user)),
        )
        below = (module for child in children for module in child.modules())
        return named | self._named_anywhere | named_in(dict.fromkeys(below))


# Whether what comes behind takes rows of a wider tensor ----------------------------------------------------------------

# These give the memory that they are given in another shape, and raise where it doesn't lie so.
_STRICT = frozenset({"view", "view_as"})


def _without_strict_readers(graph: Rewriter, found: _Candidate) -> _Candidate | None:
    """Where nothing can be run: without the layers whose output may come to what takes no rows of a wider tensor."""
    unfit = []
    for number, node in enumerate(found.nodes):
        reader = _strict_reader(graph.program, node)
        if reader is not None:
            unfit.append(number)
            text = f"its output comes to {operation_name(reader)}, which may not take rows of a wider tensor"
            graph.skip(node, f"{text}: give example inputs")
    return found.without(unfit)


def _strict_reader(program: Program, node: Node) -> Node | None:
    waiting, seen = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            if user.op != "call_module" and operation_name(user) in _STRICT:
                return user
            module = program.module_of(user)
            if module is not None and not type(module).__module__.startswith("torch.nn."):
                return user
            if user not in seen and may_share(program, user):
                seen.add(user)
                waiting.append(user)
    return None


def _fit(graph: Rewriter, context: Context, found: list[_Candidate]) -> list[_Candidate]:
    """Those with which the root runs, without the layers whose output comes to what takes no rows of a wider tensor."""
    if not found:
        return []
    watch = _Strides(found)
    error = _run_with(context, found, watch)
    if error is not None and len(found) > 1:
        middle = len(found) // 2
        return [fit for half in (found[:middle], found[middle:]) for fit in _fit(graph, context, half)]
    if error is not None:
        for node in found[0].nodes:
            graph.skip(node, f"a run in which it is computed together with those beside it raises ({error})")
        return []
    for number, unfit in watch.unfit.items():
        for index, reader in unfit.items():
            graph.skip(found[number].nodes[index], f"its output comes to {reader}")
    return [fit for number, each in enumerate(found) if (fit := each.without([*watch.unfit[number]])) is not None]


def _run_with(context: Context, found: Sequence[_Candidate], watch: _Strides) -> str | None:
    assert context.run_inside is not None
    with ExitStack() as stack:
        for number, each in enumerate(found):
            # Afterwards it has nothing to hold.
            stack.callback(each.group.link)
            stack.enter_context(in_place(each.edits()))
            each.group.link()
            watch.numbers[id(each.group.weight)] = number
        return context.run_inside(watch)


class _Strides(TorchFunctionMode):
    """Finds the layers whose output comes to an operation that takes no rows of a wider tensor, and has the run go on.

    Attributes:
        unfit: by the number of the group, for each of its layers by number, the operation with a clause about it.
        numbers: by the joint weight, by identity, the number of the group.
    """

    def __init__(self, found: Sequence[_Candidate]) -> None:
        super().__init__()
        self.found = found
        self.unfit: dict[int, dict[int, str]] = {number: {} for number in range(len(found))}
        self.numbers: dict[int, int] = {}
        # By where the memory of a result begins: the number of the group, as long as the memory lives.
        self._results: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            place = next(
                filter(None, (self._place(leaf) for leaf in pytree.tree_leaves(args) if _is_strided(leaf))), None
            )
            if place is None:
                raise
            number, index = place
            result = func(*pytree.tree_map(_contiguous, args), **kwargs)
            self.unfit[number][index] = f"{name}, which takes no rows of a wider tensor"
            return result
        if func is F.linear and len(args) > 1 and id(args[1]) in self.numbers:
            storage = result.untyped_storage()
            self._results[storage.data_ptr()] = StorageWeakRef(storage), self.numbers[id(args[1])]
        elif name in _STRICT and (place := self._place(args[0])) and _joins_one_with_columns(args[0], args[1:], result):
            number, index = place
            text = f"{name}, which may take no rows of a wider tensor where a dim is longer than 1"
            self.unfit[number].setdefault(index, f"{text}: give longer example inputs")
        return result

    def _place(self, value: Any) -> tuple[int, int] | None:
        """The numbers of the group and of the layer whose output lies in this memory."""
        if not isinstance(value, torch.Tensor):
            return None
        reference, number = self._results.get(value.untyped_storage().data_ptr(), (None, 0))
        if reference is None or reference.expired():
            return None
        sizes = [len(layer.weight) for layer in self.found[number].layers]
        column = value.storage_offset() % sum(sizes)
        index = 0
        while column >= sizes[index]:
            column -= sizes[index]
            index += 1
        return number, index


def _joins_one_with_columns(value: torch.Tensor, given: Sequence[Any], result: torch.Tensor) -> bool:
    """Whether the view joins a dim of length 1 with those behind it, as it couldn't if that were longer.

    What a length of 1 hides: (4, 1, 16) to (4, 16) may be rows joined with rows, or with their columns. An argument of -1
    tells, else it is taken for the latter.
    """
    shape, strides, made = value.shape, value.stride(), result.shape
    asked = [length for length in pytree.tree_leaves(given) if isinstance(length, int)]
    behind = math.prod(made[asked.index(-1) + 1 :]) if -1 in asked else 0
    for dim in range(len(shape) - 1):
        if shape[dim] != 1 or strides[dim] == strides[dim + 1] * shape[dim + 1]:
            continue
        front = math.prod(shape[:dim])
        is_kept = _ones_behind(made, front) >= _ones_behind(shape[: dim + 1], front)
        if not is_kept and behind != math.prod(shape[dim + 1 :]):
            return True
    return False


def _ones_behind(shape: Sequence[int], count: int) -> int:
    """How many dims of length 1 have so many numbers in front of them."""
    return sum(length == 1 and math.prod(shape[:dim]) == count for dim, length in enumerate(shape))


def _is_strided(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not leaf.is_contiguous()


def _contiguous(leaf: Any) -> Any:
    return leaf.contiguous() if isinstance(leaf, torch.Tensor) else leaf
