"""Models of timm, whose BatchNorms are function calls in a forward that asserts the rank with a formatted message."""

from functools import cache

import pytest
import torch
from timm_models import timm_member

from optimizer import optimize

# The number of BatchNorms after a convolution in each model.
PAIRS = {
    "lcnet_050": 27,
    "efficientnet_b0": 49,
    "regnety_002": 44,
    "mobilenetv3_large_100": 46,
    "densenet121": 59,
    "repvgg_a0": 44,
    "mobilevit_xxs": 32,
}


@cache
def folded(name):
    model, kwargs = timm_member(name)
    return model, kwargs, optimize(model, ["fold-conv-bn"], example_kwargs=kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "lcnet_050" else pytest.mark.zoo) for name in PAIRS]
)
def test_every_pair_is_folded(name):
    model, kwargs, fast = folded(name)
    (record,) = fast.report.passes
    assert (record.status, len(record.changes)) == ("applied", PAIRS[name])
    assert fast.report.verified
    with torch.no_grad():
        for size in (1, 2, 5):
            images = kwargs["x"].repeat(3, 1, 1, 1)[:size] * torch.linspace(1, 0.5, size).reshape(-1, 1, 1, 1)
            wanted = model(images)
            # The original's own error is up to a tenth of that.
            assert (fast(images) - wanted).abs().max() < 1e-3 * wanted.std()


def test_an_image_without_a_batch_raises_as_in_the_original():
    model, kwargs, fast = folded("lcnet_050")
    for one in (model, fast):
        with pytest.raises(AssertionError, match="got 3D input"):
            one(kwargs["x"][0])
    assert torch.isfinite(fast(**kwargs)).all()
