"""Training in a given amount of memory: what isn't kept for the backward pass is computed again there."""

from __future__ import annotations

import math
import random
import types
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from passes.base import Context, Pass, PassResult
from passes.checkpointing.budget import bytes_of, is_share, shown
from passes.checkpointing.choice import Choice
from passes.checkpointing.compiled import CompiledCheckpoint, modules_for
from passes.checkpointing.fake import faked
from passes.checkpointing.forward import CheckpointedForward
from passes.checkpointing.plan import Plan
from passes.checkpointing.profile import Measured, NoProfile, Profile, measure, profile
from passes.checkpointing.regions import regions_of
from passes.checkpointing.report import CheckpointReport, Point
from passes.checkpointing.solve import Solver
from passes.checkpointing.units import keep_between
from passes.errors import RequirementNotMet
from passes.module_interface import AttributeEdit, ModelTree, ModuleRewriter, in_place, paths_matching, training_flags

_TRIES = 4
# The budgets of the curve that the plan is shown on.
_SHARES = (0.85, 0.7, 0.55, 0.45, 0.35, 0.25)


@dataclass(frozen=True)
class InsertCheckpoints(Pass):
    """Keep less for the backward pass, and compute it again there: training in a given amount of memory.

    The peak is the most bytes alive in a step, forward and backward pass, without parameters, their gradients, buffers and
    inputs, and without what kernels take for the time of a call. It is told from a run on fake tensors of the example
    inputs' shapes, and the plan is made for these: the step that is planned for holds nothing but the loss when it turns
    back, as `model(**batch).loss.backward()` does. The budget is kept, or the pass raises and names the lowest that it can
    keep to. What is computed again is the same to the bit: losses, gradients, buffers and random numbers are those of a
    step without the pass.

    The module's own code runs, once for each step. Single calls of torch functions are computed again, alone or in
    regions; those that draw random numbers draw the same ones, and a BatchNorm moves its statistics once. A SyncBatchNorm
    isn't computed again, so that no process is asked twice: what it takes is kept, too.

    Attributes:
        memory_budget: a share of the eager peak such as 0.5, a size such as "12GiB", or "min" for as little as can be
            reached.
        strategy: "optimal": the least to compute again; "uniform": all of several runs of equal work, as many as cost least,
            or of none.
        selective: whether results inside of a run may be kept; without it a run is computed again as a whole.
        units: the modules that `fully_shard` (FSDP2) will be called on, beside the root, as a pattern of their paths such as
            "layers.*" or "stem|stages.*.*": what goes from one to another is kept. Without it, a unit gathers its
            parameters once more where another one's backward pass needs what it computed.
        batch_size: the rows that you train with, where the example inputs have fewer: those are run by optimize(), with all
            that a step without the pass keeps.

    Where `torch.compile` compiles the result, checkpoints of whole modules stand in for the plan, and a BatchNorm moves its
    statistics once there too; what the compiler keeps beside is its own, and the peak isn't promised.

    Does not handle: a forward that makes other calls at each run (layers dropped at random); a forward inside of the user's own
    hooks on saved tensors (`save_on_cpu`) or function modes, and exported code, which keep what they would without the pass.
    """

    name: ClassVar[str] = "insert-checkpoints"
    modes: ClassVar[tuple[str, ...]] = ("training",)
    needs_graph: ClassVar[bool] = False
    plans_calls: ClassVar[bool] = True
    is_guarantee: ClassVar[bool] = True
    needs_run: ClassVar[str] = "plans a step of the batch size that you train with"

    memory_budget: float | str = 0.5
    strategy: Literal["optimal", "uniform"] = "optimal"
    selective: bool = True
    units: str = ""
    batch_size: int | None = None

    def __post_init__(self) -> None:
        bytes_of(self.memory_budget, 1)
        if self.strategy not in ("optimal", "uniform"):
            raise ValueError(f"strategy must be 'optimal' or 'uniform', not {self.strategy!r}")
        if not isinstance(self.selective, bool):
            raise ValueError(f"selective must be True or False, not {self.selective!r}")
        if not isinstance(self.units, str):
            raise ValueError(f"units must be a string of module paths, such as 'layers.*', not {self.units!r}")
        rows = self.batch_size
        if rows is not None and (not isinstance(rows, int) or isinstance(rows, bool) or rows < 1):
            raise ValueError(f"batch_size must be a whole number of rows of 1 or more, not {rows!r}")

    def run(self, tree: ModelTree, context: Context) -> PassResult:
        """Plan a step of the root, and put the plan around its forward.

        Raises:
            RequirementNotMet: the budget is out of reach, or no step can be planned.
        """
        root, rewriter = tree.root, ModuleRewriter(tree)
        try:
            with in_place(_without_plan(root)):
                steps = _Steps(root, context, self.batch_size)
                try:
                    solver, found = self._solved(root, steps)
                except _OutOfReach as error:
                    # Real tensors may take more: the lowest budget that is named must be one that they keep to.
                    solver, found = self._solved_on_numbers(root, steps, error)
                if not steps.hold(found.plan, self.memory_budget):
                    steps.use_numbers()
                    solver, found = self._solved(root, steps)
        except _OutOfReach as error:
            raise RequirementNotMet(str(error)) from None
        except NoProfile as error:
            raise RequirementNotMet(
                f"{self.name} can't plan a training step of {type(root).__name__}: {error}."
            ) from None
        before = root.__dict__.get("forward")
        if isinstance(before, CheckpointedForward):
            if before.plan == found.plan:
                rewriter.skip("", "it already trains with this plan")
                return PassResult((), tuple(rewriter.skips), rewriter)
            before = before.inner
        report = found.report(solver)
        for region in report.regions:
            with rewriter.change(region.path, region.text):
                pass
        _set_compiled(rewriter, root, modules_for(steps.profile, solver.simulation, found.measured.peak))
        with rewriter.change("", found.text):
            rewriter.set_attribute(root, "forward", CheckpointedForward(root, found.plan, before))
        return PassResult(tuple(rewriter.changes), (), rewriter, detail=report)

    def _solved(self, root: nn.Module, steps: _Steps) -> tuple[Solver, _Planned]:
        if self.units:
            keep_between(steps.profile, self._units_of(root))
        solver = Solver(steps.profile, self.selective)
        return solver, self._planned(steps, solver)

    def _solved_on_numbers(self, root: nn.Module, steps: _Steps, refusal: _OutOfReach) -> tuple[Solver, _Planned]:
        """The plan for steps on real tensors, after one for fake tensors was refused.

        Raises:
            _OutOfReach: no plan keeps to the budget.
        """
        if not steps.is_fake or self.batch_size is not None:
            raise refusal
        try:
            steps.use_numbers()
        except NoProfile:
            raise refusal from None
        return self._solved(root, steps)

    def _units_of(self, root: nn.Module) -> set[str]:
        if found := paths_matching((path for path, _ in root.named_modules() if path), self.units):
            return found
        raise RequirementNotMet(
            f"{self.name} has units={self.units!r}, which matches no module of {type(root).__name__}: use the paths "
            'of the modules that fully_shard will be called on, such as "layers.*".'
        )

    def _planned(self, steps: _Steps, solver: Solver) -> _Planned:
        peak = steps.profile.peak
        budget = bytes_of(self.memory_budget, peak)
        target = budget
        for _ in range(_TRIES):
            choice = self._chosen(solver, target)
            if choice is None:
                break
            found = _Planned(choice, steps, self.memory_budget)
            if budget is None or found.measured.peak <= budget:
                return found
            assert target is not None
            target -= found.measured.peak - budget
        # A cheaper one may be told to fit by a few bytes, and not fit: the lowest that is named has to.
        lowest = _Planned(self._lowest(solver), steps, self.memory_budget)
        reached = lowest.measured.peak
        if budget is not None and reached <= budget:
            return lowest
        raise _OutOfReach(
            f"{self.name} can't meet memory_budget={self.memory_budget!r}, which is {shown(budget or 0)} of the "
            f"{shown(peak)} that a step needs: the lowest is {shown(reached)}, "
            f'memory_budget={_rounded_up(reached / peak)} or "min".'
        )

    def _chosen(self, solver: Solver, budget: int | None) -> Choice | None:
        if budget is None:
            return self._lowest(solver)
        return solver.solve(budget) if self.strategy == "optimal" else solver.solve_uniform(budget)

    def _lowest(self, solver: Solver) -> Choice:
        return solver.lowest if self.strategy == "optimal" else solver.lowest_uniform()


