"""Compile a module that has a checkpointing plan."""

import copy
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from tiny_models import enliven
from torch import nn

from optimizer import optimize, report_of
from passes import InsertCheckpoints
from passes.checkpointing.compiled import CompiledCheckpoint


class Block(nn.Module):
    def __init__(self, *, breaks=False):
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.breaks = breaks

    def forward(self, x, *, scale=1.0):
        y = F.gelu(self.norm(self.first(x)))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + F.dropout(F.gelu(self.second(y)), 0.1, self.training) * scale


class Net(nn.Module):
    def __init__(self, *, breaks=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(breaks=breaks) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x.square().mean()


IMAGES = torch.randn(4, 8, 8, 8, generator=torch.Generator().manual_seed(0))


def planned(model, budget=0.5):
    return optimize(model, mode="training", passes=[InsertCheckpoints(budget)], example_inputs=(IMAGES,))


@cache
def model_and_result():
    """The model and its result, both untrained and cached: tests train only copies of them."""
    model = enliven(Net()).train()
    return model, planned(model)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def steps(model, *, fullgraph=True, backend="aot_eager"):
    """Gradients and buffers after three compiled steps, and the bytes saved for the last backward pass."""
    compiled = torch.compile(model, backend=backend, fullgraph=fullgraph)
    torch.manual_seed(1)
    for _ in range(3):
        loss = compiled(IMAGES)
        # A model that is compiled as one graph has one autograd node.
        saved = sum(tensor.nbytes for tensor in getattr(loss.grad_fn, "saved_tensors", ()))
        loss.backward()
    return [*(parameter.grad for parameter in model.parameters()), *model.buffers()], saved


def chosen(model):
    return [
        path for path, module in model.named_modules() if isinstance(module.__dict__.get("forward"), CompiledCheckpoint)
    ]


def assert_equal(expected, got):
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.slow
def test_compiled_steps_keep_less_and_are_the_same_to_the_bit():
    model, result = copy.deepcopy(model_and_result())
    expected, before = steps(copy.deepcopy(model))
    got, after = steps(result)
    assert_equal(expected, got)
    assert after < 0.6 * before
    assert [int(block.norm.num_batches_tracked) for block in result.blocks] == [3] * 6


@pytest.mark.parametrize("backend", ["eager", lambda graph, inputs: graph.forward], ids=["eager", "one of a user"])
def test_a_backend_that_would_draw_other_random_numbers_again_keeps_everything(backend):
    model, result = copy.deepcopy(model_and_result())
    assert chosen(result)
    assert_equal(*(steps(one, backend=backend)[0] for one in (copy.deepcopy(model), result)))


# After a graph break, the compiler itself inspects the tensors that it resumes with, which causes the warning.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_where_a_region_doesnt_fit_into_a_graph_the_statistics_move_once_too():
    """An eager checkpoint would update the statistics again in the backward pass."""
    model = enliven(Net(breaks=True)).train()
    result = copy.deepcopy(planned(model))
    assert chosen(result)
    assert_equal(steps(copy.deepcopy(model), fullgraph=False)[0], steps(result, fullgraph=False)[0])
    assert [int(block.norm.num_batches_tracked) for block in result.blocks] == [3] * 6


@pytest.mark.slow
def test_a_lower_budget_takes_more_modules_and_another_plan_takes_the_place_of_the_first():
    model = enliven(Net()).train()
    some = planned(model, 0.8)
    few, many = chosen(some), chosen(planned(model, 0.45))
    assert 0 < len(few) < len(many)
    assert all(path.startswith("blocks.") and path.count(".") == 1 for path in many)
    assert chosen(planned(some, 0.45)) == many
    assert chosen(planned(planned(model, 0.45), 0.8)) == few
    assert report_of(some).passes[-1].changes[-2].text.startswith("under torch.compile, blocks.0")


def test_nothing_is_a_checkpoint_where_there_are_no_modules_of_several_calls():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(30))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).tanh()
            return x.sum()

    result = optimize(
        enliven(Flat()), mode="training", passes=[InsertCheckpoints(0.5)], example_inputs=(torch.randn(16, 8),)
    )
    assert chosen(result) == []


def test_in_eager_and_in_eval_it_is_as_without():
    model, result = copy.deepcopy(model_and_result())
    assert_equal([model.eval()(IMAGES)], [result.eval()(IMAGES)])
    assert_equal([model(IMAGES)], [torch.compile(result, backend="aot_eager", fullgraph=True)(IMAGES)])
