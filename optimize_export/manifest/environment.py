"""What a manifest says of the program and of the installed versions, without the local paths of this machine."""

import os
import platform
import re
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

PROGRAM = "optimize-export"
_LIBRARIES = (
    "torch",
    "numpy",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-directml",
    "onnxruntime-openvino",
    "onnxruntime-qnn",
    "openvino",
    "safetensors",
    "transformers",
)


def is_reproducible_build() -> bool:
    """Whether SOURCE_DATE_EPOCH asks for byte-for-byte reproducible bundles, as it does for builds."""
    return "SOURCE_DATE_EPOCH" in os.environ


def local_roots(*more: Path) -> tuple[str, ...]:
    """The folders of this machine whose paths must not appear in a bundle, the longest first."""
    names = [os.getcwd(), os.path.expanduser("~"), sys.prefix, sys.base_prefix, tempfile.gettempdir()]
    folders = [*more, *(Path(name) for name in names if os.path.isabs(name))]
    both = {str(path) for folder in folders for path in (folder, folder.resolve())}
    return tuple(sorted((text for text in both if len(Path(text).parts) > 1), key=len, reverse=True))


def without_local_paths(value: Any, roots: tuple[str, ...]) -> Any:
    """Cut the folders of this machine from every text in `value`: `/home/me/work/net.py:3` becomes `net.py:3`."""
    if isinstance(value, str):
        for root in roots:
            end = rf"(?:{re.escape(os.sep)}|(?![\w.-]))"
            value = re.sub(
                rf"(?<![\w.-]){re.escape(root)}{end}", lambda found: "" if found[0].endswith(os.sep) else ".", value
            )
        return value
    if isinstance(value, Mapping):
        return {key: without_local_paths(item, roots) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_local_paths(item, roots) for item in value]
    return value


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution; None if it isn't installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def describe_program() -> dict[str, str]:
    """The manifest's `program`."""
    return {"name": PROGRAM, "version": version_of(PROGRAM) or "unknown"}


def describe_environment() -> dict[str, Any]:
    """The manifest's `environment`: the platform, and the versions of Python and of the installed libraries."""
    libraries = {name: version for name in _LIBRARIES if (version := version_of(name))}
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}",
        "libraries": libraries,
    }
