"""One rewritten region of a model, judged on its recorded inputs."""

import copy

import torch
from parity_models import check_region, image, net
from torch import nn

from optimizer.parity import check_change, compare_region, region_at


def test_a_region_is_checked_at_its_own_outputs():
    model = net().eval()
    old = nn.Sequential(model.conv, model.bn)
    new = nn.utils.fusion.fuse_conv_bn_eval(model.conv, model.bn)
    right = check_region(old, new, image(3))
    assert right.ok
    assert right.error > 0
    assert 0 < right.ratio <= 4
    wrong = copy.deepcopy(new)
    flat = wrong.weight.data.view(-1)
    flat[flat.abs().argsort()[len(flat) // 2]] *= 1.01
    report = check_region(old, wrong, image(3))
    assert not report.ok
    assert report.ratio > 4
    assert "the recorded inputs" in report.reason


def test_a_region_may_answer_zero_but_not_raise_or_change_shape():
    assert check_region(lambda x: x * 0, lambda x: x * 0, image()).ok
    assert not check_region(lambda x: x * 0, lambda x: x * 0 + 1, image()).ok
    assert not check_region(lambda x: x, lambda x: x[0], image()).ok
    assert "ZeroDivisionError" in check_region(lambda x: x, lambda x: 1 / 0, image()).reason
    ((algebra, _),) = check_change(lambda x: 1 / 0, lambda x: x, (image(),))
    assert not algebra.ok


def test_a_region_in_half_precision_is_judged_by_its_own_error():
    """The effect of one ulp of an input isn't the region's own error: if numbers cancel, it is far larger."""
    weight = torch.tensor([1.0, 2.0, -3.0], dtype=torch.bfloat16)
    rounded = (weight.double() * 1.1).bfloat16()
    x = (torch.randn(64, 1, generator=torch.Generator().manual_seed(0)) + 1000).expand(64, 3).bfloat16()
    x = x + torch.randn(64, 3, generator=torch.Generator().manual_seed(1)).bfloat16() * 8

    def old(x):
        return (x @ weight) * 1.1

    def new(x):
        return x @ rounded

    reference = region_at(old, (x,))
    assert reference.truth_in_float64
    assert compare_region(reference, new).ok
    wrong = compare_region(reference, new, by_own_error=True)
    assert not wrong.ok
    assert wrong.ratio > 8
    assert compare_region(reference, old, by_own_error=True).ok


def test_an_exact_region_in_half_precision_may_differ_in_the_last_place():
    x = torch.linspace(1, 2, 64, dtype=torch.bfloat16)
    reference = region_at(lambda x: x * 2, (x,))
    assert compare_region(reference, lambda x: x * 2 + 2**-5, by_own_error=True).ok
    assert not compare_region(reference, lambda x: x * 2 + 2**-3, by_own_error=True).ok


def test_a_change_runs_each_region_once_where_the_least_noise_is_enough():
    torch.manual_seed(0)
    weight, x, runs = torch.randn(4, 8), torch.randn(16, 8), []

    def region(name, weight):
        def run(x):
            runs.append(name)
            return nn.functional.linear(x, weight)

        return run

    ((algebra, rounding),) = check_change(region("old", weight), region("new", weight * (1 + 2**-23)), (x,))
    assert algebra.ok
    assert rounding is None
    assert runs == ["old", "new"]
    ((algebra, _),) = check_change(region("old", weight), region("new", weight * 1.001), (x,))
    assert not algebra.ok


def test_a_small_channel_of_a_region_is_judged_by_itself():
    torch.manual_seed(0)
    weight, x = torch.randn(4, 8), torch.randn(16, 8)
    weight[0] *= 1e6
    wrong = weight.clone()
    wrong[2] = 0
    ((algebra, _),) = check_change(
        lambda x: nn.functional.linear(x, weight), lambda x: nn.functional.linear(x, wrong), (x,)
    )
    assert not algebra.ok
    assert "index 2 of dim 1" in algebra.reason
