"""Write a user's files, with a small model and inputs, and check how `load` refuses them."""

import textwrap
from pathlib import Path

import pytest

from optimize_export.errors import LoadError
from optimizer.command.loading import load

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.linear = nn.Linear(4, width)
    def forward(self, x):
        return self.linear(x)
"""
INPUTS = "\nexample_inputs = (torch.randn(2, 4),)\n"


class UserFolder:
    """Writes files below a folder; by default, each has the class `Net` before its text, and inputs after it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, text: str, name: str = "model.py", *, net: bool = True, inputs: bool = True) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((NET if net else "") + textwrap.dedent(text) + (INPUTS if inputs else ""), encoding="utf-8")
        return path


def refused(*args, error=LoadError, **kwargs) -> str:
    """The message of the error of `load`, which must be one sentence on one line."""
    with pytest.raises(error) as caught:
        load(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", "?"))
    return message
