"""Merge linear layers that have the same input into one product."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from passes.base import Context
from passes.graph_interface import Example, GraphPass, GraphRewriter, Layer, Layers, Memory, Node


@dataclass(frozen=True)
class MergeLinears(GraphPass):
    """Merge linear layers with the same input into one, such as query, key and value in attention.

        q = x @ Wq.T + bq;  k = x @ Wk.T + bk;  v = x @ Wv.T + bv      3 products
        q, k, v  ==  split(x @ W.T + b)      W = [Wq; Wk; Wv],  b = [bq; bk; bv]      1 product, and 3 views

    Another example is the gate of a gated unit. Layers and functional calls are merged alike, within one module or
    across several. No tensor of the module is changed. The joint weight is concatenated at the first call and cached.
    It is made again after one of the weights was written to, moved, cast or replaced (torch doesn't count writes
    through `.data`). So checkpoints of the original can be loaded into the result and the reverse. Hooks still run, and
    a layer that is called by itself computes what it did before. A layer without a bias gets zeros in the joint bias.

    The outputs are views of the rows of a wider tensor. A layer isn't merged if this matters: if its output is returned
    from the forward in this layout, or goes to a `view` that doesn't accept it.

    The joint weights take as much memory again as the single ones, and all outputs stay in memory as long as one of
    them does. On a CPU, the joint product took 0.95 to 1.05 times as long as the single ones from 64 rows of 256 on, and
    up to 1.9 times below that (float32, one thread). So layers are merged only on CUDA devices, unless `force` is set.
    If gradients flow to the weights, and in compilations, traces and exports that you make yourself, each layer computes
    by itself.

    Does not handle: code that torch.compile can't capture; weights that depend on the inputs; weights that differ
    from the others in dtype, device or input width; layers that differ in autocast or gradient mode; inputs, weights
    and outputs that may be written to in place.

    Attributes:
        force: merge on any device, even if it makes the model slower.
    """

    force: bool = False

    name: ClassVar[str] = "merge-linears"
    modes: ClassVar[tuple[str, ...]] = ("inference",)

    VALID: ClassVar[Sequence[Example]] = (
        Example("a(x).relu() + b(x)", (2, 4), {"a": "nn.Linear(4, 8)", "b": "nn.Linear(4, 8)"}),
    )
    REFUSED: ClassVar[Sequence[Example]] = (
        Example(
            "a(x).relu() + b(x) + F.linear(x, x.mean() * a.weight)",
            (2, 4),
            {"a": "nn.Linear(4, 8)", "b": "nn.Linear(4, 8)"},
            "its weight is computed at every call",
        ),
        Example(
            "a(x).relu_() + b(x)",
            (2, 4),
            {"a": "nn.Linear(4, 8)", "b": "nn.Linear(4, 8)"},
            "its input or its output may be written to",
        ),
    )

    def rewrite(self, graph: GraphRewriter, context: Context) -> None:
        """Merge every group of layers that can be merged, if the device can gain from it or `force` is set."""
        groups = list(_on_one_input(graph))
        if groups and not self.force and context.device.type != "cuda":
            graph.skip_place(
                "",
                f"some of its layers share an input, but on this device ({context.device}) one product for all is "
                "only slower: merge-linears:force=true merges them anyway",
            )
            return
        layers = Layers(graph)
        for group in groups:
            for linears in _alike(graph, layers, group):
                _merge(graph, layers, linears)


# Find -----------------------------------------------------------------------------------------------------------------


def _on_one_input(graph: GraphRewriter) -> Iterator[list[Node]]:
    """Groups of two or more linear calls with the same input, under the same autocast and gradient mode."""
    settings = graph.settings()
    by_input: dict[Any, list[Node]] = defaultdict(list)
    for node in graph.calls("linear"):
        source = graph.argument(node, 0, "input")
        if isinstance(source, Node) and node.users:
            by_input[source, settings[node]].append(node)
    for nodes in by_input.values():
        if len(nodes) > 1:
            yield nodes
        else:
            graph.explain(nodes[0], "no other linear layer takes its input")


def _alike(graph: GraphRewriter, layers: Layers, nodes: Sequence[Node]) -> Iterator[list[Layer]]:
    """Divide calls into groups of two or more whose weights can be concatenated; the other calls are skipped."""
    memory = graph.memory()
    kinds: dict[Any, list[Layer]] = defaultdict(list)
    for node in nodes:
        layer = layers.layer_at(node)
        if layer is None:
            graph.skip(node, layers.why_no_layer(node))
        elif reason := _why_not(graph, layers, memory, layer):
            graph.skip(node, reason)
        else:
            weight = graph.example(layer.weight)
            kinds[weight.dtype, weight.device, layer.input_channels].append(layer)
    for alike in kinds.values():
        if len(alike) > 1:
            yield alike
        elif len(kinds) > 1:
            graph.skip(
                alike[0].node, "its weight has a different dtype, device or width than the weights of the other layers"
            )


# Judge ----------------------------------------------------------------------------------------------------------------


def _why_not(graph: GraphRewriter, layers: Layers, memory: Memory, layer: Layer) -> str | None:
    kinds = {(each.dtype, each.device, len(each)) for each in map(graph.example, layer.tensors.values())}
    if len(kinds) > 1:
        return "its bias has a different dtype, device or length than its weight"
    if memory.may_be_written((layer.node, layer.input)):
        return "its input or its output may be written to"
    return layers.why_not_constant(layer) or graph.why_layout_shows(layer.node, _in_rows(graph.example(layer.node)))


def _in_rows(example: torch.Tensor) -> torch.Tensor:
    """An example of the same shape that is a view of wider rows."""
    *shape, width = example.shape
    return example.new_empty((*shape, 2 * width)).narrow(-1, 0, width)


# Rewrite --------------------------------------------------------------------------------------------------------------


def _merge(graph: GraphRewriter, layers: Layers, linears: Sequence[Layer]) -> None:
    first = linears[0]
    where, what = _words([graph.where(linear.node) for linear in linears])
    with graph.change(where, what):
        weights = [layers.derived_from(linear.weight) for linear in linears]
        biases = [layers.derived_from(linear.bias) for linear in linears if linear.bias is not None]
        stacked = _Stacked((0,) * len(linears))
        weight = graph.derived(first.node, stacked, *weights, what="joint weight", in_autocast=False)
        stacked = _Stacked(tuple(0 if linear.bias is not None else linear.channels for linear in linears))
        bias = biases and graph.derived(first.node, stacked, *biases, what="joint bias", in_autocast=False)
        joint = graph.call(first.node, F.linear, (graph.argument(first.node, 0, "input"), weight, bias or None))
        start = 0
        for linear in linears:
            # Not `split`: torch forbids in-place writes to views that come from a call with several outputs.
            graph.replace_call(linear.node, torch.narrow, (joint, -1, start, linear.channels))
            start += linear.channels


def _words(places: Sequence[str]) -> tuple[str, str]:
    """The path of the innermost module around all layers, and the description of the change."""
    paths = [place.split(".") for place in places]
    depth = 0
    while len({tuple(path[: depth + 1]) for path in paths}) == 1 and all(len(path) > depth + 1 for path in paths):
        depth += 1
    *names, last = (".".join(path[depth:]) for path in paths)
    return ".".join(paths[0][:depth]), f"{', '.join(names)} and {last} computed together"


@dataclass(frozen=True)
class _Stacked:
    """Concatenates weights or biases; for each layer, the width of zeros in place of a missing bias, or 0."""

    zeros: tuple[int, ...]

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        left = iter(tensors)
        return torch.cat([tensors[0].new_zeros(width) if width else next(left) for width in self.zeros])
