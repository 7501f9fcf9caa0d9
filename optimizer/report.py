"""The record of one `optimize`, as plain data and as text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from optimize_export.errors import printable_lines
from optimizer.parity import ParityReport
from optimizer.showing import checkpoint_plot, fragment
from passes.base import Detail

Status = Literal["applied", "unchanged", "rolled-back", "failed"]
# The most expensive places come first. The JSON has all of them.
_REMARKS_SHOWN = 5
# Names of modules and values in a skip reason. Reasons of the same kind differ only in these.
_NAMES = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+|\w*[_\d]\w*")
STAGES = ("capture", "optimize", "export", "parity", "bench", "tune", "bundle", "profile", "diagnose")


@dataclass(frozen=True)
class Progress:
    """One step of the work."""

    stage: str
    """One of `STAGES`; the command adds `LOAD_STAGE`."""
    # The number of finished steps and of all steps of the stage.
    done: int
    total: int
    text: str
    name: str = ""
    """The pass or exporter that runs now; "" in other steps."""


ProgressFunction = Callable[[Progress], None]


def no_progress(progress: Progress) -> None:
    """Ignore the progress."""


@dataclass(frozen=True)
class PlaceRecord:
    """One place that a pass changed or skipped."""

    where: str
    """The path of the module, or of the one around the operation with its name: "encoder.act", "the root (mul)"; "" for the whole model."""
    text: str
    """The change, or the reason for the skip."""


@dataclass
class PassRecord:
    """The outcome of one pass."""

    name: str
    options: dict[str, Any]
    status: Status
    """Of them, "unchanged": there was nothing to change; "rolled-back": the result computed something different, and `reason` has
    the figures; "failed": the pass raised an error, which is in `reason`."""
    reason: str = ""
    # The changed and the skipped places; for a rolled-back pass, those before the rollback.
    changes: tuple[PlaceRecord, ...] = ()
    skips: tuple[PlaceRecord, ...] = ()
    remarks: tuple[PlaceRecord, ...] = ()
    """Places that cost something and that the user can fix; empty for a rolled-back pass."""
    detail: Detail | None = None
    """The pass-specific part of the report, as plain data in JSON and as text for people; None if there is none."""
    parity: float | None = None
    """The largest error of its changes, each at its own outputs, in units of the rounding noise there; None if nothing
    was checked."""
    max_error: float | None = None
    """The error that the pass declares, as a share of an output's largest magnitude; None if it declares none."""
    error: float | None = None
    """The largest error of its changes, each at its own outputs, as such a share; None if nothing was checked."""
    seconds: float = 0.0
    """The time of the pass itself, without its checks."""

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        places = {name: [asdict(place) for place in getattr(self, name)] for name in ("changes", "skips", "remarks")}
        detail = None if self.detail is None else self.detail.to_json()
        return {**vars(self), **places, "detail": detail, "seconds": round(self.seconds, 4)}


@dataclass
class CoverageRecord:
    """The part of the model that the example calls show to the passes."""

    reached: int
    """The number of modules that hold parameters directly, and of which some torch call reads one."""
    parameterised: int
    """The number of all modules that hold parameters directly."""
    unreached: tuple[str, ...] = ()
    """The paths of the others; empty without example inputs, because nothing is known then."""

    @property
    def share(self) -> float:
        """`reached` divided by `parameterised`, from 0 to 1; 1 if no module has parameters."""
        return self.reached / self.parameterised if self.parameterised else 1.0

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        return {"share": round(self.share, 4), **vars(self), "unreached": list(self.unreached)}


@dataclass
class Size:
    """The number of elements in all parameters of a model, and their size in bytes."""

    parameters: int
    parameter_bytes: int


