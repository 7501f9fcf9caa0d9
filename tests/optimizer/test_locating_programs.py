"""Find where a torch.export program first differs: faults are planted in correct files and in captured programs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import located_models
import pytest
import torch
from spoiling import scale_pt2, spoiling
from tiny_models import enliven
from torch import nn
from torch.nn import functional

from exporters import ExportRequest, Pt2Exporter
from exporters.places import Program, ProgramValues
from optimize_export.errors import ParityError
from optimizer import export
from optimizer.faults.locating import first_wrong_value


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = self.query(x), self.key(x)
        mixed = functional.scaled_dot_product_attention(query, key, self.value(x))
        return self.norm(functional.dropout(x, 0.5, self.training) + mixed.to(torch.float32))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.norm(self.conv(x)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        pooled = x.mean(1)
        return {"logits": self.head(pooled), "pooled": pooled}


class Writing(nn.Module):
    """Writes in place to a view of a computed value, which changes that value, and then to the value itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden[:, :2].mul_(0.5)
        return self.second(hidden.relu_())


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return enliven(kind()).eval()


X = torch.randn(2, 3, 18, generator=torch.Generator().manual_seed(0))


line_with = partial(located_models.line_with, file=__file__)


def found_in(model: nn.Module, inputs: torch.Tensor, folder: Path, monkeypatch, spoil) -> dict:
    spoiling(monkeypatch, Pt2Exporter, spoil)
    with pytest.raises(ParityError) as caught:
        export(model, example_inputs=inputs, output=folder / "net", formats=["pt2"])
    (artifact,) = caught.value.figures["artifacts"]
    assert artifact["divergence"] is not None, artifact["divergence_note"]
    return artifact["divergence"]


PLACES = {
    "conv.weight": ("conv", "conv1d", "x = self.norm(self.conv(x)).transpose(1, 2)"),
    "blocks.1.key.weight": ("blocks.1.key", "linear", "query, key = self.query(x), self.key(x)"),
    "blocks.0.norm.weight": (
        "blocks.0.norm",
        "layer_norm",
        "return self.norm(functional.dropout(x, 0.5, self.training) + mixed.to(torch.float32))",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_a_weight_that_is_off_by_a_percent_is_found_at_its_operation(tmp_path, monkeypatch, name):
    found = found_in(made(Net), X, tmp_path, monkeypatch, lambda path: scale_pt2(path, f"model.{name}", 1.01))
    module, operation, line = PLACES[name]
    assert (found["module"], found["operation"], found["line"]) == (module, operation, line_with(line))
    assert found["error"] > 100 * found["noise"]
    assert found["also"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first", "second"])
def test_a_program_that_writes_to_its_values_is_found_where_they_are_computed(tmp_path, monkeypatch, name):
    inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    found = found_in(
        made(Writing), inputs, tmp_path, monkeypatch, lambda path: scale_pt2(path, f"model.{name}.weight", 1.01)
    )
    assert (found["module"], found["operation"]) == (name, "linear")


@pytest.mark.slow
def test_a_wrong_write_isnt_named_at_the_value_that_it_changes(tmp_path, monkeypatch):
    def spoil(path: Path) -> None:
        program = torch.export.load(path)
        node = next(each for each in program.graph.nodes if each.name == "mul_")
        node.args = (node.args[0], 0.25)
        torch.export.save(program, path)

    inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    found = found_in(made(Writing), inputs, tmp_path, monkeypatch, spoil)
    assert (found["module"], found["operation"]) == ("", "mul")


@pytest.mark.parametrize(("kind", "shape"), [(Net, (3, 18)), (Writing, (4,))])
def test_a_file_that_is_right_differs_nowhere(tmp_path, kind, shape):
    model = made(kind)
    calls = [torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch)) for batch in (2, 3, 1)]
    artifact = Pt2Exporter().export(ExportRequest(model, tuple(((x,), {}) for x in calls)), tmp_path)
    values = artifact.values(artifact.path, "cpu", None)
    for x in calls:
        assert first_wrong_value(artifact.program, values, (x,), "here") is None


def test_what_raises_is_where_the_values_end():
    model = made(Net)
    exported = torch.export.export(model, (X,))
    node = next(each for each in exported.graph.nodes if each.name == "transpose")
    node.args = (node.args[0], 1, 7)
    program = Program.of(torch.export.export(model, (X,)), nn.Sequential(model))
    seen, error = ProgramValues(exported).run((X,))
    assert error.startswith("IndexError: ")
    assert "conv1d" in seen
    assert "transpose" not in seen
    found = first_wrong_value(program, ProgramValues(exported), (X,), "here")
    assert (found.operation, found.problem) == ("transpose", "raises at here")


def test_a_run_of_a_program_writes_to_no_buffer():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(1)
            return x * 2

    model = Counting()
    values = ProgramValues(torch.export.export(model, (X,)))
    assert values.run((X,))[1] == ""
    assert int(model.seen) == 0
