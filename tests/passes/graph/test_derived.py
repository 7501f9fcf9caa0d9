"""Derived tensors are inputs of the rewritten graph, computed once, and anew when a source changes."""

import copy
import gc
import pickle
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from optimizer import optimize, report_of
from passes import Context, GraphPass, GraphRewriter, TorchCompile
from passes.graph.backend import Compilation

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
computed: Counter[str] = Counter()


@dataclass(frozen=True)
class Doubled:
    """Twice a weight."""

    def __call__(self, weight: Tensor) -> Tensor:
        computed["doubled"] += not isinstance(weight, FakeTensor)
        return 2 * weight


@dataclass(frozen=True)
class DoubleWeights(GraphPass):
    """Replace linear(x, w) by linear(x / 2, 2 * w); a weight above `most` can't be used."""

    name: ClassVar[str] = "double-weights"

    most: float = 1e9

    def rewrite(self, graph: GraphRewriter, context: Context) -> None:
        for node in graph.calls("linear"):
            if graph.is_derived(node.args[1]):
                continue
            with graph.change(node, "weights doubled"):
                weight = graph.derived(node, Doubled(), node.args[1], what="twice the weight", usable=self._why_not)
                half = graph.call(node, torch.div, (node.args[0], 2))
                graph.replace_call(node, F.linear, (half, weight, graph.argument(node, 2, "bias")))

    def _why_not(self, value: Tensor) -> str | None:
        return None if value.abs().max() <= self.most else "twice the weight is too large"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


@pytest.fixture(scope="module")
def made() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Net().eval()
    fast = optimize(model, [DoubleWeights()], example_inputs=(X,))
    assert [len(record.changes) for record in report_of(fast).passes] == [2]
    return model, fast


@pytest.fixture
def pair(made: Any) -> tuple[nn.Module, nn.Module]:
    return copy.deepcopy(made)


def plain_of(fast: nn.Module) -> nn.Module:
    """The original with the weights of a result."""
    plain = Net().eval()
    plain.load_state_dict(fast.state_dict())
    return plain


def calls_of(function: Callable[[], Any]) -> int:
    before = computed["doubled"]
    with torch.no_grad():
        function()
    return computed["doubled"] - before


def test_each_is_computed_once_and_shared_by_all_graphs(pair: Any) -> None:
    _, fast = pair
    calls_of(lambda: fast(X))
    assert calls_of(lambda: fast(X)) == 0
    # Other graphs: batch size 1, and inference mode.
    assert calls_of(lambda: fast(X[:1])) == 0
    with torch.inference_mode():
        assert calls_of(lambda: fast(X)) == 0
    with torch.no_grad():
        fast.first.weight.mul_(2)
    assert calls_of(lambda: fast(X)) == 1
    assert calls_of(lambda: fast(X[:1])) == 0


def _replace_layer(fast: Any) -> None:
    fast.first = nn.Linear(4, 4)


def _assign(fast: Any) -> None:
    fast.load_state_dict({name: torch.randn_like(value) for name, value in fast.state_dict().items()}, assign=True)


def _load(fast: Any) -> None:
    fast.load_state_dict({name: torch.randn_like(value) for name, value in fast.state_dict().items()})


def _set_data(fast: Any) -> None:
    fast.first.weight.data = torch.randn(4, 4)


def _transpose_data(fast: Any) -> None:
    # The same object, version and address.
    fast.first.weight.data = fast.first.weight.data.t()


def _write(fast: Any) -> None:
    with torch.no_grad():
        fast.second.weight[0, 0] += 1


def _new_parameter(fast: Any) -> None:
    fast.second.weight = nn.Parameter(torch.randn(4, 4))


def _double(fast: Any) -> None:
    fast.double()
    fast.float()


@pytest.mark.parametrize(
    "change",
    [_replace_layer, _assign, _load, _set_data, _transpose_data, _write, _new_parameter, _double],
)
def test_changed_weights_count_at_the_next_call(change: Callable[[Any], None], pair: Any) -> None:
    _, fast = pair
    with torch.no_grad():
        fast(X)
        change(fast)
        plain = plain_of(fast)
        for x in (X, X[:1], X):
            torch.testing.assert_close(fast(x), plain(x))