def _without_plan(root: nn.Module) -> list[AttributeEdit]:
    """What takes an earlier plan off the root."""
    forward = root.__dict__.get("forward")
    return [AttributeEdit(root, "forward", _inside(root))] if isinstance(forward, CheckpointedForward) else []


def _inside(module: nn.Module) -> Any:
    """What stands in the forward that this pass put around a module's."""
    inner = module.__dict__["forward"].inner
    return types.MethodType(type(module).forward, module) if inner is None else inner


def _set_compiled(rewriter: ModuleRewriter, root: nn.Module, paths: Sequence[str]) -> None:
    """Make checkpoints, where they are compiled, of these modules and of no other."""
    had = {
        path for path, module in root.named_modules() if isinstance(module.__dict__.get("forward"), CompiledCheckpoint)
    }
    wanted = set(paths)
    if had == wanted:
        return
    names = f"{paths[0]}{f' and {len(paths) - 1} like it' if paths[1:] else ''}" if paths else "no module"
    with rewriter.change("", f"under torch.compile, {names} is a checkpoint"):
        for path in sorted(had ^ wanted):
            module = root.get_submodule(path)
            forward = _inside(module) if path in had else CompiledCheckpoint(module, module.__dict__.get("forward"))
            rewriter.set_attribute(module, "forward", forward)


