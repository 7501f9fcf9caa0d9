"""TorchScript: a file that `torch.jit.load` and libtorch run without the model's source.

The model is traced through the adapter if the trace is right at every call, otherwise scripted. The module that
`torch.export` captures isn't traced: that trace would have the batch size baked in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from exporters.base import Adapter, Artifact, Exporter, ExportRequest, Limit, LoadedArtifact, moved
from exporters.conditions import Condition
from exporters.errors import WrongFile, refusing
from exporters.evidence import Evidence, gather
from exporters.file_values import FileParts
from exporters.metadata import extra_files, read_extra_file
from exporters.proof import prove_file
from exporters.routes import Route, first_right
from exporters.torchscript_archive import save
from exporters.torchscript_deprecation import torchscript_allowed
from exporters.torchscript_source import scripted, with_input_checks
from exporters.trace_conditions import traced_with_conditions


class TorchScriptExporter(Exporter):
    """The exporter to `model.torchscript.pt`."""

    name: ClassVar[str] = "torchscript"
    file_name: ClassVar[str] = "model.torchscript.pt"

    def export(self, request: ExportRequest, directory: Path) -> Artifact:
        evidence = gather(request)
        limits: list[Limit] = []

        def by_trace(folder: Path) -> tuple[Path, ...]:
            module, conditions, size_read = traced_with_conditions(evidence)
            try:
                return self._proven(module, evidence, folder, conditions, limits)
            except WrongFile as refusal:
                if not (evidence.open_dims and size_read):
                    raise
                place = f"the model reads a size in Python at {size_read}, which the trace freezes"
                raise WrongFile(f"{refusal}; {place}", refusal.inputs, refusal.output, size=evidence.size) from refusal

        def by_script(folder: Path) -> tuple[Path, ...]:
            limits.clear()
            return self._proven(scripted(evidence.adapter), evidence, folder)

        routes = (Route("trace", by_trace), Route("script", by_script))

        def known(artifact: Artifact) -> Artifact:
            return replace(artifact, parts=self.parts, limits=tuple(limits))

        return first_right(self, request, evidence, routes, directory, known)

    @staticmethod
    def parts(path: Path, device: str) -> FileParts:
        """Load the file's modules as callables."""
        with torchscript_allowed():
            return _Parts(torch.jit.load(str(path), map_location=device).eval(), device)

    @staticmethod
    def load(path: Path, device: str) -> LoadedArtifact:
        with torchscript_allowed():
            module = torch.jit.load(str(path), map_location=device)
        return _LoadedTorchScript(module.eval(), device)

    @staticmethod
    def frozen(path: Path, device: str) -> LoadedArtifact:
        """Load the file, freeze it and optimize it for this machine, as torch.jit.optimize_for_inference does.

        The result isn't written to a file, because it holds weights in the layout of this machine's library.
        """
        with torchscript_allowed(), torch.no_grad():
            module = torch.jit.load(str(path), map_location=device).eval()
            return _LoadedTorchScript(torch.jit.optimize_for_inference(torch.jit.freeze(module)), device)

    @staticmethod
    def read_metadata(path: Path) -> Mapping[str, str]:
        return read_extra_file(path)

    def _proven(
        self,
        module: torch.jit.ScriptModule,
        evidence: Evidence,
        folder: Path,
        conditions: Sequence[Condition] = (),
        limits: list[Limit] | None = None,
    ) -> tuple[Path, ...]:
        path = folder / self.file_name
        save(with_input_checks(module, evidence), path, extra_files(evidence.metadata))
        with refusing("the file can't be loaded"):
            loaded = self.load(path, str(evidence.device))
        prove_file(evidence, loaded, [path], conditions, limits)
        return (path,)


class _LoadedTorchScript:
    placement: dict[str, int] | None = None

    def __init__(self, module: torch.jit.ScriptModule, device: str) -> None:
        # Only a call of the module runs its hooks; the outermost module of our own files has none.
        self._forward = module if module._forward_pre_hooks or module._forward_hooks else module.forward
        self.device = device
        self._target = torch.device(device)
        # The precision is that of torch's global settings.
        self.settings: dict[str, str] = {}

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            outputs = self._forward(*moved(tensors, self._target))
        return outputs if isinstance(outputs, tuple) else (outputs,)


class _Parts:
    def __init__(self, module: torch.jit.ScriptModule, device: str) -> None:
        self._device = device
        # The outermost module checks the inputs, its child is the adapter, and the adapter's child is the model.
        self._model = module.model.model
        # Scripting replaces the adapter with a generated class that has another name.
        self._traced = module.model.original_name == Adapter.__name__

    def part(self, path: str, number: int, *, alone: bool) -> Callable[[torch.Tensor], Any] | None:
        """Return the method for one call of a module; None if the file has none that takes a single tensor.

        In a trace, each further call of a module is a separate method (`forward1` is the second call) that takes only
        tensors.
        """
        module = self._model
        for name in path.split(".") if path else ():
            if not hasattr(module, name):
                return None
            module = getattr(module, name)
        method = getattr(module, f"forward{number - 1}" if self._traced and number > 1 else "forward", None)
        if method is None:
            return None
        first, *others = method.schema.arguments[1:] or (None,)
        if first is None or str(first.type) != "Tensor":
            return None
        # A scripted forward has the model's own arguments. Those that aren't passed have the same defaults in both.
        left_out = alone and not self._traced and all(each.has_default_value() for each in others)
        if not (left_out or (self._traced and not others)):
            return None
        return lambda tensor: method(tensor.to(self._device))
