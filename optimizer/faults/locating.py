"""Find where a file or a module first diverges from the original: the module, and where known the line and operation.

Most files are made from a captured program, and their values have the same names as the program's. The program runs on
the original's weights, so the file's values are compared with its values, by the rule for a model's outputs. The first
wrong value in the order of the program is at fault. The file lacks some values, because their operations were merged
into others. If the next value that the file has is wrong, any of these operations may be at fault, and all are named.

If no such value is wrong, or the file has none, modules are compared (`locating_modules`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any

import torch
from torch import nn

from exporters.base import Artifact
from exporters.places import FileValues, Program
from optimize_export.wording import quote
from optimizer.faults.locating_modules import (
    Divergence,
    first_module_without_value,
    first_wrong_module,
    first_wrong_part,
)
from optimizer.model import Call, random_state
from optimizer.parity import Flatten, Measurement, Reference, judged_values, reference_at
from passes.graph.memory import same_values

logger = logging.getLogger(__name__)

# The maximum number of calls at which a divergence is searched.
_SEARCHED = 4
# Seed of the random numbers in a file and in the program that it was made from.
_SEED = 0


@dataclass(frozen=True)
class Located:
    """The result of a search: the divergence, or the reason in `note` why none was found."""

    divergence: Divergence | None
    note: str = ""

    def __str__(self) -> str:
        if self.divergence is None:
            return f"The first difference couldn't be located: {self.note}."
        return f"It {self.divergence}."

    def to_json(self) -> dict[str, Any]:
        return {
            "divergence": None if self.divergence is None else self.divergence.to_json(),
            "divergence_note": self.note,
        }


def locate_in_file(
    artifact: Artifact,
    reference: Reference,
    measurement: Measurement,
    exported: nn.Module,
    flatten: Flatten,
    device: str,
) -> Located:
    """Find where an artifact that failed the comparison with the reference first diverges.

    An exception in the search goes into the note and isn't raised, because it would hide the failure of the artifact.

    Args:
        measurement: of the artifact; the calls that it names are searched first.
        exported: the module that the artifact was made from.
        flatten: returns the artifact's input tensors for (args, kwargs).
    """
    search = _FileSearch(artifact, reference, exported, device)

    def find() -> Iterator[Divergence | None]:
        wheres = suspect_calls(reference, measurement)[:_SEARCHED]
        calls = dict(reference.calls())
        given = [(tuple(flatten(calls[where].args, calls[where].kwargs)), where) for where in wheres]
        yield from starmap(search.by_value, given)
        yield from starmap(search.by_module, given)
        if exported is not reference.target:
            yield from (first_wrong_module(reference, exported, where) for where in wheres)

    return _first_of(find(), search.nowhere)


def locate_in_refused(
    artifact: Artifact,
    tensors: Sequence[torch.Tensor],
    *,
    reference: Reference,
    exported: nn.Module,
    flatten: Flatten,
    device: str,
) -> str:
    """Find where a file that its exporter refused first diverges at given inputs of the file.

    An exception in the search isn't raised, as in `locate_in_file`.

    Returns:
        A clause; "" if no divergence was found.
    """
    search = _FileSearch(artifact, reference, exported, device)

    def find() -> Iterator[Divergence | None]:
        known = ((where, tuple(flatten(call.args, call.kwargs))) for where, call in reference.calls())
        same = (where for where, given in known if all(same_values(*pair) for pair in zip(given, tensors, strict=True)))
        where = next(same, None)
        sizes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        yield search.by_value(tensors, where or f"inputs of {sizes}")
        if where is not None:
            yield search.by_module(tensors, where)

    found = _first_of(find(), "").divergence
    return "" if found is None else str(found)


def locate_in_module(reference: Reference, measurement: Measurement, candidate: nn.Module) -> Located:
    """Find where a module that failed the comparison first diverges; an exception goes into the note."""
    wheres = suspect_calls(reference, measurement)[:_SEARCHED]
    found = (first_wrong_module(reference, candidate, where) for where in wheres)
    return _first_of(found, "every module returns the same as in the original")


@dataclass(frozen=True)
class _FileSearch:
    """Searches a file at one call."""

    artifact: Artifact
    reference: Reference
    exported: nn.Module
    """The module that the file was made from."""
    device: str

    def by_value(self, tensors: Sequence[torch.Tensor], where: str) -> Divergence | None:
        """The first value that differs from the value of the same name in the program that the file was made from."""
        artifact, program = self.artifact, self.artifact.program
        if program is None or artifact.values is None:
            return None
        return first_wrong_value(program, artifact.values(artifact.path, self.device, program.places), tensors, where)

    def by_module(self, tensors: Sequence[torch.Tensor], where: str) -> Divergence | None:
        """The first module that differs in the file; where the file's program is known, in that program."""
        artifact = self.artifact
        if artifact.parts is not None:
            return first_wrong_part(self.reference, self.exported, artifact.parts(artifact.path, self.device), where)
        file: FileValues | None = None if artifact.program is None else artifact.program.values()
        if file is None and artifact.values is not None:
            file = artifact.values(artifact.path, self.device, None)
        return None if file is None else first_module_without_value(self.reference, self.exported, file, tensors, where)

    @property
    def nowhere(self) -> str:
        """The reason why nothing was found, as a clause."""
        if self.artifact.values is not None:
            return "every value in the file is correct"
        if self.artifact.parts is not None:
            return "every module of the file that takes one tensor returns the correct value"
        if self.artifact.program is not None:
            return (
                "compiled machine code has no values to compare, and the program that it was compiled from is "
                "correct: either the compiler is at fault, or the package was modified afterwards"
            )
        return f"files of the format {self.artifact.format} have no intermediate values to compare"


