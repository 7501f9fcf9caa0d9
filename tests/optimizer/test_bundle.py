"""Bundles: all-or-nothing writing, the manifest, golden data and verification."""

import errno
import functools
import hashlib
import io
import json
import operator
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from changed_bundles import seal
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from exporters.base import Artifact, TensorSpec
from exporters.errors import ExporterError, OtherMachine
from optimize_export.errors import BundleError, DeviceError, UsageError, printable
from optimize_export.manifest import (
    check_manifest,
    file_digest,
    number,
    schema,
    to_json_text,
    without_local_paths,
)
from optimizer.bundle import (
    Bundle,
    artifact_entry,
    check_target,
    describe_device,
    exchange,
    open_bundle,
    read_golden,
    rejudge_bundle,
    verify,
    verify_bundle,
    weights_hash,
    write_bundle,
    write_golden,
)
from optimizer.bundle import bundle as bundles
from optimizer.bundle.golden import stored_noises, stored_tolerances
from optimizer.bundle.manifest import usage_text
from optimizer.bundle.verify import VerifyReport, factor_between
from optimizer.model.inputs import Call, Samples
from optimizer.parity import GoldenEntry, OutputNoise, Reference, golden_entries, measure_reference

WEIGHT = torch.linspace(-1, 1, 12, dtype=torch.float32).reshape(4, 3)


class Affine:
    """A loaded artifact of a made-up format: computes `x @ weight`, and where the result is positive."""

    device = "cpu"
    placement = None
    settings: ClassVar[dict[str, str]] = {}
    loaded: ClassVar[list[Path]] = []

    def __init__(self, path: Path) -> None:
        self.loaded.append(path)
        self.weight = load_file(path)["weight"]

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ self.weight
        return y, y > 0


@pytest.fixture(autouse=True)
def affine_format(monkeypatch: pytest.MonkeyPatch) -> None:
    Affine.loaded = []
    monkeypatch.setattr(bundles, "load_artifact", lambda format, path, device: Affine(path))
    monkeypatch.setattr(verify, "load_for_proof", lambda format, path, device: Affine(path))


