"""Open a bundle, and write one atomically, to a folder that may be written.

A bundle is the folder that users deploy:

bundle/
    manifest.json           the contents and the measurements
    SHA256SUMS              the hashes of all other files, for `sha256sum -c`
    README.md               the model card: how to run the artifacts, with or without this program
    golden.safetensors      inputs and reference outputs
    model.onnx, …           the artifacts, and any other files of the writer
"""

import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from exporters.base import Artifact, Limit, LoadedArtifact, TensorSpec
from exporters.registry import load_artifact
from optimize_export.errors import BundleError
from optimize_export.manifest import (
    FIELDS,
    MANIFEST,
    README,
    SCHEMA_NAME,
    SCHEMA_VERSION,
    SUMS,
    changed_files,
    check_manifest,
    describe_environment,
    describe_program,
    entries_below,
    file_digest,
    is_inside_path,
    local_roots,
    plain,
    read_manifest,
    refuse_changed,
    sums_digest,
    sums_problem,
    sums_text,
    to_json_text,
    unlisted,
    without_local_paths,
)
from optimize_export.wording import listed
from optimizer.bundle import exchange
from optimizer.bundle.exchange import absolute, bundle_errors
from optimizer.bundle.golden import GoldenCall, read_golden
from optimizer.bundle.manifest import creation_time, usage_text
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
    if problem := sums_problem(folder, manifest):
        raise BundleError(f"{folder} is damaged: {problem}")
    refuse_changed(folder, manifest, entry)
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


# ------------------------------------------------------------------------------------------------------------- writing


def write_bundle(
    target: str | Path,
    fill: Callable[[Path], Mapping[str, Any]],
    *,
    report: Callable[[Path, Mapping[str, Any]], None] | None = None,
    force: bool = False,
) -> Bundle:
    """Write a bundle atomically: `target` is either unchanged or the complete new bundle.

    Args:
        target: the folder of the bundle. `check_target` runs before `fill`; its check of an existing bundle runs again
            before and after the exchange.
        fill: called with an empty staging folder on the same file system. It writes the files there and returns the
            manifest's body. This function adds the schema, creation time, program, environment, and the hashes and
            sizes of the files. `fill` may write any file except `manifest.json` and `SHA256SUMS`. If it writes no
            `README.md`, this function does. Exceptions of `fill` reach the caller, except those of a failing disk.
        report: called with the folder and the finished manifest, without its `files`. It writes further files.

    Raises:
        BundleError: the target must not be replaced, or the disk fails.
    """
    folder = absolute(target)
    with new_folder(folder, force=force) as staging:
        _complete(staging, fill(staging), report)
    return open_bundle(folder)


@contextmanager
def new_folder(target: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield an empty staging folder on the same file system, and move it to `target` at the end of the block.

    If the block raises, the staging folder and the parent folders created for it are removed.
    """
    check_target(target, force=force)
    with (
        bundle_errors(target, "written"),
        exchange.replacement(target, lambda folder: _check_replaceable(folder, target, force=force)) as folder,
    ):
        yield folder


def _complete(
    folder: Path, body: Mapping[str, Any], report: Callable[[Path, Mapping[str, Any]], None] | None = None
) -> None:
    """Add the manifest, the hashes, the report and, if it is missing, the README to a filled folder."""
    given = without_local_paths(plain(body), local_roots(folder))
    manifest = {
        **given,
        "schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION},
        "created": creation_time(),
        "program": describe_program(),
        "environment": describe_environment(),
    }
    files = _hashed_files(folder)
    manifest["artifacts"] = [_with_hashes(artifact, files) for artifact in manifest["artifacts"]]
    if not (folder / README).exists():
        (folder / README).write_text(usage_text(manifest), encoding="utf-8", newline="\n")
    if report is not None:
        report(folder, manifest)
    files += _hashed_files(folder, known={file["path"] for file in files})
    files.sort(key=lambda file: str(file["path"]))
    _write_manifest(folder, {**manifest, "files": files})


def _write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest and the hashes of a folder that has all other files."""
    first = [name for name in FIELDS[:-1] if name in manifest]
    ordered = {name: manifest[name] for name in (*first, *(n for n in manifest if n not in (*first, "files")), "files")}
    check_manifest(ordered)
    (folder / MANIFEST).write_text(to_json_text(ordered), encoding="utf-8", newline="\n")
    digests = {file["path"]: file["sha256"] for file in manifest["files"]} | {MANIFEST: file_digest(folder / MANIFEST)}
    (folder / SUMS).write_text(sums_text(digests), encoding="utf-8", newline="\n")
    _set_permissions(folder)


def keep_in_manifest(path: Path, fields: Mapping[str, Any]) -> Bundle:
    """Set fields of a bundle's manifest. The bundle is exchanged in one step, and its other files stay as they are.

    Raises:
        BundleError: the bundle must not be replaced, for example because a file was changed; or the disk fails.
    """
    manifest = open_bundle(path).manifest
    with new_folder(path, force=True) as folder:
        for file in manifest["files"]:
            place = folder / file["path"]
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path / file["path"], place)
            except OSError:  # a file system without hard links
                shutil.copyfile(path / file["path"], place)
        _write_manifest(folder, {**manifest, **fields})
    return open_bundle(path)


