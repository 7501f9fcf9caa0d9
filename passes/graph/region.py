"""A short run of nodes as a function of its inputs, so that a rewrite can be checked where it was made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from passes.graph.guards import FoldedConvForward, FoldedNormForward
from passes.graph.program import Program


@dataclass(frozen=True)
class _Read:
    """A parameter or buffer, read when the region is run."""

    owner: nn.Module
    name: str


@dataclass(frozen=True)
class _Step:
    node: fx.Node
    op: str
    target: Any
    args: Any
    kwargs: Any


@dataclass(frozen=True)
class Region:
    """Some nodes in the order of the run, with their arguments as they stood when the region was taken.

    Calling it with the values of `inputs` runs the nodes on the modules and tensors of now and gives the value of the
    last one; nodes that are gone give what they were given.

    Attributes:
        inputs: the nodes outside the region whose values it needs.
    """

    steps: tuple[_Step, ...]
    inputs: tuple[fx.Node, ...]

    @classmethod
    def of(cls, program: Program, nodes: Sequence[fx.Node]) -> Region:
        """The region of the nodes that are still there."""
        inside = set(nodes)
        inputs: list[fx.Node] = []

        def argument(node: fx.Node) -> Any:
            if node.op == "get_attr":
                owner, name, _ = program.tensor_of(node)
                return _Read(owner, name)
            source = node if node in inside else program.producer(node)
            if source in inside:
                return source
            if node not in inputs:
                inputs.append(node)
            return node

        steps = []
        for node in nodes:
            if node._erased:
                continue
            target = program.module_of(node) if node.op == "call_module" else node.target
            args = fx.node.map_aggregate(
                (node.args, node.kwargs), lambda a: argument(a) if isinstance(a, fx.Node) else a
            )
            steps.append(_Step(node, node.op, target, *args))
        return cls(tuple(steps), tuple(inputs))

    def __call__(self, *values: torch.Tensor) -> Any:
        known: dict[fx.Node, Any] = dict(zip(self.inputs, values, strict=True))
        result: Any = None
        for step in self.steps:
            args, kwargs = fx.node.map_aggregate((step.args, step.kwargs), lambda a: _value(a, known))
            result = known[step.node] = _run(step, args, kwargs)
        return result


def _value(argument: Any, known: dict[fx.Node, Any]) -> Any:
    if isinstance(argument, _Read):
        return getattr(argument.owner, argument.name)
    return known[argument] if isinstance(argument, fx.Node) else argument


def _run(step: _Step, args: Any, kwargs: Any) -> Any:
    if step.op == "call_method":
        return getattr(args[0], step.target)(*args[1:], **kwargs)
    guard = step.target.__dict__.get("forward") if isinstance(step.target, nn.Module) else None
    if isinstance(guard, FoldedConvForward | FoldedNormForward):
        return guard.compute(*args, **kwargs)
    return step.target(*args, **kwargs)
