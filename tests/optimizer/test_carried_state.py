"""Models that answer a call by what earlier calls left behind, which no file does."""

import pytest
import torch
from exportable_models import enliven
from torch import nn

from optimizer import export, optimize
from optimizer.errors import ExportFailed


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Counting(Linear):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.linear(x) * self.seen


class Adding(Linear):
    """Adds what came before; the first call of any number of rows is answered as a stateless one."""

    last = None

    def forward(self, x):
        y = self.linear(x)
        if self.last is not None:
            y = y + self.last.mean()
        self.last = y.detach()
        return y


class Listing(Linear):
    def __init__(self):
        super().__init__()
        self.history = []

    def forward(self, x):
        self.history.append(self.linear(x).sum())
        return x + sum(self.history)


class OfOneSize(Linear):
    """Takes no other batch than that of its first call."""

    first = None

    def forward(self, x):
        self.first = torch.zeros_like(x) if self.first is None else self.first
        return self.linear(x) + self.first


class Remembering(Linear):
    """Keeps what it computed for a number of rows, and how often it was called: nothing that an answer goes by."""

    def __init__(self):
        super().__init__()
        self.masks, self.calls, self.last = {}, 0, None

    def forward(self, x):
        self.calls += 1
        if self.masks.get("rows") != len(x):
            self.masks = {"rows": len(x), "mask": torch.ones(len(x), 1)}
        self.last = self.linear(x) * self.masks["mask"]
        return self.last


def written(model, folder, formats=("torchscript",)):
    example = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    return export(model, example_inputs=(example,), output=folder / "bundle", formats=formats)


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        (Counting, "buffer `seen`"),
        (Adding, "attribute `last`"),
        (Listing, "attribute `history`"),
        (OfOneSize, "attribute `first`"),
    ],
)
def test_a_model_that_goes_by_earlier_calls_is_refused_by_what_it_keeps(kind, kept, tmp_path):
    model = enliven(kind()).eval()
    model.training = True
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    with pytest.raises(ExportFailed) as refused:
        written(model, tmp_path, formats=("torchscript", "onnx", "pt2"))
    assert f"The model keeps {kept} from one call to the next and answers otherwise then" in str(refused.value)
    assert not list(tmp_path.iterdir())
    # It is as it was, in its own mode too.
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert {name: value for name, value in vars(model).items() if not name.startswith("_")} == attributes
    assert not attributes.get("history")


def test_what_a_part_keeps_is_named_by_the_part(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"a": nn.Identity()})["a"], enliven(Counting())).eval()
    with pytest.raises(ExportFailed, match=r"buffer `seen` of module `2` from one call"):
        written(model, tmp_path)


def test_more_than_three_are_counted(tmp_path):
    model = nn.Sequential(*(enliven(Counting()) for _ in range(5))).eval()
    with pytest.raises(ExportFailed, match=r"`seen` of module `2` and 2 more from one call"):
        written(model, tmp_path)


def test_the_result_of_passes_is_judged_by_its_original(tmp_path):
    fast = optimize(enliven(Counting()).eval(), example_inputs=(torch.randn(2, 4),))
    with pytest.raises(ExportFailed, match=r"buffer `seen` from one call"):
        written(fast, tmp_path)


def test_what_no_answer_goes_by_is_let_be(tmp_path):
    model = enliven(Remembering()).eval()
    bundle = written(model, tmp_path)
    assert bundle.manifest["parity"]["ok"]
    assert (model.masks, model.calls, model.last) == ({}, 0, None)
