"""The wheel and the sdist: what they contain, that they are the same, and that the wheel works where it is installed."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("hatchling", reason="part of the extra `test`")

ROOT = Path(__file__).parents[1]
PACKAGES = ("optimize_export", "optimizer", "passes", "exporters")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(folder: Path, target: Path, *kinds: str) -> None:
    chosen = [part for kind in kinds for part in ("--target", kind)]
    run(sys.executable, "-m", "hatchling", "build", "--directory", target, *chosen, cwd=folder)


def contents(wheel: Path) -> dict[str, int]:
    """The checksum of each file, by its name."""
    with zipfile.ZipFile(wheel) as file:
        return {each.filename: each.CRC for each in file.infolist()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder, "wheel", "sdist")
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return built / f"optimize_export-{VERSION}-py3-none-any.whl"


def test_the_wheel_has_the_packages_and_the_license_alone(wheel: Path) -> None:
    names = set(contents(wheel))
    info = f"optimize_export-{VERSION}.dist-info"
    written = {path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()}
    wanted = {str(path.relative_to(ROOT)) for path in written if "__pycache__" not in path.parts}
    assert names - {name for name in names if name.startswith(info)} == {*wanted, "_optimize_export_start.py"}
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert {f"{info}/licenses/LICENSE", f"{info}/entry_points.txt"} <= names


def test_the_sdist_gives_the_same_wheel(built: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(built / f"optimize_export-{VERSION}.tar.gz") as file:
        file.extractall(tmp_path, filter="data")
    unpacked = tmp_path / f"optimize_export-{VERSION}"
    names = {path.name for path in unpacked.iterdir()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "tests", "docs", "examples"} <= names
    assert not names & {".venv", "dist", "build", ".git"}
    build(unpacked, tmp_path, "wheel")
    assert contents(tmp_path / wheel.name) == contents(wheel)


def test_the_wheel_works_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    """The dependencies are those of this environment; nothing is downloaded."""
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    site = next(venv.glob("lib/python*/site-packages"))
    dependencies = "".join(f"{folder}\n" for folder in sys.path if folder.endswith("site-packages"))
    (site / "dependencies.pth").write_text(dependencies, encoding="utf-8")
    (tmp_path / "net.py").write_text(
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).eval()\n"
        "example_inputs = (torch.randn(2, 3, 8, 8),)\n",
        encoding="utf-8",
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = venv / "bin" / "optimize-export"
    assert run(command, "--version", env=environment).startswith(f"optimize-export {VERSION} (torch ")
    build_it = (command, "net.py", "--formats", "torchscript", "--quick", "--quiet", "--device", "cpu")
    assert run(*build_it, cwd=tmp_path, env=environment) == "dist/net\n"
    home = run(python, "-c", "import optimizer; print(optimizer.__file__)", cwd=tmp_path, env=environment)
    assert Path(home.strip()).is_relative_to(site)
