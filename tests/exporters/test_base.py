import pytest
import torch
from exportable_models import DictOutput, Keywords, Mlp, exportable, floats
from laid_out import NESTED, SPARSE, laid_out
from torch import nn

from exporters import Adapter, StructureError


def test_names_follow_the_signature_and_the_keys():
    adapter = Adapter(DictOutput(), (floats(2, 3),))
    assert adapter.input_names == ("x",)
    assert adapter.output_names == ("logits", "hidden_0", "hidden_1", "rows")
    assert adapter.input_structure == {"type": "builtins.dict", "items": [["x", {"tensor": "x"}]]}
    assert adapter.output_structure["items"][2:4] == [["loss", {"constant": None}], ["scale", {"constant": 2}]]
    nested, calls = exportable("nested")
    names = "pair_0 pair_1_0 extra_shift earlier_boxes earlier_scores_0"
    assert Adapter(nested, *calls[0]).input_names == tuple(names.split())
    # Names that are passed come first.
    adapter = Adapter(DictOutput(), (floats(2, 3),), input_names=["logits"])
    assert (adapter.input_names, adapter.output_names[0]) == (("logits",), "logits_out")
    assert Adapter(Mlp(), (floats(2, 3),), output_names=["y"]).output_names == ("y",)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ({"input_names": ["a", "b"]}, r"2 input names were given for 1 input tensors \(x\)\."),
        ({"output_names": []}, r"0 output names were given for 1 output tensors \(output\)\."),
        ({"output_names": ["x"]}, r"`x` names an input and an output; each tensor of a file needs its own name\."),
        ({"output_names": [" "]}, r"' ' is not a valid name for an output\."),
    ],
)
def test_names_that_do_not_fit_are_refused(names, sentence):
    with pytest.raises(StructureError, match=sentence):
        Adapter(Mlp(), (floats(2, 3),), **names)
    with pytest.raises(StructureError, match="The output names a, a, b, c aren't unique"):
        Adapter(DictOutput(), (floats(2, 3),), output_names=["a", "a", "b", "c"])


class Holds(nn.Module):
    def __init__(self, place, tensor):
        super().__init__()
        self.inner = Mlp()
        if place == "buffer":
            self.inner.register_buffer("held", tensor)
        elif place == "parameter":
            self.inner.held = nn.Parameter(tensor)
        else:
            self.inner.held = {"rows": [1, tensor]} if place == "dict" else tensor

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize(
    ("layout", "place"),
    [
        *((layout, "buffer") for layout in (*SPARSE, *NESTED, "mkldnn")),
        ("coo", "parameter"),
        ("csr", "plain"),
        ("bsr", "dict"),
    ],
)
def test_a_model_that_holds_what_a_file_has_no_place_for_is_refused(layout, place):
    kind = "mkldnn" if layout == "mkldnn" else "nested" if layout in NESTED else "sparse"
    with pytest.raises(StructureError) as caught:
        Adapter(Holds(place, laid_out(layout, torch.eye(4))), (floats(2, 3),))
    assert str(caught.value) == (
        f"The model contains a {kind} tensor (inner.held), which exported files can't represent; use a dense one."
    )


@pytest.mark.parametrize("layout", ["quantized", "quantized per channel", "empty"])
def test_a_model_may_hold_quantized_and_empty_buffers(layout):
    model = Holds("buffer", laid_out(layout, torch.eye(4)))
    assert Adapter(model, (floats(2, 3),))(floats(2, 3)).shape == model(floats(2, 3)).shape


def test_position_and_name_are_the_same_call():
    adapter = Adapter(Keywords(), (floats(2, 3), floats(2, 3)))
    assert len(adapter.flatten_inputs((floats(4, 3),), {"mask": floats(4, 3)})) == 2
    with pytest.raises(StructureError, match="the argument lacks `mask`"):
        adapter.flatten_inputs((floats(4, 3),))


@pytest.mark.parametrize("output", [None, 3, {"a": [1, "b"]}, ()])
def test_outputs_without_a_tensor_are_refused(output):
    class Silent(nn.Module):
        def forward(self, x):
            return output

    with pytest.raises(StructureError, match="The model's output contains no tensor"):
        Adapter(Silent(), (floats(2, 3),))


def test_the_mode_is_the_models_and_the_models_is_kept():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    model[0].eval()
    assert Adapter(model, (floats(2, 3),)).training
    assert [module.training for module in model.modules()] == [True, False, True]
    assert not Adapter(model.eval(), (floats(2, 3),)).training


def test_inputs_of_a_model_that_writes_to_them_are_kept():
    class InPlace(nn.Module):
        def forward(self, x):
            return x.add_(1)

    x = floats(2, 3)
    before = x.clone()
    Adapter(InPlace(), (x,)).run([x])
    assert torch.equal(x, before)


def test_weights_are_not_copied_and_strays_are_registered():
    model, calls = exportable("listed")
    adapter = Adapter(model, *calls[0])
    assert {id(model.weights[0]), id(model.layers[0].weight)} <= {id(p) for p in adapter.parameters()}
    assert not list(model.parameters())
    assert adapter.model is model
