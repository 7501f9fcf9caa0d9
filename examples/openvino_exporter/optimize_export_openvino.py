"""Export to OpenVINO: `model.xml` with its weights in `model.bin`, which OpenVINO runs on the CPU.

The file is converted from the torch.export capture that all formats of an export share, so its dynamic dims are theirs.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from exporters import (
    Artifact,
    Evidence,
    Exporter,
    ExporterError,
    ExportRequest,
    LoadedArtifact,
    MetadataError,
    ProviderFallback,
    Route,
    captured,
    conditions_of_program,
    first_right,
    gather,
    prove_file,
    refusing,
    silent,
)

# If this package is installed, importing OpenVINO starts a process that reports the import to a server.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
try:
    import openvino
except ModuleNotFoundError as error:
    raise ExporterError(
        f"The format openvino needs a package that isn't installed ({error}): pip install openvino"
    ) from error

# The key of the metadata in the file.
_METADATA = "optimize_export"


class OpenVinoExporter(Exporter):
    """Write `model.xml` and `model.bin`."""

    name: ClassVar[str] = "openvino"
    file_name: ClassVar[str] = "model.xml"

    def export(self, request: ExportRequest, directory: Path) -> Artifact:
        evidence = gather(request)

        def route(name: str, *, strict: bool) -> Route:
            return Route(name, lambda folder: self._proven(evidence, folder, strict=strict))

        routes = (route("export", strict=False), route("export-strict", strict=True))
        return first_right(self, request, evidence, routes, directory)

    @staticmethod
    def load(path: Path, device: str) -> LoadedArtifact:
        if device != "cpu":
            raise ProviderFallback(f"OpenVINO runs {path.name} on the CPU, not on {device!r}.")
        return _LoadedModel(path)

    @staticmethod
    def read_metadata(path: Path) -> Mapping[str, str]:
        try:
            model = _core().read_model(path)
        except RuntimeError as error:
            raise MetadataError(f"The metadata of {path.name} can't be read: it is no OpenVINO model.") from error
        return json.loads(model.get_rt_info(_METADATA).value) if model.has_rt_info(_METADATA) else {}

    def _proven(self, evidence: Evidence, folder: Path, *, strict: bool) -> tuple[Path, ...]:
        """Write the files into the folder and compare them with the model at every call."""
        program, _ = captured(evidence, strict=strict)
        path = folder / self.file_name
        files = (path, path.with_suffix(".bin"))
        with refusing("OpenVINO can't convert the program"), silent():
            # By default, weights would be stored in float16.
            openvino.save_model(_converted(program, evidence), path, compress_to_fp16=False)
        with refusing("OpenVINO can't load the file"):
            loaded = self.load(path, "cpu")
        prove_file(evidence, loaded, files, conditions_of_program(program, evidence))
        return files


def _converted(program: torch.export.ExportedProgram, evidence: Evidence) -> openvino.Model:
    """Convert the program to an OpenVINO model with our names, in which only the open dims are dynamic."""
    model = openvino.convert_model(program)
    model.reshape(
        {
            number: openvino.PartialShape([-1 if isinstance(size, str) else size for size in spec.shape])
            for number, spec in enumerate(evidence.input_specs)
        }
    )
    for ports, specs in ((model.inputs, evidence.input_specs), (model.outputs, evidence.output_specs)):
        for port, spec in zip(ports, specs, strict=True):
            port.set_names({spec.name})
    model.set_rt_info(json.dumps(dict(evidence.metadata)), _METADATA)
    return model


@functools.cache
def _core() -> openvino.Core:
    """OpenVINO's Core, never freed: if two are, a signal that Python handles, such as Ctrl-C, may crash the process."""
    return openvino.Core()


class _LoadedModel:
    device = "cpu"
    placement: dict[str, int] | None = None

    def __init__(self, path: Path) -> None:
        # Otherwise OpenVINO computes in bfloat16 on processors that support it.
        self._model = _core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        self.settings = {"openvino_precision": self._model.get_property("INFERENCE_PRECISION_HINT").get_type_name()}

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: Any = self._model([tensor.detach().cpu().numpy() for tensor in tensors])
        return tuple(torch.from_numpy(found[port]) for port in self._model.outputs)
