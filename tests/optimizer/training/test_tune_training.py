"""`tune_training` measures, proves and combines, and leaves everything of the caller as it was."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from tuned_steps import as_timed, images, job_of, mlp, of_mlp, of_rows, small_net, step, without_slow_choices

from optimize_export import TrainingTuning, tune_training
from optimize_export.errors import LoadError, UsageError
from optimizer.training import batches, tuner
from optimizer.training.choices import FUSION, Choice
from optimizer.training.proof import Judgement, Proof
from optimizer.training.results import BIT_IDENTICAL, DECLARED, NOT_PROVEN, ORIGINAL, REFUSED, WITHIN_ROUNDING
from optimizer.training.setup import Setup
from optimizer.training.stepping import RunnableStep
from optimizer.training.tuner import conflict


def test_nothing_of_the_caller_changes() -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step(model, images()).backward()
    optimizer.step()
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    gradients = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    batch = images()
    settings = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark, torch.is_grad_enabled()
    drawn, of_python = torch.get_rng_state(), random.getstate()
    tuning = tune_training(model, step, batch, optimizer=optimizer, tune_seconds=4)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())
    assert all(torch.equal(a.grad, b) for a, b in zip(model.parameters(), gradients, strict=True) if a.grad is not None)
    assert str(optimizer.state_dict()) == str(state)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert random.getstate() == of_python
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark, torch.is_grad_enabled()) == settings
    assert all(torch.equal(a, b) for a, b in zip(batch, images(), strict=True))
    assert tuning.candidates[0].standing == ORIGINAL
    assert tuning.recommended in (Setup(), tuning.candidates[-1].setup)
    assert tuning.optimizer == "SGD"
    assert (tuning.model, tuning.device, tuning.batch) == ("Sequential", "cpu", 8)
    assert TrainingTuning.from_json(json.loads(json.dumps(tuning.to_json()))) == tuning
    # Its name says what else pays, such as "torch.compile with fused optimizer".
    (untried,) = (row for name, row in of_rows(tuning).items() if name.split(" with ")[0] == "torch.compile")
    assert untried.standing == NOT_PROVEN
    assert untried.note.startswith("Not tried: it takes about")


def test_what_pays_is_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_choices(monkeypatch)
    gains = {"fused": 0.9, "foreach": 0.95, "bf16": 0.5}
    as_timed(
        monkeypatch,
        lambda setup: (
            gains.get(setup.optimizer, 1.0)
            * gains.get(setup.precision, 1.0)
            * (0.8 if setup.channels_last and setup.precision != "bf16" else 1.0)
        ),
    )
    tuning = tune_training(small_net(), step, images(), tune_seconds=60)
    rows = of_rows(tuning)
    assert tuning.recommended == Setup(precision="bf16", optimizer="fused")
    assert rows["bf16 autocast"].standing == DECLARED
    assert rows["bf16 autocast"].taken
    assert not rows["channels_last"].taken
    assert rows["channels_last"].note == "Not taken: it isn't surely faster on top of bf16 autocast."
    assert rows["foreach optimizer"].note == "Not taken: fused optimizer, which excludes it, gains more."
    last = tuning.candidates[-1]
    assert (last.name, last.standing, last.taken) == ("recommended", DECLARED, True)
    assert last.speedup is not None
    assert last.speedup.median == pytest.approx(1 / 0.45)


def test_a_compiler_is_tried_on_top_of_what_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    every = tuner.choices_for

    def choices(job: Any) -> list[Choice]:
        """The optimizers, and a quick choice in place of one that compiles."""
        return [
            *(one for one in every(job) if one.setup.optimizer != "as-is"),
            Choice(FUSION, Setup(channels_last=True)),
        ]

    monkeypatch.setattr(tuner, "choices_for", choices)
    as_timed(
        monkeypatch, lambda setup: (0.8 if setup.optimizer == "fused" else 1) * (0.5 if setup.channels_last else 1)
    )
    tuning = tune_training(small_net(), step, images(), tune_seconds=60)
    assert tuning.recommended == Setup(optimizer="fused", channels_last=True)
    last = tuning.candidates[-1]
    assert last.name == "jit-fusion with fused optimizer"
    assert last.standing in (BIT_IDENTICAL, WITHIN_ROUNDING)
    assert last.speedup.median == pytest.approx(1 / 0.4)
    assert of_rows(tuning)["fused optimizer"].taken
    # Alone it would pay, but it doesn't gain anything on top of the best.
    as_timed(monkeypatch, lambda setup: 0.8 if setup.optimizer == "fused" or setup.channels_last else 1)
    tuning = tune_training(small_net(), step, images(), tune_seconds=60)
    assert tuning.recommended == Setup(optimizer="fused")
    assert of_rows(tuning)["jit-fusion with fused optimizer"].note == "Not taken: it isn't surely faster."


def test_the_faster_of_two_compilers_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is measured too, next to the first."""
    choices = [Choice("blocks", Setup(compile="blocks")), Choice("whole", Setup(compile="whole"))]
    choices.append(Choice(FUSION, Setup(passes=("fold-conv-bias",))))
    made = tuner.made_step

    def uncompiled(job: Any, setup: Setup, batch: Any = None) -> RunnableStep:
        found = made(job, Setup(), batch)
        found.setup = setup
        return found

    monkeypatch.setattr(tuner, "choices_for", lambda job: choices)
    monkeypatch.setattr(tuner, "made_step", uncompiled)
    monkeypatch.setattr(RunnableStep, "peak", lambda self: None)
    monkeypatch.setattr(Proof, "judge", lambda self, setup: Judgement(WITHIN_ROUNDING))
    as_timed(monkeypatch, lambda setup: {"": 1.0, "blocks": 0.8, "whole": 0.5}[setup.compile])
    tuning = tune_training(small_net(), step, images(), tune_seconds=60)
    assert tuning.recommended == Setup(compile="whole")
    assert [each.name for each in tuning.candidates if each.taken] == ["whole"]
    assert of_rows(tuning)[FUSION].note == "Not tried: whole, which is taken, excludes it."


