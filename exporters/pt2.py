"""PT2: the program captured by torch.export, a graph of ATen operators with its weights.

`torch.export.load` loads it in any process that has torch; ExecuTorch, AOTInductor and others compile it. Loading can
run arbitrary code from the file, so only load files from sources that you trust.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch.export.passes import move_to_device_pass

from exporters.base import Artifact, Exporter, ExportRequest, Limit, LoadedArtifact, TensorSpec, move_to, refuse_unfit
from exporters.evidence import gather
from exporters.exported_program import captured, conditions_of_program, guards_in_force, take_guards
from exporters.isolation import refusing, silent
from exporters.metadata import extra_files, read_extra_file, write_archive
from exporters.places import FileValues, Program, ProgramValues
from exporters.proof import prove_at_calls, prove_beyond
from exporters.routes import Route, first_right
from optimize_export.wording import dtype_name


class Pt2Exporter(Exporter):
    """The exporter to `model.pt2`."""

    name: ClassVar[str] = "pt2"
    file_name: ClassVar[str] = "model.pt2"

    def export(self, request: ExportRequest, directory: Path) -> Artifact:
        evidence = gather(request)
        programs: dict[str, Program] = {}
        limits: list[Limit] = []

        def write(name: str, folder: Path) -> tuple[Path, ...]:
            program, programs[name] = captured(evidence, strict=name == "export-strict")
            limits.clear()
            conditions = conditions_of_program(program, evidence)
            device = str(evidence.device)
            guards = take_guards(program)
            agreed = prove_beyond(evidence, _LoadedProgram(program, device), conditions, guards, limits)
            # torch only has guards on sizes.
            of_ranks = [f"len(L['{spec.name}'].size()) == {len(spec.shape)}" for spec in input_specs(program)]
            program._guards_code = [*of_ranks, *guards_in_force(guards, evidence, agreed)]
            path = folder / self.file_name
            _save(program, path, extra_files(evidence.metadata))
            with refusing("the file can't be loaded"):
                loaded = self.load(path, device)
            prove_at_calls(evidence, loaded, [path])
            return (path,)

        def known(artifact: Artifact) -> Artifact:
            # A route that was refused before it wrote its file has no file to load values from.
            values = self.values if artifact.path.exists() else None
            return replace(artifact, program=programs[artifact.route], values=values, limits=tuple(limits))

        routes = [Route(name, partial(write, name)) for name in ("export", "export-strict")]
        return first_right(self, request, evidence, routes, directory, known)

    @staticmethod
    def load(path: Path, device: str) -> LoadedArtifact:
        with silent():
            return _LoadedProgram(_read(path, device), device)

    @staticmethod
    def read_metadata(path: Path) -> Mapping[str, str]:
        return read_extra_file(path)

    @staticmethod
    def values(path: Path, device: str, names: Collection[str] | None) -> FileValues:
        """Load the file so that it returns the values with these names; None means all."""
        with silent():
            return ProgramValues(_read(path, device), names)


def _read(path: Path, device: str) -> torch.export.ExportedProgram:
    program = torch.export.load(str(path))
    return program if torch.device(device).type == "cpu" else move_to_device_pass(program, device)


class _LoadedProgram:
    placement: dict[str, int] | None = None

    def __init__(self, program: torch.export.ExportedProgram, device: str) -> None:
        self.device = device
        self._inputs = input_specs(program)
        self._module = program.module()
        # forward checks the guards. A call of the module also compares trees of arguments, which are flat here.
        self._forward = self._module.forward if hasattr(self._module, "_guards_fn") else self._module
        self._target = torch.device(device)
        # The precision is that of torch's global settings.
        self.settings: dict[str, str] = {}

    def __del__(self) -> None:
        # A graph module is a reference cycle, which would keep its weights until Python's collector runs.
        for module in self._module.modules() if hasattr(self, "_module") else ():
            module._parameters.clear()
            module._buffers.clear()

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        refuse_unfit(self._inputs, tensors)
        with torch.no_grad():
            outputs = self._forward(*move_to(tensors, self._target))
        return tuple(outputs) if isinstance(outputs, list | tuple) else (outputs,)


def input_specs(program: torch.export.ExportedProgram) -> tuple[TensorSpec, ...]:
    """The inputs of a program, with torch's names for the open dims."""
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    return tuple(
        TensorSpec(
            name,
            dtype_name(value.dtype),
            tuple(size if isinstance(size, int) else str(size) for size in value.shape),
        )
        for name in program.graph_signature.user_inputs
        for value in (values[name],)
    )


def _save(program: torch.export.ExportedProgram, path: Path, extra: dict[str, str]) -> None:
    """Write the archive, with extra files by name, but without the inputs of the capture: they are the user's data."""
    with refusing("the program can't be saved"), silent():
        # The machine that loads the file may have no GPU.
        program = move_to_device_pass(program, "cpu")
        # Zeros, stored as one number: torch needs examples to name the inputs in guards.
        blank = [torch.zeros((), dtype=each.dtype).expand(each.shape) for each in program.example_inputs[0]]
        program.example_inputs = (tuple(blank), {})
        weights = sum(tensor.nbytes for tensor in program.state_dict.values())
        write_archive(path, weights, partial(torch.export.save, program, extra_files=extra))
