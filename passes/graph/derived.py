"""The values of derived tensors: computed once, kept while their sources are unchanged, and shared by all graphs.

A pass writes them as calls in a graph. `lifted` makes them inputs of the graph, which are computed outside of it, so that
eager kernels and compilers alike get finished tensors.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from passes.base import PLAIN_TENSORS
from passes.graph.captured import EXAMPLE, CapturedGraph, Derived, Unusable, example_of, is_under_autocast, name_of
from passes.graph.effects import Memory
from passes.torch_private import has_autocast, is_capturing_cuda


@dataclass(frozen=True)
class Recipe:
    """How a derived tensor is computed."""

    call: Derived
    # For each argument the input of the graph, by its index or its node, or the recipe of another derived tensor
    sources: tuple[Any, ...]

    @property
    def inputs(self) -> Iterator[Any]:
        """The inputs of the graph that it is computed from."""
        for source in self.sources:
            yield from source.inputs if isinstance(source, Recipe) else (source,)


class DerivedTensors:
    """The values that the graphs of one model share. A value is freed when no graph uses it any more.

    No reference to a parameter is kept, not even a weak one: `torch.utils.swap_tensors`, by which `Module.to` may move
    parameters, refuses tensors with weak references.
    """

    def __init__(self, root: nn.Module | None = None) -> None:
        self.lock = threading.RLock()
        self._root = None if root is None else weakref.ref(root)
        # The values that were computed while a graph was rewritten, until its first call.
        self.fresh: list[torch.Tensor] = []
        self.graphs: weakref.WeakSet[DerivedInputs] = weakref.WeakSet()
        self._values: weakref.WeakValueDictionary[Any, torch.Tensor] = weakref.WeakValueDictionary()

    def values(self) -> list[torch.Tensor]:
        """The present values."""
        return list(self._values.values())

    def drop_unused(self) -> None:
        """Drop the values of parameters and buffers that the model no longer has."""
        root = None if self._root is None else self._root()
        held = set() if root is None else {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
        for graph in self.graphs:
            for key in [key for key in graph.states if not held.issuperset(key)]:
                del graph.states[key]

    def forget(self) -> None:
        """Compute all tensors anew at the next calls."""
        with self.lock:
            for graph in self.graphs:
                graph.states.clear()
            self._values.clear()

    def compute_now(self, captured: CapturedGraph, node: fx.Node) -> None:
        """Compute a derived tensor from the present parameters, and set its example.

        Nothing is done for parameters without values, as in a graph of fake tensors.

        Raises:
            Unusable: it must not be used.
        """
        sources: dict[fx.Node, torch.Tensor] = {}

        def source_of(source: fx.Node) -> Any:
            if isinstance(source.target, Derived):
                return _recipe_of(source, source_of)
            value = captured.value_of(source)
            if value is None or not can_be_watched(value):
                return None
            sources[source] = value
            return source

        if (recipe := _recipe_of(node, source_of)) is not None:
            (value,) = self.values_of([recipe], sources)
            # The first call takes it from the store.
            self.fresh.append(value)
            modes = (getattr(example_of(source), "fake_mode", None) for source in node.all_input_nodes)
            mode = next(filter(None, modes), None)
            if mode is not None:
                with mode:
                    # Not `from_tensor`, which would keep the memory of the value alive.
                    size = value.shape, value.stride()
                    node.meta[EXAMPLE] = torch.empty_strided(*size, dtype=value.dtype, device=value.device)

    def values_of(self, recipes: Sequence[Recipe], sources: Mapping[Any, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Compute the tensors, or take those that another graph has computed from the same sources.

        Args:
            sources: the tensors among the inputs of the graph, by what the recipes call them.

        Raises:
            Unusable: a value must not be used.
        """
        states = {
            place: (id(source), source._version, source.data_ptr(), source.stride())
            for place, source in sources.items()
        }
        # Values that only other values are computed from are freed at the end.
        values: dict[Any, torch.Tensor] = {}
        with self.lock, torch.inference_mode(False), torch.no_grad():
            return tuple(self._value_of(recipe, sources, states, values) for recipe in recipes)

    def _value_of(
        self,
        recipe: Recipe,
        sources: Mapping[Any, torch.Tensor],
        states: Mapping[Any, Any],
        values: dict[Any, torch.Tensor],
    ) -> torch.Tensor:
        key = _key_of(recipe, states)
        value = self._values.get(key)
        if value is None:
            arguments = (
                self._value_of(source, sources, states, values) if isinstance(source, Recipe) else sources[source]
                for source in recipe.sources
            )
            value = recipe.call(*arguments).detach()
            if recipe.call.usable is not None and (reason := recipe.call.usable(value)):
                raise Unusable(reason)
            self._values[key] = values[key] = value
        return value


def _recipe_of(node: fx.Node, source_of: Callable[[fx.Node], Any]) -> Recipe | None:
    """The recipe of a node with these sources; None if one of them is None."""
    # Not `all_input_nodes`, which has a source only once that is given twice.
    arguments: Any = node.args
    call: Any = node.target
    sources = tuple(map(source_of, arguments))
    return None if None in sources else Recipe(call, sources)


def _key_of(recipe: Recipe, states: Mapping[Any, Any]) -> Any:
    """The key of a value in the store: its function, and the states of its sources."""
    keys = (_key_of(source, states) if isinstance(source, Recipe) else states[source] for source in recipe.sources)
    return recipe.call.function, *keys


