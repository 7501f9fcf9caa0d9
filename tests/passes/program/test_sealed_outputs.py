"""A sealed output answers questions about its shape, and refuses to give its values."""

import copy
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folding_models import Output, Pair, image
from pairs import is_carried
from torch import Tensor, nn

from passes.errors import UnseenCall
from passes.program.checkpoint_guard import refuse_checkpoint
from passes.program.folded import FoldedConvForward, FoldedNormForward, NoSealsLeave
from passes.program.pairs import FoldedPair
from passes.program.seals import SealedOutput, TracedOutput, opened_from, sealed_for
from passes.program.seals import sealed as seal_of
from passes.program.tensors import TensorRef
from passes.program.weights import folded_tensor

PAIR = FoldedPair("conv", "bn", 4, 2)
VALUE = torch.randn(2, 4, 3, 3)


def _plus_one(x: Tensor) -> Tensor:
    return x + 1


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


def sealed() -> Any:
    return seal_of(VALUE, PAIR)


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
    "storage": lambda y: y.untyped_storage(),
    "matmul": lambda y: y @ VALUE,
    "an autograd function": lambda y: _Twice.apply(y),
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
    "strides": lambda y: y.stride(),
    "promoted": lambda y: torch.result_type(y, 1),
    "floating": lambda y: (y.is_floating_point(), torch.is_floating_point(y), torch.is_complex(y)),
}


_BINARY = (
    "add", "sub", "mul", "truediv", "pow", "floordiv", "mod", "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_",
    "xor", "iadd", "isub", "imul", "itruediv", "getitem",
)  # fmt: skip
_REFLECTED = ("add", "sub", "mul", "truediv", "pow")
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
    """A single number is tested too, because it also converts to bool, int, float and an index."""
    value = torch.tensor(1) if name in ("index", "truth", "int", "float", "invert") else torch.ones(2, 4)
    with pytest.raises(UnseenCall, match="its output was used without it"):
        OPERATORS[name](seal_of(value, PAIR))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
