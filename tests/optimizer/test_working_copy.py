import copy
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from laid_out import NESTED, SPARSE, laid_out, numbers_in
from tiny_models import enliven
from torch import fx, nn
from torch.nn.utils import parametrizations

from optimize_export.errors import LoadError
from optimizer import optimize
from optimizer.model.working_copy import private_state, working_copy

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(4))
        self.settings = {"scale": [1.0]}

    def forward(self, x):
        return self.linear(x) * self.settings["scale"][0] + self.state


def make(forward=None, **attributes):
    module = type("Made", (nn.Module,), {"forward": forward or (lambda self, x: x)})()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_the_copy_is_another_tree_over_the_same_tensors(mode):
    model = nn.Sequential(Layer(), nn.BatchNorm1d(4))
    clone = working_copy(model, mode).root
    assert type(clone) is type(model)
    assert clone.state_dict().keys() == model.state_dict().keys()
    assert not set(map(id, clone.modules())) & set(map(id, model.modules()))
    for mine, theirs in zip(clone.parameters(), model.parameters(), strict=True):
        assert mine.data_ptr() == theirs.data_ptr()
    for mine, theirs in zip(clone.buffers(), model.buffers(), strict=True):
        assert torch.equal(mine, theirs)
        assert (mine is theirs) == (mode == "training")
        assert (mine.data_ptr() == theirs.data_ptr()) == (mode == "training")
    same = [mine is theirs for mine, theirs in zip(clone.parameters(), model.parameters(), strict=True)]
    assert set(same) == {mode == "training"}


def test_attributes_are_its_own():
    model = Layer()
    clone = working_copy(model).root
    clone.settings["scale"][0] = 5.0
    clone.linear.in_features = 9
    clone.register_forward_hook(lambda *args: None)
    clone.linear.weight = None
    assert (model.settings, model.linear.in_features) == ({"scale": [1.0]}, 4)
    assert not model._forward_hooks
    assert model.linear.weight is not None


def test_references_inside_the_tree_lead_to_the_copy():
    child = Layer()
    model = make(child=child)
    child.__dict__["parent"] = model
    child.others = [model, {"me": child}]
    clone = working_copy(model).root
    assert clone.child.parent is clone
    assert clone.child.others[0] is clone
    assert clone.child.others[1]["me"] is clone.child


def test_shared_modules_and_tied_tensors_stay_shared():
    layer = Layer()
    model = make(a=layer, b=layer, c=nn.Linear(4, 4))
    model.c.weight = layer.linear.weight
    clone = working_copy(model).root
    assert clone.a is clone.b
    assert clone.c.weight is clone.a.linear.weight
    assert clone.a is not layer


def test_modules_in_plain_containers_are_copied_over_the_same_weights():
    model = make(layers=[Layer(), (Layer(),)], table={"deep": [Layer()]})
    model.__dict__["aside"] = Layer()
    clone = working_copy(model).root
    for mine, theirs in [
        (clone.layers[0], model.layers[0]),
        (clone.layers[1][0], model.layers[1][0]),
        (clone.table["deep"][0], model.table["deep"][0]),
        (clone.aside, model.aside),
    ]:
        assert mine is not theirs
        assert mine.linear.weight is not theirs.linear.weight
        assert mine.linear.weight.data_ptr() == theirs.linear.weight.data_ptr()


def test_tensors_with_a_history():
    weight = nn.Parameter(torch.ones(4))
    model = make(w=weight, scaled=weight * 2, table=torch.ones(3))
    clone = working_copy(model).root
    assert torch.equal(clone.scaled, model.scaled)
    assert not clone.scaled.requires_grad
    assert clone.table is not model.table


class MyParameter(nn.Parameter):
    pass


