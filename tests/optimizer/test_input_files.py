"""The user's own inputs, from files, further calls in Python or a function: each call is run unchanged."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from exporters.base import named_inputs
from optimize_export.errors import LoadError, UsageError
from optimizer import check_parity, export, open_bundle
from optimizer.command import cli
from optimizer.command.inputs import read_calls
from optimizer.command.loading import load
from optimizer.model import first_difference, leaves_of
from optimizer.model.inputs import Call, Samples
from optimizer.parity import golden_entries, measure_reference


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0, *, flag: bool = False
    ) -> torch.Tensor:
        seen = self.embed(ids) if mask is None else self.embed(ids) * mask[..., None]
        return self.head(seen.mean(1)) * (2 * scale if flag else scale)


class Variadic(nn.Module):
    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return sum(args) + sum(kwargs.values())


def ids(rows: int, length: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 10, (rows, length), generator=torch.Generator().manual_seed(seed))


def saved(folder: Path, name: str, **tensors: torch.Tensor) -> Path:
    path = folder / f"{name}.safetensors"
    save_file({key.lstrip("_"): tensor for key, tensor in tensors.items()}, path)
    return path


# ------------------------------------------------------------------------------------------------------- the files


def test_tensors_go_by_name_and_keep_their_dtypes_in_the_order_of_forward(tmp_path: Path) -> None:
    mask = torch.rand(2, 5, dtype=torch.float16)
    path = saved(tmp_path, "a", mask=mask, ids=ids(2))
    (call,) = read_calls([path], Net(), None)
    assert (call.args, list(call.kwargs)) == ((), ["ids", "mask"])
    assert torch.equal(call.kwargs["mask"], mask)
    assert call.kwargs["mask"].dtype is torch.float16
    assert call.kwargs["ids"].dtype is torch.int64


def test_tensors_go_by_number_beside_names(tmp_path: Path) -> None:
    tensors = {"10": 10, "2": 2, "0": 0, **{str(number): number for number in (1, 3, 4, 5, 6, 7, 8, 9)}, "extra": 11}
    path = tmp_path / "a.safetensors"
    save_file({name: torch.full((2,), value) for name, value in tensors.items()}, path)
    (call,) = read_calls([path], Variadic(), None)
    assert [int(tensor[0]) for tensor in call.args] == list(range(11))
    assert list(call.kwargs) == ["extra"]
    (call,) = read_calls([saved(tmp_path, "b", _0=ids(2), mask=torch.ones(2, 5))], Net(), None)
    assert (len(call.args), list(call.kwargs)) == (1, ["mask"])


def test_what_is_no_tensor_in_the_users_file_stays(tmp_path: Path) -> None:
    own = Call((ids(3), torch.ones(3, 5), 0.5), {"flag": True})
    (call,) = read_calls([saved(tmp_path, "a", ids=ids(2))], Net(), own)
    assert call.kwargs.keys() == {"ids", "scale", "flag"}
    assert (call.kwargs["scale"], call.kwargs["flag"]) == (0.5, True)
    (call,) = read_calls([saved(tmp_path, "b", _0=ids(2), _1=torch.ones(2, 5), _2=torch.tensor(2.0))], Net(), own)
    assert (len(call.args), list(call.kwargs)) == (3, ["flag"])


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        (
            {"idz": ids(2)},
            "missing a required argument: 'ids'; forward takes (ids, mask, scale, flag), but got 0 positional",
        ),
        ({"mask": torch.ones(2, 5)}, "missing a required argument: 'ids'"),
        ({"ids": ids(2), "idz": ids(2)}, "got an unexpected keyword argument 'idz'; forward takes (ids, mask"),
        ({"0": ids(2), "2": ids(2)}, "lack the positional argument 1: number them from 0, without a gap."),
        ({"0": ids(2), "ids": ids(2)}, "multiple values for argument 'ids'"),
        ({str(number): ids(2) for number in range(4)}, "don't fit forward of Net: too many positional arguments"),
        ({"00": ids(2)}, "lack the positional argument 0"),
        ({}, "contain no tensor"),
    ],
)
def test_what_forward_does_not_take_is_one_sentence(
    tmp_path: Path, tensors: dict[str, torch.Tensor], sentence: str
) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(LoadError, match=r"The inputs a\.safetensors") as raised:
        read_calls([tmp_path / "a.safetensors"], Net(), None)
    assert sentence in str(raised.value)


class Nested(nn.Module):
    def forward(self, batch: Any, more: Any = None, *, scale: float = 1.0) -> torch.Tensor:
        return batch


A, B, C = (torch.full((2, 3), float(value)) for value in (1, 2, 3))


@pytest.mark.parametrize(
    ("own", "names"),
    [
        (Call(({"image": A, "mask": B},)), ["batch_image", "batch_mask"]),
        (Call((), {"batch": {"image": A, "mask": B}, "scale": 2.0}), ["batch_image", "batch_mask"]),
        (Call(({"image": A, "sizes": [B, C]},)), ["batch_image", "batch_sizes_0", "batch_sizes_1"]),
        (Call(([A, B], {"x": {"y": C}})), ["batch_0", "batch_1", "more_x_y"]),
        (Call(({"image": A, "scale": 3},)), ["batch_image"]),
    ],
)
def test_tensors_go_by_the_names_in_the_exported_files(own: Call, names: list[str], tmp_path: Path) -> None:
    model = Nested()
    assert list(named_inputs(model, own.args, own.kwargs)) == names
    tensors = {name: torch.randn(4, 3) for name in names}
    (call,) = read_calls([saved(tmp_path, "a", **tensors)], model, own)
    found = named_inputs(model, call.args, call.kwargs)
    assert list(found) == names
    assert all(torch.equal(found[name], tensors[name]) for name in names)
    structures = (leaves_of((each.args, each.kwargs)).structure for each in (own, call))
    assert first_difference(*structures) is None


def test_files_that_are_none_or_differ(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"no tensors at all")
    with pytest.raises(LoadError, match=r"x\.safetensors couldn't be read as safetensors"):
        read_calls([tmp_path / "x.safetensors"], Net(), None)
    one, other = saved(tmp_path, "a", ids=ids(2)), saved(tmp_path, "b", ids=ids(2), mask=torch.ones(2, 5))
    with pytest.raises(
        LoadError, match=r"b\.safetensors contains ids, mask, but a\.safetensors contains ids: each file"
    ):
        read_calls([one, other], Net(), None)


# ------------------------------------------------------------------------------------------------------- further calls


def further(*calls: torch.Tensor) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return [((call,), {}) for call in calls]


def test_further_calls_stand_in_the_place_of_the_next_draws() -> None:
    given = [ids(2, seed=seed) for seed in range(3)]
    samples = Samples((given[0],), further_inputs=further(given[1], ids(3), given[2]))
    assert samples.further == ((2, 1), (3, 0), (2, 2))
    for draw, expected in enumerate(given):
        assert torch.equal(samples.at(2, draw).args[0], expected)
    assert torch.equal(samples.at(3).args[0], ids(3))
    assert samples.at(3, 1).args[0].shape == (3, 5)
    twin = samples.to("cpu")
    assert twin.further == samples.further
    assert torch.equal(twin.at(2, 2).args[0], given[2])


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        ((ids(2, 7),), "must be a pair of a tuple and a dict"),
        (((ids(2, 7),), {}), r"differ .* in more than the number of rows: argument_0 is int64\[2, 7\], but should"),
        (((ids(4, 6),), {}), r"is int64\[4, 6\], but should be int64\[4, 5\]"),
        (((ids(2).int(),), {}), r"is int32\[2, 5\], but should be int64\[2, 5\]"),
        (((), {"ids": ids(2)}), "contains .* but should contain"),
        (((ids(0),), {}), "have a batch of no rows"),
        (((torch.tensor(3),), {}), "have no rows, but the example inputs 2 rows"),
    ],
)
def test_further_calls_that_differ_in_more_than_rows(item: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=f"The further inputs 2 .*{sentence}"):
        _ = Samples((ids(2),), further_inputs=[*further(ids(3)), item]).further


def test_every_further_call_is_compared_and_golden() -> None:
    model = Net().eval()
    odd = torch.full((7, 5), 9)

    def wrong(x: torch.Tensor) -> torch.Tensor:
        # Wrong only if all inputs are nines, as in the further call.
        return model(x) + 1.0 * bool((x == 9).all())

    x = ids(2) % 5
    assert check_parity(model, wrong, (x,)).ok
    report = check_parity(model, wrong, (x,), further_inputs=further(odd))
    assert report.verdict == "failed"
    assert "batch size 7, draw 0" in report.reason
    samples = Samples((x,), further_inputs=further(odd, ids(2, seed=4)))
    reference = measure_reference(model, samples, batch_sizes=(2, 1, 3))
    entries = golden_entries(reference)
    assert [(entry.batch_size, entry.draw) for entry in entries] == [(2, 0), (7, 0), (2, 1)]
    assert any(torch.equal(entry.call.args[0], odd) for entry in entries)


def test_a_model_that_raises_on_a_further_call_is_an_error_and_not_left_out() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 7:
            raise ValueError("seven")
        return x.double()

    with pytest.raises(LoadError, match=r"raises on further inputs \(batch size 7, draw 0\): ValueError: seven"):
        check_parity(model, model, (torch.randn(2, 3),), further_inputs=further(torch.randn(7, 3)))


def test_a_further_call_stays_where_draws_of_its_size_raise() -> None:
    kept = torch.full((7, 3), 2.0)

    def model(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 7 and not torch.equal(x.double(), kept.double()):
            raise ValueError("seven")
        return x * 2

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return model(x) + float(len(x) == 7)

    report = check_parity(model, wrong, (torch.randn(2, 3),), further_inputs=further(kept), batch_sizes=(2, 7))
    assert (report.verdict, "batch size 7" in report.reason) == ("failed", True)


def test_further_calls_need_a_first_one_and_a_batch_that_is_open(tmp_path: Path) -> None:
    model, more = Net().eval(), further(ids(6, seed=3))
    with pytest.raises(UsageError, match="static_batch fixes the batch size at 2, but there are further inputs of bat"):
        export(model, (ids(2),), further_inputs=more, static_batch=True, output=tmp_path / "net")
    with pytest.raises(UsageError, match="pass the first call as example_inputs"):
        export(model, further_inputs=more, output=tmp_path / "net")


# ------------------------------------------------------------------------------------------------------- the command

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x, scale=1.0):
        return self.head(x) * scale

model = Net()
"""


