"""Silence the deprecation warnings of TorchScript; no other module does so.

TorchScript is deprecated (a DeprecationWarning, from torch 2.14 on a FutureWarning), and so is the ONNX exporter based
on it. Both are still needed: users ask for files that `torch.jit.load` and libtorch read, and the old ONNX exporter
supports models that the new one doesn't. The warnings ask the author of the code to migrate; users of the exporters
can't act on them.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_ABOUT_TORCHSCRIPT = (
    r"`?torch\.jit\.",
    r"(?s).*TorchScript",
    r"You are using the legacy TorchScript-based ONNX export",
)


@contextmanager
def torchscript_allowed() -> Iterator[None]:
    """Trace, script, save, load or use the old ONNX exporter inside without deprecation warnings."""
    with warnings.catch_warnings():
        for message in _ABOUT_TORCHSCRIPT:
            for category in (DeprecationWarning, FutureWarning):
                warnings.filterwarnings("ignore", message=message, category=category)
        yield
