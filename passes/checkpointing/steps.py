"""Run training steps of a model apart from it, without a plan and under one."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from passes.base import Context, training_flags
from passes.checkpointing.budget import bytes_of, is_share, shown
from passes.checkpointing.choice import Choice
from passes.checkpointing.fake import faked
from passes.checkpointing.plan import Plan
from passes.checkpointing.profile import Measured, NoProfile, Profile, measure, profile
from passes.checkpointing.regions import regions_of
from passes.checkpointing.report import CheckpointReport, Point, why_kept
from passes.checkpointing.solve import Solver

# The budgets of the curve in the report.
_SHARES = (0.85, 0.7, 0.55, 0.45, 0.35, 0.25)


class Steps:
    """Training steps of a root on its example inputs: on fake tensors, or on real ones where the forward needs values."""

    def __init__(self, root: nn.Module, context: Context, batch_size: int | None) -> None:
        self.root = root
        self._context = context
        self._batch_size = batch_size
        self.is_fake = True
        # A forward that skips layers at random must skip the same ones in each step.
        self._random = random.getstate()
        try:
            self.profile = self._profile()
        except NoProfile:
            raise
        except Exception as error:  # noqa: BLE001 - a forward that reads values may raise anything on fake tensors
            self.use_numbers(error)

    def use_numbers(self, why: Exception | None = None) -> None:
        """Run steps on real tensors from now on.

        Args:
            why: the error of the forward on fake tensors.

        Raises:
            NoProfile: no step can be profiled, or another batch size was requested.
        """
        if self._batch_size is not None:
            raise NoProfile(
                f"batch_size={self._batch_size} is planned on tensors without values, but its forward reads values: "
                "leave out batch_size, and use example inputs with the batch size that you train with"
            )
        self.is_fake = False
        before = "" if why is None else f"without values its forward raises {_quoted(why)}, and "
        try:
            with _memory_needed(before):
                self.profile = self._profile()
        except NoProfile:
            raise
        except Exception as error:
            raise NoProfile(f"{before}on real tensors it raises {_quoted(error)}") from error

    def hold(self, plan: Plan, memory_budget: float | str) -> bool:
        """Whether a step on real tensors makes the planned calls and keeps to the budget.

        A forward may branch on values, which fake tensors don't have. Kernels may also return other memory formats than
        expected, so that further copies are made.
        """
        if not self.is_fake:
            return True
        random.setstate(self._random)
        with _memory_needed(), self._apart(real=True) as (args, kwargs):
            try:
                peak = measure(self.root, args, kwargs, plan).peak
                if self._batch_size is not None:
                    return True
                # Only a share depends on the peak of a step without a plan.
                eager = measure(self.root, args, kwargs, Plan((), ())).peak if is_share(memory_budget) else 0
                budget = bytes_of(memory_budget, eager)
                return budget is None or peak <= budget
            except NoProfile:
                # It makes other calls. The caller plans again on real tensors.
                return False

    def _profile(self) -> Profile:
        with self._apart() as (args, kwargs):
            return profile(self.root, args, kwargs)

    def measure(self, plan: Plan) -> Measured:
        """Measure a step under a plan."""
        with _memory_needed(), self._apart() as (args, kwargs):
            return measure(self.root, args, kwargs, plan)

    @contextmanager
    def _apart(self, *, real: bool = False) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        assert self._context.apart is not None
        with ExitStack() as stack:
            args, kwargs = stack.enter_context(self._context.apart())
            if not self.root.training:
                stack.enter_context(training_flags(self.root, True))
            if self.is_fake and not real:
                args, kwargs = stack.enter_context(faked(self.root, args, kwargs, self._batch_size))
            else:
                # As in any step but the first: gradients exist, and new ones are added to them.
                for parameter in self.root.parameters():
                    parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            yield args, kwargs


class PlannedStep:
    """A choice with the measurement of its step."""

    def __init__(self, choice: Choice, steps: Steps, budget: float | str) -> None:
        self.choice = choice
        self.plan = choice.plan(steps.profile)
        self.measured = steps.measure(self.plan)
        self._profile = steps.profile
        self._budget = budget

    @property
    def text(self) -> str:
        """The peak and the recomputation, in a few words."""
        peak, eager = self.measured.peak, self._profile.peak
        share = self._again / self._profile.flops if self._profile.flops else 0.0
        why = why_kept(self._profile)
        return (
            f"trains in {shown(peak)} of {shown(eager)} ({100 * peak / eager:.1f} %; memory_budget={self._budget}), "
            f"and recomputes {100 * share:.1f} % of the forward's FLOPs{why and f'; {why}'}"
        )

    @property
    def _again(self) -> int:
        return self.measured.flops - self._profile.step_flops

    def report(self, solver: Solver) -> CheckpointReport:
        """The plan next to others."""
        profile = self._profile
        found = [solver.joined(int(share * profile.peak)) for share in _SHARES]
        curve = [solver.simulation.run(choice) for choice in found if choice is not None]
        uniform = solver.simulation.run(solver.uniform(max(1, round(math.sqrt(len(solver.cuts) - 1)))))
        return CheckpointReport(
            Point("this plan", self.measured.peak, self._again),
            Point("eager", profile.peak, 0),
            Point("uniform, √n runs", uniform.peak, uniform.flops),
            tuple(Point("", outcome.peak, outcome.flops) for outcome in curve),
            profile.flops,
            tuple(regions_of(profile, self.choice)),
        )


@contextmanager
def _memory_needed(before: str = "") -> Iterator[None]:
    """Turn a lack of memory into NoProfile."""
    try:
        yield
    except Exception as error:
        # On the CPU, torch raises a plain RuntimeError.
        texts = ("can't allocate memory", "not enough memory")
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in texts):
            lack = "on real tensors there isn't enough memory for a step: use example inputs with fewer rows"
            raise NoProfile(before + lack) from error
        raise


def _quoted(error: Exception) -> str:
    """The class and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
