"""Check whether inductor can compile on this machine."""

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
    """Import inductor, without the deprecation warnings of its own dependencies."""
    with warnings.catch_warnings():
        # Inductor imports deprecated parts of TorchScript, which are not used here.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        load_inductor()


def missing_compiler(device: torch.device) -> str | None:
    """The tool that inductor lacks for the device, as a clause that says how to get it; None if it has all."""
    if device.type == "cuda":
        found = importlib.util.find_spec("triton") is not None
        return None if found else "inductor needs triton to make GPU kernels: pip install triton"
    if device.type != "cpu":
        return None
    # Inductor looks for this compiler only.
    usual = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    compiler = os.environ.get("CXX", usual)
    if shutil.which(compiler) is None:
        return f"inductor needs a C++ compiler for the CPU, and there is no {compiler!r}: install one or set CXX"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        return f"inductor needs the headers of Python to make CPU kernels, and there is no {header}"
    return None
