"""Models whose outputs depend on earlier calls, which exported files can't reproduce."""

import copy
import time

import pytest
import torch
from exportable_models import enliven
from torch import nn

from exporters.errors import StructureError
from exporters.isolation import torchscript_allowed
from optimize_export.errors import ExportFailed
from optimizer import export, optimize


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
    """Adds the mean of the previous output. The first call, at any batch size, is like one of a stateless model."""

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
    """Adds zeros in the shape of its first input, so calls at other batch sizes fail or return a wrong shape."""

    first = None

    def forward(self, x):
        self.first = torch.zeros_like(x) if self.first is None else self.first
        return self.linear(x) + self.first


class Remembering(Linear):
    """Keeps a mask for the last batch size, the last output and a call count; none of them affects its outputs."""

    def __init__(self):
        super().__init__()
        self.masks, self.calls, self.last = {}, 0, None

    def forward(self, x):
        self.calls += 1
        if self.masks.get("rows") != x.shape[0]:
            self.masks = {"rows": x.shape[0], "mask": torch.ones(x.shape[0], 1)}
        self.last = self.linear(x) * self.masks["mask"]
        return self.last


def written(model, folder, formats=("torchscript",), **options):
    example = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    return export(model, example_inputs=(example,), output=folder / "bundle", formats=formats, **options)


class AddingLittle(Linear):
    """Later calls differ by 3e-5 of the output: far more than rounding in float32, less than in half precision."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        y = self.linear(x) * (1 + self.seen * 3e-5)
        self.seen.fill_(1.0)
        return y


class InPlaceInDict(Linear):
    def __init__(self):
        super().__init__()
        self.state = {"calls": [torch.zeros(())]}

    def forward(self, x):
        self.state["calls"][0] += 1
        return self.linear(x) * self.state["calls"][0]


class DrawingAlone(Linear):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return self.linear(x) + torch.rand(x.shape, generator=self.generator)


class WritingToWeights(Linear):
    """Writes to its weight from the second call on, so the first call alone shows nothing."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 1:
            with torch.no_grad():
                self.linear.weight.mul_(1.5)
        return self.linear(x)


class Numbering(Linear):
    def __init__(self):
        super().__init__()
        self.number = 0

    def forward(self, x):
        self.number += 1
        return self.linear(x) * self.number


class Part(Linear):
    def __init__(self):
        super().__init__()
        self.part = Counting()

    def forward(self, x):
        return self.part(self.linear(x))


class Many(Linear):
    def forward(self, x):
        for name in "abcde":
            setattr(self, name, getattr(self, name, 0) + 1)
        return self.linear(x) * self.a


class Telling(Linear):
    """Returns a number that isn't a tensor."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return {"y": self.linear(x), "number": self.calls}


class WritingToUnused(Linear):
    """Writes to a parameter in later calls only, and doesn't use it."""

    def __init__(self):
        super().__init__()
        self.calls, self.used = 0, nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x):
        self.calls += 1
        if self.calls > 1:
            self.used += 1
        return self.linear(x)


class InSlots(Linear):
    class State:
        __slots__ = ("number",)

    def __init__(self):
        super().__init__()
        self.state = self.State()
        self.state.number = 0

    def forward(self, x):
        self.state.number += 1
        return self.linear(x) * self.state.number


class Unregistered(Linear):
    def __init__(self):
        super().__init__()
        self.parts = [Counting()]

    def forward(self, x):
        return self.parts[0](x)


def refusal(model, folder, **options):
    with pytest.raises(ExportFailed) as refused:
        written(model, folder, **options)
    assert not list(folder.iterdir())
    return str(refused.value)


NAMED = "The model carries state from call to call (its calls change {}), and exported files can't"
UNNAMED = "The model carries state from call to call, and exported files can't"


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        (Counting, [NAMED.format("buffer `seen`")]),
        (Adding, [NAMED.format("attribute `last`")]),
        (AddingLittle, [NAMED.format("buffer `seen`")]),
        (Listing, [NAMED.format("attribute `history`")]),
        (InPlaceInDict, [NAMED.format("attribute `state`")]),
        (Numbering, [NAMED.format("attribute `number`")]),
        (WritingToWeights, [NAMED.format("parameter `linear.weight`, attribute `calls`")]),
        (Part, [NAMED.format("buffer `part.seen`")]),
        (Many, [NAMED.format("attribute `a`, attribute `b`, attribute `c`, attribute `d` and 1 more")]),
        # What changes in other objects has no name.
        (DrawingAlone, [UNNAMED]),
        (InSlots, [UNNAMED]),
        (Unregistered, [UNNAMED]),
        (Telling, ["The outputs have a different structure: number is 2, but should be 1"]),
        (
            OfOneSize,
            [
                NAMED.format("attribute `first`"),
                "In repeated calls: output: the shape is (2, 4), but should be (1, 4) at batch size 1",
            ],
        ),
    ],
)
def test_a_model_that_goes_by_earlier_calls_is_refused_by_what_it_keeps(kind, kept, tmp_path):
    model = enliven(kind()).eval()
    model.training = True
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    sentence = refusal(model, tmp_path, formats=("torchscript", "onnx", "pt2"))
    assert [text for text in kept if text not in sentence] == []
    # The model is unchanged, including its `training` flag.
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert {name: value for name, value in vars(model).items() if not name.startswith("_")} == attributes
    assert not attributes.get("history")
    assert not getattr(attributes.get("state"), "number", 0)


def test_no_tolerance_and_no_lower_precision_is_for_what_a_model_keeps(tmp_path):
    model = enliven(AddingLittle()).eval()
    fast = optimize(model, ["cast-precision"], example_inputs=(torch.randn(2, 4),))
    for given, options in ((model, {"atol": 1.0}), (fast, {})):
        assert "buffer `seen`" in refusal(given, tmp_path, **options)


def test_a_scripted_model_is_refused_alike(tmp_path):
    class Scriptable(Linear):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen.add_(1.0)
            return self.linear(x) * self.seen

    with torchscript_allowed():
        scripted = torch.jit.script(enliven(Scriptable()).eval())
    assert NAMED.format("buffer `seen`") in refusal(scripted, tmp_path)
    assert not scripted.seen


def test_what_no_other_call_brings_about_is_left_to_the_exporters(tmp_path):
    class Clock(Linear):
        def forward(self, x):
            return {"y": self.linear(x), "at": time.perf_counter_ns()}

    with pytest.raises(StructureError, match="only tensors can change from call to call"):
        written(enliven(Clock()).eval(), tmp_path)


@pytest.mark.parametrize("kind", [Remembering, WritingToUnused])
def test_what_no_answer_goes_by_is_let_be(kind, tmp_path):
    model = enliven(kind()).eval()
    before = copy.deepcopy((model.state_dict(), model.__dict__.get("masks"), model.calls))
    assert written(model, tmp_path).manifest["parity"]["ok"]
    assert (model.__dict__.get("masks"), model.calls) == before[1:]
    assert all(torch.equal(before[0][name], value) for name, value in model.state_dict().items())
