"""A note says where the original's outputs differ under the user's own settings, which a comparison pins."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from optimizer import check_parity, export
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


@pytest.mark.parametrize(
    ("kind", "masked", "difference"),
    [
        ("encoder", "", None),
        ("encoder", PADDED, "is off by"),
        ("layer", PADDED, None),
        ("layer", MASKED, "NaN or inf in different places than in the original (40"),
        ("attention", MASKED, "NaN or inf in different places than in the original (40"),
    ],
)
def test_a_note_says_what_the_fast_path_changes(
    kind: str, masked: str, difference: str | None, fast_path: bool
) -> None:
    model, inputs = Encoder(kind).eval(), call(masked)
    notes = check_parity(model, model, inputs, batch_sizes=[2], draws=1).notes
    assert len(notes) == (fast_path and difference is not None)
    for note in notes:
        assert note.startswith("The original ran without torch's fast path for attention")
        assert difference is not None
        assert difference in note
        assert note.endswith("in eager, call torch.backends.mha.set_fastpath_enabled(False).")


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


def test_further_inputs_are_run_too_and_the_manifest_has_the_note(tmp_path: Path) -> None:
    further = [(call(MASKED), {})]
    bundle = export(
        Encoder("layer").eval(),
        example_inputs=call(),
        further_inputs=further,
        output=tmp_path / "bundle",
        formats=("torchscript",),
        batch_sizes=[2],
    )
    assert [note for note in bundle.manifest["notes"] if "fast path" in note and "draw 1" in note]


def test_a_model_that_notices_no_setting_runs_no_further_time() -> None:
    ran: list[int] = []

    class Counting(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            ran.append(len(input))
            return super().forward(input)

    model = Counting(3, 3)
    inputs = Samples((torch.randn(2, 3),))
    measure_reference(model, inputs, batch_sizes=[2], draws=1)
    fewest, _ = len(ran), ran.clear()
    measure_reference(nn.Sequential(model, nn.MultiheadAttention(4, 1))[:1], inputs, batch_sizes=[2], draws=1)
    assert len(ran) == fewest
