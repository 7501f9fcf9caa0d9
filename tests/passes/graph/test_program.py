import torch
from torch import nn

from passes.graph import program as program_module
from passes.graph.capture import capture
from passes.graph.memory import places_in
from passes.graph.program import Program
from passes.graph.recording import agree, record

X = torch.linspace(-1, 1, 48).reshape(2, 3, 4, 2)


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.conv(x)


class Island(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Conv()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x):
        return self.norm(self.inner(x)) if len(x) > 0 else x


def program_of(model, *calls) -> Program:
    recordings = agree(model, [record(model, (call,), {}) for call in calls]) if calls else None
    structures = recordings.structures if recordings else None
    return Program.of(capture(model, structures), recordings, "inference")


def call_of(program, module):
    (node,) = program.calls_of(module)
    return node


def test_values_are_followed_across_the_borders_of_modules():
    model = nn.Sequential(Conv(), nn.Identity(), nn.Sequential(nn.BatchNorm2d(3)), nn.ReLU()).eval()
    program = program_of(model)
    conv, norm = call_of(program, model[0].conv), call_of(program, model[2][0])
    assert program.producer(norm.args[0]) is conv
    assert program.users(conv) == [norm]
    assert program.users(norm) == [call_of(program, model[3])]
    assert program.where(conv) == "0.conv"


def test_values_are_not_followed_into_modules_called_twice():
    shared = Conv()
    model = nn.Sequential(shared, nn.BatchNorm2d(3), shared)
    program = program_of(model)
    assert len(program.calls_of(shared)) == 2
    norm = call_of(program, model[1])
    assert program.module_of(program.producer(norm.args[0])) is shared
    assert program.paths[id(shared)] == ["0", "2"]


def test_islands_hide_their_values_unless_they_were_recorded():
    model = nn.Sequential(Island(), nn.ReLU()).eval()
    blind, seeing = program_of(model), program_of(model, X, X[:1])
    assert blind.calls_of(model[0].norm) == []
    assert blind.opaque_around(call_of(blind, model[0].inner.conv)) == "0"
    norm, conv = call_of(seeing, model[0].norm), call_of(seeing, model[0].inner.conv)
    assert seeing.opaque_around(conv) is None
    assert seeing.producer(norm.args[0]) is conv
    assert seeing.users(norm) == [call_of(seeing, model[1])]


def test_coverage():
    model = nn.Sequential(Island(), Conv())
    blind, seeing = program_of(model).coverage(), program_of(model, X, X[:1]).coverage()
    assert (blind.reached, blind.parameterised, blind.graphs, blind.recorded) == (2, 3, 3, 0)
    assert [path for path, _ in blind.islands] == ["0"]
    assert (seeing.reached, seeing.share, seeing.graphs, seeing.recorded) == (3, 1.0, 3, 1)
    assert program_of(nn.Linear(2, 2)).coverage().share == 1
    assert program_of(nn.ReLU()).coverage().share == 1


def test_readers_and_holders_of_tensors():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.tied = Conv(), Conv()
            self.tied.conv.weight = self.conv.conv.weight

        def forward(self, x):
            return self.conv(x) + self.tied.conv.bias.sum()

    model = Reads()
    program = program_of(model)
    (reader,) = program.readers_of(model.tied.conv, "bias")
    assert program.tensor_of(reader) == (model.tied.conv, "bias", model.tied.conv.bias)
    assert program.readers_of(model.conv.conv, "bias") == []
    assert program.holders_of(model.conv.conv.weight) == 2
    assert program.holders_of(model.conv.conv.bias) == 1


def test_ranks_come_from_recorded_runs_alone():
    model = nn.Sequential(nn.Linear(2, 2))
    assert program_of(model).rank_of_input(call_of(program_of(model), model[0])) is None
    program = program_of(model, X, X[:1])
    assert program.rank_of_input(call_of(program, model[0])) == 4
    mixed = program_of(model, X, X[0])
    assert mixed.rank_of_input(call_of(mixed, model[0])) is None


def test_memory_is_looked_at_once_between_two_edits(monkeypatch):
    looked = []
    monkeypatch.setattr(program_module, "places_in", lambda modules: looked.append(1) or places_in(modules))
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3)).eval()
    model[1].running_mean = model[0].running_mean[:]
    program = program_of(model)
    program.mode = "training"
    assert not looked
    assert program.sharer_of(model[0].running_mean) == "1.running_mean"
    assert program.sharer_of(model[1].running_mean) == "0.running_mean"
    assert program.sharer_of(model[0].running_var) is None
    assert len(looked) == 1
    model[1].running_mean = model[1].running_mean.clone()
    program.refresh()
    assert program.sharer_of(model[0].running_mean) is None
    assert len(looked) == 2


def test_in_inference_memory_is_shared_with_what_a_forward_may_write_to():
    model = nn.Sequential(Conv(), nn.BatchNorm2d(3)).eval()
    model.view = model[1].running_mean[:]
    model[0].conv.bias.data = model[1].bias.data
    assert program_of(model).sharer_of(model[1].running_mean) is None
    writing = nn.Sequential(model, Island()).eval()
    program = program_of(writing)
    assert program.sharer_of(model[1].running_mean) == "0.view"
    # Forwards don't write to parameters.
    assert program.sharer_of(model[1].bias) is None
