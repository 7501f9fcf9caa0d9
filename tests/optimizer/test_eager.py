"""A note names torch's fast path for attention, which a comparison turns off."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from optimizer import check_parity
from optimizer.model import Samples
from optimizer.parity import measure_reference

# torch says so of each TransformerEncoder that may take its fast path.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
PADDED, MASKED = "padded", "masked"


class Encoder(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.inner: nn.Module = {
            "encoder": lambda: nn.TransformerEncoder(layer, 1),
            "layer": lambda: layer,
            "attention": lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        }[kind]()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if isinstance(self.inner, nn.MultiheadAttention):
            return self.inner(x, x, x, key_padding_mask=mask, need_weights=False)[0]
        return self.inner(x, src_key_padding_mask=mask)


def call(masked: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs whose second row is padded, and whose first row is masked in all positions."""
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[1, 3:] = bool(masked)
    mask[0] = masked == MASKED
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)), mask


@pytest.fixture(params=[True, False])
def fast_path(request: pytest.FixtureRequest) -> Iterator[bool]:
    torch.backends.mha.set_fastpath_enabled(request.param)
    yield request.param
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("kind", ["encoder", "attention"])
def test_a_note_names_the_fast_path_where_a_module_may_take_it(kind: str, fast_path: bool) -> None:
    model, inputs = Encoder(kind).eval(), call(PADDED)
    notes = check_parity(model, model, inputs, batch_sizes=[2], draws=1).notes
    assert sum("without torch's fast path for attention" in note for note in notes) == fast_path


def test_other_models_have_no_note() -> None:
    assert not check_parity(nn.Linear(3, 3), nn.Linear(3, 3), (torch.randn(2, 3),)).notes


def test_the_advice_of_the_note_makes_eager_equal() -> None:
    model, inputs = Encoder("layer").eval(), call(MASKED)
    reference = measure_reference(model, Samples(inputs), batch_sizes=[2], draws=1)
    own = reference.original.calls[0].own.values["output"]
    with torch.no_grad():
        assert model(*inputs).isnan().any()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            torch.testing.assert_close(model(*inputs), own)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