def first_wrong_value(
    program: Program, file: FileValues, tensors: Sequence[torch.Tensor], where: str
) -> Divergence | None:
    """Find the first value of a file that differs from the value of the same name in its program.

    If the file raises, and all values before are right, the first value that it didn't compute is reported.

    Args:
        tensors: the inputs of the file.
        where: a description of the call.
    """
    values = program.values(file.names)
    expected = reference_at(values, Call(tuple(tensors), {}), where, seed=_SEED)
    with random_state(_SEED):
        got, error = file.run(tensors)
    for name, found in zip(values.names, judged_values(expected, list(map(got.get, values.names))), strict=True):
        wrong = found or ("raises" if error else None)
        if wrong is not None and (isinstance(wrong, str) or not wrong.ok):
            also = program.merged_into(name, values.names)
            return Divergence.at(program.places[name], wrong, where, value=name, also=also)
    return None


def fault_of_runtime(artifact: Artifact, is_right: Callable[[Artifact], bool]) -> str:
    """Test whether a failed artifact is right without its runtime's graph optimizations.

    An exception of that run goes into the sentence and isn't raised, as in `locate_in_file`.

    Returns:
        A sentence; "" if the artifact can't be loaded without optimizations.
    """
    if artifact.unoptimized is None:
        return ""
    try:
        right = is_right(replace(artifact, loader=artifact.unoptimized))
    except Exception as error:  # the runtime is foreign code, and its error must not hide the failure
        logger.debug("the run without optimizations raised", exc_info=True)
        return f"Without the runtime's graph optimizations, it raised {type(error).__name__}: {quote(error)}."
    if right:
        return (
            "Without the runtime's graph optimizations the file is correct: the optimizations are at fault, not "
            "the file."
        )
    return "Without the runtime's graph optimizations it is wrong too."


def _first_of(found: Iterator[Divergence | None], nowhere: str) -> Located:
    """The first divergence of a search; if there is none, the note is `nowhere` or the exception of the search."""
    try:
        first = next(filter(None, found), None)
    except Exception as error:  # the search runs foreign code, whose error must not hide the failure
        logger.debug("locating raised", exc_info=True)
        return Located(None, f"the search raised {type(error).__name__}: {quote(error)}")
    return Located(first, nowhere if first is None else "")


def suspect_calls(reference: Reference, measurement: Measurement) -> list[str]:
    """The calls of the reference; those that a measurement names come first."""
    told = (*measurement.problems, *(text for each in measurement.outputs for text in (*each.problems, each.where)))
    return sorted((where for where, _ in reference.calls()), key=lambda where: not any(where in text for text in told))