class MyTensor(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature:UserWarning")
@pytest.mark.parametrize(
    "tensor",
    [
        MyParameter(torch.ones(3)),
        nn.Parameter(torch.ones(3).as_subclass(MyTensor)),
        nn.Parameter(torch.ones(3, dtype=torch.complex64)),
        nn.Parameter(torch.ones(3), requires_grad=False),
        nn.Parameter(torch.ones(3, device="meta")),
    ],
)
def test_parameters_of_every_kind_keep_their_class_and_storage(tensor):
    tensor.tag = "kept"
    model = make(w=tensor)
    clone = working_copy(model).root
    assert clone.w is not tensor
    assert type(clone.w) is type(tensor)
    assert (clone.w.dtype, clone.w.requires_grad, clone.w.tag) == (tensor.dtype, tensor.requires_grad, "kept")
    assert isinstance(clone.w, nn.Parameter)
    if not tensor.is_meta:
        assert clone.w.data_ptr() == tensor.data_ptr()
        clone.half() if not tensor.is_complex() else clone.to(torch.complex128)
        assert tensor.dtype in (torch.float32, torch.complex64)


@pytest.mark.parametrize("layout", [*SPARSE, *NESTED, "mkldnn"])
def test_parameters_without_strides_keep_their_layout_and_memory(layout):
    model = make(w=nn.Parameter(laid_out(layout, torch.eye(4))))
    clone = working_copy(model).root
    assert clone.w is not model.w
    assert (type(clone.w), clone.w.layout, clone.w.requires_grad) == (type(model.w), model.w.layout, True)
    assert isinstance(clone.w, nn.Parameter)
    with torch.no_grad():
        model.w.mul_(2)
    assert clone.w._version == model.w._version == 1
    # Such a write gives a sparse tensor of this layout new memory.
    assert layout == "coo" or torch.equal(numbers_in(clone.w), numbers_in(model.w))


@pytest.mark.parametrize(
    ("layout", "place"),
    [*((layout, "buffer") for layout in (*SPARSE, *NESTED, "mkldnn")), ("csr", "plain"), ("nested", "list")],
)
def test_a_run_leaves_no_trace_in_tensors_without_strides(layout, place):
    model, tensor = make(), laid_out(layout, torch.eye(4))
    if place == "buffer":
        model.register_buffer("held", tensor)
    else:
        model.held = [tensor] if place == "list" else tensor

    def held_by(module):
        return module.held[0] if place == "list" else module.held

    clone = working_copy(model).root
    with private_state(clone):
        held_by(clone).mul_(2)
    for module in (clone, model):
        assert torch.equal(numbers_in(held_by(module)), numbers_in(laid_out(layout, torch.eye(4))))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_lazy_modules_of_the_caller_stay_lazy():
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    clone = working_copy(model).root
    clone(X)
    assert clone[0].weight.shape == (3, 4)
    assert isinstance(model[0], nn.LazyLinear)
    assert model[0].has_uninitialized_params()
    assert model[1].has_uninitialized_params()


class CopiesItself(nn.Module):
    def __deepcopy__(self, memo):
        twin = CopiesItself()
        memo[id(self)] = twin
        twin.made = True
        return twin


class RefusesToBeCopied:
    def __deepcopy__(self, memo):
        raise RuntimeError("no")


class Profiler:
    def __init__(self):
        self.lock = threading.Lock()

    def hook(self, module, args, output):
        pass


def test_a_class_that_copies_itself_does():
    assert working_copy(make(child=CopiesItself())).root.child.made


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (
            threading.Lock(),
            r"TypeError: cannot pickle '_thread.lock' object.*: create it in forward, store",
        ),
        (
            (i for i in range(3)),
            r"TypeError: cannot pickle 'generator' object.*: create it in forward, store a list and an index instead",
        ),
        (RefusesToBeCopied(), r"RuntimeError: no.*, or define __deepcopy__ on RefusesToBeCopied"),
        ({"a": [threading.Lock()]}, r"TypeError: cannot pickle"),
    ],
)
def test_what_cant_be_copied_is_refused_by_its_attribute(value, why):
    with pytest.raises(LoadError, match=rf"^attribute 'held' of Made can't be copied.*{why}"):
        working_copy(make(held=value))


def test_a_hook_that_cant_be_copied_is_refused():
    model = make()
    model.register_forward_hook(Profiler().hook)
    with pytest.raises(LoadError, match=r"^attribute '_forward_hooks' of Made can't be copied .TypeError"):
        working_copy(model)


def test_libraries_and_functions_of_the_model_stay_the_same_objects():
    model = make(math=torch.nn.functional, act=torch.relu, table=[torch.relu, len])
    clone = working_copy(model).root
    assert (clone.math, clone.act, clone.table) == (model.math, model.act, model.table)


def test_an_empty_container_that_modules_share_stays_shared():
    cache = {}
    clone = working_copy(nn.Sequential(make(cache=cache), make(cache=cache))).root
    assert clone[0].cache is clone[1].cache is not cache


def hooked(calls):
    layer = nn.Linear(4, 4)
    layer.register_forward_pre_hook(lambda m, a: calls.append("pre"))
    layer.register_forward_hook(lambda m, a, k, o: calls.append("kwargs"), with_kwargs=True)
    layer.register_forward_hook(lambda m, a, o: calls.append("always"), always_call=True)
    return layer


