"""Captured graphs compute with folded tensors directly."""

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import enliven
from torch import Tensor, nn

from optimizer import optimize, report_of
from passes.graph.backend import GRAPH_CALL, compilation_of

X = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Two folded pairs, one by modules and one by functions, and an operation that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.second, self.norm = nn.Conv2d(6, 4, 1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.first(x)).relu()
        y = F.conv2d(y, self.second.weight)
        norm = self.norm
        x.new_ones(2) * 2
        return F.batch_norm(y, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.1, norm.eps) * 1


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = enliven(Net()).eval()
    fast = optimize(model, ["fold-conv-bn", "simplify"], example_inputs=(X,))
    assert [len(record.changes) for record in report_of(fast).passes] == [2, 1]
    return model, fast


class Tagged(Tensor):
    """A user's tensor class; operations on it return the same class."""


class Doubling(Tensor):
    """A user's tensor class that doubles the result of `relu`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.Tensor.relu else result


@pytest.mark.parametrize("kind", [Tagged, Doubling])
def test_a_tensor_class_of_the_user_keeps_its_meaning(kind: type[Tensor], pair: Any) -> None:
    model, fast = pair
    folded = optimize(model, ["fold-conv-bn"], example_inputs=(X,))
    x = X.as_subclass(kind)
    # torch.compile's front end may return a plain tensor.
    assert type(model(x)) is kind
    for one in (folded, fast):
        got, wanted = (each(x).as_subclass(Tensor) for each in (one, model))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one(X), model(X), rtol=1e-4, atol=1e-5)


def test_a_result_that_is_dropped_takes_its_captured_graphs_along() -> None:
    def compiled() -> set[str]:
        gc.collect()
        return {name for name in globals() if name.startswith("__compiled_fn")}

    before = compiled()
    fast = optimize(enliven(Net()).eval(), ["simplify"], example_inputs=(X,))
    # torch adds its compiled functions to the globals of the forward.
    assert compiled() > before
    del fast
    assert compiled() == before


def test_hooks_that_transformers_registers_in_the_first_call_break_no_graph() -> None:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    two: dict[str, Any] = {"depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3]}
    two |= {"num_encoder_blocks": 2, "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [1, 1]}
    config = SegformerConfig(**two, decoder_hidden_size=8, num_labels=3)
    torch.manual_seed(0)
    # Its first call is that of `optimize`.
    model = SegformerForSemanticSegmentation(config).eval()
    hooked = "_output_capturing_hooks_installed"
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))

    fast = optimize(model, ["fold-conv-bn"], example_inputs=(x,))

    assert not any(hooked in vars(module) for module in (*model.modules(), *fast.modules()))
    copy = pickle.loads(pickle.dumps(fast))
    for result in (fast, copy):
        for size in (2, 3, 2):
            few = x[:1].repeat(size, 1, 1, 1)
            with torch.no_grad():
                torch.testing.assert_close(result(few).logits, model(few).logits, rtol=1e-4, atol=1e-5)
        assert vars(result.segformer)[hooked], "a forward of this transformers registers no hooks: take another model"
        compilation = compilation_of(vars(result)[GRAPH_CALL])
        assert len(compilation.graphs) == 1
        assert not compilation.compiled.is_split


class Branch(nn.Module):
    """A branch on the values of a tensor, which breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 1e6 else self.inner(x)


class Loop(nn.Module):
    """torch.compile runs a loop as written if a graph breaks in it, and doesn't capture torch's own layers there."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 1)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)), Branch(), Branch()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("name", ["fold-conv-bn", "simplify"])
def test_modules_outside_of_all_graphs_are_named(name: str) -> None:
    """Two equal modules share the graph of `Branch`, which has inputs of the second one in its second call."""
    fast = optimize(enliven(Loop()).eval(), [name], example_inputs=(torch.randn(2, 3, 8, 8),))

    (record,) = report_of(fast).passes
    outside = {skip.where for skip in record.skips if "outside of the graphs that torch.compile captures" in skip.text}
    assert outside == {"stem", "blocks.0"}


class Recurrent(nn.Module):
    """Two convolutions with BatchNorms, before and after a recurrent layer, as in text recognition and speech."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6))
        self.layer = layer
        width = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
        self.after = nn.Sequential(nn.Conv1d(width, 3, 3), nn.BatchNorm1d(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(self.before(x).transpose(1, 2))[0].transpose(1, 2))


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True),
        nn.LSTM(6, 5, batch_first=True, proj_size=4, bias=False),
        nn.GRU(6, 5, batch_first=True),
        nn.RNN(6, 5, batch_first=True, nonlinearity="relu"),
    ],
    ids=str,
)
def test_a_recurrent_layer_breaks_no_graph(layer: nn.RNNBase) -> None:
    model, other = (enliven(Recurrent(copy.deepcopy(layer))).eval() for _ in range(2))
    x = torch.randn(3, 4, 12)

    fast = optimize(model, ["fold-conv-bn"], example_inputs=(x,))

    assert len(compilation_of(vars(fast)[GRAPH_CALL]).graphs) == 1
    assert [change.where for change in report_of(fast).passes[0].changes] == ["before.1", "after.1"]
    for expected in (model, other):
        fast.load_state_dict(expected.state_dict())
        for rows in (x, x[:1], x.repeat(2, 1, 1)):
            with torch.no_grad():
                torch.testing.assert_close(fast(rows), expected(rows), rtol=1e-4, atol=1e-5)
