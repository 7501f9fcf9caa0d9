"""insert-checkpoints: training within a memory budget, with the same results to the bit."""

import copy
import functools
import json
import logging
import math
import re

import pytest
import torch
import torch.nn.functional as F
from random_steps import RandomStep, Step, rows_of
from tiny_models import Net, enliven
from torch import nn
from torch._higher_order_ops import while_loop
from torch._subclasses import FakeTensor
from training_models import Scaled, assert_equal, peak_of, steps

from optimizer import optimize, report_of
from passes import InsertCheckpoints
from passes.checkpointing import budget as budgets
from passes.checkpointing import profile
from passes.checkpointing.budget import bytes_of
from passes.checkpointing.choice import Choice
from passes.checkpointing.forward import CheckpointedForward
from passes.checkpointing.solve import Solver
from passes.errors import PassOptionError, RequirementNotMet
from passes.registry import make_passes

# ------------------------------------------------------------------------------------- models


class Block(nn.Module):
    """A residual block that writes in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])

    def forward(self, x):
        y = F.relu(self.norms[0](self.first(x)), inplace=True)
        y = self.norms[1](self.second(F.dropout(y, 0.1, self.training)))
        y += x
        return F.relu(y, inplace=True)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(8) for _ in range(3)))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, *, mask=None):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        dropout = 0.1 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.1, self.training)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Words(nn.Module):
    """Returns its own loss together with the logits; its weights are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.layers = nn.ModuleList([Layer(16) for _ in range(3)])
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens, mask=None):
        x = self.table(tokens)
        with torch.no_grad():
            scale = 1 / x.norm(dim=-1, keepdim=True)
        x = x * scale
        for layer in self.layers:
            x = layer(x, mask=mask)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), "logits": logits}


class Looking(nn.Module):
    """Branches on a value, which fake tensors don't have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(16, 16), nn.GELU())))

    def forward(self, x):
        y = self.layers(x)
        return y * 2 if y.sum().item() < 1e9 else y


MODELS = {
    "images": (Images, lambda: (torch.randn(4, 3, 16, 16),), {}),
    "words": (Words, lambda: (torch.randint(0, 40, (4, 24)),), {"mask": torch.ones(24, 24).tril().bool()}),
    "looking": (Looking, lambda: (torch.randn(128, 16),), {}),
}


def made(name):
    torch.manual_seed(0)
    cls, inputs, kwargs = MODELS[name]
    return enliven(cls()).train(), inputs(), kwargs


def planned(name, model=None, **options):
    if model is None:
        return copy.deepcopy(planned_once(name, *options.items()))
    _, inputs, kwargs = made(name)
    return optimize(
        model, [InsertCheckpoints(**options)], mode="training", example_inputs=inputs, example_kwargs=kwargs
    )


@functools.cache
def planned_once(name, *options):
    return planned(name, made(name)[0], **dict(options))


def share_again(result):
    """The percentage of the forward's FLOPs that is recomputed, read from the report."""
    return float(re.search(r"computes ([\d.]+) %", report_of(result).passes[-1].changes[-1].text)[1])


# ------------------------------------------------------------------------------------- results and budget


@pytest.mark.parametrize(
    ("name", "budget"),
    [("images", "min"), ("words", 0.6), ("looking", "min")],
)
def test_losses_gradients_and_buffers_are_the_same_to_the_bit(name, budget):
    model, inputs, kwargs = made(name)
    result = planned(name, memory_budget=budget)
    assert report_of(result).passes[-1].status == "applied"
    assert_equal(steps(copy.deepcopy(model), *inputs, **kwargs), steps(copy.deepcopy(result), *inputs, **kwargs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "strategy", "selective"), [(0.6, "optimal", True), (0.7, "optimal", False), (0.7, "uniform", True)]
)
@pytest.mark.parametrize("name", MODELS)
def test_a_real_step_keeps_to_the_budget(name, budget, selective, strategy):
    model, inputs, kwargs = made(name)
    result = planned(name, memory_budget=budget, selective=selective, strategy=strategy)
    assert peak_of(result, inputs, kwargs) <= budget * peak_of(model, inputs, kwargs)


