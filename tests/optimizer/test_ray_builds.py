"""`build --on ray` on a cluster of two workers on this machine: the same bundles, documents and exit codes as with `-j`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from user_folder import INPUTS, NET

from optimize_export.errors import BundleError
from optimizer import export
from optimizer.command import cli, ray_builds
from optimizer.options import BuildOptions, ExportOptions

ray = pytest.importorskip("ray", reason="part of the extra `ray`")

ROOT = Path(cli.__file__).parent.parent.parent
SUPPORT = Path(__file__).parent.parent / "support"
CONFIG = """
[tool.optimize-export]
formats = "torchscript"
model = "net.py"
no-bench = true
"""
# The first build writes what the test kills, and waits for that.
WAITS = """
import os, time
flag = FLAG
if not os.path.exists(flag):
    with open(flag + ".new", "w") as file:
        file.write(os.environ["RAY_RAYLET_PID"])
    os.rename(flag + ".new", flag)
    time.sleep(300)
with open(flag + ".again", "a") as file:
    file.write("x")
"""


class Cluster:
    """Runs the command on the cluster, or without it."""

    def __init__(self, addresses: dict[str, str], folder: Path) -> None:
        self.address, self.client, self.folder = addresses["address"], addresses["client"], folder

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_ADDRESS": self.address,
            "RAY_AUTH_MODE": "disabled",
            "SOURCE_DATE_EPOCH": "1700000000",
        }
        command = [sys.executable, "-m", "optimizer", "build", *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *arguments: str, models: tuple[str, ...] = ("--all",)) -> tuple[int, dict[str, Any], str]:
        out, err = (process := self.start(*models, "--json", *arguments)).communicate(timeout=150)
        return process.returncode, json.loads(out), err

    def processes(self) -> list[str]:
        """The command lines of builds, and the temporary folders of builds on this machine."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().replace(b"\0", b" ").decode()
                where = os.readlink(path.parent / "cwd")
            except OSError:
                continue
            if "_optimize_export_start" in line and where.startswith(str(self.folder)):
                found.append(line)
        return [*found, *map(str, self.folder.glob("optimize-export-*"))]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Ray's sockets need a short path.
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    environment = {**os.environ, "RAY_TMPDIR": str(folder), "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SUPPORT / "ray_cluster.py")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
    try:
        yield Cluster(json.loads(process.stdout.readline()), folder)
    finally:
        process.stdin.close()
        process.wait(timeout=60)
        process.stdout.close()
        shutil.rmtree(folder)


@pytest.fixture
def project(tmp_path, monkeypatch) -> Callable[[str], None]:
    """Writes the config with a model file next to it."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET + INPUTS)

    def config(models: str) -> None:
        Path("pyproject.toml").write_text(CONFIG + models)

    return config


def timeless(value: Any) -> Any:
    """A JSON document without times, and without the profile and the stages, which have only times."""
    if isinstance(value, dict):
        return {key: timeless(each) for key, each in value.items() if key not in ("seconds", "profile", "stages")}
    return [timeless(each) for each in value] if isinstance(value, list | tuple) else value


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.slow
def test_a_cluster_that_loses_a_machine_builds_the_same_as_processes_side_by_side(cluster, project, tmp_path):
    flag = tmp_path / "flag"
    Path("waits.py").write_text(WAITS.replace("FLAG", repr(str(flag))) + NET + INPUTS)
    project(
        "[tool.optimize-export.models.a]\nresources = {worker = 1}\nprofile-dir = 'profiles/a'\n"
        "[tool.optimize-export.models.b]\nweights = 'missing.pt'\n"
        "[tool.optimize-export.models.c]\nmodel = 'waits.py'\n"
        "[tool.optimize-export.models.d]\n"
    )
    process = cluster.start("--all", "--json", "--on", cluster.client)
    wait_for(flag.exists)
    os.kill(int(flag.read_text()), signal.SIGKILL)
    out, log = process.communicate(timeout=200)
    assert log.count("c: the build is tried again, because its worker was lost: ") == 1
    assert (tmp_path / "flag.again").read_text() == "x"
    assert "a: bundle" in log
    assert "b: error: The weights file missing.pt doesn't exist." in log
    for folder in ("dist", "profiles"):
        os.rename(folder, f"cluster-{folder}")

    code, expected, _ = cluster.run("-j", "2")
    assert (process.returncode, timeless(json.loads(out))) == (code, timeless(expected))
    assert code == 3
    assert [each["ok"] for each in expected["models"].values()] == [True, False, True, True]
    assert files(Path("cluster-dist")) == files(Path("dist"))
    assert files(Path("cluster-profiles")).keys() == files(Path("profiles")).keys()
    wait_for(lambda: not cluster.processes())


@pytest.mark.slow
def test_a_bundle_that_is_there_is_compared_and_replaced_on_the_cluster(cluster, project):
    project("[tool.optimize-export.models.a]\n")
    assert cluster.run("-j", "2")[0] == 0
    results = [cluster.run("--if-changed", *more) for more in (("-j", "2"), ("--on", "ray"))]
    assert timeless(results[0]) == timeless(results[1])
    assert results[0][1]["models"]["a"]["up_to_date"]
    _, found, log = cluster.run("--if-changed", "--on", "ray", "--seed", "2")
    assert found["models"]["a"]["changed"] == ["--seed changed from the default to 2"]
    assert "a: building dist/a: --seed changed from the default to 2" in log
    assert json.loads(Path("dist/a/manifest.json").read_text())["seed"] == 2
    assert cluster.processes() == []


@pytest.mark.slow
def test_what_no_machine_can_do_is_refused_at_once(cluster, project):
    project(
        "resources = {CPU = 1}\n[tool.optimize-export.models.a]\n[tool.optimize-export.models.b]\nresources = {GPU = 1}\n"
    )
    code, document, _ = cluster.run("--on", "ray")
    assert code == 5
    assert document["error"]["message"].startswith(
        "The model b asks for a machine with CPU = 1, GPU = 1, but the cluster has none; its largest amounts are CPU = 1, "
    )
    assert not Path("dist").exists()
    project(
        "[tool.optimize-export.models.a]\nweights = 'w.pt'\n[tool.optimize-export.models.b]\nweights = 'dist/d/w.bin'\n"
        "[tool.optimize-export.models.c]\n[tool.optimize-export.models.d]\n"
    )
    for path in (Path("w.pt"), Path("dist/c/other"), Path("dist/d/w.bin")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    Path(".gitignore").write_text("*.pt\n")
    code, document, _ = cluster.run("--on", "ray", models=("a", "b", "c"))
    assert code == 8
    told = {name: each["error"]["message"] for name, each in document["models"].items()}
    assert told["a"].startswith("The machine of the build has no w.pt: Ray sends the ")
    assert told["b"].startswith("The machine of the build has no dist/d/w.bin: "), (
        "d isn't built, and isn't sent either"
    )
    assert told["c"] == (
        f"{Path('dist/c').absolute()} is a folder with other contents, which is not replaced: choose another folder."
    )


@pytest.mark.slow
def test_sigterm_ends_the_builds_on_the_workers(cluster, project, tmp_path):
    """Ray has a handler of its own for this one, unlike for Ctrl-C."""
    project("[tool.optimize-export.models.a]\n")
    flag = tmp_path / "flag"
    Path("net.py").write_text(WAITS.replace("FLAG", repr(str(flag))) + NET + INPUTS)
    process = cluster.start("a", "--on", "ray")
    wait_for(flag.exists)
    assert cluster.processes()
    process.terminate()
    out, err = process.communicate(timeout=40)
    assert (process.returncode, out) == (143, "")
    assert err.splitlines()[-1].startswith("optimize-export: ")
    wait_for(lambda: not cluster.processes())
    assert not Path("dist").exists()


class HereRay:
    """What a build uses of Ray to fetch files, with the "machine" in this process."""

    @staticmethod
    def wait(calls: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return calls, []

    @staticmethod
    def get(call: Any) -> Any:
        return call


@pytest.mark.parametrize("damaged", ["", "model.torchscript.pt", "SHA256SUMS"])
def test_a_bundle_is_fetched_in_parts_and_takes_its_place_only_if_its_hashes_agree(tmp_path, monkeypatch, damaged):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_builds, "_PART_BYTES", 1000)
    model, inputs = torch.nn.Linear(4, 3).eval(), (torch.ones(2, 4),)
    bundle = export(model, example_inputs=inputs, output="there/dist/a", formats=("torchscript",), bench=False)
    sizes = {f"dist/a/{name}": len(data) for name, data in files(bundle.path).items()}
    assert max(sizes.values()) > 1000

    def part(path: str, start: int, length: int) -> bytes:
        data = Path("there", path).read_bytes()
        data = data.replace(data[-3:], b"???") if damaged and path.endswith(damaged) else data
        return data[start : start + length]

    asked = ExportOptions(model="net.py", output=Path("dist/a"))
    build = ray_builds._Build(HereRay, "a", asked, BuildOptions({}, {}, {}, []), Event(), print)
    actor = SimpleNamespace(part=SimpleNamespace(remote=part))
    document = {"sha256sums": bundle.sha256sums}
    if damaged:
        with pytest.raises(BundleError, match="dist/a came back damaged from the cluster: "):
            build._fetch(actor, Path("dist/a"), sizes, document)
        assert not Path("dist").exists()
    else:
        build._fetch(actor, Path("dist/a"), sizes, document)
        assert files(Path("dist/a")) == files(bundle.path)


def test_a_lost_connection_to_the_cluster_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lost = MagicMock(exceptions=ray.exceptions)
    lost.wait.side_effect = [([1], []), ConnectionError("Client is shutting down.")]
    lost.get.return_value = None
    lost.is_initialized.return_value = False
    lost.kill.side_effect = Exception("Ray Client is not connected.")
    asked, started = ExportOptions(model="net.py", output=Path("dist/a")), list[str]()
    options = BuildOptions({"a": []}, {"a": asked}, {"a": {}}, [])
    document, log = ray_builds._Build(lost, "a", asked, options, Event(), started.append).documented()
    assert started == ["a"], "it was lost during the build"
    assert document["error"]["message"] == "The connection to the cluster was lost during the build."
    assert (document["exit_code"], log) == (5, f"optimize-export: error: {document['error']['message']}\n")


@pytest.mark.parametrize("arguments", [["--on", "ray://127.0.0.1:9"], ["--on", "ray"]])
def test_a_wrong_address_is_one_sentence(project, capfd, monkeypatch, arguments):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    project("[tool.optimize-export.models.a]\n")
    assert cli.main(["build", "--all", *arguments]) == 5
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"optimize-export: error: --on {arguments[1]}: Ray can't be used: [Errno 111] Connection refused."
    ]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ray.exceptions.RuntimeEnvSetupError("Package size exceeds 512 MiB."), "Package size exceeds 512 MiB."),
        (
            ConnectionError("ray client connection timeout"),
            "ray client connection timeout. If the cluster asks for a token, set RAY_AUTH_MODE=token.",
        ),
    ],
)
def test_what_ray_refuses_is_one_sentence_with_the_reason(project, capfd, monkeypatch, error, told):
    def init(*_: Any, **__: Any) -> None:
        warnings.warn("Ray Client connection timed out.", stacklevel=1)
        raise error

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    project("[tool.optimize-export.models.a]\n")
    assert cli.main(["build", "a", "--on", "ray"]) == 5
    assert capfd.readouterr().err == f"optimize-export: error: --on ray: Ray can't be used: {told}\n"


def test_a_machine_without_ray_names_the_line_that_installs_it(project, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    project("[tool.optimize-export.models.a]\n")
    assert cli.main(["build", "a", "--on", "ray"]) == 2
    assert capfd.readouterr().err == (
        "optimize-export: error: --on ray needs Ray, which isn't installed: pip install 'optimize-export[ray]'.\n"
    )


@pytest.mark.parametrize("output", ["../a", "/tmp/a", "x/../../a"])
def test_outputs_outside_of_the_current_folder_are_refused(project, capfd, output):
    project(f"[tool.optimize-export.models.a]\noutput = {output!r}\n")
    assert cli.main(["build", "a", "--on", "ray"]) == 2
    assert f"make {output} a relative path in it." in capfd.readouterr().err
