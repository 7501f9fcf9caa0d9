"""The command names its options in messages of the library, and all settings are spelled once."""

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest

import optimizer
from optimizer import export
from optimizer.command import commands
from optimizer.command.output import with_options
from optimizer.options import ExportOptions, ExportSettings, ShowOptions, options_of

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


def test_the_settings_of_an_export_are_spelled_once():
    """`export` and the command have the names and defaults of `ExportSettings`; its signature is written out for editors."""
    parameters = inspect.signature(export).parameters
    for each in dataclasses.fields(ExportSettings):
        default = inspect.Parameter.empty if each.default is dataclasses.MISSING else each.default
        assert parameters[each.name].default == default, each.name
    python_only = {"model", "example_inputs", "example_kwargs", "further_inputs", "exporters", "calibration"}
    python_only |= {"evaluate", "aggregate"}
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
