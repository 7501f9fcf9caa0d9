"""Name a line of the model's source, together with the module that runs it."""

import traceback

import pytest
import torch
from torch import nn

from exporters.places import place_in_stack, place_of_error


def halved(x):
    if x.shape[0] != 2:
        raise ValueError("two rows")
    return x / 2


class Halves(nn.Module):
    def forward(self, x):
        return self.of(x)

    def of(self, x):
        return halved(x)


class Net(nn.Module):
    def __init__(self, count=1):
        super().__init__()
        self.parts = nn.ModuleList([Halves() for _ in range(count)])

    def forward(self, x):
        return self.parts[0](x)


def error_of(model):
    with pytest.raises(ValueError, match="two rows") as caught:
        model(torch.ones(3))
    return caught.value


def test_the_line_is_the_users_and_the_module_the_innermost_that_runs():
    model = Net()
    place = place_of_error(error_of(model), model)
    assert place.startswith('`raise ValueError("two rows")` in module `parts.0` (test_places.py:')


@pytest.mark.parametrize(("count", "module"), [(1, " in module `parts.0`"), (2, "")])
def test_a_stack_names_the_module_where_one_alone_has_the_line(count, module):
    model = Net(count)
    stack = "".join(traceback.format_exception(error_of(model)))
    assert place_in_stack(stack, model).startswith(f'`raise ValueError("two rows")`{module} (test_places.py:')
    assert place_in_stack("no stack", model) == ""
