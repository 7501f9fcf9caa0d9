"""Export without side effects on the model, the random generators, torch's settings and the screen."""

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

_ABOUT_TORCHSCRIPT = (
    r"`?torch\.jit\.",
    r"(?s).*TorchScript",
    r"You are using the legacy TorchScript-based ONNX export",
)


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run, trace or export `model` without lasting effects.

    Inside, these are off: gradients, the fast path of `nn.MultiheadAttention` (a fused operator that no exporter
    supports), and the callables installed by `Module.compile()` (no tracer can look into them). Afterwards every
    module's attributes, flags, hooks and buffers and the state of the random generators are restored. Parameters aren't
    saved, since no forward writes to them.
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
                # Compare values: BatchNorm updates its statistics without increasing their version counter.
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Suppress the prints, logs and warnings of exporters: they concern internals, and the file is proven anyway.

    Warnings are recorded and dropped, not ignored by a filter, so that `-W error` doesn't make them raise inside.
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


@contextlib.contextmanager
def torchscript_allowed() -> Iterator[None]:
    """Trace, script, save, load or use the old ONNX exporter inside without deprecation warnings.

    Users ask for files that `torch.jit.load` and libtorch read, and the old ONNX exporter supports models that the new
    one doesn't. The warnings (a DeprecationWarning, from torch 2.14 on a FutureWarning) ask the author of the code to
    migrate; users of the exporters can't act on them.
    """
    with warnings.catch_warnings():
        for message in _ABOUT_TORCHSCRIPT:
            for category in (DeprecationWarning, FutureWarning):
                warnings.filterwarnings("ignore", message=message, category=category)
        yield


@contextlib.contextmanager
def eager_only() -> Iterator[None]:
    """Run compiled functions eagerly inside the block, because modes don't reach into compiled code.

    This includes functions that are compiled for the first time inside the block: `torch.cond` compiles itself. While a
    dispatch mode is active, torch would skip these functions and continue to skip them afterwards, so that every later
    call of `torch.cond` fails.
    """
    with torch.compiler.set_stance("force_eager"):
        yield


class _Muted:
    """A stream that drops the output of this thread; other threads, such as a progress bar's, continue to write."""

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
    """Each attribute with a shallow copy of its contents if it is a plain container."""
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
