"""Verify a bundle without the original model: its files by their hashes, its artifacts by the golden data."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from exporters.base import LoadedArtifact
from optimize_export.errors import BundleError, printable
from optimize_export.manifest import SUMS, damage_of, plain
from optimize_export.wording import listed
from optimizer.bundle.golden import GoldenCall, read_golden, stored_noises, stored_tolerances
from optimizer.bundle.manifest import describe_device, lacks
from optimizer.model import Call, in_turn, pinned_settings, random_state
from optimizer.options import AccuracyBudget
from optimizer.parity import (
    FACTOR,
    WITHIN_BUDGET,
    Accuracy,
    CallErrors,
    GoldenEntry,
    ParityReport,
    accuracy_between,
    compare_golden,
)
from optimizer.showing import number_text

# The noise was measured on one device. Another device sums in a different order and fuses different instructions, so
# its rounding errors are a different sample of the same distribution. These factors multiply parity's own factor to
# allow for that. They assume that both devices accumulate half precision in float32 and that TF32 is off on both.
_SAME_KIND = 2.0  # a different processor of the same kind: different vector widths and different kernels
_OTHER_KIND = {
    "float64": 4.0,
    "float32": 4.0,  # blocked and split sums instead of sequential ones, fused multiply-adds
    "float16": 4.0,  # kernel fusion changes where intermediate values are rounded to half precision
    "bfloat16": 4.0,  # as for float16
}
_OTHER_KIND_DEFAULT = 4.0

Loader = Callable[[str, Path, str], LoadedArtifact]


def device_factor(measured: Mapping[str, str], here: Mapping[str, str], dtype: str) -> float:
    """The factor by which an error may be larger here than on the device where the noise was measured."""
    if measured["type"] != here["type"]:
        return _OTHER_KIND.get(dtype, _OTHER_KIND_DEFAULT)
    return 1.0 if measured["name"] == here["name"] else _SAME_KIND


def factor_between(measured: Mapping[str, str], here: Mapping[str, str], dtypes: Iterable[str]) -> float:
    """The largest `device_factor` of several output dtypes."""
    return max((device_factor(measured, here, dtype) for dtype in dtypes), default=1.0)


@dataclass(frozen=True)
class ArtifactFigures:
    """The result of one artifact: the judgement of its outputs, or the error that prevented it.

    Attributes:
        parity: None if the artifact couldn't be loaded or run; `error` says why. Also None for a lossy artifact.
        accuracy, budget: of a lossy artifact: its figures at the golden calls, and what its user allowed.
        outputs: of a lossy artifact: the figures of each output at each call, as in its `parity` in the manifest.
        placement: the number of nodes that ran on each provider.
    """

    format: str
    path: str
    device: str
    calls: int
    parity: ParityReport | None
    placement: Mapping[str, int] | None = None
    error: str | None = None
    accuracy: Accuracy | None = None
    budget: AccuracyBudget = field(default_factory=AccuracyBudget)
    outputs: Sequence[Mapping[str, Any]] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.problem is None

    @property
    def verdict(self) -> str:
        """ "ok", "failed", or "within budget" for a file that may differ by more than rounding."""
        return "failed" if not self.ok else "ok" if self.accuracy is None else WITHIN_BUDGET

    @property
    def problem(self) -> str | None:
        if self.error is not None:
            return f"{self.path}: {self.error}"
        if self.accuracy is not None:
            why = self.accuracy.why_not(self.budget)
            return None if why is None else f"{self.path}: {why}"
        if self.parity is None or self.parity.ok:
            return None
        if self.parity.verdict == "vacuous":
            return f"{self.path}: {_nothing_proven(self.parity)}"
        return f"{self.path}: {self.parity.reason}"

    def to_json(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "path": self.path,
            "device": self.device,
            "ok": self.ok,
            "verdict": self.verdict,
            "calls": self.calls,
            "parity": None if self.parity is None else self.parity.to_json(),
            "placement": None if self.placement is None else dict(self.placement),
            "accuracy": None if self.accuracy is None else {**self.accuracy.to_json(), "budget": asdict(self.budget)},
            "outputs": list(self.outputs),
            "metadata": dict(self.metadata),
            "problem": self.problem,
        }


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of `verify_bundle`.

    Attributes:
        device: the requested device; None if no artifact was to be loaded.
        damage: a sentence for each file that is missing, changed or not listed, and for unusable golden data.
        unproven: if no artifact was to be loaded, the reason why the golden data can't prove anything.
    """

    path: Path
    device: str | None
    damage: tuple[str, ...]
    artifacts: tuple[ArtifactFigures, ...]
    notes: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()
    said: ClassVar[str] = "verified"

    @property
    def problems(self) -> tuple[str, ...]:
        failed = (artifact.problem for artifact in self.artifacts if artifact.problem)
        return (*self.damage, *self.unproven, *failed)

    @property
    def intact(self) -> bool:
        return not self.damage

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        data = {
            "path": str(self.path),
            "ok": self.ok,
            "intact": self.intact,
            "device": self.device,
            "problems": self.problems,
            "artifacts": [artifact.to_json() for artifact in self.artifacts],
            "notes": self.notes,
        }
        return dict(plain(data))

    def __str__(self) -> str:
        said = "intact; nothing was run" if self.device is None else f"{self.said} on {self.device}"
        lines = [f"{self.path}: {'' if self.ok else 'NOT '}{said}"]
        for artifact in self.artifacts:
            lines.append(f"  {artifact.path} ({artifact.format}): {artifact.verdict}, {artifact.calls} calls")
            if artifact.accuracy is not None:
                lines.append(f"    {artifact.accuracy} (budget: {artifact.budget})")
                lines += [
                    f"    {output['name']}: largest error {number_text(output['max_error'])}, cosine "
                    f"{number_text(output['cosine'], 6)}"
                    for output in artifact.outputs
                ]
            if artifact.parity is not None:
                lines += [
                    f"    {output.name}: largest error {output.max_error:.2e}, allowed {output.tolerance:.2e}"
                    for output in artifact.parity.outputs
                ]
        lines += [f"  problem: {problem}" for problem in self.problems]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(map(printable, lines))