def test_half_precision_changes_which_formats_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_choices(monkeypatch)
    as_timed(
        monkeypatch,
        lambda setup: (
            (0.5 if setup.precision == "bf16" else 1.0)
            * (0.8 if setup.channels_last and setup.precision == "bf16" else 1.0)
        ),
    )
    tuning = tune_training(small_net(), step, images(), tune_seconds=60)
    assert tuning.recommended == Setup(precision="bf16", channels_last=True)
    row = of_rows(tuning)["channels_last"]
    assert (row.taken, row.note) == (True, "It pays on top of bf16 autocast.")


# torch's compiler imports code that calls it.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.zoo
def test_a_model_is_compiled_on_top_of_what_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    every = tuner.choices_for
    names = ("fused optimizer", "fold-conv-bias", "torch.compile")
    monkeypatch.setattr(tuner, "choices_for", lambda job: [one for one in every(job) if one.name in names])
    as_timed(monkeypatch, lambda setup: {"fused": 0.8}.get(setup.optimizer, 1) * (0.5 if setup.compile else 1))
    tuning = tune_training(small_net(), step, images(), tune_seconds=1200)
    assert tuning.recommended == Setup(optimizer="fused", compile="whole")
    assert tuning.candidates[-1].standing in (BIT_IDENTICAL, WITHIN_ROUNDING)


def test_a_combination_that_isnt_proven_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_choices(monkeypatch)
    as_timed(monkeypatch, lambda setup: 0.8**setup.channels_last * (0.9 if setup.optimizer == "fused" else 1.0))
    judge = Proof.judge

    def refusing(self: Proof, setup: Setup) -> Judgement:
        if setup.channels_last and setup.optimizer == "fused":
            return Judgement(REFUSED, note="Together they are wrong.")
        return judge(self, setup)

    monkeypatch.setattr(Proof, "judge", refusing)
    tuning = tune_training(small_net(), step, images(), tune_seconds=60)
    assert tuning.recommended == Setup(channels_last=True)
    assert tuning.candidates[-1].name == "channels_last"
    assert "Together they are wrong" in of_rows(tuning)["fused optimizer"].note


def test_nothing_is_recommended_where_nothing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_choices(monkeypatch)
    as_timed(monkeypatch, lambda setup: 1.0)
    tuning = tune_training(small_net(), step, images(), tune_seconds=60)
    assert tuning.recommended == Setup()
    assert not any(each.taken for each in tuning.candidates)
    assert {each.standing for each in tuning.candidates[1:]} == {NOT_PROVEN}


