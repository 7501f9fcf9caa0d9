"""Whether inductor can compile here."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import warnings
from pathlib import Path

import torch

from passes.torch_private import load_inductor


def import_inductor() -> None:
    """Import it without the warnings that belong to nothing of ours."""
    with warnings.catch_warnings():
        # It is imported with parts of TorchScript, which warn of their end: what is made here needs none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        load_inductor()


def missing_compiler(device: torch.device) -> str | None:
    """What inductor lacks to make kernels for the device, a clause with the way to get it; None for nothing."""
    if device.type == "cuda":
        found = importlib.util.find_spec("triton") is not None
        return None if found else "inductor needs triton to make GPU kernels: pip install triton"
    if device.type != "cpu":
        return None
    # Inductor looks for this one compiler and no other.
    usual = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    compiler = os.environ.get("CXX", usual)
    if shutil.which(compiler) is None:
        return f"inductor needs a C++ compiler for the CPU, and there is no {compiler!r}: install one or set CXX"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        return f"inductor needs the headers of Python to make CPU kernels, and there is no {header}"
    return None