class DerivedInputs:
    """The derived tensors of one graph as its further inputs, checked once per call of the graph.

    The check compares the identity, the version, the address and the strides of each source: torch.compile guards none
    of them for parameters. Writes to `.data` and through numpy change none of them.

    Args:
        store: the values of the model.
        recipes: how each tensor is computed.
        enables_gradients: whether the graph itself switches gradients on.
    """

    def __init__(self, store: DerivedTensors, recipes: Sequence[Recipe], *, enables_gradients: bool) -> None:
        self._store = store
        store.graphs.add(self)
        self._recipes = tuple(recipes)
        # The indices of the sources among the inputs of the graph
        self.places = sorted({place for recipe in recipes for place in recipe.inputs})
        self._enables_gradients = enables_gradients
        # The sources and values of each set of sources, by the ids of the sources: one captured graph can serve several
        # equal modules
        self.states: dict[tuple[int, ...], _State] = {}

    def of(self, inputs: Sequence[Any]) -> tuple[torch.Tensor, ...] | None:
        """The tensors for a call with these inputs; None if the graph must run as it was written.

        It must if gradients flow to a source, if a source can't be watched, or if a value can't be used.
        """
        sources = [inputs[place] for place in self.places]
        if (torch.is_grad_enabled() or self._enables_gradients) and any(map(_requires_grad, sources)):
            return None
        state = self.states.get(tuple(map(id, sources)))
        return self._made(sources) if state is None or state.is_past(sources) else state.values

    def _made(self, sources: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...] | None:
        # What a CUDA graph records is only replayed later, so no value can be kept.
        if is_capturing_cuda() or not all(map(can_be_watched, sources)):
            return None
        key = tuple(map(id, sources))
        with self._store.lock:
            state = self.states.pop(key, None)
            if state is not None and not state.is_past(sources):
                # Another thread has just made them.
                self.states[key] = state
                return state.values
            try:
                values = self._store.values_of(self._recipes, dict(zip(self.places, sources, strict=True)))
            except Unusable:
                values = None
            self._store.fresh.clear()
            for device in {value.device for value in values or () if value.is_cuda}:
                # They may be used on another stream, so they must be complete.
                torch.cuda.current_stream(device).synchronize()
            self._store.drop_unused()
            self.states[key] = _State(
                # Keeps the memory alive, so that no other tensor can get the same address.
                tuple(source.untyped_storage() for source in sources),
                list(map(_version_of, sources)),
                list(map(_pointer_of, sources)),
                [(place, source.stride()) for place, source in enumerate(sources) if _can_be_transposed(source)],
                values,
            )
        return values


@dataclass(frozen=True)
class _State:
    """The sources as they were when the values were computed; `values` is None if the graph runs as written."""

    memory: tuple[torch.UntypedStorage, ...]
    versions: list[int]
    pointers: list[int]
    strides: list[tuple[int, tuple[int, ...]]]
    values: tuple[torch.Tensor, ...] | None

    def is_past(self, sources: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors, which have the same ids, are others by now or were written to."""
        return (
            list(map(_version_of, sources)) != self.versions
            or list(map(_pointer_of, sources)) != self.pointers
            or any(sources[place].stride() != strides for place, strides in self.strides)
        )


def can_be_watched(tensor: Any) -> bool:
    """Whether torch counts the writes to the tensor, and its values can be read."""
    return (
        type(tensor) in PLAIN_TENSORS
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_inference()
    )


def _can_be_transposed(tensor: torch.Tensor) -> bool:
    """Whether `p.data = p.data.t()` keeps the shape, which torch.compile guards, and so goes unnoticed otherwise."""
    sizes = [size for size in tensor.shape if size != 1]
    return len(set(sizes)) < len(sizes)


_version_of = operator.attrgetter("_version")
_requires_grad = operator.attrgetter("requires_grad")
_pointer_of = torch.Tensor.data_ptr


def lifted(captured: CapturedGraph) -> tuple[fx.Graph, DerivedInputs | None]:
    """Make the derived tensors of a graph its last inputs.

    A tensor stays a call in the graph if gradients flow through it, if the graph may write to one of its sources, or if
    it follows an autocast.

    Returns:
        The new graph and the tensors for its last inputs; the graph itself and None if there are none.
    """
    if not _derived_nodes(captured.graph):
        return captured.graph, None
    captured, _ = captured.copied()
    graph = captured.graph
    places = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
    recipes = _recipes(captured, places)
    taken = {node: recipe for node, recipe in recipes.items() if any(user not in recipes for user in node.users)}
    if not taken:
        return graph, None
    *_, last = places
    for number, node in enumerate(taken):
        with graph.inserting_after(last):
            last = graph.placeholder(f"derived_{number}")
        # The calls that it replaces have such names too. Where name and target differ, the generated code assigns one
        # to the other, and could overwrite the argument of the next.
        last.target = last.name
        last.meta.update(node.meta)
        node.replace_all_uses_with(last)
    for node in reversed(recipes):
        graph.erase_node(node)
    enables = any(name_of(node) == "_set_grad_enabled" and node.args != (False,) for node in graph.nodes)
    return graph, DerivedInputs(captured.derived, list(taken.values()), enables_gradients=enables)


def _derived_nodes(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if isinstance(node.target, Derived)]


def _recipes(captured: CapturedGraph, places: Mapping[fx.Node, int]) -> dict[fx.Node, Recipe]:
    """The derived tensors that can be computed before the graph runs."""
    found: dict[fx.Node, Recipe] = {}
    memory = Memory(captured.graph, captured.tensors)
    tensors: dict[fx.Node, Any] = {node: place for node, place in places.items() if node in captured.tensors}
    for node in _derived_nodes(captured.graph):
        recipe = _recipe_of(node, lambda source: found.get(source, tensors.get(source)))
        if recipe is None or recipe.call.each_call or memory.may_be_written(node.all_input_nodes):
            continue
        if not (recipe.call.in_autocast and (has_autocast() or is_under_autocast(node))):
            found[node] = recipe
    return found
