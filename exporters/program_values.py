"""All values of an exported program, computed one operation at a time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from exporters.program_writes import written_by
from exporters.steps import Seen, computes, computing, constants_of


class ProgramValues:
    """A program that returns its values with the given names, or all.

    Attributes:
        names: the requested values that the program computes.
        outputs: the names of the program's outputs.
    """

    def __init__(
        self, program: torch.export.ExportedProgram, device: str, names: Collection[str] | None = None
    ) -> None:
        nodes = [node for node in program.graph.nodes if computes(node) or written_by(node)]
        computed = frozenset(str(node.name) for node in nodes)
        self.names = computed if names is None else computed & frozenset(names)
        self.outputs = tuple(str(name) for name in program.graph_signature.user_outputs)
        self._inputs = [str(name) for name in program.graph_signature.user_inputs]
        self._constants = constants_of(program)
        self._nodes = [(str(node.name), computing(node)) for node in nodes]
        self._writes = any(written_by(node) for node in nodes)
        self._device = device

    def run(self, tensors: Sequence[torch.Tensor]) -> Seen:
        """Return the values for these inputs; if an operation raises, those before it."""
        known: dict[str, Any] = {name: self._own(value) for name, value in self._constants.items()}
        inputs = (tensor.detach().to(self._device) for tensor in tensors)
        known |= {name: self._own(value) for name, value in zip(self._inputs, inputs, strict=True)}
        values: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, compute in self._nodes:
                try:
                    known[name] = compute(known)
                except Exception as error:  # noqa: BLE001 - operators can raise anything, and the error is the result
                    return Seen(values, (name,), f"{type(error).__name__}: {error}")
                if name in self.names and isinstance(known[name], torch.Tensor):
                    values[name] = self._own(known[name].detach().cpu())
        return Seen(values)

    def _own(self, value: Any) -> Any:
        """Copy a tensor if a later operation could write to it."""
        return value.detach().clone() if self._writes and isinstance(value, torch.Tensor) else value