@functools.cache
def measured() -> Reference:
    """The reference for the artifact, measured once: inputs, outputs and noise of the golden data."""

    def original(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ WEIGHT
        return y, y > 0

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    return measure_reference(original, Samples((x,)), batch_sizes=(1, 3), draws=1)


def flat(args: tuple[Any, ...], kwargs: Any) -> tuple[torch.Tensor, ...]:
    return args


def golden(folder: Path, **changes: Any) -> dict[str, Any]:
    given = {"flatten": flat, "input_names": ["x"], "output_names": ["y", "positive"], **changes}
    return write_golden(folder, golden_entries(measured()), measured().noises, **given)


def fill(folder: Path, *, weight: torch.Tensor = WEIGHT, **changes: Any) -> dict[str, Any]:
    save_file({"weight": weight}, folder / "model.affine")
    (folder / "extra").mkdir()
    (folder / "extra" / "report.json").write_text("{}")
    artifact = Artifact(
        format="affine",
        path=folder / "model.affine",
        files=(folder / "model.affine",),
        route="direct",
        refused=(("winding", f"it failed in {folder}/model.affine"),),
        inputs=(TensorSpec("x", "float32", ("batch", 4)),),
        outputs=(TensorSpec("y", "float32", ("batch", 3)), TensorSpec("positive", "bool", ("batch", 3))),
        notes=(),
        loader=bundles.load_artifact,
    )
    parity = {"ok": True, "verdict": "ok", "reason": "All outputs agree.", "worst": float("nan")}
    return {
        "mode": "inference",
        "seed": 0,
        "device": describe_device("cpu"),
        "model": {
            "class": "Affine",
            "source": "examples/affine.py",
            "parameters": 12,
            "bytes": 48,
            "weights_sha256": weights_hash({"weight": weight}),
        },
        "passes": [{"name": "fold-conv-bn", "options": {}, "status": "unchanged"}],
        "artifacts": [artifact_entry(artifact, folder, parity)],
        "parity": parity,
        "golden": golden(folder),
        **changes,
    }


def filling(change: Callable[[Path, dict[str, Any]], object]) -> Callable[[Path], dict[str, Any]]:
    """Fill a bundle, and change its folder or the body of its manifest."""

    def filled(folder: Path) -> dict[str, Any]:
        body = fill(folder)
        change(folder, body)
        return body

    return filled


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return write_bundle(tmp_path / "parent" / "net", fill)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def must_not_fill(folder: Path) -> dict[str, Any]:
    raise AssertionError("the work began although the target was refused")


def edit_manifest(bundle: Bundle, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((bundle.path / "manifest.json").read_text())
    change(manifest)
    (bundle.path / "manifest.json").write_text(json.dumps(manifest))


# ------------------------------------------------------------------------------------------------------------ writing


def test_a_bundle_has_its_files_and_nothing_is_left_beside_it(bundle: Bundle) -> None:
    assert names(bundle.path.parent) == ["net"]
    given = {"extra/report.json", "golden.safetensors", "model.affine"}
    assert content(bundle.path).keys() == {*given, "README.md", "SHA256SUMS", "manifest.json"}
    assert str(bundle) == repr(bundle) == f"Bundle('{bundle.path}', files: model.affine, parity: ok)"


def test_the_manifest_has_what_was_given_and_what_is_added(bundle: Bundle) -> None:
    manifest = bundle.manifest
    check_manifest(manifest)
    assert next(iter(manifest)) == "schema"
    assert list(manifest)[-1] == "files"
    assert manifest["environment"]["libraries"]["torch"] == torch.__version__.partition("+")[0] or torch.__version__
    artifact = manifest["artifacts"][0]
    file = next(file for file in manifest["files"] if file["path"] == "model.affine")
    assert (artifact["sha256"], artifact["bytes"]) == (file["sha256"], file["bytes"])
    assert artifact["bytes"] == (bundle.path / "model.affine").stat().st_size
    assert artifact["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["batch", 4]}]
    assert number(artifact["parity"]["worst"]) != number(artifact["parity"]["worst"])


def test_no_file_of_the_program_names_a_folder_of_this_machine(bundle: Bundle, tmp_path: Path) -> None:
    for name in ("manifest.json", "README.md", "SHA256SUMS"):
        assert str(tmp_path) not in (bundle.path / name).read_text()
    assert bundle.manifest["artifacts"][0]["refused"][0]["reason"] == "it failed in model.affine"


def test_local_paths_are_cut_and_others_stay() -> None:
    roots = ("/home/me/work", "/home/me")
    given = {"a": ["/home/me/work/net.py:3", "in /home/me", "/home/meadow/x", "x/home/me/y", "/data/home"]}
    assert without_local_paths(given, roots) == {
        "a": ["net.py:3", "in .", "/home/meadow/x", "x/home/me/y", "/data/home"]
    }


def test_the_same_input_makes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(BundleError, match="SOURCE_DATE_EPOCH"):
        write_bundle(tmp_path / "net", fill)
    assert names(tmp_path) == []
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    first, second = (write_bundle(tmp_path / name, fill) for name in ("a", "b"))
    assert first.manifest["created"] == "1970-01-02T00:00:00Z"
    assert content(first.path) == content(second.path)


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        bundle = write_bundle(tmp_path / "net", fill)
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in bundle.path.rglob("*") if path.is_file()} == {"0o644"}


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="no sha256sum")
def test_the_hashes_are_those_of_sha256sum(bundle: Bundle) -> None:
    subprocess.run(["sha256sum", "-c", "--strict", "--quiet", "SHA256SUMS"], cwd=bundle.path, check=True)


def test_a_file_whose_format_is_not_installed_is_said_to_be_unchecked(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    (problem,) = verify_bundle(bundle.path).problems
    assert problem.endswith(
        "it wasn't checked, because no package here has the format 'affine': install the package that wrote it"
    )


def test_the_readme_shows_how_to_run_what_is_there(bundle: Bundle) -> None:
    manifest = json.loads(json.dumps(bundle.manifest))
    artifact = manifest["artifacts"][0]
    artifact["inputs"].append({"name": "mask", "dtype": "bool", "shape": ["batch"]})
    manifest["artifacts"] = [
        {**artifact, "format": "onnx", "path": "model.onnx"},
        {**artifact, "format": "torchscript", "path": "model.torchscript.pt"},
        {**artifact, "format": "pt2", "path": "model.pt2"},
        {**artifact, "format": "aoti", "path": "model.aoti.pt2"},
    ]
    manifest["notes"] = ["time was checked at\nthe sizes 5, 7.", "x_1 is all zero and proves nothing."]
    manifest["benchmark"] = {"reason": "ship model.onnx in onnxruntime: 2.00 times as fast as eager"}
    text = usage_text(manifest)
    assert "\nRecommendation: ship model.onnx in onnxruntime: 2.00 times as fast as eager.\n" in text
    assert "\n- time was checked at the sizes 5, 7.\n- x_1 is all zero and proves nothing.\n\n## " in text
    assert '"x": numpy.zeros((2, 4), dtype=numpy.float32),' in text
    assert '"mask": numpy.zeros((2,), dtype=numpy.bool_),' in text
    assert "mask = torch.zeros((2,), dtype=torch.bool)" in text
    assert "outputs = model(x, mask)" in text
    assert 'model = torch.export.load("model.pt2").module()' in text
    assert 'model = torch._inductor.aoti_load_package("model.aoti.pt2")' in text
    assert "`[batch, 4]`" in text
    for snippet in text.split("```python")[1:]:
        compile(snippet.partition("```")[0], "README.md", "exec")


HOSTILE = "a: b\n---\nlicense: mit # \"x\" 'y' | <b> \u2028 \x85 \ud800 🤗 `z`"


def test_the_readme_is_a_model_card(bundle: Bundle) -> None:
    manifest = json.loads(json.dumps(bundle.manifest))
    text = usage_text(manifest)
    matter, _, rest = text.removeprefix("---\n").partition("\n---\n\n")
    # The user said neither the license nor what it was made from.
    assert yaml.safe_load(matter) == {"library_name": "optimize-export", "tags": ["optimize-export", "affine"]}
    assert rest.startswith("# ")
    assert "| `model.affine` | affine | " in rest
    assert f"- SHA-256 of the weights: {manifest['model']['weights_sha256']}\n" in rest
    assert "## Latency" not in rest


def test_the_card_has_what_the_user_gave_and_stays_valid(bundle: Bundle) -> None:
    manifest = json.loads(json.dumps(bundle.manifest))
    manifest["model"]["class"] = manifest["model"]["source"] = HOSTILE
    manifest["artifacts"][0]["metadata"] = {"license": "apache-2.0", "base_model": HOSTILE, "author": "Jane"}
    manifest["artifacts"][0]["format"] = HOSTILE
    matter, _, rest = usage_text(manifest).removeprefix("---\n").partition("\n---\n\n")
    told = yaml.safe_load(matter)
    assert (told["license"], told["base_model"], told["tags"][1]) == (
        "apache-2.0",
        printable(HOSTILE),
        printable(HOSTILE),
    )
    assert told.keys() == {"library_name", "license", "base_model", "tags"}
    assert rest.startswith("# a: b\\n---\\nlicense: mit")


def test_the_card_shows_times_with_the_processor_and_the_accuracy_with_its_budget(bundle: Bundle) -> None:
    manifest = json.loads(json.dumps(bundle.manifest))
    gain = {"median": 2.0, "low": 1.9, "high": 2.1, "rounds": 9}
    figure = {"name": "model.affine", "seconds": 0.001, "p95": 0.002, "speed_up": gain, "dropped": None}
    figure |= {"route": None, "accuracy": None}
    dropped = {**figure, "name": "other", "dropped": "too large"}
    manifest["benchmark"] = {"batch_sizes": [2], "threads": 1, "figures": [figure, dropped], "reason": "ship it"}
    manifest["device"]["name"] = "AMD EPYC"
    manifest["artifacts"][0]["accuracy"] = {"cosine": 0.9995, "budget": {"cosine": 0.999, "top1": None}}
    manifest["artifacts"][0]["parity"] |= {"verdict": "within budget", "reason": "cosine 0.9995", "outputs": []}
    text = usage_text(manifest)
    assert "Of a call at batch 2, on AMD EPYC with 1 thread of torch:" in text
    assert "| model.affine | 1 ms | 2 ms | 2.00 (1.90 to 2.10) |" in text
    assert "| other |" not in text
    assert "| within budget: cosine 0.999500 (budget: cosine 0.999) |" in text


NOT_WRITTEN = {
    "manifest.json": (lambda folder, _: (folder / "manifest.json").touch(), "can't be a file of a bundle"),
    "SHA256SUMS": (lambda folder, _: (folder / "SHA256SUMS").touch(), "can't be a file of a bundle"),
    "backslash": (lambda folder, _: (folder / "a\\b").touch(), "can't be a file of a bundle"),
    "line break": (lambda folder, _: (folder / "line\nbreak").touch(), "can't be a file of a bundle"),
    "link": (lambda folder, _: (folder / "link").symlink_to("/etc/passwd"), "link can't be a file"),
    "no seed": (lambda _, body: body.pop("seed"), "the field `seed` is missing"),
    "no file": (lambda folder, _: (folder / "model.affine").unlink(), "model.affine, which wasn't written"),
}


@pytest.mark.parametrize("case", NOT_WRITTEN)
def test_a_bundle_that_readers_would_refuse_is_not_written(tmp_path: Path, case: str) -> None:
    change, message = NOT_WRITTEN[case]
    with pytest.raises(BundleError, match=message):
        write_bundle(tmp_path / "net", filling(change))
    assert names(tmp_path) == []


# ------------------------------------------------------------------------------------------------------ allowed targets


def test_force_replaces_a_bundle_and_without_it_nothing(bundle: Bundle) -> None:
    before = content(bundle.path)
    with pytest.raises(BundleError, match="is already a bundle: replace it with `force=True`, or"):
        write_bundle(bundle.path, must_not_fill)
    assert content(bundle.path) == before
    (bundle.path / "model.affine").unlink()
    write_bundle(bundle.path, lambda folder: fill(folder, seed=7), force=True)
    assert open_bundle(bundle.path).manifest["seed"] == 7
    assert names(bundle.path.parent) == ["net"]
    assert verify_bundle(bundle.path).ok


@pytest.mark.parametrize(
    "name", ["README.md", "extra/report.json", "golden.safetensors", "SHA256SUMS", "manifest.json"]
)
def test_a_bundle_with_a_file_that_was_changed_is_not_replaced(bundle: Bundle, name: str) -> None:
    flip(bundle.path / name, 1 if name != "manifest.json" else content(bundle.path)[name].index(b"Affine"))
    before = content(bundle.path)
    with pytest.raises(BundleError, match=rf"changed since this program wrote them \(.*{name}.*\): move them"):
        write_bundle(bundle.path, must_not_fill, force=True)
    assert content(bundle.path) == before


@pytest.mark.parametrize("name", ["README.md", "notes.txt"])
def test_a_file_that_the_user_writes_while_the_new_bundle_is_made_is_kept(bundle: Bundle, name: str) -> None:
    with pytest.raises(BundleError, match=name):
        write_bundle(bundle.path, filling(lambda *_: (bundle.path / name).write_text("mine")), force=True)
    assert (bundle.path / name).read_text() == "mine"
    assert names(bundle.path.parent) == ["net"]


def test_a_bundle_with_files_of_the_user_is_not_replaced(bundle: Bundle) -> None:
    (bundle.path / "notes.txt").write_text("mine")
    (bundle.path / "folder").mkdir()
    (bundle.path / "folder" / "deep").write_text("mine")
    with pytest.raises(BundleError, match=r"didn't write \(folder, notes\.txt\)"):
        write_bundle(bundle.path, must_not_fill, force=True)
    assert (bundle.path / "notes.txt").exists()


def test_a_bundle_that_another_writer_puts_there_meanwhile_is_not_replaced_without_force(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is already a bundle"):
        write_bundle(tmp_path / "net", filling(lambda *_: write_bundle(tmp_path / "net", lambda f: fill(f, seed=1))))
    assert open_bundle(tmp_path / "net").manifest["seed"] == 1


def a_folder(target: Path) -> None:
    target.mkdir()
    (target / "mine").write_text("x")


def a_damaged_bundle(target: Path) -> None:
    a_folder(target)
    (target / "manifest.json").write_text("{}")


def a_dangling_link(target: Path) -> None:
    target.symlink_to(target.parent / "nowhere")


def a_link_to_an_empty_folder(target: Path) -> None:
    (target.parent / "empty").mkdir()
    target.symlink_to(target.parent / "empty")


REFUSED = {
    a_folder: "is a folder with other contents",
    a_damaged_bundle: "can't be recognised as a bundle",
    a_dangling_link: "is a symbolic link",
    a_link_to_an_empty_folder: "is a symbolic link",
    Path.touch: "is a file, which is not replaced",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_bundle_is_never_replaced(tmp_path: Path, make: Callable[[Path], None], force: bool) -> None:
    make(tmp_path / "net")
    before = sorted(tmp_path.rglob("*")), content(tmp_path)
    with pytest.raises(BundleError, match=REFUSED[make]):
        write_bundle(tmp_path / "net", must_not_fill, force=force)
    assert (sorted(tmp_path.rglob("*")), content(tmp_path)) == before


@pytest.mark.parametrize("target", [".", "..", "", "/", "~", "../.."])
def test_the_folders_that_one_works_in_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    home = tmp_path / "home"
    (home / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "work")
    with pytest.raises(BundleError):
        check_target(os.path.expanduser(target), force=True)


def test_a_relative_target_stands_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BundleError, match="the current folder"):
        check_target(tmp_path)
    assert write_bundle("dist/net", fill).path == tmp_path.resolve() / "dist" / "net"


@pytest.mark.parametrize("below", ["inner", "extra/inner", "a/b/c"])
def test_a_folder_inside_a_bundle_is_refused(bundle: Bundle, below: str) -> None:
    with pytest.raises(BundleError, match="is inside the bundle"):
        check_target(bundle.path / below)
    assert verify_bundle(bundle.path).ok


def test_a_file_in_place_of_the_parent_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for target in (tmp_path / "file" / "net", tmp_path / "file" / "deep" / "net"):
        with pytest.raises(BundleError, match=r"because .*file is not a folder"):
            write_bundle(target, must_not_fill)


def test_a_name_that_no_file_can_have_is_named_and_checking_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="File name too long"):
        write_bundle(tmp_path / ("n" * 300), must_not_fill)
    check_target(tmp_path / "a" / "b" / "net")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("code", "text"),
    [(errno.EACCES, "Permission denied"), (errno.EROFS, "Read-only"), (errno.EPERM, "not permitted")],
)
def test_a_folder_that_cannot_be_written_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, text: str
) -> None:
    def refuse(path: object, mode: int = 0o777) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(BundleError, match=text) as caught:
        write_bundle(tmp_path / "net", must_not_fill)
    assert str(tmp_path / "net") in str(caught.value)


