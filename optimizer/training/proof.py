"""Whether a setup computes what the step as it is computes: losses, gradients and buffers, and the optimizer's update.

All are compared as `optimizer.parity` compares: with the step in float64, in units of the step's own rounding noise. Each
batch starts from the same weights, because differences of rounding grow from step to step in any training.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from optimize_export.errors import LoadError
from optimizer.model import Samples, leaves_of, one_at_a_time, pinned_settings, random_state
from optimizer.parity import FACTOR, Measurement, Observation, OutputNoise, Reference, judge, measure_reference, observe
from optimizer.training.results import BIT_IDENTICAL, DECLARED, REFUSED, WITHIN_ROUNDING
from optimizer.training.setup import AS_IT_IS, Setup
from optimizer.training.stepping import (
    StepModule,
    TrainingJob,
    loss_of,
    made_model,
    settings_of,
    with_implementation,
)
from passes.graph.memory import same_values

_LOSSY = ("tf32", "bf16", "fp16")
# A lossy setup's gradients must point where the exact ones do and be as long, and its losses must be the same, but for
# these shares. The gradients of another batch have a cosine far below. Those of one length differ by 0.45 at this cosine.
_LEAST_COSINE = 0.9
_LARGEST_GRADIENT_ERROR = 0.5
_LARGEST_LOSS_ERROR = 0.05
# The scales that a GradScaler starts with, and comes down to after some steps with infinite gradients.
_SCALES = (2.0**16, 2.0**8)
# Runs of a step that isn't deterministic, to measure its spread.
_RUNS = 5
# The number of elements on which an optimizer's update is compared. Its implementations work element by element.
_ELEMENTS = 1 << 22
# The updates that an optimizer makes in turn.
_UPDATES = 3


@dataclass(frozen=True)
class Judgement:
    """The standing of a setup, its figures, and for a refused one the reason."""

    standing: str
    differences: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


class Proof:
    """The losses and gradients of the step as it is on some batches, with which setups are compared."""

    def __init__(self, job: TrainingJob, batches: Sequence[Any]) -> None:
        """Measure the step as it is.

        Args:
            batches: on the job's device.

        Raises:
            LoadError: the step raises on them.
        """
        self.job, self.batches = job, tuple(batches)
        try:
            self.reference = _reference_of(StepModule(job, job.model, Setup()), self.batches, "training")
        except LoadError:
            # If the step raises on one of the batches, it tells the line; the reference knows of one call for all.
            for each in self.batches:
                with random_state(0):
                    loss_of(job.step, job.copied_model(), each)
            raise
        judged = [noise for noise in self.reference.noises.values() if noise.kind != "buffer"]
        self.is_deterministic = all(noise.deterministic for noise in judged)
        self.notes: list[str] = []
        if not self.reference.truth_in_float64:
            self.notes.append(f"The reference is the step in its own dtype: {self.reference.blank.reference_reason}.")
        if not self.is_deterministic:
            spread = self._spread
            self.notes.append(
                f"The step isn't deterministic: run twice from one state and with one seed, {self._first_difference()} "
                f"differs. Its spread (loss {spread.loss:.1e}, gradients {spread.gradient:.1e}) is taken as its noise."
            )

    def judge(self, setup: Setup) -> Judgement:
        """Compare a setup with the step as it is.

        Raises:
            Unavailable: it can't be run.
        """
        found: list[Judgement] = []
        if setup.precision in _LOSSY:
            found.append(self._judge_lossy(setup))
        elif _changes_the_loss(setup):
            found.append(self._judge_exact(setup) if self.is_deterministic else self._judge_by_spread(setup))
        if setup.optimizer != AS_IT_IS:
            found.append(self._judge_update(setup))
        if not found:
            return Judgement(BIT_IDENTICAL)
        worst = max(found, key=lambda each: (BIT_IDENTICAL, WITHIN_ROUNDING, DECLARED, REFUSED).index(each.standing))
        return Judgement(worst.standing, {k: v for each in found for k, v in each.differences.items()}, worst.note)

    def _module(self, setup: Setup) -> StepModule:
        is_random = bool(setup.compile) and self.reference.draws_random_numbers
        return StepModule(self.job, made_model(self.job, setup, own_draws=is_random), setup)

    def _judge_exact(self, setup: Setup) -> Judgement:
        with settings_of(setup):
            losses = [f"The loss of batch {number}" for number in range(1, len(self.batches) + 1)]
            return _judged(self.reference.compare(self._module(setup)), losses)

    # ------------------------------------------------------------------------------------------------- lossy setups

    def _judge_lossy(self, setup: Setup) -> Judgement:
        module = self._module(setup)
        for scale in _SCALES if setup.precision == "fp16" else (1.0,):
            module.scale = scale
            seen = self._observed(module, setup)
            if all(bool(seen.values[name].isfinite().all()) for name in _floats_of(seen)):
                break
        else:
            return Judgement(REFUSED, note="Its losses or gradients are infinite or NaN.")
        truth = self.reference.original.calls[0].truth
        loss, gradient, cosine = _distances(seen, truth, scale)
        found = {"loss_error": loss, "gradient_error": gradient, "gradient_cosine": cosine}
        if loss <= _LARGEST_LOSS_ERROR and gradient <= _LARGEST_GRADIENT_ERROR and cosine >= _LEAST_COSINE:
            return Judgement(DECLARED, found)
        return Judgement(
            REFUSED,
            found,
            f"Its loss is off by {loss:.1%} and its gradients by {gradient:.1%}, and their cosine with the exact ones is "
            f"{cosine:.4f}, where at most {_LARGEST_LOSS_ERROR:.0%}, at most {_LARGEST_GRADIENT_ERROR:.0%} and at least "
            f"{_LEAST_COSINE} are allowed.",
        )

    def _observed(self, module: StepModule, setup: Setup) -> Observation:
        one = self.reference.original.calls[0]
        runs = self.reference.runs_of(module)
        with one_at_a_time, pinned_settings(), settings_of(setup), runs.fresh() as running:
            return observe(
                running, self.reference.original.inputs_of(one), seed=one.seed, training=True, names=one.names
            )

    # ------------------------------------------------------------------------------- steps that aren't deterministic

    @cached_property
    def _spread(self) -> _Spread:
        module = StepModule(self.job, self.job.model, Setup())
        runs = [self._observed(module, Setup()) for _ in range(_RUNS)]
        distances = [_distances(one, other) for one, other in itertools.combinations(runs, 2)]
        return _Spread(runs, max(each[0] for each in distances), max(each[1] for each in distances))

    def _judge_by_spread(self, setup: Setup) -> Judgement:
        spread, seen = self._spread, self._observed(self._module(setup), setup)
        # Next to the run that is nearest to it.
        loss, gradient, cosine = min((_distances(seen, each) for each in spread.runs), key=lambda each: each[1])
        found = {
            "loss_error": loss,
            "loss_noise": spread.loss,
            "gradient_error": gradient,
            "gradient_noise": spread.gradient,
            "gradient_cosine": cosine,
        }
        if loss <= FACTOR * spread.loss and gradient <= FACTOR * spread.gradient:
            return Judgement(WITHIN_ROUNDING, found)
        note = f"It differs by {loss:.1e} in the loss and {gradient:.1e} in the gradients, more than runs of the step itself."
        return Judgement(REFUSED, found, note)

    def _first_difference(self) -> str:
        """The first input or output of a module that differs between two runs from one state."""
        first, second = _values_of(self.job, self.batches[0]), _values_of(self.job, self.batches[0])
        for (text, value), (_, other) in zip(first, second, strict=False):
            tensors, others = ([one for _, one in leaves_of(each).tensors()] for each in (value, other))
            if len(tensors) != len(others) or not all(map(same_values, tensors, others)):
                return text
        return "a gradient"

    # ---------------------------------------------------------------------------------------- the optimizer's update

    @cached_property
    def _update(self) -> tuple[list[nn.Parameter], Reference]:
        """Some parameters, and the updates of the optimizer as it is from their gradients on the first batch."""
        model = self.job.copied_model()
        with random_state(0):
            loss_of(self.job.step, model, self.batches[0]).backward()
        pairs = [
            (one, copied.grad) for one, copied in zip(self.job.model.parameters(), model.parameters(), strict=True)
        ]
        known = {id(one) for group in self.job.optimizer.param_groups for one in group["params"]}
        trained = [(one, gradient) for one, gradient in pairs if gradient is not None and id(one) in known]
        trained.sort(key=lambda pair: pair[0].numel())
        total, chosen = 0, list[tuple[nn.Parameter, torch.Tensor]]()
        for one, gradient in trained:
            total += one.numel()
            if not chosen or total <= _ELEMENTS:
                chosen.append((one, gradient))
        parameters = [one for one, _ in chosen]
        inputs = [one.detach() for one in parameters], [gradient for _, gradient in chosen]
        return parameters, _reference_of(self._updating(parameters, Setup()), inputs, "inference")

    def _updating(self, parameters: Sequence[nn.Parameter], setup: Setup) -> Callable[..., list[torch.Tensor]]:
        """A function of values and gradients: the changes of the values by some updates of an optimizer."""

        def updates(values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            own = [nn.Parameter(value.clone()) for value in values]
            left_out = nn.Parameter(torch.empty(0))
            memo: dict[int, Any] = {id(one): left_out for one in self.job.model.parameters()}
            memo |= {id(one): mine for one, mine in zip(parameters, own, strict=True)}
            optimizer = copy.deepcopy(self.job.optimizer, memo)
            optimizer.state.pop(left_out, None)
            for group in optimizer.param_groups:
                group["params"] = [one for one in group["params"] if one is not left_out]
            optimizer = with_implementation(optimizer, setup)
            for factor in range(1, _UPDATES + 1):
                for mine, gradient in zip(own, gradients, strict=True):
                    mine.grad = gradient / factor
                optimizer.step()
            return [mine.detach() - value for mine, value in zip(own, values, strict=True)]

        return updates

    def _judge_update(self, setup: Setup) -> Judgement:
        parameters, reference = self._update
        paths = {id(one): path for path, one in self.job.model.named_parameters()}
        updates = [f"The optimizer's update of {paths[id(one)]}" for one in parameters]
        found = _judged(reference.compare(self._updating(parameters, setup)), updates)
        names = {"loss_error": "update_error", "loss_noise": "update_noise", "loss_times": "update_times"}
        return Judgement(found.standing, {names[k]: v for k, v in found.differences.items() if k in names}, found.note)


@dataclass(frozen=True)
class _Spread:
    """Runs of a step that isn't deterministic, and the largest distances between them."""

    runs: list[Observation]
    loss: float
    gradient: float