def test_the_report_shows_the_plan_beside_others():
    model, inputs, kwargs = made("words")
    result = planned("words", memory_budget=0.6)
    report = report_of(result)
    detail = report.passes[-1].detail
    assert detail.eager.peak == peak_of(model, inputs, kwargs)
    assert detail.chosen.peak == peak_of(result, inputs, kwargs)
    assert sum(region.dropped for region in detail.regions) > 0.4 * detail.eager.peak
    # Less memory costs more recomputation.
    assert sorted(detail.curve, key=lambda point: point.peak) == sorted(detail.curve, key=lambda point: -point.flops)
    assert "uniform, √n runs" in str(report)
    assert json.loads(json.dumps(report.to_json()))["passes"][-1]["detail"]["peak_bytes"] == detail.chosen.peak


@pytest.mark.slow
def test_the_optimal_strategy_computes_less_again_than_the_uniform_one():
    optimal, uniform = (share_again(planned("words", memory_budget=0.5, strategy=s)) for s in ("optimal", "uniform"))
    assert optimal < uniform


@pytest.mark.slow
def test_bytes_are_a_budget_too():
    model, inputs, kwargs = made("words")
    peak = peak_of(model, inputs, kwargs)
    for budget in (f"{0.6 * peak / 1024:.3f}KiB", int(0.6 * peak)):
        assert peak_of(planned("words", memory_budget=budget), inputs, kwargs) <= 0.6 * peak


def test_a_budget_that_the_step_keeps_to_by_itself_changes_nothing_but_is_seen_to():
    result = planned("words", memory_budget=1.0)
    record = report_of(result).passes[-1]
    assert record.status == "applied"
    assert "100.0 %" in record.changes[-1].text
    assert share_again(result) == 0


@pytest.mark.slow
def test_a_budget_out_of_reach_raises_and_names_the_lowest_that_isnt():
    with pytest.raises(RequirementNotMet, match=r"can't meet memory_budget=0.01") as raised:
        planned("words", memory_budget=0.01)
    lowest = float(re.search(r"memory_budget=(0\.\d+) or", str(raised.value))[1])
    model, inputs, kwargs = made("words")
    result = planned("words", memory_budget=lowest)
    assert peak_of(result, inputs, kwargs) <= lowest * peak_of(model, inputs, kwargs)
    with pytest.raises(RequirementNotMet):
        planned("words", memory_budget=0.9 * lowest)


class Activation(nn.Module):
    def forward(self, x):
        return Scaled.apply(x, 0.3)


def row(norm, activation=nn.Tanh):
    parts = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), norm(4), activation()) for _ in range(3)]
    return nn.Sequential(*parts).train(), torch.randn(2, 4, 8, 8)


@pytest.mark.parametrize(
    ("norm", "activation", "why"),
    [
        (
            nn.BatchNorm2d,
            Activation,
            "batch_norm in 0.1 and 5 more, because a custom autograd function, or a checkpoint",
        ),
        (nn.SyncBatchNorm, nn.Tanh, "because a SyncBatchNorm communicates with other processes."),
    ],
)
def test_the_error_says_what_cannot_be_recomputed(monkeypatch, norm, activation, why):
    monkeypatch.setattr(profile, "_is_in_several_processes", lambda module: True)
    model, x = row(norm, activation)
    with pytest.raises(RequirementNotMet, match=re.escape(why)):
        optimize(model, [InsertCheckpoints(0.1)], example_inputs=(x,), mode="training")


