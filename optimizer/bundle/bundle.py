"""Open a bundle.

A bundle is the folder that users deploy:

bundle/
    manifest.json           the contents and the measurements
    SHA256SUMS              the hashes of all other files, for `sha256sum -c`
    README.md               how to run the artifacts without this program
    golden.safetensors      inputs and reference outputs
    model.onnx, …           the artifacts, and any other files of the writer
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from exporters.base import Artifact, Limit, LoadedArtifact, TensorSpec
from exporters.registry import load_artifact
from optimize_export.errors import BundleError
from optimize_export.manifest import MANIFEST, file_problem, read_manifest, sums_digest, sums_problem
from optimize_export.wording import listed
from optimizer.bundle import exchange
from optimizer.bundle.exchange import absolute, bundle_errors
from optimizer.bundle.golden import GoldenCall, read_golden
from optimizer.bundle.report import fragment_of


@dataclass(frozen=True)
class BundleParity:
    """The parity data of a manifest: the overall verdict, and the judgement of each artifact by format."""

    ok: bool
    verdict: str
    reason: str
    artifacts: Mapping[str, Mapping[str, Any] | None]


@dataclass(frozen=True, repr=False)
class Bundle:
    """A bundle on disk. Files are read on demand, each after a check of its hash."""

    path: Path
    manifest: Mapping[str, Any]
    missing: Mapping[str, str] = field(default_factory=dict)
    """The requested formats that the bundle lacks, each with the reason as a sentence."""
    unproven: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    """The entries of files that the export wrote, couldn't prove and removed, in the form of the manifest's
    `artifacts`. Empty for a bundle that was opened from disk."""
    benchmark: Mapping[str, Any] | None = field(default=None, repr=False)
    """The latency and memory of the files, and the recommended one, in the form of the manifest's `benchmark`; None if
    nothing was measured."""
    profile: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The profiles that the export was asked for, as in `profile.json`."""

    def __repr__(self) -> str:
        files = ", ".join(entry["path"] for entry in self.manifest["artifacts"])
        return f"Bundle({str(self.path)!r}, files: {files}, parity: {self.manifest['parity']['verdict']})"

    def _repr_html_(self) -> str:
        return fragment_of(self.manifest)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """The artifacts, in the order of the manifest: path, format, signature and notes of each."""
        return tuple(_artifact(self.path, self.manifest, entry) for entry in self.manifest["artifacts"])

    @property
    def parity(self) -> BundleParity:
        """The verdict over all artifacts (`ok`, `verdict`, `reason`), and the judgement of each by format."""
        overall = self.manifest["parity"]
        figures = {entry["format"]: entry["parity"] for entry in self.manifest["artifacts"]}
        return BundleParity(overall["ok"], overall["verdict"], overall["reason"], figures)

    @property
    def sha256sums(self) -> str:
        """The SHA-256 of SHA256SUMS, for `verify_bundle(expect=…)`.

        Raises:
            BundleError: SHA256SUMS can't be read.
        """
        with bundle_errors(self.path, "read"):
            return sums_digest(self.path)

    def missing_text(self, place: str | Path) -> str:
        """Name the missing formats and those published at `place`, in one sentence with the reasons."""
        lacking = f"{listed(list(self.missing))} {'are' if len(self.missing) > 1 else 'is'} missing from the bundle"
        formats = [entry["format"] for entry in self.manifest["artifacts"]]
        published = f"{listed(formats)} {'are' if len(formats) > 1 else 'is'} published at {place}"
        return f"{lacking}, and {published}: {' '.join(self.missing.values())}"

    def load(self, format: str, device: str = "cpu") -> LoadedArtifact:
        """Load the artifact of a format, to call it with flat tensors.

        The result takes one torch tensor for each input of the file, and returns a tuple with one for each output, in
        the file's order. Shapes and dtypes are those of `inputs` and `outputs` of the artifact, in `artifacts`. Inputs
        may be on any device; outputs are on `device`.

        The file is a program. Its hash is checked before it is loaded, but only `verify_bundle(expect=…)` shows whose it
        is. Verify a bundle from somebody else first.

        Raises:
            BundleError: the bundle has no artifact of the format, or the manifest or a file of the artifact was changed.
        """
        for entry in self.manifest["artifacts"]:
            if entry["format"] == format:
                return _loaded(self.path, self.manifest, entry, self.path / entry["path"], device)
        formats = ", ".join(entry["format"] for entry in self.manifest["artifacts"])
        raise BundleError(f"{self.path} has no {format!r} artifact; it has {formats}.")

    def golden(self) -> tuple[GoldenCall, ...]:
        """Read the golden inputs and reference outputs.

        The tensors of a call are on the CPU, by name. Their dtypes are those of the files; their shapes are those of the
        files, with `batch_size` and `sizes` for the dynamic dims.

        Raises:
            BundleError: the manifest or the golden data were changed, or can't be read.
        """
        if problem := sums_problem(self.path, self.manifest):
            raise BundleError(f"{self.path} is damaged: {problem}")
        return read_golden(self.path, self.manifest)


