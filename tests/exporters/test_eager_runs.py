"""Models whose eager run shows what no file can hold: drawn numbers, and a number of dims that follows the batch size."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import enliven
from torch import nn

from exporters.base import ExportRequest
from exporters.errors import ExportError, StructureError
from exporters.evidence import gather
from exporters.registry import exporter_named
from optimize_export.errors import ParityError
from optimizer import export, verify_bundle


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)


class Dropping(Drawing):
    def forward(self, x):
        return self.last(F.dropout(self.first(x), 0.5, True))


class Sampling(Drawing):
    def forward(self, x):
        return self.last(self.first(x) + torch.randn(x.shape[0], 6))


class Idle(Drawing):
    """The drawn number has no effect in eval mode, as in models that skip layers at random in training."""

    def forward(self, x):
        skipped = torch.rand([])
        x = F.dropout(self.first(x), 0.0, True)
        return x if self.training and skipped < 0.5 else self.last(x)


class WithNumpy(Drawing):
    def forward(self, x):
        import numpy as np

        return self.last(self.first(x) + float(np.random.rand()))


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def bundle_of(model, tmp_path, *formats, **options):
    return export(enliven(model).eval(), example_inputs=X, output=tmp_path / "net", formats=formats, **options)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Dropping, Sampling])
@pytest.mark.parametrize("formats", [("torchscript", "pt2"), pytest.param(("aoti",), marks=pytest.mark.zoo)])
def test_files_that_draw_as_torch_does_are_verified_with_the_seeds_of_the_golden_calls(tmp_path, cls, formats):
    bundle = bundle_of(cls(), tmp_path, *formats)
    seeds = [call["seed"] for call in bundle.manifest["golden"]["calls"]]
    assert len(set(seeds)) == len(seeds) > 1
    state = torch.get_rng_state()
    report = verify_bundle(bundle.path)
    assert report.ok, report
    assert torch.equal(torch.get_rng_state(), state)
    assert {artifact.parity.verdict for artifact in report.artifacts} == {"ok"}


@pytest.mark.parametrize(
    ("cls", "line"), [(Dropping, "F.dropout(self.first(x), 0.5, True)"), (Sampling, "torch.randn(x.shape[0], 6)")]
)
def test_no_onnx_file_is_made_of_a_model_that_draws_and_the_line_is_told(tmp_path, cls, line):
    calls = (((X,), {}), ((X[:2],), {}))
    with pytest.raises(ExportError) as raised:
        exporter_named("onnx").export(ExportRequest(enliven(cls()).eval(), calls, dynamic_batch=True), tmp_path)
    message = str(raised.value)
    assert "dynamo, dynamo-unoptimized and torchscript: the model draws random numbers at" in message
    assert line in message
    assert "test_eager_runs.py" in message
    assert "export to torchscript or pt2" in message


@pytest.mark.slow
def test_numbers_that_are_drawn_for_nothing_hinder_no_format(tmp_path):
    bundle = bundle_of(Idle(), tmp_path, "onnx", "torchscript", "pt2")
    assert verify_bundle(bundle.path).ok


def test_a_model_that_draws_nothing_has_no_seeds_in_its_bundle(tmp_path):
    bundle = bundle_of(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), tmp_path, "torchscript")
    assert all("seed" not in call for call in bundle.manifest["golden"]["calls"])


def test_a_file_that_keeps_a_number_that_is_drawn_fails_and_the_reason_is_told(tmp_path):
    with pytest.raises(
        ParityError, match="The model draws random numbers, and a file that draws different numbers can't match"
    ):
        bundle_of(WithNumpy(), tmp_path, "torchscript")


@pytest.mark.slow
def test_the_folder_that_shows_what_is_wrong_draws_the_same_numbers(tmp_path):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.sampling, self.keeping = Sampling(), WithNumpy()

        def forward(self, x):
            return self.sampling(x), self.keeping(x)

    with pytest.raises(ParityError):
        bundle_of(Both(), tmp_path, "torchscript", debug_dir=tmp_path / "debug", output_names=["sampled", "kept"])
    shown = tmp_path / "debug" / "torchscript"
    done = subprocess.run([sys.executable, "reproduce.py"], cwd=shown, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    sampled, kept = done.stdout.splitlines()
    assert sampled.startswith("sampled: off by ")
    assert sampled.endswith(": right")
    assert kept.endswith(": wrong")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 5)


class Method(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.mean((2, 3), keepdim=True).squeeze())


class Branch(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(x.mean((2, 3)))
        return y[0] if len(y) == 1 else y


class Mended(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.mean((2, 3), keepdim=True).flatten(1))


PLACE = "in the model's forward (test_eager_runs.py:…)"
REMEDY = ", or leave batch size 1 out, as in `batch_sizes=(2, 3, 5)`."
SQUEEZE = "also removes the dim that changes. Name the dims to remove, as in `squeeze(-1)`, or use `flatten(1)`"


@pytest.mark.parametrize("rows", [(2, 1), (4, 1, 2)])
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Method, f"`return self.head(x.mean((2, 3), keepdim=True).squeeze())` {PLACE} {SQUEEZE}"),
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