class Larger(torch.autograd.Function):
    """Saves more for the backward pass with real tensors than with fake ones, as a kernel with its own formats may."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.repeat(1 if isinstance(x, FakeTensor) else 8, 1))
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2 + 0 * ctx.saved_tensors[0][: len(gradient)]


@pytest.mark.parametrize("budget", [0.7, "3000B"])
def test_a_real_step_that_takes_more_than_a_fake_one_keeps_to_the_budget_too(budget):
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

        def forward(self, x):
            x = Larger.apply(self.layers[0](x))
            for layer in self.layers[1:]:
                x = layer(x).tanh().sin()
            return x

    model, x = enliven(Keeping()).train(), torch.randn(4, 8)
    result = optimize(model, [InsertCheckpoints(budget)], mode="training", example_inputs=(x,))
    eager = peak_of(model, (x,), {})
    assert eager > 3000
    assert peak_of(result, (x,), {}) <= (0.7 * eager if budget == 0.7 else 3000)


@pytest.mark.slow
def test_where_nothing_fits_that_was_told_to_the_lowest_is_taken(monkeypatch):
    monkeypatch.setattr(Solver, "solve_uniform", lambda solver, budget: Choice.nothing(solver.profile))
    model, inputs, kwargs = made("words")
    result = planned("words", memory_budget=0.8, strategy="uniform")
    assert peak_of(result, inputs, kwargs) <= 0.8 * peak_of(model, inputs, kwargs)
    with pytest.raises(RequirementNotMet, match="the lowest is"):
        planned("words", memory_budget=0.01, strategy="uniform")


# ------------------------------------------------------------------------------------- the resulting module


def test_names_tree_and_state_are_the_originals():
    model, *_ = made("images")
    result = planned("images", model, memory_budget=0.6)
    assert type(result) is Images
    assert list(result.state_dict()) == list(model.state_dict())
    assert [name for name, _ in result.named_modules()] == [name for name, _ in model.named_modules()]
    assert all(a is b for a, b in zip(result.parameters(), model.parameters(), strict=True))
    assert "forward" not in model.__dict__
    model.load_state_dict(result.state_dict())


def test_eval_and_no_grad_keep_nothing_and_plan_nothing(monkeypatch):
    model, inputs, _kwargs = made("images")
    result = planned("images", memory_budget=0.6)
    expected = copy.deepcopy(model).eval()(*inputs)
    monkeypatch.setattr("passes.checkpointing.forward.Tape", None)
    assert torch.equal(result.eval()(*inputs), expected)
    with torch.no_grad():
        result.train()(*inputs)


def test_a_model_in_eval_is_planned_as_it_trains():
    model, inputs, kwargs = made("images")
    result = planned("images", copy.deepcopy(model).eval(), memory_budget=0.6)
    assert not result.training
    assert peak_of(result.train(), inputs, kwargs) <= 0.6 * peak_of(model, inputs, kwargs)


def test_with_a_fold_in_front():
    model, inputs, kwargs = made("images")
    for block in model.blocks:
        block.first.bias = nn.Parameter(torch.randn(8))
    passes = ["fold-conv-bias", InsertCheckpoints(0.6)]
    result = optimize(model, passes, mode="training", example_inputs=inputs)
    assert [record.status for record in report_of(result).passes] == ["applied"] * 2
    # The plan watches the single operations, so the forward runs as it was written.
    assert "without the changes of fold-conv-bias" in report_of(result).passes[1].skips[0].text
    assert_equal(steps(copy.deepcopy(model), *inputs, **kwargs), steps(copy.deepcopy(result), *inputs, **kwargs))
    assert peak_of(result, inputs, kwargs) <= 0.6 * peak_of(model, inputs, kwargs)


@pytest.mark.slow
def test_another_budget_on_a_result_replaces_the_plan():
    model, inputs, kwargs = made("words")
    loose = planned("words", memory_budget=0.8)
    tight = planned("words", loose, memory_budget=0.5)
    assert peak_of(tight, inputs, kwargs) <= 0.5 * peak_of(model, inputs, kwargs)
    assert not isinstance(tight.__dict__["forward"].inner, CheckpointedForward)
    assert peak_of(loose, inputs, kwargs) > 0.5 * peak_of(model, inputs, kwargs)


def test_a_part_with_a_plan_of_its_own_is_planned_anew_with_the_whole(caplog):
    part, inputs, kwargs = made("looking")
    whole = nn.Sequential(planned("looking", part, memory_budget="min"), nn.Tanh())
    plain = nn.Sequential(part, nn.Tanh())
    result = planned("looking", whole, memory_budget=0.7)
    peak = peak_of(copy.deepcopy(plain), inputs, kwargs)
    assert report_of(result).passes[-1].detail.eager.peak == peak
    assert peak_of(copy.deepcopy(result), inputs, kwargs) <= 0.7 * peak
    assert_equal(steps(copy.deepcopy(plain), *inputs, **kwargs), steps(copy.deepcopy(result), *inputs, **kwargs))
    assert not caplog.text


@pytest.mark.slow
def test_exported_code_computes_the_same():
    (inputs, result) = made("images")[1], planned("images", memory_budget=0.6).eval()
    torch.testing.assert_close(torch.export.export(result, inputs).module()(*inputs), result(*inputs))


# ------------------------------------------------------------------------------------- what can't be planned


class Bold(nn.Module):
    """Takes another branch for fake tensors, because it checks the class of its input."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x)) if type(x) is torch.Tensor else layer(x).sin().cos()
        return x.square().mean()


def test_a_plan_whose_calls_dont_come_is_made_again_on_real_numbers(caplog):
    model, inputs = enliven(Bold()).train(), (torch.randn(16, 8),)
    with caplog.at_level(logging.WARNING):
        result = optimize(model, [InsertCheckpoints(0.5)], mode="training", example_inputs=inputs)
        result(*inputs).backward()
    assert not caplog.text
    assert result.__dict__["forward"].plan.names.count("gelu") == 8
    peak = report_of(result).passes[-1].detail.eager.peak
    assert peak_of(result, inputs, {}) <= peak / 2


