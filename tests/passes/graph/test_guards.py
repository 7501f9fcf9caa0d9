"""A sealed output: its shape may be asked for, its values may not."""

import copy
import inspect
import itertools
import operator
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folding_models import Output, Pair, image
from laid_out import NESTED, SPARSE, laid_out
from torch import Tensor, nn

from passes.errors import UnseenCall
from passes.graph.guards import (
    ChannelsLastInputs,
    FoldedConvForward,
    FoldedNormForward,
    FoldedPair,
    FormattedForward,
    SealCheckingForward,
    SealedOutput,
    dim_order,
    inner_forward,
    is_carried,
    is_tied,
    ordered_leaves,
    refuse_checkpoint,
    sealed_for,
)

PAIR = FoldedPair("conv", "bn", 4, 2)
VALUE = torch.randn(2, 4, 3, 3)


def _plus_one(x: Tensor) -> Tensor:
    return x + 1


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


def sealed() -> Any:
    return SealedOutput(VALUE, PAIR)


USES: dict[str, Callable[[Any], Any]] = {
    "add": lambda y: y + 1,
    "added to": lambda y: VALUE + y,
    "added in place": lambda y: operator.iadd(VALUE.clone(), y),
    "times": lambda y: 2 * y,
    "negated": lambda y: -y,
    "compared": lambda y: y > 0,
    "equal": lambda y: y == 0,
    "unequal": lambda y: y != 0,
    "truth": bool,
    "number": float,
    "indexed": lambda y: y[0],
    "written": lambda y: operator.setitem(y, 0, 1),
    "iterated": list,
    "method": lambda y: y.relu(),
    "in place": lambda y: y.mul_(2),
    "values": lambda y: y.data,
    "detached": lambda y: y.detach(),
    "to numpy": lambda y: y.numpy(),
    "as array": lambda y: __import__("numpy").asarray(y),
    "function": F.relu,
    "torch function": torch.sigmoid,
    "in a list": lambda y: torch.cat([VALUE, y]),
    "convolution": lambda y: F.conv2d(y, torch.ones(1, 4, 1, 1)),
    "out": lambda y: torch.add(VALUE, 1, out=y),
    "memory": lambda y: y.data_ptr(),
    "strides": lambda y: y.stride(),
    "matmul": lambda y: y @ VALUE,
    # Functions in C that would read it as the tensor that it isn't.
    "scripted": lambda y: torch.jit.script(_plus_one)(y),
    "copied": lambda y: torch.tensor(y),
    "as tensor": lambda y: torch.as_tensor(y),
    "filled with": lambda y: isinstance(torch.full((2,), y), Tensor),
    "an autograd function": lambda y: _Twice.apply(y),
    "promoted": lambda y: isinstance(torch.result_type(y, 1), torch.dtype),
    "an old tensor type": lambda y: isinstance(y, torch.FloatTensor),
    "class": lambda y: y.__class__ is Tensor,
    "another isinstance": lambda y: eval(
        'isinstance(y, "__class__")', {"isinstance": getattr, "__name__": "own", "y": y}
    ),
}
ASKED: dict[str, Callable[[Any], Any]] = {
    "shape": lambda y: y.shape,
    "size": lambda y: y.size(1),
    "dims": lambda y: (y.dim(), y.ndim),
    "kind": lambda y: (y.dtype, y.device, y.layout, y.is_cuda),
    "length": len,
    "count": lambda y: (y.numel(), torch.numel(y)),
    "class": lambda y: (isinstance(y, Tensor), torch.is_tensor(y), isinstance(y, list | tuple | dict)),
    "class in a helper": lambda y: [isinstance(each, (str, Tensor)) for each in (y, 1)],
    "abstract class": lambda y: (isinstance(y, Mapping), isinstance(y, Iterable), isinstance(y, Sequence)),
    "parameter": lambda y: (isinstance(y, nn.Parameter), isinstance(y, nn.Buffer)),
    "floating": lambda y: (y.is_floating_point(), torch.is_floating_point(y), torch.is_complex(y)),
}


