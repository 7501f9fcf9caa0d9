"""Lengths that are fixed in the files: a note names the option that makes them dynamic, and the option works."""

from __future__ import annotations

import re
import shlex

import pytest
import torch
from torch import nn

from optimizer import export
from optimizer.option_texts import parse_dynamic

FORMATS = ("torchscript",)
BOTH = "--dynamic input_ids:0=batch,1=time --dynamic attention_mask:0=batch,1=time"


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids) * attention_mask[..., None]
        return self.head(hidden.sum(1) / attention_mask.sum(1, keepdim=True))


def tokens(length: int = 12) -> torch.Tensor:
    return torch.arange(2 * length).reshape(2, length) % 50


def option_in(notes: list[str]) -> str | None:
    """The option in the only note on fixed dims; None if there is no such note."""
    found = [note for note in notes if note.startswith("fixed in the files, although")]
    assert len(found) <= 1
    return re.search(r"`(.*)`", found[0])[1] if found else None


def parsed(option: str) -> dict[str, dict[int, str | None]]:
    words = shlex.split(option)
    assert set(words[::2]) == {"--dynamic"}
    return parse_dynamic("--dynamic", words[1::2])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_the_option_in_the_note_opens_the_length(tmp_path, dtype):
    inputs = (tokens(), torch.ones(2, 12, dtype=dtype))
    bundle = export(Text(), example_inputs=inputs, output=tmp_path / "net", formats=FORMATS)
    (note,) = [note for note in bundle.manifest["notes"] if "fixed in the files" in note]
    assert "dim 1 of input_ids (12), dim 1 of attention_mask (12)" in note
    assert option_in([note]) == BOTH
    assert note.endswith(
        f"`{BOTH}` may make them dynamic (dynamic= in Python; the original runs so, files weren't tried)"
    )
    assert f"`{BOTH}`" in (bundle.path / "README.md").read_text()
    dynamic = parsed(BOTH)
    opened = export(Text(), example_inputs=inputs, output=tmp_path / "open", formats=FORMATS, dynamic=dynamic)
    assert [spec.shape for spec in opened.artifacts[0].inputs] == [("batch", "time")] * 2
    assert option_in(opened.manifest["notes"]) is None


def test_a_fixed_batch_is_left_fixed(tmp_path):
    inputs = (tokens(), torch.ones(2, 12, dtype=torch.int64))
    options = {"example_inputs": inputs, "formats": FORMATS, "static_batch": True}
    bundle = export(Text(), output=tmp_path / "net", **options)
    option = option_in(bundle.manifest["notes"])
    assert option == "--dynamic input_ids:1=time --dynamic attention_mask:1=time"
    opened = export(Text(), output=tmp_path / "open", dynamic=parsed(option), **options)
    assert [spec.shape for spec in opened.artifacts[0].inputs] == [(2, "time")] * 2


def test_lengths_that_differ_have_names_of_their_own(tmp_path):
    class Translate(Text):
        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(target) + self.embed(source).mean(1, keepdim=True))

    inputs = (tokens(12), tokens(7))
    bundle = export(Translate(), example_inputs=inputs, output=tmp_path / "net", formats=FORMATS)
    option = option_in(bundle.manifest["notes"])
    assert option == "--dynamic source:0=batch,1=time --dynamic target:0=batch,1=time_2"
    opened = export(
        Translate(), example_inputs=inputs, output=tmp_path / "open", formats=FORMATS, dynamic=parsed(option)
    )
    assert [spec.shape for spec in opened.artifacts[0].inputs] == [("batch", "time"), ("batch", "time_2")]


def test_a_dim_that_the_model_fixes_is_left_out(tmp_path):
    class Boxes(Text):
        def __init__(self) -> None:
            super().__init__()
            self.place = nn.Linear(4, 8)

        def forward(self, ids: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids) + self.place(boxes / 10))

    boxes = torch.arange(2 * 12 * 4).reshape(2, 12, 4) % 11
    bundle = export(Boxes(), example_inputs=(tokens(), boxes), output=tmp_path / "net", formats=FORMATS)
    assert option_in(bundle.manifest["notes"]) == "--dynamic ids:0=batch,1=time --dynamic boxes:0=batch,1=time"


class Columns(nn.Module):
    """Each column has its own weights, so the number of columns can't change."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 4)
        self.head = nn.Linear(6 * 4, 3)

    def forward(self, columns: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(columns).flatten(1))


class Channels(nn.Module):
    """A number per channel: a single channel is broadcast, other numbers of channels don't fit."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6])[:, None, None])

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return (image.float() / 255 - self.mean).flatten(1).mean(1)


class Edges(nn.Module):
    """Reads the rows of an index by their numbers, and would ignore further ones."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.rows = rows

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        hidden = self.head(x)
        return sum(hidden.index_add(0, edges[0], hidden[edges[row]]) for row in range(1, self.rows))


def edges(rows: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(9, 4), torch.arange(5 * rows).reshape(rows, 5) % 9


@pytest.mark.parametrize("rows", [2, 3])
def test_rows_that_are_read_by_number_are_left_out(rows, tmp_path):
    bundle = export(Edges(rows), example_inputs=edges(rows), output=tmp_path / "net", formats=FORMATS, bench=False)
    assert option_in(bundle.manifest["notes"]) == "--dynamic edges:1=time"
    dynamic = {"x": {0: "batch"}, **parsed("--dynamic edges:1=time")}
    opened = export(
        Edges(rows), example_inputs=edges(rows), output=tmp_path / "open", formats=FORMATS, dynamic=dynamic, bench=False
    )
    assert [spec.shape for spec in opened.artifacts[0].inputs] == [("batch", 4), (rows, "time")]


class Weighted(Text):
    """A weight for each of three tokens: a single token is broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([0.2, 0.3, 0.5])[:, None])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head((self.embed(ids) * self.weights).sum(1))


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Channels(), (torch.randint(0, 256, (2, 3, 8, 6), dtype=torch.uint8),)),
        (Weighted(), (tokens(3),)),
        (Columns(), (tokens(6),)),
        (nn.Conv2d(3, 4, 3), (torch.randn(2, 3, 8, 8),)),
        (nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 3)), (torch.tensor([3, 7, 9]),)),
    ],
    ids=["pixels", "broadcast", "columns", "images", "no-length"],
)
def test_no_note_where_there_is_nothing_to_open(tmp_path, model, inputs):
    bundle = export(model, example_inputs=inputs, output=tmp_path / "net", formats=FORMATS)
    assert option_in(bundle.manifest["notes"]) is None
