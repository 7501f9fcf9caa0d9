"""Models with weights, inputs and outputs in half precision, from the module to a verified bundle."""

import pytest
import torch
from tiny_models import enliven
from torch import nn

from exporters.errors import ExportError
from optimizer import export, optimize, verify_bundle


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, image):
        tokens = nn.functional.gelu(self.norm(self.conv(image))).flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return {"logits": self.head(tokens.mean(1)), "tokens": tokens}


@pytest.fixture
def net():
    torch.manual_seed(0)
    return enliven(Net()).eval()


def image(rows):
    return torch.randn(rows, 3, 6, 6, generator=torch.Generator().manual_seed(rows))


# onnxruntime has no bfloat16 kernel for convolutions on the CPU, and ONNX allows none before opset 22.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "formats"),
    [(torch.float16, ("torchscript", "pt2", "onnx")), (torch.bfloat16, ("torchscript", "pt2"))],
    ids=["float16", "bfloat16"],
)
def test_it_goes_the_whole_way(net, dtype, formats, tmp_path):
    model = net.to(dtype)
    fast = optimize(model, example_inputs=(image(2).to(dtype),))
    bundle = export(fast, example_inputs=(image(2).to(dtype),), output=tmp_path / "net", formats=formats)
    assert bundle.parity.ok
    assert verify_bundle(bundle.path).ok
    word = str(dtype).removeprefix("torch.")
    x = image(4).to(dtype)
    with torch.no_grad():
        wanted = model(x)
    for artifact in bundle.artifacts:
        assert [spec.dtype for spec in (*artifact.inputs, *artifact.outputs)] == [word] * 3
        for tensor, value in zip(artifact.load()(x), wanted.values(), strict=True):
            assert tensor.dtype is dtype
            scale = value.abs().max().item()
            assert (tensor.float() - value.float()).abs().max().item() <= 8 * torch.finfo(dtype).eps * scale


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU has kernels that the CPU lacks")
@pytest.mark.parametrize("layer", ["conv", "linear"])
def test_a_dtype_that_the_runtime_has_no_kernels_for_is_refused_with_a_remedy(net, layer, tmp_path):
    model, x = (net, image(2)) if layer == "conv" else (nn.Linear(6, 4), torch.randn(2, 6))
    model, x = model.to(torch.bfloat16), x.to(torch.bfloat16)
    with pytest.raises(ExportError) as caught:
        export(model, example_inputs=(x,), output=tmp_path / "net", formats=("onnx",))
    assert str(caught.value).startswith("The model can't be exported to onnx (")
    assert str(caught.value).endswith(
        " It computes in bfloat16, which not every operator of a format and not every runtime supports: export it "
        "in float16, or in float32."
    )
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