# -------------------------------------------------------------------------------------------------------- the artifacts


@in_turn
def verify_contents(
    folder: Path, manifest: Mapping[str, Any], device: str | None, load: Loader, *, expect: str | None = None
) -> VerifyReport:
    """Check the hashes of a bundle's files, then run its artifacts on a device.

    If any file was changed, no artifact is loaded: an artifact is a program, and the manifest determines how it is run
    and judged.

    Args:
        device: where to run the artifacts. None checks the hashes and the golden data, and loads no artifact.
        load: loads an artifact, given its format, path and device.
        expect: the SHA-256 that SHA256SUMS must have.
    """
    if damage := damage_of(folder, manifest, expect=expect):
        note = f"no artifact was loaded, because some files are wrong: {listed([*damage])}"
        return VerifyReport(folder, device, tuple(damage.values()), (), (note,))
    golden = manifest["golden"]
    try:
        calls = read_golden(folder, manifest)
    except BundleError as error:
        return VerifyReport(folder, device, (str(error),), ())
    if device is None:
        return _not_run(folder, golden, calls, expect)
    here = describe_device(device)
    notes = [*lacks(manifest), f"the noise was measured on {golden['device']['name']} ({golden['device']['type']})"]
    factor = factor_between(golden["device"], here, (output["dtype"] for output in golden["outputs"]))
    if factor > 1:
        notes.append(f"errors on {here['name']} ({here['type']}) may be {factor:g} times as large as there")
    figures = []
    for artifact in manifest["artifacts"]:
        ran = _run_artifact(folder, artifact, golden, calls, FACTOR * factor, device, load)
        # The manifest's metadata were read from this file, which is unchanged.
        figures.append(replace(ran, metadata=artifact.get("metadata", {})))
    unjudged = [noise.name for noise in stored_noises(golden).values() if not noise.deterministic]
    if unjudged:
        notes.append(f"not judged, because the original is not deterministic there: {listed(unjudged)}")
    return VerifyReport(folder, device, (), tuple(figures), tuple(notes))