def _reference_of(target: Any, inputs: Sequence[Any], mode: Any) -> Reference:
    """The reference at one call, which isn't varied."""
    samples = Samples(tuple(inputs))
    sizes = None if samples.batch_size is None else [samples.batch_size]
    return measure_reference(target, samples, batch_sizes=sizes, draws=1, mode=mode)


def _changes_the_loss(setup: Setup) -> bool:
    changes = setup.channels_last, setup.passes, setup.compile, setup.cudnn_benchmark, setup.accumulate > 1
    return any(changes)


def _judged(measurement: Measurement, outputs: Sequence[str]) -> Judgement:
    """The standing of what was measured; the outputs in words, for the reason."""
    report = judge(measurement)
    noises = {output.noise.name: output.noise for output in measurement.outputs}
    found: dict[str, float] = {}
    for kind, name in (("output", "loss"), ("gradient", "gradient")):
        judged = [each for each in report.outputs if each.kind == kind and each.judged]
        scale = max((noises[each.name].scale for each in judged), default=0.0)
        if scale:
            found[f"{name}_error"] = max(each.max_error for each in judged) / scale
            found[f"{name}_noise"] = max(each.noise for each in judged) / scale
            found[f"{name}_times"] = max(each.ratio for each in judged)
    if not report.ok:
        return Judgement(REFUSED, found, _in_words(report.reason, noises, outputs))
    is_same = all(not output.max_difference for output in report.outputs)
    return Judgement(BIT_IDENTICAL if is_same else WITHIN_ROUNDING, found)


