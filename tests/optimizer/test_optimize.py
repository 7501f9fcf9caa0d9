import copy
import gc
import io
import pickle
import random
import threading
import warnings
import weakref
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.utils.checkpoint
from laid_out import LAYOUTS, laid_out, numbers_in
from pass_contract import conv_bn_chains
from tiny_models import enliven
from torch import nn

from optimize_export.errors import LoadError, UsageError
from optimizer import optimize, report_of
from passes.base import TensorRef
from passes.graph.backend import GRAPH_CALL
from passes.graph.module_pass import ModulePass
from passes.torch_private import COMPILED_CALL

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x))) + x


class Net(nn.Module):
    """Has a branch in its forward, tied weights, a hook, plain containers and a buffer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.blocks = nn.Sequential(Block())
        self.branch = Block()
        self.head = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.head.weight
        self.config = {"name": "net", "sizes": [1, 2]}
        self.seen = []
        self.branch.register_forward_hook(lambda module, args, output: output * 1.0)
        self.register_buffer("offset", torch.ones(4))

    def features(self, x):
        return self.blocks(self.stem(x))

    def forward(self, x, *, scale=1.0):
        y = self.features(x)
        if y.shape[0] > 0:
            y = self.branch(y)
        pooled = y.mean((2, 3))
        return {"logits": self.tied(torch.relu(self.head(pooled))) * scale, "pooled": pooled + self.offset}


def net() -> nn.Module:
    return enliven(Net()).eval()


def snapshot(model: nn.Module):
    """All state of a module that a caller could see: tensors by identity, version and value, the rest by identity."""
    tensors = {}
    modules = []

    def plain(value, depth=4):
        if isinstance(value, torch.Tensor):
            tensors.setdefault(
                id(value), (value, value._version, value.detach().clone(), value.requires_grad, value.grad)
            )
            return id(value)
        if isinstance(value, nn.Module) or not depth:
            return id(value)
        if isinstance(value, dict):
            return id(value), [(key, plain(item, depth - 1)) for key, item in value.items()]
        if isinstance(value, list | tuple | set):
            return id(value), [plain(item, depth - 1) for item in value]
        return id(value)

    for path, module in model.named_modules(remove_duplicate=False):
        modules.append((path, type(module), [(name, plain(value)) for name, value in vars(module).items()]))
    return modules, tensors


def assert_untouched(model: nn.Module, before) -> None:
    modules, tensors = snapshot(model)
    assert modules == before[0]
    for key, (value, version, values, needs_gradient, gradient) in before[1].items():
        assert tensors[key][1] == version == value._version
        assert torch.equal(value.detach(), values)
        assert value.requires_grad == needs_gradient
        assert value.grad is gradient


def assert_close(got, wanted) -> None:
    assert type(got) is type(wanted)
    for key in wanted:
        torch.testing.assert_close(got[key], wanted[key], rtol=1e-5, atol=1e-5)


@dataclass(frozen=True)
class Doubles(ModulePass):
    """Double a weight. This is wrong and must be rolled back."""

    name: ClassVar[str] = "doubles"

    def rewrite(self, graph, context):
        for conv, _ in conv_bn_chains(graph.tree, context):
            with graph.change(graph.tree.path(conv.module), "doubled", conv.module):
                graph.set_tensor(TensorRef(conv.weight.owner, "weight"), conv.weight.value.detach() * 2)


@dataclass(frozen=True)
class Fails(Doubles):
    """Double a weight and then raise."""

    name: ClassVar[str] = "fails"

    def rewrite(self, graph, context):
        super().rewrite(graph, context)
        raise ZeroDivisionError("on purpose")


# --- the caller's module ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    ("inputs", "passes", "training"),
    [((X,), None, True), ((X,), [Doubles()], False), ((X,), [Fails()], True), (None, None, True)],
)
def test_the_caller_is_untouched(mode, inputs, passes, training):
    model = net().train(training)
    model.head.weight.requires_grad_(False)
    model.stem.weight.grad = torch.ones_like(model.stem.weight)
    before = snapshot(model)
    states = torch.get_rng_state(), random.getstate()
    fast = optimize(model, passes, example_inputs=inputs, mode=mode)
    fast(X)
    if mode == "inference":
        assert_untouched(model, before)
    else:
        assert snapshot(model)[0] == before[0]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


# --- the result -------------------------------------------------------------------------------------------------------


def test_the_result_is_of_the_same_class_with_its_attributes_and_methods():
    model = net()
    fast = optimize(model, example_inputs=(X,))
    assert type(fast) is Net
    assert fast.config == model.config
    assert [name for name, _ in fast.named_children()] == [name for name, _ in model.named_children()]
    for size in (1, 2, 5):
        x = X[:1].repeat(size, 1, 1, 1)
        assert_close(fast(x), model(x))
        assert_close(fast(x, scale=2.0), model(x, scale=2.0))
    torch.testing.assert_close(fast.features(X), model.features(X), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fast.blocks[0](fast.stem(X)), model.blocks[0](model.stem(X)), rtol=1e-5, atol=1e-5)
    # Only keys of BatchNorms may be missing, and no key has a prefix.
    assert {key for key in model.state_dict() if "norm" not in key} <= set(fast.state_dict())
    assert all(key in model.state_dict() for key in fast.state_dict())


def test_a_second_optimize_changes_nothing():
    fast = optimize(net(), example_inputs=(X,))
    again = optimize(fast, example_inputs=(X,))
    assert [record.status for record in again.report.passes] == ["unchanged"] * len(again.report.passes)
    assert_close(again(X), fast(X))
    for mine, theirs in zip(again.parameters(), fast.parameters(), strict=True):
        assert mine.data_ptr() == theirs.data_ptr()


def _deepcopied(fast):
    return copy.deepcopy(fast)


def _pickled(fast):
    return pickle.loads(pickle.dumps(fast))


def _saved(fast):
    stream = io.BytesIO()
    torch.save(fast, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize("again", [_deepcopied, _pickled, _saved])
def test_copies_of_the_result(again):
    model = net()
    model.branch._forward_hooks.clear()
    fast = optimize(model, ["fold-conv-bn", "channels-last"], example_inputs=(X,))
    twin = again(fast)
    # An output's autograd history would keep the weights alive, and folded weights keep their layers alive.
    with torch.no_grad():
        wanted = fast(X)
    assert_close(twin(X), wanted)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.detach().zero_()
    assert_close(fast(X), wanted)
    assert not torch.equal(twin(X)["pooled"], wanted["pooled"])
    first = [weakref.ref(module) for module in fast.modules()]
    assert str(twin.report) == str(fast.report)
    del fast
    gc.collect()
    assert [module() for module in first] == [None] * len(first)
    twin(X)


@pytest.mark.parametrize(("again", "runs_as_written"), [(_deepcopied, True), (_pickled, False), (_saved, True)])
def test_copies_of_the_result_stay_rewritten_and_take_further_passes(again, runs_as_written):
    model = enliven(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(X,))
    fast.__dict__[GRAPH_CALL].is_for_files = runs_as_written
    twin = again(fast)
    same = optimize(twin, ["fold-conv-bn"], example_inputs=(X,))
    assert same.report.passes[0].status == "unchanged"
    further = optimize(twin, ["simplify"], example_inputs=(X,))
    assert further.report.passes[0].status == "applied"
    for result, steps in ((same, 1), (further, 2)):
        call = result.__dict__[COMPILED_CALL]
        assert call is result.__dict__[GRAPH_CALL]
        assert (len(call.passes), call.owner) == (steps, result)
        torch.testing.assert_close(result(X), model(X), rtol=1e-4, atol=1e-5)
    assert same.__dict__[GRAPH_CALL].is_for_files is runs_as_written
    assert not further.__dict__[GRAPH_CALL].is_for_files


@pytest.mark.slow
def test_a_compiled_result_that_is_optimized_again_keeps_its_rewritten_graphs():
    model = enliven(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).eval()
    fast = optimize(model, ["fold-conv-bn", "torch-compile"], example_inputs=(X,))
    assert fast.report.passes[1].status == "applied"
    again = optimize(fast, [], example_inputs=(X,))
    call = again.__dict__[COMPILED_CALL]
    assert call is again.__dict__[GRAPH_CALL]
    assert [step.item.name for step in call.passes] == ["fold-conv-bn"]


def test_conversion_of_the_result():
    model = net()
    fast = optimize(model, example_inputs=(X,))
    wanted = copy.deepcopy(model).double()(X.double())
    got = fast.double()(X.double())
    assert got["logits"].dtype is torch.float64
    torch.testing.assert_close(got["logits"], wanted["logits"], rtol=1e-4, atol=1e-4)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("paths", "note"),
    [
        ([], None),
        ([""], "the model is in training mode"),
        (["3", "4"], "3 and 1 more are in training mode inside a model in eval mode"),
    ],
)
def test_what_was_in_training_is_named(paths, note):
    unlike = nn.BatchNorm2d(4, track_running_stats=False)
    model = enliven(nn.Sequential(nn.Conv2d(3, 4, 3), Block(), nn.BatchNorm2d(4), nn.Dropout(), unlike)).eval()
    for path in paths:
        model.get_submodule(path).training = True
    report = report_of(optimize(model, ["fold-conv-bn"], example_inputs=(X,)))
    said = [text for text in report.notes if "in training mode" in text]
    assert [text.startswith(f"{note}; the result is in eval mode") for text in said] == [True] * (note is not None)
    assert report.warnings == []
    assert not report_of(optimize(model, ["torch-compile:backend=eager"], mode="training")).notes[:-1]


def test_a_warning_names_the_norms_that_were_left_in_training():
    model = enliven(nn.Sequential(nn.Conv2d(3, 4, 3), Block(), nn.BatchNorm2d(4), nn.Dropout())).eval()
    for path in ("1.norm", "2", "3"):
        model.get_submodule(path).training = True
    report = report_of(optimize(model, ["fold-conv-bn"], example_inputs=(X,)))
    (warning,) = report.warnings
    assert warning.startswith("1.norm, 2 are in training mode inside a model in eval mode: the model normalizes with")
    assert warning in report.notes
    assert f"warning: {warning}" in str(report)
    assert any(note.startswith("3 is in training mode") for note in report.notes)


def test_the_report_shows_why_places_were_skipped():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(X,))
    skips = fast.report.passes[0].skips
    assert fast.report.passes[0].status == "unchanged"
    (line,) = [line for line in str(fast.report).splitlines() if line.startswith("fold-conv-bn")]
    assert line.endswith(
        f"{len(skips)} skips, {fast.report.passes[0].seconds:.2f} s: {skips[0].text} (1 of {len(skips)})"
    )


def test_a_module_that_stays_in_training_is_not_said_to_be_in_eval():
    class Stubborn(nn.BatchNorm2d):
        def train(self, mode=True):
            return super().train(True)

    model = enliven(nn.Sequential(nn.Conv2d(3, 4, 3), Stubborn(4))).eval()
    fast = optimize(model, ["fold-conv-bn"], example_inputs=(X,))
    assert fast[1].training
    assert report_of(fast).passes[0].skips[0].text == "it uses the statistics of the batch"
    assert not any("in training mode" in text for text in report_of(fast).notes)


def test_an_inference_result_stays_in_eval_and_says_so_once():
    fast = optimize(net(), ["fold-conv-bn"], example_inputs=(X,))
    parent = nn.Sequential(fast)
    with pytest.warns(UserWarning, match="stays in eval"):
        assert fast.train() is fast
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parent.train()
        fast.train()
        fast.eval()
    assert not any(module.training for module in fast.modules())
    assert parent.training


def test_nothing_keeps_the_result_alive():
    model = net()
    fast = optimize(model, example_inputs=(X,))
    modules = [weakref.ref(module) for module in fast.modules()]
    tensors = [weakref.ref(parameter) for parameter in fast.parameters()]
    del fast
    gc.collect()
    assert [item() for item in (*modules, *tensors)] == [None] * (len(modules) + len(tensors))


def test_two_threads_run_one_result():
    fast = optimize(net(), ["fold-conv-bn", "channels-last"], example_inputs=(X,))
    wanted = {size: fast(X[:1].repeat(size, 1, 1, 1)) for size in (1, 2)}
    wrong, start = [], threading.Barrier(2)

    def run(size):
        x = X[:1].repeat(size, 1, 1, 1)
        start.wait(10)
        for _ in range(40):
            got = fast(x)
            if not all(torch.equal(got[key], wanted[size][key]) for key in got):
                wrong.append(size)

    threads = [threading.Thread(target=run, args=(size,)) for size in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- behavior that a trace would freeze -------------------------------------------------------------------------------


class Folds(nn.Module):
    """A foldable pair before and after the subclass's operation."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(3), Block(3)

    def between(self, x):
        return x

    def forward(self, x):
        return self.second(self.between(self.first(x)))