def test_an_exchange_that_stopped_halfway_is_finished_at_the_next_open(bundle: Bundle) -> None:
    place = bundle.path.parent / exchange.staging_name(bundle.path)
    shutil.copytree(bundle.path, place / "new")
    (place / exchange.LOCK).write_text(bundle.path.name)
    os.rename(bundle.path, place / "old")
    assert verify_bundle(bundle.path).ok


# -------------------------------------------------------------------------------------------------------- failed writes


def raising(error: BaseException) -> Callable[[Path], dict[str, Any]]:
    def fail(*_: object) -> None:
        raise error

    return filling(fail)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UsageError("x"), RuntimeError("x"), SystemExit(1)], ids=repr)
def test_what_fill_raises_goes_on_and_the_target_is_as_it_was(bundle: Bundle, error: BaseException) -> None:
    before = content(bundle.path)
    with pytest.raises(type(error)):
        write_bundle(bundle.path, raising(error), force=True)
    with pytest.raises(type(error)):
        write_bundle(bundle.path.parent / "new" / "deep", raising(error))
    assert content(bundle.path) == before
    assert names(bundle.path.parent) == ["net"]


def wrapped(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        wrapped(ExporterError("every route failed"), FULL),
        ExporterError(f"every route failed: {os.strerror(errno.ENOSPC)}"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=repr,
)
def test_a_full_disk_is_told_in_one_sentence(bundle: Bundle, error: Exception) -> None:
    before = content(bundle.path)
    with pytest.raises(
        BundleError, match="can't be written: No space left on device: correct that, or choose another"
    ) as caught:
        write_bundle(bundle.path, raising(error), force=True)
    assert caught.value.exit_code == 8
    assert "\n" not in str(caught.value)
    assert content(bundle.path) == before
    assert names(bundle.path.parent) == ["net"]


def test_an_error_of_another_kind_is_no_full_disk(tmp_path: Path) -> None:
    with pytest.raises(ExporterError, match="not supported"):
        write_bundle(tmp_path / "net", raising(ExporterError("the operator is not supported")))
    with pytest.raises(BundleError, match="can't be written: No such file or directory"):
        write_bundle(tmp_path / "net", lambda folder: {"x": (folder / "missing").read_text()})


def test_a_full_disk_at_the_last_moment_leaves_the_target(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(bundle.path)

    def full(handle: int) -> None:
        raise FULL

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BundleError, match="No space left on device"):
        write_bundle(bundle.path, fill, force=True)
    assert content(bundle.path) == before
    assert names(bundle.path.parent) == ["net"]


# ------------------------------------------------------------------------------------------------------------- opening


def test_a_bundle_is_opened_by_its_folder_or_its_manifest(bundle: Bundle) -> None:
    for path in (bundle.path, str(bundle.path), bundle.path / "manifest.json"):
        assert open_bundle(path) == bundle
    assert bundle.parity.ok
    assert bundle.parity.artifacts["affine"]["verdict"] == "ok"
    assert bundle.artifacts[0].path == bundle.path / "model.affine"
    assert bundle.artifacts[0].inputs == (TensorSpec("x", "float32", ("batch", 4)),)
    assert bundle.load("affine")(torch.ones(1, 4))[0].shape == (1, 3)
    with pytest.raises(BundleError, match="no 'onnx' artifact; it has affine"):
        bundle.load("onnx")


def test_what_is_no_bundle_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for name, message in (
        ("missing", "There is no bundle at .*missing: no such folder"),
        ("missing/manifest.json", "There is no bundle at .*missing: no such folder"),
        ("file", "is a file, not a bundle"),
        ("folder", r"it has no manifest\.json"),
    ):
        with pytest.raises(BundleError, match=message):
            open_bundle(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1, 2", '{"a": NaN}', "\udcff", "[" * 100000],
)
def test_a_manifest_that_is_no_json_is_named(bundle: Bundle, text: str) -> None:
    (bundle.path / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BundleError, match=r"manifest\.json is broken: it is not valid JSON"):
        open_bundle(bundle.path)


def put(value: Any, *keys: Any) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: operator.setitem(functools.reduce(operator.getitem, keys[:-1], manifest), keys[-1], value)


def drop(*keys: Any) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: operator.delitem(functools.reduce(operator.getitem, keys[:-1], manifest), keys[-1])


ACCURACY = {
    "cosine": 0.9,
    "top1": None,
    "equal": None,
    "max_error": "Infinity",
    "snr": 3.0,
    "calls": 1,
    "problem": None,
}
RATIO = {"median": 1.0, "low": 1.0, "high": 1.0, "rounds": 1}
FIGURE = {
    "name": "eager",
    **dict.fromkeys(("route", "bytes", "p95", "dropped")),
    "accuracy": ACCURACY,
    "speed_up": RATIO,
}


def figured(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return put({"figures": [{**FIGURE, "memory": 0, "seconds": 1e-6, **changes}]}, "benchmark")


BROKEN = [
    (figured(memory=-28672), "memory` must be a whole number, not -28672"),
    (figured(seconds=0), "seconds` must be a finite number above 0, not 0"),
    (figured(accuracy={**ACCURACY, "cosine": "NaN"}), r"accuracy\.cosine` must be a finite number"),
    (figured(accuracy={}), r"the field `benchmark\.figures\[0\]\.accuracy\.cosine` is missing"),
    (drop("schema"), "its `schema` is missing"),
    (put("other", "schema", "name"), "its `schema` is missing"),
    (put(2, "schema", "version"), "has schema version 2, but this program reads version 1"),
    (drop("model", "weights_sha256"), r"the field `model\.weights_sha256` is missing"),
    (put(True, "seed"), "`seed` must be a whole number below .*, not true"),
    (put(-1, "files", 0, "bytes"), r"`files\[0\]\.bytes` must be a whole number"),
    (put([], "artifacts"), "`artifacts` must be a list of at least 1"),
    (put("yes", "parity", "ok"), r"`parity\.ok` must be true or false"),
    (put([1.5], "artifacts", 0, "inputs", 0, "shape"), r"shape\[0\]` must be a whole number or the name"),
    (put("much", "golden", "outputs", 0, "noise"), r"noise` must be a number"),
    (put("", "artifacts", 0, "inputs", 0, "shape", 0), r"shape\[0\]` must be a whole number or the name"),
    (put({"torch": 2}, "environment", "libraries"), r"`environment\.libraries\.torch` must be a text, not 2"),
    (put({"threads": 1000000}, "benchmark"), r"threads` must be a number of threads from 1 to 4096, not 1000000"),
    (put("Infinity", "golden", "outputs", 0, "atol"), r"atol` must be a finite number of 0 or more, not \"Infinity\""),
    (drop("golden", "calls", 1, "inputs"), r"`golden\.calls\[1\]\.inputs` is missing"),
    (put("../secret", "files", 0, "path"), "the path of a file inside the bundle"),
    (put("a/../../b", "golden", "path"), "the path of a file inside the bundle"),
    (put("C:\\x", "artifacts", 0, "files", 0), "the path of a file inside the bundle"),
    (put("other.safetensors", "golden", "path"), "contradicts itself: other.safetensors is not in `files`"),
    (put("0" * 64, "artifacts", 0, "sha256"), "contradicts itself: the SHA-256 of model.affine"),
    (put("z", "artifacts", 0, "outputs", 0, "name"), "contradicts itself: the outputs of the artifact affine"),
    (put({"affine": "No."}, "missing"), "contradicts itself: affine is in `artifacts` and in `missing`"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_broken_manifest_names_the_field(bundle: Bundle, change: Callable[[Any], None], message: str) -> None:
    edit_manifest(bundle, change)
    for use in (open_bundle, verify_bundle):
        with pytest.raises(BundleError, match=message) as caught:
            use(bundle.path)
        assert "\n" not in str(caught.value)
    assert Affine.loaded == []


def test_a_field_of_a_later_program_and_measured_figures_are_no_error(bundle: Bundle) -> None:
    edit_manifest(bundle, figured())
    edit_manifest(bundle, put({"x": 1}, "later"))
    assert open_bundle(bundle.path).manifest["later"] == {"x": 1}


# ------------------------------------------------------------------------------------------------------------ verifying


def test_a_bundle_is_verified_and_after_it_was_moved(bundle: Bundle, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(bundle.path, moved)
    shutil.rmtree(bundle.path)
    report = verify_bundle(moved)
    assert report.ok
    assert report.problems == ()
    figures = report.artifacts[0]
    assert figures.calls == 2
    assert 0 < figures.parity.outputs[0].max_error < figures.parity.outputs[0].tolerance
    assert "verified on cpu" in str(report)
    assert json.loads(to_json_text(report.to_json()))["artifacts"][0]["parity"]["outputs"][0]["name"] == "y"


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["README.md", "SHA256SUMS", "extra/report.json", "golden.safetensors", "model.affine"])
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_one_flipped_bit_anywhere_is_found_and_named(bundle: Bundle, name: str, place: float) -> None:
    flip(bundle.path / name, int(place * ((bundle.path / name).stat().st_size - 1)))
    report = verify_bundle(bundle.path)
    assert not report.ok
    assert not report.intact
    assert any(name in problem for problem in report.problems)
    assert Affine.loaded == []
    assert report.notes == (f"no artifact was loaded, because some files are wrong: {name}",)


def test_one_flipped_bit_anywhere_in_the_manifest_is_found_and_nothing_is_run(bundle: Bundle) -> None:
    path = bundle.path / "manifest.json"
    whole = path.read_bytes()
    reported = refused = 0
    for position in range(0, len(whole), 41):
        flip(path, position)
        try:
            problems = verify_bundle(bundle.path).problems
            reported += 1
        except BundleError as error:
            problems = (str(error),)
            refused += 1
        assert any("manifest.json" in problem for problem in problems), position
        path.write_bytes(whole)
    assert Affine.loaded == []
    assert reported > 10
    assert refused > 10
    assert verify_bundle(bundle.path).ok


def test_a_missing_an_added_and_a_cut_file_are_named(bundle: Bundle) -> None:
    (bundle.path / "README.md").unlink()
    (bundle.path / "extra" / "more").write_text("x")
    (bundle.path / "model.affine").write_bytes(b"")
    report = verify_bundle(bundle.path)
    assert [problem.split(":")[0] for problem in report.problems] == [
        "README.md is missing.",
        "model.affine was changed",
        "extra/more is not listed in manifest.json.",
    ]
    assert Affine.loaded == []
    assert "NOT verified" in str(report)


@pytest.mark.parametrize("alone", [False, True])
def test_a_file_for_another_machine_is_named_and_fails_only_alone(
    alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def more(folder: Path, body: dict[str, Any]) -> None:
        (folder / "model.compiled").write_bytes(b"code")
        compiled = {**body["artifacts"][0], "format": "compiled", "path": "model.compiled", "files": ["model.compiled"]}
        body["artifacts"] = [compiled] if alone else [*body["artifacts"], compiled]

    def load(format: str, path: Path, device: str) -> Affine:
        if format == "compiled":
            raise OtherMachine(f"{path.name} was compiled for riscv64.")
        return Affine(path)

    monkeypatch.setattr(verify, "load_for_proof", load)
    report = verify_bundle(write_bundle(tmp_path / "net", filling(more)).path)
    told = "model.compiled wasn't run: model.compiled was compiled for riscv64."
    assert report.ok is not alone
    assert [figures.path for figures in report.artifacts] == ([] if alone else ["model.affine"])
    assert report.problems == ((told,) if alone else ())
    assert (told in report.notes) is not alone


def published(tmp_path: Path, run: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> VerifyReport:
    """The report on an intact bundle whose artifact computes `run` instead of the golden outputs."""
    computes(run, monkeypatch)
    return verify_bundle(write_bundle(tmp_path / "net", fill).path)


def computes(run: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Affine):
        def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return run(x)

    monkeypatch.setattr(verify, "load_for_proof", lambda format, path, device: Other(path))


def exact(x: torch.Tensor) -> torch.Tensor:
    return (x.double() @ WEIGHT.double()).float()


def with_nan(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = exact(x)
    y[0, 0] = float("nan")
    return y, y > 0


def raises(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    raise RuntimeError("no kernel\nfor this")


WRONG = {
    "a percent off": (lambda x: (exact(x) * 1.01, exact(x) > 0), "(?i)y is off by .* at batch size"),
    "a hundred times the noise": (lambda x: (exact(x) + 1e-5, exact(x) > 0), "(?i)y is off by .* is allowed"),
    "an element flipped": (lambda x: (exact(x), (exact(x) > 0) ^ True), "(?i)positive: 12 elements differ"),
    "another dtype": (lambda x: (exact(x).double(), exact(x) > 0), "(?i)y: .*float64.*float32"),
    "another shape": (lambda x: (exact(x)[:, :2], exact(x) > 0), r"(?i)y: .*2\).* 3\)"),
    "a lost batch": (lambda x: (exact(x)[:1], exact(x)[:1] > 0), "(?i)y: .* at batch size 3"),
    "NaN": (with_nan, "(?i)y: NaN or inf in different places"),
    "too few outputs": (lambda x: (exact(x),), "returns 1 tensors, and the original 2"),
    "an error": (raises, "can't be loaded or run: RuntimeError: no kernel for this"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_artifact_that_computes_something_else_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    run, message = WRONG[case]
    report = published(tmp_path, run, monkeypatch)
    assert not report.ok
    assert report.intact
    assert re.search(message, " | ".join(report.problems))


def test_tolerances_of_the_user_are_used_instead_of_the_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loosen(folder: Path, body: dict[str, Any]) -> None:
        body["golden"] = golden(folder, atol={"output_0": 0.5})

    for shift, ok in ((2e-8, True), (2e-5, False)):
        assert published(tmp_path / str(shift), lambda x, by=shift: (exact(x) + by, exact(x) > 0), monkeypatch).ok is ok
    bundle = write_bundle(tmp_path / "net", filling(loosen))
    assert stored_tolerances(bundle.manifest["golden"]) == {"atol": {"y": 0.5}}
    for shift, ok in ((0.4, True), (0.6, False)):
        computes(lambda x, shift=shift: (exact(x) + shift, exact(x) > 0), monkeypatch)
        assert verify_bundle(bundle.path).ok is ok


def test_nan_and_infinity_where_the_reference_has_them_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    special = torch.tensor([[1.0, float("nan"), float("inf"), -float("inf")]])
    entry = GoldenEntry(None, 0, Call((torch.ones(1),), {}), {"a": special, "b": special > 0}, {})
    noises = {"a": noise("a"), "b": noise("b", dtype="bool")}
    names = {"flatten": flat, "input_names": ["x"], "output_names": ["y", "positive"]}

    def with_special(folder: Path, body: dict[str, Any]) -> None:
        body["golden"] = write_golden(folder, [entry], noises, **names)

    bundle = write_bundle(tmp_path / "net", filling(with_special))
    for output, ok in ((special, True), (-special, False), (special.nan_to_num(nan=0.0), False)):
        computes(lambda x, output=output: (output, special > 0), monkeypatch)
        assert verify_bundle(bundle.path).ok is ok


def for_every_output(**changes: Any) -> Callable[[Path, dict[str, Any]], None]:
    def change(folder: Path, golden: dict[str, Any]) -> None:
        for output in golden["outputs"]:
            output.update(changes)

    return change


def without_rows(folder: Path, golden: dict[str, Any]) -> None:
    tensors = load_file(folder / "golden.safetensors")
    save_golden(folder, {name: tensor[:0].clone() for name, tensor in tensors.items()})


def tied_throughout(folder: Path, golden: dict[str, Any]) -> None:
    golden["outputs"][0]["deterministic"] = False
    golden["outputs"][1]["signal"] = None
    tensors = load_file(folder / "golden.safetensors")
    for call in golden["calls"]:
        call["tied"] = ["positive"]
        tensors[f"{call['name']}/tied/positive"] = torch.ones_like(tensors[f"{call['name']}/output/positive"])
    save_golden(folder, tensors)


def save_golden(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "golden.safetensors", metadata={"optimize-export-bundle": '{"complex": []}'})


NOTHING_PROVEN = {
    "no signal": (for_every_output(signal="all zero"), "carry no signal (y is all zero, positive is all zero)."),
    "infinite noise": (for_every_output(noise=float("inf")), "The noise of y is infinite"),
    "infinite noise in the mean": (for_every_output(noise_rms=float("inf")), "The noise of y is infinite"),
    "noise beyond all outputs": (for_every_output(noise=1e30, noise_rms=1e30), "zeros would pass."),
    "tolerance beyond all outputs": (for_every_output(atol=1e30), "zeros would pass."),
    "nothing deterministic": (for_every_output(deterministic=False), "No output of the original is deterministic"),
    "no rows": (without_rows, "The golden data contain no number larger than the allowed error: zeros would pass."),
    "all tied": (tied_throughout, "The golden data contain no number larger than the allowed error: zeros would pass."),
}


@pytest.mark.parametrize("run", [True, False])
@pytest.mark.parametrize("case", NOTHING_PROVEN)
def test_golden_data_that_prove_nothing_fail(tmp_path: Path, case: str, run: bool) -> None:
    change, reason = NOTHING_PROVEN[case]
    filled = filling(lambda folder, body: change(folder, body["golden"]))
    report = verify_bundle(write_bundle(tmp_path / "net", filled).path, run=run)
    assert not report.ok
    assert report.intact
    (problem,) = report.problems
    assert problem.startswith(f"{'model.affine' if run else 'golden.safetensors'}: nothing is proven. ")
    assert reason in problem


def test_an_output_that_is_not_judged_is_noted(tmp_path: Path) -> None:
    filled = filling(lambda _, body: body["golden"]["outputs"][1].update(deterministic=False))
    report = verify_bundle(write_bundle(tmp_path / "net", filled).path)
    assert report.ok
    assert "not judged, because the original is not deterministic there: positive" in report.notes


# ---------------------------------------------------------------------------------------------------- untrusted bundles


def test_only_the_expected_bundle_is_run(bundle: Bundle, tmp_path: Path) -> None:
    expect = bundle.sha256sums
    assert expect == hashlib.sha256((bundle.path / "SHA256SUMS").read_bytes()).hexdigest()
    assert verify_bundle(bundle.path, expect=expect.upper()).ok
    assert len(Affine.loaded) == 1
    # Another bundle, whose own hashes are right.
    other = write_bundle(tmp_path / "other", lambda folder: fill(folder, weight=WEIGHT + 1))
    for run in (True, False):
        report = verify_bundle(other.path, expect=expect, run=run)
        assert not report.intact
        (problem,) = report.problems
        assert problem.startswith("This is not the expected bundle: the SHA-256 of its SHA256SUMS is ")
        assert problem.endswith(f"{other.sha256sums}, not {expect}.")
    assert len(Affine.loaded) == 1
    (bundle.path / "SHA256SUMS").unlink()
    assert "SHA256SUMS is missing." in verify_bundle(bundle.path, expect=expect).problems
    with pytest.raises(BundleError, match="SHA256SUMS"):
        assert bundle.sha256sums
    assert len(Affine.loaded) == 1


def test_without_running_hashes_and_golden_data_are_checked(bundle: Bundle) -> None:
    report = verify_bundle(bundle.path, run=False)
    assert report.ok
    assert report.to_json()["device"] is None
    assert report.notes == ("the files are those that SHA256SUMS lists; no artifact was loaded or run",)
    assert str(report).startswith(f"{bundle.path}: intact; nothing was run")
    expected = verify_bundle(bundle.path, run=False, expect=bundle.sha256sums)
    assert expected.notes == ("the files are those of the expected SHA256SUMS; no artifact was loaded or run",)
    flip(bundle.path / "model.affine", 9)
    assert "model.affine was changed" in verify_bundle(bundle.path, run=False).problems[0]
    assert Affine.loaded == []


def test_what_makes_no_sense_together_is_refused(bundle: Bundle) -> None:
    for expect in ("", "0" * 63, "g" * 64, 7):
        with pytest.raises(UsageError, match="is not a SHA-256, which has 64 hexadecimal digits"):
            verify_bundle(bundle.path, expect=expect)
    for options in ({"device": "cuda"}, {"require_gpu": True}):
        with pytest.raises(UsageError, match="run=False runs nothing"):
            verify_bundle(bundle.path, run=False, **options)


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def as_link_out(path: Path) -> None:
    shutil.move(path, path.parent.parent / "outside")
    path.symlink_to("../outside")


def as_huge(path: Path) -> None:
    os.truncate(path, 1 << 36)


def told(use: Callable[[], Any]) -> str:
    """The problems of a bundle, from the error or from the report."""
    try:
        report = use()
    except BundleError as error:
        return str(error)
    assert not report.intact
    return " ".join(report.problems)


@pytest.mark.skipif(os.name != "posix", reason="files of POSIX")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["SHA256SUMS", "manifest.json", "golden.safetensors", "model.affine"])
@pytest.mark.parametrize("make", [as_fifo, as_endless, as_link_out, as_huge])
def test_what_is_no_plain_file_of_a_sane_size_is_never_read(
    bundle: Bundle, name: str, make: Callable[[Path], None]
) -> None:
    make(bundle.path / name)
    assert name in told(lambda: verify_bundle(bundle.path))
    assert name in told(lambda: verify_bundle(bundle.path, run=False))
    assert name in told(lambda: verify_bundle(bundle.path, expect="0" * 64))
    if name in {"SHA256SUMS", "manifest.json"}:
        assert name in told(lambda: rejudge_bundle(bundle.path))
    if name != "model.affine":
        with pytest.raises(BundleError, match=name):
            bundle.golden()
    with pytest.raises(BundleError, match=r"is not replaced|which this program|changed since|with other contents"):
        check_target(bundle.path, force=True)
    assert Affine.loaded == []


def test_the_factor_grows_with_the_distance_of_the_devices() -> None:
    here, same_kind, gpu = ({"type": t, "name": n} for t, n in (("cpu", "a"), ("cpu", "b"), ("cuda", "c")))
    assert factor_between(here, here) == 1 < factor_between(here, same_kind) < factor_between(here, gpu)


def test_a_device_that_is_missing_is_an_error(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, require in (("cuda", False), ("cuda:0", False), ("cpu", True), ("auto", True)):
        with pytest.raises(DeviceError):
            verify_bundle(bundle.path, device=device, require_gpu=require)
    with pytest.raises(UsageError, match="There is no device 'nonsense'"):
        verify_bundle(bundle.path, device="nonsense")
    assert verify_bundle(bundle.path, device="auto").device == "cpu"


# -------------------------------------------------------------------------------------------------- golden data, hashes


def noise(name: str, **changes: Any) -> OutputNoise:
    zeros = dict.fromkeys(("own_error", "own_error_rms", "response", "response_rms"), 0.0)
    given = {"kind": "output", "dtype": "float32", "scale": 1.0, "rms": 1.0, "noise": 1e-7, "noise_rms": 1e-7}
    rest = {"signal": None, "deterministic": True, "tied": 0}
    return OutputNoise(**{"name": name, **given, **zeros, **rest, **changes})


def test_golden_data_come_back_as_they_were(tmp_path: Path) -> None:
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    inputs = {
        "view": whole[:, 1],
        "other_view": whole,
        "transposed": whole.t(),
        "flags": torch.tensor([True, False]),
        "ids": torch.tensor([1, 2**40]),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "scalar": torch.tensor(3.0),
        "none": torch.empty(0, 2),
        "complex": torch.tensor([1 + 2j], dtype=torch.complex128).conj(),
    }
    call = Call(tuple(inputs.values()), {})
    ids, mask = torch.tensor([3, 4]), torch.tensor([True, False])
    entries = [
        GoldenEntry(3, 1, call, {"hidden.0": whole, "ids": ids}, {"ids": mask}),
        GoldenEntry(None, 0, call, {"hidden.0": whole[:1], "ids": ids}, {}),
    ]
    noises = {"hidden.0": noise("hidden.0", noise=float("inf")), "ids": noise("ids", dtype="int64")}
    names = ["hidden_0", "ids"]
    section = write_golden(
        tmp_path, entries, noises, flatten=flat, input_names=list(inputs), output_names=names, rtol={"hidden.0": 1e-3}
    )
    section = json.loads(to_json_text(section))
    for entry, found in zip(entries, read_golden(tmp_path, around(tmp_path, section)), strict=True):
        assert (entry.batch_size, entry.draw) == (found.batch_size, found.draw)
        assert list(found.inputs) == list(inputs)
        assert list(found.outputs) == names
        assert list(found.tied) == list(entry.tied)
        given = (*inputs.values(), *entry.outputs.values(), *entry.tied.values())
        for tensor, back in zip(
            given, (*found.inputs.values(), *found.outputs.values(), *found.tied.values()), strict=True
        ):
            assert tensor.dtype == back.dtype
            assert torch.equal(tensor, back)
    assert stored_noises(section)["hidden_0"] == noise("hidden_0", noise=float("inf"))
    assert stored_tolerances(section) == {"rtol": {"hidden_0": 1e-3}}


def around(folder: Path, section: dict[str, Any]) -> dict[str, Any]:
    """The fields of a manifest that reading golden data needs."""
    path = folder / "golden.safetensors"
    file = {"path": path.name, "bytes": path.stat().st_size, "sha256": file_digest(path)}
    return {"golden": section, "artifacts": [], "files": [file]}


def test_golden_data_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs at least one call"):
        write_golden(tmp_path, [], {}, flatten=flat, input_names=[], output_names=[])
    for wrong in ({"input_names": ["x", "z"]}, {"output_names": ["y"]}):
        with pytest.raises(ValueError, match="a call has 1 inputs and the outputs"):
            golden(tmp_path, **wrong)
    section = golden(tmp_path)
    section["calls"][0]["inputs"] = ["z"]
    with pytest.raises(BundleError, match="lacks the tensor 'call0/input/z'"):
        read_golden(tmp_path, around(tmp_path, section))
    manifest = around(tmp_path, section)
    (tmp_path / "golden.safetensors").write_bytes(b"nonsense")
    with pytest.raises(BundleError, match="can't be read"):
        read_golden(tmp_path, around(tmp_path, section))
    with pytest.raises(BundleError, match=r"golden\.safetensors was changed: it has 8 bytes"):
        read_golden(tmp_path, manifest)


def test_nothing_of_a_bundle_is_used_before_its_hash(bundle: Bundle) -> None:
    for name, uses in {
        "golden.safetensors": (bundle.golden,),
        "model.affine": (lambda: bundle.load("affine"), lambda: bundle.artifacts[0].load()),
        "manifest.json": (bundle.golden, lambda: bundle.load("affine"), lambda: bundle.artifacts[0].load()),
    }.items():
        path = bundle.path / name
        written = path.read_bytes()
        path.write_bytes(written[:-1] + bytes([written[-1] ^ 1]))
        for use in uses:
            with pytest.raises(BundleError, match=f"{name}.* was changed"):
                use()
        path.write_bytes(written)
    assert Affine.loaded == []
    bundle.load("affine")
    assert Affine.loaded


@pytest.mark.parametrize("kind", ["input", "output", "tied", "shape of tied", "complex"])
def test_golden_data_of_another_dtype_or_shape_are_damage(bundle: Bundle, kind: str) -> None:
    """The hashes are right, so only the checks of the golden data can find the damage."""
    path, manifest = bundle.path / "golden.safetensors", bundle.manifest
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    (call, *_), output = manifest["golden"]["calls"], manifest["golden"]["outputs"][0]["name"]
    given = call["inputs"][0]
    part = {"complex": "output", "shape of tied": "tied"}.get(kind, kind)
    key = f"{call['name']}/{part}/{given if kind == 'input' else output}"
    if kind == "tied":
        tensors[key] = torch.ones_like(tensors[f"{call['name']}/output/{output}"])
    elif kind == "shape of tied":
        tensors[key] = torch.ones(7, 11, dtype=torch.bool)
    elif kind == "complex":
        metadata = {"optimize-export-bundle": json.dumps({"complex": [key]})}
    else:
        tensors[key] = tensors[key].to(torch.float64)
    save_file(tensors, path, metadata=metadata)
    tied = [output] if part == "tied" else call["tied"]
    seal(bundle.path, lambda manifest: manifest["golden"]["calls"][0].update(tied=tied))
    report = verify_bundle(bundle.path)
    assert not report.intact
    (problem,) = report.problems
    assert key in problem
    assert ("isn't made of pairs of real numbers." in problem) == (kind == "complex")
    assert report.artifacts == ()


def test_the_hash_of_weights_is_of_their_names_and_values_alone() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    known = weights_hash({"a": weight, "b": torch.ones(2)})
    assert known == weights_hash({"b": torch.ones(2), "a": weight.t().contiguous().t()})
    assert known == weights_hash({"b": torch.ones(4)[::2], "a": torch.nn.Parameter(weight.clone())})
    others: list[dict[str, torch.Tensor]] = [
        {"a": torch.zeros(2, 2)},
        {"a": torch.zeros(4)},
        {"a": torch.zeros(2, 2, dtype=torch.int32)},
        {"a": torch.zeros(2, 2), "b": torch.zeros(0)},
        {"c": torch.zeros(2, 2)},
        {"a": torch.tensor([[0.0, 0.0], [0.0, -0.0]])},
    ]
    assert len({*map(weights_hash, others)}) == len(others)


def test_the_hash_of_weights_takes_every_kind_of_entry() -> None:
    state: dict[str, Any] = {
        "bf16": torch.ones(3, dtype=torch.bfloat16),
        "f8": torch.ones(3).to(torch.float8_e4m3fn),
        "flag": torch.tensor(True),
        "complex": torch.tensor([1j]),
        "conjugate": torch.tensor([1j]).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
        "bytes": b"abc",
        "json": {"x": 1},
        "other": io.BytesIO(),
    }
    known = weights_hash(state)
    assert known == weights_hash(state)
    for name, value in (
        ("conjugate", torch.tensor([1j])),
        ("bytes", b"abd"),
        ("json", {"x": 2}),
        ("flag", torch.tensor(False)),
    ):
        assert weights_hash({**state, name: value}) != known


@pytest.mark.slow
def test_the_hash_of_weights_makes_no_copy_of_the_whole() -> None:
    script = (
        "import resource, torch\n"
        "from optimizer.bundle.manifest import weights_hash\n"
        "state = {str(n): torch.ones(16 << 20) for n in range(4)}\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "weights_hash(state)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert int(done.stdout) < 64 << 10  # kB; the weights are 256 MB, the largest tensor 64 MB


def fields_of(kind: Any) -> set[str]:
    if isinstance(kind, list | tuple):
        return set().union(*map(fields_of, kind))
    if not isinstance(kind, dict):
        return set()
    return {name.removesuffix("?") for name in kind if isinstance(name, str)}.union(*map(fields_of, kind.values()))


def test_every_field_of_the_manifest_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "bundle.md").read_text(encoding="utf-8")
    assert len(fields_of(schema._MANIFEST)) > 100
    assert [field for field in sorted(fields_of(schema._MANIFEST)) if f"`{field}`" not in text] == []
