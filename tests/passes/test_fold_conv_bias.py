"""Moving a convolution's bias into the BatchNorm behind it."""

import copy
import pickle

import folding_models as models
import pytest
import torch
from folding_models import CONVOLUTIONS, FAR, image, norm_behind
from pass_contract import captured, check_pass
from tiny_models import enliven
from torch import nn

from optimizer import optimize, report_of
from passes import FoldConvBias
from passes.errors import UnseenCall
from passes.graph.recording import Recordings

WITH_BIAS = [cls for cls in models.FOLDED if cls not in (models.Functional, models.TorchFunctions)]


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("affine", [True, False])
def test_the_algebra_is_exact_in_float64(kind: str, affine: bool) -> None:
    make, shape = CONVOLUTIONS[kind]
    conv = make()
    model = enliven(nn.Sequential(conv, norm_behind(conv, shape, affine=affine))).double().eval()
    x = image(*shape).double()
    program, context = captured(model)
    program.recordings = Recordings(ranks={id(program.root[0]): (x.dim(),)})
    (change,) = FoldConvBias().run(program, context).changes
    assert (change.where, change.what) == ("0", "bias moved into the running mean of 1")
    assert program.root[0].bias is None
    assert torch.equal(program.root[1].running_mean, model[1].running_mean - model[0].bias)
    assert torch.allclose(program.root(x), model(x), rtol=1e-12, atol=1e-12)
    model[0].bias = None
    assert not torch.allclose(program.root(x), model(x), rtol=1e-2, atol=1e-2), "this bias does nothing to be moved"


@pytest.mark.parametrize("cls", WITH_BIAS)
def test_moves_the_bias_in_every_spelling(cls: type[nn.Module]) -> None:
    model = cls().eval()
    fast = optimize(model, ["fold-conv-bias", "fold-conv-bn"], example_inputs=(image(),))
    first, second = report_of(fast).passes
    assert (first.status, second.status) == ("applied", "applied"), str(report_of(fast))
    assert torch.allclose(fast(image(seed=7)), model(image(seed=7)), atol=1e-5)
    twin = pickle.loads(pickle.dumps(fast))
    assert torch.equal(twin(image()), fast(image()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cancels", [False, True])
def test_a_bias_that_half_precision_needs_where_it_is_stays(dtype: torch.dtype, cancels: bool) -> None:
    """What the convolution gives without it is rounded to its dtype, and may be far larger than with it."""
    model = models.Pair().eval()
    x = image()
    if cancels:
        x[:, 0] = 1
        with torch.no_grad():
            model.conv.padding = (0, 0)
            model.conv.weight[:, 0], model.conv.bias[:] = 512 / 9, -512
    model, x = model.to(dtype), x.to(dtype)
    with torch.no_grad():
        model.conv.bias[:] = model.conv.bias if not cancels else -9 * model.conv.weight[:, 0, 0, 0]
    fast = optimize(model, ["fold-conv-bias"], example_inputs=(x,))
    (record,) = report_of(fast).passes
    assert record.status == ("unchanged" if cancels else "applied")
    text = "bias moved into the running mean of bn, it loses too much to rounding: "
    assert [skip.text.startswith(text) for skip in record.skips] == [True] * cancels
    assert (fast.conv.bias is None) != cancels


@pytest.mark.parametrize("cls", [models.Functional, models.TorchFunctions])
def test_nothing_to_move_without_a_bias(cls: type[nn.Module]) -> None:
    done = check_pass(FoldConvBias(), cls().eval(), (image(),))
    assert (done.changes, done.skips) == ((), ())


def test_batch_statistics_are_left_alone() -> None:
    model = models.Pair().eval()
    model.bn.train()
    program, context = captured(model, keep_flags=True)
    done = FoldConvBias().run(program, context)
    assert done.changes == ()
    assert done.skips[0].reason == "the BatchNorm bn uses the statistics of the batch"


@pytest.mark.parametrize(
    ("cls", "passes"),
    [
        *((cls, ["fold-conv-bias"]) for cls in models.UNSEEN),
        (models.IslandRawOutput, ["fold-conv-bias", "fold-conv-bn"]),
        (models.IslandBesides, ["fold-conv-bias", "fold-conv-bn"]),
    ],
)
def test_a_moved_bias_needs_its_norm_in_every_branch(cls: type[nn.Module], passes: list[str]) -> None:
    """In a branch that wasn't seen the convolution would be used without its bias: it raises instead."""
    model = cls().eval()
    fast = optimize(model, passes, example_inputs=(image(),))
    assert {record.status for record in report_of(fast).passes} == {"applied"}, str(report_of(fast))
    assert torch.allclose(fast(image(seed=4)), model(image(seed=4)), atol=1e-5)
    for twin in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        with pytest.raises(UnseenCall, match="folded together"):
            twin(FAR)
