import gc
import weakref

import pytest
import torch
from torch import nn

from passes.graph.recording import AUTOCAST, agree, autocast_dtype, record
from passes.graph.structure import CallStructure


def x(batch=2):
    return torch.linspace(-1, 1, batch * 4).reshape(batch, 4)


class Net(nn.Module):
    def __init__(self, between=lambda self, y: y):
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.between = between
        self.kept = []

    def forward(self, x):
        return self.b(self.between(self, self.a(x)) * 2)


def recorded(model, *calls):
    return agree(model, [record(model, (call,), {}) for call in calls])


def operations(model, graph):
    names = {id(module): name for name, module in model.named_modules()}
    return [
        names[id(n.meta["module"])] if n.op == "call_module" else getattr(n.target, "__name__", n.target)
        for n in graph.graph.nodes
        if n.op.startswith("call")
    ]


def test_who_feeds_whom():
    model = Net()
    found = recorded(model, x(2), x(3))
    graph = found.graphs[id(model)]
    assert operations(model, graph) == ["a", "mul", "b"]
    assert not graph.traced
    assert found.counts == {id(model): 1, id(model.a): 1, id(model.b): 1}
    assert found.ranks[id(model.a)] == (2,)
    assert isinstance(found.structures[id(model)], CallStructure)
    assert not any(node.meta.get("escapes") for node in graph.graph.nodes)


def test_what_runs_under_autocast_in_some_run():
    class Lowered(Net):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16, enabled=len(x) == 3):
                y = self.a(x).relu()
            return self.b(y.float())

    model = Lowered()
    assert recorded(model, x(2)).autocast == {}
    found = recorded(model, x(2), x(3))
    assert found.autocast == {id(model.a): torch.bfloat16}
    # The runs don't agree on what is done in which dtype.
    assert id(model) not in found.graphs
    graph = recorded(model, x(3), x(3)).graphs[id(model)]
    assert {getattr(n.target, "__name__", n.target): n.meta.get(AUTOCAST) for n in graph.graph.nodes if n.meta} == {
        "a": None,
        "b": None,
        "relu": torch.bfloat16,
    }


def test_autocast_is_that_of_the_device_and_of_now():
    assert autocast_dtype(["cpu", "meta"]) is None
    with torch.autocast("cpu", torch.float16):
        assert autocast_dtype(["meta", "cpu"]) is torch.float16
        assert autocast_dtype(["cuda"]) is None
        with torch.autocast("cpu", enabled=False):
            assert autocast_dtype(["cpu"]) is None


def test_maps_are_those_of_the_first_run():
    class Branched(Net):
        def forward(self, x):
            return self.b(self.b(self.a(x).repeat(2, 1)))

    model = Branched()
    # In the order of the run, what goes into each call and what comes out.
    assert list(recorded(model, x(3), x(2)).maps.items()) == [
        (id(model.a), [((3, 4), (3, 4))]), (id(model.b), [((6, 4), (6, 4)), ((6, 4), (6, 4))]),
    ]  # fmt: skip


def test_branches_are_those_that_were_taken():
    model = Net(lambda self, y: y if len(y) > 9 else -y)
    assert operations(model, recorded(model, x(2), x(3)).graphs[id(model)]) == ["a", "neg", "mul", "b"]
    assert id(model) not in recorded(model, x(2), x(12)).graphs


def test_loops_over_the_batch_dont_agree():
    model = Net(lambda self, y: torch.stack([row * 2 for row in y]))
    found = recorded(model, x(2), x(3))
    assert id(model) not in found.graphs
    assert found.counts[id(model.b)] == 1


class Loop(nn.Module):
    """As many calls as there are rows; `step` says what is done with each."""

    def __init__(self, step):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.step = step
        self.kept = []

    def forward(self, x):
        return torch.stack([self.step(self, index, row) for index, row in enumerate(x)])


def chains(step):
    model = Loop(step)
    found = recorded(model, x(2), x(3))
    assert id(model) not in found.graphs
    assert not any(chain.traced or chain.whole for chain in found.chains)
    assert all(chain.module is model for chain in found.chains)
    return [operations(model, chain) for chain in found.chains]


def test_where_runs_dont_agree_they_may_agree_on_what_follows_what():
    assert chains(lambda self, index, row: self.c(self.b(self.a(row)))) == [["a", "b", "c"]]
    assert chains(lambda self, index, row: self.c(self.b(self.a(row)).relu())) == [["a", "b"]]
    assert chains(lambda self, index, row: self.c(self.b(input=self.a(row)) * 2) + 1) == [["a", "b"]]
    assert chains(lambda self, index, row: self.b(self.a(row)) if index else row) == [["a", "b"]]


@pytest.mark.parametrize(
    "step",
    [
        lambda self, index, row: self.b(self.a(row) * 2),
        lambda self, index, row: (y := self.a(row)) + self.b(y),
        lambda self, index, row: self.b(self.a(row)) + (self.a(row) if index == 2 else 0),
        lambda self, index, row: self.b(self.a(row)) + (self.b(row) if index == 2 else 0),
        lambda self, index, row: (self.c if index == 2 else self.b)(self.a(row)),
        lambda self, index, row: self.b((self.c if index == 2 else self.a)(row)),
        lambda self, index, row: self.kept.append(y := self.a(row)) or self.b(y),
        lambda self, index, row: self.b(self.b(self.a(row))),
    ],
)
def test_what_follows_in_some_calls_only_is_no_chain(step):
    assert chains(step) == []


