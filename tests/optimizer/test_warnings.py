"""Which warnings of a model, and of torch's compiler, a call of this program shows."""

import functools
import logging
import warnings

import torch
from torch import nn

from optimizer import export, optimize


@functools.cache
def kept_scale(size):
    return 1 / size


class Warned(nn.Module):
    """Warns, calls a cached function, which torch's compiler warns of, and logs as that does."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        if not torch.compiler.is_compiling():
            warnings.warn("from the model", stacklevel=1)
            logging.getLogger("torch._dynamo.variables").warning("Graph break")
        return (self.a(x) + self.b(x)) * kept_scale(4)


def test_a_model_warns_once_per_export(tmp_path):
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        export(Warned().eval(), (torch.randn(2, 4),), output=tmp_path / "bundle", formats=["torchscript"])
    assert [str(each.message) for each in seen] == ["from the model"]


def test_the_compiler_warns_neither_in_optimize_nor_at_a_new_capture(caplog):
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fast = optimize(Warned().eval(), ["merge-linears"], example_inputs=(torch.randn(2, 4),))
        assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
        fast(torch.randn(3, 4))
    assert not [each for each in seen if "Dynamo" in str(each.message)]
    assert logging.getLogger("torch").level == logging.WARNING
