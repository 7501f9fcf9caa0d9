"""What `optimize` did, as plain data, and how it is shown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from optimizer.parity import ParityReport
from passes.base import Detail

Status = Literal["applied", "unchanged", "rolled-back", "failed"]
# The costliest come first; the JSON has them all.
_REMARKS_SHOWN = 5
# Names of modules and values in a skip reason, by which reasons of one kind differ.
_NAMES = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+|\w*[_\d]\w*")
STAGES = ("capture", "optimize", "export", "parity", "bundle")


@dataclass(frozen=True)
class Progress:
    """One step of the way.

    Attributes:
        stage: one of `STAGES`.
        done, total: steps of the stage that are done, and all of them.
        text: what is done now.
        name: of the pass that runs now; "" elsewhere.
    """

    stage: str
    done: int
    total: int
    text: str
    name: str = ""


ProgressFunction = Callable[[Progress], None]


def no_progress(progress: Progress) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class PlaceRecord:
    """One place that was changed or left alone.

    Attributes:
        where: the module path; "" for the root.
        text: what was done, or the reason why nothing was.
    """

    where: str
    text: str

    def to_json(self) -> dict[str, str]:
        """Plain data."""
        return {"where": self.where, "text": self.text}


@dataclass
class PassRecord:
    """What became of one pass.

    Attributes:
        name, options: of the pass.
        status: "applied"; "unchanged": there was nothing to change; "rolled-back": it computed something else, `reason`
            gives the figures; "failed": it raised, `reason` is the error.
        changes, skips: the places; those of a pass that was rolled back are what it had done.
        remarks: places that cost something and that the user may mend; none of a pass that was rolled back.
        detail: what else the pass has to show, as plain data in JSON and as text for people; None for nothing.
        parity: the largest error of its changes, each at its own outputs, in units of the noise there; None where
            nothing was checked.
        max_error: the error that the pass declares, as a share of an output's largest magnitude; None where it declares none.
        error: the largest error of its changes, each at its own outputs, as such a share; None where nothing was checked.
        seconds: the pass itself, without its checks.
    """

    name: str
    options: dict[str, Any]
    status: Status
    reason: str = ""
    changes: tuple[PlaceRecord, ...] = ()
    skips: tuple[PlaceRecord, ...] = ()
    remarks: tuple[PlaceRecord, ...] = ()
    detail: Detail | None = None
    parity: float | None = None
    max_error: float | None = None
    error: float | None = None
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "options": self.options,
            "status": self.status,
            "reason": self.reason,
            "changes": [place.to_json() for place in self.changes],
            "skips": [place.to_json() for place in self.skips],
            "remarks": [place.to_json() for place in self.remarks],
            "detail": None if self.detail is None else self.detail.to_json(),
            "parity": self.parity,
            "max_error": self.max_error,
            "error": self.error,
            "seconds": round(self.seconds, 4),
        }


@dataclass
class CoverageRecord:
    """How much of a model the example calls show to the passes.

    Attributes:
        reached: modules with parameters of their own that some call of torch reads.
        parameterised: all modules with parameters of their own.
        unreached: the paths of the others; none where there are no example inputs, and nothing is known.
    """

    reached: int
    parameterised: int
    unreached: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Reached by parameterised modules, 0 to 1; 1 where no module has parameters."""
        return self.reached / self.parameterised if self.parameterised else 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "share": round(self.share, 4),
            "reached": self.reached,
            "parameterised": self.parameterised,
            "unreached": list(self.unreached),
        }


@dataclass
class Size:
    """What a model is made of.

    Attributes:
        parameters: elements of all parameters.
        parameter_bytes: their bytes.
        operations: calls of torch in one call of the model, as a run shows them; None without a run.
    """

    parameters: int
    parameter_bytes: int
    operations: int | None

    def to_json(self) -> dict[str, int | None]:
        """Plain data."""
        return {
            "parameters": self.parameters,
            "parameter_bytes": self.parameter_bytes,
            "operations": self.operations,
        }