def _hashed_files(folder: Path, known: Collection[str] = ()) -> list[dict[str, Any]]:
    files = []
    for path, status in sorted(entries_below(folder).items()):
        if path in known or stat.S_ISDIR(status.st_mode):
            continue
        if not stat.S_ISREG(status.st_mode) or not is_inside_path(path) or path in {MANIFEST, SUMS}:
            raise BundleError(
                f"{path} can't be a file of a bundle: it isn't a regular file, or its name isn't allowed."
            )
        files.append({"path": path, "sha256": file_digest(folder / path), "bytes": status.st_size})
    return files


def _with_hashes(artifact: Mapping[str, Any], files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sizes = {file["path"]: file["bytes"] for file in files}
    digests = {file["path"]: file["sha256"] for file in files}
    missing = [path for path in artifact["files"] if path not in sizes]
    if missing or artifact["path"] not in digests:
        raise BundleError(
            f"The artifact {artifact['format']} names {(missing or [artifact['path']])[0]}, which wasn't written."
        )
    added = {"sha256": digests[artifact["path"]], "bytes": sum(sizes[path] for path in artifact["files"])}
    return {**{name: artifact[name] for name in ("format", "path", "files")}, **added, **artifact}


def _set_permissions(folder: Path) -> None:
    """Give every file the permissions of the user's umask, because some writers create owner-only files."""
    if os.name != "posix":
        return
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for path, status in entries_below(folder).items():
        if stat.S_ISREG(status.st_mode):
            (folder / path).chmod(mode)


# --------------------------------------------------------------------------------------------------------- the target


def check_target(target: str | Path, *, force: bool = False) -> None:
    """Check that a bundle can be written at `target`, before any work is done.

    A bundle can be written to a path that doesn't exist and to an empty folder. With `force`, it can also replace a
    bundle, unless that bundle contains files that this program didn't write, or files that were changed since.

    A bundle is never written to another folder, a file, a symbolic link, a mount point or a folder inside another
    bundle. It never replaces the current folder, the home folder or a folder that contains one of them.
    """
    folder = absolute(target)
    with bundle_errors(folder, "written"):
        exchange.recover(folder)
        _check_replaceable(folder, folder, force=force)
        _check_surroundings(folder)
        _check_writable(folder)


def _check_replaceable(folder: Path, target: Path, *, force: bool) -> None:
    """Raise `BundleError`, which names `target`, if `folder` exists and must not be replaced."""
    try:
        status = os.lstat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISLNK(status.st_mode):
        raise BundleError(f"{target} is a symbolic link, which is not replaced: use the folder itself.")
    if not stat.S_ISDIR(status.st_mode):
        raise BundleError(f"{target} is a file, which is not replaced: choose a folder.")
    if os.path.ismount(folder):
        raise BundleError(f"{target} is a mount point, which can't be replaced: choose a folder inside it.")
    if exchange.is_empty_folder(folder):
        return
    if not (folder / MANIFEST).is_file():
        raise BundleError(f"{target} is a folder with other contents, which is not replaced: choose another folder.")
    try:
        manifest = read_manifest(folder)
    except BundleError as error:
        raise BundleError(
            f"{target} is not replaced, because it can't be recognised as a bundle ({error}) Delete the folder, or choose "
            "another one."
        ) from error
    if not force:
        raise BundleError(f"{target} is already a bundle: replace it with `force=True`, or choose another folder.")
    if extra := unlisted(folder, manifest):
        raise BundleError(
            f"{target} contains files that this program didn't write ({listed(extra)}): move them elsewhere first."
        )
    if changed := changed_files(folder, manifest):
        raise BundleError(
            f"{target} contains files that were changed since this program wrote them ({listed(changed)}): move "
            "them elsewhere, or delete the folder, first."
        )


def _check_surroundings(target: Path) -> None:
    home = Path(os.path.expanduser("~")).resolve()
    for kept, what in ((Path.cwd(), "the current folder"), (home, "the home folder")):
        if target == kept or target in kept.parents:
            raise BundleError(f"{target} is or contains {what}, which is not replaced: choose a separate folder.")
    for parent in target.parents:
        if _is_bundle(parent):
            raise BundleError(f"{target} is inside the bundle {parent}: choose a folder outside it.")


def _is_bundle(folder: Path) -> bool:
    with suppress(BundleError):
        return bool(read_manifest(folder))
    return False


def _check_writable(target: Path) -> None:
    existing = next(parent for parent in target.parents if os.path.lexists(parent))
    if not existing.is_dir():
        raise BundleError(f"{target} can't be written, because {existing} is not a folder: choose another path.")
    probe = existing / exchange.staging_name(target)
    probe.mkdir()
    probe.rmdir()