@pytest.mark.parametrize("use", USES)
def test_its_values_are_not_to_be_had(use: str) -> None:
    with pytest.raises(UnseenCall, match=r"conv was folded together with bn, but its output was used without it: .*\."):
        USES[use](sealed())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_code_in_c_finds_no_numbers() -> None:
    """Code that bypasses `__torch_function__` gets an empty tensor, of a dtype that no operation accepts."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.jit.script(_plus_one)(sealed())
    for read in (lambda: torch.full((2,), sealed()), lambda: torch.tensor([sealed()])):
        with pytest.raises((RuntimeError, TypeError)):
            read()


@pytest.mark.parametrize("question", ASKED)
def test_its_shape_and_kind_are(question: str) -> None:
    assert ASKED[question](sealed()) == ASKED[question](VALUE)


def test_it_can_be_looked_at_and_not_copied() -> None:
    assert repr(sealed()) == f"{sealed()}" == "SealedTensor(shape=(2, 4, 3, 3), dtype=torch.float32)"
    with pytest.raises(UnseenCall, match="its output was used without it"):
        copy.deepcopy(sealed())


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
        with pytest.raises(UnseenCall, match="bn was folded together with conv, but its input doesn't come"):
            other(value)


def test_tensors_that_the_fold_took_away_are_not_ignored() -> None:
    x = torch.randn(2, 3, 5, 5)
    conv, norm = nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4, affine=False, track_running_stats=False).eval()
    first, second = FoldedConvForward(conv, PAIR), FoldedNormForward(norm, PAIR, carried=True)
    output = first(x)
    assert torch.equal(second(output), conv(x))
    homes = {"weight": norm._parameters, "bias": norm._parameters}
    homes |= {"running_mean": norm._buffers, "running_var": norm._buffers}
    for name, home in homes.items():
        home[name] = torch.ones(4)
        with pytest.raises(
            UnseenCall, match=r"^bn has parameters again, but they were folded into another module when conv was folded"
        ):
            second(output)
        home[name] = None
    assert torch.equal(second(output), conv(x))
    conv.bias = nn.Parameter(torch.ones(4))
    with pytest.raises(UnseenCall, match=r"^conv has a different weight or bias"):
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
    with pytest.raises(UnseenCall, match="takes dim 1 as the channels, but they are in dim 2"):
        norm(moved)
    assert torch.equal(norm(moved.transpose(1, 2)), VALUE)


def test_input_of_other_dims_than_were_seen_is_refused() -> None:
    conv, transposed = nn.Conv2d(3, 4, 1), nn.ConvTranspose2d(3, 4, 1)
    for give in (
        FoldedConvForward(conv, PAIR),
        FoldedConvForward(transposed, PAIR),
        lambda value: sealed_for(value, PAIR, 2),
    ):
        assert isinstance(give(torch.randn(2, 3, 5, 5)), SealedOutput)
        with pytest.raises(UnseenCall, match="for 4-D input, but got 3-D input"):
            give(torch.randn(3, 5, 5))


def test_a_sealed_output_is_not_sealed_again() -> None:
    for pair in (PAIR, FoldedPair("other", "behind", 4, 2), FoldedPair("other", "front", 4, 2, leads=True)):
        with pytest.raises(UnseenCall, match=r"^conv was folded together with bn, but its output was used without it"):
            sealed_for(sealed(), pair, 2)


@pytest.mark.parametrize("leads", [False, True])
def test_what_is_set_on_a_norm_that_is_carried_is_not_ignored(leads: bool) -> None:
    pair = FoldedPair("conv", "bn", 4, 2, leads=leads)
    norm = _without_tensors()
    forward = FoldedNormForward(norm, pair, carried=True)
    given = VALUE if leads else seal_of(VALUE, pair)
    forward(given)
    norm.eps = 1.0
    with pytest.raises(UnseenCall, match="bn has a different eps than when it was folded into conv"):
        forward(given)
    norm.eps = forward.eps
    norm.train()
    with pytest.raises(UnseenCall, match="bn was put in training mode, but it was folded together with conv"):
        forward(given)
    norm.eval()
    norm._parameters["weight"] = torch.ones(4)
    with pytest.raises(UnseenCall, match=r"^bn has parameters again"):
        forward(given)


def test_a_value_that_was_made_without_gradients_is_not_opened_with_them() -> None:
    """Otherwise a folded layer that runs inside an autograd function would silently lose its gradient."""
    with torch.no_grad():
        value = sealed()
    norm = FoldedNormForward(_without_tensors(), PAIR, carried=True)
    for use in (norm, lambda y: y.transpose(2, 3), lambda y: opened_from(y, PAIR, None)):
        with pytest.raises(UnseenCall, match="its output was used without it"):
            use(value)
        with torch.no_grad():
            use(value)


def test_a_function_opens_only_its_own_input() -> None:
    norm = _without_tensors()
    x, ones = torch.ones(2, 4, 3, 3), torch.ones(4)
    for leads in (False, True):
        pair = FoldedPair("conv", "bn", 4, 2, leads=leads, function=TensorRef(norm, "running_mean"))
        mean = norm.__dict__["running_mean"] = folded_tensor(ones, pair=pair)
        value = seal_of(x, pair)
        if not leads:
            assert torch.equal(F.batch_norm(value, mean, ones, eps=0.0), x)
        for use in (
            lambda y, mean=mean: F.batch_norm(x, mean, y, eps=0.0),
            *([lambda y, mean=mean: F.batch_norm(y, mean, ones, eps=0.0)] if leads else []),
        ):
            with pytest.raises(UnseenCall, match="its output was used without it"):
                use(value)


def test_a_leading_function_is_known_by_its_mean() -> None:
    norm = _without_tensors()
    pair = FoldedPair("conv", "bn", 4, 2, leads=True, function=TensorRef(norm, "running_mean"))
    mean, scale = (folded_tensor(torch.ones(4), pair=pair) for _ in range(2))
    norm.__dict__["running_mean"] = mean
    assert isinstance(F.batch_norm(VALUE, mean, torch.ones(4), scale, eps=0.0), SealedOutput)
    with pytest.raises(UnseenCall, match="is used without the two"):
        F.batch_norm(VALUE, torch.zeros(4), torch.ones(4), scale, eps=0.0)


def test_while_torch_traces_it_answers_for_its_shape_alone() -> None:
    value = TracedOutput(VALUE, PAIR, 1)
    assert (value.shape, value.dim(), len(value)) == (VALUE.shape, 4, 2)
    with pytest.raises(UnseenCall, match="its output was used without it"):
        value.T  # noqa: B018
    with pytest.raises(UnseenCall, match="its output was used without it"):
        value.relu()
    for name in ("__deepcopy__", "sealed_layer"):
        with pytest.raises(AttributeError, match=name):
            getattr(value, name)


def test_a_checkpoint_with_what_was_given_away_is_an_error() -> None:
    norm = nn.BatchNorm2d(4)
    state = norm.state_dict()
    norm.weight = None
    norm.register_load_state_dict_pre_hook(refuse_checkpoint)
    with pytest.raises(RuntimeError, match="weight was folded into another weight when the model was optimized"):
        norm.load_state_dict(state, strict=False)
    norm.load_state_dict({name: value for name, value in state.items() if name != "weight"})


def test_which_norms_are_carried() -> None:
    carried, tied, plain, patched = (nn.BatchNorm2d(4) for _ in range(4))
    carried.forward = FoldedNormForward(carried, PAIR, carried=True)
    tied.forward = FoldedNormForward(tied, PAIR, carried=False)
    patched.forward = FoldedConvForward(nn.Conv2d(3, 4, 1), PAIR)
    norms = (carried, tied, plain, patched)
    assert [is_carried(norm) for norm in norms] == [True, False, False, False]


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
    model.forward = NoSealsLeave(model, None)
    with pytest.raises(UnseenCall, match="its output was used without it"):
        model(image(), how=how)
    assert torch.equal(model(image(), how="right"), Leaky().eval()(image(), how="right"))
    assert list(inspect.signature(model.forward).parameters) == ["x", "how"]
