"""torch.compile in place of the module's call."""

import copy
import pickle
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from folding_models import Island, Pair, image
from pass_contract import captured
from torch import nn

from optimizer import optimize, report_of
from optimizer.api import _exportable
from passes import FoldConvBn, TorchCompile
from passes.base import Context
from passes.errors import PassOrderError, RequirementNotMet
from passes.graph.capture import capture
from passes.graph.guards import is_carried

CPU = Context("inference", torch.device("cpu"))


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    yield
    torch._dynamo.reset()


class Untouchable(nn.Module):
    """Raises if anything is done with it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the model was run before the error")


def test_the_result_keeps_class_and_keys() -> None:
    model = Pair().eval()
    fast = optimize(model, [TorchCompile(backend="eager")], example_inputs=(image(),))
    assert report_of(fast).passes[0].status == "applied"
    assert type(fast) is Pair
    assert list(fast.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        assert torch.equal(fast(image(seed=3)), model(image(seed=3)))
    assert model.__dict__.get("_compiled_call_impl") is None
    assert fast._compiled_call_impl is not None


def test_its_code_runs() -> None:
    ran: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *args: ran.append(1) or graph(*args)

    program, context = captured(Pair().eval())
    item = TorchCompile(backend="eager")
    object.__setattr__(item, "backend", backend)
    item.run(program, context)
    with torch.no_grad():
        program.root(image())
    assert ran == [1]


def test_copies_and_exports_take_the_module_before_it() -> None:
    fast = optimize(Pair(), [FoldConvBn(), TorchCompile(backend="eager")], example_inputs=(image(),))
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), _exportable(fast, torch.device("cpu"))):
        assert twin.__dict__.get("_compiled_call_impl") is None
        assert is_carried(twin.bn)
        assert capture(copy.deepcopy(twin)).islands == {}
        with torch.no_grad():
            assert torch.allclose(twin(image()), fast(image()), atol=1e-6)


def test_an_island_with_a_guard_is_compiled() -> None:
    model = Island().eval()
    fast = optimize(model, [FoldConvBn(), TorchCompile(backend="eager")], example_inputs=(image(),))
    with torch.no_grad():
        assert torch.allclose(fast(image()), model(image()), atol=1e-5)


@pytest.mark.parametrize("passes", [["torch-compile", "fold-conv-bn"], ["torch-compile", "torch-compile"]])
def test_a_pass_behind_it_is_an_error_before_work(passes: list[str]) -> None:
    with pytest.raises(PassOrderError, match="can't come after torch-compile"):
        optimize(Untouchable(), passes, example_inputs=(image(),))


def test_no_compiler_is_one_sentence_before_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    with pytest.raises(RequirementNotMet) as caught:
        optimize(Untouchable(), ["torch-compile"], example_inputs=(image(),))
    assert str(caught.value) == (
        "torch-compile can't be had here: inductor needs a C++ compiler for the CPU, and there is no '/nonexistent':"
        " install one or set CXX."
    )
    TorchCompile(backend="eager").check(CPU)


def test_no_headers_are_one_sentence_before_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/g++")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(RequirementNotMet, match="inductor needs the headers of Python"):
        TorchCompile().check(CPU)
    (tmp_path / "Python.h").touch()
    TorchCompile().check(CPU)


def test_options_that_make_no_sense() -> None:
    with pytest.raises(RequirementNotMet, match=r"torch-compile has no backend 'nothing': use one of .*inductor"):
        optimize(Untouchable(), [TorchCompile(backend="nothing")], example_inputs=(image(),))
    with pytest.raises(RequirementNotMet, match="torch-compile:mode=max-autotune is for inductor"):
        TorchCompile(mode="max-autotune", backend="eager").check(CPU)


def test_triton_is_needed_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequirementNotMet, match="pip install triton"):
        TorchCompile().check(Context("inference", torch.device("cuda")))


@pytest.mark.slow
def test_inductor() -> None:
    model = Pair().eval()
    fast = optimize(model, ["fold-conv-bn", "torch-compile"], example_inputs=(image(),))
    with torch.no_grad():
        for batch in (2, 5):
            x = image(batch, 3, 8, 8, seed=batch)
            assert torch.allclose(fast(x), model(x), atol=1e-4)
