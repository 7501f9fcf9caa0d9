"""An output whose number of dims depends on the batch size: the message has the line and the remedies."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from exporters.base import ExportRequest
from exporters.errors import StructureError
from exporters.evidence import gather
from optimizer import export
from optimizer.command import cli


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 5)


class Method(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.mean((2, 3), keepdim=True).squeeze())


class Function(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = x.mean((2, 3))
        return torch.squeeze(self.head(pooled))


class Branch(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(x.mean((2, 3)))
        return y[0] if len(y) == 1 else y


class Mended(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.mean((2, 3), keepdim=True).flatten(1))


REMEDY = ", or leave batch size 1 out, as in `batch_sizes=(2, 3, 5)`."
SQUEEZE = "also removes the dim that changes. Name the dims to remove, as in `squeeze(-1)`, or use `flatten(1)`"


@pytest.mark.parametrize("rows", [(2, 1), (4, 1, 2)])
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (
            Method,
            "`return self.head(x.mean((2, 3), keepdim=True).squeeze())` in the model's forward (test_ranks.py:…) "
            + SQUEEZE,
        ),
        (Function, "`return torch.squeeze(self.head(pooled))` in the model's forward (test_ranks.py:…) " + SQUEEZE),
        (Branch, "Return the same number of dims at all sizes"),
    ],
)
def test_a_lost_dim_is_told_with_its_line_and_the_remedy(kind: type[nn.Module], told: str, rows: Any) -> None:
    calls = tuple(((torch.randn(size, 3, 4, 4),), {}) for size in rows)
    with pytest.raises(StructureError) as caught:
        gather(ExportRequest(model=kind().eval(), calls=calls, dynamic_batch=True))
    sentence = str(caught.value)
    assert sentence.startswith("Output `output` has shape (5,) where `x` has (1, 3, 4, 4), and (")
    assert re.sub(r"\.py:\d+", ".py:…", sentence).endswith(told + REMEDY)
    if kind is Method:
        gather(ExportRequest(model=Mended().eval(), calls=calls, dynamic_batch=True))


@pytest.mark.parametrize(("kind", "sizes"), [(Method, (2, 3, 5)), (Mended, (2, 3, 5)), (Mended, None)])
def test_a_batch_size_of_one_that_is_left_out_is_noted(kind: type[nn.Module], sizes: Any, tmp_path: Path) -> None:
    inputs = (torch.randn(2, 3, 4, 4),)
    bundle = export(
        kind().eval(), inputs, output=tmp_path / "net", formats=["torchscript"], batch_sizes=sizes, bench=False
    )
    noted = [note for note in bundle.manifest["notes"] if note.startswith("batch size 1 isn't compared, because")]
    assert len(noted) == (sizes is not None)


def test_the_command_names_its_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def forward(self, x):\n"
        "        return (x * 2).squeeze()\nexample_inputs = (torch.ones(2, 3) + torch.arange(3),)\n"
    )
    assert cli.main(["net.py", "--formats", "torchscript", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert "`return (x * 2).squeeze()` in the model's forward (net.py:5)" in error
    assert "as in --batch-sizes 2,3,5." in error
