"""Check each folded pair on the values that flow into it in a run of the original model.

The recorded run is repeated. As soon as it has made the calls of a pair, these calls are computed again on the same
values, once with the old tensors and once with the new ones, and the judge compares the results.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from passes.program.matching import BATCH_NORMS, CONVOLUTIONS, Pair, arguments_of, layer_arguments
from passes.program.recording import Node, Recorder, Recording, call_of, tensor_of
from passes.program.seals import opened
from passes.program.tensors import TensorRef
from passes.program.weights import bare
from passes.torch_private import without_subclasses

Tensors = Mapping[TensorRef, torch.Tensor]
# compare(number of the pair, old function, new function, the values that both functions take)
Compare = Callable[[int, Callable[..., Any], Callable[..., Any], tuple[Any, ...]], None]


@dataclass(frozen=True)
class Rewritten:
    """A pair with its tensors before and after the rewrite.

    Attributes:
        pair: the pair in the recording.
        old, new: the tensors before and after; a tensor that was removed is missing.
        bias: the layer's bias, including one that the rewrite added; None if there is none.
        carried: whether the rewrite makes the layer do the affine operation's work.
        passed: the affine operations between the two whose work the layer does already, before and after.
    """

    pair: Pair
    old: Tensors
    new: Tensors
    bias: TensorRef | None
    carried: bool
    passed: frozenset[Node]


class _Numbered:
    """Numbers the calls of each function in each module.

    The position in the whole run would not do: the first run may fill a cache (`functools.lru_cache`) with values that
    the second run doesn't compute again.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, Any]] = Counter()

    def key_of(self, node: Node) -> tuple[int, Any, int]:
        """The key of the next call; the nodes must come in the order of the run."""
        kind = id(call_of(node).module), node.target
        self._counts[kind] += 1
        return (*kind, self._counts[kind])


@dataclass
class _Calls:
    """The calls of a pair that the run has made so far, with their arguments."""

    given: list[tuple[Node, Any, Any]] = field(default_factory=list)


class Replay(Recorder):
    """Repeats a recorded run, and compares each pair as soon as the run has called it."""

    def __init__(
        self,
        root: nn.Module,
        modules: Callable[[], Iterable[nn.Module]],
        recording: Recording,
        pairs: Mapping[int, Rewritten],
        compare: Compare,
        *,
        in_eval_too: bool,
    ) -> None:
        """Prepare the replay.

        Args:
            root, modules: as for `Recorder`.
            recording: the run to repeat.
            pairs: the rewritten pairs by number.
            compare: is called for each pair that was reached.
            in_eval_too: whether to compare BatchNorms on batch statistics in eval as well.
        """
        super().__init__(root, modules)
        self._pairs = pairs
        self._compare = compare
        self._in_eval_too = in_eval_too
        self._ways = {number: _way_of(one.pair) for number, one in pairs.items()}
        # A layer may belong to several pairs, for example to a chain of affine operations.
        pairs_of: dict[Node, list[int]] = defaultdict(list)
        for number, way in self._ways.items():
            for node in way:
                pairs_of[node].append(number)
        numbered = _Numbered()
        calls = ((node, numbered.key_of(node)) for node in recording.graph.nodes if node.op == "call_function")
        self._wanted = {key: (node, pairs_of[node]) for node, key in calls if node in pairs_of}
        self._open: dict[int, _Calls] = {}
        self._numbered = _Numbered()

    def _add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> fx.Node | None:
        node = super()._add(func, args, kwargs, result)
        if node is not None:
            recorded, pairs = self._wanted.get(self._numbered.key_of(node), (node, []))
            for number in pairs:
                self._note(recorded, number, args, kwargs)
        return node

    def _mark_escapes(self) -> None:
        """Do nothing: the original recording already knows which values outlive the run."""

    def _note(self, node: Node, number: int, args: Any, kwargs: Any) -> None:
        one, calls = self._pairs[number], self._open.setdefault(number, _Calls())
        # map_aggregate gives the same container types as the graph, so that the leaves match those of the node.
        args, kwargs = fx.node.map_aggregate((args, kwargs), opened)
        calls.given.append((node, args, kwargs))
        if node is not one.pair.second.node:
            return
        del self._open[number]
        if [node for node, _, _ in calls.given] != list(self._ways[number]):
            return
        source = _input_of(calls.given[0][0])
        leaves = zip(
            _leaves(calls.given[0][0].args, calls.given[0][0].kwargs), _leaves(*calls.given[0][1:]), strict=True
        )
        value = next(given for leaf, given in leaves if leaf is source)
        norm = one.pair.affine.node
        flags: list[bool | None] = [None]
        if self._in_eval_too and norm.target in BATCH_NORMS:
            named = arguments_of(norm, BATCH_NORMS[norm.target])
            flags += [False] * bool(named.get("training") and named.get("running_mean") is not None)
        # Created outside of `old` and `new`, because the judge raises the parameters to float64, large ones row by row.
        before, after = _as_parameters(one, one.old), _as_parameters(one, one.new)
        for flag in flags:

            def old(input: Any, flag: bool | None = flag) -> Any:
                return _run(calls, source, input, one, before, flag, left_out=one.passed)

            def new(input: Any, flag: bool | None = flag) -> Any:
                left_out = one.passed | {norm} if one.carried else one.passed
                return _run(calls, source, input, one, after, flag, left_out=left_out)

            self._compare(number, old, new, (value.detach().clone(),))


