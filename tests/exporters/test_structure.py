import pytest
import torch
from exportable_models import Detections, Keywords, Pair, floats
from laid_out import NESTED, SPARSE, laid_out
from torch import nn

from exporters.base import _output_names, named_inputs
from exporters.errors import StructureError
from optimize_export.structure import Structure, leaves_of

x, y, z = floats(2, 3), floats(2, 4), floats(2, 5)


def test_any_tree_is_flattened_and_rebuilt():
    value = {"a": [x, (y, None)], "b": Pair(z, x), "c": Detections(y, (z,), "dog"), "n": 3}
    structure = Structure(value, side="output")
    flat = structure.flatten(value)
    assert [id(t) for t in flat] == [id(t) for t in (x, y, z, x, y, z)]
    back = structure.rebuild([t + 1 for t in flat])
    assert type(back["b"]) is Pair
    assert type(back["c"]) is Detections
    assert back["c"].label == "dog"
    assert back["n"] == 3
    assert back["a"][1][1] is None
    assert torch.equal(back["c"].scores[0], z + 1)
    assert value["c"].scores[0] is z  # the example isn't written to
    # The order of a dict is that of the example.
    assert [id(t) for t in Structure({"a": x, "b": y}, side="argument").flatten({"b": y, "a": x})] == [id(x), id(y)]


def test_numbers_are_named_by_their_places_and_flags_are_not():
    structure = Structure({"x": x, "scale": 0.5, "sizes": [3, (y, -1j)], "flag": True, "name": "a"}, side="argument")
    assert list(structure.numbers()) == [
        ("argument `scale`", 0.5),
        ("argument `sizes[0]`", 3),
        ("argument `sizes[1][1]`", -1j),
    ]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"a": x}, "the argument lacks `n`, compared with the call that was exported."),
        ({"a": x, "n": 1, "m": 2}, "the argument adds `m`, compared with the call that was exported."),
        ({"a": None, "n": 1}, "argument `a` was a tensor when exported, but is None here."),
        (
            {"a": x, "n": 2},
            "argument `n` was 1 when exported, but is 2 here; only tensors can change from call to call.",
        ),
        ({"a": x, "n": True}, "argument `n` was 1 when exported, but is True here; only tensors"),
        ({"a": x, "n": y}, "argument `n` was 1 when exported, but is a tensor here"),
        ([x, 1], "the argument was a dict when exported, but is a list here."),
    ],
)
def test_another_structure_is_refused(value, sentence):
    with pytest.raises(StructureError) as caught:
        Structure({"a": x, "n": 1}, side="argument").flatten(value)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("side", ["argument", "output"])
def test_tensors_that_a_file_has_no_place_for_are_refused(side):
    named = {**dict.fromkeys(SPARSE, "sparse"), **dict.fromkeys(NESTED, "nested"), "mkldnn": "mkldnn"}
    named |= {"quantized": "quantized", "quantized per channel": "quantized"}
    for layout, kind in named.items():
        tensor = laid_out(layout, torch.eye(4))
        with pytest.raises(StructureError) as caught:
            Structure({"a": [x, tensor]}, side=side)
        assert str(caught.value).startswith(f"{side} `a[1]` is a {kind} tensor, which exported files can't represent")


def test_a_nan_constant_equals_itself_and_constants_are_not_compared_on_request():
    assert len(Structure([x, float("nan")], side="argument").flatten([x, float("nan")])) == 1
    assert Structure((x, 1), side="output").flatten((y, 7), constants=False) == (y,)


def test_what_cannot_be_taken_apart_is_named_with_the_way_out():
    class DynamicCache:
        pass

    with pytest.raises(StructureError, match=r"output `past_key_values` is a DynamicCache.*use_cache=False"):
        Structure({"logits": x, "past_key_values": DynamicCache()}, side="output")
    for value, kind in ((object(), "object"), (Cache(x), "Cache")):
        with pytest.raises(StructureError, match=rf"argument `a\[0\]` is a {kind}, which can't be flattened"):
            Structure({"a": [value]}, side="argument")


class Cache:
    """An object among the outputs, with tensors, other objects and a reference to itself."""

    def __init__(self, *tensors):
        self.seen, self.owner = 3, self
        self.layers = [Cache(tensor) for tensor in tensors[1:]]
        self.keys, self.values = tensors[0], {"a": None, "b": [tensors[0] + 1]}


