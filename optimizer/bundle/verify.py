"""Judge a bundle without the original model.

`verify_bundle` checks the files by their hashes and runs the artifacts on the golden data. `rejudge_bundle` judges the
measurements that the manifest has, and runs nothing.
"""

import math
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from exporters.child_process import one_child
from exporters.errors import OtherMachine, UnknownFormat
from exporters.registry import exported_format, load_for_proof
from optimize_export.arguments import parse_digest
from optimize_export.errors import BundleError, UsageError, printable
from optimize_export.manifest import MANIFEST, SUMS, damage_of, plain, sums_problem
from optimize_export.wording import listed, quote
from optimizer.bundle.bundle import open_bundle
from optimizer.bundle.golden import GoldenCall, read_golden, stored_noises, stored_tolerances
from optimizer.bundle.manifest import describe_device, factor_between, notes_on_missing
from optimizer.model import in_turn, pinned_settings, random_state, resolved_device
from optimizer.options import AccuracyBudget
from optimizer.parity import (
    FACTOR,
    WITHIN_BUDGET,
    Accuracy,
    CallErrors,
    Measurement,
    ParityReport,
    Tolerance,
    accuracy_between,
    compare_golden,
    judge,
)
from optimizer.showing import number_text


@dataclass(frozen=True)
class ArtifactFigures:
    """The result of one artifact: the judgement of its outputs, or the error that prevented it."""

    format: str
    path: str
    device: str
    calls: int
    # None for a lossy artifact, and if the artifact couldn't be loaded or run; then `error` says why.
    parity: ParityReport | None
    # The number of nodes that ran on each provider.
    placement: Mapping[str, int] | None = None
    error: str | None = None
    # Of a lossy artifact: its figures at the golden calls, and what its user allowed.
    accuracy: Accuracy | None = None
    budget: AccuracyBudget = field(default_factory=AccuracyBudget)
    # Of a lossy artifact: the figures of each output at each call, as in its `parity` in the manifest.
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
            **{name: getattr(self, name) for name in ("format", "path", "device", "ok", "verdict", "calls")},
            "parity": None if self.parity is None else self.parity.to_json(),
            "placement": None if self.placement is None else dict(self.placement),
            "accuracy": None if self.accuracy is None else {**self.accuracy.to_json(), "budget": self.budget.to_json()},
            "outputs": list(self.outputs),
            "metadata": dict(self.metadata),
            "problem": self.problem,
        }


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of `verify_bundle` and `rejudge_bundle`."""

    path: Path
    # The requested device, or the type of the device where the artifacts were measured; None if none was to be loaded.
    device: str | None
    # A sentence for each file that is missing, changed or not listed, and for unusable golden data.
    damage: tuple[str, ...]
    artifacts: tuple[ArtifactFigures, ...]
    notes: tuple[str, ...] = ()
    # If no artifact was loaded, the reasons why nothing is proven.
    unproven: tuple[str, ...] = ()
    said: str = "verified"

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


# ---------------------------------------------------------------------------------------------------------- verifying


@one_child()
@in_turn
def verify_bundle(
    path: str | Path,
    *,
    device: str = "cpu",
    require_gpu: bool = False,
    expect: str | None = None,
    run: bool = True,
) -> VerifyReport:
    """Check the hash of every file of a bundle, then run its artifacts on the golden inputs.

    A model file is a program with all the rights of the user who loads it. Verify a bundle only if you trust its
    builder, and pass the hash from the builder as `expect`. The report names each missing, changed or unknown file, and
    each output whose error is too large. If any file is missing, changed or unknown, no artifact is loaded.

    On the CPU, ONNX files run in a child process, so that a crash of onnxruntime is a problem in the report. A note names
    a file that was compiled for another machine, where `load` doesn't use it either; if there is no other file, it is a
    problem.

    Args:
        device: "cpu", "cuda" or "auto" (cuda if there is one).
        require_gpu: refuse to verify on the CPU.
        expect: the SHA-256 that the bundle's SHA256SUMS must have, as 64 hexadecimal digits. The builder reads it from
            `Bundle.sha256sums`. Without it the hashes detect accidents, not attacks.
        run: False checks the hashes and the golden data, and loads no artifact.

    Raises:
        BundleError: there is no readable manifest.
        DeviceError: the device is missing, or a GPU is required and there is none.
        UsageError: the device is unknown, `expect` isn't a SHA-256, or a device is given together with `run=False`.
    """
    if not run and (require_gpu or device != "cpu"):
        raise UsageError("run=False runs nothing: leave out device and require_gpu.")
    expected = None if expect is None else parse_digest("expect", expect)
    bundle = open_bundle(path)
    folder, manifest = bundle.path, bundle.manifest
    where = resolved_device(device, require_gpu=require_gpu).type if run else None
    # An artifact is a program, and the manifest determines how it is run and judged: any change, and nothing is loaded.
    if damage := damage_of(folder, manifest, expect=expected):
        note = f"no artifact was loaded, because some files are wrong: {listed([*damage])}"
        return VerifyReport(folder, where, tuple(damage.values()), (), (note,))
    if unhashed := list(_unhashed(folder, manifest)):
        return VerifyReport(folder, where, tuple(unhashed), ())
    golden = manifest["golden"]
    try:
        calls = read_golden(folder, manifest)
    except BundleError as error:
        return VerifyReport(folder, where, (str(error),), ())
    if where is None:
        return _not_run(folder, golden, calls, expected)
    here = describe_device(where)
    notes = [
        *notes_on_missing(manifest),
        f"the noise was measured on {golden['device']['name']} ({golden['device']['type']})",
    ]
    factor = factor_between(golden["device"], here)
    if factor > 1:
        notes.append(f"errors on {here['name']} ({here['type']}) may be {factor:g} times as large as there")
    figures, elsewhere = [], []
    for artifact in manifest["artifacts"]:
        try:
            ran = _run_artifact(folder, artifact, golden, calls, FACTOR * factor, where)
        except OtherMachine as error:
            elsewhere.append(f"{artifact['path']} wasn't run: {error}")
            continue
        # The manifest's metadata were read from this file, which is unchanged.
        figures.append(replace(ran, metadata=artifact.get("metadata", {})))
    if not figures:
        return VerifyReport(folder, where, (), (), tuple(notes), tuple(elsewhere))
    notes += elsewhere
    unjudged = [noise.name for noise in stored_noises(golden).values() if not noise.deterministic]
    if unjudged:
        notes.append(f"not judged, because the original is not deterministic there: {listed(unjudged)}")
    return VerifyReport(folder, where, (), tuple(figures), tuple(notes))


def _unhashed(folder: Path, manifest: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each file outside of the manifest from which an ONNX file takes weights: no hash covers these."""
    for artifact in manifest["artifacts"]:
        if exported_format(artifact["format"]) == "onnx":
            for name in sorted(_external_data(folder / artifact["path"])):
                path = posixpath.normpath(posixpath.join(posixpath.dirname(artifact["path"]), name))
                if path not in artifact["files"]:
                    yield f"{artifact['path']} takes weights from {path}, which {MANIFEST} doesn't list for it."