def _loaded(
    folder: Path, manifest: Mapping[str, Any], entry: Mapping[str, Any], path: Path, device: str
) -> LoadedArtifact:
    """Load an artifact after its files were checked by their hashes."""
    own = (file_problem(folder, file) for file in manifest["files"] if file["path"] in entry["files"])
    if problem := sums_problem(folder, manifest) or next(filter(None, own), None):
        raise BundleError(f"{folder} is damaged: {problem}")
    return load_artifact(entry["format"], path, device)


def _artifact(folder: Path, manifest: Mapping[str, Any], entry: Mapping[str, Any]) -> Artifact:
    def specs(tensors: Sequence[Mapping[str, Any]]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(tensor["name"], tensor["dtype"], tuple(tensor["shape"])) for tensor in tensors)

    return Artifact(
        format=entry["format"],
        path=folder / entry["path"],
        files=tuple(folder / path for path in entry["files"]),
        route=entry["route"],
        refused=tuple((refused["route"], refused["reason"]) for refused in entry["refused"]),
        inputs=specs(entry["inputs"]),
        outputs=specs(entry["outputs"]),
        notes=tuple(entry["notes"]),
        limits=tuple(Limit(**limit) for limit in entry.get("limits", ())),
        loader=partial(_loaded, folder, manifest, entry),
        opset=entry.get("opset"),
        metadata=entry.get("metadata", {}),
    )


def artifact_entry(
    artifact: Artifact,
    folder: Path,
    parity: Mapping[str, Any] | None,
    measurement: Mapping[str, Any] | None = None,
    placement: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Build the entry in the manifest's `artifacts` of a file below `folder`; `write_bundle` adds its hash and size.

    Args:
        parity, measurement: the judgement, and the measurement behind it, which `rejudge_bundle` needs.
        placement: the number of nodes that ran on each provider during the measurement.
    """

    def specs(tensors: Sequence[TensorSpec]) -> list[dict[str, Any]]:
        return [{**asdict(tensor), "shape": list(tensor.shape)} for tensor in tensors]

    entry = {
        "format": artifact.format,
        "path": artifact.path.relative_to(folder).as_posix(),
        "files": [path.relative_to(folder).as_posix() for path in artifact.files],
        "route": artifact.route,
        "opset": artifact.opset,
        "metadata": dict(artifact.metadata),
        "refused": [{"route": route, "reason": reason} for route, reason in artifact.refused],
        "inputs": specs(artifact.inputs),
        "outputs": specs(artifact.outputs),
        "notes": list(artifact.notes),
        "placement": None if placement is None else dict(placement),
        "parity": parity,
        "measurement": measurement,
    }
    if artifact.limits:
        entry["limits"] = [asdict(limit) for limit in artifact.limits]
    return entry


def open_bundle(path: str | Path) -> Bundle:
    """Open a bundle, given its folder or its `manifest.json`, after an exchange that a crash interrupted is completed.

    Raises:
        BundleError: there is no bundle, or its manifest is broken or has another schema version.
    """
    folder = absolute(path)
    if folder.name == MANIFEST and not folder.is_dir():
        folder = folder.parent
    with bundle_errors(folder, "opened"):
        exchange.recover(folder)
    manifest = read_manifest(folder)
    return Bundle(folder, manifest, manifest.get("missing", {}), benchmark=manifest.get("benchmark"))