def test_a_plan_may_be_for_more_rows_than_the_example_inputs_have():
    model, inputs, _ = made("images")
    few, many = inputs[0][:2], torch.randn(24, *inputs[0].shape[1:])
    result = optimize(model, [InsertCheckpoints(0.5, batch_size=24)], mode="training", example_inputs=(few,))
    detail = report_of(result).passes[-1].detail
    assert peak_of(model, (many,), {}) == detail.eager.peak
    assert peak_of(result, (many,), {}) == detail.chosen.peak <= detail.eager.peak / 2


def test_other_rows_cant_be_planned_for_where_the_forward_looks_at_numbers():
    model = Net(lambda m, x: m.layer(x).exp() if x.sum() > 0 else m.layer(x), layer=nn.Linear(8, 8))
    with pytest.raises(RequirementNotMet, match="batch_size=64 is planned on tensors without values"):
        optimize(model, [InsertCheckpoints(batch_size=64)], mode="training", example_inputs=(torch.randn(4, 8),))


_NO_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1099511627776 bytes. Error code 12"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError(_NO_MEMORY), "there isn't enough memory for a step: use example inputs with fewer rows"),
        (torch.OutOfMemoryError("CUDA out of memory."), "there isn't enough memory for a step"),
        (MemoryError(), "there isn't enough memory for a step"),
        (KeyError("color"), "it raises KeyError: 'color'"),
    ],
)
def test_a_step_that_cant_be_run_is_refused_in_one_sentence(error, text):
    class Failing(Looking):
        def forward(self, x):
            seen = super().forward(x)
            if x.requires_grad:
                raise error
            return seen

    # Only the pass makes the input require gradients, so only its training step fails.
    class Asking(InsertCheckpoints):
        def run(self, program, context):
            context.example_calls[0][0][0].requires_grad_()
            return super().run(program, context)

    model, inputs, _ = made("looking")
    failing = Failing()
    failing.load_state_dict(model.state_dict())
    with pytest.raises(RequirementNotMet) as raised:
        optimize(failing, [Asking()], mode="training", example_inputs=inputs)
    assert re.fullmatch(
        r"insert-checkpoints can't plan a training step of Failing: without values its forward raises \w+: [^\n]+, and on"
        rf" real tensors {re.escape(text)}[^\n]*\.",
        str(raised.value),
    )


def test_a_model_without_anything_to_train_is_refused():
    model = nn.Linear(3, 3).requires_grad_(False)
    with pytest.raises(
        RequirementNotMet, match="insert-checkpoints can't plan a training step of Linear: none of its outputs"
    ):
        optimize(model, [InsertCheckpoints()], mode="training", example_inputs=(torch.randn(2, 3),))


def chosen(m, x):
    return torch.cond(x.sum() > 0, lambda rows: m.linear(rows), lambda rows: rows.cos(), (x,))


def looped(m, x):
    return while_loop(lambda i, _: i < 3, lambda i, rows: (i + 1, rows.sin()), (torch.tensor(0), x.detach()))[1] + x


@pytest.mark.parametrize(("run", "name"), [(chosen, "cond"), (looped, "while_loop")])
def test_an_operator_that_calls_other_functions_is_refused_with_its_module(run, name):
    model = nn.Sequential(nn.Linear(3, 3), Net(run, linear=nn.Linear(3, 3)))
    with pytest.raises(RequirementNotMet) as raised:
        optimize(model, [InsertCheckpoints()], mode="training", example_inputs=(torch.randn(4, 3),))
    assert str(raised.value) == (
        f"insert-checkpoints can't plan a training step of Sequential: its forward calls torch's `{name}` in `1` "
        "(Net), and the pass can't see what such an operator keeps for the backward pass: leave the pass "
        "out, or call `torch.utils.checkpoint.checkpoint` on other modules yourself."
    )


def test_inference_and_no_example_inputs_are_refused():
    model, inputs, _ = made("images")
    with pytest.raises(RequirementNotMet, match="for training"):
        optimize(model, [InsertCheckpoints()], example_inputs=inputs)
    with pytest.raises(RequirementNotMet, match="add example inputs"):
        optimize(model, [InsertCheckpoints()], mode="training")


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, None, "", "12", "12 parsecs", "0GiB", float("nan"), float("inf")])
def test_a_budget_that_is_none_is_refused(budget):
    with pytest.raises(ValueError, match="memory_budget must be a share of the eager peak"):
        InsertCheckpoints(memory_budget=budget)


