"""The public names of `exporters` are imported when they are first used."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import exporters

ROOT = Path(__file__).parents[2]


def test_each_public_name_is_listed_and_the_one_of_its_module_and_no_others_exist():
    for name in exporters.__all__:
        value = getattr(exporters, name)
        assert value is getattr(import_module(value.__module__), name), name
    assert set(exporters.__all__) <= set(dir(exporters))
    assert set(exporters.__all__) == set(exporters._HOMES)
    with pytest.raises(AttributeError, match="module 'exporters' has no attribute 'Exporters'"):
        exporters.Exporters  # noqa: B018


def test_what_runs_onnx_files_imports_no_torch():
    modules = "exporters, optimize_export.onnx_runtime, optimize_export.runtime, optimize_export.manifest"
    script = f"import sys, {modules}; print({{'torch', 'onnx', 'safetensors', 'click', 'rich'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