def _run(
    calls: _Calls,
    source: Node,
    input: Any,
    one: Rewritten,
    tensors: Tensors,
    training: bool | None,
    *,
    left_out: frozenset[Node],
) -> Any:
    """Compute the calls on another input, with the given tensors of the pair and without the calls in `left_out`."""
    values: dict[Node, Any] = {source: input}
    result: Any = input
    for node, args, kwargs in calls.given:

        def argument(leaf: Any, given: Any, node: Node = node) -> Any:
            if (ref := tensor_of(leaf)) in one.old:
                held = tensors.get(ref)  # type: ignore[arg-type]
                if held is None or node is one.pair.conv.node:
                    return held
                # Cloned, because a BatchNorm updates its statistics in place.
                return bare(held).clone()
            return values.get(leaf, given) if isinstance(leaf, fx.Node) else given

        leaves = zip(_leaves(node.args, node.kwargs), _leaves(args, kwargs), strict=True)
        _, structure = pytree.tree_flatten((args, kwargs))
        own_args, own_kwargs = pytree.tree_unflatten([argument(*pair) for pair in leaves], structure)
        function: Any = node.target
        if node in left_out:
            result = next(values[leaf] for leaf in _leaves(node.args, node.kwargs) if leaf in values)
        elif node is one.pair.conv.node:
            named = dict(zip(layer_arguments(function), own_args, strict=False)) | own_kwargs
            bias = None if one.bias is None else tensors.get(one.bias)
            result = _plain(function, **{**named, "bias": bias})
        elif training is not None and function in BATCH_NORMS:
            named = dict(zip(BATCH_NORMS[function], own_args, strict=False)) | own_kwargs
            result = _plain(function, **{**named, "training": training})
        else:
            result = _plain(function, *own_args, **own_kwargs)
        values[node] = result
    return result


def _as_parameters(one: Rewritten, tensors: Tensors) -> Tensors:
    """The tensors, with the layer's weight and bias as plain parameters without seals."""
    own = {ref: tensors[ref] for ref in (one.pair.conv.weight, one.bias) if ref is not None and ref in tensors}
    return {**tensors, **{ref: nn.Parameter(bare(held), requires_grad=False) for ref, held in own.items()}}


def _plain(function: Any, *args: Any, **kwargs: Any) -> Any:
    with without_subclasses():
        return function(*args, **kwargs)


def _leaves(args: Any, kwargs: Any) -> list[Any]:
    return pytree.tree_leaves((tuple(args), dict(kwargs)))


def _input_of(node: Node) -> Node:
    """The node of the value that a call of a pair computes on, which may be a tensor of the model."""
    target: Any = node.target
    names = layer_arguments(target) if target in CONVOLUTIONS else BATCH_NORMS.get(target)
    if names is not None:
        given: Node = arguments_of(node, names)["input"]
        return given
    return next(
        leaf for leaf in _leaves(node.args, node.kwargs) if isinstance(leaf, fx.Node) and tensor_of(leaf) is None
    )


def _way_of(pair: Pair) -> Sequence[Node]:
    """The calls from the first to the second, in order, including a padding call that the second makes itself."""
    *nodes, last = pair.way
    source = last.args[0] if last.args else None
    is_padded = isinstance(source, fx.Node) and source is not nodes[-1] and nodes[-1] in source.all_input_nodes
    return [*nodes, source, last] if is_padded else [*nodes, last]  # type: ignore[list-item]