_BINARY = (
    "add", "sub", "mul", "truediv", "matmul", "pow", "floordiv", "mod", "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_",
    "xor", "iadd", "isub", "imul", "itruediv", "getitem",
)  # fmt: skip
_REFLECTED = ("add", "sub", "mul", "truediv", "matmul", "pow")
OPERATORS: dict[str, Callable[[Any], Any]] = {
    **{name: lambda y, name=name: getattr(operator, name)(y, 1) for name in _BINARY},
    **{f"{name} reflected": lambda y, name=name: getattr(operator, name)(2, y) for name in _REFLECTED},
    **{name: getattr(operator, name) for name in ("neg", "pos", "abs", "invert", "index", "truth")},
    "int": int,
    "float": float,
    "iter": iter,
    "setitem": lambda y: operator.setitem(y, 0, 1),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_no_operator_computes_on_it(name: str) -> None:
    """Whatever its values: one number is a truth, an index and an operand of anything."""
    value = torch.tensor(1) if name in ("index", "truth", "int", "float", "invert") else torch.ones(2, 4)
    with pytest.raises(UnseenCall, match="its output was used without it"):
        OPERATORS[name](SealedOutput(value, PAIR))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
@pytest.mark.parametrize("use", USES)
def test_its_values_are_not_to_be_had(use: str) -> None:
    with pytest.raises(UnseenCall, match=r"conv was folded together with bn, and its output was used without it: .*\."):
        USES[use](sealed())


@pytest.mark.parametrize("question", ASKED)
def test_its_shape_and_kind_are(question: str) -> None:
    assert ASKED[question](sealed()) == ASKED[question](VALUE)


def test_it_can_be_looked_at_and_copied() -> None:
    assert "SealedOutput" in repr(sealed())
    assert copy.deepcopy(sealed()).shape == VALUE.shape


def test_one_that_is_being_made_has_nothing_yet() -> None:
    bare = SealedOutput.__new__(SealedOutput)
    for name in ("sealed_value", "sealed_by", "sealed_dim", "__deepcopy__"):
        with pytest.raises(AttributeError, match=name):
            getattr(bare, name)


def test_only_its_norm_opens_it() -> None:
    conv, norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4).eval()
    x = torch.randn(2, 3, 5, 5)
    output = FoldedConvForward(conv, PAIR)(x)
    bare = nn.BatchNorm2d(4, affine=False, track_running_stats=False).eval()
    assert torch.equal(FoldedNormForward(bare, PAIR, carried=True)(output), conv(x))
    assert torch.equal(FoldedNormForward(norm, PAIR, carried=False)(output), norm(conv(x)))
    other = FoldedNormForward(norm, FoldedPair("conv", "bn", 4, 2), carried=True)
    for value in (output, conv(x)):
        with pytest.raises(UnseenCall, match="bn was folded together with conv and is given a value that doesn't come"):
            other(value)


def test_tensors_that_the_fold_took_away_are_not_ignored() -> None:
    x = torch.randn(2, 3, 5, 5)
    conv, norm = nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4, affine=False, track_running_stats=False).eval()
    first, second = FoldedConvForward(conv, PAIR), FoldedNormForward(norm, PAIR, carried=True)
    output = first(x)
    assert torch.equal(second(output), conv(x))
    for name, home in (("weight", norm._parameters), ("running_mean", norm._buffers)):
        home[name] = torch.ones(4)
        with pytest.raises(
            UnseenCall, match=r"^bn has parameters again that went into another module when conv was folded"
        ):
            second(output)
        home[name] = None
    assert torch.equal(second(output), conv(x))
    conv.bias = nn.Parameter(torch.ones(4))
    with pytest.raises(UnseenCall, match=r"^conv has parameters again"):
        first(x)


def _without_tensors(channels: int = 4) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, affine=False, track_running_stats=False).eval()


@pytest.mark.parametrize(
    "mix",
    [
        lambda y: y.flatten(1),
        lambda y: y.view(2, -1),
        lambda y: torch.flatten(y, 1),
        lambda y: y.transpose(0, 7),
        lambda y: F.dropout(y),
    ],
)
def test_what_mixes_its_channels_with_others_or_draws_does_not_pass(mix: Callable[[Any], Any]) -> None:
    with pytest.raises(UnseenCall, match="its output was used without it"):
        mix(sealed())


