"""Operators that torch translates wrongly to ONNX, and pads that onnxruntime would fuse wrongly."""

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from exportable_models import Of
from tiny_models import enliven
from torch import Tensor, nn

from exporters import ExportError, ExportRequest, OnnxExporter

QUERIES, KEYS, HEADS = 3, 5, 4


class Attention(nn.Module):
    """Attention with a mask as an input."""

    def __init__(self, *, groups: int = 1, as_float: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.groups, self.as_float = groups, as_float

    def forward(self, query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        value = self.project(key)
        if self.as_float:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
        output: Tensor = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=0.5, enable_gqa=self.groups > 1
        )
        return output


class Layer(nn.MultiheadAttention):
    """Converts its padding mask to floats."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, key_padding_mask=~mask, need_weights=False)[0]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def exported(model: nn.Module, inputs: tuple[Tensor, ...], folder: Path) -> Any:
    calls = [(tuple(torch.cat([each, each])[:size] for each in inputs), {}) for size in (2, 1, 3)]
    artifact = OnnxExporter().export(ExportRequest(model, tuple(calls)), folder)
    assert artifact.route == "dynamo"
    return artifact


@pytest.mark.slow
@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rows", [1, QUERIES])
def test_a_query_that_may_look_at_no_key_gets_zeros(tmp_path: Path, rows: int, groups: int, as_float: bool) -> None:
    model = enliven(Attention(groups=groups, as_float=as_float)).eval()
    query, key = drawn(2, HEADS, QUERIES, 8), drawn(2, HEADS // groups, KEYS, 8)
    mask = torch.ones(2, 1, rows, KEYS, dtype=torch.bool)
    mask[0, :, :, 3:] = False
    loaded = exported(model, (query, key, mask), tmp_path).load()
    for closed in (mask, mask & (torch.arange(2) > 0).view(2, 1, 1, 1), torch.zeros_like(mask)):
        (found,) = loaded(query, key, closed)
        expected = model(query, key, closed)
        assert expected.isfinite().all()
        assert (found - expected).abs().max() < 1e-5
    assert expected.abs().max() == 0


def test_a_row_of_padding_alone(tmp_path: Path) -> None:
    model = enliven(Layer(8, 2, batch_first=True)).eval()
    x, mask = drawn(2, KEYS, 8), torch.ones(2, KEYS, dtype=torch.bool)
    loaded = exported(model, (x, mask), tmp_path).load()
    mask[0] = False
    (found,) = loaded(x, mask)
    assert (found - model(x, mask)).abs().max() < 1e-5


@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_attention_asks_for_no_size_at_a_call(mask: str | None, tmp_path: Path) -> None:
    attending = Of(lambda x, allowed: F.scaled_dot_product_attention(x, x, x, allowed))
    x, allowed = drawn(2, HEADS, KEYS, 8), drawn(2, 1, KEYS, KEYS)
    if mask is None:
        attending, given = Of(lambda x: F.scaled_dot_product_attention(x, x, x)), (x,)
    else:
        given = (x, allowed > -1 if mask == "bool" else allowed)
    artifact = exported(attending.eval(), given, tmp_path)
    operators = [node.op_type for node in onnx.load(artifact.path).graph.node]
    assert not {"Shape", "Reshape", "Slice"} & set(operators)
    assert operators.count("Transpose") == 1
    (found,) = artifact.load()(*given)
    assert (found - attending(*given)).abs().max() < 1e-5


def test_attention_without_a_mask_is_translated_as_torch_has_it(tmp_path: Path) -> None:
    causal = Of(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True))
    artifact = exported(causal.eval(), (drawn(2, HEADS, KEYS, 8),), tmp_path)
    assert "ReduceMax" not in {node.op_type for node in onnx.load(artifact.path).graph.node}


def test_the_average_over_channels_last_images_needs_no_indices(tmp_path: Path) -> None:
    pooled = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    model = enliven(pooled).eval().to(memory_format=torch.channels_last)
    artifact = exported(model, (drawn(2, 3, 8, 8),), tmp_path)
    assert [node.op_type for node in onnx.load(artifact.path).graph.node] == ["Conv", "ReduceMean", "Reshape", "Gemm"]


def test_another_view_of_the_storage_is_gathered(tmp_path: Path) -> None:
    # Reads the storage of each row column by column.
    transposed = Of(lambda x: torch.as_strided(x * 2, x.shape, (12, 1, 3)))
    artifact = exported(transposed.eval(), (drawn(2, 3, 4),), tmp_path)
    assert "Gather" in {node.op_type for node in onnx.load(artifact.path).graph.node}
    assert torch.equal(artifact.load()(drawn(3, 3, 4))[0], transposed(drawn(3, 3, 4)))


def test_whether_all_are_true(tmp_path: Path) -> None:
    all_true = Of(lambda x: torch.where(torch._is_all_true(x < 9.0), x * 2, x - 1))
    artifact = exported(all_true.eval(), (drawn(2, 5),), tmp_path)
    for x in (drawn(3, 5), torch.full((2, 5), 10.0), torch.tensor([[1.0, 2.0, 3.0, 4.0, 9.5]])):
        assert torch.equal(artifact.load()(x)[0], all_true(x))


class Padded(nn.Module):
    """Pads negative numbers with zeros, and pools the results."""

    pools = (F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool2d)

    def forward(self, x: Tensor) -> list[Tensor]:
        line = -x.abs() - 1
        return [
            pool(F.pad(image, [1] * 2 * (image.dim() - 2)), 3, 2)
            for pool, image in zip(self.pools, (line[..., 0, 0], line[..., 0], line, line[..., 1]), strict=True)
        ]


def test_zeros_in_front_of_a_maximum_are_kept(tmp_path: Path) -> None:
    calls = tuple(((torch.randn(size, 2, 6, 6, 6),), {}) for size in (2, 3, 1))
    artifact = OnnxExporter().export(ExportRequest(Padded().eval(), calls), tmp_path)
    assert artifact.route == "dynamo"
    x = torch.randn(5, 2, 6, 6, 6)
    torch.testing.assert_close(list(artifact.load()(x)), Padded()(x))
    pads = [node for node in onnx.load(artifact.path).graph.node if node.op_type == "Pad"]
    assert [list(pad.input[2:]) == [""] for pad in pads] == [pool is not F.avg_pool2d for pool in Padded.pools]


def padded(value: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.ConstantPad2d(1, value), nn.MaxPool2d(3, 2)).eval()


# The calls have no negative numbers, so padding with minus infinity instead of zero would not show.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("opset", "value"), [(opset, value) for opset in (10, 11, 13, 17, 18) for value in (0.0, 0.5, -3.0)][1:]
)
def test_zeros_are_kept_in_old_operator_sets_where_no_call_shows_it(opset: int, value: float, tmp_path: Path) -> None:
    calls = tuple(((torch.rand(size, 2, 6, 6),), {}) for size in (2, 3))
    artifact = OnnxExporter().export(ExportRequest(padded(value), calls, opset=opset), tmp_path)
    x = -torch.rand(4, 2, 6, 6) - 1
    torch.testing.assert_close(artifact.load()(x)[0], padded(value)(x))


def test_an_operator_set_in_which_zeros_can_not_be_kept_is_refused(tmp_path: Path) -> None:
    calls = tuple(((torch.rand(size, 2, 6, 6),), {}) for size in (2, 3))
    with pytest.raises(ExportError, match="treats zero padding before a maximum as minus infinity in opset 10: use 11"):
        OnnxExporter().export(ExportRequest(padded(), calls, opset=10), tmp_path)