def test_the_first_choice_may_use_the_time_for_combining(monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_choices(monkeypatch)
    as_timed(monkeypatch, lambda setup: 1.0)

    def once(self: tuner._Tuner, step: RunnableStep) -> float:
        step()
        return 3.0

    monkeypatch.setattr(tuner._Tuner, "_once", once)
    monkeypatch.setattr(tuner._Tuner, "left", lambda self: self.seconds)
    # It takes 12 steps, 36 s of the 50; 17.5 s are for combining.
    tuning = tune_training(small_net(), step, images(), tune_seconds=50)
    first, *others = tuning.candidates[1:]
    assert first.latency is not None
    assert all("Not tried: it takes about 36 s, and 32 s are left for it" in each.note for each in others)


def deep_net() -> nn.Module:
    """A chain of layers whose activations are worth checkpoints."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16))]
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), *layers, nn.Linear(16, 4))


def test_the_curve_has_checkpoints_in_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_choices(monkeypatch)
    as_timed(monkeypatch, lambda setup: 1.1 if setup.passes else 1.0)
    points = tuner.curve_points
    names = ("checkpoints, 70% of the peak", "uniform checkpoints, lowest peak")
    monkeypatch.setattr(tuner, "curve_points", lambda *given: [one for one in points(*given) if one.name in names])
    tuning = tune_training(deep_net(), step, images(64), tune_seconds=300, curve=True)
    rows, first = of_rows(tuning), tuning.candidates[0]
    ours, uniform = (rows[name] for name in names)
    assert ours.peak <= 0.7 * first.peak
    assert uniform.peak < first.peak
    assert (ours.standing, uniform.standing) == (BIT_IDENTICAL, BIT_IDENTICAL)
    assert (ours.note, ours.speedup.median) == ("", pytest.approx(1 / 1.1))
    # No point of the curve is recommended: none is faster.
    assert tuning.recommended == Setup()


def test_torchs_own_budget_is_a_setting_of_the_first_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    config = torch._functorch.config

    def own(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(config.activation_memory_budget)
        return step(model, batch)

    job = job_of(small_net(), own)
    setup = Setup(compile_budget=0.5)
    RunnableStep(job, setup, job.copied_model(), job.batch)()
    assert seen == [0.5]
    assert config.activation_memory_budget == 1.0
    choices = {
        each.setup.compile_budget: each.setup.compile for each in tuner.curve_points(job, None) if each.setup.compile
    }
    assert choices == {0.5: "whole", 0.25: "whole", 0.75: "whole"}


def test_a_far_slower_choice_takes_no_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_choices(monkeypatch)
    as_timed(monkeypatch, lambda setup: 1.0)
    once = tuner._Tuner._once
    monkeypatch.setattr(
        tuner._Tuner, "_once", lambda self, made: once(self, made) * (1e4 if made.setup.channels_last else 1)
    )
    row = of_rows(tune_training(small_net(), step, images(), tune_seconds=60))["channels_last"]
    assert row.standing == NOT_PROVEN
    assert row.speedup is None
    assert "times as long, so it wasn't timed further." in row.note


def test_setups_that_exclude_each_other() -> None:
    assert conflict(Setup(precision="bf16"), Setup(precision="tf32"))
    assert conflict(Setup(compile="whole"), Setup(compile="blocks"))
    assert conflict(Setup(compile="whole"), Setup(passes=("fold-conv-bias",)))
    assert not conflict(Setup(precision="bf16"), Setup(optimizer="fused", channels_last=True))


def test_the_loss_after_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_choices(monkeypatch)
    as_timed(monkeypatch, lambda setup: 0.5 if setup.precision == "bf16" else 1.0)
    found = of_rows(tune_training(small_net(), step, images(), tune_seconds=60, steps=3))["bf16 autocast"].differences
    assert 0 < abs(found["loss_change"]) < 0.01
    assert found["loss_spread"] == 0


# ------------------------------------------------------------------------------------------------------------ batches


def test_the_largest_batch_and_the_ways_to_a_wished_one(monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_choices(monkeypatch)
    as_timed(monkeypatch, lambda setup: (setup.batch_size or 32) / 32)
    tuning = tune_training(mlp(), of_mlp, torch.randn(32, 16), memory="2MiB", batch_size=480, tune_seconds=120)
    rows = of_rows(tuning)
    plain, least = (rows[f"largest batch{more}"].setup.batch_size for more in ("", " with checkpoints"))
    assert plain is not None
    assert least is not None
    assert 32 < plain < least
    assert rows["largest batch with checkpoints"].standing == BIT_IDENTICAL
    # Of one size each, as a loader makes them.
    parts = next(number for number in range(-(-480 // plain), 480) if not 480 % number)
    row = rows[f"accumulation of {parts} parts"] if f"accumulation of {parts} parts" in rows else tuning.candidates[-1]
    assert row.standing == WITHIN_ROUNDING
    assert tuning.recommended.batch_size == 480
    assert tuning.recommended.accumulate == parts


def test_the_largest_batch_is_found_without_time_left() -> None:
    tuning = tune_training(mlp(), of_mlp, torch.randn(32, 16), memory="2MiB", tune_seconds=0.1)
    rows = of_rows(tuning)
    assert (rows["largest batch"].setup.batch_size or 0) > 32
    assert rows["largest batch with checkpoints"].note.startswith("Not tried: planning")


def test_accumulation_needs_rows_that_dont_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_choices(monkeypatch)
    as_timed(monkeypatch, lambda setup: 1.0 + (setup.accumulate > 1))
    tuning = tune_training(small_net(), step, images(), batch_size=16, tune_seconds=60)
    assert tuning.recommended == Setup(batch_size=16)
    refused = of_rows(tuning)["accumulation of 2 parts"]
    assert refused.standing == REFUSED
    assert "BatchNorm" in refused.note
    summing = tune_training(mlp(), lambda model, x: model(x).square().sum(), torch.randn(8, 16), batch_size=16)
    refused = of_rows(summing)["accumulation of 2 parts"]
    assert refused.standing == REFUSED
    assert "mean over rows" in refused.note


def test_accumulation_with_dropout_is_proven_in_eval_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_choices(monkeypatch)
    as_timed(monkeypatch, lambda setup: 1.0)
    model = nn.Sequential(mlp(), nn.Dropout(0.1))
    tuning = tune_training(model, of_mlp, torch.randn(8, 16), batch_size=16, tune_seconds=60)
    assert of_rows(tuning)["accumulation of 2 parts"].standing == WITHIN_ROUNDING
    assert any("proven in eval mode" in note for note in tuning.notes)


def test_a_batch_without_rows_has_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_choices(monkeypatch)
    as_timed(monkeypatch, lambda setup: 1.0)
    batch = torch.randn(4, 16), torch.randn(3, 16)
    tuning = tune_training(
        mlp(), lambda model, pair: of_mlp(model, torch.cat(pair)), batch, memory="1GiB", batch_size=8, tune_seconds=60
    )
    assert tuning.batch == 0
    assert tuning.recommended == Setup()
    assert any("no common dim 0" in note for note in tuning.notes)


def test_a_model_of_one_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_choices(monkeypatch)
    as_timed(monkeypatch, lambda setup: 0.5 if setup.optimizer == "fused" else 1.0)
    monkeypatch.setattr(batches, "_SLOW_SECONDS", 1e-9)
    tuning = tune_training(
        mlp(), lambda model, x: of_mlp(model, x.view(8, 16)), torch.randn(8, 16), batch_size=16, tune_seconds=60
    )
    assert tuning.recommended == Setup(optimizer="fused")
    assert any("the step raises on fewer rows" in note for note in tuning.notes)


# ------------------------------------------------------------------------------------------------------------- loaders


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16,), float(index))


def as_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders are read, but workers halve the seconds of a batch, whatever else runs on the machine."""
    read = batches.LoaderTuning._iterated

    def measured(self: Any, loader: Any, made: Any, *, pin: bool) -> tuple[float, float]:
        read(self, loader, made, pin=pin)
        return (0.05, 0.01) if loader.num_workers else (0.1, 0.08)

    monkeypatch.setattr(batches.LoaderTuning, "_iterated", measured)


def test_a_slow_loader_gets_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_choices(monkeypatch)
    as_timed(monkeypatch, lambda setup: 1.0)
    as_loaded(monkeypatch)
    tuning = tune_training(mlp(), of_mlp, loader=DataLoader(Rows(), batch_size=8), tune_seconds=60)
    assert tuning.recommended.workers is not None
    last = tuning.candidates[-1]
    assert last.taken
    assert last.speedup is not None
    assert last.speedup.median == pytest.approx(2)
    assert "The step waits 80% of its time for the loader." in tuning.notes


class Noisy(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + torch.randn(16)


def test_workers_that_draw_other_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_choices(monkeypatch)
    as_timed(monkeypatch, lambda setup: 1.0)
    as_loaded(monkeypatch)
    for data, standing in ((Rows(), BIT_IDENTICAL), (Noisy(), NOT_PROVEN)):
        loader = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator())
        last = tune_training(mlp(), of_mlp, loader=loader, tune_seconds=30).candidates[-1]
        assert last.taken
        assert last.standing == standing


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(64):
            yield Rows()[index]


def test_workers_would_repeat_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_choices(monkeypatch)
    as_timed(monkeypatch, lambda setup: 1.0)
    as_loaded(monkeypatch)
    tuning = tune_training(mlp(), of_mlp, loader=DataLoader(Stream(), batch_size=8), tune_seconds=30)
    assert tuning.recommended.workers is None
    assert any("would read all of the IterableDataset" in note for note in tuning.notes)


def test_loaders_that_have_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_choices(monkeypatch)
    as_timed(monkeypatch, lambda setup: 1.0)
    tuning = tune_training(mlp(), of_mlp, loader=[torch.randn(4, 16)] * 3, tune_seconds=30)
    assert tuning.recommended == Setup()
    tuning = tune_training(mlp(), of_mlp, loader=[torch.randn(4, 16)], tune_seconds=30)
    assert any("has one batch" in note for note in tuning.notes)

    def once() -> Iterator[torch.Tensor]:
        yield torch.randn(4, 16)

    tuning = tune_training(mlp(), of_mlp, loader=once(), tune_seconds=30)
    assert any("read only once" in note for note in tuning.notes)


class Broken(Rows):
    """Its items from `first` on can't be read."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.first:
            raise ValueError("corrupt file")
        return super().__getitem__(index)


def test_a_loader_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_choices(monkeypatch)
    as_timed(monkeypatch, lambda setup: 0.5 if setup.optimizer == "fused" else 1.0)
    with pytest.raises(LoadError, match=r"The loader raises at .*test_tune_training.py:\d+: ValueError: corrupt file"):
        tune_training(mlp(), of_mlp, loader=DataLoader(Broken(3), batch_size=8))
    tuning = tune_training(mlp(), of_mlp, loader=DataLoader(Broken(40), batch_size=8), tune_seconds=20)
    assert tuning.recommended == Setup(optimizer="fused")
    assert any(note.startswith("The loader stays as it is") and "corrupt file" in note for note in tuning.notes)


def test_the_order_of_a_loader_stays() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Rows(), batch_size=8, shuffle=True, generator=generator)
    before = generator.get_state()
    tune_training(mlp(), of_mlp, loader=loader, tune_seconds=2)
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "needs a batch or a loader"),
        ({"loader": []}, "has no batch"),
        ({"loader": 3}, "iterable of batches"),
        ({"batch": torch.ones(2, 16), "memory": "much"}, "memory must be a size"),
        ({"batch": torch.ones(2, 16), "memory": 0.5}, "memory must be a number of bytes"),
        ({"batch": torch.ones(2, 16), "batch_size": 1.5}, "batch_size must be a whole number"),
        ({"batch": torch.ones(2, 16), "tune_seconds": 0}, "tune_seconds must be"),
        ({"batch": torch.ones(2, 16), "optimizer": 3}, "optimizer must be"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        tune_training(mlp(), of_mlp, **given)


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (lambda model, x: of_mlp(model, x) * float("nan"), "The loss of the training step is nan"),
        (lambda model, x: of_mlp(model, x) * 0, "All gradients of the training step are zero"),
    ],
)
def test_a_loss_without_signal(own: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        tune_training(mlp(), own, torch.randn(2, 16))


def test_an_optimizer_that_fails_as_it_is() -> None:
    with pytest.raises(LoadError, match=r"A step of AdamW can't be made: .*sparse gradients"):
        tune_training(nn.Embedding(9, 4, sparse=True), lambda model, x: model(x).square().sum(), torch.tensor([1, 2]))


def test_a_step_that_raises_on_a_later_batch() -> None:
    model = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4))
    loader = [torch.randn(8, 16), torch.randn(1, 16)]
    with pytest.raises(LoadError, match=r"The training step raises at .*more than 1 value per channel"):
        tune_training(model, of_mlp, loader=loader, tune_seconds=5)


def test_a_compiled_model() -> None:
    model = mlp()
    model.compile(backend="eager")
    with pytest.raises(UsageError, match="before compile"):
        tune_training(model, of_mlp, torch.randn(2, 16))


def test_a_function_that_holds_a_module() -> None:
    model = mlp()
    layer = model[0]
    model.again = lambda x: layer(x)  # type: ignore[assignment]
    with pytest.raises(LoadError, match="training would change them"):
        tune_training(model, of_mlp, torch.randn(2, 16))


def test_the_code_compiles_the_blocks_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = tuner.choices_for
    monkeypatch.setattr(tuner, "choices_for", lambda job: [one for one in choose(job) if one.setup.compile == "blocks"])
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: None)
    monkeypatch.setattr(tuner, "missing_compiler", lambda device: "")
    as_timed(monkeypatch, lambda setup: 0.5 if setup.compile else 1.0)
    tuning = tune_training(mlp(), of_mlp, torch.randn(32, 16), tune_seconds=600)
    assert tuning.blocks == ("0", "1", "2", "3")
    assert '    "0", "1", "2", "3"\n' in tuning.code
