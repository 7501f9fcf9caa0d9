"""The values that flow into chosen regions while the module runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _pytree as pytree

from passes.errors import UnseenCall
from passes.graph.capture import ModuleGraph
from passes.graph.interception import intercepted_calls
from passes.graph.program import Program
from passes.graph.region import Region
from passes.graph.structure import binder_of
from passes.program.seals import SealedOutput

GraphOf = Callable[[ModuleGraph], tuple[fx.Graph, dict[fx.Node, fx.Node]]]


def witness_inputs(
    program: Program, regions: Mapping[int, Region], graph_of: GraphOf, run: Callable[[], Any], *, limit: int
) -> dict[int, tuple[Any, ...]]:
    """Run the module and keep what the first call of each region is given.

    Args:
        regions: under any numbers.
        graph_of: the graph to run a module by, and its node for each node of now; for regions whose inputs only a graph
            shows.
        run: runs the root.
        limit: bytes to keep; regions whose turn comes when it is reached are missing in the result, and so are those
            that the run doesn't come to or whose inputs nothing shows.

    Returns:
        Copies of the values, by the region's number.
    """
    watcher = _Watcher(program, regions, graph_of, limit)
    with intercepted_calls(program.root, watcher.around, (module for _, module in program.unregistered)):
        run()
    return watcher.seen


class _Watcher:
    def __init__(self, program: Program, regions: Mapping[int, Region], graph_of: GraphOf, limit: int) -> None:
        self.program = program
        self.regions = regions
        self.graph_of = graph_of
        self.limit = limit
        self.seen: dict[int, tuple[Any, ...]] = {}
        self.by_call: dict[int, list[int]] = {}
        self.by_graph: dict[int, list[int]] = {}
        for number, region in regions.items():
            first = region.steps[0]
            home = program.home(first.node)
            if first.op == "call_module" and _given_to(first, region):
                self.by_call.setdefault(id(first.target), []).append(number)
            elif home.traced and all(program.home(source) is home for source in region.inputs):
                self.by_graph.setdefault(id(home.module), []).append(number)

    def around(self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for number in self.by_call.pop(id(module), ()):
            self._keep(number, self._given(number, args, kwargs))
        if numbers := self.by_graph.pop(id(module), None):
            self._interpret(module, numbers, args, kwargs)
        return call(*args, **kwargs)

    def _given(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[fx.Node, Any]:
        first = self.regions[number].steps[0]
        places, values = pytree.tree_leaves((first.args, first.kwargs)), pytree.tree_leaves((args, kwargs))
        if len(places) != len(values):
            return {}
        return {place: value for place, value in zip(places, values, strict=True) if isinstance(place, fx.Node)}

    def _interpret(self, module: nn.Module, numbers: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        home = self.program.graphs[id(module)]
        graph, twins = self.graph_of(home)
        try:
            tensors = home.structure.tensors_of(binder_of(home.structure.signature)(*args, **kwargs))
        except UnseenCall:
            return
        wanted = {twins[source]: source for number in numbers for source in self.regions[number].inputs}
        interpreter = _Interpreter(module, graph, wanted)
        interpreter.run(*tensors)
        for number in numbers:
            self._keep(number, interpreter.kept)

    def _keep(self, number: int, values: Mapping[fx.Node, Any]) -> None:
        inputs = self.regions[number].inputs
        if self.limit <= 0 or any(source not in values for source in inputs):
            return
        kept = tuple(_copied(values[source]) for source in inputs)
        self.limit -= sum(value.numel() * value.element_size() for value in kept if isinstance(value, torch.Tensor))
        self.seen[number] = kept


def _given_to(first: Any, region: Region) -> bool:
    """Whether all inputs of the region are arguments of its first call."""
    given = {leaf for leaf in pytree.tree_leaves((first.args, first.kwargs)) if isinstance(leaf, fx.Node)}
    return given.issuperset(region.inputs)


def _copied(value: Any) -> Any:
    if isinstance(value, SealedOutput):
        # Given to a convolution with a BatchNorm in front that was folded before: the region computes on the numbers.
        value = value.sealed_value
    if not isinstance(value, torch.Tensor):
        return value
    # Inside of `torch.func.vmap` and the like a tensor stands for many, and lives no longer than the call.
    with temporarily_clear_interpreter_stack():
        return _one_of(value).detach().clone()


def _one_of(value: torch.Tensor) -> torch.Tensor:
    """The first of the tensors that a batched one stands for; any other without what `torch.func` puts around it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        inner = torch._C._functorch.get_unwrapped(value)
        batched = torch._C._functorch.is_batchedtensor(value)
        value = inner.select(torch._C._functorch.maybe_get_bdim(value), 0) if batched else inner
    return value


class _Interpreter(fx.Interpreter):
    """Runs a graph and keeps copies of some values as they are made: a later operation may write to them."""

    def __init__(self, module: nn.Module, graph: fx.Graph, wanted: Mapping[fx.Node, fx.Node]) -> None:
        super().__init__(module, graph=graph)
        self.wanted = wanted
        self.kept: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n in self.wanted:
            self.kept[self.wanted[n]] = _copied(value)
        return value
