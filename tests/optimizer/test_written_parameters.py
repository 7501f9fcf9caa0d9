import copy
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from laid_out import laid_out
from tiny_models import enliven
from torch import nn

from optimize_export.errors import LoadError
from optimizer import check_parity, export, optimize
from optimizer.model.runs import Runs
from optimizer.parity.float64 import Float64Mode


class Shortened(nn.Module):
    """An embedding that shortens the rows it looks up, and a product with the whole table."""

    def __init__(self, **options):
        super().__init__()
        self.table = nn.Embedding(20, 4, max_norm=0.5, **options)
        self.conv, self.bn = nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)

    def forward(self, ids):
        rows = self.table(ids)
        return self.bn(self.conv(rows.transpose(1, 2))).transpose(1, 2) @ self.table.weight.T


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(20, 4, max_norm=0.5)

    def forward(self, ids):
        return self.table(ids)


@pytest.mark.slow
def test_a_model_that_compiles_itself_is_usable_after_its_first_run():
    # In a new process, where the compiler isn't loaded before that run.
    program = """
import torch
from optimizer import optimize

class Conditional(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

model, x = Conditional(), torch.ones(2, 3)
fast = optimize(model, [], example_inputs=(x,))
assert torch.equal(fast(x), x.sin()) and torch.equal(model(-x), x.cos())
"""
    subprocess.run([sys.executable, "-c", program], check=True)


class Writing(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.linear = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            HOW[self.how](self.linear.weight)
        return self.other(self.linear(x))


def set_data(weight):
    weight.data = weight.data.clamp(max=0.1)


def transpose(weight):
    weight.data = weight.data.t()


HOW = {
    "in place": lambda weight: weight.clamp_(max=0.1),
    "data": lambda weight: weight.data.clamp_(max=0.1),
    "view": lambda weight: weight.view(-1)[:3].mul_(0.5),
    "detached": lambda weight: weight.detach().t().mul_(0.5),
    "item": lambda weight: weight.__setitem__(0, 0.0),
    "copy": lambda weight: weight.copy_(weight / weight.norm()),
    "out": lambda weight: torch.mul(weight, 0.5, out=weight),
    "functional": lambda weight: F.relu(weight, inplace=True),
    "list": lambda weight: torch._foreach_mul_([weight], 0.5),
    "another tensor": set_data,
    "transposed": transpose,
    "transposed in place": lambda weight: weight.t_(),
}


def state(model):
    return {
        name: (value, value.detach().clone(), value._version, value.data_ptr())
        for name, value in model.named_parameters()
    }


def assert_untouched(model, before):
    for name, value in model.named_parameters():
        same, values, version, place = before[name]
        assert value is same
        assert torch.equal(value, values), name
        assert (value._version, value.data_ptr()) == (version, place), name


class WritesSparse(nn.Module):
    def __init__(self, layout, write):
        super().__init__()
        self.linear, self.write = nn.Linear(4, 4), write
        self.matrix = nn.Parameter(laid_out(layout, torch.eye(4) * 2))

    def forward(self, x):
        with torch.no_grad():
            self.write(self.matrix)
        return (self.matrix.detach() @ self.linear(x).t()).t()


@pytest.mark.parametrize(
    ("layout", "write"),
    [
        ("coo", lambda matrix: matrix.mul_(1.5)),
        ("coo", lambda matrix: matrix.add_(torch.ones(4, 4).to_sparse())),
        ("csr", lambda matrix: matrix.values().mul_(1.5)),
        ("csr", lambda matrix: matrix.mul_(1.5)),
        ("bsr", lambda matrix: matrix.values().mul_(1.5)),
    ],
)
def test_a_sparse_parameter_that_is_written_to_is_put_back(layout, write):
    model = enliven(WritesSparse(layout, write)).eval()
    matrix, before = model.matrix, model.matrix.detach().clone()
    shared = matrix.detach()
    assert written_by(model, torch.randn(3, 4)) == {"matrix"}
    assert check_parity(model, copy.copy(model), (torch.randn(3, 4),)).ok
    optimize(model, ["simplify"], example_inputs=(torch.randn(3, 4),))
    assert model.matrix is matrix
    for tensor in (matrix, shared):
        assert torch.equal(tensor.to_dense(), before.to_dense())


def written_by(model, *args):
    """The names of the parameters that a first run finds to be written to."""
    runs = Runs(model, in_eval=False)
    runs.first(lambda module: module(*args))
    return runs.written


def ids():
    return torch.randint(0, 20, (3, 5))


@pytest.mark.parametrize("how", HOW)
def test_a_parameter_that_is_written_to_is_put_back_also_by_measuring(how):
    model = enliven(Writing(how))
    candidate = copy.deepcopy(model)
    states = state(model), state(candidate)
    assert written_by(model, torch.randn(2, 4)) == {"linear.weight"}
    assert_untouched(model, states[0])
    report = check_parity(model, candidate, (torch.randn(2, 4),))
    assert report.ok, report
    assert report.notes == ("The model writes to its own parameters in forward: linear.weight.",)
    assert_untouched(model, states[0])
    assert_untouched(candidate, states[1])


@pytest.mark.parametrize("model", [Shortened(), Shortened(padding_idx=0), Bag()], ids=["table", "padded", "bag"])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_an_embedding_that_shortens_its_rows(model, mode):
    before = state(enliven(model))
    report = check_parity(model, copy.deepcopy(model), (ids(),), mode=mode)
    assert report.ok, report
    assert report.reference == "float64"
    assert_untouched(model, before)


def test_float64_writes_the_shortened_rows_to_the_shadow():
    model, rows = enliven(Shortened()).eval(), ids()
    before = state(model)
    double = copy.deepcopy(model).double()
    with torch.no_grad(), Float64Mode() as mode:
        truth = model(rows)
    with torch.no_grad():
        expected = double(rows)
    assert (truth - expected).abs().max() < 1e-14
    assert (mode.shadow(model.table.weight) - double.table.weight).abs().max() < 1e-15
    assert_untouched(model, before)


def test_optimizing_leaves_the_callers_parameters_as_they_are():
    model, rows = enliven(Shortened()).eval(), ids()
    before = state(model)
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(rows,))
    assert len(fast.report.passes[0].changes) == 1
    assert fast.report.verified
    assert_untouched(model, before)
    with torch.no_grad():
        assert torch.allclose(fast(rows), model(rows), atol=1e-5)


