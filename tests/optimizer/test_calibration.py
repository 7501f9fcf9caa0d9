"""The data that a user may calibrate with, and how they become calls of the model."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from exporters.base import Adapter, ExportRequest
from optimize_export.errors import LoadError, UsageError
from optimizer.model import Call, Samples
from optimizer.tuning import calibration_of

X = torch.arange(3000.0).reshape(1000, 3)
LABELS = torch.arange(1000)


class Net(nn.Module):
    def forward(self, x: torch.Tensor, table: torch.Tensor | None = None, flag: bool = False) -> torch.Tensor:
        return x * 2 if table is None else x @ table.T


def calls(given: Any, *, static: bool = False, table: int = 0, **kwargs: Any) -> list[tuple[torch.Tensor, ...]]:
    """All calls that are made of the user's data; every fourth is held out."""
    args = (X[:2], torch.ones(table, 3)) if table else (X[:2],)
    model, samples = Net(), Samples(args, kwargs)
    request = ExportRequest(model, ((args, kwargs),), dynamic_batch=not static)
    found = calibration_of(given, samples, Adapter(model, args, kwargs), request)
    return [*found.used, *found.held_out]


def rows(given: Any, **options: Any) -> torch.Tensor:
    return torch.cat([call[0] for call in calls(given, **options)])[:, 0].sort().values


def batches() -> Iterator[torch.Tensor]:
    yield from X.split(100)


class Dictionaries:
    """A data set as of Hugging Face: dicts by number."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"label": 1, "x": X[number], "text": "a word"}


@pytest.mark.parametrize(
    "given",
    [
        batches,
        batches(),
        DataLoader(TensorDataset(X, LABELS), batch_size=100),
        DataLoader(TensorDataset(X), batch_size=100),
        map(tuple, zip(X.split(100), strict=True)),
        ({"x": x, "label": 0} for x in X.split(100)),
        (((x,), 0) for x in X.split(100)),
        (({"x": x}, 0) for x in X.split(100)),
        (Call((x,)) for x in X.split(100)),
    ],
)
def test_of_a_stream_the_first_rows_are_read(given):
    assert rows(given).tolist() == X[:300, 0].tolist()


@pytest.mark.parametrize("given", [TensorDataset(X, LABELS), Dictionaries()])
def test_of_a_data_set_evenly_spaced_examples_are_read(given):
    found = rows(given)
    assert len(found) == 256
    assert set(found.diff().tolist()) == {9.0, 12.0}
    assert found[-1] >= 3 * 990


def test_a_list_is_used_as_a_whole():
    assert rows([*X.split(100)]).tolist() == X[:, 0].tolist()


def test_a_stream_may_have_no_end():
    def endless() -> Iterator[tuple[torch.Tensor, int]]:
        while True:
            yield X[:3], 1

    assert len(rows(endless)) == 258


def test_constants_of_the_example_inputs_are_added_to_a_dict():
    assert len(rows([{"x": X[:4], "label": 1}], flag=True)) == 4


def test_a_table_isnt_split_with_the_batch():
    assert [len(table) for _, table in calls([(X[:5], torch.ones(5, 3))], table=5)] == [5, 5, 5]


def test_the_random_state_stays():
    before = torch.get_rng_state()
    calls(DataLoader(TensorDataset(X, LABELS), batch_size=100, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)


def raising() -> Iterator[torch.Tensor]:
    yield X[:2]
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (X, "calibration is a Tensor; it must be a list of calls, a data loader or a data set. A call is a tensor, a"),
        (np.ones((4, 3)), "calibration is a ndarray; it must be"),
        (
            {"train": [], "test": []},
            "calibration is a dict; .* If this is one call, put it in a list; of several data sets, choose one.",
        ),
        (7, "calibration is an int; it must be"),
        ([{"label": X[:2], "y": X[:2]}], "Calibration call 0 doesn't fit the model: .*; pass the arguments of the"),
        ([("a word", X[:2])], "Calibration call 0 doesn't fit the model: "),
        ([X[:2].numpy()], "Calibration call 0 is of type ndarray: pass a tensor"),
        ([(X[:2].numpy(), 1)], "Calibration call 0 doesn't fit the model: argument `x` was a tensor .* a ndarray"),
        (
            [{"x": X[:2].tolist(), "label": 1}],
            "Calibration call 0 doesn't fit the model: argument `x` was a tensor .* a list",
        ),
        ([{1: X[:2]}], "Calibration call 0 doesn't fit the model: "),
        ([[]], "Calibration call 0 doesn't fit the model: "),
        ([(LABELS[:2], X[:2])], r"Calibration call 0: `x` is int64\[2\], but the example input is float32\[2, 3\]"),
        ([], "calibration is empty"),
    ],
)
def test_other_data_are_refused(given, told):
    with pytest.raises(UsageError, match=f"^{told}"):
        calls(given)


def test_an_error_of_the_users_data_is_told_with_its_line():
    with pytest.raises(LoadError, match=r"^calibration raises: OSError: the disk is gone \(test_calibration.py:\d+"):
        calls(raising)


def test_single_examples_dont_fill_a_fixed_batch():
    with pytest.raises(UsageError, match=r"`x` is float32\[3\], but the example input is float32\[2, 3\]: convert it"):
        calls(TensorDataset(X, LABELS), static=True)
