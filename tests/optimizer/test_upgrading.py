"""`verify --with`: other versions of a runtime are installed, run and judged as `verify` judges, next to the installed ones."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import onnxruntime
import pytest
import torch
from torch import nn

from exporters.errors import OtherMachine
from optimize_export.errors import DeviceError, UsageError
from optimize_export.runtime import Route, growth
from optimize_export.runtime.growth import MeasuredFile, packed
from optimizer import Bundle, export
from optimizer.command.cli import main
from optimizer.comparing import environments, upgrading, verify_with
from optimizer.comparing.environments import cache_folder, environment, ground_floor
from optimizer.comparing.running import route_of
from optimizer.option_texts import distribution_of, parse_sets

REAL = Path(onnxruntime.__file__).parent
# The package of another version: it runs the installed one.
ONNXRUNTIME = f"""
__path__[:] = [{str(REAL)!r}]
exec(compile(open({str(REAL / "__init__.py")!r}).read(), "onnxruntime", "exec"))
class InferenceSession(InferenceSession):
    def run(self, *args):
        return [{{change}} for each in super().run(*args)]
"""


def wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Write a wheel with these files."""
    info = f"{name}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{each},,\n" for each in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for each, text in files.items():
            archive.writestr(each, text)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    target = tmp_path_factory.mktemp("bundles") / "net"
    return export(model, example_inputs=(torch.randn(2, 4),), output=target, effort="quick")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels of other versions. The environment finds all packages of this one through that of numpy."""
    folder = tmp_path_factory.mktemp("wheels")
    places = [each for each in sys.path if each.endswith("-packages")]
    wheel(folder, "numpy", "99.0", {"real.pth": "\n".join(places) + "\n"})
    wheel(folder, "numpy", "99.1", {})
    wheel(folder, "torch", "99.0", {"torch-note.txt": ""})
    wheel(folder, "onnxruntime_telemetry", "99.0", {})
    for version, change in (("99.0", "each"), ("99.1", "each + 1"), ("99.2", "__import__('os')._exit(3)")):
        wheel(folder, "onnxruntime", version, {"onnxruntime/__init__.py": ONNXRUNTIME.format(change=change)})
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheels: Path) -> None:
    """pip finds these wheels only, and each test has a cache of its own."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_files_run_with_other_versions_next_to_the_installed_ones(bundle: Bundle) -> None:
    found = verify_with(
        bundle.path, [("onnxruntime==99.0", "numpy==99.0"), ("torch==99.0", "numpy==99.0")], seconds=0.5
    )
    assert found.exit_code == 0
    assert not found.problems
    assert [each.figures.path for each in found.installed.files] == ["model.torchscript.pt", "model.onnx"]
    onnx, scripted = found.sets
    assert onnx.libraries["onnxruntime"] == scripted.libraries["torch"] == "99.0"
    for made, path, other in (
        (onnx, "model.onnx", "model.torchscript.pt"),
        (scripted, "model.torchscript.pt", "model.onnx"),
    ):
        (file,) = made.files
        assert (file.figures.path, file.figures.verdict, file.identical) == (path, "ok", True)
        assert file.timing is not None
        assert file.timing.ratio.rounds >= 3
        assert file.memory is not None
        assert made.notes == [f"{other} wasn't run: the set doesn't name {'torch' if made is onnx else 'onnxruntime'}"]
    told = found.to_json()
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_wrong_outputs_and_crashes_have_the_exit_code_of_verify(
    bundle: Bundle, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    junit = tmp_path / "gate.xml"
    sets = ["onnxruntime==99.0", "onnxruntime==99.1", "onnxruntime==99.2", "onnxruntime==98"]
    given = [part for each in sets for part in ("--with", f"{each} numpy==99.0")]
    code = main(["verify", str(bundle.path), *given, "--seconds", "0.5", "--junit", str(junit)])
    shown = capsys.readouterr()
    assert code == 6
    lines = shown.out.splitlines()
    assert lines[0].split()[:3] == ["with", "file", "latency"]
    rows = {line.split("  ")[0]: line for line in lines}
    assert rows["installed"].endswith("of the allowed error")
    assert "the same" in rows["onnxruntime==99.0 numpy==99.0"]
    assert "different" in rows["onnxruntime==99.1 numpy==99.0"]
    assert rows["onnxruntime==99.1 numpy==99.0"].endswith("failed")
    ends = [line for line in lines if ": exit code" in line]
    assert [line.partition(": exit code ")[2].split(",")[0] for line in ends] == ["0", "6", "6", "2"]
    problems = shown.err.splitlines()
    assert any("with onnxruntime==99.1 numpy==99.0: model.onnx: " in line for line in problems)
    assert any("with onnxruntime==99.2" in line and "ends its process (exit code 3)" in line for line in problems)
    assert any("pip finds no wheel of onnxruntime==98 for Python" in line for line in problems)
    text = junit.read_text(encoding="utf-8")
    assert 'classname="net/model.onnx with onnxruntime==99.1 numpy==99.0"' in text


def test_without_the_runtime_here_the_set_is_judged_alone(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrading, "is_installed", lambda runtime: False)
    found = verify_with(bundle.path, [("onnxruntime==99.0", "numpy==99.0")], seconds=0.2)
    (file,) = found.sets[0].files
    assert (found.exit_code, file.identical, file.timing, found.installed.files) == (0, None, None, [])
    assert file.memory is not None


def test_a_set_that_names_no_runtime_is_refused_before_anything_is_built(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upgrading, "environment", lambda *_: pytest.fail("built"))
    with pytest.raises(
        UsageError, match=r"numpy==99\.0 names no runtime .*: name torch or onnxruntime or openvino, with a"
    ):
        verify_with(bundle.path, [("numpy==99.0",)])


def test_a_damaged_bundle_is_not_run(bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(bundle.path, tmp_path / "net")
    (folder / "model.onnx").write_bytes(b"")
    assert main(["verify", str(folder), "--with", "onnxruntime==99.0"]) == 8
    assert "model.onnx" in capsys.readouterr().err
    assert not cache_folder().exists()


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        (["--no-run"], "--no-run and --with"),
        (["--device", "cuda"], "--with runs the files on the CPU only"),
        (["--require-gpu"], "--with runs the files on the CPU only"),
    ],
)
def test_options_that_contradict_it(others: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "dist/x", "--with", "torch==2.12", *others]) == 2
    assert sentence in capsys.readouterr().err
    assert main(["verify", "dist/x", "--seconds", "3"]) == 2


