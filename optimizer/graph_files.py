"""What graph passes did, in files: exporters are given the rewritten graph first, and the plain forward where that fails."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from exporters.base import Adapter, Artifact, Exporter, ExportRequest, clones
from exporters.errors import ExporterError, ExportError, StructureError
from exporters.isolation import silent
from optimizer.artifact_parity import FileProof
from optimizer.parity import Measurement
from optimizer.preserve import pinned_settings, random_state
from optimizer.provenance import Provenance
from optimizer.sentences import listed, quote
from passes.base import Pass
from passes.errors import UnknownPass
from passes.program.graph_pass import GraphPass
from passes.program.whole_graph import FlatCall, NoWholeGraph, Place, install_whole_graph, steps_for_files
from passes.registry import pass_named

_MOST_NAMES = 4

Measured = tuple[Artifact, Measurement, Mapping[str, int] | None]


@dataclass
class GraphFiles:
    """The rewritten graph of one export, and which files hold it.

    Attributes:
        module: computes by the graph where an exporter looks; None where there is no one graph, or no graph pass.
        asked, names: the passes whose changes files can hold, and those that changed this graph.
        refused: by format, why its file holds the plain forward; "" stands for all formats.
    """

    module: nn.Module | None = None
    asked: Sequence[str] = ()
    names: Sequence[str] = ()
    refused: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, result: nn.Module, fresh: Callable[[], nn.Module], adapter: Adapter, request: ExportRequest
    ) -> GraphFiles:
        """Capture and rewrite the forward, where graph passes did anything that files can hold.

        Args:
            fresh: makes a copy of the result.
            adapter: around another such copy.
        """
        asked = [step.item.name for step in steps_for_files(result)]
        if not asked:
            return cls()
        module = fresh()
        calls = [adapter.flatten_inputs(*call) for call in request.calls]
        args, kwargs = adapter.call_arguments(clones(calls[0]))
        call = FlatCall(
            args, kwargs, adapter.flatten_inputs, adapter.flatten_outputs, adapter.outputs.rebuild, _open(calls)
        )
        try:
            with silent(), random_state(0), pinned_settings():
                return cls(module, asked, install_whole_graph(module, adapter.model, call))
        except (NoWholeGraph, StructureError) as error:
            return cls(None, asked, (), {"": quote(error)})

    def measured(self, exporter: Exporter, request: ExportRequest, folder: Path, proof: FileProof) -> Measured | None:
        """The file of the rewritten graph as it was measured; None where there is none that is proven."""
        if self.module is None:
            return None
        before = set(folder.iterdir())
        try:
            artifact = exporter.export(replace(request, model=self.module, place_of=None), folder)
            measurement, placement = proof.measured(artifact, exporter)
            parity = proof.by.judged(measurement)
            if parity.ok:
                return artifact, measurement, placement
            why = parity.reason.rstrip(".")
        except ExportError as error:
            why = error.reasons or quote(error)
        except ExporterError as error:
            why = quote(error)
        self.refused[exporter.name] = f"the file made of the rewritten graph was refused ({why})"
        remove(set(folder.iterdir()) - before)
        return None

    def without(self, format: str, provenance: Provenance | None) -> list[dict[str, str]]:
        """The passes that changed the model and that a file of the format doesn't hold, each with the reason."""
        applied = [] if provenance is None else [each for each in provenance.report.passes if each.status == "applied"]
        why = self.refused.get(format) or self.refused.get("")
        found = []
        for record in applied:
            reason = _why_never(_kind(provenance, record.name))
            if reason is None and record.name in self.asked:
                reason = why or (None if record.name in self.names else "the graph of the whole has none of its places")
            if reason is not None:
                found.append({"name": record.name, "reason": reason})
        return found

    def notes(self, missing: Collection[str]) -> list[str]:
        """A sentence for each reason why files don't hold what graph passes did.

        Args:
            missing: the formats that there is no file of.
        """
        names = listed(list(dict.fromkeys(self.asked)), _MOST_NAMES)
        told = {format: why for format, why in self.refused.items() if format not in missing}
        return [
            f"{f'the {format} file does' if format else 'the files do'}n't hold what {names} did: {why}"
            for format, why in told.items()
        ]


def _open(calls: Sequence[Sequence[torch.Tensor]]) -> dict[Place, Place]:
    """As `FlatCall.sizes`."""
    first: dict[tuple[int, ...], Place] = {}
    found = {}
    for number, tensors in enumerate(zip(*calls, strict=True)):
        # Calls of other ranks are refused by whoever exports them.
        for dim, sizes in enumerate(zip(*(tensor.shape for tensor in tensors), strict=False)):
            if len(set(sizes)) > 1:
                found[number, dim] = first.setdefault(sizes, (number, dim))
    return found


def _why_never(kind: type[Pass] | None) -> str | None:
    """Why no file holds what a pass does; None for a pass that files hold."""
    if kind is None:
        return None
    if kind.is_barrier:
        return "files hold the module before its calls are compiled"
    if kind.plans_calls:
        return "files hold no backward pass"
    if issubclass(kind, GraphPass) and not kind.in_files:
        return "files hold the operations that its kernels are made of"
    return None


def remove(paths: Iterable[Path]) -> None:
    """Remove files and folders."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _kind(provenance: Provenance | None, name: str) -> type[Pass] | None:
    known = {} if provenance is None else {item.name: type(item) for item in provenance.passes}
    try:
        return known.get(name) or pass_named(name)
    except UnknownPass:
        # What was read from a pickle has no passes, and this one is of a package that isn't here.
        return None
