"""A short run of nodes as a function of its inputs, so that a rewrite can be checked where it was made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from passes.graph.casts import changed, lowering
from passes.graph.forward import GraphForward
from passes.graph.program import Program
from passes.program.folded import FoldedConvForward, FoldedNormForward
from passes.program.forwards import inner_forward
from passes.program.seals import SealedOutput, sealed


@dataclass(frozen=True)
class _Read:
    """A parameter or buffer, read when the region is run."""

    owner: nn.Module
    name: str


@dataclass(frozen=True)
class Step:
    """One node with its arguments as they stood: nodes stand for values, the rest is as it is.

    Attributes:
        autocast: the dtype of the autocast that the operation was seen to run under; None without.
    """

    node: fx.Node
    op: str
    target: Any
    args: Any
    kwargs: Any
    autocast: torch.dtype | None


@dataclass(frozen=True)
class Region:
    """Some nodes in the order of the run, with their arguments as they stood when the region was taken.

    Calling it with the values of `inputs` runs the nodes on the modules and tensors of now and gives the value of `output`.

    Attributes:
        inputs: the nodes outside the region whose values it needs.
        output: the last node, or what whoever used its value uses now.
    """

    steps: tuple[Step, ...]
    inputs: tuple[fx.Node, ...]
    output: fx.Node

    @classmethod
    def of(cls, program: Program, nodes: Sequence[fx.Node]) -> Region:
        """The region of one node or more, which gives the value of the last one."""
        reader = _Reader(program, set(nodes))
        steps = tuple(reader.step(node) for node in nodes)
        return cls(steps, tuple(reader.inputs), nodes[-1])

    def rewritten(
        self, program: Program, gone: Mapping[fx.Node, fx.Node], added: Sequence[fx.Node] = ()
    ) -> Region | None:
        """The same region after a rewrite; None if it needs another value now than those of its inputs.

        Args:
            gone: for each node that was erased, the node whose value took its place.
            added: the nodes that the rewrite made, in the order of the run; what is left of the region comes before them.
        """
        nodes = [*(step.node for step in self.steps if step.node not in gone), *added]
        reader = _Reader(program, set(nodes), {program.producer(node): node for node in self.inputs})
        steps = tuple(reader.step(node) for node in nodes)
        output = self.output
        while output in gone:
            output = gone[output]
        if output not in (*nodes, *self.inputs):
            output = program.producer(output)
        if any(node not in self.inputs for node in reader.inputs) or output not in (*nodes, *self.inputs):
            return None
        return Region(steps, self.inputs, output)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that the region calls."""
        return tuple(step.target for step in self.steps if isinstance(step.target, nn.Module))

    def read_tensors(self) -> list[torch.Tensor]:
        """The parameters and buffers that it reads by their names, as they are now: they flow into it as its inputs do."""
        reads = (read for step in self.steps for read in _reads_in((step.args, step.kwargs)))
        values = (getattr(read.owner, read.name) for read in reads)
        return [value for value in values if isinstance(value, torch.Tensor)]

    @contextmanager
    def private_state(self) -> Iterator[None]:
        """Inside, a run writes to copies of the buffers that it reads: a BatchNorm in training counts statistics."""
        reads = [leaf for step in self.steps for leaf in _reads_in((step.args, step.kwargs))]
        homes = [*(module._buffers for module in self.modules), *(read.owner._buffers for read in reads)]
        names = [*(tuple(module._buffers) for module in self.modules), *((read.name,) for read in reads)]
        kept: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for home, wanted in zip(homes, names, strict=True):
            kept += [(home, name, held) for name in wanted if (held := home.get(name)) is not None]
        for home, name, held in kept:
            home[name] = held.detach().clone()
        try:
            yield
        finally:
            for home, name, held in kept:
                home[name] = held

    def __call__(self, *values: Any) -> Any:
        known: dict[fx.Node, Any] = dict(zip(self.inputs, values, strict=True))
        for step in self.steps:
            args, kwargs = fx.node.map_aggregate((step.args, step.kwargs), lambda a: _value(a, known))
            with _autocast(step, (args, kwargs)):
                known[step.node] = _run(step, args, kwargs)
        # A function whose weight was folded seals its output, too.
        return pytree.tree_map_only(SealedOutput, lambda leaf: leaf.sealed_value, known[self.output])


class _Reader:
    def __init__(self, program: Program, inside: set[fx.Node], known: Mapping[fx.Node, fx.Node] = {}) -> None:
        self.program = program
        self.inside = inside
        # Inputs by what makes their values: a rewrite may have put something in between that gives them as they are.
        self.known = known
        self.inputs: dict[fx.Node, None] = {}

    def step(self, node: fx.Node) -> Step:
        target = self.program.module_of(node) if node.op == "call_module" else node.target
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), self._argument)
        return Step(node, node.op, target, args, kwargs, self.program.autocast_at(node))

    def _argument(self, argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        if argument.op == "get_attr":
            owner, name, _ = self.program.tensor_of(argument)
            return _Read(owner, name)
        source = argument if argument in self.inside else self.program.producer(argument)
        if source in self.inside:
            return source
        argument = self.known.get(source, argument)
        self.inputs.setdefault(argument)
        return argument


def _reads_in(arguments: Any) -> list[_Read]:
    found: list[_Read] = []
    fx.node.map_aggregate(arguments, lambda leaf: found.append(leaf) if isinstance(leaf, _Read) else None)
    return found


def _value(argument: Any, known: dict[fx.Node, Any]) -> Any:
    if isinstance(argument, _Read):
        return getattr(argument.owner, argument.name)
    return known[argument] if isinstance(argument, fx.Node) else argument


@contextmanager
def _autocast(step: Step, values: Any) -> Iterator[None]:
    """The autocast that the operation ran under, on the devices of what it is given."""
    with ExitStack() as stack:
        if step.autocast is not None:
            for device in {leaf.device.type for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)}:
                stack.enter_context(torch.autocast(device, step.autocast))
        yield


def _run(step: Step, args: Any, kwargs: Any) -> Any:
    if step.op == "call_method":
        return getattr(args[0], step.target)(*args[1:], **kwargs)
    guard = inner_forward(step.target) if isinstance(step.target, nn.Module) else None
    if isinstance(guard, FoldedConvForward | FoldedNormForward | GraphForward):
        if (cast := lowering(step.target)) is not None:
            args, kwargs = changed((args, kwargs), cast.lowered)
        return guard.compute(*args, **kwargs)
    return step.target(*_sealed_for(step.target, args), **kwargs)


def _sealed_for(target: Any, args: Any) -> Any:
    """What a layer is given that computes by a function: its weight opens the seal of the BatchNorm before it."""
    weights = target._parameters.values() if isinstance(target, nn.Module) else ()
    layers = (getattr(weight, "sealed_layer", None) for weight in weights)
    front = next((layer.front for layer in layers if layer is not None), None)
    if front is None:
        return args
    input, *others = args
    return (sealed(input, front, input.dim() - front.dims - 1), *others)
