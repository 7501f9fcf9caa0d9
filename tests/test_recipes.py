"""The recipes for the build step: `make`, the check before a deployment, and the program in C++."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.zoo

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "PYTHONWARNINGS": "ignore",
    "OPTIMIZE_EXPORT": f"{sys.executable} -m optimizer",
}


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the folder in which `make models` has run: it builds, verifies and writes Triton's repository."""
    folder = tmp_path_factory.mktemp("work") / "recipes"
    shutil.copytree(
        ROOT / "examples" / "recipes", folder, ignore=shutil.ignore_patterns("dist", "models", "__pycache__")
    )
    made = run("make", "models", cwd=folder)
    assert made.returncode == 0, made.stderr
    return folder


def test_make_builds_verifies_and_writes_the_repository(recipes: Path) -> None:
    assert (recipes / "models/net/1/model.onnx").is_file()
    config = (recipes / "models/net/config.pbtxt").read_text(encoding="utf-8")
    # models.toml asks for the check of the rows.
    assert "dynamic_batching" in config
    assert "not checked" not in config
    again = run("make", "build", cwd=recipes)
    assert again.returncode == 0, again.stderr
    assert json.loads((recipes / "build.json").read_text(encoding="utf-8"))["models"]["net"]["up_to_date"]


def test_a_bundle_that_changed_is_not_deployed(recipes: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(recipes, tmp_path / "recipes")
    with (folder / "dist/net/README.md").open("a", encoding="utf-8") as file:
        file.write("changed\n")
    assert run("sh", "predeploy.sh", "sums.txt", cwd=folder).returncode == 8
    # Nor is it if the list's last line has no end.
    (folder / "sums.txt").write_text((folder / "sums.txt").read_text(encoding="utf-8").rstrip(), encoding="utf-8")
    assert run("sh", "predeploy.sh", "sums.txt", cwd=folder).returncode == 8


def test_what_the_builder_does_not_list_is_not_deployed(recipes: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(recipes, tmp_path / "recipes")
    assert run("sh", "predeploy.sh", "sums.txt", cwd=folder).returncode == 0
    (folder / "dist" / "other").mkdir()
    done = run("sh", "predeploy.sh", "sums.txt", cwd=folder)
    assert (done.returncode, "dist/other/ isn't in sums.txt" in done.stderr) == (1, True)
    (folder / "sums.txt").write_text("", encoding="utf-8")
    done = run("sh", "predeploy.sh", "sums.txt", cwd=folder)
    assert (done.returncode, "lists no bundle" in done.stderr) == (1, True)


@pytest.mark.parametrize("extra", ["dist/other", "dist/.hidden", "dist/..odd", "more/other", "more/group/other"])
def test_a_folder_next_to_any_bundle_must_be_listed(tmp_path: Path, extra: str) -> None:
    lines = []
    for name in ("dist/net", "more/net", "more/group/net"):
        (tmp_path / name).mkdir(parents=True)
        lines.append(f"{'0' * 64}  {name}/SHA256SUMS\n")
    (tmp_path / "sums.txt").write_text("".join(lines), encoding="utf-8")
    command = ["env", "OPTIMIZE_EXPORT=true", "sh", ROOT / "examples/recipes/predeploy.sh", "sums.txt"]
    assert run(*command, cwd=tmp_path).returncode == 0
    (tmp_path / extra).mkdir()
    done = run(*command, cwd=tmp_path)
    assert (done.returncode, done.stderr.startswith(f"predeploy.sh: {extra}/ isn't in sums.txt")) == (1, True)


def test_the_upgrade_gate_runs_all_bundles_and_ends_with_the_highest_exit_code(tmp_path: Path) -> None:
    script = ROOT / "examples/recipes/upgrade-gate.sh"
    codes = {"a": 0, "b b": 6, "c": 2}
    for name in codes:
        (tmp_path / "dist" / name).mkdir(parents=True)
        (tmp_path / "dist" / name / "manifest.json").touch()
    (tmp_path / "dist" / "other").mkdir()
    cases = "".join(f'*/"{name}"/) exit {code};; ' for name, code in codes.items())
    (tmp_path / "verify").write_text(f'echo "$@" >> calls; case "$2" in {cases}esac', encoding="utf-8")
    command = ["env", "OPTIMIZE_EXPORT=sh verify", "sh", script]
    done = run(*command, "dist", "onnxruntime==1.24.1", "onnxruntime numpy<3", cwd=tmp_path)
    assert done.returncode == 6, done.stderr
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    sets = "--with onnxruntime==1.24.1 --with onnxruntime numpy<3"
    assert calls == [f"verify dist/{name}/ {sets} --junit results/{name}.xml" for name in codes]
    shutil.rmtree(tmp_path / "dist")
    assert run(*command, "dist", "onnxruntime", cwd=tmp_path).returncode == 1


def test_the_upgrade_gate_runs_a_real_other_version(recipes: Path, tmp_path: Path) -> None:
    command = ["env", f"XDG_CACHE_HOME={tmp_path}", "sh", "upgrade-gate.sh", "dist", "onnxruntime==1.24.1"]
    done = run(*command, cwd=recipes)
    assert done.returncode == 0, done.stderr
    assert "onnxruntime==1.24.1: exit code 0" in done.stdout
    assert "with onnxruntime==1.24.1" in (recipes / "results/net.xml").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("cmake") is None or shutil.which("c++") is None, reason="needs cmake and a compiler")
def test_the_torchscript_file_in_cpp(recipes: Path, tmp_path: Path) -> None:
    for command in (
        ("-S", recipes / "cpp", "-B", tmp_path, "-D", f"CMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"),
        ("--build", tmp_path, "--target", "torchscript_main"),
    ):
        done = run("cmake", *command, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    program = tmp_path / "torchscript_main"
    done = run(program, recipes / "dist/net", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"call0", "call1"} <= {line.split()[0] for line in done.stdout.splitlines()}

    # With other outputs in the golden data, it fails.
    other = shutil.copytree(recipes / "dist/net", tmp_path / "other")
    golden = (other / "golden.safetensors").read_bytes()
    (other / "golden.safetensors").write_bytes(golden[:-400] + bytes(400))
    assert run(program, other, cwd=tmp_path).returncode == 1
