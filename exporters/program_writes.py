"""Find the operations of an exported program that write to their inputs, and whether others can observe it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree


def written_by(node: Any) -> tuple[str, ...]:
    """The names of the values to which an operation writes."""
    return tuple(read.name for read in _read_as(node, lambda alias: alias.is_write))


def _read_as(node: Any, wanted: Callable[[Any], bool]) -> list[Any]:
    """The nodes passed as arguments whose alias info in the operator's schema satisfies `wanted`."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or node.op != "call_function":
        return []
    given = {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)}
    given |= node.kwargs
    names = [each.name for each in schema.arguments if each.alias_info is not None and wanted(each.alias_info)]
    leaves = pytree.tree_leaves([given[name] for name in names if name in given])
    return [leaf for leaf in leaves if isinstance(leaf, type(node))]


def writes_are_unseen(nodes: Iterable[Any]) -> bool:
    """Whether no write is observable, so that each operation could write to a copy instead.

    After a write, only the result of the writing operation may still be read from the same memory. The memory must not
    belong to an input or a weight.
    """
    order = list(nodes)
    number = {node: at for at, node in enumerate(order)}
    groups = _Groups(order)
    for at, node in enumerate(order):
        for name in written_by(node):
            for other in groups.with_memory_of(name):
                is_given = other.op != "call_function"
                if number[other] < at and (is_given or any(number[reader] > at for reader in other.users)):
                    return False
    return True


class _Groups:
    """Groups of values that share memory, from their storages and from the alias info in operator schemas."""

    def __init__(self, nodes: list[Any]) -> None:
        self._group: dict[str, list[Any]] = {}
        by_storage: dict[int, list[Any]] = {}
        for node in nodes:
            group = self._group[node.name] = [node]
            sharers = [self._group[read.name] for read in _aliased(node)]
            sharers += [by_storage[storage] for storage in _storages(node) if storage in by_storage]
            for other in sharers:
                if other is not group:
                    other.extend(each for each in group if each not in other)
                    for each in group:
                        self._group[each.name] = other
                    group = other
            by_storage.update(dict.fromkeys(_storages(node), group))

    def with_memory_of(self, name: str) -> list[Any]:
        return self._group[name]


def _aliased(node: Any) -> list[Any]:
    """The inputs that a node's result may share memory with, in whole or in part."""
    # An item of a list has no schema, and dropout's schema doesn't say that it returns its input in eval mode.
    says_nothing = getattr(node.target, "_schema", None) is None
    draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if node.op == "call_function" and (says_nothing or draws):
        return list(node.all_input_nodes)
    return _read_as(node, lambda alias: True)


def _storages(node: Any) -> Iterator[int]:
    for leaf in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            yield leaf.untyped_storage()._cdata