def test_a_budget_of_less_than_a_byte_is_one_byte():
    assert bytes_of(1e-12, 100) == bytes_of("0.5B", 100) == 1


def test_options_as_text():
    assert make_passes(["insert-checkpoints"], "training") == [InsertCheckpoints(0.5)]
    assert InsertCheckpoints.from_options({"memory_budget": "0.4"}) == InsertCheckpoints(0.4)
    options = {"memory_budget": "12GiB", "strategy": "uniform"}
    assert InsertCheckpoints.from_options(options) == InsertCheckpoints("12GiB", "uniform")
    with pytest.raises(PassOptionError, match="memory_budget must be a share"):
        InsertCheckpoints.from_options({"memory_budget": "lots"})
    for options, sentence in (
        ({"strategy": "greedy"}, "strategy must be 'optimal' or 'uniform'"),
        ({"selective": "no"}, "selective must be True or False, not 'no'"),
        ({"units": ["layers.*"]}, "units must be a string of module paths"),
        *(({"batch_size": size}, "a whole number of rows of 1 or more, not ") for size in (0, -3, 2.0, "8", True)),
    ):
        with pytest.raises(ValueError, match=sentence):
            InsertCheckpoints(**options)


@pytest.mark.slow
def test_the_lowest_budget_that_is_named_is_one_of_real_tensors() -> None:
    """In this step, real tensors need more memory than fake ones show, because kernels return other memory formats."""
    calls = "attention attention gelu no-gradient written-to leaky gelu attention halves halves view leaky view norm-of-layers"
    numbers = [(0, 1) if number == 1 else (0, 0) for number in range(14)]
    operations = [(name.replace("-", " "), *pair) for name, pair in zip(calls.split(), numbers, strict=True)]
    step = Step(tuple(operations), (), frozenset(), 0)
    model, rows = enliven(RandomStep(step)).train(), rows_of(step)

    def optimized(budget: float) -> nn.Module:
        item = InsertCheckpoints(budget, selective=False)
        return optimize(model, [item], mode="training", example_inputs=(rows,))

    with pytest.raises(RequirementNotMet) as refused:
        optimized(0.5)
    lowest = re.search(r"memory_budget=([\d.]+) or", str(refused.value))
    assert lowest is not None
    assert optimized(float(lowest[1])).report.passes[0].status == "applied"


# ------------------------------------------------------------------------------------- what the device has free


def fitting(monkeypatch, free, name="images"):
    """Optimize with the budget "fit" on a device with so many free bytes; returns the result and its model."""
    model, inputs, kwargs = made(name)
    monkeypatch.setattr(budgets, "_free_bytes", lambda device: free)
    return planned(name, model, memory_budget="fit"), model, inputs, kwargs


def trained_bytes(model):
    return sum(one.nbytes for one in model.parameters() if one.requires_grad)


def test_fit_takes_what_the_device_has_free_and_says_how_much(monkeypatch):
    model, inputs, kwargs = made("images")
    share = int(0.7 * peak_of(model, inputs, kwargs))
    result, model, inputs, kwargs = fitting(monkeypatch, math.ceil((share + 3 * trained_bytes(model)) / 0.9))
    assert peak_of(result, inputs, kwargs) <= share + 1
    text = report_of(result).passes[-1].changes[-1].text
    assert re.search(r"the budget is [\d.]+ KiB: [\d.]+ KiB of cpu are free, of which a tenth stays free", text)
    assert share_again(result) > 0


def test_fit_recomputes_nothing_where_everything_fits(monkeypatch):
    result, *_ = fitting(monkeypatch, 2**40)
    assert share_again(result) == 0


@pytest.mark.parametrize(
    ("free", "why"), [(1000, r"1\.0 KiB of cpu are free"), (None, "doesn't tell how much memory cpu")]
)
def test_fit_refuses_where_nothing_is_left_or_known(monkeypatch, free, why):
    with pytest.raises(RequirementNotMet, match=rf'can\'t find a budget for memory_budget="fit": .*{why}.*"12GiB"'):
        fitting(monkeypatch, free)


def test_the_free_memory_of_this_machine_is_known():
    assert 2**20 < budgets._free_bytes(torch.device("cpu")) < 2**50
    assert budgets._free_bytes(torch.device("meta")) is None
