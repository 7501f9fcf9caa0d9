"""Fit a training step into a memory budget by recomputing values in the backward pass."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import nn

from passes.base import Context, Pass, PassResult
from passes.checkpointing.budget import NotFree, bytes_of, fit, is_fit, shown
from passes.checkpointing.choice import Choice
from passes.checkpointing.compiled import CompiledCheckpoint, modules_for
from passes.checkpointing.forward import CheckpointedForward
from passes.checkpointing.profile import NoProfile
from passes.checkpointing.report import why_kept
from passes.checkpointing.solve import Solver
from passes.checkpointing.steps import PlannedStep, Steps
from passes.checkpointing.units import keep_between
from passes.errors import RequirementNotMet
from passes.module_interface import (
    AttributeEdit,
    ModelTree,
    ModuleRewriter,
    in_place,
    names_of_graph_passes,
    paths_matching,
)

_TRIES = 4


@dataclass(frozen=True)
class InsertCheckpoints(Pass):
    """Fit a training step into a memory budget: keep fewer values, and recompute the rest in the backward pass.

    The peak is the maximum number of bytes alive during a step, forward and backward. It doesn't include parameters,
    their gradients, buffers, inputs, or memory that a kernel uses only during one call. It is computed from a run on
    fake tensors with the shapes of the example inputs, and the plan is valid for these shapes. Without `batch_size`, it
    is then checked in a step on the example inputs. The planned step holds only the loss when the backward pass starts,
    as in `model(**batch).loss.backward()`. The plan keeps to the budget; otherwise the pass raises and names the lowest
    budget that is possible. Recomputed values are bit-identical: losses, gradients, buffers and random numbers are
    those of a step without the pass.

    The module's own code runs once per step. Single calls of torch functions are recomputed, alone or in regions. Calls
    that draw random numbers draw the same ones again, and a BatchNorm updates its statistics once. A SyncBatchNorm is
    recomputed in one process only. In several it isn't, so that they communicate once: its inputs are kept.

    Under `torch.compile`, checkpoints of whole modules replace the plan. A BatchNorm updates its statistics once there,
    too. The compiler decides what else it keeps, so the peak isn't guaranteed.

    Does not handle a forward that makes different calls in each run (layers dropped at random), a forward inside the
    user's own hooks on saved tensors (`save_on_cpu`) or function modes, and exported code. These keep what they would
    keep without the pass.

    Attributes:
        memory_budget: a share of the eager peak such as 0.5, a size such as "12GiB" or in bytes, "min" for the lowest
            possible, or "fit" for what the device has free, less a tenth and three times the trained parameters.
        strategy: "optimal" for the least recomputation. "uniform" divides the calls into the cheapest number of runs of
            equal work, and recomputes all of a run or nothing.
        selective: whether results inside a run may be kept; otherwise a run is recomputed as a whole.
        units: the modules on which `fully_shard` (FSDP2) will be called, besides the root, as a pattern of their paths
            such as "layers.*" or "stem|stages.*.*". Values that go from one unit to another are kept. Otherwise a unit
            would gather its parameters again where the backward pass of another one needs its results.
        batch_size: the number of rows that you train with, if the example inputs have fewer. optimize() itself runs the
            example inputs, with everything that a step without the pass keeps.
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
        if not is_fit(self.memory_budget):
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
        """Plan a training step, and wrap the root's forward in the plan.

        Raises:
            RequirementNotMet: the budget is out of reach, or no step can be planned.
        """
        if not is_fit(self.memory_budget):
            return self._planned_for(tree, context)
        try:
            size, how = fit(context.device, tree.root.parameters())
        except NotFree as why:
            raise RequirementNotMet(
                f'{self.name} can\'t find a budget for memory_budget="fit": {why}. Pass a size, such as "12GiB".'
            ) from None
        return replace(self, memory_budget=size)._planned_for(tree, context, f"; {how}")

    def _planned_for(self, tree: ModelTree, context: Context, told: str = "") -> PassResult:
        root, rewriter = tree.root, ModuleRewriter(tree)
        try:
            with in_place(_without_plan(root)):
                steps = Steps(root, context, self.batch_size)
                try:
                    solver, found = self._solved(root, steps)
                except _OutOfReach as error:
                    # Real tensors may need more memory. The error must name a budget that is possible with them.
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
        if rewritten := names_of_graph_passes(root):
            rewriter.skip(
                "", f"steps under the plan run the forward as it was written, without the changes of {rewritten}"
            )
        with rewriter.change("", found.text + told):
            rewriter.set_attribute(root, "forward", CheckpointedForward(root, found.plan, before))
        return PassResult(tuple(rewriter.changes), tuple(rewriter.skips), rewriter, detail=report)

    def _solved(self, root: nn.Module, steps: Steps) -> tuple[Solver, PlannedStep]:
        if self.units:
            keep_between(steps.profile, self._units_of(root))
        solver = Solver(steps.profile, self.selective)
        return solver, self._planned(steps, solver)

    def _solved_on_numbers(self, root: nn.Module, steps: Steps, refusal: _OutOfReach) -> tuple[Solver, PlannedStep]:
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

    def _planned(self, steps: Steps, solver: Solver) -> PlannedStep:
        peak = steps.profile.peak
        budget = bytes_of(self.memory_budget, peak)
        target = budget
        for _ in range(_TRIES):
            choice = self._chosen(solver, target)
            if choice is None:
                break
            found = PlannedStep(choice, steps, self.memory_budget)
            if budget is None or found.measured.peak <= budget:
                return found
            assert target is not None
            target -= found.measured.peak - budget
        # A choice that was expected to fit may exceed the budget by a few bytes. The budget in the message must fit.
        lowest = PlannedStep(self._lowest(solver), steps, self.memory_budget)
        reached = lowest.measured.peak
        if budget is not None and reached <= budget:
            return lowest
        why = why_kept(steps.profile)
        raise _OutOfReach(
            f"{self.name} can't meet memory_budget={self.memory_budget!r}, which is {shown(budget or 0)} of the "
            f"{shown(peak)} that a step needs: the lowest is {shown(reached)}, "
            f'memory_budget={_rounded_up(reached / peak)} or "min".{why and f" {why}."}'
        )

    def _chosen(self, solver: Solver, budget: int | None) -> Choice | None:
        if budget is None:
            return self._lowest(solver)
        return solver.solve(budget) if self.strategy == "optimal" else solver.solve_uniform(budget)

    def _lowest(self, solver: Solver) -> Choice:
        return solver.lowest if self.strategy == "optimal" else solver.lowest_uniform()


def _without_plan(root: nn.Module) -> list[AttributeEdit]:
    """The edits that remove an earlier plan from the root."""
    forward = root.__dict__.get("forward")
    return [AttributeEdit(root, "forward", _inside(root))] if isinstance(forward, CheckpointedForward) else []


def _inside(module: nn.Module) -> Any:
    """The forward inside the one that this pass set on a module."""
    inner = module.__dict__["forward"].inner
    return types.MethodType(type(module).forward, module) if inner is None else inner


def _set_compiled(rewriter: ModuleRewriter, root: nn.Module, paths: Sequence[str]) -> None:
    """Make exactly these modules checkpoints under torch.compile."""
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


class _OutOfReach(Exception):
    """No plan keeps to the budget."""