@pytest.fixture
def model_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own_inputs.py"
    path.write_text(MODEL, encoding="utf-8")
    return path


def test_files_replace_the_inputs_of_the_users_file(model_file: Path, tmp_path: Path) -> None:
    model_file.write_text(MODEL + "example_inputs = (torch.randn(3, 4), 2.0)", encoding="utf-8")
    first, second = (saved(tmp_path, name, x=torch.randn(rows, 4)) for name, rows in (("a", 2), ("b", 6)))
    loaded = load(str(model_file), input_files=[first, second])
    assert loaded.example_kwargs["x"].shape == (2, 4)
    assert loaded.example_kwargs["scale"] == 2.0
    assert [kwargs["x"].shape for _, kwargs in loaded.further_inputs] == [(6, 4)]
    assert loaded.notes == ("The inputs from --inputs replace those of own_inputs.py.",)
    wrong = saved(tmp_path, "c", x=torch.randn(6, 5))
    with pytest.raises(LoadError, match=r"c.safetensors: .* x is float32\[6, 5\], but should be float32\[6, 4\]"):
        load(str(model_file), input_files=[first, wrong])


def test_the_command_runs_the_files_as_they_are(
    model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optimizer.command.user_code.import_own_packages", lambda: None)
    first, second = torch.randn(2, 4), torch.randn(6, 4)
    files = [str(saved(tmp_path, name, x=x)) for name, x in (("a", first), ("b", second))]
    arguments = [str(model_file), "--formats", "torchscript", "--inputs", files[0], "--inputs", files[1], "--json"]
    assert cli.main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    calls = document["artifacts"][0]["parity"]["outputs"][0]["calls"]
    assert any({"batch_size": 6, "draw": 0}.items() <= call.items() for call in calls)
    golden = {call.batch_size: call.inputs["x"] for call in open_bundle(tmp_path / "dist" / "own_inputs").golden()}
    assert torch.equal(golden[2], first)
    assert torch.equal(golden[6], second)


def test_a_function_of_the_users_file_makes_every_call(model_file: Path, tmp_path: Path) -> None:
    """The function makes the inputs of the comparison at every batch size, and of the golden data."""
    text = "\ndef get_example_inputs(batch_size, generator):\n    return torch.rand(batch_size, 4, generator=generator) + batch_size"
    model_file.write_text(MODEL + text, encoding="utf-8")
    loaded = load(str(model_file))
    bundle = export(
        loaded.model, example_inputs=loaded.example_inputs, output=tmp_path / "net", formats=("torchscript",), seed=5
    )
    calls = bundle.golden()
    assert [call.batch_size for call in calls] == [2, 1, 3]
    for call in calls:
        size = call.batch_size
        assert size is not None
        assert torch.equal(call.inputs["x"].floor(), torch.full((size, 4), float(size)))
    assert bundle.manifest["seed"] == 5