def _in_words(reason: str, noises: Mapping[str, OutputNoise], outputs: Sequence[str]) -> str:
    """A sentence of the verdict, in which the outputs are in words."""
    names = (each for each, noise in noises.items() if noise.kind == "output")
    for name, words in zip(names, outputs, strict=False):
        if reason.startswith((f"{name} ", f"{name}:")):
            return words + reason.removeprefix(name)
    return reason.replace(" of model.", " of ")


def _floats_of(seen: Observation) -> Iterator[str]:
    return (
        name for name in (*seen.of_kind("output"), *seen.of_kind("gradient")) if seen.values[name].is_floating_point()
    )


def _distances(seen: Observation, truth: Observation, scale: float = 1.0) -> tuple[float, float, float]:
    """The relative errors of the losses and of all gradients as one vector, and the cosine of the latter."""
    loss = max(
        (
            abs(float(seen.values[name]) / scale - float(truth.values[name]))
            / max(abs(float(truth.values[name])), 1e-30)
            for name in seen.of_kind("output")
        ),
        default=0.0,
    )
    error = size = own = product = 0.0
    for name in seen.of_kind("gradient"):
        value, target = seen.values[name].double() / scale, truth.values[name].double()
        error += float((value - target).square().sum())
        size += float(target.square().sum())
        own += float(value.square().sum())
        product += float((value * target).sum())
    cosine = product / math.sqrt(size * own) if size and own else 0.0
    return loss, math.sqrt(error / size) if size else 0.0, min(1.0, cosine)


def _values_of(job: TrainingJob, batch: Any) -> list[tuple[str, Any]]:
    """The inputs and outputs of all modules in one run, in the order in which they are known, and the loss."""
    model = job.copied_model()
    found: list[tuple[str, Any]] = []

    def keep(what: str, path: str, module: nn.Module, values: Any) -> None:
        where = f"{path} ({type(module).__name__})" if path else f"the model ({type(module).__name__})"
        kept = [one.detach().clone() for _, one in leaves_of(values).tensors()]
        found.append((f"the {what} of {where}", kept))

    for path, module in model.named_modules():
        module.register_forward_pre_hook(
            lambda module, args, kwargs, path=path: keep("input", path, module, (args, kwargs)), with_kwargs=True
        )
        module.register_forward_hook(lambda module, args, output, path=path: keep("output", path, module, output))
    with random_state(0):
        loss = loss_of(job.step, model, batch)
    return [*found, ("the loss, outside of the modules,", loss.detach())]
