"""Steps of a setup run on copies, and a step that can't be tuned is refused with a sentence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from tuned_steps import images, job_of, small_net, step

from optimize_export.errors import LoadError, OptimizeExportError, UsageError
from optimizer.training.setup import Setup
from optimizer.training.stepping import (
    RunnableStep,
    StepModule,
    Unavailable,
    check_optimizer,
    check_step,
    loss_from,
    made_model,
    made_step,
    rows_of,
    with_rows,
)


def test_a_step_trains_a_copy_as_a_loop_would() -> None:
    model = small_net()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    job = job_of(model, optimizer=optimizer)
    run = RunnableStep(job, Setup(), made_model(job, Setup()), job.batch, learns=True)
    losses = [float(run()) for _ in range(3)]
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(one.grad is None for one in model.parameters())
    assert not optimizer.state
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = step(model, images())
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert losses == expected


def test_a_timed_step_keeps_its_weights() -> None:
    job = job_of(small_net())
    run = made_step(job, Setup())
    run()
    assert all(torch.equal(a, b) for a, b in zip(run.module.parameters(), job.model.parameters(), strict=True))


def test_a_step_that_writes_to_its_batch_gets_a_new_one() -> None:
    seen: list[float] = []

    def own(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.append(float(x[0, 0]))
        x.mul_(0.5)
        return model(x).square().mean()

    batch = torch.ones(2, 3)
    made_step(job_of(nn.Linear(3, 2), own, batch), Setup())()
    assert set(seen) == {1.0}
    assert torch.equal(batch, torch.ones(2, 3))


def test_the_state_of_the_optimizer_is_taken_along() -> None:
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, images()).backward()
    optimizer.step()
    job = job_of(model, optimizer=optimizer)
    run = made_step(job, Setup(optimizer="fused"))
    first = next(iter(run.module.parameters()))
    assert run.optimizer.state[first]["step"] == 2
    assert run.optimizer.param_groups[0]["fused"] is True
    assert optimizer.state[next(model.parameters())]["step"] == 1


def test_each_setup_runs() -> None:
    job = job_of(small_net())
    plain = float(made_step(job, Setup())())
    for setup in (
        Setup(precision="bf16"),
        Setup(precision="tf32"),
        Setup(channels_last=True),
        Setup(optimizer="foreach"),
        Setup(passes=("fold-conv-bias",)),
        Setup(set_to_none=False, cudnn_benchmark=True),
    ):
        assert float(made_step(job, setup)()) == pytest.approx(plain, rel=1e-2)


def test_checkpoints_lower_the_peak() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(6)))
    job = job_of(model, lambda model, x: model(x).square().mean(), torch.randn(64, 16))
    plain = made_step(job, Setup()).peak()
    least = made_step(job, Setup(passes=("insert-checkpoints:memory_budget=min",))).peak()
    assert plain is not None
    assert least is not None
    assert least < 0.7 * plain


def test_parts_of_a_batch_add_up_to_its_mean() -> None:
    model = nn.Linear(3, 2)
    job = job_of(model, lambda model, x: model(x).square().mean(), torch.randn(8, 3))
    (whole,), (parts,) = (StepModule(job, model, setup)(job.batch) for setup in (Setup(), Setup(accumulate=4)))
    assert parts.item() == pytest.approx(whole.item())


def test_rows_of_batches() -> None:
    assert rows_of(images(6)) == 6
    assert rows_of({"x": torch.ones(5, 2), "label": torch.ones(5), "scale": torch.tensor(2.0), "name": "a"}) == 5
    assert rows_of((torch.ones(5, 2), torch.ones(2, 7))) == 0
    part = with_rows({"x": torch.arange(5), "scale": torch.tensor(2.0)}, 1, 3)
    assert part["x"].tolist() == [1, 2]
    assert part["scale"].dim() == 0
    assert with_rows(torch.arange(3), 0, 5).tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("wrap", [lambda loss: {"loss": loss}, lambda loss: (loss, 1), lambda loss: loss.reshape(1)])
def test_the_loss_is_found(wrap: Any) -> None:
    assert loss_from(wrap(torch.ones((), requires_grad=True))).shape == ()


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (None, "return the loss"),
        (1.5, "return the loss"),
        (torch.ones(3, requires_grad=True), r"shape \(3,\)"),
        (torch.ones(()), "needs no gradient"),
    ],
)
def test_what_is_no_loss_is_refused(result: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        loss_from(result)


def updating(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = step(model, batch)
    with torch.no_grad():
        model[0].weight -= 0.1  # type: ignore[index, operator]
    return loss


def running_backward(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = step(model, batch)
    loss.backward(retain_graph=True)
    return loss


def raising(model: nn.Module, batch: Any) -> torch.Tensor:
    raise ValueError("no such label")


@pytest.mark.parametrize(
    ("own", "error", "says"),
    [
        (updating, UsageError, "changes 0.weight itself"),
        (running_backward, UsageError, "runs backward itself"),
        (raising, LoadError, "raises at .*: ValueError: no such label"),
    ],
)
def test_a_step_that_does_more_or_fails_is_refused(own: Any, error: type[OptimizeExportError], says: str) -> None:
    model = small_net()
    with pytest.raises(error, match=says):
        check_step(job_of(model, own), model)


def test_a_step_that_trains_a_global_model_is_refused_and_undone() -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = copy.deepcopy(model.state_dict())

    def own(_: nn.Module, batch: Any) -> torch.Tensor:
        loss = step(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(UsageError, match=r"changes 0\.weight.* itself"):
        check_step(job_of(model, own), model)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(one.grad is None for one in model.parameters())
    with pytest.raises(UsageError, match="not a global"):
        check_step(job_of(model, lambda _, batch: step(model, batch)), model)


def test_what_isnt_trained_is_noted() -> None:
    model = small_net()
    model.register_parameter("extra", nn.Parameter(torch.ones(2)))
    model[0].requires_grad_(False)
    model.eval()
    notes = check_step(job_of(model), model)
    assert [each.split()[0] for each in notes] == ["The", "2", "The"]


def test_optimizers_that_cant_be_tuned() -> None:
    model = small_net()
    with pytest.raises(UsageError, match="LBFGS calls the step itself"):
        check_optimizer(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UsageError, match="aren't the model's"):
        check_optimizer(model, torch.optim.SGD(small_net().parameters(), 0.1))
    with pytest.raises(UsageError, match="nothing to train"):
        check_optimizer(small_net().requires_grad_(False), None)
    made = check_optimizer(model, lambda parameters: torch.optim.Rprop(parameters))
    with pytest.raises(Unavailable, match="Rprop has no fused implementation"):
        made_step(job_of(model, optimizer=made), Setup(optimizer="fused"))


def test_what_torch_refuses_is_unavailable() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    job = job_of(model, lambda model, x: model(x).sum(), torch.tensor([1, 2]), torch.optim.SGD(model.parameters(), 0.1))
    made_step(job, Setup())
    with pytest.raises(Unavailable, match="sparse"):
        made_step(job, Setup(optimizer="fused"))
    with pytest.raises(Unavailable, match="methods or parts of the model"):
        made_step(
            job_of(model, lambda model, x: model.forward(x).sum(), torch.tensor([1, 2]), job.optimizer),
            Setup(passes=("fold-conv-bias",)),
        )