class DrawsNoise(Folds):
    def between(self, x):
        return x + torch.randn(3, 1, 1)


class LoopsOverBatch(Folds):
    def between(self, x):
        return torch.stack([row / row.abs().max() for row in x])


class BranchesOnValue(Folds):
    def between(self, x):
        return x if x.sum() > 0 else x * 2


class BranchesOnBatch(Folds):
    def between(self, x):
        return x * (2 if len(x) > 2 else 3)


class Caches(Folds):
    _cache: ClassVar[dict] = {}

    def between(self, x):
        if x.shape[-1] not in self._cache:
            self._cache[x.shape[-1]] = torch.arange(x.shape[-1])
        return x + self._cache[x.shape[-1]]


@pytest.mark.parametrize("kind", [DrawsNoise, LoopsOverBatch, BranchesOnValue, BranchesOnBatch, Caches])
def test_nothing_is_frozen(kind):
    model = enliven(kind()).eval()
    fast = optimize(model, example_inputs=(X,))
    folds = next(record for record in fast.report.passes if record.name == "fold-conv-bn")
    # The two recorded runs of a loop over the batch differ, so its pairs may stay as they are.
    assert len(folds.changes) == 2 or kind is LoopsOverBatch
    for size, sign in ((1, 1), (2, -1), (5, 3)):
        x = X[:1].repeat(size, 1, 1, 1) * sign
        torch.manual_seed(3)
        wanted = model(x)
        torch.manual_seed(3)
        torch.testing.assert_close(fast(x), wanted, rtol=1e-5, atol=1e-5)
    assert report_of(fast).coverage.share == 1


