"""Setups are compared with the step as it is: exact, within rounding, with declared figures, or refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tuned_steps import images, job_of, small_net, step

from optimizer.training import proof
from optimizer.training.proof import Proof
from optimizer.training.results import BIT_IDENTICAL, DECLARED, REFUSED, WITHIN_ROUNDING
from optimizer.training.setup import Setup

SOURCE = random.SystemRandom()


def batches_of(rows: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(rows, 3, 8, 8, generator=generator), torch.arange(rows) % 4) for _ in range(3)]


@pytest.fixture(scope="module")
def of_net() -> Proof:
    return Proof(job_of(small_net()), batches_of())


@pytest.mark.parametrize(
    ("setup", "standings"),
    [
        (Setup(set_to_none=False), {BIT_IDENTICAL}),
        (Setup(optimizer="foreach"), {BIT_IDENTICAL, WITHIN_ROUNDING}),
        (Setup(optimizer="fused"), {BIT_IDENTICAL, WITHIN_ROUNDING}),
        (Setup(channels_last=True), {BIT_IDENTICAL, WITHIN_ROUNDING}),
        (Setup(passes=("fold-conv-bias",)), {BIT_IDENTICAL, WITHIN_ROUNDING}),
        (Setup(passes=("insert-checkpoints:memory_budget=min",)), {BIT_IDENTICAL}),
        (Setup(precision="bf16"), {DECLARED}),
        (Setup(precision="bf16", optimizer="fused", channels_last=True), {DECLARED}),
    ],
)
def test_right_setups(of_net: Proof, setup: Setup, standings: set[str]) -> None:
    found = of_net.judge(setup)
    assert found.standing in standings, found
    assert not found.note


def test_the_figures(of_net: Proof) -> None:
    found = of_net.judge(Setup(channels_last=True)).differences
    assert found.keys() == {f"{kind}_{name}" for kind in ("loss", "gradient") for name in ("error", "noise", "times")}
    found = of_net.judge(Setup(precision="bf16")).differences
    assert 0 < found["loss_error"] < 0.05
    assert 0.99 < found["gradient_cosine"] <= 1


def test_a_wrong_model_is_refused(of_net: Proof, monkeypatch: pytest.MonkeyPatch) -> None:
    right = proof.made_model

    def wrong(*arguments: Any, **options: Any) -> nn.Module:
        model = right(*arguments, **options)
        with torch.no_grad():
            model[0].weight *= 1 + 1e-5  # type: ignore[index, operator]
        return model

    monkeypatch.setattr(proof, "made_model", wrong)
    found = of_net.judge(Setup(channels_last=True))
    assert found.standing == REFUSED
    assert "times its rounding noise" in found.note


class Scaled(torch.autograd.Function):
    """The same values with other gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.factor, None


@pytest.mark.parametrize(("setup", "factor"), [(Setup(channels_last=True), 1 + 1e-5), (Setup(precision="bf16"), 2.0)])
def test_wrong_gradients_are_refused(
    of_net: Proof, monkeypatch: pytest.MonkeyPatch, setup: Setup, factor: float
) -> None:
    right = proof.made_model

    def wrong(*arguments: Any, **options: Any) -> nn.Module:
        model = right(*arguments, **options)
        model.register_forward_hook(lambda _, args, output: Scaled.apply(output, factor))  # type: ignore[no-untyped-call]
        return model

    monkeypatch.setattr(proof, "made_model", wrong)
    found = of_net.judge(setup)
    assert found.standing == REFUSED
    assert "gradient" in found.note


def test_batch_norm_over_parts_is_refused(of_net: Proof) -> None:
    assert of_net.judge(Setup(accumulate=2)).standing == REFUSED


def test_a_lossy_setup_that_loses_too_much_is_refused() -> None:
    model = nn.Linear(4, 1)
    nn.init.constant_(model.bias, 1000.0)
    found = Proof(job_of(model, _cancelling, torch.randn(6, 4)), [torch.randn(6, 4)]).judge(Setup(precision="bf16"))
    assert found.standing == REFUSED
    assert "its loss is off by" in found.note.lower()


def _cancelling(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - 1000.0).square().mean()


class Wrong(torch.optim.SGD):
    """Its fused implementation forgets the momentum."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if group["fused"]:
                group |= {"fused": False, "momentum": 0.0}
        return super().step(closure)


def test_a_wrong_implementation_of_an_optimizer_is_refused() -> None:
    model = small_net()
    job = job_of(model, optimizer=Wrong(model.parameters(), 0.1, momentum=0.9))
    found = Proof(job, batches_of()).judge(Setup(optimizer="fused"))
    assert found.standing == REFUSED
    assert found.differences["update_times"] > 4
    assert found.note.startswith("The optimizer's update of ")


def test_random_numbers_of_torch_and_python_are_seeded() -> None:
    def own(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(F.dropout(model(x * random.uniform(0.9, 1.1)), 0.2), y)

    found = Proof(job_of(small_net(), own), batches_of())
    assert found.is_deterministic
    assert found.judge(Setup(channels_last=True)).standing == WITHIN_ROUNDING


def test_a_step_that_isnt_deterministic_is_measured_by_its_spread() -> None:
    def own(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return step(model, (x * SOURCE.uniform(0.99, 1.01), y))

    found = Proof(job_of(small_net(), own), batches_of())
    assert not found.is_deterministic
    assert any("the input of the model (Sequential) differs" in note for note in found.notes)
    assert found.judge(Setup(channels_last=True)).standing == WITHIN_ROUNDING
    assert found.judge(Setup(accumulate=2)).standing == REFUSED


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) * SOURCE.uniform(0.9, 1.1)
        return y


def test_the_module_that_isnt_deterministic_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Noisy())
    found = Proof(job_of(model, lambda model, x: model(x).square().mean(), torch.randn(4, 3)), [torch.randn(4, 3)])
    assert any("the output of 1 (Noisy) differs" in note for note in found.notes)


def test_tied_and_sparse_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(self.table(tokens)), tokens)

    tokens = torch.tensor([1, 5, 7])
    found = Proof(job_of(Tied(), lambda model, x: model(x), tokens), [tokens])
    assert found.judge(Setup(optimizer="fused")).standing in (BIT_IDENTICAL, WITHIN_ROUNDING)
    sparse = nn.Embedding(10, 4, sparse=True)
    job = job_of(sparse, lambda model, x: model(x).square().sum(), tokens, torch.optim.SGD(sparse.parameters(), 0.1))
    assert Proof(job, [tokens]).judge(Setup(optimizer="foreach")).standing in (BIT_IDENTICAL, WITHIN_ROUNDING)


def test_dicts_as_batches() -> None:
    job = job_of(
        small_net(), lambda model, batch: step(model, (batch["x"], batch["y"])), dict(zip("xy", images(), strict=True))
    )
    assert Proof(job, [job.batch]).judge(Setup(precision="bf16")).standing == DECLARED