def _external_data(path: Path) -> set[str]:
    """The external files of all tensors in an ONNX file; none if it can't be read, since then it can't run either."""
    import onnx
    from google.protobuf.message import DecodeError, Message

    def tensors(message: Message) -> Iterator[Any]:
        if isinstance(message, onnx.TensorProto):
            yield message
            return
        for field_, value in message.ListFields():
            if field_.message_type is not None:
                for each in [value] if isinstance(value, Message) else value:
                    yield from tensors(each)

    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError:
        return set()
    return {entry.value for each in tensors(model) for entry in each.external_data if entry.key == "location"}


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
) -> ArtifactFigures:
    """Run an artifact on the golden inputs, and judge its outputs.

    Raises:
        OtherMachine: it was compiled for another machine.
    """
    placement: Mapping[str, int] | None = None
    answers: list[Sequence[torch.Tensor]] = []
    try:
        with pinned_settings() as pinned, torch.no_grad():
            loaded = load_for_proof(artifact["format"], folder / artifact["path"], device)
            placement, settings = loaded.placement, {**pinned, **loaded.settings}
            for call in calls:
                # Copies, because a file may write to its inputs, and the next file gets the same inputs.
                tensors = [tensor.to(device, copy=True) for tensor in call.inputs.values()]
                with random_state(call.seed):
                    answers.append(loaded(*tensors))
    except OtherMachine:
        raise
    except UnknownFormat:
        problem = (
            f"it wasn't checked, because no package here has the format {artifact['format']!r}: install the package that "
            "wrote it"
        )
        return replace(failed_artifact(artifact, calls, device, problem), placement=placement)
    # Any exception of a runtime that can't load or run a file is a failure of the artifact, and is reported as one.
    except Exception as error:  # noqa: BLE001
        problem = f"it can't be loaded or run: {quote(error, with_type=True)}"
        return replace(failed_artifact(artifact, calls, device, problem), placement=placement)
    return replace(judge_answers(artifact, golden, calls, answers, factor, device, settings), placement=placement)


def failed_artifact(
    artifact: Mapping[str, Any], calls: Sequence[GoldenCall], device: str, problem: str
) -> ArtifactFigures:
    """The figures of an artifact that couldn't be loaded or run; the problem is a clause."""
    return ArtifactFigures(artifact["format"], artifact["path"], device, len(calls), None, error=problem)


