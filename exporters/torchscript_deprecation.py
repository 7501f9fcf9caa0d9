"""The one place that silences the deprecation of TorchScript.

TorchScript is deprecated (a DeprecationWarning, a FutureWarning from torch 2.15) and so is the ONNX exporter that is
built on it. Both are used here all the same: users ask for files that `torch.jit.load` and libtorch read, and the old
ONNX exporter takes models that the new one doesn't. The warning tells the author of the code to move on, and says
nothing that a user of the exporters could act on.
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
    """Tracing, scripting, saving, loading and the old ONNX exporter, without their deprecation warnings."""
    with warnings.catch_warnings():
        for message in _ABOUT_TORCHSCRIPT:
            for category in (DeprecationWarning, FutureWarning):
                warnings.filterwarnings("ignore", message=message, category=category)
        yield
