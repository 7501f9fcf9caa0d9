"""Results of passes, exported to the formats that use torch.export; weights that are computed at each call."""

import copy

import pytest
import torch
from real_models import REAL_MODELS
from torch import nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

from exporters.errors import ExporterError
from exporters.isolation import torchscript_allowed
from optimizer import export, optimize, verify_bundle
from optimizer.exporting import copy_for_export

PASSES = {
    "resnet": [
        ["fold-conv-bias", "fold-conv-bn", "channels-last", "pad-channels:force=true", "jit-fusion"],
        ["cast-precision:how=weights:dtype=float16", "torch-compile:backend=eager"],
    ],
    "bert": [
        ["simplify", "merge-linears:force=true", "pad-channels:force=true", "jit-fusion"],
        ["cast-precision:how=autocast"],
        ["cast-precision:how=weights"],
    ],
}


def check(name, passes, format, tmp_path):
    model, args, kwargs = REAL_MODELS[name]()
    given = {"example_inputs": args or None, "example_kwargs": kwargs}
    fast = optimize(model, passes, **given)
    assert fast.report.verified
    assert "applied" in {record.status for record in fast.report.passes}
    bundle = export(fast, **given, output=tmp_path / "bundle", formats=(format,))
    assert bundle.parity.ok
    # A compiled result stays compiled.
    assert (fast._compiled_call_impl is not None) or "torch-compile:backend=eager" not in passes
    (artifact,) = bundle.artifacts
    assert {tensor.dtype for tensor in artifact.outputs} == {"float32"}
    assert {tensor.shape[0] for tensor in (*artifact.inputs, *artifact.outputs)} == {"batch"}
    assert bundle.manifest["golden"]["precision"] == (fast.report.parity.precision or "")
    moved = (tmp_path / "bundle").rename(tmp_path / "moved")
    assert verify_bundle(moved).ok


@pytest.mark.slow
@pytest.mark.parametrize(("name", "passes"), [(name, passes) for name in PASSES for passes in PASSES[name]])
def test_results_of_passes_are_programs_of_torch_export(name, passes, tmp_path):
    check(name, passes, "pt2", tmp_path)


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("name", "passes"),
    [("resnet", PASSES["resnet"][0]), ("bert", PASSES["bert"][1])],
)
def test_results_of_passes_are_compiled_ahead_of_time(name, passes, tmp_path):
    check(name, passes, "aoti", tmp_path)


class AddedNoise(nn.Module):
    def forward(self, weight):
        return weight + 1e-3 * torch.rand_like(weight)


class ReadsItsSource(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = parametrizations.weight_norm(nn.Linear(6, 6))

    def forward(self, x):
        return self.layer(x) * self.layer.parametrizations.weight.original0.T


class FindsItsSource(ReadsItsSource):
    def forward(self, x):
        return self.layer(x) * dict(self.named_parameters())["layer.parametrizations.weight.original0"].T


def with_two():
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", nn.Softplus())
    parametrize.register_parametrization(layer, "bias", nn.Tanh())
    return layer


def of_lstm():
    return weight_norm(nn.LSTM(6, 4), "weight_hh_l0")


# The module, and whether its files hold the weights that it computes.
COMPUTED = {
    "weight_norm by hooks": (lambda: weight_norm(nn.Linear(6, 6)), True),
    "weight_norm of an LSTM": (of_lstm, True),
    "spectral_norm by hooks": (lambda: spectral_norm(nn.Linear(6, 6)), True),
    "spectral_norm by parametrization": (lambda: parametrizations.spectral_norm(nn.Linear(6, 6)), True),
    "two parametrizations": (with_two, True),
    "one that forward reads": (ReadsItsSource, False),
    "one that forward reads by its path": (FindsItsSource, False),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", COMPUTED)
def test_files_hold_the_weights_that_the_model_computes_at_each_call(kind, tmp_path):
    make, is_fixed = COMPUTED[kind]
    model, x = nn.Sequential(make()), torch.randn(3, 6)
    # The first call in training changes the vectors of spectral_norm.
    model(x)
    expected, state = model.eval()(x), copy.deepcopy(model.state_dict())
    bundle = export(model, example_inputs=(x,), output=tmp_path / "bundle", formats=("torchscript", "pt2"))
    assert bundle.parity.ok
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    assert all(map(torch.equal, model.state_dict().values(), state.values()))
    with torchscript_allowed():
        script = torch.jit.load(tmp_path / "bundle" / "model.torchscript.pt")
    program = torch.export.load(tmp_path / "bundle" / "model.pt2")
    for names in (script.state_dict(), program.state_dict):
        assert any(name.endswith((".weight", ".weight_hh_l0")) for name in names) is is_fixed


class Styled(nn.Module):
    """Scales a weight by a setting that the model makes from its input."""

    def __init__(self, style):
        super().__init__()
        self.layer, self.style, self.scale = nn.Linear(6, 6), style, 1.0
        parametrize.register_parametrization(self.layer, "weight", Scaled(self))

    def forward(self, x):
        self.scale = self.style(x)
        return self.layer(x)


class Scaled(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = [model]

    def forward(self, weight):
        return weight * self.model[0].scale


def test_a_weight_that_depends_on_the_input_stays_computed(tmp_path):
    model, x = Styled(torch.mean), torch.randn(3, 6)
    bundle = export(model, example_inputs=(x,), output=tmp_path / "bundle", formats=("torchscript", "pt2"), bench=False)
    assert bundle.parity.ok
    assert not bundle.missing


def test_a_weight_that_depends_on_the_batch_size_is_compared_where_it_changes(tmp_path):
    model, x = Styled(lambda x: 2.0 if x.shape[0] > 20 else 1.0), torch.randn(3, 6)
    with pytest.raises(ExporterError, match="at batch size 21 the model takes a different path"):
        export(model, example_inputs=(x,), output=tmp_path / "bundle", formats=("pt2",), bench=False)


def test_a_weight_that_differs_at_each_call_stays_computed():
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", AddedNoise())
    assert parametrize.is_parametrized(copy_for_export(layer, torch.device("cpu"), fixed=True))