def test_hooks_are_taken_along():
    calls = []
    model = nn.Sequential(hooked(calls))
    clone = working_copy(model).root
    clone(X)
    assert calls == ["pre", "kwargs", "always"]
    clone[0]._forward_hooks.clear()
    assert len(model[0]._forward_hooks) == 2


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "change",
    [
        torch.nn.utils.weight_norm,
        parametrizations.weight_norm,
        parametrizations.orthogonal,
        parametrizations.spectral_norm,
    ],
)
def test_normed_weights(change):
    model = nn.Sequential(change(nn.Linear(4, 4)), nn.Linear(4, 4)).eval()
    clone = working_copy(model).root
    assert torch.equal(clone(X), model(X))
    assert {id(p) for p in clone.parameters()}.isdisjoint(id(p) for p in model.parameters())
    pointers = {p.data_ptr() for p in model.parameters()}
    assert {p.data_ptr() for p in clone.parameters()} == pointers
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(clone(X), model(X))


def test_graph_modules_and_compiled_modules():
    for model in (fx.symbolic_trace(Layer()), torch.compile(Layer(), backend="eager")):
        clone = working_copy(model).root
        assert type(clone) is type(model)
        assert clone.state_dict().keys() == model.state_dict().keys()
        pointers = {p.data_ptr() for p in model.parameters()}
        assert {p.data_ptr() for p in clone.parameters()} == pointers
        assert torch.equal(clone(X), model(X))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_scripted_modules_inside():
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.ReLU())
    clone = working_copy(model).root
    assert torch.equal(clone(X), model(X))
    assert clone[0].weight.data_ptr() == model[0].weight.data_ptr()


@pytest.mark.slow
def test_deep_and_wide_trees():
    module: nn.Module = nn.Linear(1, 1)
    for _ in range(150):
        module = nn.Sequential(module)
    assert len(list(working_copy(module).root.modules())) == 151

    def calls(size):
        model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(size)])
        count = 0

        def profile(frame, event, argument):
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(profile)
        try:
            working_copy(model)
        finally:
            sys.setprofile(None)
        return count

    assert calls(5000) < 5.5 * calls(1000)


# --- state ------------------------------------------------------------------------------------------------------------


def _adds(self, x):
    self.total.add_(x.sum())
    return x + self.total


def _adds_behind_a_view(self, x):
    self.total.view(-1)[0] += x.sum()
    return x + self.total


def _adds_unseen(self, x):
    if x.sum() > -1e9:
        self.total += x.sum()
    return x + self.total


@pytest.mark.parametrize("forward", [_adds, _adds_behind_a_view, _adds_unseen])
@pytest.mark.parametrize("as_buffer", [True, False])
def test_what_a_forward_writes_to_is_the_copys_own(forward, as_buffer):
    model = make(forward)
    model.register_buffer("total", torch.zeros(())) if as_buffer else setattr(model, "total", torch.zeros(()))
    clone = working_copy(model).root
    clone(X + 1)
    assert model.total == 0
    assert clone.total != 0


@pytest.mark.parametrize(
    "layer", [lambda: nn.Conv1d(4, 4, 1), lambda: nn.Linear(4, 4), lambda: nn.Sequential(nn.Conv1d(4, 4, 1))]
)
def test_a_module_in_two_places_is_one_in_the_copy_too(layer):
    """Convolutions define `__setstate__`, so `deepcopy` copies them; one in several places must be copied only once."""

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = layer()
            self.second = nn.Sequential(nn.ReLU(), self.first)
            self.second.itself = self.first
            self.listed = [nn.Sequential(self.first)]

    model = Holder()
    result = working_copy(model).root
    assert result.first is not model.first
    assert result.second[1] is result.second.itself is result.listed[0][0] is result.first
    theirs = {id(module) for module in model.modules()}
    assert not any(id(module) in theirs for module in result.modules())


@pytest.mark.parametrize("inputs", [(X,), None])
def test_the_result_counts_as_the_model_does(inputs):
    class Follows(nn.Module):
        """Updates the running mean of its BatchNorm itself, which no layer of torch does in eval mode."""

        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(4)
            self.register_buffer("center", self.bn.running_mean)

        def forward(self, x):
            y = self.bn(x)
            if x.sum() > -1e9:
                self.center += 0.1 * (x.mean(0) - self.center)
            return y

    model = enliven(Follows()).eval()
    fast, twin = optimize(model, ["fold-conv-bn"], example_inputs=inputs), copy.deepcopy(model)
    for _ in range(3):
        assert torch.allclose(fast(X + 1), twin(X + 1))
    assert not torch.equal(twin.center, model.center)