def test_objects_among_the_outputs_are_opened_as_a_comparison_opens_them():
    output = {"logits": z, "cache": Cache(x, y)}
    structure = Structure(output, side="output")
    opened = leaves_of(output)
    assert _output_names(structure.paths, ()) == tuple(name.replace(".", "_") for name, _ in opened.tensors())
    flat = structure.flatten(output)
    assert all(one is other for one, (_, other) in zip(flat, opened.tensors(), strict=True))
    again = structure.rebuild([tensor + 1 for tensor in flat])["cache"]
    assert type(again) is Cache
    assert again.seen == 3
    assert torch.equal(again.layers[0].keys, y + 1)
    with pytest.raises(StructureError, match=r"output `cache` lacks `layers`"):
        structure.flatten({"logits": z, "cache": Cache(x)})


class Linked:
    """An object that may refer to others of its class."""


def linked(count):
    """The first of `count` objects, each of which refers to all of them."""
    together = [Linked() for _ in range(count)]
    for each in together:
        vars(each).update({f"next_{number}": other for number, other in enumerate(together)})
    return together[0]


def chain(length):
    first = last = Linked()
    for _ in range(length):
        last.next = Linked()
        last = last.next
    return first


# 12 linked objects have more than 11! paths between them, and Python can't recurse 5000 calls deep.
@pytest.mark.parametrize("beside", [linked(12), chain(5000)], ids=["linked", "chain"])
def test_what_holds_no_tensor_is_seen_however_its_objects_hang_together(beside):
    output = Linked()
    output.tensor, output.beside = x, beside
    assert Structure(output, side="output").flatten(output) == (x,)
    assert [name for name, _ in leaves_of(output).tensors()] == ["tensor"]


@pytest.mark.parametrize(
    "value", [nn.Linear(1, 1), lambda: x, Cache, torch.Generator()], ids=["module", "function", "class", "generator"]
)
def test_what_only_keeps_tensors_is_not_opened(value):
    with pytest.raises(StructureError, match="which can't be flattened into tensors"):
        Structure([x, value], side="output")


def test_model_outputs_leave_out_what_is_none():
    from transformers.modeling_outputs import BaseModelOutput

    structure = Structure(BaseModelOutput(last_hidden_state=x, hidden_states=(y, z)), side="output")
    assert _output_names(structure.paths, ()) == ("last_hidden_state", "hidden_states_0", "hidden_states_1")
    assert type(structure.rebuild([x, y, z])) is BaseModelOutput
    for count in (2, 4):
        with pytest.raises(StructureError, match=f"{count} tensors were given, but the model takes 3"):
            structure.rebuild([x] * count)


def test_arguments_are_bound_by_the_signature_of_the_class():
    class Sum(nn.Module):
        def forward(self, first, *rest):
            return first + sum(rest)

    assert list(named_inputs(Sum(), (x, x, x))) == ["first", "rest_0", "rest_1"]
    assert list(named_inputs(Keywords(), (x, y), {"scale": z})) == ["x", "mask", "scale"]
    with pytest.raises(StructureError, match="argument `x` is given twice"):
        named_inputs(Keywords(), (x,), {"x": x})
    model = Keywords()
    vars(model)["forward"] = lambda *args: args[0]
    assert list(named_inputs(model, (x, y))) == ["x", "mask"]


def test_names_are_identifiers_and_unique():
    named = {"a": [x], "a_0": x, "lambda": x, "0x": x, "größe": x}
    assert list(named_inputs(Keywords(), (), named)) == ["a_0", "a_0_1", "_lambda", "_0x", "gr__e"]
    assert _output_names([()], ()) == ("output",)
    assert _output_names([(0,), (1, "h")], ()) == ("output_0", "output_1_h")
    assert _output_names([("x",), ("x_out",)], ("x",)) == ("x_out", "x_out_1")


def test_the_description_is_json():
    structure = Structure({"a": (x, None), "d": torch.float16, "e": float("-inf")}, side="argument")
    assert structure.describe(["a_0"]) == {
        "type": "builtins.dict",
        "items": [
            ["a", {"type": "builtins.tuple", "items": [[0, {"tensor": "a_0"}], [1, {"constant": None}]]}],
            ["d", {"constant": "torch.float16", "kind": "dtype"}],
            ["e", {"constant": "-inf", "kind": "float"}],
        ],
    }