def test_a_graph_pass_before_such_a_forward_is_no_hindrance():
    class Twice(Shortened):
        def forward(self, ids):
            scores = super().forward(ids)
            return scores * scores.sin().exp() + scores * scores.sin().exp()

    model, rows = enliven(Twice()).eval(), ids()
    before = state(model)
    fast = optimize(model, ["simplify"], example_inputs=(rows,))
    assert fast.report.passes[0].status == "applied"
    assert fast.report.verified
    assert_untouched(model, before)


@pytest.mark.slow
@pytest.mark.parametrize("format_name", ["torchscript", "onnx"])
def test_exporting_leaves_the_callers_parameters_as_they_are(format_name, tmp_path):
    model = enliven(nn.Sequential(nn.Embedding(20, 4, max_norm=0.5), nn.Linear(4, 3))).eval()
    before = state(model)
    # The artifacts contain the written weights, and other batches look up only rows of the example's batch.
    try:
        assert export(model, example_inputs=(ids(),), output=tmp_path / "bundle", formats=(format_name,)).parity.ok
    finally:
        assert_untouched(model, before)


def test_nothing_is_copied_where_nothing_is_written():
    model = enliven(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)))
    before = state(model)
    assert written_by(model, torch.randn(2, 4)) == set()
    assert_untouched(model, before)
    assert not check_parity(model, copy.deepcopy(model), (torch.randn(2, 4),)).notes


def test_a_forward_that_catches_everything_and_one_that_raises():
    class Catching(Writing):
        def forward(self, x):
            try:
                return super().forward(x)
            except BaseException:  # noqa: BLE001 - as bad code does
                raise ValueError("something went wrong") from None

    class Failing(Writing):
        def forward(self, x):
            super().forward(x)
            raise ZeroDivisionError

    model = enliven(Catching("in place"))
    before = state(model)
    assert written_by(model, torch.randn(2, 4)) == {"linear.weight"}
    assert_untouched(model, before)
    model = enliven(Failing("in place"))
    before = state(model)
    with pytest.raises(ZeroDivisionError):
        written_by(model, torch.randn(2, 4))
    assert_untouched(model, before)


def test_many_parameters_are_found_one_after_another():
    model = enliven(nn.Sequential(*(Writing("in place") for _ in range(5))))
    before = state(model)
    assert written_by(model, torch.randn(2, 4)) == {f"{number}.linear.weight" for number in range(5)}
    assert_untouched(model, before)


def test_a_write_that_no_first_call_shows_is_told():
    class Sometimes(nn.Linear):
        def forward(self, x):
            if len(x) > 4:
                with torch.no_grad():
                    self.weight.mul_(0.5)
            return super().forward(x)

    runs = Runs(Sometimes(4, 4), in_eval=True)
    runs.first(lambda module: module(torch.randn(2, 4)))
    with pytest.raises(LoadError, match=r"Forward wrote to weight of the model"), runs.fresh() as module:
        module(torch.randn(5, 4))


def test_callables_and_script_modules_are_run_too():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, but users' modules contain it
        script = torch.jit.script(nn.Linear(3, 3))
    for target in (torch.sin, script, nn.Identity()):
        assert written_by(target, torch.randn(2, 3)) == set()


def test_what_a_script_writes_is_seen():
    class Halving(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x):
            self.weight.mul_(0.5)
            return x * self.weight

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(Halving())
    assert written_by(script, torch.randn(2, 3)) == {"weight"}
    assert torch.equal(script.weight, torch.ones(3))