def test_where_gradients_flow_the_graph_runs_as_written(pair: Any) -> None:
    model, fast = pair
    assert calls_of(lambda: fast(X)) <= 2
    fast.requires_grad_()(X)
    before = computed["doubled"]
    found = [torch.autograd.grad(one(X).square().sum(), list(one.parameters())) for one in (model, fast)]
    assert computed["doubled"] == before
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_a_result_for_training_computes_them_at_each_call() -> None:
    model = Net()
    fast = optimize(model, [DoubleWeights()], example_inputs=(X,), mode="training")
    fast(X)
    before = computed["doubled"]
    found = [torch.autograd.grad(one(X).square().sum(), list(one.parameters())) for one in (model, fast)]
    assert computed["doubled"] == before + 2
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_value_that_cannot_be_used_is_a_reason() -> None:
    model = Net().eval()
    with torch.no_grad():
        model.first.weight[0, 0] = 100
    fast = optimize(model, [DoubleWeights(most=50)], example_inputs=(X,))
    (record,) = report_of(fast).passes
    assert [change.where for change in record.changes] == ["second"]
    assert [(skip.where, skip.text) for skip in record.skips] == [("first", "twice the weight is too large")]
    with torch.no_grad():
        fast(X)
        fast.second.weight[0, 0] = 200
        before = computed["doubled"]
        plain = plain_of(fast)
        assert torch.equal(fast(X), plain(X))
        assert computed["doubled"] == before + 1
        # The reason is kept as long as the weight is.
        fast(X)
        assert computed["doubled"] == before + 1


def test_values_are_freed_with_the_model_and_with_their_sources() -> None:
    fast: Any = optimize(Net().eval(), [DoubleWeights()], example_inputs=(X,))
    values: list[weakref.ref[Tensor]] = []
    real = Doubled.__call__

    def watched(self: Doubled, weight: Tensor) -> Tensor:
        value = real(self, weight)
        values.append(weakref.ref(value.untyped_storage()))
        return value

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(Doubled, "__call__", watched)
        fast.first.weight.mul_(2)
        fast.second.weight.mul_(2)
        fast(X)
        first = [value for value in values if value() is not None]
        assert len(first) == 2
        fast.first = nn.Linear(4, 4)
        fast(X)
        gc.collect()
        assert [value() is not None for value in first] == [False, True]
    del fast
    gc.collect()
    assert not any(value() is not None for value in values)


def test_a_function_without_a_hash_is_refused() -> None:
    @dataclass
    class Unhashable:
        def __call__(self, weight: Tensor) -> Tensor:
            return 2 * weight

    @dataclass(frozen=True)
    class Wrong(GraphPass):
        name: ClassVar[str] = "wrong"

        def rewrite(self, graph: GraphRewriter, context: Context) -> None:
            node = graph.calls("linear")[0]
            with graph.change(node, "nothing"):
                graph.derived(node, Unhashable(), node.args[1], what="twice")

    fast = optimize(Net().eval(), [Wrong()], example_inputs=(X,))
    assert "derived() takes a hashable function" in str(report_of(fast).passes[0])


def test_compiled_code_gets_them_as_inputs() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    fast = optimize(model, [DoubleWeights(), TorchCompile(backend="aot_eager")], example_inputs=(X,))
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))
        before = computed["doubled"]
        for x in (X, X + 1, X):
            torch.testing.assert_close(fast(x), model(x))
        assert computed["doubled"] == before
        fast.first.weight.mul_(3)
        plain = plain_of(fast)
        torch.testing.assert_close(fast(X), plain(X))
        assert computed["doubled"] == before + 1
    fast.requires_grad_()
    found = [torch.autograd.grad(one(X).square().sum(), list(one.parameters())) for one in (plain, fast)]
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_one_may_be_computed_from_others() -> None:
    """The second pass doubles the weight that the first one has doubled; the first value is kept nowhere."""

    @dataclass(frozen=True)
    class DoubleAgain(GraphPass):
        name: ClassVar[str] = "double-again"

        def rewrite(self, graph: GraphRewriter, context: Context) -> None:
            for node in graph.calls("linear"):
                if graph.is_derived(node.args[1]):
                    with graph.change(node, "weights doubled again"):
                        weight = graph.derived(node, Doubled(), node.args[1], what="twice the weight")
                        half = graph.call(node, torch.div, (node.args[0], 2))
                        graph.replace_call(node, F.linear, (half, weight, graph.argument(node, 2, "bias")))

    model = Net().eval()
    fast = optimize(model, [DoubleWeights(), DoubleAgain()], example_inputs=(X,))
    assert [len(record.changes) for record in report_of(fast).passes] == [2, 2]
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))
        before = computed["doubled"]
        fast.first.weight.mul_(3)
        plain = plain_of(fast)
        torch.testing.assert_close(fast(X), plain(X))
        assert computed["doubled"] == before + 2


