"""The first run of a model, before any other work."""

from pathlib import Path

import pytest
import torch
from torch import nn

from optimize_export.errors import LoadError
from optimizer.command.engine import check_runs
from optimizer.command.loading import Loaded, load


def run_refused(path: Path, **kwargs) -> str:
    with pytest.raises(LoadError) as caught:
        check_runs(load(str(path), **kwargs))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_leaves_the_model_as_it_was():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("last", None)
            self.seen = []
            self.state = "new"

        def forward(self, x):
            self.calls += 1
            self.last = x
            self.seen.append(x)
            self.state = "used"
            self.late = 1
            return nn.functional.dropout(x)

    model = nn.Sequential(Counter(), nn.BatchNorm1d(4)).train()
    model[0].training = False
    buffers = model[0]._buffers
    before = torch.get_rng_state()
    check_runs(Loaded(model, (torch.ones(2, 4),), {}, "x"))
    assert model.training
    assert not model[0].training
    assert model[0].calls == 0
    assert model[0]._buffers is buffers
    assert model[0].last is None
    assert model[0].seen == []
    assert model[0].state == "new"
    assert not hasattr(model[0], "late")
    assert torch.equal(torch.get_rng_state(), before)


def test_lazy_modules_get_their_parameters(write):
    loaded = load(str(write("model = nn.Sequential(nn.LazyLinear(3), nn.Dropout())", net=True)))
    check_runs(loaded)
    assert loaded.model[0].in_features == 4
    assert loaded.model.training
    assert "Lazy modules" in loaded.notes[0]


def test_a_nan_is_no_error_here(write):
    check_runs(load(str(write("class Nan(Net):\n    def forward(self, x): return x * float('nan')\nmodel = Nan()"))))


@pytest.mark.parametrize(
    ("inputs", "part"),
    [
        (["2x5"], "model.py:Net failed on its inputs (float32[2, 5]): RuntimeError: "),
        (["2x5"], "mat1 and mat2 shapes cannot be multiplied"),
        (["2x5"], "(model.py line 10)."),
        (["int64[2,4]"], "failed on its inputs (int64[2, 4]): RuntimeError: mat1 and mat2 must have the same dtype"),
        (
            ["2x4", "2x4"],
            "don't fit forward of model.py:Net: too many positional arguments; forward takes (x), but got 2",
        ),
        (
            ["2x4", "mask=2x4"],
            "got an unexpected keyword argument 'mask'; forward takes (x), but got 1 positional and mask",
        ),
        (["y=2x4"], "missing a required argument: 'x'; forward takes (x), but got 0 positional and y"),
    ],
)
def test_inputs_that_dont_fit(write, inputs, part):
    assert part in run_refused(write(""), inputs=inputs)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("raise TypeError('mine')", "failed on its inputs (float32[2, 4]): TypeError: mine (model.py line 13)."),
        ("return None", "returned None instead of tensors"),
        ("return [3, 'a']", "returned int instead of tensors"),
        ("return ()", "returned tuple instead of tensors"),
        ("return Answer()", "returned Answer instead of tensors; it must return tensors"),
        ("import sys; sys.exit()", "it called sys.exit()"),
    ],
)
def test_forwards_that_fail(write, body, part):
    text = f"class Bad(Net):\n    def forward(self, x):\n        {body}\nclass Answer: ...\nmodel = Bad()"
    assert part in run_refused(write(text))
