"""The channel dim after a move, compared with a run of the move on a real tensor."""

import pytest
import torch
import torch.nn.functional as F

from passes.program.moves import METHODS, SHAPED_AS, Channels, move_named

# A method, its arguments, and the new position of each dim of a 3-dim tensor; None if the dim is merged or unknown.
MOVES = [
    ("contiguous", (), {}, (0, 1, 2)),
    ("clone", (), {}, (0, 1, 2)),
    ("transpose", (1, 2), {}, (0, 2, 1)),
    ("transpose", (-1, -3), {}, (2, 1, 0)),
    ("transpose", (), {"dim0": 0, "dim1": 1}, (1, 0, 2)),
    ("transpose", (1, 1), {}, (0, 1, 2)),
    ("swapaxes", (0, 2), {}, (2, 1, 0)),
    ("swapdims", (0, -2), {}, (1, 0, 2)),
    ("permute", (2, 0, 1), {}, (1, 2, 0)),
    ("permute", ((0, -1, 1),), {}, (0, 2, 1)),
    ("permute", (), {"dims": (1, 0, 2)}, (1, 0, 2)),
    ("flatten", (), {}, (None, None, None)),
    ("flatten", (1,), {}, (0, None, None)),
    ("flatten", (0, 1), {}, (None, None, 1)),
    ("flatten", (), {"end_dim": -2}, (None, None, 1)),
    ("flatten", (), {"start_dim": 1}, (0, None, None)),
    ("flatten", (2, 2), {}, (0, 1, 2)),
    ("unsqueeze", (0,), {}, (1, 2, 3)),
    ("unsqueeze", (-1,), {}, (0, 1, 2)),
    ("unsqueeze", (), {"dim": 1}, (0, 2, 3)),
    ("view", (-1, 5), {}, (None, None, 1)),
    ("reshape", ((2, 1, 3, 5),), {}, (None, None, 3)),
    ("reshape", (6, -1), {}, (None, None, None)),
    ("view", (torch.int32,), {}, (None, None, None)),
]
SHAPE = (2, 3, 5)


@pytest.mark.parametrize(("name", "args", "kwargs", "dims"), MOVES)
def test_channels_go_where_the_numbers_go(name, args, kwargs, dims):
    for dim, wanted in enumerate(dims):
        behind = Channels(3, dim, SHAPE[dim]).behind(name, args, kwargs)
        assert (None if behind is None else behind.dim) == wanted
        if wanted is None:
            continue
        marks = torch.arange(SHAPE[dim]).reshape([-1 if other == dim else 1 for other in range(3)]).expand(SHAPE)
        moved = getattr(marks.contiguous(), name)(*args, **kwargs)
        assert behind == Channels(moved.dim(), wanted, SHAPE[dim])
        marked = torch.arange(SHAPE[dim]).reshape([-1 if other == wanted else 1 for other in range(moved.dim())])
        assert torch.equal(moved, marked.expand(moved.shape))


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("transpose", (0,), {}),
        ("transpose", (0, 3), {}),
        ("permute", (0, 1), {}),
        ("permute", (0, 1, 1), {}),
        ("permute", (0, 1, 3), {}),
        ("flatten", (2, 0), {}),
        ("flatten", ("N", "M"), {}),
        pytest.param("unsqueeze", (5,), {}, id="unsqueezed where no dim is"),
        ("unsqueeze", (0, 1), {}),
        ("view", (), {}),
        ("view", (-1, 5.0), {}),
        ("view", (-1, object()), {}),
        ("transpose", (object(), 1), {}),
        ("dropout", (0.5, True), {}),
        ("dropout", (0.5,), {}),
        ("dropout", (), {"p": 0.0}),
    ],
)
def test_what_isnt_known_is_no_move(name, args, kwargs):
    assert Channels(3, 2, 5).behind(name, args, kwargs) is None


def test_channels_that_are_not_last_are_not_those_of_a_last_dim_as_large():
    for name in ("view", "reshape"):
        assert Channels(3, 2, 5).behind(name, (-1, 5), {}) == Channels(2, 1, 5)
        assert Channels(3, 1, 5).behind(name, (-1, 5), {}) is None


def test_dropout_that_draws_nothing():
    channels = Channels(3, 1, 3)
    for args, kwargs in (((0.5, False), {}), ((), {"training": False, "p": 0.1}), ((0.5,), {"training": False})):
        assert channels.behind("dropout", args, kwargs) is channels


def test_functions_are_known_by_their_methods():
    assert {move_named(getattr(torch, name)) for name in METHODS - {"contiguous", "view"}} == METHODS - {
        "contiguous",
        "view",
    }
    assert move_named(F.dropout) == move_named(F.dropout2d) == move_named(torch.dropout) == "dropout"
    assert move_named(torch.relu) is None
    assert move_named([].append) is None
    assert not METHODS & SHAPED_AS
