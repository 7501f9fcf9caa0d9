"""Run a model and other people's code on it: without side effects or output, and with one kind of error."""

from __future__ import annotations

import contextlib
import errno
import logging
import random
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any, TextIO, cast

import numpy as np
import torch
from torch import nn

from exporters.errors import ExporterError, RouteRefused
from optimize_export.wording import first_clause

_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM})

_LONGEST_LINE = 200
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
    attributes = [
        (own := vars(module), {name: (value, _contents(value)) for name, value in own.items()})
        for module in model.modules()
    ]
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
def refusing(what: str | None = None) -> Iterator[None]:
    """Turn any exception raised inside into RouteRefused: third-party capture code can raise anything.

    Exceptions that don't concern the route pass through: out of memory, a full disk, and non-Exceptions such as an
    interrupt.
    """
    try:
        yield
    except (RouteRefused, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            raise
        reason = one_line(error)
        raise RouteRefused(f"{what}: {reason}" if what else reason) from error


def one_line(error: BaseException) -> str:
    """The first line of the root cause's message, without paths of this machine and addresses."""
    while error.__cause__ is not None and not isinstance(error, ExporterError):
        error = error.__cause__
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    line = first_clause(lines)
    if " " not in line:  # the message of a KeyError is only the key
        line = f"{type(error).__name__}: {line}"
    line = re.sub(r"<([\w.]+) object at 0x\w+>", r"\1", line)
    line = re.sub(r"(?:[A-Za-z]:)?(?:[\\/][\w.\-+@]+){2,}[\\/]([\w.\-+@]+)", r"\1", line).rstrip(".:; ")
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 1].rstrip()}…"


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

    Also those that are compiled for the first time inside: `torch.cond` compiles itself. While a dispatch mode is
    active, torch would skip these functions, also afterwards, so that every later call of `torch.cond` fails.
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


def _contents(value: Any) -> list[Any] | None:
    """The contents of a plain container; None for other values."""
    if isinstance(value, dict):
        return list(value.items())
    return list(value) if type(value) in (list, set) else None


def _restore(attributes: dict[str, Any], saved: dict[str, tuple[Any, Any]]) -> None:
    for name in [name for name in attributes if name not in saved]:
        del attributes[name]
    for name, (value, contents) in saved.items():
        if attributes.get(name) is not value or name not in attributes:
            attributes[name] = value
        if contents is not None and not _same_objects(_contents(value) or [], contents):
            value.clear()
            value.extend(contents) if isinstance(value, list) else value.update(contents)


def _same_objects(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two containers hold the same objects, the items of a dict as pairs."""
    return len(left) == len(right) and all(
        a is b or (isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) and all(map(is_, a, b)))
        for a, b in zip(left, right, strict=True)
    )