@dataclass
class Report:
    """The record of one `optimize`."""

    model: str
    """The name of the model's class."""
    mode: Literal["inference", "training"]
    device: str
    torch: str
    coverage: CoverageRecord
    """The part of the model that the passes could reach."""
    passes: list[PassRecord]
    parity: ParityReport | None
    """The result compared with the original; None if there were no example inputs and nothing was verified."""
    before: Size
    after: Size
    notes: list[str] = field(default_factory=list)
    """Sentences that the user should read."""
    seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)
    """The notes about a difference between the result and the given model."""
    stages: dict[str, float] = field(default_factory=dict)
    """The seconds of each stage: "original" (its runs, which are recorded in inference mode), "passes" and "comparison"
    (with the measurements for it)."""

    @property
    def verified(self) -> bool:
        """Whether the result was compared with the original and computes the same."""
        return self.parity is not None and self.parity.ok

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data for JSON; floats may still be infinite or NaN."""
        return {
            **vars(self),
            "coverage": self.coverage.to_json(),
            "passes": [record.to_json() for record in self.passes],
            "verified": self.verified,
            "parity": None if self.parity is None else self.parity.to_json(),
            "before": asdict(self.before),
            "after": asdict(self.after),
            "seconds": round(self.seconds, 4),
            "stages": {name: round(seconds, 4) for name, seconds in self.stages.items()},
        }

    def _repr_html_(self) -> str:
        told = self.to_json()
        passes = [{**each, "said": reason_shown(each)} for each in told["passes"]]
        curves = [plot for each in passes if (plot := checkpoint_plot(each["detail"])) is not None]
        return fragment("optimize", report=told, passes=passes, curves=curves)

    def __str__(self) -> str:
        lines = [f"{self.model}, {self.mode}, {self.device}, torch {self.torch}"]
        if self.coverage.reached or self.coverage.unreached:
            lines.append(f"reached: {100 * self.coverage.share:.0f} % of the modules with parameters")
        width = max((len(record.name) for record in self.passes), default=0)
        lines += [_pass_line(record, width) for record in self.passes]
        lines += [line for record in self.passes for line in remark_lines(record.to_json())]
        lines += [f"{record.name}:\n{record.detail}" for record in self.passes if record.detail is not None]
        lines.append(f"size: {self.before.parameters:,} -> {self.after.parameters:,} parameters")
        lines.append(f"parity: {self.parity if self.parity else 'nothing was verified (no example inputs)'}")
        if self.stages:
            parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.stages.items())
            lines.append(f"time: {self.seconds:.1f} s ({parts})")
        lines += [f"{'warning' if note in self.warnings else 'note'}: {note}" for note in self.notes]
        return printable_lines("\n".join(lines))


def remark_lines(record: Mapping[str, Any]) -> list[str]:
    """The remarks in the JSON record of one pass, one per line; the last line counts those that aren't shown."""
    remarks = record.get("remarks", ())
    lines = [f"{record['name']}: {each['where'] or 'the root'}: {each['text']}" for each in remarks[:_REMARKS_SHOWN]]
    rest = len(remarks) - len(lines)
    return [*lines, f"{record['name']}: {rest} more such places are in the report"] if rest else lines


def reason_shown(record: Mapping[str, Any]) -> str:
    """The reason of a rollback or failure, the declared error, or the most frequent skip reason with its count."""
    if record.get("reason"):
        return str(record["reason"])
    if record.get("max_error") is not None and record.get("error") is not None:
        return f"declares an error of at most {record['max_error']:g}, measured {record['error']:.2g}"
    skips = record.get("skips", ())
    if not skips:
        return ""
    kinds = Counter(_kind(skip) for skip in skips)
    kind, count = kinds.most_common(1)[0]
    texts = {skip["text"] for skip in skips if _kind(skip) == kind}
    return f"{texts.pop() if len(texts) == 1 else kind} ({count} of {len(skips)})"


def _kind(skip: Mapping[str, str]) -> str:
    """The reason without its names, because reasons of the same kind differ only in these."""
    text, where = skip["text"], skip["where"]
    if where:
        text = re.sub(rf"(?<![\w.]){re.escape(where)}(?![\w.])", "…", text)
    return _NAMES.sub("…", text)


def _pass_line(record: PassRecord, width: int) -> str:
    text = f"{record.name:<{width}}  {record.status:<11}  {len(record.changes)} changes, {len(record.skips)} skips"
    text += f", {record.seconds:.2f} s"
    reason = reason_shown(record.to_json())
    return f"{text}: {reason}" if reason else text