def test_a_file_for_another_machine_is_a_problem_only_alone(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(path: Path, *_: Any) -> Any:
        raise OtherMachine(f"{path.name} was compiled by another release")

    monkeypatch.setattr(upgrading, "environment", lambda *_: Path(sys.executable))
    monkeypatch.setattr(upgrading, "RunningFile", refusing)
    found = verify_with(bundle.path, [("torch==99.0",)])
    assert found.exit_code == 6
    assert found.sets[0].problems == (
        "model.torchscript.pt wasn't run: model.torchscript.pt was compiled by another release",
    )
    (made,) = found.sets
    made.files.append(upgrading.RanFile(dataclasses.replace(failed := _figures(), error=None, parity=None), "torch"))
    assert failed.error
    assert made.exit_code == 0
    assert made.to_json()["notes"][-1].startswith("model.torchscript.pt wasn't run")


def _figures() -> Any:
    return upgrading.failed_artifact({"format": "torchscript", "path": "model.torchscript.pt"}, (), "cpu", "it fails")


# Environments ---------------------------------------------------------------------------------------------------------


def test_an_environment_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    python = environment(("onnxruntime==99.0", "numpy==99.1"))
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert environment(("onnxruntime==99.0", "numpy==99.1")) == python
    assert environment(("numpy==99.1", "onnxruntime==99.0")) == python
    assert [each for each in cache_folder().iterdir() if each.name.startswith(".")] == []


def test_finding_pip_leaves_distutils_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """setuptools takes a search for pip by the finders of `sys.meta_path` as a sign that pip runs in this process."""
    searched = []

    class Finder:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            searched.append(name)

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    assert environment(("onnxruntime==99.1",)).exists()
    assert "pip" not in searched


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_interrupted_build_leaves_nothing_and_ends_all_of_pip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    beats = tmp_path / "beats"
    inner = f"import time\nwhile True: open({str(beats)!r}, 'a').write('x'); time.sleep(0.02)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    real = subprocess.Popen

    def hanging(command: list[str], **settings: Any) -> Any:
        return real([sys.executable, "-c", outer], **settings)

    def interrupt() -> None:
        while not beats.exists():
            time.sleep(0.02)
        signal.pthread_kill(main, signal.SIGINT)

    main = threading.main_thread().ident
    assert main is not None
    monkeypatch.setattr(environments.subprocess, "Popen", hanging)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        environment(("onnxruntime==99.0",))
    assert [*cache_folder().iterdir()] == []
    size = beats.stat().st_size
    time.sleep(0.3)
    assert beats.stat().st_size == size


def test_of_two_builds_at_once_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[Path] = []
    own = environments._build

    def slower(folder: Path, requirements: Any) -> None:
        builds.append(folder)
        if len(builds) == 1:
            environment(requirements)
        own(folder, requirements)

    monkeypatch.setattr(environments, "_build", slower)
    python = environment(("onnxruntime==99.0", "numpy==99.1"))
    assert python.exists()
    assert len(builds) == 2
    assert [*cache_folder().iterdir()] == [python.parent.parent]


def test_an_environment_without_its_interpreter_is_built_again() -> None:
    python = environment(("numpy==99.1",))
    python.unlink()
    assert environment(("numpy==99.1",)) == python
    assert python.exists()


def test_open_requirements_have_a_new_environment_each_day(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [("onnxruntime",), ("onnxruntime>=1.24",), ("onnxruntime==1.24.*",), ("onnxruntime==1.24.1",)]
    before = [environments._name_of(each) for each in sets]
    date = SimpleNamespace(today=lambda: datetime.date(2100, 1, 1))
    monkeypatch.setattr(environments, "datetime", SimpleNamespace(date=date))
    after = [environments._name_of(each) for each in sets]
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, False, False, True]


def test_a_set_without_the_runtime_itself_is_refused_and_not_kept(bundle: Bundle) -> None:
    found = verify_with(bundle.path, [("onnxruntime-telemetry==99.0",)])
    told = "The environment of onnxruntime-telemetry==99.0 has no onnxruntime: name it in the set."
    assert (found.exit_code, found.problems[0].startswith(f"with onnxruntime-telemetry==99.0: {told}")) == (2, True)
    assert [*cache_folder().iterdir()] == []


def test_without_a_home_folder_the_error_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", homeless)
    with pytest.raises(DeviceError, match="no home folder to keep environments in: set XDG_CACHE_HOME"):
        environment(("numpy==99.1",))


def test_pip_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"finds no wheel of onnxruntime==98 for Python .*; the newest are .*99\.2\.$"):
        environment(("onnxruntime==98",))
    with pytest.raises(UsageError, match=r"finds no wheel of onnxruntime-none for .*; it finds no version at all"):
        environment(("onnxruntime-none",))
    with pytest.raises(UsageError, match="pip doesn't understand onnxruntime~=99: Invalid requirement: "):
        environment(("onnxruntime~=99",))
    with pytest.raises(UsageError, match="can't be installed together: Cannot install"):
        environment(("numpy==99.0", "numpy==99.1"))
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_RETRIES", "1")
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/simple")
    with pytest.raises(DeviceError, match="pip can't reach its index"):
        environment(("onnxruntime==98",))
    assert [*cache_folder().iterdir()] == []