def _not_run(folder: Path, golden: Mapping[str, Any], calls: Sequence[GoldenCall], expect: str | None) -> VerifyReport:
    """The report without loaded artifacts: the golden outputs are judged as if an artifact had returned them."""
    answers = [tuple(call.outputs.values()) for call in calls]
    parity = _judged(golden, calls, answers, FACTOR, "cpu", {})
    unproven = () if parity.ok else (f"{golden['path']}: {_nothing_proven(parity)}",)
    whose = f"that {SUMS} lists" if expect is None else f"of the expected {SUMS}"
    note = f"the files are those {whose}; no artifact was loaded or run"
    return VerifyReport(folder, None, (), (), (note,), unproven)


def _nothing_proven(parity: ParityReport) -> str:
    return f"nothing is proven. {parity.reason}"


def _run_artifact(
    folder: Path,
    artifact: Mapping[str, Any],
    golden: Mapping[str, Any],
    calls: Sequence[GoldenCall],
    factor: float,
    device: str,
    load: Loader,
) -> ArtifactFigures:
    placement: Mapping[str, int] | None = None
    answers: list[Sequence[torch.Tensor]] = []
    try:
        with pinned_settings() as pinned, torch.no_grad():
            loaded = load(artifact["format"], folder / artifact["path"], device)
            placement, settings = loaded.placement, {**pinned, **loaded.settings}
            for call in calls:
                # Copies, because a file may write to its inputs, and the next file gets the same inputs.
                tensors = [tensor.to(device, copy=True) for tensor in call.inputs.values()]
                with random_state(call.seed):
                    answers.append(loaded(*tensors))
    # Any exception of a runtime that can't load or run a file is a failure of the artifact, and is reported as one.
    except Exception as error:  # noqa: BLE001
        problem = f"it can't be loaded or run: {_one_line(error)}"
        return ArtifactFigures(artifact["format"], artifact["path"], device, len(calls), None, placement, problem)
    figures = ArtifactFigures(artifact["format"], artifact["path"], device, len(calls), None, placement)
    if (allowed := artifact.get("accuracy")) is not None:
        originals = [list(call.outputs.values()) for call in calls]
        names = [output["name"] for output in golden["outputs"]]
        places = [CallErrors(call.batch_size, call.draw, sizes=call.sizes) for call in calls]
        accuracy = accuracy_between(names, zip(answers, originals, strict=True), places)
        outputs = [output.to_json() for output in accuracy.outputs]
        return replace(figures, accuracy=accuracy, budget=AccuracyBudget(**allowed["budget"]), outputs=outputs)
    return replace(figures, parity=_judged(golden, calls, answers, factor, device, settings))


def _judged(
    golden: Mapping[str, Any],
    calls: Sequence[GoldenCall],
    answers: Sequence[Sequence[torch.Tensor]],
    factor: float,
    device: str,
    settings: Mapping[str, str],
) -> ParityReport:
    # The judgement doesn't use the inputs.
    empty = Call((), {})
    entries = [
        (
            GoldenEntry(
                call.batch_size, call.draw, empty, dict(call.outputs), dict(call.tied), tuple(call.sizes.items())
            ),
            answer,
        )
        for call, answer in zip(calls, answers, strict=True)
    ]
    tolerances: dict[str, Any] = dict(stored_tolerances(golden))
    precision = golden.get("precision", "")
    return compare_golden(
        stored_noises(golden),
        entries,
        factor=factor,
        device=device,
        precision=precision,
        settings=settings,
        **tolerances,
    )


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