def test_a_run_in_a_private_state_leaves_no_trace():
    model = make(_adds, calls=[], state=SimpleNamespace(last=None), cache=[torch.zeros(2)], history=torch.zeros(2))
    model.register_buffer("total", torch.ones(()))
    before = dict(vars(model))
    versions = [model.total._version, model.history._version, model.cache[0]._version]
    with private_state(model):
        model(X + 1)
        model.calls.append(1)
        model.state.last = X
        model.cache[0].add_(1)
        model.history.add_(1)
        model.new = 1
        assert model.total != 1
    assert vars(model).keys() == before.keys()
    assert all(vars(model)[name] is value for name, value in before.items())
    assert (model.total, model.calls, model.state.last, model.cache[0].tolist()) == (1, [], None, [0, 0])
    assert versions == [model.total._version, model.history._version, model.cache[0]._version]


def test_parameters_that_a_run_writes_to_are_copies_in_a_private_state():
    layer = nn.Linear(2, 2)
    weight, before = layer.weight, layer.weight.detach().clone()
    with private_state(layer, ["weight"]), torch.no_grad():
        assert layer.bias is not layer.weight is not weight
        layer.weight.zero_()
    assert layer.weight is weight
    assert torch.equal(weight, before)


# --- memory that tensors share ----------------------------------------------------------------------------------------


def _moves_the_middle(self, x):
    if x.sum() > -1e9:
        self.middle.add_(1)
    return x + self.whole.sum() + self.other.sum()


def _sharing(place):
    """A model with a buffer, a view of it that the forward writes to, and at `place` a view of that view."""
    model = make(_moves_the_middle).eval()
    model.register_buffer("whole", torch.zeros(6))
    model.middle = model.whole[2:4]
    model.other = torch.zeros(1)
    if place == "attribute":
        model.other = model.middle.view(1, 2)
    if place == "another module":
        model.inner = nn.BatchNorm1d(2)
        model.inner.running_mean = model.middle[:]
    if place == "list":
        model.held = [model.middle[:1]]
    return model


def _in(place, model):
    found = {"attribute": lambda: model.other, "another module": lambda: model.inner.running_mean}
    return found.get(place, lambda: model.held[0])()


PLACES = ["attribute", "another module", "list"]


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("place", PLACES)
def test_what_shares_memory_shares_it_in_the_copy(mode, place):
    model = _sharing(place)
    result = working_copy(model, mode)
    for calls in (1, 2):
        result.root(X)
        assert result.root.whole.tolist() == [0, 0, calls, calls, 0, 0]
        assert _in(place, result.root).unique().tolist() == [calls]
    assert (model.whole.sum() == 0) == (mode == "inference")
    if mode == "training":
        assert _in(place, result.root).data_ptr() == _in(place, model).data_ptr()


@pytest.mark.parametrize("place", PLACES)
def test_a_private_state_shares_memory_as_the_module_does(place):
    model = working_copy(_sharing(place)).root
    for _ in range(2):
        with private_state(model):
            model(X)
            assert model.whole.tolist() == [0, 0, 1, 1, 0, 0]
            assert _in(place, model).unique().tolist() == [1]
        assert model.whole.tolist() == [0] * 6


# --- writes of a forward to other modules -----------------------------------------------------------------------------


