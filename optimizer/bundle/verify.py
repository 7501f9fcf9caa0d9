"""Verify a bundle without the original model: its files by their hashes, its artifacts by the golden data."""

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from exporters.base import LoadedArtifact
from optimizer.bundle.golden import GoldenCall, read_golden, stored_noises, stored_tolerances
from optimizer.bundle.manifest import MANIFEST, SUMS, describe_device, lacks, plain
from optimizer.bundle.regular_files import open_regular, read_text_bytes
from optimizer.errors import BundleError, printable
from optimizer.model import Call, in_turn, pinned_settings, random_state
from optimizer.parity import FACTOR, GoldenEntry, ParityReport, compare_golden
from optimizer.wording import listed

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
        parity: None if the artifact couldn't be loaded or run; `error` says why.
        placement: the number of nodes that ran on each provider.
    """

    format: str
    path: str
    device: str
    calls: int
    parity: ParityReport | None
    placement: Mapping[str, int] | None = None
    error: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.problem is None

    @property
    def problem(self) -> str | None:
        if self.error is not None:
            return f"{self.path}: {self.error}"
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
            "calls": self.calls,
            "parity": None if self.parity is None else self.parity.to_json(),
            "placement": None if self.placement is None else dict(self.placement),
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
            lines.append(
                f"  {artifact.path} ({artifact.format}): {'ok' if artifact.ok else 'failed'}, {artifact.calls} calls"
            )
            if artifact.parity is not None:
                lines += [
                    f"    {output.name}: largest error {output.max_error:.2e}, allowed {output.tolerance:.2e}"
                    for output in artifact.parity.outputs
                ]
        lines += [f"  problem: {problem}" for problem in self.problems]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(map(printable, lines))


# ------------------------------------------------------------------------------------------------------------ the files


def file_digest(path: Path) -> str:
    """The SHA-256 of a regular file, read in pieces.

    Raises:
        OSError: the path isn't a regular file, or it can't be read.
    """
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sums_text(digests: Mapping[str, str]) -> str:
    """The text of SHA256SUMS, in the format of `sha256sum -c`."""
    return "".join(f"{digests[path]}  {path}\n" for path in sorted(digests))


def entries_below(folder: Path) -> dict[str, os.stat_result]:
    """The status of every entry below a folder, by its relative path with forward slashes; links aren't followed."""
    found: dict[str, os.stat_result] = {}
    for root, folders, files in os.walk(folder, onerror=_raise):
        for name in (*folders, *files):
            path = Path(root, name)
            found[path.relative_to(folder).as_posix()] = path.lstat()
    return found


def _raise(error: OSError) -> None:
    raise error


def unlisted(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """The paths in a bundle's folder that the manifest doesn't list, sorted.

    A folder is one of them if the manifest lists nothing below it; only the folder itself is named then.
    """
    listed = {file["path"] for file in manifest["files"]} | {MANIFEST, SUMS}
    parents = {parent.as_posix() for path in listed for parent in Path(path).parents}
    entries = entries_below(folder)
    extra = [
        path
        for path, status in entries.items()
        if path not in listed and not (path in parents and stat.S_ISDIR(status.st_mode))
    ]
    # Name an unlisted folder, but not its contents.
    return sorted(path for path in extra if not any(parent.as_posix() in extra for parent in Path(path).parents))


def _file_problem(folder: Path, file: Mapping[str, Any]) -> str | None:
    try:
        with open_regular(folder / file["path"]) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != file["bytes"]:
                return f"{file['path']} was changed: it has {size} bytes, and {file['bytes']} were written."
            if hashlib.file_digest(opened, "sha256").hexdigest() != file["sha256"]:
                return f"{file['path']} was changed: its SHA-256 is not the one in {MANIFEST}."
    except (FileNotFoundError, NotADirectoryError):
        return f"{file['path']} is missing."
    except OSError as error:
        return f"{file['path']} can't be read: {error.strerror or error}."
    return None


def sums_problem(folder: Path, manifest: Mapping[str, Any]) -> str | None:
    """A sentence if SHA256SUMS doesn't match the manifest and its file hashes; None if it does."""
    digests = {file["path"]: file["sha256"] for file in manifest["files"]}
    try:
        digests[MANIFEST] = file_digest(folder / MANIFEST)
        written = read_text_bytes(folder / SUMS)
    except FileNotFoundError:
        return f"{SUMS} is missing."
    except OSError as error:
        return f"{Path(error.filename or folder).name} can't be read: {error.strerror or error}."
    if written != sums_text(digests).encode("utf-8"):
        return f"{MANIFEST} or {SUMS} was changed: they don't agree."
    return None


def sums_digest(folder: Path) -> str:
    """The SHA-256 of SHA256SUMS, which represents all files of a bundle.

    Raises:
        OSError: it isn't a regular file, is too large, or can't be read.
    """
    return hashlib.sha256(read_text_bytes(folder / SUMS)).hexdigest()


def _unexpected(folder: Path, expect: str) -> str | None:
    """A sentence if SHA256SUMS doesn't have the expected hash; None if it does."""
    try:
        found = sums_digest(folder)
    except OSError as error:
        return f"{SUMS} can't be read: {error.strerror or error}."
    if found != expect:
        return f"This is not the expected bundle: the SHA-256 of its {SUMS} is {found}, not {expect}."
    return None


def changed_files(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """The files of a bundle that were changed after the bundle was written. Missing files aren't included."""
    there = [file for file in manifest["files"] if os.path.lexists(folder / file["path"])]
    changed = [file["path"] for file in there if _file_problem(folder, file)]
    return [*changed, f"{MANIFEST} or {SUMS}"] if sums_problem(folder, manifest) else changed


def damage_of(folder: Path, manifest: Mapping[str, Any]) -> dict[str, str]:
    """A sentence for each file of a bundle that is missing, changed or not listed, by its path."""
    problems = {file["path"]: problem for file in manifest["files"] if (problem := _file_problem(folder, file))}
    if problem := sums_problem(folder, manifest):
        problems[SUMS] = problem
    try:
        extra = unlisted(folder, manifest)
    except OSError as error:
        return {**problems, ".": f"{folder} can't be read: {error.strerror or error}."}
    return {**problems, **{path: f"{path} is not listed in {MANIFEST}." for path in extra}}


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
    damage = damage_of(folder, manifest)
    if expect is not None and (problem := _unexpected(folder, expect)):
        damage = {SUMS: problem, **damage}
    if damage:
        note = f"no artifact was loaded, because some files are wrong: {listed([*damage])}"
        return VerifyReport(folder, device, tuple(damage.values()), (), (note,))
    golden = manifest["golden"]
    try:
        calls = read_golden(folder, golden, manifest["artifacts"])
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
    parity = _judged(golden, calls, answers, factor, device, settings)
    return ArtifactFigures(artifact["format"], artifact["path"], device, len(calls), parity, placement)


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
