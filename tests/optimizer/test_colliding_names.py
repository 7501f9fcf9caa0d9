"""Inputs and outputs are compared by their position, even if several have the same name."""

import textwrap

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import enliven
from torch import nn

from optimize_export.errors import UsageError
from optimize_export.structure import leaves_of
from optimizer import check_parity, export, optimize, verify_bundle
from optimizer.command.cli import main
from optimizer.command.inputs import read_calls
from optimizer.model.inputs import Call
from optimizer.parity import input_names

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
TREES = {
    "a number and its text": lambda a, b: {1: a, "1": b},
    "an item and a key": lambda a, b: {"x": [a, a * 2], "x.0": b},
    "a key and the label that tells two apart": lambda a, b: {1: a, "1": b, "1 (1)": a * 3},
    "the root and a key": lambda a, b: [a, {"output_0": b}],
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_an_error_at_either_place_fails(tree):
    def model(x, first=0.0, second=0.0):
        return tree(x.sin() + first, x.cos() + second)

    right = check_parity(model, lambda x: model(x), (X,))
    assert right.ok
    assert len({output.name for output in right.outputs}) == len(leaves_of(model(X)).tensors())
    assert check_parity(model, lambda x: model(x, first=1.0), (X,)).verdict == "failed"
    assert check_parity(model, lambda x: model(x, second=1.0), (X,)).verdict == "failed"


@pytest.mark.parametrize(
    ("swapped", "sentence"),
    [
        (lambda a, b: {"1": a, 1: b}, "the output contains '1', 1, but should contain 1, '1'"),
        (lambda a, b: {1: a, 2: b}, "the output contains 1, 2, but should contain 1, '1'"),
    ],
)
def test_a_number_and_its_text_are_two_keys(swapped, sentence):
    report = check_parity(lambda x: {1: x.sin(), "1": x.cos()}, lambda x: swapped(x.sin(), x.cos()), (X,))
    assert report.verdict == "failed"
    assert sentence in report.reason


def test_a_tolerance_by_a_name_that_two_places_share_is_refused():
    def model(x):
        return {1: x.sin(), "1": x.cos(), "2": x.tan()}

    with pytest.raises(UsageError, match=r"the outputs are: 1 \(1\), 1 \(2\), 2\."):
        check_parity(model, model, (X,), atol={"1": 1.0})
    off = check_parity(model, lambda x: {1: x.sin() + 0.5, "1": x.cos(), "2": x.tan()}, (X,), atol={"1 (1)": 1.0})
    assert off.ok


class Named(nn.Module):
    """Its outputs, parameter and buffer have the same names as gradients, buffers and inputs in a comparison."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.tensor([0.5, 1.5, -1.0]))
        self.register_buffer("seen", torch.zeros(3))
        self.wrong = ""

    def forward(self, x):
        self.seen.add_(x.detach().sum(0) + 3 * (self.wrong == "buffer"))
        scaled = x * (self.x.detach() if self.wrong == "parameter" else self.x)
        scaled = x.detach() * self.x if self.wrong == "input" else scaled
        return {
            "gradient of x": scaled.sin() + (self.wrong == "first"),
            "buffer seen": x.cos() + (self.wrong == "second"),
            "x (changed in place)": x.tanh() + (self.wrong == "third"),
        }


@pytest.mark.parametrize("wrong", ["parameter", "input", "buffer", "first", "second", "third"])
def test_outputs_gradients_buffers_and_inputs_are_apart(wrong):
    x = X.clone().requires_grad_()
    assert check_parity(Named(), Named(), (x,), mode="training").ok
    candidate = Named()
    candidate.wrong = wrong
    assert check_parity(Named(), candidate, (x,), mode="training").verdict == "failed"


class Positional(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x, /, **others):
        return self.fc(x) - others["x"].cos() * others["positional"]


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x, x_0):
        total = self.fc(x[0]) + x_0.sin()
        return {"x": [total, total * 2], "x_0": x[0], "x.0": x_0}


class Numbered(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, args_0, *args, **others):
        given = self.fc(args_0).sigmoid() * args[0][1] + args[0]["1"]
        return given + others["a.b"] * others["a_b"]


def tensors(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, generator=generator) for _ in range(count)]


def calls():
    x = tensors(5)
    return {
        Positional: ((x[0],), {"x": x[1], "positional": x[2]}, ("x_1", "x", "positional")),
        Listed: (([x[0]], x[1]), {}, ("x_0", "x_0_1")),
        Numbered: (
            (x[0], {1: x[1], "1": x[2]}),
            {"a.b": x[3], "a_b": x[4]},
            ("args_0", "args_0_1_1", "args_0_1_1_1", "a_b", "a_b_1"),
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(Positional, marks=pytest.mark.zoo), Listed, Numbered])
def test_inputs_of_one_name_go_the_whole_way(kind, tmp_path):
    args, kwargs, names = calls()[kind]
    model = enliven(kind()).eval()
    given = {"example_inputs": args, "example_kwargs": kwargs}
    passes = ["fold-conv-bn", "channels-last", "simplify", "jit-fusion"]
    fast = optimize(model, passes, **given)
    assert fast.report.verified
    for expected, got in zip(*(leaves_of(run(*args, **kwargs)).values for run in (model, fast)), strict=True):
        assert torch.allclose(got, expected, atol=1e-5)
    bundle = export(fast, **given, output=tmp_path / "net", formats=("torchscript", "onnx"))
    assert bundle.parity.ok
    assert all(tuple(spec.name for spec in artifact.inputs) == names for artifact in bundle.artifacts)
    assert verify_bundle(bundle.path).ok


def test_names_of_inputs_are_apart():
    for kind, (args, kwargs, _) in calls().items():
        names = input_names(kind(), Call(args, kwargs))
        assert len(set(names)) == len(names) == len(leaves_of((args, kwargs)).tensors())


def test_input_files_give_a_positional_argument_and_one_of_its_name(tmp_path):
    first, second, third = tensors(3)
    save_file({"0": first, "x": second, "positional": third}, tmp_path / "call.safetensors")
    (call,) = read_calls([tmp_path / "call.safetensors"], Positional(), None)
    assert torch.equal(call.args[0], first)
    assert torch.equal(call.kwargs["x"], second)


@pytest.mark.slow
def test_the_command_takes_such_a_model(tmp_path, capsys):
    source = """
    import torch
    class Net(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return {1: y + 1, "1": y.sin(), "x": [y * 2, y * 3], "x.0": y - 5, "x (changed in place)": y.cos()}
    model, example_inputs = Net(4, 3), (torch.ones(2, 4) / 3,)
    """
    (tmp_path / "net.py").write_text(textwrap.dedent(source))
    target = str(tmp_path / "net")
    assert main([str(tmp_path / "net.py"), "--output", target, "--atol", "x_0_1=1e-3"]) == 0
    assert main(["verify", target]) == 0
    capsys.readouterr()
    assert main(["rejudge", target, "--atol", "1=1e-3"]) == 2
    assert "output_1 (1 (1) in the model), _1 (1 (2) in the model)" in capsys.readouterr().err
