"""An export leaves no trace: not in the model, not in the random generators, not in torch's settings, not on screen."""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any, TextIO, cast

import numpy as np
import torch
from torch import nn


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run, trace or export `model` without a lasting effect.

    Gradients, the fast path of `nn.MultiheadAttention` (one fused operator that no exporter knows) and what
    `Module.compile()` installed (which no tracer can look into) are off inside.
    Afterwards every module's attributes, flags, hooks and buffers and the state of the random generators are what they
    were. Parameters aren't saved: no forward writes to them.
    """
    cuda = sorted({t.device.index for t in (*model.parameters(), *model.buffers()) if t.is_cuda})
    fastpath = torch.backends.mha.get_fastpath_enabled()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    attributes = [(vars(module), _snapshot(vars(module))) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=cuda), torch.no_grad():
        torch.backends.mha.set_fastpath_enabled(False)
        for current, _ in attributes:
            if current.get("_compiled_call_impl") is not None:
                current["_compiled_call_impl"] = None
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fastpath)
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            for current, saved in attributes:
                _restore(current, saved)
            for buffer, value in buffers:
                # By value: BatchNorm updates its statistics without moving their version counter.
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """What exporters print, log and warn of is about their own inner workings; what matters is proven on the file.

    Warnings are recorded and dropped rather than ignored by a filter, so that they don't raise inside the exporter under
    `-W error`.
    """
    disabled = logging.root.manager.disable
    with (
        warnings.catch_warnings(record=True),
        contextlib.redirect_stdout(cast(TextIO, _Muted(sys.stdout))),
        contextlib.redirect_stderr(cast(TextIO, _Muted(sys.stderr))),
    ):
        warnings.simplefilter("always")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled)


class _Muted:
    """A stream that drops what this thread writes; others, such as the one that draws a progress bar, go on writing."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() == self._thread:
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _snapshot(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Each attribute with a shallow copy of what it holds, where it is a plain container."""
    return {name: (value, _contents(value)) for name, value in attributes.items()}


def _contents(value: Any) -> Any:
    if isinstance(value, dict):
        return list(value.items())
    return list(value) if type(value) in (list, set) else None


def _restore(attributes: dict[str, Any], saved: dict[str, tuple[Any, Any]]) -> None:
    for name in [name for name in attributes if name not in saved]:
        del attributes[name]
    for name, (value, contents) in saved.items():
        if attributes.get(name) is not value or name not in attributes:
            attributes[name] = value
        if contents is not None and not _same_contents(_contents(value), contents):
            value.clear()
            value.extend(contents) if isinstance(value, list) else value.update(contents)


def _same_contents(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(_identical(a, b) for a, b in zip(left, right, strict=True))


def _identical(left: Any, right: Any) -> bool:
    if isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right):
        return all(a is b for a, b in zip(left, right, strict=True))
    return left is right
