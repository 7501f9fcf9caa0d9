"""Models whose outputs depend on earlier calls, which exported files can't reproduce."""

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


class Numbered(nn.Module):
    def forward(self, x, number):
        return x * number


class Numbering(Linear):
    """Passes the number of the call to its part, whose output depends on it."""

    def __init__(self):
        super().__init__()
        self.number, self.part = 0, Numbered()

    def forward(self, x):
        self.number += 1
        return self.part(self.linear(x), self.number)


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


NAMED = "The model ({}) carries state from call to call{}, and exported files can't"


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        (Counting, [NAMED.format("Counting", " in buffer `seen`")]),
        (Adding, [NAMED.format("Adding", " in attribute `last`")]),
        (AddingLittle, ["in buffer `seen`, and"]),
        (Listing, ["in attribute `history`, and"]),
        (InPlaceInDict, ["in attribute `state`, and"]),
        (Numbering, [NAMED.format("Numbering", " in attribute `number`")]),
        # What changes in other objects has no name.
        (DrawingAlone, [NAMED.format("DrawingAlone", "")]),
        (InSlots, [NAMED.format("InSlots", "")]),
        (Unregistered, [NAMED.format("Unregistered", "")]),
        (
            WritingToWeights,
            ["Module `linear` (Linear, called at test_carried_state.py:", "in parameter `weight`, and"],
        ),
        (
            OfOneSize,
            [
                "in attribute `first`, and",
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
        assert "in buffer `seen`" in refusal(given, tmp_path, **options)


def test_the_part_that_keeps_it_is_named_and_no_other(tmp_path):
    class Harmless(Linear):
        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            self.attention = self.linear(x)
            return self.attention

    parts = nn.Sequential(Harmless(), nn.Sequential(Harmless(), Counting()), Harmless())
    sentence = refusal(enliven(parts).eval(), tmp_path)
    assert sentence.startswith("Module `1.1` (Counting) carries state from call to call in buffer")
    assert "attention" not in sentence


def test_more_than_three_are_counted(tmp_path):
    class Many(Linear):
        def forward(self, x):
            for name in "abcde":
                setattr(self, name, getattr(self, name, 0) + 1)
            return self.linear(x) * self.a

    sentence = refusal(enliven(Many()).eval(), tmp_path)
    assert "in attribute `a`, attribute `b`, attribute `c` and 2 more, and exported files" in sentence


def test_tensors_deep_in_what_a_model_keeps_are_no_obstacle(tmp_path):
    class Deep(Linear):
        def __init__(self):
            super().__init__()
            self.calls, self.deep = 0, {"a": [{"b": [(torch.ones(2),)]}]}

        def forward(self, x):
            self.calls += 1
            self.deep["a"][0]["b"][0] = (torch.full((2,), float(self.calls)),)
            return self.linear(x) * self.calls

    assert "in attribute `calls`, attribute `deep`, and" in refusal(enliven(Deep()).eval(), tmp_path)


def test_what_comes_and_goes_is_refused_without_a_place(tmp_path):
    class Swapping(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other, self.third = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            self.one, self.other, self.third = self.other, self.third, self.one
            return self.one(x)

    assert refusal(enliven(Swapping()).eval(), tmp_path).startswith("The model carries state from call to call")


def test_what_is_no_tensor_among_the_outputs_must_stay_the_same(tmp_path):
    class Telling(Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return {"y": self.linear(x), "number": self.calls}

    sentence = refusal(enliven(Telling()).eval(), tmp_path)
    assert "The outputs have a different structure: number is 2, but should be 1" in sentence


def test_the_result_of_passes_is_judged_by_its_original(tmp_path):
    fast = optimize(enliven(Counting()).train(), example_inputs=(torch.randn(2, 4),))
    assert "in buffer `seen`, and" in refusal(fast, tmp_path)


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
    assert "in buffer `seen`, and" in refusal(scripted, tmp_path)
    assert not scripted.seen


def test_rounding_in_front_of_it_is_not_blamed(tmp_path):
    class Rounding(nn.Module):
        def forward(self, x):
            return x * (1 + 1e-7 * (time.perf_counter_ns() % 3))

    parts = nn.Sequential(nn.Linear(4, 4), Rounding(), Counting())
    assert refusal(enliven(parts).eval(), tmp_path).startswith("Module `2` (Counting) carries")


def test_what_no_other_call_brings_about_is_left_to_the_exporters(tmp_path):
    class Clock(Linear):
        def forward(self, x):
            return {"y": self.linear(x), "at": time.perf_counter_ns()}

    with pytest.raises(StructureError, match="only tensors can change from call to call"):
        written(enliven(Clock()).eval(), tmp_path)


def test_parameters_that_only_later_calls_write_to_are_put_back(tmp_path):
    class Counting(Linear):
        def __init__(self):
            super().__init__()
            self.calls, self.used = 0, nn.Parameter(torch.zeros(()), requires_grad=False)

        def forward(self, x):
            self.calls += 1
            if self.calls > 1:
                self.used += 1
            return self.linear(x)

    model = enliven(Counting()).eval()
    used = model.used.clone()
    written(model, tmp_path)
    assert torch.equal(model.used, used)


def test_what_no_answer_goes_by_is_let_be(tmp_path):
    model = enliven(Remembering()).eval()
    bundle = written(model, tmp_path)
    assert bundle.manifest["parity"]["ok"]
    assert (model.masks, model.calls, model.last) == ({}, 0, None)
