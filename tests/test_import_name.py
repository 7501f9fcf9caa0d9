"""`optimize_export` is imported next to a user's own `optimizer.py`, `passes/` and `exporters.py`, and without onnxruntime."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import Net
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

import optimize_export
import optimizer
from optimize_export import export, load, optimize
from optimize_export.errors import DeviceError
from optimize_export.shadowing import refuse_shadowing_modules
from optimizer.command.cli import main

ROOT = Path(optimize_export.__file__).parents[1]
SENTENCE = "onnxruntime isn't installed here: pip install onnxruntime-gpu, or pip install onnxruntime"


def test_it_has_the_names_of_the_optimizer_and_a_version() -> None:
    assert optimize_export.__all__ == optimizer.__all__
    assert all(getattr(optimize_export, name) is getattr(optimizer, name) for name in optimizer.__all__)
    assert {*optimize_export.__all__, "__version__"} <= set(dir(optimize_export))
    assert re.fullmatch(r"\d+\.\d+\.\d+", optimize_export.__version__)
    for package in (optimize_export, optimizer):
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = package.nothing


@pytest.mark.parametrize("package", ["optimize_export", "optimizer"])
@pytest.mark.parametrize("name", ["verify_bundle", "export", "load"])
def test_a_function_whose_package_is_missing_names_both(
    monkeypatch: pytest.MonkeyPatch, package: str, name: str
) -> None:
    real = sys.modules[package].import_module

    def lacks(module: str) -> object:
        if module in ("optimize_export.errors", "optimize_export.shadowing"):
            return real(module)
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(sys.modules[package], "import_module", lacks)
    with pytest.raises(ModuleNotFoundError, match=rf"^{package}\.{name} needs the package torch, which isn't") as told:
        sys.modules[package].__getattr__(name)
    assert told.value.__suppress_context__
    assert str(told.value).endswith("here: pip install torch." if name == "load" else "needs numpy and a runtime.")


# ------------------------------------------------------------------------------------- next to the user's own modules


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder with the user's own `optimizer.py`, `passes/` and `exporters.py`."""
    folder = tmp_path / "theirs"
    (folder / "passes").mkdir(parents=True)
    for name in ("optimizer.py", "passes/__init__.py", "exporters.py"):
        (folder / name).write_text(f"WHOSE = {name!r}\n")
    return folder


def run_next_to(folder: Path, script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)


@pytest.mark.parametrize("name", ["optimizer.py", "passes/__init__.py", "exporters.py"])
def test_the_whole_interface_names_the_users_file_that_hides_ours(theirs: Path, name: str) -> None:
    for other in {"optimizer.py", "passes/__init__.py", "exporters.py"} - {name}:
        (theirs / other).unlink()
    done = run_next_to(theirs, "from optimize_export import load; print(load); from optimize_export import optimize")
    assert done.stdout.startswith("<function load")
    package = name.partition(".")[0].partition("/")[0]
    last = done.stderr.splitlines()[-1]
    assert last == (
        f"ImportError: optimize_export.optimize needs the package {package} of optimize-export, but Python finds "
        f"{theirs / name} first: rename it, or put its folder after {ROOT} on sys.path."
    )


def test_a_folder_of_that_name_without_code_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "optimizer").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "optimizer")
    refuse_shadowing_modules("optimize")


# Packages are hidden; then a bundle is loaded by threads and called between imports of the user's modules.
BESIDE = """
import sys, warnings
from concurrent.futures import ThreadPoolExecutor

sys.modules |= dict.fromkeys(sys.argv[2].split(","))
if "torch" in sys.argv[2]:
    warnings.simplefilter("error")
import numpy
import exporters
from optimize_export import load

with ThreadPoolExecutor(4) as pool:
    run, *_ = pool.map(load, sys.argv[1:2] * 4)
x = numpy.ones((5, 4), "float32")
outputs = run({"features": [x]})
assert (type(outputs["logits"]), outputs["logits"].shape, outputs["cap"]) == (numpy.ndarray, (5, 3), float("inf"))
assert outputs["hidden"].last_hidden_state.shape == (5, 4)
import optimizer, passes
assert sys.modules["exporters"] is exporters
assert (optimizer.WHOSE, passes.WHOSE, exporters.WHOSE) == ("optimizer.py", "passes/__init__.py", "exporters.py")
print(run.route)
"""
OTHERS = "onnx,onnxscript,onnx_ir,safetensors,click,rich,plotext,networkx,transformers"


def nested() -> nn.Module:
    """A model with containers, one of a class of transformers', and a constant."""

    def run(self: nn.Module, batch: Any) -> dict[str, Any]:
        (x,) = batch["features"]
        return {"logits": self.head(x), "hidden": BaseModelOutput(last_hidden_state=x * 2), "cap": math.inf}

    return Net(run, head=nn.Linear(4, 3)).eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "absent", "route"),
    [
        ("onnx", f"torch,{OTHERS}", "onnx in onnxruntime"),
        ("torchscript", "onnxruntime", "torchscript in torch"),
        ("pt2", "onnxruntime", "pt2 in torch"),
    ],
)
def test_load_works_next_to_them(theirs: Path, tmp_path: Path, format: str, absent: str, route: str) -> None:
    export(nested(), ({"features": [torch.randn(2, 4)]},), output=tmp_path / "net", formats=(format,))
    done = run_next_to(theirs, BESIDE, tmp_path / "net", absent)
    assert (done.returncode, done.stdout) == (0, f"{route}\n"), done.stderr


# ------------------------------------------------------------------------------------------------ without onnxruntime


@pytest.fixture
def _no_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)


@pytest.mark.usefixtures("_no_onnxruntime")
def test_other_formats_need_no_onnxruntime(tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    fast = optimize(nn.Linear(4, 3).eval(), example_inputs=(x,))
    options = {"formats": ("torchscript",), "tune": True, "tune_seconds": 1.0, "effort": "quick"}
    export(fast, example_inputs=(x,), output=tmp_path / "net", **options)
    assert torch.equal(load(tmp_path / "net")(x), fast(x))


@pytest.mark.usefixtures("_no_onnxruntime")
def test_onnx_files_ask_for_onnxruntime_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DeviceError, match=f"^{SENTENCE}"):
        export(nn.Linear(4, 3), example_inputs=(torch.randn(2, 4),), output=tmp_path / "net", tune=True)
    (tmp_path / "net.py").write_text(
        "import torch\nmodel, example_inputs = torch.nn.Linear(4, 3), (torch.ones(2, 4),)\n"
    )
    assert main([str(tmp_path / "net.py"), "--output", str(tmp_path / "net")]) == DeviceError.exit_code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"optimize-export: error: {SENTENCE}")
    assert not (tmp_path / "net").exists()


@pytest.mark.slow
def test_a_bundle_of_an_onnx_file_asks_for_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 4)
    export(nn.Linear(4, 3), example_inputs=(x,), output=tmp_path / "net", formats=("onnx",), effort="quick")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(DeviceError, match=SENTENCE):
        load(tmp_path / "net")
    report = optimizer.verify_bundle(tmp_path / "net")
    assert not report.ok
    assert SENTENCE in str(report)