def test_one_capture_serves_all_sizes_of_the_open_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[list[Any]] = []
    real = Compilation._captured

    def counted(self: Compilation, graph: Any, inputs: Any, around: Any) -> Any:
        graphs.append([tuple(value.shape) for value in inputs if isinstance(value, Tensor)])
        return real(self, graph, inputs, around)

    monkeypatch.setattr(Compilation, "_captured", counted)
    model = Net().eval()
    fast = optimize(model, [DoubleWeights(), "simplify"], example_inputs=(X,))
    assert len(graphs) == 1
    twin = pickle.loads(pickle.dumps(fast))
    for one, known in ((fast, 0), (twin, 1)):
        graphs.clear()
        for rows in (2, 3, 7):
            x = torch.randn(rows, 4)
            with torch.no_grad():
                torch.testing.assert_close(one(x), model(x))
            assert not set(vars(x)) & {"_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking"}
        assert len(graphs) == known


def test_refresh_computes_them_anew_after_writes_that_torch_does_not_count(pair: Any) -> None:
    _, fast = pair
    with torch.no_grad():
        fast(X)
        fast.first.weight.data.mul_(2)
        fast.second.weight.detach().numpy()[:] = 1
        for one in (fast, copy.deepcopy(fast)):
            one.refresh()
            plain = plain_of(one)
            torch.testing.assert_close(one(X), plain(X))


def test_inputs_are_told_apart_where_the_names_of_their_calls_have_gaps() -> None:
    """Names have gaps after a change that was given up: the fourth input got the value of the second."""

    @dataclass(frozen=True)
    class ScaleWeights(GraphPass):
        """Replace linear(x, w, b) by linear(x, 2 * w, 2 * b) / 2; the second layer's change is given up at first."""

        name: ClassVar[str] = "scale-weights"

        def rewrite(self, graph: GraphRewriter, context: Context) -> None:
            for number, node in enumerate(graph.calls("linear")):
                for given_up in (True, False) if number == 1 else (False,):
                    with graph.change(node, f"{given_up}"):
                        usable = (lambda value: "given up") if given_up else None
                        weight = graph.derived(node, Doubled(), node.args[1], what="twice the weight")
                        bias = graph.derived(node, Doubled(), node.args[2], what="twice the bias", usable=usable)
                        double = graph.call(node, F.linear, (node.args[0], weight, bias))
                        graph.replace_call(node, torch.div, (double, 2))

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layers(x)
            return y

    torch.manual_seed(0)
    model = Three().eval()
    fast = optimize(model, [ScaleWeights()], example_inputs=(X,))
    assert [(record.status, len(record.changes)) for record in report_of(fast).passes] == [("applied", 3)]
    with torch.no_grad():
        for x in (X, X[:1]):
            torch.testing.assert_close(fast(x), model(x))


class Block(nn.Module):
    """Breaks the graph, so that torch.compile calls one graph for all equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x))
        return x if y.sum() > 1e9 else y


def test_each_module_that_shares_a_graph_is_recorded_and_has_its_own_values() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block() for _ in range(4))).eval(), torch.randn(2, 3, 4, 4)
    fast = optimize(model, ["fold-conv-bias", "fold-conv-bn"], example_inputs=(x,))
    # Also by a second pass, whose folds replace those of the first.
    bias, norm = ({change.where for change in record.changes} for record in report_of(fast).passes)
    assert (bias, norm) == ({f"{n}.conv" for n in range(4)}, {f"{n}.norm" for n in range(4)})
    again, changed = copy.deepcopy(fast), copy.deepcopy(model)
    with torch.no_grad():
        for one in (again, changed):
            one[1].conv.weight.mul_(2)
        torch.testing.assert_close(again(x), changed(x))
        # Only the last block is called, so its graph is captured for it.
        torch.testing.assert_close(again[3](x), model[3](x))
