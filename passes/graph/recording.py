"""What a module does in an eager run: which modules it calls and how, and which value goes where.

A trace shows everything that a forward can do for one structure of calls; a recorded run shows only what it did, and
also where there is no trace. It is taken for true only where all runs agree.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils import _pytree as pytree

from passes.graph.capture import ModuleGraph, is_atom
from passes.graph.interception import intercepted_calls
from passes.graph.structure import CallStructure, Unstructured, binder_of, signature_of
from passes.graph.tracing import METADATA, function_name
from passes.program.seals import SealedOutput


@dataclass
class RecordedCall:
    """One call of one module.

    Attributes:
        structure: the structure of its arguments, or the clause that says why they have none.
        shapes: of each tensor among its arguments, in the order of the structure.
        graph: what its forward did, its children as calls; None for an atom.
        outputs: the tree of what it returned, in which an object that may hold tensors is a leaf; None for an atom.
        output_shape: of the one tensor that an atom returned; None for anything else.
    """

    structure: CallStructure | str
    shapes: tuple[torch.Size, ...]
    graph: fx.Graph | None
    outputs: pytree.TreeSpec | None = None
    output_shape: torch.Size | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The number of dims of each tensor among its arguments."""
        return tuple(map(len, self.shapes))


@dataclass
class Recording:
    """One eager run.

    Attributes:
        calls: the calls of each module, by its identity, in order.
        reads: (id of the owner, name) of each parameter and buffer that something else than its owner's own operation
            reads, with the readers by identity. A tensor is known as the object that it is: a view of it that was made
            before the run isn't seen, and needn't be. It goes on reading the old storage, which no pass writes to.
        autocast: the dtype of autocast, for each module, by its identity, that was called under it.
    """

    calls: dict[int, list[RecordedCall]] = field(default_factory=dict)
    reads: dict[tuple[int, str], set[int]] = field(default_factory=dict)
    autocast: dict[int, torch.dtype] = field(default_factory=dict)


@dataclass
class Recordings:
    """What several runs agree on.

    Attributes:
        structures: for each module that was called, by identity, the structure of all its calls, or the clause that
            says why they have no common one.
        counts: how often each module was called in each run, where the runs agree; -1 where they don't.
        ranks: the number of dims of each module's tensor arguments, where all calls agree.
        graphs: for each module that is no atom, what it did in every one of its calls, where all agree.
        chains: of the modules without such a graph: the atoms that they call in a row, in every call and in no other way,
            however often.
        reads: as in `Recording`, over all runs.
        autocast: as in `Recording`, over all runs.
        maps: for each atom that takes one tensor and gives one, in the order of the first run, the shapes of the two in
            each call of that run.
    """

    structures: dict[int, CallStructure | str] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    ranks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    graphs: dict[int, ModuleGraph] = field(default_factory=dict)
    chains: list[ModuleGraph] = field(default_factory=list)
    reads: dict[tuple[int, str], set[int]] = field(default_factory=dict)
    autocast: dict[int, torch.dtype] = field(default_factory=dict)
    maps: dict[int, list[tuple[torch.Size, torch.Size]]] = field(default_factory=dict)


# In the notes of a node of a recorded graph: the dtype of the autocast that the operation ran under.
AUTOCAST = "autocast"


def autocast_dtype(devices: Iterable[str]) -> torch.dtype | None:
    """The dtype in which autocast has operations on these types of devices computed now; None where it is off for them."""
    for device in devices:
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


# Modules that stand in plain containers of a tree, with their paths.
Places = Sequence[tuple[str, nn.Module]]


def record(root: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], unregistered: Places = ()) -> Recording:
    """Run `root` once and keep what its modules did, and those that it doesn't register.

    No tensor of the run is kept alive by the recording. The caller sees to training flags, gradients, buffers and
    random state.

    Raises:
        Exception: whatever the forward raises.
    """
    recorder = _Recorder([*root.named_modules(), *unregistered])
    with intercepted_calls(root, recorder.around, (module for _, module in unregistered)), recorder:
        outputs = root(*args, **kwargs)
    # Tensors in an object of the outputs that can't be named count as kept, as long as the object lives.
    unnamed = recorder.forget_outputs(outputs)
    del outputs
    recorder.mark_escapes()
    del unnamed
    return recorder.recording


def from_elsewhere() -> NoReturn:
    """Stands in a recorded graph, which is never run, for a tensor that is no argument of the call: one in an object that is
    given, or that an earlier call left somewhere.
    """
    raise RuntimeError("a recorded graph is read, and never run")