def test_what_another_module_calls_too_is_no_chain():
    class Caller(nn.Module):
        def forward(self, x):
            return self.held[0](x)

    def step(self, index, row):
        return self.b(self.a(row)) + self.caller(row)

    model = Loop(step)
    model.caller = Caller()
    model.caller.held = (model.a,)
    assert recorded(model, x(2), x(3)).chains == []


def test_modules_called_another_number_of_times_have_no_count():
    model = Net(lambda self, y: torch.stack([self.unused(row) for row in y]))
    found = recorded(model, x(2), x(3))
    assert found.counts[id(model.unused)] == -1
    assert found.counts[id(model.a)] == 1


def test_calls_in_different_ways_have_no_structure():
    model = Net(lambda self, y: self.inner(self.inner(y), 3.0))
    model.inner = type("Scales", (nn.Module,), {"forward": lambda self, x, by=2.0: x * by})()
    found = recorded(model, x())
    assert found.structures[id(model.inner)] == "its forward is called in different ways"
    assert isinstance(found.structures[id(model.a)], CallStructure)


def test_what_is_kept_escapes():
    model = Net(lambda self, y: self.kept.append(y) or y)
    graph = recorded(model, x()).graphs[id(model)].graph
    escaping = [node for node in graph.nodes if node.meta.get("escapes")]
    assert [node.meta["module"] for node in escaping] == [model.a]


def test_what_comes_from_elsewhere_escapes_where_it_was_made():
    class Takes(nn.Module):
        def forward(self, x):
            return x + self.parent[0].kept[-1]

    model = Net(lambda self, y: self.takes((self.kept.append(y), y * 1)[1]))
    model.takes = Takes()
    model.takes.__dict__["parent"] = [model]
    graph = recorded(model, x()).graphs[id(model)].graph
    assert [n.meta["module"] for n in graph.nodes if n.meta.get("escapes")] == [model.a]


def test_reads_of_the_parameters_of_others():
    model = Net(lambda self, y: y @ self.unused.weight)
    found = recorded(model, x())
    assert found.reads == {(id(model.unused), "weight"): {id(model)}}
    assert recorded(Net(), x()).reads == {}


def test_a_recording_holds_no_tensor():
    model = Net()
    seen = []
    model.a.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    record(model, (x(),), {})
    gc.collect()
    assert [reference() for reference in seen] == [None]


def test_a_tensor_that_a_forward_replaces_keeps_its_identity_to_itself():
    """Another tensor in its place in memory would be taken for it."""

    def between(self, y):
        replaced = weakref.ref(self.b.bias)
        self.b.bias = nn.Parameter(torch.zeros(4))
        gc.collect()
        assert replaced() is not None
        return y

    model = Net(between)
    assert recorded(model, x()).counts[id(model)] == 1


def test_a_value_that_comes_from_elsewhere_is_found_at_once():
    """Not by a search through all values of the run, of which there may be a hundred thousand."""

    class Bag:
        def __init__(self, value):
            self.value = value

    class Adds(nn.Module):
        def forward(self, bag):
            return Bag(bag.value + 1)

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Adds() for _ in range(3))

        def forward(self, x):
            bag = Bag(x * 2)
            for layer in self.layers:
                bag = layer(bag)
            return bag.value * 3

    model = Chain()
    run = record(model, (x(),), {})
    escaping = [
        node.target
        for call in (*run.calls[id(model)], *(c for layer in model.layers for c in run.calls[id(layer)]))
        for node in call.graph.nodes
        if node.meta.get("escapes")
    ]
    assert escaping == ["mul", "add", "add", "add"]


def test_errors_of_the_forward_come_through_and_leave_nothing_patched():
    model = Net(lambda self, y: 1 / 0)
    call = nn.Module.__call__
    with pytest.raises(ZeroDivisionError):
        record(model, (x(),), {})
    assert nn.Module.__call__ is call


def test_an_input_that_is_given_back_isnt_kept():
    """Whoever holds it held it before: in two calls of one module, one with an input of the run, the graphs agree."""

    class Inner(Net):
        def forward(self, x):
            return self.b(self.a(x.flatten(1)))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(self.inner(x))

    model = Twice()
    found = recorded(model, x(2), x(3))
    graph = found.graphs[id(model.inner)]
    assert operations(model.inner, graph) == ["flatten", "a", "b"]
    assert not any(node.meta.get("escapes") for node in graph.graph.nodes)


def test_what_one_call_leaves_somewhere_all_may():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.kept = Net(), []

        def forward(self, x):
            self.kept.append(self.inner(self.inner(x)))
            return self.kept[0] * 2

    model = Twice()
    with torch.no_grad():
        graph = recorded(model, x(2), x(3)).graphs[id(model.inner)]
    assert operations(model.inner, graph) == ["a", "mul", "b"]
    assert [node.meta.get("escapes", False) for node in graph.graph.nodes if node.op.startswith("call")] == [
        False, False, True,
    ]  # fmt: skip
