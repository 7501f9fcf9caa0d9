import errno
import os
import warnings
import zipfile

import pytest
import torch
from exportable_models import Branch, Mlp, Of, floats, mlp_calls
from tiny_models import enliven
from torch import nn
from torch._higher_order_ops import while_loop

import exporters.metadata
from exporters import ExportError, ExportRequest, TorchScriptExporter
from exporters.isolation import torchscript_allowed


def export(model, calls, tmp_path, **options):
    return TorchScriptExporter().export(ExportRequest(model.eval(), calls, **options), tmp_path)


class OwnState(nn.Module):
    """Makes the first state of an LSTM for as many rows as it has read in Python."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(1, int(x.shape[0]), 3)
        return self.lstm(x, (state, state))[0]


def test_an_lstm_with_a_state_of_a_fixed_size_refuses_its_trace_and_does_not_end_the_process(tmp_path):
    artifact = export(enliven(OwnState()), [((floats(size, 5, 4),), {}) for size in (2, 64)], tmp_path)
    assert artifact.route == "script"
    ((route, reason),) = artifact.refused
    assert route == "trace"
    assert "must match the existing size (2)" in reason
    assert "the model reads a size in Python at `state = torch.zeros(1, int(x.shape[0]), 3)`" in reason


def branch_calls():
    return tuple(((sign * floats(size, 3).abs(),), {}) for size, sign in ((2, 1), (3, -1)))


# Also where no call takes the branch.
@pytest.mark.parametrize("count", [1, 2])
def test_a_branch_on_data_is_scripted(count, tmp_path):
    model = enliven(Branch()).eval()
    artifact = export(model, branch_calls()[:count], tmp_path)
    assert artifact.route == "script"
    ((route, reason),) = artifact.refused
    assert route == "trace"
    assert "the model branches on the values of its inputs at `if bool(x.sum() > 0):` in the model's forward" in reason
    for x in (floats(2, 3).abs(), -floats(2, 3).abs()):
        assert torch.allclose(artifact.load()(x)[0], model(x)["hidden"])


class Conditional(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda rows: self.linear(rows), lambda rows: rows - 1, (x,))


def repeated(x):
    return while_loop(lambda i, _: i < 3, lambda i, rows: (i + 1, rows.sin()), (torch.tensor(0), x))[1]


@pytest.mark.parametrize(("model", "function"), [(Conditional(), "cond"), (Of(repeated), "while_loop")])
def test_control_flow_of_torch_is_refused_with_its_line(model, function, tmp_path):
    calls = branch_calls()
    before = model(calls[0][0][0])
    with pytest.raises(
        ExportError, match=f"TorchScript's tracer can't record torch's `{function}`, .* in the model's f"
    ):
        export(model, calls, tmp_path)
    assert torch.equal(model(calls[0][0][0]), before)


def test_a_scripted_model_keeps_its_branches(tmp_path):
    model = enliven(Branch()).eval()
    with torchscript_allowed():
        scripted = torch.jit.script(model)
    artifact = export(scripted, branch_calls(), tmp_path)
    assert artifact.inputs[0].name == "x"
    for (x,), _ in branch_calls():
        assert torch.allclose(artifact.load()(x)[0], model(x)["hidden"])


def test_sizes_that_the_file_was_not_made_for_are_refused(tmp_path):
    class Mean(nn.Module):
        def forward(self, input, weights):
            return (input * weights).flatten(1).sum(1, keepdim=True) / 12

    model = Mean().eval()
    calls = tuple(((floats(size, 3, 4), floats(3, 4)), {}) for size in (2, 3))
    loaded = export(model, calls, tmp_path).load()
    assert torch.allclose(loaded(floats(7, 3, 4), floats(3, 4))[0], model(floats(7, 3, 4), floats(3, 4)))
    with pytest.raises(torch.jit.Error, match=r"Input input of this file is \[batch, 3, 4\]"):
        loaded(floats(2, 4, 4), floats(3, 4))
    with pytest.raises(torch.jit.Error, match=r"Input weights of this file is \[3, 4\]"):
        loaded(floats(2, 3, 4), floats(4))


def test_scripting_spells_out_trees_and_constants(tmp_path):
    class Tree(nn.Module):
        def forward(
            self,
            pair: tuple[torch.Tensor, list[torch.Tensor]],
            named: dict[str, torch.Tensor],
            mask: torch.Tensor | None = None,
            flag: bool = False,
            text: str = "",
        ) -> tuple[torch.Tensor, list[torch.Tensor]]:
            left, right = pair
            if bool(left.sum() > 0) and flag and text == "it's" and mask is None:
                left = -left
            return left + right[0], [named["shift"]]

    calls = tuple(
        (((x, [x * 2]), {"shift": x + 1}), {"mask": None, "flag": True, "text": "it's"}) for ((x,), _) in branch_calls()
    )
    artifact = export(Tree(), calls, tmp_path)
    assert artifact.route == "script"
    for args, kwargs in calls:
        flat = artifact.load()(args[0][0], args[0][1][0], args[1]["shift"])
        expected = Tree()(*args, **kwargs)
        assert torch.equal(flat[0], expected[0])
        assert torch.equal(flat[1], expected[1][0])


@pytest.mark.parametrize("inner", [False, True])
def test_a_forward_on_an_instance_is_never_scripted(inner, tmp_path):
    class Other:
        def __init__(self, module):
            self.module = module

        def __call__(self, x):
            return {"hidden": self.module.linear(x) * (5 if bool(x.sum() > 0) else 7)}

    branch = Branch()
    vars(branch)["forward"] = Other(branch)
    model = nn.Sequential(branch) if inner else branch
    place = "module `0`" if inner else "the model"
    with pytest.raises(ExportError, match=f"script: {place} has its own forward"):
        export(model, branch_calls(), tmp_path)


def test_the_archive_is_plain_and_the_parameters_of_the_file_are_named(tmp_path):
    artifact = export(Mlp(), mlp_calls(2, 3), tmp_path, input_names=("my x",))
    with torchscript_allowed():
        module = torch.jit.load(str(artifact.path))
    assert [argument.name for argument in module.forward.schema.arguments] == ["self", "my_x"]
    assert artifact.inputs[0].name == "my x"
    with zipfile.ZipFile(artifact.path) as archive:
        names = archive.namelist()
        assert archive.testzip() is None
        assert {name.partition("/")[0] for name in names} == {"model"}
        assert not [name for name in names if name.endswith(".debug_pkl") or "traced_inputs" in name]
        data = artifact.path.read_bytes()
        for entry in archive.infolist():
            start = entry.header_offset
            lengths = [int.from_bytes(data[start + at : start + at + 2], "little") for at in (26, 28)]
            assert (start + 30 + sum(lengths)) % 64 == 0


def test_large_weights_are_written_by_torch_to_a_place_made_sure_of(tmp_path, monkeypatch):
    small = export(Mlp(), mlp_calls(2, 3), tmp_path).path.stat().st_size
    monkeypatch.setattr(exporters.metadata, "WRITTEN_THROUGH_MEMORY", 0)
    artifact = export(Mlp(), mlp_calls(2, 3), tmp_path)
    assert abs(artifact.path.stat().st_size - small) < 200  # class names contain a per-process number
    x = floats(4, 3)
    assert artifact.load()(x)[0].shape == (4, 4)
    assert list(tmp_path.iterdir()) == [artifact.path]

    def full(descriptor, offset, size):
        assert size >= 60_000 * 4
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        export(nn.Linear(300, 200), tuple(((floats(size, 300),), {}) for size in (2, 3)), tmp_path)
    assert list(tmp_path.iterdir()) == [artifact.path]


def test_nothing_but_torchscript_is_silenced():
    with torchscript_allowed():
        warnings.warn("`torch.jit.trace` is deprecated.", DeprecationWarning, stacklevel=1)
        warnings.warn("`torch.jit.load` is deprecated.", FutureWarning, stacklevel=1)
        with pytest.raises(DeprecationWarning):
            warnings.warn("numpy.thing is deprecated", DeprecationWarning, stacklevel=1)
        with pytest.raises(UserWarning):
            warnings.warn("`torch.jit.trace` is slow", UserWarning, stacklevel=1)


def test_a_file_of_another_program_runs_its_hooks(tmp_path):
    def tenfold(self, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return output * 10

    model = Mlp().eval()
    model.register_forward_hook(tenfold)
    path = tmp_path / "hooked.pt"
    with torchscript_allowed():
        torch.jit.script(model).save(path)
    x = floats(2, 3)
    assert torch.equal(TorchScriptExporter.load(path, "cpu")(x)[0], model(x))
