"""Write a bundle atomically, open it, and verify it without the original model.

A bundle is the folder that users deploy:

bundle/
    manifest.json           the contents and the measurements
    SHA256SUMS              the hashes of all other files, for `sha256sum -c`
    README.md               how to run the artifacts without this program
    golden.safetensors      inputs and reference outputs
    model.onnx, …           the artifacts, and any other files of the writer
"""

import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from exporters.base import Artifact, LoadedArtifact, TensorSpec
from exporters.errors import ExporterError
from exporters.registry import load_artifact
from optimizer.bundle import exchange
from optimizer.bundle.golden import GoldenCall, read_golden, write_golden
from optimizer.bundle.manifest import (
    MANIFEST,
    README,
    SCHEMA_NAME,
    SCHEMA_VERSION,
    SUMS,
    check_manifest,
    creation_time,
    describe_device,
    describe_environment,
    describe_program,
    is_inside_path,
    local_roots,
    plain,
    read_manifest,
    to_json_text,
    usage_text,
    weights_hash,
    without_local_paths,
)
from optimizer.bundle.rejudge import RejudgeReport, rejudge_contents
from optimizer.bundle.verify import (
    VerifyReport,
    changed_files,
    entries_below,
    file_digest,
    sums_digest,
    sums_text,
    unlisted,
    verify_contents,
)
from optimizer.errors import BundleError, DeviceError, OptimizeExportError, UsageError
from optimizer.options import is_utf8, parse_digest
from optimizer.parity import Tolerance
from optimizer.wording import listed

__all__ = [
    "Bundle",
    "BundleParity",
    "GoldenCall",
    "RejudgeReport",
    "VerifyReport",
    "artifact_entry",
    "check_target",
    "describe_device",
    "open_bundle",
    "read_golden",
    "rejudge_bundle",
    "usage_text",
    "verify_bundle",
    "weights_hash",
    "write_bundle",
    "write_golden",
]

# The order of the manifest's fields. Other fields that `fill` returns come after these; `files` is always last.
_ORDER = (
    "schema",
    "created",
    "program",
    "environment",
    "device",
    "mode",
    "seed",
    "model",
    "input_structure",
    "output_structure",
    "example_sizes",
    "artifacts",
    "missing",
    "parity",
    "golden",
    "coverage",
    "passes",
    "notes",
)
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


@dataclass(frozen=True)
class BundleParity:
    """The parity data of a manifest: the overall verdict, and the judgement of each artifact by format."""

    ok: bool
    verdict: str
    reason: str
    artifacts: Mapping[str, Mapping[str, Any] | None]


@dataclass(frozen=True, repr=False)
class Bundle:
    """A bundle on disk. Files are read on demand; only `verify_bundle` verifies them.

    Attributes:
        missing: the requested formats that the bundle lacks, each with the reason as a sentence.
        unproven: the entries of files that the export wrote, couldn't prove and removed, in the form of the manifest's
            `artifacts`. Empty for a bundle that was opened from disk.
    """

    path: Path
    manifest: Mapping[str, Any]
    missing: Mapping[str, str] = field(default_factory=dict)
    unproven: Sequence[Mapping[str, Any]] = field(default=(), repr=False)

    def __repr__(self) -> str:
        files = ", ".join(entry["path"] for entry in self.manifest["artifacts"])
        return f"Bundle({str(self.path)!r}, files: {files}, parity: {self.manifest['parity']['verdict']})"

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        return tuple(_artifact(self.path, entry) for entry in self.manifest["artifacts"])

    @property
    def parity(self) -> BundleParity:
        overall = self.manifest["parity"]
        figures = {entry["format"]: entry["parity"] for entry in self.manifest["artifacts"]}
        return BundleParity(overall["ok"], overall["verdict"], overall["reason"], figures)

    @property
    def sha256sums(self) -> str:
        """The SHA-256 of SHA256SUMS, for `verify_bundle(expect=…)`.

        Raises:
            BundleError: SHA256SUMS can't be read.
        """
        with _speaking(self.path, "read"):
            return sums_digest(self.path)

    def what_is_missing(self, place: str | Path) -> str:
        """Name the missing formats and those published at `place`, in one sentence with the reasons."""
        lacking = f"{listed(list(self.missing))} {'are' if len(self.missing) > 1 else 'is'} missing from the bundle"
        formats = [entry["format"] for entry in self.manifest["artifacts"]]
        published = f"{listed(formats)} {'are' if len(formats) > 1 else 'is'} published at {place}"
        return f"{lacking}, and {published}: {' '.join(self.missing.values())}"

    def load(self, format: str, device: str = "cpu") -> LoadedArtifact:
        """Load the artifact of a format; the result is called with flat tensors.

        The file is a program, and its hash isn't checked here. Verify a bundle from somebody else first.

        Raises:
            BundleError: the bundle has no artifact of the format.
        """
        for entry in self.manifest["artifacts"]:
            if entry["format"] == format:
                return load_artifact(format, self.path / entry["path"], device)
        formats = ", ".join(entry["format"] for entry in self.manifest["artifacts"])
        raise BundleError(f"{self.path} has no {format!r} artifact; it has {formats}.")

    def golden(self) -> tuple[GoldenCall, ...]:
        """Read the golden inputs and reference outputs.

        Raises:
            BundleError: the golden data can't be read.
        """
        return read_golden(self.path, self.manifest["golden"])