def _rounded_up(share: float) -> float:
    return min(1.0, int(share * 1000 + 1) / 1000)


@contextmanager
def _memory_needed(before: str = "") -> Iterator[None]:
    """Say so where the memory isn't enough."""
    try:
        yield
    except Exception as error:
        # torch has no class of its own for it on the CPU.
        texts = ("can't allocate memory", "not enough memory")
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in texts):
            lack = "on real tensors there isn't enough memory for a step: use example inputs with fewer rows"
            raise NoProfile(before + lack) from error
        raise


def _quoted(error: Exception) -> str:
    """The class and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


class _OutOfReach(Exception):
    """No plan keeps to the budget."""


class _Steps:
    """Training steps of a root on its example inputs, on fake tensors or, where these don't go through, on real ones."""

    def __init__(self, root: nn.Module, context: Context, batch_size: int | None) -> None:
        self.root = root
        self._context = context
        self._batch_size = batch_size
        self.is_fake = True
        # What a forward leaves out at random, it leaves out in each step.
        self._random = random.getstate()
        try:
            self.profile = self._profile()
        except NoProfile:
            raise
        except Exception as error:  # noqa: BLE001 - what looks at numbers raises, in ways of its own, where there are none
            self.use_numbers(error)

    def use_numbers(self, why: Exception | None = None) -> None:
        """Run steps on real tensors from now on.

        Args:
            why: what the forward raises on fake ones.

        Raises:
            NoProfile: no step can be profiled, or another batch size was asked for.
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
        """Whether a step on real tensors makes the calls that the plan is for, and keeps to the budget.

        A forward may branch on numbers, which fake tensors don't have, and kernels give maps in other formats than are
        told for those, so that other copies of them are made.
        """
        if not self.is_fake:
            return True
        random.setstate(self._random)
        with _memory_needed(), self._apart(real=True) as (args, kwargs):
            try:
                peak = measure(self.root, args, kwargs, plan).peak
                if self._batch_size is not None:
                    return True
                # Only a share goes by the peak of a step without a plan.
                eager = measure(self.root, args, kwargs, Plan((), ())).peak if is_share(memory_budget) else 0
                budget = bytes_of(memory_budget, eager)
                return budget is None or peak <= budget
            except NoProfile:
                # It doesn't make these calls: it is planned for again, and refused where it never does.
                return False

    def _profile(self) -> Profile:
        with self._apart() as (args, kwargs):
            return profile(self.root, args, kwargs)

    def measure(self, plan: Plan) -> Measured:
        """The step under a plan."""
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
                # As in a step that isn't the first: the gradients are there, and what is added to them goes.
                for parameter in self.root.parameters():
                    parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            yield args, kwargs


class _Planned:
    """A choice that was tried."""

    def __init__(self, choice: Choice, steps: _Steps, budget: float | str) -> None:
        self.choice = choice
        self.plan = choice.plan(steps.profile)
        self.measured = steps.measure(self.plan)
        self._profile = steps.profile
        self._budget = budget

    @property
    def text(self) -> str:
        """What was reached, in a few words."""
        peak, eager = self.measured.peak, self._profile.peak
        share = self._again / self._profile.flops if self._profile.flops else 0.0
        return (
            f"trains in {shown(peak)} of {shown(eager)} ({100 * peak / eager:.1f} %; memory_budget={self._budget}), "
            f"and recomputes {100 * share:.1f} % of the forward's FLOPs"
        )

    @property
    def _again(self) -> int:
        return self.measured.flops - self._profile.step_flops

    def report(self, solver: Solver) -> CheckpointReport:
        """The plan beside others."""
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
