"""Push a bundle to the Hugging Face Hub, in one commit with its files as they are, so that a download can be verified."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optimize_export.errors import BundleError, UsageError
from optimize_export.manifest import MANIFEST, SUMS, damage_of, read_manifest
from optimize_export.wording import listed, one_line
from optimizer.bundle import Bundle, open_bundle

_ATTRIBUTES = ".gitattributes"


@dataclass(frozen=True)
class Pushed:
    """Where a bundle is on the Hub."""

    repo_id: str
    """The repository, with its owner."""
    commit_url: str
    """The page of the commit."""
    revision: str
    """The commit, for `snapshot_download(repo_id, revision=…)`."""
    sha256sums: str
    """The SHA-256 of SHA256SUMS, for `load(…, expect=…)` and `verify --expect`."""

    def to_json(self) -> dict[str, str]:
        """Convert to plain data."""
        return asdict(self)


def push(bundle: str | Path | Bundle, repo_id: str, *, private: bool = True, revision: str | None = None) -> Pushed:
    """Push a bundle to a repository of the Hugging Face Hub that has nothing else.

    The repository gets the files of the bundle, and those of the bundle that was there before are removed. Its page shows
    README.md, the model card. huggingface_hub finds the token: that of `hf auth login`, or HF_TOKEN.

        run = load(snapshot_download(pushed.repo_id, revision=pushed.revision), expect=pushed.sha256sums)

    Args:
        repo_id: "user/name"; "name" for one of your own. A missing one is created.
        private: whether a new repository is private.
        revision: the branch, which is created if it is missing; by default the main one.

    Raises:
        BundleError: the bundle can't be read or is damaged, the repository has other files, or the Hub refuses or can't be
            reached.
        UsageError: huggingface_hub isn't installed, there is no token, or the name is invalid.
    """
    opened = open_bundle(Path(bundle))
    folder, manifest = opened.path, opened.manifest
    if damage := damage_of(folder, manifest):
        raise BundleError(f"{folder} is damaged, so it isn't pushed: {' '.join(damage.values())}")
    try:
        import huggingface_hub as hub
        from huggingface_hub.utils import validate_repo_id
    except ModuleNotFoundError as error:
        raise UsageError(
            "push needs the package huggingface_hub, which isn't installed: pip install 'optimize-export[hub]'."
        ) from error
    paths = [*(file["path"] for file in manifest["files"]), MANIFEST, SUMS]
    with _errors_of_hub(repo_id):
        validate_repo_id(repo_id)
        token = hub.get_token()
        if token is None:
            raise UsageError("The Hugging Face Hub needs a token: run `hf auth login`, or set HF_TOKEN.")
        if not token.isascii():
            raise UsageError("The token of the Hugging Face Hub has characters that no token has: copy it again.")
        api = hub.HfApi()
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        old = _replaced(api, repo_id, revision, {*api.list_repo_files(repo_id, revision=revision)} - {*paths})
        operations: list[Any] = [hub.CommitOperationAdd(path, folder / path) for path in paths]
        operations += [hub.CommitOperationDelete(path, is_folder=False) for path in old]
        commit = api.create_commit(
            repo_id, operations, commit_message=f"Push the bundle of {manifest['model']['class']}", revision=revision
        )
    return Pushed(repo_id, commit.commit_url, commit.oid, opened.sha256sums)


def _replaced(api: Any, repo_id: str, revision: str | None, others: set[str]) -> list[str]:
    """Those of the other files in a repository that an earlier bundle had; BundleError if there are more."""
    others -= {_ATTRIBUTES}
    known: set[str] = set()
    if others and api.file_exists(repo_id, MANIFEST, revision=revision):
        earlier = Path(api.hf_hub_download(repo_id, MANIFEST, revision=revision))
        # A manifest that can't be read lists nothing.
        with suppress(BundleError):
            known = {file["path"] for file in read_manifest(earlier.parent)["files"]}
    if more := sorted(others - known):
        raise BundleError(
            f"{repo_id} has files of no bundle ({listed(more)}), so a download couldn't be verified: push to a "
            "repository of its own, or delete them there."
        )
    return sorted(others)


@contextmanager
def _errors_of_hub(repo_id: str) -> Iterator[None]:
    """Convert the errors of huggingface_hub to one sentence. None of them contains the token."""
    # HTTPError is the base of its HTTP client's errors; the client depends on its version.
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    try:
        yield
    except HFValidationError as error:
        raise UsageError(
            f"{repo_id!r} can't be the name of a repository: use user/name, such as jane/resnet18."
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            reason = "the token has no write access: use one that has (`hf auth login`, or HF_TOKEN)"
        else:
            reason = one_line(error.server_message or error).rstrip(".")
        raise BundleError(f"The Hugging Face Hub refuses the push to {repo_id} ({status}): {reason}.") from error
    except (HTTPError, OSError) as error:
        raise BundleError(f"The Hugging Face Hub can't be reached: {one_line(error).rstrip('.')}.") from error
    except ValueError as error:
        # huggingface_hub checks the front matter itself, such as for a license that the Hub doesn't know.
        if "README.md" not in str(error):
            raise
        raise BundleError(f"The Hugging Face Hub refuses README.md: {one_line(error).rstrip('.')}.") from error