def test_a_cache_that_cannot_be_written_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DeviceError, match="No environment can be built in"):
        environment(("numpy==99.1",))


def test_other_environments_see_only_the_packages_that_run_files() -> None:
    with ground_floor() as folder:
        assert sorted(each.name for each in folder.iterdir()) == ["exporters", "optimize_export"]
        assert not [*folder.rglob("__pycache__")]
    assert not folder.exists()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("onnxruntime==1.24.1", ("onnxruntime==1.24.1",)),
        ("onnxruntime == 1.24.1  numpy>=2, <3", ("onnxruntime==1.24.1", "numpy>=2,<3")),
        ("torch==2.12,numpy", ("torch==2.12", "numpy")),
        ("onnxruntime>=1.24,!=1.25.*,openvino~=2026.1", ("onnxruntime>=1.24,!=1.25.*", "openvino~=2026.1")),
    ],
)
def test_a_set_is_read(text: str, parts: tuple[str, ...]) -> None:
    assert parse_sets("--with", [text, text]) == (parts,)


@pytest.mark.parametrize(
    "text",
    ["", " ", "--index-url=x", "./a.whl", "https://x/y.whl", "a;b", "a==", "a==1 --pre", "torch[x]", "a==1,", "@"],
)
def test_what_is_no_set_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a package with its versions; use for example --with onnxruntime"):
        parse_sets("--with", [text])


