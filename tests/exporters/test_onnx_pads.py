"""Padding before max pooling keeps its value in ONNX files, and other padding is unchanged."""

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exporters import ExportError, ExportRequest, OnnxExporter


class Padded(nn.Module):
    """Pads negative numbers, with zeros by default, and pools the result."""

    def __init__(self, dims: int, pool: str = "max_pool", value: float = 0.0) -> None:
        super().__init__()
        self.dims, self.value = dims, value
        self.pool = getattr(F, f"{pool}{dims}d")

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(F.pad(-x.abs() - 1, [1] * 2 * self.dims, value=self.value), 3, 2)


def exported(model: nn.Module, dims: int, folder, **options):
    calls = tuple(((torch.randn(size, 2, *[6] * dims),), {}) for size in (2, 3, 1))
    artifact = OnnxExporter().export(ExportRequest(model.eval(), calls, **options), folder)
    x = torch.randn(5, 2, *[6] * dims)
    torch.testing.assert_close(artifact.load()(x)[0], model(x))
    return artifact, [node for node in onnx.load(artifact.path).graph.node if node.op_type == "Pad"]


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_zeros_in_front_of_a_maximum_are_kept(dims, tmp_path):
    artifact, (pad,) = exported(Padded(dims), dims, tmp_path)
    assert artifact.route == "dynamo"
    assert len(pad.input) == 4


class Layer(nn.Module):
    """Padding by `nn.ConstantPad2d` before max pooling."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.pad = nn.ConstantPad2d(1, value)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.pad(x), 3, 2)


# The calls have no negative numbers, so padding with minus infinity instead of zero would not show.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("opset", "value"), [(opset, value) for opset in (10, 11, 13, 17, 18) for value in (0.0, 0.5, -3.0)][1:]
)
def test_zeros_are_kept_in_old_operator_sets_where_no_call_shows_it(opset, value, tmp_path):
    calls = tuple(((torch.rand(size, 2, 6, 6),), {}) for size in (2, 3))
    artifact = OnnxExporter().export(ExportRequest(Layer(value).eval(), calls, opset=opset), tmp_path)
    x = -torch.rand(4, 2, 6, 6) - 1
    torch.testing.assert_close(artifact.load()(x)[0], Layer(value)(x))


def test_an_operator_set_in_which_zeros_can_not_be_kept_is_refused(tmp_path):
    calls = tuple(((torch.rand(size, 2, 6, 6),), {}) for size in (2, 3))
    with pytest.raises(ExportError, match="treats zero padding before a maximum as minus infinity in opset 10: use 18"):
        OnnxExporter().export(ExportRequest(Layer().eval(), calls, opset=10), tmp_path)


def test_other_pads_stay_as_they_are(tmp_path):
    _, (pad,) = exported(Padded(2, "avg_pool"), 2, tmp_path)
    assert len(pad.input) < 4


def test_two_pads_of_one_rank_share_their_axes(tmp_path):
    model = nn.Sequential(Padded(2), nn.Upsample(scale_factor=2), Padded(2))
    artifact, pads = exported(model, 2, tmp_path)
    assert len(pads) == 2
    assert len({pad.input[3] for pad in pads}) == 1
    assert sum("axes_of_pads" in each.name for each in onnx.load(artifact.path).graph.initializer) == 1
