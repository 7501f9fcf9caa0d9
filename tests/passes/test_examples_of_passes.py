"""The examples that stand on graph passes: each pass changes its VALID ones, and refuses the others with their reason."""

import importlib.util
from pathlib import Path

import pytest
import torch

from optimizer import optimize, report_of
from optimizer.report import PassRecord
from passes import Example, GraphPass
from passes.registry import describe_passes, pass_named

FOLDER = Path(__file__).resolve().parents[2] / "examples"


def from_file(file: str, name: str) -> type[GraphPass]:
    spec = importlib.util.spec_from_file_location(file, FOLDER / f"{file}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)  # type: ignore[no-any-return]


# Fused units are compiled, so the tests of jit-fusion have their own examples.
BUILT_IN = [pass_named(each.name) for each in describe_passes() if each.name != "jit-fusion"]
PASSES = [cls for cls in BUILT_IN if issubclass(cls, GraphPass)]
PASSES += [from_file("fold_layer_norm", "FoldLayerNorm"), from_file("gelu_by_tanh", "GeluByTanh")]


def run(cls: type[GraphPass], example: Example) -> PassRecord:
    torch.manual_seed(0)
    # Some passes change nothing on a CPU, unless they are told to.
    item = cls(force=True) if "force" in cls.__dataclass_fields__ else cls()  # type: ignore[call-arg]
    fast = optimize(example.module(), [item], example_inputs=torch.rand(example.shape))
    (record,) = report_of(fast).passes
    return record


@pytest.mark.parametrize("cls", PASSES, ids=lambda cls: cls.name)
def test_each_has_examples_of_both_kinds(cls: type[GraphPass]) -> None:
    assert cls.VALID
    assert all(not example.reason for example in cls.VALID)
    assert cls.REFUSED
    assert all(example.reason for example in cls.REFUSED)


@pytest.mark.parametrize(
    ("cls", "example"),
    [pytest.param(cls, each, id=f"{cls.name}: {each.forward}") for cls in PASSES for each in cls.VALID],
)
def test_it_changes_what_it_says(cls: type[GraphPass], example: Example) -> None:
    record = run(cls, example)
    assert (record.status, record.reason) == ("applied", "")


@pytest.mark.parametrize(
    ("cls", "example"),
    [pytest.param(cls, each, id=f"{cls.name}: {each.forward}") for cls in PASSES for each in cls.REFUSED],
)
def test_it_refuses_what_it_says(cls: type[GraphPass], example: Example) -> None:
    record = run(cls, example)
    assert any(example.reason in skip.text for skip in record.skips), record.skips
