"""Export to ONNX by torch's two exporters, each with the conditions on the open sizes under which it is right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from exporters.base import clones
from exporters.conditions import Condition
from exporters.errors import RouteRefused
from exporters.evidence import Evidence
from exporters.exported_program import conditions_of_program, named_dims, shared_program
from exporters.file_values import Program
from exporters.onnx_operators import translations
from exporters.structure import unique
from exporters.torch_private import with_kept_onnx_registry, without_onnx_log
from exporters.trace_conditions import watched

Captured = tuple[ir.Model, Sequence[Condition], Program | None]
"""The model in the file, the conditions on the batch, and the program it was made from, where there is one."""


def by_dynamo(evidence: Evidence, opset: int | None, *, optimize: bool) -> Captured:
    # These only name the dims: they are open in the capture.
    names = tuple(named_dims(spec) or None for spec in evidence.input_specs)
    with with_kept_onnx_registry():
        program = torch.onnx.export(
            shared_program(evidence),
            opset_version=opset,
            dynamo=True,
            dynamic_shapes=names if any(names) else None,
            custom_translation_table=translations(),
            optimize=optimize,
            verbose=False,
        )
    if program is None or program.exported_program is None:
        raise RouteRefused("torch.onnx.export returned no program")
    exported = program.exported_program
    renamed = _name_ends(program.model, evidence.adapter.input_names, evidence.adapter.output_names)
    known = Program.of(exported, evidence.adapter.model, renamed)
    return program.model, conditions_of_program(exported, evidence), known


def _name_ends(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> dict[str, str]:
    """Name the inputs and outputs of a file, and rename the values inside that have one of these names.

    torch's exporter renames only the ends, although it names the values inside after operations: `mean`, `relu`.

    Returns:
        The new names by torch's names.
    """
    graph = model.graph
    seen = {*graph.inputs, *graph.initializers.values()}
    for index, value in enumerate(graph.outputs):
        # A value with another name of its own, such as an input that is returned, gets the second one from a node.
        if value in seen:
            copy = ir.Value(name=f"{value.name}_output_{index}", type=value.type, shape=value.shape)
            graph.append(ir.Node("", "Identity", [value], outputs=[copy]))
            graph.outputs[index] = copy
        seen.add(graph.outputs[index])
    ends = dict(zip((*graph.inputs, *graph.outputs), (*inputs, *outputs), strict=True))
    inside = [
        *(value for each in (graph, *graph.subgraphs()) for value in (*each.initializers.values(), *each.inputs)),
        *(value for node in graph.all_nodes() for value in node.outputs),
    ]
    inside = [value for value in dict.fromkeys(inside) if value not in ends and value.name]
    kept = [value.name for value in inside if value.name not in ends.values()]
    changed = [value for value in inside if value.name in ends.values()]
    free = unique([value.name for value in changed], {*ends.values(), *kept})
    renamed = {value.name: name for value, name in zip((*changed, *ends), (*free, *ends.values()), strict=True)}
    for value, name in zip((*changed, *ends), (*free, *ends.values()), strict=True):
        value.name = name
    return renamed


def by_torchscript(evidence: Evidence, opset: int | None, folder: Path) -> Captured:
    adapter = evidence.adapter
    axes = {spec.name: named_dims(spec) for spec in (*evidence.input_specs, *evidence.output_specs)}
    # Export to a file: above 2 GiB this exporter writes the weights next to it. The folder is removed after the export.
    raw = folder / "raw"
    raw.mkdir()
    # By default the exporter switches a module in training mode to eval.
    mode: dict[str, Any] = {"training": torch.onnx.TrainingMode.PRESERVE} if adapter.training else {}
    with without_onnx_log(), watched(evidence) as conditions:
        torch.onnx.export(
            adapter,
            clones(evidence.inputs[0]),
            str(raw / "model.onnx"),
            input_names=list(adapter.input_names),
            output_names=list(adapter.output_names),
            opset_version=opset,
            dynamo=False,
            dynamic_axes={name: dims for name, dims in axes.items() if dims},
            verbose=False,
            **mode,
        )
    return ir.load(raw / "model.onnx"), conditions(), None