def test_channels_that_come_in_another_dim_are_not_opened() -> None:
    norm = FoldedNormForward(_without_tensors(), PAIR, carried=True)
    moved = sealed().transpose(1, 2)
    with pytest.raises(UnseenCall, match="takes dim 1 for the channels, and they come to it in dim 2"):
        norm(moved)
    assert torch.equal(norm(moved.transpose(1, 2)), VALUE)


def test_input_of_other_dims_than_were_seen_is_refused() -> None:
    conv = nn.Conv2d(3, 4, 1)
    for give in (FoldedConvForward(conv, PAIR), lambda value: sealed_for(value, PAIR, 2)):
        assert isinstance(give(torch.randn(2, 3, 5, 5)), SealedOutput)
        with pytest.raises(UnseenCall, match="for 4-D input and is given 3-D input"):
            give(torch.randn(3, 5, 5))


def test_a_sealed_output_is_not_sealed_again() -> None:
    for pair in (PAIR, FoldedPair("other", "behind", 4, 2), FoldedPair("other", "front", 4, 2, leads=True)):
        with pytest.raises(UnseenCall, match=r"^conv was folded together with bn, and its output was used without it"):
            sealed_for(sealed(), pair, 2)


@pytest.mark.parametrize("leads", [False, True])
def test_what_is_set_on_a_norm_that_is_carried_is_not_ignored(leads: bool) -> None:
    pair = FoldedPair("conv", "bn", 4, 2, leads=leads)
    norm = _without_tensors()
    forward = FoldedNormForward(norm, pair, carried=True)
    given = VALUE if leads else SealedOutput(VALUE, pair)
    forward(given)
    norm.eps = 1.0
    with pytest.raises(UnseenCall, match="bn has another eps than when it was folded into conv"):
        forward(given)
    norm.eps = forward.eps
    norm._parameters["weight"] = torch.ones(4)
    with pytest.raises(UnseenCall, match=r"^bn has parameters again"):
        forward(given)


def test_a_checkpoint_with_what_was_given_away_is_an_error() -> None:
    norm = nn.BatchNorm2d(4)
    state = norm.state_dict()
    norm.weight = None
    norm.register_load_state_dict_pre_hook(refuse_checkpoint)
    with pytest.raises(RuntimeError, match="weight was folded into another weight when the model was optimized"):
        norm.load_state_dict(state, strict=False)
    norm.load_state_dict({name: value for name, value in state.items() if name != "weight"})


def test_which_norms_are_carried_and_which_are_tied() -> None:
    carried, tied, plain, patched = (nn.BatchNorm2d(4) for _ in range(4))
    carried.forward = FoldedNormForward(carried, PAIR, carried=True)
    tied.forward = FoldedNormForward(tied, PAIR, carried=False)
    patched.forward = FoldedConvForward(nn.Conv2d(3, 4, 1), PAIR)
    norms = (carried, tied, plain, patched)
    assert [is_carried(norm) for norm in norms] == [True, False, False, False]
    assert [is_tied(norm) for norm in norms] == [False, True, False, False]


class Leaky(Pair):
    def forward(self, x: Tensor, *, how: str = "plain") -> Any:
        y = self.conv(x)
        return {
            "plain": y,
            "tuple": (1, [y]),
            "dict": {"a": {"b": y}},
            "dataclass": Output([Output(y)]),
            "right": self.bn(y),
        }[how]


@pytest.mark.parametrize("how", ["plain", "tuple", "dict", "dataclass"])
def test_no_seal_leaves_the_module(how: str) -> None:
    model = Leaky().eval()
    model.conv.forward = FoldedConvForward(model.conv, PAIR)
    model.bn.forward = FoldedNormForward(model.bn, PAIR, carried=False)
    model.forward = SealCheckingForward(model)
    with pytest.raises(UnseenCall, match="its output was used without it"):
        model(image(), how=how)
    assert torch.equal(model(image(), how="right"), Leaky().eval()(image(), how="right"))
    assert list(inspect.signature(model.forward).parameters) == ["x", "how"]


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
    """Reads, writes or gives back its input."""

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
