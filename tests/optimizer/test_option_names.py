"""The command names its options in messages of the library, and all settings are spelled once."""

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest
import torch

import optimizer
from exporters.errors import ExporterError
from optimize_export.errors import OptimizeExportError
from optimizer import export, optimize
from optimizer.command import commands
from optimizer.command.output import with_options
from optimizer.options import ExportOptions, ExportSettings, ShowOptions, options_of
from passes.errors import PassesError

KNOWN = commands.option_names("export")


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("replace it with `force=True`, or", "replace it with --force, or"),
        ("leave out `bench=False`.", "leave out --no-bench."),
        ("such as `accuracy=0.999`.", "such as --accuracy 0.999."),
        ("out of `dynamic=…`.", "out of --dynamic."),
        ("with `static_batch=True`.", "with --static-batch."),
        ("allow it by `finite_inputs=True`", "allow it by --finite-inputs"),
        # A line of the user's that is no argument of ours, or more than that.
        ("`keepdim=True` in `f(x, force=True)`", "`keepdim=True` in `f(x, force=True)`"),
    ],
)
def test_arguments_in_messages_of_the_library_become_options(message, told):
    assert with_options(message, KNOWN) == told


MISTAKES = {
    "calibration without accuracy": {"calibration": [torch.zeros(2, 4)]},
    "accuracy without tuning": {"accuracy": 0.9, "tune": False},
    "accuracy without timing": {"accuracy": 0.9, "bench": False},
    "tuning without timing": {"tune": True, "bench": False},
    "tuning and choices": {"tune": True, "choices": "x"},
    "no such choices": {"choices": "x"},
    "no budget": {"accuracy": 2},
    "no time": {"tune_seconds": 0},
    "no effort": {"effort": "much"},
    "no device": {"device": "tpu"},
    "no format": {"formats": ("onxx",)},
    "no opset": {"opset": "17"},
    "no seed": {"seed": "1"},
    "no size": {"batch_sizes": (0,)},
    "a dim that isn't there": {"dynamic": {"x": (7,)}},
    "an input that isn't there": {"dynamic": {"y": (0,)}},
    "fixed and open": {"dynamic": {"x": (0,)}, "static_batch": True},
    "names of too many inputs": {"input_names": ("a", "b")},
    "a tolerance of no output": {"atol": {"y": 1.0}},
    "no inputs": {"example_inputs": None},
    "a bundle in the way": {"output": "built"},
    "no signal": {"model": "zeros"},
    "no values": {"model": "meta"},
    "an unknown pass": {"passes": ["fold-conv"]},
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_errors_in_python_name_no_option_of_the_command(mistake, tmp_path, monkeypatch, built):
    monkeypatch.chdir(built)
    torch.manual_seed(0)
    models = {"net": torch.nn.Linear(4, 3), "zeros": torch.nn.Linear(4, 3)}
    torch.nn.init.zeros_(models["zeros"].weight)
    models["meta"] = torch.nn.Linear(4, 3, device="meta")
    arguments = {"model": "net", "output": tmp_path / "net", "example_inputs": (torch.randn(2, 4),), **mistake}
    with pytest.raises((OptimizeExportError, ExporterError, PassesError)) as caught:
        _make(models[arguments.pop("model")].eval(), **arguments)
    assert "--" not in str(caught.value)
    assert "command line" not in str(caught.value)


def _make(model, *, example_inputs, passes=(), formats=("onnx",), **arguments):
    fast = optimize(model, passes) if passes else model
    export(fast, example_inputs=example_inputs, formats=formats, **arguments)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    torch.manual_seed(0)
    export(
        torch.nn.Linear(4, 3).eval(),
        example_inputs=(torch.randn(2, 4),),
        output=folder / "built",
        formats=("torchscript",),
        bench=False,
    )
    return folder


def test_the_settings_of_an_export_are_spelled_once():
    """`export` and the command have the names and defaults of `ExportSettings`; its signature is written out for editors."""
    parameters = inspect.signature(export).parameters
    for each in dataclasses.fields(ExportSettings):
        default = inspect.Parameter.empty if each.default is dataclasses.MISSING else each.default
        assert parameters[each.name].default == default, each.name
    python_only = {"model", "example_inputs", "example_kwargs", "further_inputs", "exporters", "calibration"}
    python_only |= {"source", "build", "progress"}
    assert parameters.keys() == {each.name for each in dataclasses.fields(ExportSettings)} | python_only
    options = {option.field.name for option in commands.COMMANDS["export"].options}
    own = {each.name for each in dataclasses.fields(ExportOptions)} | set(options_of(ShowOptions))
    assert options == own - {"model", "given"}


def test_no_call_lists_the_settings_again():
    """A new setting is a field and an argument of `export`: nothing between them passes them on one by one."""
    settings = set(options_of(ExportSettings))
    for file in Path(optimizer.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                assert len(settings & {each.arg for each in node.keywords}) < 6, f"{file.name}:{node.lineno}"