# --- odd modules ------------------------------------------------------------------------------------------------------


class Around(nn.Module):
    """An odd module between two foldable pairs."""

    def __init__(self, odd):
        super().__init__()
        self.first, self.odd, self.second = Block(3), odd, Block(3)

    def forward(self, x):
        return self.second(self.odd(self.first(x)))


class Checkpoints(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Block(3)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


class Guards(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Block(3)

    def forward(self, x):
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return self.inner(x)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        y = x[:, :, :2].flatten(1, 2)
        y, _ = self.attention(y, y, y)
        y, (_, _) = self.lstm(self.layer(y))
        return y.unflatten(1, (3, -1))


class PlainLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [Block(3).eval(), Block(3).eval()]

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class CallsOver(Block):
    def __call__(self, x):
        return super().__call__(x) + 1


class Lends(nn.Module):
    """Its forward is set on the instance."""

    def __init__(self):
        super().__init__()
        self.inner = Block(3)
        self.forward = self.inner.forward


def twice():
    block = Block(3)
    return nn.Sequential(block, block, nn.ModuleDict({"alias": block})["alias"])


class Holds(nn.Module):
    """Has a foldable pair, and a tensor in another layout."""

    def __init__(self, layout, place):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        matrix = laid_out(layout, torch.eye(4) * 2 + torch.eye(4).roll(1, 0))
        if place == "buffer":
            self.register_buffer("held", matrix)
        elif place == "parameter":
            self.held = nn.Parameter(matrix, requires_grad=matrix.is_floating_point())
        else:
            self.held = [matrix] if place == "list" else matrix

    def forward(self, x):
        held = self.held[0] if isinstance(self.held, list) else self.held
        y = self.norm(self.linear(x))
        return (held @ y.t()).t() if held.layout in PRODUCTS else y * numbers_in(held).sum()


PRODUCTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr)


@pytest.mark.parametrize(
    ("layout", "place"),
    [*((layout, "buffer") for layout in LAYOUTS), *(("csr", place) for place in ("parameter", "plain", "list"))],
)
def test_a_tensor_in_another_layout_is_no_hindrance(layout, place):
    model = enliven(Holds(layout, place)).eval()
    modes = ("inference", "training") if layout in ("coo", "jagged") else ("inference",)
    x = torch.randn(4, 4)
    for mode, name in zip(modes, ("fold-conv-bn", "fold-conv-bias"), strict=False):
        fast = optimize(model.train(mode == "training"), [name], example_inputs=(x,), mode=mode)
        (record,) = fast.report.passes
        # torch.compile's front end captures nothing with some of them, or graphs that raise.
        reasons = " ".join(skip.text for skip in record.skips)
        assert record.status == "applied" or "torch.compile captures" in reasons
        with torch.no_grad():
            torch.testing.assert_close(fast.eval()(x), model.eval()(x), rtol=1e-4, atol=1e-5)
    assert optimize(model).report.passes


def normed():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 1)), nn.BatchNorm2d(3))


