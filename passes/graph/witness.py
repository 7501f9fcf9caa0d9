"""The values that flow into chosen regions while the module runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from passes.graph.capture import ModuleGraph
from passes.graph.interception import intercepted_calls
from passes.graph.program import Program
from passes.graph.region import Region
from passes.graph.structure import binder_of

GraphOf = Callable[[ModuleGraph], tuple[fx.Graph, dict[fx.Node, fx.Node]]]


def witness_inputs(
    program: Program, regions: Mapping[int, Region], graph_of: GraphOf, run: Callable[[], Any], *, limit: int
) -> dict[int, tuple[torch.Tensor, ...]]:
    """Run the module and keep what the first call of each region is given.

    Args:
        regions: under any numbers.
        graph_of: the graph to run a module by, and its node for each node of now; for regions that begin with a
            function, whose inputs only a graph shows.
        run: runs the root.
        limit: bytes to keep; regions whose turn comes when it is reached are missing in the result.

    Returns:
        Copies of the values, by the region's number.
    """
    watcher = _Watcher(program, regions, graph_of, limit)
    with intercepted_calls(program.root, watcher.around):
        run()
    return watcher.seen


class _Watcher:
    def __init__(self, program: Program, regions: Mapping[int, Region], graph_of: GraphOf, limit: int) -> None:
        self.program = program
        self.regions = regions
        self.graph_of = graph_of
        self.limit = limit
        self.seen: dict[int, tuple[torch.Tensor, ...]] = {}
        self.modules: dict[int, int] = {}
        self.functions: dict[int, list[int]] = {}
        for number, region in regions.items():
            first = region.steps[0]
            if first.op == "call_module":
                self.modules[id(first.target)] = number
            else:
                self.functions.setdefault(id(program.home(first.node).module), []).append(number)

    def around(self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = self.modules.get(id(module))
        if number is not None:
            self._keep(number, [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)])
        if id(module) in self.functions:
            self._interpret(module, args, kwargs)
        return call(*args, **kwargs)

    def _interpret(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        home = self.program.graphs[id(module)]
        graph, twins = self.graph_of(home)
        watched = {twins[self.regions[n].steps[0].node]: n for n in self.functions.pop(id(module))}
        tensors = home.structure.tensors_of(binder_of(home.structure.signature)(*args, **kwargs))

        def keep(node: fx.Node, env: Mapping[fx.Node, Any]) -> None:
            number = watched.get(node)
            if number is not None:
                self._keep(number, [env[twins[source]] for source in self.regions[number].inputs])

        _WatchedInterpreter(module, graph, keep).run(*tensors)

    def _keep(self, number: int, values: list[torch.Tensor]) -> None:
        if number in self.seen or self.limit <= 0:
            return
        self.limit -= sum(value.numel() * value.element_size() for value in values)
        self.seen[number] = tuple(value.detach().clone() for value in values)


class _WatchedInterpreter(fx.Interpreter):
    def __init__(
        self, module: nn.Module, graph: fx.Graph, before: Callable[[fx.Node, Mapping[fx.Node, Any]], None]
    ) -> None:
        super().__init__(module, graph=graph)
        self.before = before

    def run_node(self, n: fx.Node) -> Any:
        self.before(n, self.env)
        return super().run_node(n)