def _artifact(folder: Path, entry: Mapping[str, Any]) -> Artifact:
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
        loader=partial(load_artifact, entry["format"]),
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
    """Build an entry of the manifest's `artifacts`; `write_bundle` adds the hashes and sizes.

    Args:
        artifact: was written below `folder`.
        parity: the judgement.
        measurement: the measurement behind the judgement, which `rejudge_bundle` needs.
        placement: the number of nodes that ran on each provider during the measurement.
    """

    def specs(tensors: Sequence[TensorSpec]) -> list[dict[str, Any]]:
        return [{"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape)} for tensor in tensors]

    return {
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


# -------------------------------------------------------------------------------------------------- opening and judging


def open_bundle(path: str | Path) -> Bundle:
    """Open a bundle, given its folder or its `manifest.json`.

    If a crash interrupted the exchange of the bundle, this first completes the exchange.

    Raises:
        BundleError: there is no bundle, or its manifest is broken or has another schema version.
    """
    folder = _absolute(path)
    if folder.name == MANIFEST and not folder.is_dir():
        folder = folder.parent
    with _speaking(folder, "opened"):
        exchange.recover(folder)
    if not os.path.lexists(folder):
        raise BundleError(f"There is no bundle at {folder}: no such folder.")
    if not folder.is_dir():
        raise BundleError(f"{folder} is not a bundle: it is a file, and a bundle is a folder with a {MANIFEST}.")
    manifest = read_manifest(folder)
    return Bundle(folder, manifest, manifest.get("missing", {}))


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

    Args:
        device: "cpu", "cuda" or "auto" (cuda if there is one).
        require_gpu: refuse to verify on the CPU.
        expect: the SHA-256 that the bundle's SHA256SUMS must have, as 64 hexadecimal digits. The builder reads it from
            `Bundle.sha256sums`. Without it the hashes detect accidents, not attacks.
        run: False checks the hashes and the golden data, and loads no artifact.

    Raises:
        BundleError: there is no readable manifest.
        DeviceError: the device is unknown or missing, or a GPU is required and there is none.
        UsageError: `expect` isn't a SHA-256, or a device is given together with `run=False`.
    """
    if not run and (require_gpu or device != "cpu"):
        raise UsageError("run=False runs nothing: leave out device and require_gpu.")
    expected = None if expect is None else parse_digest("expect", expect)
    bundle = open_bundle(path)
    where = _device(device, require_gpu) if run else None
    return verify_contents(bundle.path, bundle.manifest, where, load_artifact, expect=expected)


def rejudge_bundle(
    path: str | Path, *, atol: Tolerance = None, rtol: Tolerance = None, factor: float | None = None
) -> RejudgeReport:
    """Judge the stored measurements of a bundle again. This runs, loads and changes nothing.

    Without arguments, this repeats the judgement of the export with the tolerances of the export. Any argument discards
    those tolerances.

    Args:
        atol, rtol: tolerances that replace the noise: a number, or a dict by output name. The names are those in the
            files, or those in the model if they differ.
        factor: the allowed error of an output in units of its noise. The default is 4, or more if the original ran on
            another device.

    Returns:
        A report with the fields of `verify_bundle`'s report.

    Raises:
        BundleError: there is no readable manifest, or the program version that wrote the bundle kept no measurements.
        UsageError: a tolerance is negative or names an unknown output, or the factor isn't a number above 0.
    """
    bundle = open_bundle(path)
    return rejudge_contents(bundle.path, bundle.manifest, atol=atol, rtol=rtol, factor=factor)


def _device(device: str, require_gpu: bool) -> str:
    if device not in {"cpu", "cuda", "auto"}:
        raise DeviceError(f"A bundle can't be verified on {device!r}: use cpu, cuda or auto.")
    if require_gpu and device == "cpu":
        raise DeviceError("A GPU is required, but the requested device is cpu: use cuda or auto.")
    if torch.cuda.is_available():
        return "cpu" if device == "cpu" else "cuda"
    if require_gpu or device == "cuda":
        raise DeviceError(
            "A GPU is required, but torch finds none here: verify on the CPU, or on a machine with a GPU."
        )
    return "cpu"


# -------------------------------------------------------------------------------------------------- checking the target


def check_target(target: str | Path, *, force: bool = False) -> None:
    """Check that a bundle can be written at `target`, before any work is done.

    A bundle can be written to a path that doesn't exist and to an empty folder. With `force`, it can also replace a
    bundle, unless that bundle contains files that this program didn't write, or files that were changed since.

    A bundle is never written to another folder, a file, a symbolic link, a mount point or a folder inside another
    bundle. It never replaces the current folder, the home folder or a folder that contains one of them.

    Raises:
        BundleError: a bundle can't be written there; one sentence with the reason.
    """
    folder = _absolute(target)
    with _speaking(folder, "written"):
        exchange.recover(folder)
        _check_standing(folder, folder, force=force)
        _check_surroundings(folder)
        _check_writable(folder)


def _absolute(path: str | Path) -> Path:
    """Make a path absolute. If its last part is a symbolic link, the link isn't followed.

    Raises:
        BundleError: the path contains a null character, can't be resolved or isn't UTF-8.
    """
    given = Path(path)
    if "\0" in str(given):
        raise BundleError(f"{str(given)!r} is not a valid path: it contains a null character.")
    try:
        path = given.resolve() if given.name in {"", ".."} else given.parent.resolve() / given.name
    # Python before 3.13 raises RuntimeError for a loop of links.
    except (OSError, RuntimeError) as error:
        raise BundleError(f"{given} can't be resolved: {error}.") from error
    if not is_utf8(str(path)):
        raise BundleError(
            f"{path} isn't UTF-8, which the libraries that write and read a bundle need: use another path."
        )
    return path


def _check_standing(folder: Path, target: Path, *, force: bool) -> None:
    """Check that `folder` may be replaced if it exists.

    Raises:
        BundleError: `folder` must not be replaced. The message names `target`.
    """
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
        raise BundleError(f"{target} is not replaced, because it can't be recognised as a bundle ({error})") from error
    if not force:
        raise BundleError(
            f"{target} is already a bundle: replace it with --force (force=True in Python), or choose another folder."
        )
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
    if not (folder / MANIFEST).is_file():
        return False
    try:
        read_manifest(folder)
    except BundleError:
        return False
    return True


def _check_writable(target: Path) -> None:
    standing = next(parent for parent in target.parents if os.path.lexists(parent))
    if not standing.is_dir():
        raise BundleError(f"{target} can't be written, because {standing} is not a folder: choose another path.")
    limit = os.pathconf(standing, "PC_NAME_MAX") if hasattr(os, "pathconf") else 255
    if too_long := [part for part in target.parts if len(os.fsencode(part)) > limit]:
        raise BundleError(f"The name {too_long[0][:40]}… is too long: a name can have at most {limit} bytes.")
    probe = standing / exchange.staging_name(target)
    probe.mkdir()
    probe.rmdir()


# -------------------------------------------------------------------------------------------------------------- writing


def write_bundle(target: str | Path, fill: Callable[[Path], Mapping[str, Any]], *, force: bool = False) -> Bundle:
    """Write a bundle atomically: `target` is either unchanged or the complete new bundle.

    If anything raises, the staging folder and the parent folders created for it are removed.

    Args:
        target: the folder of the bundle. `check_target` runs before `fill`; its check of an existing bundle runs again
            before and after the exchange.
        fill: called with an empty staging folder on the same file system. It writes the files there and returns the
            manifest's body. This function adds the schema, creation time, program, environment, and the hashes and
            sizes of the files. `fill` may write any file except `manifest.json` and `SHA256SUMS`. If it writes no
            `README.md`, this function does. Exceptions of `fill` reach the caller, except those of a failing disk.
        force: as for `check_target`.

    Raises:
        BundleError: the target must not be replaced, or the disk fails.
    """
    folder = _absolute(target)
    check_target(folder, force=force)
    with _speaking(folder, "written"):
        exchange.remove_stale(folder)
        with exchange.staged(folder) as staging:
            with _disk_failures(folder, staging.folder):
                _seal(staging.folder, fill(staging.folder))
            try:
                exchange.publish(staging, lambda standing: _check_standing(standing, folder, force=force))
            except exchange.Occupied as error:
                raise BundleError(f"The bundle was not written: {error}") from error
    return open_bundle(folder)


def _seal(folder: Path, body: Mapping[str, Any]) -> None:
    """Add the manifest, the hashes and, if it is missing, the README to a filled folder."""
    given = without_local_paths(plain(body), local_roots(folder))
    manifest = {
        **given,
        "schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION},
        "created": creation_time(),
        "program": describe_program(),
        "environment": describe_environment(),
    }
    if not (folder / README).exists():
        (folder / README).write_text(usage_text(manifest), encoding="utf-8", newline="\n")
    manifest["files"] = files = _hashed_files(folder)
    manifest["artifacts"] = [_with_hashes(artifact, files) for artifact in manifest["artifacts"]]
    first = [name for name in _ORDER if name in manifest]
    manifest = {
        name: manifest[name] for name in (*first, *(n for n in manifest if n not in (*first, "files")), "files")
    }
    check_manifest(manifest)
    (folder / MANIFEST).write_text(to_json_text(manifest), encoding="utf-8", newline="\n")
    digests = {file["path"]: file["sha256"] for file in files} | {MANIFEST: file_digest(folder / MANIFEST)}
    (folder / SUMS).write_text(sums_text(digests), encoding="utf-8", newline="\n")
    _share(folder)


def _hashed_files(folder: Path) -> list[dict[str, Any]]:
    files = []
    for path, status in sorted(entries_below(folder).items()):
        if stat.S_ISDIR(status.st_mode):
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


def _share(folder: Path) -> None:
    """Give every file the permissions of the user's umask, because some writers create owner-only files."""
    if os.name != "posix":
        return
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for path, status in entries_below(folder).items():
        if stat.S_ISREG(status.st_mode):
            (folder / path).chmod(mode)


# --------------------------------------------------------------------------------------------------------------- errors


@contextmanager
def _speaking(target: Path, done: str) -> Iterator[None]:
    """Turn an OSError into a one-sentence BundleError."""
    try:
        yield
    except OSError as error:
        raise BundleError(f"The bundle {target} can't be {done}: {_cause(error)}.") from error


def _cause(error: OSError) -> str:
    where = f" ({error.filename})" if isinstance(error.filename, str) and error.filename else ""
    known = {
        errno.EACCES: "this user may not write there; choose another folder or change its permissions",
        errno.EPERM: "the system doesn't allow it; choose another folder",
        errno.EROFS: "the file system is read-only; choose another folder",
        errno.ENAMETOOLONG: "the path is too long; choose a shorter one",
        errno.ENOTDIR: "a part of the path is a file; choose another folder",
        errno.EBUSY: "the folder is in use by the system; choose another one",
        errno.ENOSPC: "the disk is full; free some space or choose another folder",
        errno.EDQUOT: "the disk quota is used up; free some space or choose another folder",
        errno.EFBIG: "a file is larger than the system allows here; raise the limit or choose another folder",
    }
    return known.get(error.errno or 0, error.strerror or str(error)) + where


@contextmanager
def _disk_failures(target: Path, folder: Path) -> Iterator[None]:
    """Turn the errors that a failing disk causes in the writers into a one-sentence BundleError.

    The libraries that write artifacts wrap the system's error in their own error types. This searches the whole chain
    of causes for the error's number or text. The message gives file sizes, so it is built before the files are removed.
    """
    try:
        yield
    except Exception as error:
        code = _disk_error(error)
        if code == errno.ENOSPC:
            raise BundleError(_disk_full(target, folder)) from error
        if code is not None:
            raise BundleError(
                f"The bundle {target} can't be written: {_cause(OSError(code, os.strerror(code)))}."
            ) from error
        if isinstance(error, SafetensorError):
            raise BundleError(f"The bundle {target} can't be written: {error}.") from error
        raise


def _disk_error(error: BaseException) -> int | None:
    """The errno of the disk error that caused an exception; None if a disk error isn't the cause."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, OSError) and link.errno in _DISK_ERRORS:
            return link.errno
        found = None if isinstance(link, BundleError) else re.search(r"\(os error (\d+)\)", str(link))
        if found and int(found[1]) in _DISK_ERRORS:
            return int(found[1])
        if isinstance(link, OptimizeExportError | ExporterError | RuntimeError) and (code := _named_error(str(link))):
            return code
        link = link.__cause__ or link.__context__
    return None


def _named_error(text: str) -> int | None:
    return next((code for code in _DISK_ERRORS if os.strerror(code) in text), None)


def _disk_full(target: Path, folder: Path) -> str:
    written = sum(status.st_size for status in entries_below(folder).values() if stat.S_ISREG(status.st_mode))
    free = shutil.disk_usage(folder).free
    return (
        f"The bundle {target} can't be written: the disk is full ({_size(free)} are free after writing "
        f"{_size(written)}, which is too little); free some space or choose another folder."
    )


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
