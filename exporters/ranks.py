"""Locate where a tensor has another number of dims in one call than in another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from exporters.base import Adapter
from exporters.isolation import silent, undisturbed
from exporters.places import paths_of, place_of, user_frame


class _Ranks(TorchFunctionMode):
    """Record each call of torch that returns a tensor: its function, the number of dims, and the line."""

    def __init__(self, paths: Mapping[int, str]) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, str]] = []
        self._paths = paths

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        if isinstance(value, torch.Tensor):
            frame = user_frame(sys._getframe(1))
            place = place_of(frame, frame.f_lineno if frame else 0, self._paths)
            self.calls.append((getattr(func, "__name__", ""), value.dim(), place))
        return value


def dims_that_change(
    adapter: Adapter, odd: tuple[torch.Tensor, ...], usual: tuple[torch.Tensor, ...]
) -> tuple[str, str]:
    """The first function whose result has another number of dims for `odd` than for `usual`, and its line.

    Both are empty if the two runs call different functions before that.
    """
    recorded = []
    with undisturbed(adapter), silent():
        for tensors in (odd, usual):
            with _Ranks(paths_of(adapter.model)) as seen:
                adapter.run(tensors)
            recorded.append(seen.calls)
    for (name, dims, place), (other, other_dims, _) in zip(*recorded, strict=False):
        if name != other:
            break
        if dims != other_dims:
            return name, place
    return "", ""
