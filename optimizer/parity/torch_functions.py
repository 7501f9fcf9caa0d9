"""Read and rebuild the arguments of the torch functions that a mode intercepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from passes.graph.recording import argument

# Functions that return elements of a tensor unchanged. Moving the elements before casting or perturbing them gives the
# same result and needs less memory.
DATA_MOVEMENT = frozenset(
    {"__getitem__", "embedding", "view", "reshape", "t", "transpose", "permute", "detach", "expand"}
)
_METADATA = frozenset(
    {
        "size", "dim", "numel", "stride", "storage_offset", "is_contiguous", "data_ptr", "get_device", "nelement",
        "ndimension", "is_floating_point", "is_complex", "__len__", "__hash__", "requires_grad_", "is_shared",
        "is_nonzero", "has_names", "is_inference", "is_pinned", "is_same_size", "register_hook", "retain_grad",
    }
)  # fmt: skip


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to each leaf of nested tuples, lists and dicts."""
    if isinstance(tree, tuple):
        if not tree:
            return tree
        items = [mapped(item, change) for item in tree]
        return type(tree)(items) if type(tree) is tuple else _same_tuple(tree, items)
    if type(tree) is list:
        return [mapped(item, change) for item in tree]
    if type(tree) is dict:
        return {key: mapped(item, change) for key, item in tree.items()}
    return change(tree)


def reads_metadata(name: str) -> bool:
    """Whether a torch function of this name only asks about a tensor, so that its arguments need no cast."""
    return name in _METADATA


def moved_argument(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument whose elements a call returns unchanged; None if the call does more than move elements."""
    if name == "embedding":
        # With a norm, an embedding writes to its table.
        is_plain = len(args) == 2 and not any(value for key, value in kwargs.items() if key != "padding_idx")
        return args[1] if is_plain else None
    return args[0] if name in DATA_MOVEMENT and args and not kwargs else None


def written_ids(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """The ids of the tensors that a call of the torch function of this name writes to."""
    targets: list[Any] = []
    if args and (name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or _is_augmented(name)):
        targets.extend(args[0] if isinstance(args[0], tuple | list) else [args[0]])
    if name in ("embedding", "embedding_bag") and argument(args, kwargs, 3, "max_norm", None) is not None:
        # It shortens the rows that it looks up.
        targets.append(argument(args, kwargs, 1, "weight", None))
    if kwargs.get("inplace") is True:
        targets.append(argument(args, kwargs, 0, "input", None))
    out = kwargs.get("out")
    targets.extend(out if isinstance(out, tuple | list) else [out])
    return tuple(id(target) for target in targets if isinstance(target, torch.Tensor))


def _same_tuple(tree: Any, items: list[Any]) -> Any:
    """Rebuild a named tuple or one of torch's return types; a torch.Size holds no tensors and is returned unchanged."""
    if isinstance(tree, torch.Size):
        return tree
    return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)


def _is_augmented(name: str) -> bool:
    return name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__")