class _Frame:
    """The call that is being run: which node stands for which tensor."""

    def __init__(self, module: nn.Module, atom: bool) -> None:
        self.module = module
        self.atom = atom
        self.graph = fx.Graph()
        self.nodes: dict[int, tuple[weakref.ref[torch.Tensor], fx.Node]] = {}

    def keep(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self.nodes[id(tensor)] = (weakref.ref(tensor), node)

    def node_of(self, tensor: torch.Tensor) -> fx.Node | None:
        reference, node = self.nodes.get(id(tensor), (None, None))
        return node if reference is not None and reference() is tensor else None


class _Recorder(TorchFunctionMode):
    def __init__(self, places: Places) -> None:
        super().__init__()
        self.recording = Recording()
        self.frames: list[_Frame] = []
        # The nodes that stand for each value, by its identity: a tensor that died may have left its own to another one.
        self.values: dict[int, list[tuple[weakref.ref[torch.Tensor], fx.Node]]] = {}
        self.signatures: dict[Any, tuple[inspect.Signature, Callable[..., dict[str, Any]]]] = {}
        # The tensors themselves keep their identity from being given to others while the forward replaces them.
        self.owners: dict[int, tuple[nn.Module, str, torch.Tensor]] = {}
        self.names = {id(module): name for name, module in places}
        for _, module in places:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self.owners.setdefault(id(tensor), (module, name, tensor))
        self.devices = {tensor.device.type for _, _, tensor in self.owners.values()}

    def around(self, module: nn.Module, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        caller = self.frames[-1] if self.frames else None
        frame = _Frame(module, is_atom(module))
        seen, named_seen = opened((args, kwargs))
        tensors = [leaf for leaf in pytree.tree_leaves((seen, named_seen)) if isinstance(leaf, torch.Tensor)]
        if (dtype := autocast_dtype(self.devices)) is not None:
            self.recording.autocast[id(module)] = dtype
        structure, named = self._structure(module, seen, named_seen)
        shapes = tuple(tensor.shape for tensor in (tensors if named is None else named))
        arguments = None if caller is None else self._arguments(caller, (seen, named_seen))
        for index, tensor in enumerate(tensors):
            frame.keep(tensor, frame.graph.placeholder(f"input_{index}"))
        self.frames.append(frame)
        try:
            outputs = call(*args, **kwargs)
        finally:
            self.frames.pop()
        finished = RecordedCall(structure, shapes, None if frame.atom else frame.graph)
        self.recording.calls.setdefault(id(module), []).append(finished)
        given = opened(outputs)
        self._finish(frame, finished, given)
        if caller is not None and arguments is not None:
            node = caller.graph.create_node("call_module", self._target(caller.module, module), *arguments)
            node.meta["module"] = module
            self._keep(caller, given, node, tensors)
        return outputs

    def _structure(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CallStructure | str, list[Any] | None]:
        """The structure of a call, and its tensors in the order of that; the reason and None where it has none."""
        try:
            signature, binder = self._signature(module)
            bound = binder(*args, **kwargs)
            structure = CallStructure.of_call(signature, args, kwargs, bound)
        except Unstructured as error:
            return f"its forward is called with what a graph can't hold: {error}", None
        except TypeError as error:
            return f"its forward is called with arguments that don't fit its signature ({error})", None
        return structure, structure.tensors_of(bound)

    def _signature(self, module: nn.Module) -> tuple[inspect.Signature, Callable[..., dict[str, Any]]]:
        key: Any = id(module) if "forward" in module.__dict__ else type(module)
        if key not in self.signatures:
            signature = signature_of(module)
            self.signatures[key] = signature, binder_of(signature)
        return self.signatures[key]

    def _finish(self, frame: _Frame, finished: RecordedCall, outputs: Any) -> None:
        if frame.atom:
            finished.output_shape = outputs.shape if isinstance(outputs, torch.Tensor) else None
            return
        leaves, finished.outputs = pytree.tree_flatten(outputs)
        frame.graph.output([self._argument(frame, leaf) for leaf in leaves])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.frames or function_name(func) in METADATA:
            return result
        frame = self.frames[-1]
        if function_name(func) == "__get__" and func.__self__.__name__ in METADATA:
            return result
        given = opened((args, kwargs))
        arguments = self._arguments(frame, given)
        if frame.atom:
            return result
        method = is_tensor_method_or_property(func) and function_name(func) != "__get__"
        op, target = ("call_method", function_name(func)) if method else ("call_function", func)
        node = frame.graph.create_node(op, target, *arguments)
        if (dtype := autocast_dtype(self.devices)) is not None:
            node.meta[AUTOCAST] = dtype
        self._keep(frame, opened(result), node, pytree.tree_leaves(given))
        return result

    def _arguments(self, frame: _Frame, arguments: tuple[Any, Any]) -> tuple[Any, Any]:
        args, kwargs = pytree.tree_map(lambda leaf: self._argument(frame, leaf), arguments)
        return tuple(args), kwargs

    def _argument(self, frame: _Frame, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf if isinstance(leaf, (type(None), bool, int, float, str, torch.dtype, torch.device)) else None
        node = frame.node_of(leaf)
        if node is not None:
            return node
        if id(leaf) in self.owners:
            return self._read(frame, leaf)
        self._escape(leaf)
        node = frame.graph.call_function(from_elsewhere)
        frame.keep(leaf, node)
        return node

    def _read(self, frame: _Frame, tensor: torch.Tensor) -> fx.Node | None:
        owner, name, _ = self.owners[id(tensor)]
        if frame.atom and owner is frame.module:
            return None
        self.recording.reads.setdefault((id(owner), name), set()).add(id(frame.module))
        node = frame.graph.get_attr(name)
        node.meta["owner"] = owner
        frame.keep(tensor, node)
        return node

    def _keep(self, frame: _Frame, value: Any, node: fx.Node, given: Sequence[Any]) -> None:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                frame.keep(leaf, node)
                known = [entry for entry in self.values.get(id(leaf), ()) if entry[0]() is leaf]
                # Who gives an input of the run back has made no value: `flatten` of one dim does.
                if known or not any(leaf is other for other in given):
                    self.values[id(leaf)] = [*known, (weakref.ref(leaf), node)]

    def _target(self, caller: nn.Module, module: nn.Module) -> str:
        # A recorded graph is read, never run: the path from the root does as the name of a call.
        return self.names.get(id(module), type(module).__name__)

    def _escape(self, tensor: torch.Tensor) -> None:
        """A tensor that comes from nowhere in this call was kept somewhere by the one that made it."""
        for reference, node in self.values.get(id(tensor), ()):
            if reference() is tensor:
                node.meta["escapes"] = True

    def forget_outputs(self, outputs: Any) -> list[Any]:
        """The tensors that the root returns don't count as kept somewhere: they are in its output. Gives the others."""
        leaves = pytree.tree_leaves(outputs)
        for leaf in leaves:
            self.values.pop(id(leaf), None)
        return [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]

    def mark_escapes(self) -> None:
        """A value that outlives the run was kept somewhere: it has a user that no graph shows."""
        # Most runs leave nothing, and to look for what goes round in circles takes long.
        if self._outliving():
            gc.collect()
        for node in self._outliving():
            node.meta["escapes"] = True
        self.values.clear()

    def _outliving(self) -> list[fx.Node]:
        """The nodes of the values that are alive, and no tensors of the modules."""
        return [
            node
            for entries in self.values.values()
            for reference, node in entries
            if (tensor := reference()) is not None and id(tensor) not in self.owners
        ]


def opened(values: Any) -> Any:
    """The values with the tensors in the place of sealed ones: which modules are folded together doesn't change what is run."""
    if not any(isinstance(leaf, SealedOutput) for leaf in pytree.tree_leaves(values)):
        return values
    return pytree.tree_map(lambda leaf: leaf.sealed_value if isinstance(leaf, SealedOutput) else leaf, values)


def agree(root: nn.Module, runs: Sequence[Recording], unregistered: Places = ()) -> Recordings:
    """What all the runs have in common."""
    result = Recordings()
    disagreeing: list[tuple[str, nn.Module]] = []
    for path, module in {id(place[1]): place for place in (*root.named_modules(), *unregistered)}.values():
        calls = [run.calls.get(id(module), []) for run in runs]
        every = [call for run in calls for call in run]
        if not every:
            continue
        counts = {len(run) for run in calls}
        result.counts[id(module)] = counts.pop() if len(counts) == 1 else -1
        result.structures[id(module)] = _common_structure(every)
        ranks = {call.ranks for call in every}
        if len(ranks) == 1:
            result.ranks[id(module)] = ranks.pop()
        graph = _common_graph(path, module, every)
        if graph is not None and result.counts[id(module)] > 0:
            result.graphs[id(module)] = graph
        elif not is_atom(module):
            disagreeing.append((path, module))
    result.chains = _Chains(runs, disagreeing).graphs()
    for run in runs:
        for place, readers in run.reads.items():
            result.reads.setdefault(place, set()).update(readers)
        result.autocast |= run.autocast
    for key, first_calls in (runs[0].calls if runs else {}).items():
        maps = [
            (call.shapes[0], call.output_shape)
            for call in first_calls
            if len(call.shapes) == 1 and call.output_shape is not None
        ]
        if len(maps) == len(first_calls):
            result.maps[key] = maps
    return result


def _common_structure(calls: Sequence[RecordedCall]) -> CallStructure | str:
    first = calls[0].structure
    for call in calls:
        if isinstance(call.structure, str):
            return call.structure
        assert isinstance(first, CallStructure)
        if not first.same_as(call.structure):
            return "its forward is called in different ways"
    return first


def _common_graph(path: str, module: nn.Module, calls: Sequence[RecordedCall]) -> ModuleGraph | None:
    first = calls[0]
    if first.graph is None or first.outputs is None:
        return None
    shape = _shape_of(first.graph)
    for call in calls[1:]:
        if call.graph is None or call.outputs != first.outputs or _shape_of(call.graph) != shape:
            return None
        # A value that one call leaves somewhere may be left by all.
        for node, other in zip(first.graph.nodes, call.graph.nodes, strict=True):
            if other.meta.get("escapes"):
                node.meta["escapes"] = True
    return ModuleGraph(path, module, first.graph, _structure_of(first), first.outputs, traced=False)


def _structure_of(call: RecordedCall) -> CallStructure:
    return CallStructure.unnamed() if isinstance(call.structure, str) else call.structure


class _Chains:
    """Finds the atoms whose values always go from the one to the other, where the rest of the runs differs.

    One feeds another where every call of the first, in all runs, gives its value to a call of the second and to nothing
    else, and every call of the second has its input from there.
    """

    def __init__(self, runs: Sequence[Recording], callers: Sequence[tuple[str, nn.Module]]) -> None:
        self.runs = runs
        self.callers = callers
        # For each atom, by identity: what is before it and behind it in each of its calls, 0 where that is no atom.
        self.before: dict[int, set[int]] = {}
        self.behind: dict[int, set[int]] = {}
        self.homes: dict[int, set[int]] = {}
        self.counts: dict[int, int] = {}
        self.atoms: dict[int, fx.Node] = {}
        for number, (_, caller) in enumerate(callers):
            for call in self._calls_of(caller):
                for node in call.graph.nodes if call.graph is not None else ():
                    self._look_at(number, node)

    def _calls_of(self, module: nn.Module) -> Iterator[RecordedCall]:
        return (call for run in self.runs for call in run.calls.get(id(module), ()))

    def _look_at(self, caller: int, node: fx.Node) -> None:
        key = _atom(node)
        if not key:
            return
        self.atoms.setdefault(key, node)
        self.homes.setdefault(key, set()).add(caller)
        self.counts[key] = self.counts.get(key, 0) + 1
        self.before.setdefault(key, set()).add(_atom(node.all_input_nodes[0]))
        user = next(iter(node.users)) if len(node.users) == 1 and not node.meta.get("escapes") else None
        self.behind.setdefault(key, set()).add(_atom(user))

    def graphs(self) -> list[ModuleGraph]:
        """One graph for each chain, from the first atom that no other feeds."""
        following = {key: next(iter(behind)) for key, behind in self.behind.items() if self._feeds(key, behind)}
        fed = set(following.values())
        found: list[ModuleGraph] = []
        for key in following:
            if key not in fed:
                chain = [key]
                while chain[-1] in following:
                    chain.append(following[chain[-1]])
                found += self._graph(chain)
        return found

    def _feeds(self, key: int, behind: set[int]) -> bool:
        other = next(iter(behind))
        return (
            len(behind) == 1
            and self.before.get(other) == {key}
            and len(self.homes[key] | self.homes[other]) == 1
            and self._is_shown(key)
            and self._is_shown(other)
        )

    def _is_shown(self, key: int) -> bool:
        """Whether all calls of the atom are in these graphs, and each gives one tensor."""
        calls = list(self._calls_of(self.atoms[key].meta["module"]))
        return len(calls) == self.counts[key] and all(call.output_shape is not None for call in calls)

    def _graph(self, chain: Sequence[int]) -> Iterator[ModuleGraph]:
        (home,) = self.homes[chain[0]]
        path, caller = self.callers[home]
        call = next(self._calls_of(caller))
        if call.outputs is None:
            return
        graph = fx.Graph()
        value = graph.placeholder("input_0")
        for key in chain:
            node = self.atoms[key]
            value = graph.create_node("call_module", node.target, (value,))
            value.meta["module"] = node.meta["module"]
        graph.output([value])
        yield ModuleGraph(path, caller, graph, _structure_of(call), call.outputs, traced=False, whole=False)


def _atom(node: fx.Node | None) -> int:
    """The identity of the atom that the node calls on one tensor and nothing else; 0 for any other node."""
    if node is None or node.op != "call_module" or len(node.args) + len(node.kwargs) != 1:
        return 0
    (argument,) = (*node.args, *node.kwargs.values())
    module = node.meta["module"]
    return id(module) if isinstance(argument, fx.Node) and is_atom(module) else 0


def _shape_of(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """What must be equal in two runs: operations and who feeds whom, not the numbers that follow the batch size."""
    numbers = {node: index for index, node in enumerate(graph.nodes)}
    return [
        (
            node.op,
            node.target,
            node.meta.get(AUTOCAST),
            [numbers[source] for source in node.all_input_nodes],
        )
        for node in graph.nodes
    ]