ODD = {
    "checkpoint": Checkpoints,
    "contexts": Guards,
    "attention": Attends,
    "plain lists": PlainLists,
    "own call": lambda: CallsOver(3),
    "instance forward": Lends,
    "called twice": twice,
    "parametrized": normed,
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())),
    "graph module": lambda: torch.fx.symbolic_trace(Block(3)),
    "compiled": lambda: torch.compile(Block(3), backend="eager"),
    "in eval": lambda: Block(3).eval(),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
@pytest.mark.parametrize("inputs", [None, (X,)])
@pytest.mark.parametrize("name", ODD)
def test_odd_modules_go_through(name, inputs):
    model = enliven(Around(ODD[name]())).eval()
    before = snapshot(model) if name != "scripted" else None
    fast = optimize(model, example_inputs=inputs)
    folds = next(record for record in fast.report.passes if record.name == "fold-conv-bn")
    # Without example inputs no graph is captured, so nothing is folded. torch.compile's front end captures the inside of
    # a checkpoint as a function of its own, and only a part of a forward that calls a scripted module in a loop.
    wanted = {"checkpoint": set(), "scripted": {"first.norm"}}.get(name, {"first.norm", "second.norm"})
    assert (wanted if inputs is not None else set()) <= {change.where for change in folds.changes}
    assert inputs is not None or not folds.changes
    for size in (1, 2, 5):
        x = torch.cat([X[:1]] * size) * 1.5
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    if before is not None:
        assert_untouched(model, before)


