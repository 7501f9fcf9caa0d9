"""Take models from the module to a verified bundle: real architectures at every batch size, and unusual names."""

import textwrap
from pathlib import Path

import pytest
import torch
from real_models import REAL_MODELS, at_batch

from optimizer import export, optimize, verify_bundle
from optimizer.command.cli import main


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL_MODELS)
def test_a_real_model_goes_the_whole_way(name, tmp_path):
    model, args, kwargs = REAL_MODELS[name]()
    fast = optimize(model, example_inputs=args or None, example_kwargs=kwargs)
    assert fast.report.verified
    assert type(fast) is type(model)
    assert not [record for record in fast.report.passes if record.status in ("rolled-back", "failed")]

    bundle = export(fast, example_inputs=args or None, example_kwargs=kwargs, output=tmp_path / "bundle")
    assert bundle.parity.ok
    assert bundle.manifest["parity"]["batch_sizes"] == [2, 1, 3, 5, 8]
    assert {artifact.format: artifact.route for artifact in bundle.artifacts} == {
        "torchscript": "trace",
        "onnx": "dynamo",
    }
    for artifact in bundle.artifacts:
        assert {spec.shape[0] for spec in (*artifact.inputs, *artifact.outputs)} == {"batch"}
    assert verify_bundle(bundle.path).ok

    # Also compare the result directly, at a batch size that nothing above checked.
    more_args, more_kwargs = at_batch(args, kwargs, 4)
    with torch.no_grad():
        wanted, got = (run(*more_args, **more_kwargs) for run in (model, fast))
    for key, value in wanted.items():
        assert torch.allclose(got[key], value, rtol=1e-3, atol=1e-4 * float(value.abs().max())), key


@pytest.mark.slow
def test_a_file_and_a_class_may_have_names_in_any_letters(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = """
    import torch
    class Nétz(torch.nn.Linear):
        def forward(self, entrée):
            return {"é": super().forward(entrée)}
    model, example_inputs = Nétz(4, 3), (torch.ones(2, 4) / 3,)
    """
    (tmp_path / "modèle.py").write_text(textwrap.dedent(source), encoding="utf-8")
    assert main(["modèle.py", "--metadata", "clé=日本", "--quiet"]) == 0
    assert capsys.readouterr().out == f"{Path('dist/modèle')}\n"
    assert (tmp_path / "dist/modèle/README.md").read_text(encoding="utf-8").startswith("# Nétz\n")
    assert main(["verify", "dist/modèle", "--quiet"]) == 0
