"""Take models of other packages the whole way, some with trained weights; `make zoo` installs the packages and runs this.

Each is a case that a user brings: sizes that the code checks (diffusers), graphs (torch-geometric), audio (torchcrepe,
Resemblyzer, Whisper), and a file of TorchScript that keeps state (silero-vad).
"""

import pytest
from package_models import PACKAGE_MODELS, package_member

from exporters import ExportError
from optimize_export.errors import ExportFailed
from optimizer import export, optimize, verify_bundle

GRAPH = {"x": {0: "nodes"}, "edge_index": {1: "edges"}}
DYNAMIC = {"torch-geometric-gat": GRAPH, "torch-geometric-gcn": GRAPH}
# What can't be written, by model and format, with words of the reason.
REFUSED = {
    ("whisper-decoder", "torchscript"): "is_causal",
    **{
        ("silero-vad", format): "make the state an explicit input and output"
        for format in ("torchscript", "onnx", "pt2")
    },
}
# The layers whose weights change: all convolutions.
CHANGED = {"diffusers-unet": 33, "diffusers-vae": 30}


@pytest.mark.zoo
@pytest.mark.parametrize("format", ["torchscript", "onnx", "pt2"])
@pytest.mark.parametrize("name", PACKAGE_MODELS)
def test_a_model_of_a_package_goes_the_whole_way(name, format, tmp_path):
    model, args, kwargs = package_member(name)
    fast = optimize(model, example_inputs=args, example_kwargs=kwargs)
    assert fast.report.verified
    assert not [record for record in fast.report.passes if record.status in ("rolled-back", "failed")]
    assert sum(len(record.changes) for record in fast.report.passes) == CHANGED.get(name, 0)

    given = {"example_inputs": args, "example_kwargs": kwargs, "dynamic": DYNAMIC.get(name)}
    if (name, format) in REFUSED:
        with pytest.raises((ExportError, ExportFailed), match=REFUSED[name, format]):
            export(fast, **given, output=tmp_path / "bundle", formats=(format,))
        assert not list(tmp_path.iterdir())
        return
    bundle = export(fast, **given, output=tmp_path / "bundle", formats=(format,))
    assert bundle.parity.ok
    assert verify_bundle(bundle.path).ok
    (artifact,) = bundle.artifacts
    assert {size for spec in artifact.inputs for size in spec.shape} >= (
        {"nodes", "edges"} if name in DYNAMIC else {"batch"}
    )
