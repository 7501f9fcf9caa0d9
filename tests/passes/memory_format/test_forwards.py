"""Forward wrappers that set the memory format of inputs and outputs."""

import copy
import inspect
import itertools
import pickle
from typing import Any

import pytest
import torch
from folding_models import image
from laid_out import NESTED, SPARSE, laid_out
from torch import Tensor, nn

from passes.graph.forwards import inner_forward
from passes.memory_format.forwards import ChannelsLastInputs, FormattedForward, dim_order, ordered_leaves


class Formats(nn.Module):
    def forward(self, x: Tensor, count: int = 2) -> Any:
        return [x.to(memory_format=torch.channels_last) for _ in range(count)]


def test_outputs_get_the_formats_that_are_asked_for() -> None:
    model = Formats()
    model.forward = FormattedForward(model, ((0, 1, 2, 3), (0, 2, 3, 1)), None)
    x = image()
    first, second = model(x)
    assert first.is_contiguous()
    assert second.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(first, x)
    assert all(leaf.is_contiguous() for leaf in model(x, 3)), "more values than were recorded are contiguous"
    assert list(inspect.signature(model.forward).parameters) == ["x", "count"]
    assert inner_forward(model) is None


def test_sizes_among_the_outputs_stay_what_they_are() -> None:
    class Sizes(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"size": x.shape, "x": x.to(memory_format=torch.channels_last)}

    model, x = Sizes(), image()
    orders = tuple(dim_order([leaf]) for leaf in ordered_leaves({"size": x.shape, "x": x}))
    model.forward = FormattedForward(model, orders, None)
    got = model(x)
    assert isinstance(got["size"], torch.Size)
    assert got["size"] == x.shape
    assert got["x"].is_contiguous()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_every_order_of_dims_is_found_and_given_back(order: tuple[int, ...]) -> None:
    sizes = (2, 5, 3)
    back = [order.index(dim) for dim in range(3)]
    original = torch.randn([sizes[dim] for dim in order]).permute(back)
    assert dim_order([original]) == order
    model = nn.Identity()
    model.forward = FormattedForward(model, (order,), None)
    for given in (original, original.contiguous(), original[:1], original.transpose(1, 2).contiguous().transpose(1, 2)):
        got = model(given)
        assert torch.equal(got, given)
        assert got.permute(order).is_contiguous()
    assert model(original) is original, "what is right already isn't copied"
    assert model(original).stride() == original.stride() == model(original.contiguous()).stride()


def test_dims_of_size_1_are_told_by_a_call_of_another_size() -> None:
    one, two = torch.randn(1, 7, 3).transpose(0, 1), torch.randn(2, 7, 3).transpose(0, 1)
    assert one.is_contiguous()
    assert dim_order([one]) == (0, 1, 2)
    assert dim_order([one, two]) == dim_order([two, one]) == (1, 0, 2)
    assert dim_order([one, two.contiguous()]) == (0, 1, 2)
    assert dim_order([two, two.contiguous()]) == (1, 0, 2), "that of the first, where no order is right for both"


@pytest.mark.parametrize(
    "leaf", [None, 3, torch.ones(3), torch.ones(()), torch.ones(4, 6)[:, ::2], torch.ones(3, 1).expand(3, 3)]
)
def test_what_has_no_order_has_none(leaf: Any) -> None:
    assert dim_order([leaf]) is None


@pytest.mark.parametrize("layout", [*SPARSE, *NESTED, "mkldnn", "quantized per channel"])
def test_what_has_no_strides_has_no_order(layout: str) -> None:
    assert dim_order([laid_out(layout, torch.eye(4))]) is None


def test_a_format_for_other_dims_is_no_error() -> None:
    model = nn.Flatten()
    model.forward = FormattedForward(model, ((0, 2, 3, 1),), None)
    assert model(image()).is_contiguous()


class Lender(nn.Module):
    """Reads its input, writes to it, or returns it."""

    def forward(self, x: Tensor, how: str = "read", *, y: Tensor | None = None) -> Any:
        if how == "write":
            x[0] += 1
        given = {"x": x.stride(), "y": None if y is None else y.stride()}
        return {"given": given, "back": [x, x.shape] if how == "give back" else None}


def lender(*inputs: str) -> Lender:
    model = Lender()
    model.forward = ChannelsLastInputs(model, frozenset(inputs), None)
    return model


def test_inputs_are_given_in_channels_last() -> None:
    x, last = image(), image().contiguous(memory_format=torch.channels_last)
    before = x.clone()
    assert lender("x")(x)["given"]["x"] == last.stride()
    assert lender("x")(x=x)["given"]["x"] == last.stride()
    assert lender("y")(x, y=x)["given"] == {"x": x.stride(), "y": last.stride()}
    assert lender("x", "y")(x, y=x)["given"] == {"x": last.stride(), "y": last.stride()}
    assert lender("x")(last)["given"]["x"] == last.stride()
    volume = torch.randn(2, 3, 4, 5, 6)
    assert lender("x")(volume)["given"]["x"] == volume.contiguous(memory_format=torch.channels_last_3d).stride()
    rows = torch.randn(2, 3)
    assert lender("x")(rows)["given"]["x"] == rows.stride()
    assert torch.equal(x, before)
    assert x.is_contiguous()
    assert list(inspect.signature(lender("x").forward).parameters) == ["x", "how", "y"]


@pytest.mark.parametrize("inference", [False, True])
def test_a_call_that_writes_to_its_input_does_so(inference: bool) -> None:
    with torch.inference_mode(inference):
        x, kept = image(), image()
        kept.copy_(x)
        lender("x")(x, "write")
        kept[0] += 1
        assert torch.equal(x, kept)
        assert x.is_contiguous()
        writes = None if inference else x._version
        lender("x")(x)
        assert inference or x._version == writes, "one that doesn't leaves it alone"


def test_a_call_that_gives_its_input_back_gives_the_callers() -> None:
    x = image()
    got, shape = lender("x")(x, "give back")["back"]
    assert got is x
    assert type(shape) is torch.Size


def test_channels_last_inputs_are_copied_and_mapped() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    model.forward = ChannelsLastInputs(model, frozenset({"input"}), None)
    x = image()
    wanted = type(model).forward(model, x)
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.forward.owner is twin
        assert torch.allclose(twin(x), wanted, atol=1e-6)
    mapped = torch.func.vmap(lambda one: model(one[None])[0])(x)
    assert torch.allclose(mapped, wanted, atol=1e-6)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(x), wanted, atol=1e-6)
    exported = torch.export.export(model, (x,)).module()
    assert torch.allclose(exported(x), wanted, atol=1e-6)
    strict = torch.export.export(model, (x,), strict=True).module()
    assert torch.allclose(strict(x), wanted, atol=1e-6)
