"""Record and restore the ambient state of a torch call: autocast, random generators, kernel switches."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from passes.torch_private import KERNEL_SWITCHES, device_constructors

# One thread draws at a time: the generators belong to the whole process, and a draw must use the state that was
# recorded for it.
DRAWING = threading.RLock()
_WITHOUT_GENERATOR = ("cpu", "meta")


def _free_in_child() -> None:
    # A forked process doesn't have the thread that holds the lock.
    if not DRAWING._is_owned():  # type: ignore[attr-defined]
        DRAWING._at_fork_reinit()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_in_child)


class Ambient:
    """The ambient state of one call; `again` restores it so that the call can run again."""

    __slots__ = ("device", "gradients", "random", "settings")

    def __init__(self, func: Callable[..., Any], tensors: Sequence[Tensor], options: dict[str, Any], *, random: bool):
        is_cpu = True
        for tensor in tensors:
            is_cpu &= tensor.is_cpu
        devices = {_CPU} if is_cpu else {tensor.device for tensor in tensors}
        self.settings = settings_of(_ONLY_CPU if is_cpu else tuple(sorted({"cpu", *(each.type for each in devices)})))
        self.gradients = torch.is_grad_enabled()
        # Only a function that creates a tensor depends on the default device.
        self.device = torch.get_default_device() if func in device_constructors() else None
        self.random: Sequence[tuple[torch.device, Tensor]] = ()
        if random:
            if self.device is not None:
                devices.add(_with_index(torch.device(options.get("device") or self.device)))
            self.random = _random_states(devices)

    def is_here(self, now: Settings) -> bool:
        """Whether a repeated call needs nothing restored except the gradient mode.

        Args:
            now: the current settings of the devices of `settings`.
        """
        settings = self.settings
        return not self.random and self.device is None and settings == now and not _is_autocast(settings)

    @contextmanager
    def again(self, now: Settings) -> Iterator[None]:
        """Restore the state for the block, except the gradient mode; `now` as for `is_here`."""
        with ExitStack() as stack:
            if self.random:
                stack.enter_context(DRAWING)
                stack.callback(_set_random_states, _random_states({device for device, _ in self.random}))
                _set_random_states(self.random)
            if self.device is not None and self.device != torch.get_default_device():
                stack.enter_context(self.device)
            if now != self.settings or _is_autocast(now):
                stack.enter_context(_changed(self.settings, now))
            yield


_CPU = torch.device("cpu")
_ONLY_CPU = ("cpu",)
_SWITCHES = tuple(get for get, _ in KERNEL_SWITCHES)

# Device types, autocast of each, default dtype, kernel switches.
Settings = tuple[tuple[str, ...], tuple[tuple[bool, torch.dtype] | None, ...], torch.dtype, tuple[bool, ...]]


def settings_of(kinds: tuple[str, ...]) -> Settings:
    """The current settings of these types of devices."""
    return (
        kinds,
        tuple([_autocast(kind) for kind in kinds]),
        torch.get_default_dtype(),
        tuple([get() for get in _SWITCHES]),
    )


def _autocast(kind: str) -> tuple[bool, torch.dtype] | None:
    if kind != "cpu" and not torch.amp.is_autocast_available(kind):
        return None
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _is_autocast(settings: Settings) -> bool:
    return any(autocast is not None and autocast[0] for autocast in settings[1])


@contextmanager
def _changed(wanted: Settings, now: Settings) -> Iterator[None]:
    with ExitStack() as stack:
        for kind, autocast, current in zip(wanted[0], wanted[1], now[1], strict=True):
            if autocast is not None and current is not None and (autocast[0] or current[0]):
                enabled, dtype = autocast
                # Without autocast's cache: a cast weight in the cache wouldn't be recomputed, and a new one would stay
                # in it.
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
        try:
            _choose(wanted[2:], now[2:])
            yield
        finally:
            _choose(now[2:], wanted[2:])


def _choose(wanted: tuple[torch.dtype, tuple[bool, ...]], now: tuple[torch.dtype, tuple[bool, ...]]) -> None:
    if wanted[0] is not now[0]:
        torch.set_default_dtype(wanted[0])
    for (_, choose), value, current in zip(KERNEL_SWITCHES, wanted[1], now[1], strict=True):
        if value != current:
            choose(value)


def _with_index(device: torch.device) -> torch.device:
    if device.type in _WITHOUT_GENERATOR or device.index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def _random_states(devices: set[torch.device]) -> tuple[tuple[torch.device, Tensor], ...]:
    cpu = (torch.device("cpu"), torch.get_rng_state())
    others = sorted((device for device in devices if device.type not in _WITHOUT_GENERATOR), key=str)
    return (cpu, *((device, torch.get_device_module(device).get_rng_state(device)) for device in others))


def _set_random_states(states: Sequence[tuple[torch.device, Tensor]]) -> None:
    for device, state in states:
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)
