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


class Carrying(nn.Module):
    """A layer, the given attributes (tensors become buffers), and the given function as its forward."""

    def __init__(self, step, **held):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for name, value in held.items():
            self.register_buffer(name, value) if type(value) is torch.Tensor else setattr(self, name, value)
        self.step = step

    def forward(self, x):
        return self.step(self, x)


def counting(self, x):
    self.seen += 1
    return self.linear(x) * self.seen


def adding(self, x):
    """Add the mean of the previous output. The first call, at any batch size, is like one of a stateless model."""
    y = self.linear(x)
    if self.last is not None:
        y = y + self.last.mean()
    self.last = y.detach()
    return y


def adding_little(self, x):
    """Later calls differ by 3e-5 of the output: far more than rounding in float32, less than in half precision."""
    y = self.linear(x) * (1 + self.seen * 3e-5)
    self.seen.fill_(1.0)
    return y


def listing(self, x):
    self.history.append(self.linear(x).sum())
    return x + sum(self.history)


def in_place_in_a_dict(self, x):
    self.state["calls"][0] += 1
    return self.linear(x) * self.state["calls"][0]


def of_one_size(self, x):
    """Add zeros in the shape of the first input, so calls at other batch sizes fail or return a wrong shape."""
    self.first = torch.zeros_like(x) if self.first is None else self.first
    return self.linear(x) + self.first


def writing_to_weights(self, x):
    """Write to a weight from the second call on, so the first call alone shows nothing."""
    self.calls += 1
    if self.calls > 1:
        with torch.no_grad():
            self.linear.weight.mul_(1.5)
    return self.linear(x)


def by_many(self, x):
    for name in "abcde":
        setattr(self, name, getattr(self, name, 0) + 1)
    return self.linear(x) * self.a


def drawing_alone(self, x):
    return self.linear(x) + torch.rand(x.shape, generator=self.generator)


class InSlots:
    __slots__ = ("number",)

    def __init__(self):
        self.number = 0


def in_slots(self, x):
    self.state.number += 1
    return self.linear(x) * self.state.number


def telling(self, x):
    """Return a number that isn't a tensor."""
    self.calls += 1
    return {"y": self.linear(x), "number": self.calls}


def remembering(self, x):
    """Keep a mask for the last batch size, the last output and a call count; none of them affects the outputs."""
    self.calls += 1
    if self.masks.get("rows") != x.shape[0]:
        self.masks = {"rows": x.shape[0], "mask": torch.ones(x.shape[0], 1)}
    self.last = self.linear(x) * self.masks["mask"]
    return self.last


def writing_to_unused(self, x):
    """Write to a parameter in later calls only, and don't use it."""
    self.calls += 1
    if self.calls > 1:
        self.used += 1
    return self.linear(x)


def zero():
    return torch.zeros(())


def written(model, folder, formats=("torchscript",), **options):
    example = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    return export(model, example_inputs=(example,), output=folder / "bundle", formats=formats, **options)


def refusal(model, folder, **options):
    with pytest.raises(ExportFailed) as refused:
        written(model, folder, **options)
    assert not list(folder.iterdir())
    return str(refused.value)


NAMED = "The model carries state from call to call (its calls change {}), and exported files can't"
UNNAMED = "The model carries state from call to call, and exported files can't"


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (lambda: Carrying(adding, last=None), [NAMED.format("attribute `last`")]),
        (lambda: Carrying(adding_little, seen=zero()), [NAMED.format("buffer `seen`")]),
        (lambda: Carrying(listing, history=[]), [NAMED.format("attribute `history`")]),
        (lambda: Carrying(in_place_in_a_dict, state={"calls": [zero()]}), [NAMED.format("attribute `state`")]),
        (
            lambda: Carrying(writing_to_weights, calls=0),
            [NAMED.format("parameter `linear.weight`, attribute `calls`")],
        ),
        (
            lambda: Carrying(lambda self, x: self.part(self.linear(x)), part=Carrying(counting, seen=zero())),
            [NAMED.format("buffer `part.seen`")],
        ),
        (
            lambda: Carrying(by_many),
            [NAMED.format("attribute `a`, attribute `b`, attribute `c`, attribute `d` and 1 more")],
        ),
        # What changes in other objects has no name.
        (lambda: Carrying(drawing_alone, generator=torch.Generator().manual_seed(0)), [UNNAMED]),
        (lambda: Carrying(in_slots, state=InSlots()), [UNNAMED]),
        (lambda: Carrying(lambda self, x: self.parts[0](x), parts=[Carrying(counting, seen=zero())]), [UNNAMED]),
        (
            lambda: Carrying(telling, calls=0),
            ["The outputs have a different structure: number is 2, but should be 1"],
        ),
        (
            lambda: Carrying(of_one_size, first=None),
            [
                NAMED.format("attribute `first`"),
                "In repeated calls: output: the shape is (2, 4), but should be (1, 4) at batch size 1",
            ],
        ),
    ],
)
def test_a_model_that_goes_by_earlier_calls_is_refused_by_what_it_keeps(make, kept, tmp_path):
    model = enliven(make()).eval()
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
    model = enliven(Carrying(adding_little, seen=zero())).eval()
    fast = optimize(model, ["cast-precision"], example_inputs=(torch.randn(2, 4),))
    for given, options in ((model, {"atol": 1.0}), (fast, {})):
        assert "buffer `seen`" in refusal(given, tmp_path, **options)


def test_a_scripted_model_is_refused_alike(tmp_path):
    class Scriptable(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("seen", zero())

        def forward(self, x):
            self.seen.add_(1.0)
            return self.linear(x) * self.seen

    with torchscript_allowed():
        scripted = torch.jit.script(enliven(Scriptable()).eval())
    assert NAMED.format("buffer `seen`") in refusal(scripted, tmp_path)
    assert not scripted.seen


def test_what_no_other_call_brings_about_is_left_to_the_exporters(tmp_path):
    clock = Carrying(lambda self, x: {"y": self.linear(x), "at": time.perf_counter_ns()})
    with pytest.raises(StructureError, match="only tensors can change from call to call"):
        written(enliven(clock).eval(), tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Carrying(remembering, masks={}, calls=0, last=None),
        lambda: Carrying(writing_to_unused, calls=0, used=nn.Parameter(zero(), requires_grad=False)),
    ],
)
def test_what_no_answer_goes_by_is_let_be(make, tmp_path):
    model = enliven(make()).eval()
    before = copy.deepcopy((model.state_dict(), model.__dict__.get("masks"), model.calls))
    assert written(model, tmp_path).manifest["parity"]["ok"]
    assert (model.__dict__.get("masks"), model.calls) == before[1:]
    assert all(torch.equal(before[0][name], value) for name, value in model.state_dict().items())
