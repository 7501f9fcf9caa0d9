"""Locate where a model draws random numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from exporters.base import Adapter
from exporters.isolation import eager_only
from exporters.places import paths_of, place_of, user_frame


class _Draws(TorchFunctionMode):
    """Find the first call that changes the state of the CPU's generator or, if CUDA is in use, of a GPU's."""

    def __init__(self, paths: Mapping[int, str]) -> None:
        super().__init__()
        self.place = ""
        self._paths = paths

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        before = _states() if not self.place else []
        value = func(*args, **(kwargs or {}))
        if not self.place and _states() != before:
            frame = user_frame(sys._getframe(1))
            self.place = place_of(frame, frame.f_lineno if frame else 0, self._paths)
        return value


def place_of_draws(adapter: Adapter, tensors: tuple[torch.Tensor, ...]) -> str:
    """The line that first draws a random number from torch's generators, with its module; "" if there is none."""
    with eager_only(), _Draws(paths_of(adapter.model)) as seen:
        adapter.run(tensors)
    return seen.place


def _states() -> list[bytes]:
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if used else ())]
    return [state.numpy().tobytes() for state in states]