def test_under_inference_mode():
    with torch.inference_mode():
        model = net()
        fast = optimize(model, example_inputs=(X.clone(),))
        assert_close(fast(X), model(X))


# Passes that create tensors.
MAKING = [
    "fold-conv-bn",
    "merge-linears:force=true",
    "pad-channels:force=true",
    "cast-precision:how=weights",
    "channels-last",
]


class Wide(nn.Module):
    """Has something to change for every pass in `MAKING`."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 10, 3), nn.BatchNorm2d(10)
        self.q, self.k, self.out = nn.Linear(10, 13), nn.Linear(10, 13), nn.Linear(13, 10)
        enliven(self)

    def forward(self, x):
        x = self.norm(self.conv(x)).mean((2, 3))
        return self.out(self.q(x).sigmoid() * self.k(x) * 2)


@pytest.mark.parametrize("item", MAKING)
def test_what_is_made_in_inference_mode_is_as_what_is_made_outside(item):
    model, x = Wide().eval(), X.clone()
    with torch.inference_mode():
        fast = optimize(model, [item], example_inputs=(X.clone(),), strict=True)
    assert fast.report.passes[0].status == "applied"
    assert not [name for name, tensor in fast.state_dict(keep_vars=True).items() if tensor.is_inference()]
    fast(x.requires_grad_()).sum().backward()
    assert x.grad.abs().max() > 0
    with torch.inference_mode():
        torch.testing.assert_close(fast(X), model(X), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("item", "optimized_there"), [*((item, False) for item in MAKING), ("fold-conv-bn", True), ("channels-last", True)]
)
def test_models_that_were_built_in_inference_mode_go_through(item, optimized_there):
    with torch.inference_mode():
        model = Wide().eval()
    with torch.inference_mode(optimized_there):
        fast = optimize(model, [item], example_inputs=(X.clone(),), strict=True)
    (record,) = fast.report.passes
    if record.name == "cast-precision":
        assert record.status == "applied"
    else:
        # torch doesn't count the writes to such tensors.
        assert record.status == "unchanged"
        assert "inference mode" in record.skips[0].text
    for watched in (torch.no_grad, torch.inference_mode):
        with watched():
            torch.testing.assert_close(fast(X), model(X), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("model", [nn.Identity(), nn.Linear(8, 2), nn.Sequential(), nn.BatchNorm2d(3)])
def test_models_of_one_layer(model):
    for inputs in (None, (X,)):
        fast = optimize(model.eval(), example_inputs=inputs)
        assert type(fast) is type(model)
        torch.testing.assert_close(fast(X), model(X))


def test_meta_models_go_through_without_inputs():
    with torch.device("meta"):
        model = Net()
    fast = optimize(model)
    assert fast(X.to("meta"))["logits"].shape == (2, 4)
    assert fast.stem.weight.is_meta


@pytest.mark.parametrize("place", ["", "head", "stem.weight", "offset"])
def test_models_without_values_are_refused_with_inputs(place):
    model = Net()
    if place in ("", "head"):
        model.get_submodule(place).to("meta")
    else:
        owner, _, name = place.rpartition(".")
        holder = model.get_submodule(owner)
        value = getattr(holder, name).detach().to("meta")
        setattr(holder, name, nn.Parameter(value) if name == "weight" else value)
    for inputs in (X, X.to("meta")):
        with pytest.raises(LoadError, match=r"no values \(device meta\): load weights into it first") as caught:
            optimize(model, example_inputs=(inputs,))
    assert f"{place or 'stem.weight'}" in str(caught.value)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize(("inputs", "mode"), [(None, "inference"), ((X,), "inference"), ((X,), "training")])
def test_lazy_modules_are_refused_and_stay_as_they_are(inputs, mode):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d()))
    with pytest.raises(LoadError) as caught:
        optimize(model, example_inputs=inputs, mode=mode)
    assert str(caught.value).startswith(
        "1.0 (LazyConv2d), 1.1 (LazyBatchNorm2d) have no weights yet: run the model once"
    )
    assert type(model[1][0]) is nn.LazyConv2d
    assert len(model[1][0]._forward_pre_hooks) == 1
    assert model(X).shape == (2, 4, 6, 6)
    fast = optimize(model, example_inputs=(X,), mode=mode)
    torch.testing.assert_close(fast.eval()(X), model.eval()(X))


def test_a_module_whose_constructor_forgot_torchs_is_refused():
    class Bare(nn.Module):
        def __init__(self):
            self.width = 3

    with pytest.raises(LoadError, match=r"^Bare doesn't call the constructor of nn\.Module"):
        optimize(Bare())


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"batch_sizes": [0]}, "batch_sizes must be a list of whole numbers of 1 or more"),
        ({"batch_sizes": ["a"]}, "batch_sizes must be a list of whole numbers of 1 or more"),
        ({"batch_sizes": 2}, "batch_sizes must be a list of whole numbers of 1 or more"),
        ({"seed": 1.5}, "seed must be a whole number, not 1.5."),
        ({"device": "meta"}, "There is no device 'meta'"),
        ({"device": "gpu"}, "There is no device 'gpu'"),
        ({"device": "cuda:1"}, "The device must be 'auto', 'cpu' or 'cuda', not 'cuda:1'; set CUDA"),
    ],
)
def test_arguments_that_make_no_sense_are_one_sentence(changed, part):
    with pytest.raises(UsageError) as caught:
        optimize(Net(), **{"example_inputs": (X,), **changed})
    assert str(caught.value).startswith(part)


def test_a_lack_of_memory_is_a_sentence():
    class Greedy(nn.Module):
        def forward(self, x):
            return torch.empty(2**55, dtype=torch.uint8).sum() + x

    with pytest.raises(LoadError, match=r"out of memory while allocating 33,554,432\.0 GiB"):
        optimize(Greedy(), example_inputs=(X,))


def test_two_threads_take_turns():
    """The default dtype and the patches of a recorded run are process-wide: none may remain."""
    models = [
        nn.Sequential(*[nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for _ in range(4)]) for _ in range(3)
    ]
    done: list[int] = []

    def work(model: nn.Module) -> None:
        fast = optimize(model, ["fold-conv-bn"], example_inputs=(torch.randn(2, 3, 4, 4),))
        done.append(len(report_of(fast).passes[0].changes))

    call = nn.Module.__call__
    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [4, 4, 4]
    assert torch.get_default_dtype() is torch.float32
    assert nn.Module.__call__ is call


class _Listed(nn.Module):
    """BatchNorms in a plain list and dict, which `eval()` doesn't reach: they keep updating their statistics."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.layers = [nn.BatchNorm2d(4)]
        self.by_name = {"norms": [nn.BatchNorm2d(4)]}

    def forward(self, x):
        return self.by_name["norms"][0](self.layers[0](self.conv(x)))


@pytest.mark.parametrize("passes", [[], None])
def test_modules_in_plain_lists_are_left_as_they_were(passes):
    model, x = enliven(_Listed()).eval(), torch.randn(2, 3, 8, 8)
    norms = [model.layers[0], model.by_name["norms"][0]]
    before = [{name: value.clone() for name, value in norm.state_dict().items()} for norm in norms]
    fast = optimize(model, passes, example_inputs=(x,))
    fast(x)
    for norm, state in zip(norms, before, strict=True):
        for name, value in norm.state_dict().items():
            assert torch.equal(value, state[name]), name
    assert (fast(x) - model(x)).abs().max() < 1e-5
