"""Change the manifest of a bundle, with the hashes that fit it, as a program or an attacker would."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optimize_export.manifest import MANIFEST, SUMS, file_digest, sums_text


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, and write it with SHA256SUMS."""
    path = folder / MANIFEST
    manifest = json.loads(path.read_text(encoding="utf-8"))
    change(manifest)
    path.write_text(json.dumps(manifest), encoding="utf-8")
    digests = {file["path"]: file["sha256"] for file in manifest["files"]}
    (folder / SUMS).write_text(sums_text({**digests, MANIFEST: file_digest(path)}), encoding="utf-8")


def seal(folder: Path, change: Callable[[dict[str, Any]], object] = lambda manifest: None) -> None:
    """Change the manifest, and compute the hashes of all files anew."""

    def sealed(manifest: dict[str, Any]) -> None:
        change(manifest)
        for file in manifest["files"]:
            path = folder / file["path"]
            file.update(sha256=file_digest(path), bytes=path.stat().st_size)
        digests = {file["path"]: file["sha256"] for file in manifest["files"]}
        for artifact in manifest["artifacts"]:
            artifact["sha256"] = digests[artifact["path"]]

    edit_manifest(folder, sealed)