def judge_answers(
    artifact: Mapping[str, Any],
    golden: Mapping[str, Any],
    calls: Sequence[GoldenCall],
    answers: Sequence[Sequence[torch.Tensor]],
    factor: float,
    device: str,
    settings: Mapping[str, str],
) -> ArtifactFigures:
    """Judge the outputs of an artifact on the golden inputs.

    Args:
        golden: the manifest's.
        answers: the outputs at each call, in the artifact's order.
        factor: allowed error in units of the noise.
        settings: the settings of the runtime, for the record.
    """
    figures = ArtifactFigures(artifact["format"], artifact["path"], device, len(calls), None)
    if (allowed := artifact.get("accuracy")) is not None:
        originals = [list(call.outputs.values()) for call in calls]
        names = [output["name"] for output in golden["outputs"]]
        places = [CallErrors(call.batch_size, call.draw, sizes=call.sizes) for call in calls]
        stored = Accuracy.from_json(allowed)
        accuracy = accuracy_between(names, zip(answers, originals, strict=True), places, stored.orders)
        # The user's metric isn't here, but the file is the one that it judged.
        accuracy = replace(accuracy, metric=stored.metric)
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
    return compare_golden(
        stored_noises(golden),
        [(call.entry, answer) for call, answer in zip(calls, answers, strict=True)],
        factor=factor,
        device=device,
        precision=golden.get("precision", ""),
        settings=settings,
        **stored_tolerances(golden),
    )


# ------------------------------------------------------------------------------------------------------ judging again

_REJUDGED = "correct by its stored measurements"


def rejudge_bundle(
    path: str | Path, *, atol: Tolerance = None, rtol: Tolerance = None, factor: float | None = None
) -> VerifyReport:
    """Judge the stored measurements of a bundle again. This runs, loads and changes nothing.

    Without arguments, this repeats the judgement of the export with the tolerances of the export. Any argument discards
    those tolerances.

    Args:
        atol, rtol: tolerances that replace the noise: a number, or a dict by output name. The names are those in the
            files, or those in the model if they differ.
        factor: the allowed error of an output in units of its noise. The default is 4, or more if the original ran on
            another device.

    Returns:
        A report as that of `verify_bundle`.

    Raises:
        BundleError: there is no readable manifest, or the program version that wrote the bundle kept no measurements.
        UsageError: a tolerance is negative or names an unknown output, or the factor isn't a number above 0.
    """
    bundle = open_bundle(path)
    folder, manifest = bundle.path, bundle.manifest
    if factor is not None and not 0 < factor < math.inf:
        raise UsageError(f"factor must be a number above 0, not {factor!r}.")
    device = manifest["device"]["type"]
    if problem := sums_problem(folder, manifest):
        # The measurements in a changed manifest can't be trusted.
        return VerifyReport(folder, device, (problem,), (), said=_REJUDGED)
    if lacking := [
        artifact["path"]
        for artifact in manifest["artifacts"]
        if not (artifact.get("measurement") or artifact.get("accuracy"))
    ]:
        raise BundleError(
            f"{folder} has no measurement of {', '.join(lacking)}, because the program version that wrote it stored "
            "none: export the model again, or verify the bundle."
        )
    notes = [f"judged by the measurements on {manifest['device']['name']} ({device}); nothing was run"]
    by_user: dict[str, Any] = {"atol": atol, "rtol": rtol}
    if atol is None and rtol is None and factor is None:
        by_user = dict(stored_tolerances(manifest["golden"]))
    if factor is None:
        factor = FACTOR * factor_between(manifest["golden"]["device"], manifest["device"])
    figures = []
    for artifact in manifest["artifacts"]:
        if (accuracy := artifact.get("accuracy")) is not None:
            figures.append(_lossy(artifact, accuracy, device))
            continue
        measurement = Measurement.from_json(artifact["measurement"])
        own = (output.noise.name for output in measurement.outputs)
        names = dict(zip(own, (tensor["name"] for tensor in artifact["outputs"]), strict=True))
        parity = judge(measurement, **by_user, factor=factor, names=names)
        calls = max((len(output.calls) for output in measurement.outputs), default=0)
        placement = artifact.get("placement")
        figures.append(
            ArtifactFigures(artifact["format"], artifact["path"], measurement.device, calls, parity, placement)
        )
    return VerifyReport(folder, device, (), tuple(figures), tuple(notes), said=_REJUDGED)


def _lossy(artifact: Mapping[str, Any], stored: Mapping[str, Any], device: str) -> ArtifactFigures:
    """The figures of a lossy artifact, which its user's budget judges."""
    accuracy = Accuracy.from_json(stored)
    budget = AccuracyBudget(**stored["budget"])
    figures = ArtifactFigures(artifact["format"], artifact["path"], device, accuracy.calls, None)
    outputs = (artifact.get("parity") or {}).get("outputs", ())
    return replace(figures, accuracy=accuracy, budget=budget, outputs=outputs)