class Outer(nn.Module):
    """Writes to the modules below it: always, or in a data-dependent branch (`_unseen`)."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.conv, self.bn = nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)
        self.inner = Layer()
        self.deep = nn.Sequential(nn.Sequential(nn.BatchNorm1d(4)))
        self.listed = [nn.BatchNorm1d(4).eval()]

    def forward(self, x):
        self.write(self, x)
        return self.deep(self.bn(self.listed[0](self.conv(x)))) + self.inner(x.mean(-1))[..., None]


def _all_state(model):
    return {**model.state_dict(), **model.listed[0].state_dict(prefix="listed.")}


def _unseen(write):
    def write_unseen(self, x):
        if x.sum() > -1e9:
            write(self, x)

    return write_unseen


def _statistics(self, x):
    torch.nn.functional.batch_norm(x, self.bn.running_mean, self.bn.running_var, None, None, True)


WRITES = {
    "adds": lambda self, x: self.bn.running_mean.add_(0.5),
    "adds to a view": lambda self, x: self.deep[0][0].running_var[1:].mul_(1.5),
    "trains": lambda self, x: self.bn.train(),
    "statistics": _statistics,
    "inner": lambda self, x: self.inner.state.add_(0.5),
    "in a list": lambda self, x: self.listed[0].running_mean.add_(0.5),
}


@pytest.mark.parametrize(
    ("name", "seen", "inputs"),
    [
        *((name, True, True) for name in WRITES),
        ("statistics", False, True),
        ("in a list", False, True),
        ("adds", True, False),
    ],
)
def test_calls_of_the_result_write_to_nothing_of_the_callers(name, seen, inputs):
    model = enliven(Outer(WRITES[name] if seen else _unseen(WRITES[name]))).eval()
    twin, before = copy.deepcopy(model), copy.deepcopy(_all_state(model))
    x = torch.randn(3, 4, 5)
    fast = optimize(model, passes=["fold-conv-bias"], example_inputs=(x,) if inputs else None)
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(fast(x), twin(x), atol=1e-5)
    assert [name for name, value in _all_state(model).items() if not torch.equal(value, before[name])] == []
    assert [name for name, value in _all_state(twin).items() if not torch.equal(value, before[name])] != []


def _clamps(self, x):
    with torch.no_grad():
        self.linear.weight.mul_(0.5)
    return self.linear(x)


def test_parameters_that_every_call_writes_to_become_the_results_own():
    model = make(_clamps, linear=nn.Linear(4, 4), other=nn.Linear(4, 4)).eval()
    before, twin = model.linear.weight.detach().clone(), copy.deepcopy(model)
    fast = optimize(model, passes=[], example_inputs=(X,))
    for _ in range(2):
        assert torch.equal(fast(X), twin(X))
    assert torch.equal(model.linear.weight, before)
    assert fast.other.weight.data_ptr() == model.other.weight.data_ptr()


@pytest.mark.parametrize("inputs", [True, False])
def test_the_rows_that_an_embedding_shortens_are_the_results_own(inputs):
    model = nn.Sequential(nn.Embedding(4, 3, max_norm=0.1), nn.Linear(3, 3)).eval()
    before = model[0].weight.detach().clone()
    ids = torch.tensor([[0, 1], [2, 3]])
    fast = optimize(model, passes=[], example_inputs=(ids,) if inputs else None)
    assert torch.equal(fast(ids), copy.deepcopy(model)(ids))
    assert torch.equal(model[0].weight, before)
    assert fast[1].weight.data_ptr() == model[1].weight.data_ptr()


class Flat(nn.Module):
    """The weight is a view of a buffer that the forward writes to."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)
        self.register_buffer("flat", self.conv.weight.detach().clone().reshape(-1))
        self.conv.weight.data = self.flat.view(4, 4, 1)

    def forward(self, x):
        if x.sum() > -1e9:
            self.flat.mul_(0.9)
        return self.bn(self.conv(x))


@pytest.mark.parametrize(("passes", "mode"), [([], "inference"), (["fold-conv-bn"], "inference"), ([], "training")])
@pytest.mark.parametrize("inputs", [True, False])
def test_a_parameter_in_the_memory_of_a_buffer_moves_with_it(inputs, passes, mode):
    model, x = enliven(Flat()).train(mode == "training"), torch.randn(3, 4, 5)
    before = copy.deepcopy(model.state_dict())
    fast = optimize(model, passes=passes, mode=mode, example_inputs=(x,) if inputs else None)
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])] == []
    assert fast.conv.weight.data_ptr() == fast.flat.data_ptr()
    twin = enliven(Flat()).train(mode == "training")
    twin.load_state_dict(before)
    with torch.no_grad():
        for _ in range(3):
            assert torch.allclose(fast(x), twin(x), atol=1e-5)
    assert torch.equal(model.flat, before["flat"]) == (mode == "inference")


def test_a_private_run_moves_weights_in_the_memory_of_a_buffer_and_leaves_the_modules():
    model, x = enliven(Flat()).eval(), torch.randn(3, 4, 5)
    before = copy.deepcopy(model.state_dict())
    wanted = copy.deepcopy(model)
    wanted.conv.weight.data = wanted.flat.view(4, 4, 1)
    with private_state(model), torch.no_grad():
        assert torch.equal(model(x), wanted(x))
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])] == []
    assert model.conv.weight.data_ptr() == model.flat.data_ptr()


@pytest.mark.parametrize("place", ["parameter", "memory of a bias"])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, lambda size: nn.InstanceNorm1d(size, track_running_stats=True)])
def test_training_on_examples_leaves_statistics_that_are_no_buffers(norm, place):
    model = enliven(nn.Sequential(nn.Conv1d(4, 4, 1), norm(4))).train()
    mean = model[1].running_mean
    if place == "parameter":
        del model[1].running_mean
        model[1].running_mean = nn.Parameter(mean, requires_grad=False)
    else:
        model[1].running_mean = model[0].bias.detach()
    before = copy.deepcopy(model.state_dict())
    fast = optimize(model, passes=[], mode="training", example_inputs=(torch.randn(3, 4, 5),))
    assert fast.report.parity.verdict == "ok"
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])] == []
