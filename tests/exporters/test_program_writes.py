"""Writes in exported programs: which of them no other operation sees."""

import pytest
import torch
from torch import nn

from exporters.program_writes import writes_are_unseen, written_by


def unseen(forward) -> bool:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("held", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(self, x)

    with torch.no_grad():
        exported = torch.export.export(Model().eval(), (torch.randn(2, 4),))
    nodes = list(exported.graph.nodes)
    assert any(written_by(node) for node in nodes)
    return writes_are_unseen(nodes)


def to_what_is_given(model, x):
    return x.add_(1) * 2


def to_a_buffer(model, x):
    model.held.add_(1)
    return model.linear(x) + model.held


def to_a_part(model, x):
    y = model.linear(x)
    y[:, :2].mul_(0.5)
    return y.relu()


def to_what_a_view_shows(model, x):
    y = model.linear(x)
    view = y.view(4, 2)
    y.mul_(2)
    return view + 1


def to_what_dropout_in_eval_gives(model, x):
    """It gives what it was given, and doesn't say so."""
    y = model.linear(x)
    z = nn.functional.dropout(y, 0.5, False)
    z.mul_(2)
    return y + z


def to_an_item_of_a_list(model, x):
    y = model.linear(x)
    first, second = y.chunk(2, 1)
    first.mul_(2)
    return y + torch.cat([second, second], 1)


@pytest.mark.parametrize(
    "forward",
    [
        to_what_is_given,
        to_a_buffer,
        to_a_part,
        to_what_a_view_shows,
        to_what_dropout_in_eval_gives,
        to_an_item_of_a_list,
    ],
)
def test_a_write_that_shows_elsewhere(forward):
    assert not unseen(forward)


def to_a_sum(model, x):
    y = model.linear(x)
    y += x
    return nn.functional.relu(y, inplace=True)


def to_a_view_that_is_the_last(model, x):
    y = model.linear(x).view(4, 2)
    z = y.relu_()
    return z.view(2, 4) + 1


def read_before(model, x):
    y = model.linear(x)
    before = y * 2
    y.relu_()
    return before + y


@pytest.mark.parametrize("forward", [to_a_sum, to_a_view_that_is_the_last, read_before])
def test_a_write_that_shows_nowhere(forward):
    assert unseen(forward)
