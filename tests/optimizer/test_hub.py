"""`push`: what a repository of the Hub has afterwards, that a download is verified and loaded, and what is refused.

The client is huggingface_hub itself, in a process of its own, because it reads HF_ENDPOINT once. The server is a local one.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest
import torch
from changed_bundles import seal
from local_hub import TOKEN, Hub, serving
from torch import nn

from optimize_export import load
from optimize_export.errors import BundleError, UsageError
from optimizer import Bundle, export, push, verify_bundle

pytest.importorskip("huggingface_hub", reason="part of the extra `hub`")

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("dist") / "net"
    x = torch.randn(2, 4)
    formats = ["torchscript", "onnx"]
    return export(nn.Linear(4, 3), example_inputs=(x,), output=folder, formats=formats, bench=False, effort="quick")


@pytest.fixture
def run(hub: Hub, tmp_path: Path) -> Command:
    def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        known = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        known |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN, **environment}
        known |= {
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, env=known, capture_output=True, text=True, check=False)
        assert TOKEN not in done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def pushed(run: Command, written: Bundle) -> Callable[..., dict[str, str]]:
    def pushed(bundle: Path = written.path, *options: str) -> dict[str, str]:
        done = run("-m", "optimizer", "push", bundle, "jane/net", "--json", *options)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    return pushed


DOWNLOAD = "import sys, huggingface_hub as hub; print(hub.snapshot_download('jane/net', {}))"


@pytest.mark.slow
def test_a_download_has_the_card_is_verified_and_runs(
    hub: Hub, run: Command, pushed: Callable[..., dict[str, str]], written: Bundle, tmp_path: Path
) -> None:
    told = pushed()
    repository = hub.repositories["jane/net"]
    assert (repository.private, repository.commits) == (True, ["Push the bundle of Linear"])
    given = {path.name: path.read_bytes() for path in written.path.iterdir()}
    assert repository.branches["main"] == {".gitattributes": b"*.onnx filter=lfs\n", **given}
    assert told["sha256sums"] == written.sha256sums
    assert told["commit_url"] == f"{hub.url}/jane/net/commit/{told['revision']}"
    assert hub.tokens == {f"Bearer {TOKEN}"}

    for place in (f"revision='{told['revision']}'", f"local_dir={str(tmp_path / 'net')!r}"):
        done = run("-c", DOWNLOAD.format(place))
        assert done.returncode == 0, done.stderr
        snapshot = Path(done.stdout.strip())
        assert (snapshot / "model.onnx").is_symlink() == (place.startswith("revision"))
        report = verify_bundle(snapshot, expect=told["sha256sums"])
        assert report.ok, report
        x = torch.randn(2, 4)
        assert torch.equal(
            torch.as_tensor(load(snapshot, expect=told["sha256sums"])(x)), torch.as_tensor(load(written.path)(x))
        )

    for added in (".git", ".cache"):
        (snapshot / added).mkdir(exist_ok=True)
    assert verify_bundle(snapshot, run=False).ok
    # A folder may be reached by a link.
    (tmp_path / "link").symlink_to(run("-c", DOWNLOAD.format("")).stdout.strip())
    assert verify_bundle(tmp_path / "link", run=False).ok
    # What else is in a snapshot is damage still, and so is a link to elsewhere.
    (snapshot / "other").touch()
    assert verify_bundle(snapshot).problems == ("other is not listed in manifest.json.",)
    (snapshot / "other").unlink()
    (snapshot / "README.md").unlink()
    (snapshot / "README.md").symlink_to(written.path / "README.md")
    assert verify_bundle(snapshot).problems == ("README.md can't be read: it is not a regular file.",)


@pytest.mark.slow
def test_a_link_in_a_cache_leads_to_its_own_blobs_only(
    run: Command, pushed: Callable[..., dict[str, str]], written: Bundle, tmp_path: Path
) -> None:
    pushed()
    snapshot = Path(run("-c", DOWNLOAD.format("")).stdout.strip())
    for target in (written.path / "model.onnx", tmp_path / "blobs" / "x"):
        target.parent.mkdir(exist_ok=True)
        if not target.exists():
            shutil.copy(written.path / "model.onnx", target)
        (snapshot / "model.onnx").unlink()
        (snapshot / "model.onnx").symlink_to(target)
        assert verify_bundle(snapshot).problems == ("model.onnx can't be read: it is not a regular file.",)


@pytest.mark.parametrize("place", [".cache/weights", ".cache/x/../weights", ".gitattributes"])
def test_weights_in_what_a_download_adds_are_not_read(written: Bundle, tmp_path: Path, place: str) -> None:
    folder = Path(shutil.copytree(written.path, tmp_path / "net"))
    (folder / ".cache" / "x").mkdir(parents=True)
    model = onnx.load(folder / "model.onnx")
    (folder / place).write_bytes(b"".join(each.raw_data for each in model.graph.initializer))
    at = 0
    for each in model.graph.initializer:
        size = len(each.raw_data)
        onnx.external_data_helper.set_external_data(each, place, offset=at, length=size)
        each.ClearField("raw_data")
        at += size
    onnx.save(model, folder / "model.onnx")
    seal(folder)
    report = verify_bundle(folder, run=False)
    assert report.problems == (
        f"model.onnx takes weights from {os.path.normpath(place)}, which manifest.json doesn't list for it.",
    )
    assert verify_bundle(folder).artifacts == ()


@pytest.mark.slow
def test_files_of_an_earlier_bundle_are_replaced_and_others_refused(
    hub: Hub, run: Command, pushed: Callable[..., dict[str, str]], written: Bundle, tmp_path: Path
) -> None:
    pushed(written.path, "--public")
    files = hub.repositories["jane/net"].branches["main"]
    assert not hub.repositories["jane/net"].private
    x = torch.randn(2, 4)
    smaller = export(
        nn.Linear(4, 3), example_inputs=(x,), output=tmp_path / "net", formats=["onnx"], bench=False, effort="quick"
    )
    # A branch of its own leaves the other one as it is.
    pushed(smaller.path, "--revision", "next")
    branches = hub.repositories["jane/net"].branches
    assert branches["next"].keys() == {".gitattributes", *(path.name for path in smaller.path.iterdir())}
    assert branches["main"] == files

    branches["main"] = {**files, "mine.txt": b""}
    done = run("-m", "optimizer", "push", smaller.path, "jane/net")
    assert done.returncode == 8
    assert "jane/net has files of no bundle (mine.txt), so a download couldn't be verified" in done.stderr
    assert branches["main"] == {**files, "mine.txt": b""}

    branches["main"] = {**files, "manifest.json": b"{"}
    done = run("-m", "optimizer", "push", smaller.path, "jane/net")
    assert done.returncode == 8
    assert "jane/net has files of no bundle (model.torchscript.pt), so a download" in done.stderr


def test_a_damaged_bundle_is_not_pushed(hub: Hub, written: Bundle, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written.path, tmp_path / "net"))
    (folder / "model.onnx").write_bytes(b"")
    with pytest.raises(BundleError, match=r"is damaged, so it isn't pushed: model.onnx was changed"):
        push(folder, "jane/net")
    with pytest.raises(BundleError, match="There is no bundle at"):
        push(tmp_path / "none", "jane/net")
    assert hub.tokens == set()


def test_without_huggingface_hub_the_error_has_the_line_that_installs_it(
    written: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"isn't installed: pip install 'optimize-export\[hub\]'\.$"):
        push(written, "jane/net")


@pytest.mark.slow
def test_a_license_that_the_hub_does_not_know_is_one_sentence(hub: Hub, run: Command, written: Bundle) -> None:
    hub.card_problem = '"license" must be one of a list'
    done = run("-m", "optimizer", "push", written.path, "jane/net")
    told = 'The Hugging Face Hub refuses README.md: Invalid metadata in README.md. - "license" must be one of a list.'
    assert (done.returncode, done.stderr.endswith(f"error: {told}\n")) == (8, True), done.stderr
    assert hub.repositories["jane/net"].branches["main"].keys() == {".gitattributes"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("repo_id", "refuses", "environment", "code", "sentence"),
    [
        ("a/b/c", None, {}, 2, "'a/b/c' can't be the name of a repository: use user/name, such as jane/resnet18."),
        ("jane/--x", None, {}, 2, "'jane/--x' can't be the name of a repository: use user/name, such as jane/resnet18."),
        (
            "jane/net", None, {"HF_TOKEN": ""}, 2,
            "The Hugging Face Hub needs a token: run `hf auth login`, or set HF_TOKEN.",
        ),
        (
            "jane/net", None, {"HF_TOKEN": "hf_sécret"}, 2,
            "The token of the Hugging Face Hub has characters that no token has: copy it again.",
        ),
        (
            "jane/net", (401, "Invalid username or password."), {}, 8,
            "The Hugging Face Hub refuses the push to jane/net (401): the token has no write access: use one that "
            "has (`hf auth login`, or HF_TOKEN).",
        ),
        ("jane/net", (400, "It is\nfull."), {}, 8, "The Hugging Face Hub refuses the push to jane/net (400): It is full."),
        ("jane/net", None, {"HF_ENDPOINT": "http://127.0.0.1:9"}, 8, "The Hugging Face Hub can't be reached: "),
        ("jane/net", None, {"HF_HUB_OFFLINE": "1"}, 8, "The Hugging Face Hub can't be reached: "),
    ],
)  # fmt: skip
def test_what_the_hub_refuses_is_one_sentence(
    hub: Hub, run: Command, written: Bundle, repo_id: str, refuses: tuple[int, str] | None,
    environment: dict[str, str], code: int, sentence: str,
) -> None:  # fmt: skip
    hub.refuses = refuses
    done = run("-m", "optimizer", "push", written.path, repo_id, **environment)
    assert done.returncode == code, done.stderr
    (line,) = [each for each in done.stderr.splitlines() if "error:" in each]
    assert line.startswith(f"optimize-export: error: {sentence}")
    assert done.stdout == ""
