"""Ways to run a file: the runtimes with their settings, and a file opened in one of them."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from optimize_export.errors import BundleError, DeviceError, OptimizeExportError
from optimize_export.manifest import MOST_THREADS

Setting = bool | int | str

# The dtypes that numpy has, by the names in a manifest.
NUMPY_DTYPES = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
    | {"float16", "float32", "float64", "complex64", "complex128"}
)

# The runtimes, each with the types of its settings:
#   threads          of one call; for torch, of the process
#   precision        in which products are computed, the dtype of inputs and outputs stays
#   shapes           of the inputs for which the file is compiled, such as "8x3x40x40,8"; others compile it again, for any
#   spinning         whether idle threads wait busily for the next operation
#   freeze           run torch.jit.optimize_for_inference after loading
#   cuda_graph       record the kernels of each input shape once and replay them
#   tf32             round the factors of float32 products to 11 significant bits
#   cudnn_benchmark  time cuDNN's algorithms for each new input shape
#   nhwc             run convolutions in channels-last
SETTINGS: Mapping[str, Mapping[str, type]] = {
    "onnxruntime": {"threads": int, "spinning": bool, "cuda_graph": bool, "tf32": bool, "nhwc": bool},
    "openvino": {"threads": int, "precision": str, "shapes": str},
    "torch": {"threads": int, "freeze": bool, "cuda_graph": bool, "tf32": bool, "cudnn_benchmark": bool},
}
# The values of `precision`, by OpenVINO's names.
PRECISIONS: Mapping[str, str] = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
# Of each input the sizes; a scalar has none.
_SHAPES = re.compile(r"(\d{1,9}(x\d{1,9})*)?(,(\d{1,9}(x\d{1,9})*)?)*")
# The lines with which OpenVINO begins its messages: places in its own source.
_PLACE = re.compile(r"Exception from |Check '.*' failed at ")
_INSTALL = {
    "onnxruntime": "pip install onnxruntime-gpu, or pip install onnxruntime for the CPU alone",
    "openvino": "pip install 'optimize-export[openvino]'",
    "torch": "pip install torch",
}


@dataclass(frozen=True)
class Route:
    """One way to run an artifact of a bundle."""

    format: str
    # "onnxruntime", "openvino" or "torch".
    runtime: str
    # By the names in `SETTINGS`; the defaults of the runtime apply to all others.
    settings: Mapping[str, Setting] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join([f"{self.format} in {self.runtime}", *map(_said, self.settings.items())])

    @property
    def is_lowered(self) -> bool:
        """Whether it computes at a lower precision than the file."""
        return self.settings.get("precision", "float32") != "float32" or self.settings.get("tf32", False) is True

    def to_json(self) -> dict[str, Any]:
        return {"format": self.format, "runtime": self.runtime, "settings": dict(self.settings)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Route:
        """Read a route; BundleError if a field is missing, the runtime or a setting unknown, or a value invalid."""
        format, runtime, settings = (data.get(name) for name in ("format", "runtime", "settings"))
        if not (isinstance(format, str) and isinstance(runtime, str) and isinstance(settings, Mapping)):
            raise BundleError(
                "A route has a `format`, a `runtime` and `settings`, and one of these is missing or broken."
            )
        if runtime not in SETTINGS:
            raise BundleError(f"The runtime {runtime!r} is unknown; the runtimes are {', '.join(SETTINGS)}.")
        for name, value in settings.items():
            if type(value) is not SETTINGS[runtime].get(name):
                raise BundleError(f"{name}={value!r} is not a setting of {runtime}.")
        if not 1 <= settings.get("threads", 1) <= MOST_THREADS:
            raise BundleError(f"threads={settings['threads']} is not a number from 1 to {MOST_THREADS}.")
        is_known = settings.get("precision", "float32") in PRECISIONS
        if not (is_known and _SHAPES.fullmatch(settings.get("shapes", ""))):
            raise BundleError(f"The settings {dict(settings)} of {runtime} are invalid.")
        return cls(format, runtime, dict(settings))


def _said(setting: tuple[str, Setting]) -> str:
    name, value = setting
    if name == "threads":
        return f"{value} thread{'' if value == 1 else 's'}"
    if name == "precision":
        return str(value)
    if name == "shapes":
        # All inputs of a language model would fill the line.
        return "fixed shapes"
    words = name.replace("_", " ")
    return words if value else f"no {words}"


# The simplest to ship first: an ONNX file needs no torch.
_SIMPLEST_FIRST = ("onnx", "torchscript", "pt2", "aoti")
# onnxruntime has no kernels for what is quantized there.
_FOR_OPENVINO = ("onnx-int8-dense", "onnx-int8-inputs")


def own_routes(formats: Iterable[str]) -> list[Route]:
    """Each format in the runtime that it is made for, the simplest to ship first, and those of other packages last."""
    places = {name: place for place, name in enumerate(_SIMPLEST_FIRST)}
    ordered = sorted(formats, key=lambda name: places.get(name, len(places)))
    runtimes = {name: "onnxruntime" if name.startswith("onnx") else "torch" for name in ordered}
    return [Route(name, "openvino" if name in _FOR_OPENVINO else runtimes[name]) for name in ordered]


def is_installed(runtime: str) -> bool:
    """Whether the runtime can be imported here; nothing is imported."""
    return importlib.util.find_spec(runtime) is not None


def require_runtime(runtime: str) -> None:
    """Raise `DeviceError`, with the line that installs it, if a runtime isn't installed."""
    if not is_installed(runtime):
        raise DeviceError(f"{runtime} isn't installed here: {_INSTALL[runtime]}")


# A file in a runtime ---------------------------------------------------------------------------------------------------

_RUNNERS = {
    "onnxruntime": ("optimize_export.onnx_runtime", "OnnxruntimeRunner"),
    "openvino": ("optimize_export.runtime.openvino_runner", "OpenvinoRunner"),
    "torch": ("optimize_export.runtime.torch_runner", "TorchRunner"),
}


class Runner(Protocol):
    """A file in a runtime, ready to run on "cpu" or "cuda"; also an `exporters.base.LoadedArtifact`."""

    @property
    def device(self) -> str: ...

    @property
    def placement(self) -> dict[str, int] | None: ...

    @property
    def settings(self) -> dict[str, str]: ...

    def __call__(self, *tensors: Any) -> tuple[Any, ...]:
        """Run the file on flat inputs: numpy arrays give numpy arrays, torch tensors give torch tensors."""


def open_route(path: Path, route: Route, device: str = "cpu") -> Runner:
    """Open a file in the runtime of a route.

    Raises:
        DeviceError: the runtime isn't installed, can't use the device, or can't load the file.
    """
    require_runtime(route.runtime)
    module, name = _RUNNERS[route.runtime]
    try:
        runner: Runner = getattr(importlib.import_module(module), name)(path, route, device)
    except OptimizeExportError:
        raise
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise DeviceError(f"{route.runtime} can't load {path.name} without {package}: pip install {package}") from error
    # Each runtime has its own errors, and some derive from Exception alone. Another one is that a library of the system
    # is missing.
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip() and not _PLACE.match(line)]
        reason = lines[0].strip() if lines else type(error).__name__
        # Some runtimes refuse external data that is a link in the Hugging Face Hub's cache.
        if path.is_symlink():
            reason = f"{reason.rstrip('.')}; it is a link: copy the bundle, with the files instead of links"
        raise DeviceError(f"{route.runtime} can't load {path.name}: {reason}") from error
    return runner
