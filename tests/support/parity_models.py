"""Models and helpers of the tests that compare a candidate with its original."""

import copy

import torch
import torch.nn.functional as F
from tiny_models import enliven
from torch import nn

from optimizer.parity import check_parity, compare_region, region_at


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(F.relu(self.bn(self.conv(x))).mean((2, 3)))


def net():
    torch.manual_seed(0)
    return enliven(ConvNet())


def folded(model):
    result = copy.deepcopy(model).eval()
    result.conv = nn.utils.fusion.fuse_conv_bn_eval(result.conv, result.bn)
    result.bn = nn.Identity()
    return result


def off_by(model, path, relative=0.01):
    """A copy of the model with one wrong weight: the one of median magnitude in a tensor."""
    result = copy.deepcopy(model)
    flat = result.get_parameter(path).data.view(-1)
    flat[flat.abs().argsort()[len(flat) // 2]] *= 1 + relative
    return result


def check_region(old, new, x):
    return compare_region(region_at(old, (x,)), new)


def image(batch=2):
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def verdict(reference, candidate, *inputs, **options):
    return check_parity(reference, candidate, inputs, **options).verdict
