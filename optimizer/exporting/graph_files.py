"""Export the rewrites of graph passes: exporters try the rewritten graph first, and the plain forward if that fails."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from exporters.base import Adapter, Artifact, Captures, Exporter, ExportRequest, clones
from exporters.errors import ExporterError, ExportError, StructureError
from exporters.exported_program import captured_operations
from exporters.isolation import silent
from optimize_export.wording import listed, quote
from optimizer.exporting.artifact_parity import FileProof
from optimizer.model import pinned_settings, random_state
from optimizer.parity import Measurement
from optimizer.pipeline import Provenance, class_of_pass
from passes.base import Pass
from passes.graph.graph_pass import GraphPass
from passes.graph.whole_captures import FlatCall, NoWholeGraph, Place
from passes.graph.whole_graph import install_whole_graph, operations_of_whole_graph, steps_for_files

_MOST_NAMES = 4

Measured = tuple[Artifact, Measurement, Mapping[str, int] | None]


@dataclass
class GraphFiles:
    """The rewritten graph of one export, and the files that contain it."""

    module: nn.Module | None = None
    """Has the rewritten graph as its forward; None if the model has no graph pass or isn't one graph."""
    captures: Captures | None = None
    """The captures of the module; None if there is none."""
    asked: Sequence[str] = ()
    """The names of the passes whose changes files can contain."""
    names: Sequence[str] = ()
    """The names of the passes that changed this graph."""
    refused: dict[str, str] = field(default_factory=dict)
    """By format, the reason why its file contains the plain forward; "" stands for all formats."""

    @classmethod
    def of(
        cls, result: nn.Module, fresh: Callable[[], nn.Module], adapter: Adapter, request: ExportRequest
    ) -> GraphFiles:
        """Capture and rewrite the forward, if the result has graph passes whose changes files can contain.

        Args:
            result: the result of `optimize`.
            fresh: makes a copy of it.
            adapter: wraps another such copy.
            request: gives the calls; the forward is captured at the first one.
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
                names = install_whole_graph(module, adapter.model, call)
        except (NoWholeGraph, StructureError) as error:
            return cls(asked=asked, refused={"": quote(error)})
        whole = Adapter(
            module,
            *request.calls[0],
            input_names=adapter.input_names,
            output_names=adapter.output_names,
            outputs=adapter.outputs,
        )
        return cls(module, Captures(whole), asked, names)

    def export_and_measure(
        self, exporter: Exporter, request: ExportRequest, folder: Path, proof: FileProof
    ) -> Measured | None:
        """Export the rewritten graph and measure the file; None if there is no graph or the file isn't proven.

        An unproven file is removed, and the reason is stored in `refused`.
        """
        if (rewritten := self.request(request)) is None:
            return None
        request, before = rewritten, set(folder.iterdir())
        try:
            artifact = exporter.export(request, folder)
            measurement, placement = proof.measure(artifact, exporter)
            parity = proof.by.judge(measurement)
            if parity.ok:
                return artifact, measurement, placement
            why = parity.reason.rstrip(".")
        except ExportError as error:
            why = error.reasons or quote(error)
        except ExporterError as error:
            why = quote(error)
        self.refused[exporter.name] = f"the file made from the rewritten graph was rejected ({why})"
        remove(set(folder.iterdir()) - before)
        return None

    def request(self, plain: ExportRequest) -> ExportRequest | None:
        """The request for files of the rewritten graph, given that for the plain forward; None if there is no graph."""
        if self.module is None:
            return None
        return replace(plain, model=self.module, captures=self.captures, place_of=None)

    def operations(self, plain: Captures | None) -> Sequence[tuple[str, str]]:
        """The path of the module and the name of each operation in the graph of the files; empty without a capture."""
        if self.module is not None and not self.refused:
            return operations_of_whole_graph(self.module)
        return (None if plain is None else captured_operations(plain)) or ()

    def without(self, format: str, provenance: Provenance | None) -> list[dict[str, str]]:
        """The applied passes whose changes a file of the format doesn't contain, each with the reason."""
        applied = [] if provenance is None else [each for each in provenance.report.passes if each.status == "applied"]
        why = self.refused.get(format) or self.refused.get("")
        found = []
        for record in applied:
            reason = _why_never(class_of_pass(record.name, provenance))
            if reason is None and record.name in self.asked:
                reason = why or (
                    None if record.name in self.names else "the graph of the whole model contains none of its changes"
                )
            if reason is not None:
                found.append({"name": record.name, "reason": reason})
        return found

    def notes(self, missing: Collection[str]) -> list[str]:
        """A sentence for each reason why files don't contain the changes of graph passes, except for missing files."""
        names = listed(list(dict.fromkeys(self.asked)), _MOST_NAMES)
        told = {format: why for format, why in self.refused.items() if format not in missing}
        return [
            f"{f'the {format} file does' if format else 'the files do'}n't contain the changes of {names}: {why}"
            for format, why in told.items()
        ]


def _open(calls: Sequence[Sequence[torch.Tensor]]) -> dict[Place, Place]:
    """The dynamic dims of the calls, as in `FlatCall.sizes`."""
    first: dict[tuple[int, ...], Place] = {}
    found = {}
    for number, tensors in enumerate(zip(*calls, strict=True)):
        # Exporters refuse calls with different ranks.
        for dim, sizes in enumerate(zip(*(tensor.shape for tensor in tensors), strict=False)):
            if len(set(sizes)) > 1:
                found[number, dim] = first.setdefault(sizes, (number, dim))
    return found


def _why_never(kind: type[Pass] | None) -> str | None:
    """The reason why no file contains the changes of a pass; None if files can."""
    if kind is None:
        return None
    if kind.is_barrier:
        return "files can't contain compiled calls, so they contain the uncompiled model"
    if kind.plans_calls:
        return "files contain no backward pass"
    if issubclass(kind, GraphPass) and not kind.in_files:
        return "files can't contain its fused kernels, so they contain the single operations"
    return None


def remove(paths: Iterable[Path]) -> None:
    """Remove files and folders."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