def test_names_are_normalized() -> None:
    assert distribution_of("ONNXRuntime_gpu>=1,<2") == "onnxruntime-gpu"
    assert distribution_of("numpy") == "numpy"


# Processes ------------------------------------------------------------------------------------------------------------


def test_a_measured_file_gives_outputs_latencies_and_versions(bundle: Bundle) -> None:
    (call, *_) = bundle.golden()
    inputs = [packed(each.numpy()) for each in call.inputs.values()]
    file = MeasuredFile(bundle.path / "model.onnx", Route("onnx", "onnxruntime"), inputs)
    (output,) = map(growth.unpacked, file("outputs", inputs, None))
    numpy.testing.assert_allclose(output, next(iter(call.outputs.values())), rtol=1e-4, atol=1e-5)
    assert len(file("latencies", 3)) == 3
    assert file("about")[0]["numpy"] == numpy.__version__


def test_a_file_for_another_machine_stays_one(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: Any) -> Any:
        raise DeviceError("torch can't load it") from OtherMachine("compiled elsewhere")

    monkeypatch.setattr(growth, "open_route", refusing)
    with pytest.raises(OtherMachine, match="compiled elsewhere"):
        MeasuredFile(bundle.path / "model.onnx", Route("onnx", "onnxruntime"), [])


def test_the_settings_are_those_of_the_recommended_route_unless_they_lower_the_precision() -> None:
    settings = {"threads": 1}
    manifest = {"benchmark": {"recommended": {"format": "onnx", "runtime": "openvino", "settings": settings}}}
    assert route_of(manifest, "onnx", "openvino") == Route("onnx", "openvino", settings)
    assert route_of(manifest, "onnx") == Route("onnx", "onnxruntime")
    settings["precision"] = "bfloat16"  # type: ignore[assignment]
    assert route_of(manifest, "onnx", "openvino") == Route("onnx", "openvino")
    assert route_of({}, "torchscript") == Route("torchscript", "torch")


@pytest.mark.zoo
def test_a_real_other_onnxruntime(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = verify_with(bundle.path, [("onnxruntime==1.24.1",)], seconds=2)
    assert found.exit_code == 0
    (made,) = found.sets
    # Nothing of this environment reaches it.
    assert set(made.libraries) == {"numpy", "onnxruntime"}
    assert made.libraries["onnxruntime"] == "1.24.1"
