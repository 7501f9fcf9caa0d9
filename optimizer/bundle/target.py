"""Check that a bundle can be written to a folder."""

import os
import stat
from pathlib import Path

from optimize_export.errors import BundleError
from optimize_export.manifest import MANIFEST, changed_files, read_manifest, unlisted
from optimize_export.wording import listed
from optimizer.bundle import exchange
from optimizer.bundle.disk import absolute, speaking


def check_target(target: str | Path, *, force: bool = False) -> None:
    """Check that a bundle can be written at `target`, before any work is done.

    A bundle can be written to a path that doesn't exist and to an empty folder. With `force`, it can also replace a
    bundle, unless that bundle contains files that this program didn't write, or files that were changed since.

    A bundle is never written to another folder, a file, a symbolic link, a mount point or a folder inside another
    bundle. It never replaces the current folder, the home folder or a folder that contains one of them.

    Raises:
        BundleError: a bundle can't be written there; one sentence with the reason.
    """
    folder = absolute(target)
    with speaking(folder, "written"):
        exchange.recover(folder)
        check_standing(folder, folder, force=force)
        _check_surroundings(folder)
        _check_writable(folder)


def check_standing(folder: Path, target: Path, *, force: bool) -> None:
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