@dataclass
class Report:
    """The record of one `optimize`.

    Attributes:
        model: the class of the model.
        mode, device, torch: what it was done for and with.
        coverage: what passes could reach.
        passes: one record per pass, in the order given.
        parity: the result against the original; None where no example inputs were given and nothing was verified.
        before, after: what the model is made of.
        notes: sentences that the user should read.
        warnings: those of the notes that are about a difference between the result and the model as it was given.
        seconds: of the whole; stages: of each of its stages, "original" (its runs, recorded in inference), "passes" and
            "comparison" (with the measurements that it needs).
        could_apply: where no pass changed anything, the passes that weren't named and would rewrite something.
    """

    model: str
    mode: Literal["inference", "training"]
    device: str
    torch: str
    coverage: CoverageRecord
    passes: list[PassRecord]
    parity: ParityReport | None
    before: Size
    after: Size
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)
    could_apply: list[str] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def verified(self) -> bool:
        """Whether the result was compared with the original, and computes the same."""
        return self.parity is not None and self.parity.ok

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for JSON but for what floats may hold."""
        return {
            "model": self.model,
            "mode": self.mode,
            "device": self.device,
            "torch": self.torch,
            "coverage": self.coverage.to_json(),
            "passes": [record.to_json() for record in self.passes],
            "verified": self.verified,
            "parity": None if self.parity is None else self.parity.to_json(),
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "could_apply": list(self.could_apply),
            "seconds": round(self.seconds, 4),
            "stages": {name: round(seconds, 4) for name, seconds in self.stages.items()},
        }

    def __str__(self) -> str:
        lines = [f"{self.model}, {self.mode}, {self.device}, torch {self.torch}"]
        if self.coverage.reached or self.coverage.unreached:
            lines.append(f"reached: {100 * self.coverage.share:.0f} % of the modules with parameters")
        width = max((len(record.name) for record in self.passes), default=0)
        lines += [_pass_line(record, width) for record in self.passes]
        lines += [line for record in self.passes for line in remark_lines(record.to_json())]
        lines += [f"{record.name}:\n{record.detail}" for record in self.passes if record.detail is not None]
        lines.append(
            f"size: {self.before.parameters:,} -> {self.after.parameters:,} parameters{_operations(self.before, self.after)}"
        )
        lines.append(f"parity: {self.parity if self.parity else 'nothing was verified (no example inputs)'}")
        if self.stages:
            parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.stages.items())
            lines.append(f"time: {self.seconds:.1f} s ({parts})")
        if self.could_apply:
            lines.append(f"no pass changed the model; these could: {', '.join(self.could_apply)}")
        lines += [f"{'warning' if note in self.warnings else 'note'}: {note}" for note in self.notes]
        return "\n".join(lines)


def remark_lines(record: Mapping[str, Any]) -> list[str]:
    """The remarks of one pass, from its record as plain data, a line each; the last one counts what isn't shown."""
    remarks = record.get("remarks", ())
    lines = [f"{record['name']}: {each['where'] or 'the root'}: {each['text']}" for each in remarks[:_REMARKS_SHOWN]]
    rest = len(remarks) - len(lines)
    return [*lines, f"{record['name']}: {rest} more such places are in the report"] if rest else lines


def reason_shown(record: Mapping[str, Any]) -> str:
    """Why a pass was taken back, the error that it declares, or its most frequent reason for a skip with the count."""
    if record.get("reason"):
        return str(record["reason"])
    if record.get("max_error") is not None and record.get("error") is not None:
        return f"declares an error of at most {record['max_error']:g}, measured {record['error']:.2g}"
    skips = record.get("skips", 0)
    if isinstance(skips, int) or not skips:
        return ""
    kinds = Counter(_kind(skip) for skip in skips)
    kind, count = kinds.most_common(1)[0]
    texts = {skip["text"] for skip in skips if _kind(skip) == kind}
    return f"{texts.pop() if len(texts) == 1 else kind} ({count} of {len(skips)})"


def _kind(skip: Mapping[str, str]) -> str:
    """The reason without the names in it, as reasons of one kind differ by these alone."""
    text, where = skip["text"], skip["where"]
    if where:
        text = re.sub(rf"(?<![\w.]){re.escape(where)}(?![\w.])", "…", text)
    return _NAMES.sub("…", text)


def _pass_line(record: PassRecord, width: int) -> str:
    text = f"{record.name:<{width}}  {record.status:<11}  {len(record.changes)} changes, {len(record.skips)} skips"
    text += f", {record.seconds:.2f} s"
    reason = reason_shown(record.to_json())
    return f"{text}: {reason}" if reason else text


def _operations(before: Size, after: Size) -> str:
    if before.operations is None or after.operations is None:
        return ""
    return f", {before.operations:,} -> {after.operations:,} operations"
