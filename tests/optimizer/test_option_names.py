"""The command names its options: for those that other tools have, and in messages of the library."""

from pathlib import Path

import pytest
import torch

from exporters.errors import ExporterError
from optimize_export.errors import OptimizeExportError
from optimizer import export, optimize
from optimizer.command import cli
from optimizer.command.option_names import _BY_NAME, _OPTION, suggestion, with_options
from passes.errors import PassesError

KNOWN = cli._option_names()


@pytest.mark.parametrize("name", sorted(_BY_NAME))
def test_the_option_for_a_name_of_another_tool_exists(name):
    assert set(_OPTION.findall(_BY_NAME[name])) <= KNOWN
    assert f"--{name}" not in KNOWN
    assert suggestion(f"--{name}", KNOWN) == f"use {_BY_NAME[name]}."


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
