"""Runs of operations that compute each element by itself, as one kernel each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from passes.base import Context, GraphPass, PassResult
from passes.compiling.compiler import missing_compiler
from passes.errors import RequirementNotMet
from passes.graph.baked import Baked, BakedLayer
from passes.graph.capture import ModuleGraph
from passes.graph.edits import AttributeEdit
from passes.graph.effects import Aliases
from passes.graph.fused import FusedUnit, run_fused
from passes.graph.fused_trial import KernelTrial
from passes.graph.kernels import Backend, torchscript_fuses
from passes.graph.pointwise import PointwiseGroup, attributes_of, pointwise_groups
from passes.graph.program import Program, operation_name
from passes.graph.rewriter import Change, Place, Rewriter

# TorchScript's fuser looks at the first runs of a function, and makes its kernels then.
_WARMING_RUNS = 2


@dataclass(frozen=True)
class JitFusion(GraphPass):
    """Run each group of pointwise operations as one kernel.

        a = x * 0.5; b = x / 1.414; c = erf(b); d = c + 1; y = a * d   ->   y = mul_div_erf_add_mul(x)

    A group is as large as it can be: operations whose value is used inside alone are in it, with casts, sums and products
    with parameters, and activations that are layers of torch.nn. None is random, and none moves past something that may
    write to what it reads. In float16 and bfloat16 the values between the operations aren't rounded, as they stay in
    registers; the rest is as it was to a rounding error.

    Where a forward is traced, exported, or compiled as a whole, its units are the operations that they were made of: a
    fused model exports as it did before, and the pass may stand anywhere in the order. So are calls of few elements on a
    CPU. No tensor of the module is touched, and the forward of the class answers where the graph doesn't hold. With example
    inputs each kernel is run once beside its operations, whatever the size, in training with its gradients; one that
    computes otherwise isn't used.

    Does not handle: forwards that can't be traced; groups across modules; reductions, products of matrices; operations in
    place; a backward pass after a write to what a unit was given, where its operations keep only what they gave.

    Attributes:
        backend: what makes the kernels: "inductor", which needs a compiler; "torchscript", whose fuser is in builds of torch
            for CUDA, and which is warmed up on the example inputs; or "auto", the first of them that is there.
    """

    name: ClassVar[str] = "jit-fusion"

    backend: Literal["auto", "torchscript", "inductor"] = "auto"

    def check(self, context: Context) -> None:
        """See that something can make kernels for the device.

        Raises:
            RequirementNotMet: the backend can't.
        """
        super().check(context)
        self._backend(context.device)

    def would_apply(self, program: Program, context: Context) -> bool:
        """False: exported files hold the operations, not the kernels."""
        return False

    def _backend(self, device: torch.device) -> Backend:
        fuses, missing = torchscript_fuses(device), missing_compiler(device)
        no_fuser = f"this build of torch has no TorchScript fuser for {device.type}"
        if self.backend == "torchscript" and not fuses:
            raise RequirementNotMet(
                f"jit-fusion:backend=torchscript can't be had here: {no_fuser}; use backend=inductor, or leave it out."
            )
        if self.backend == "inductor" and missing:
            raise RequirementNotMet(f"jit-fusion:backend=inductor can't be had here: {missing}.")
        if self.backend == "auto" and missing and not fuses:
            raise RequirementNotMet(f"jit-fusion can't be had here: {no_fuser}, and {missing}.")
        if self.backend == "auto":
            return "torchscript" if missing else "inductor"
        return self.backend

    def run(self, program: Program, context: Context) -> PassResult:
        """Fuse in every graph that stands in for a forward, and try each kernel once where the root can be run."""
        result = super().run(program, context)
        wrong = _wrong_kernels(result, context)
        if wrong:
            # The others are the same without these.
            result.rewriter.roll_back()
            return self.run(program, replace(context, left_alone={**context.left_alone, **wrong}))
        if not result.changes:
            return result
        backend = self._backend(context.device)
        if backend == "torchscript" and context.run_compiled is not None:
            for _ in range(_WARMING_RUNS):
                context.run_compiled(nullcontext())
        units = tuple((change.where, unit.name, unit.operations) for change, unit in _units_of(result))
        return replace(result, detail=FusionRecord(backend, units))

    def rewrite(self, graph: Rewriter) -> None:
        """Fuse by what there is for the CPU."""
        self.rewrite_in(graph, Context("inference", torch.device("cpu")))

    def rewrite_in(self, graph: Rewriter, context: Context) -> None:
        """Fuse by what there is for the device."""
        backend = self._backend(context.device)
        for home in list(graph.program.graphs.values()):
            if home.traced:
                _fuse(graph, home, backend)


def _units_of(result: PassResult) -> Iterator[tuple[Change, FusedUnit]]:
    for change in result.changes:
        for edit in change.edits:
            if isinstance(edit, AttributeEdit) and isinstance(edit.new, FusedUnit):
                yield change, edit.new


def _wrong_kernels(result: PassResult, context: Context) -> dict[Place, str]:
    """The changes whose kernels compute otherwise than the operations, on what the example inputs give them."""
    found = list(_units_of(result))
    if not found or context.run_compiled is None:
        return {}
    trial = KernelTrial([unit for _, unit in found], training=context.mode == "training")
    context.run_compiled(trial)
    return {found[number][0].place: reason for number, reason in trial.wrong.items()}


def _fuse(graph: Rewriter, home: ModuleGraph, backend: Backend) -> None:
    groups = list(pointwise_groups(graph.program, home.graph))
    if not groups:
        return
    if (unwatched := home.unwatched()) is not None:
        graph.skip_module(home.path, f"its forward {unwatched}: what that answers at another call can't be known")
        return
    aliases = Aliases(graph.program, home.graph)
    # The last ones first: what they are given then stands there still.
    for group in reversed(groups):
        *_, last = group.nodes
        if aliases.may_be_written((*group.nodes, *group.inputs)):
            graph.skip(last, f"{operation_name(last)} and what it is made of, or is given, may be written to")
            continue
        unit = FusedUnit.of(graph.program, group, backend)
        text = f"{unit.name}: {unit.operations} kernels become one"
        with graph.change(graph.program.where(last), text, group.nodes, gives_way=True) as change:
            counted_on = _counted_on(graph.program, home, group)
            graph.substitute(change, group.nodes, run_fused, group.inputs, unit, counted_on)


def _counted_on(program: Program, home: ModuleGraph, group: PointwiseGroup) -> list[Baked]:
    """What was read of the layers in the group, whose calls are gone."""
    found: list[Baked] = []
    for node in group.nodes:
        module = program.module_of(node)
        if module is not None:
            path = tuple(str(node.target).split("."))
            found.append(BakedLayer.of_child(home.module, path))
            found += (Baked.of(home.module, name, getattr(module, name), path=path) for name in attributes_of(module))
    return found


@dataclass(frozen=True)
class FusionRecord:
    """What was fused.

    Attributes:
        backend: what makes the kernels.
        units: (path of the module, name of the unit, operations that it holds) of each.
    """

    backend: str
    units: tuple[tuple[str, str, int], ...]

    @property
    def kernels_before(self) -> int:
        """How many kernels the operations take one by one."""
        return sum(operations for *_, operations in self.units)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "backend": self.backend,
            "kernels_before": self.kernels_before,
            "kernels_after": len(self.units),
            "units": [{"where": w, "name": name, "operations": count} for w, name, count in self.units],
        }

    def __str__(self) -> str:
        return f"  {self.kernels_before} pointwise kernels -> {len(self.units)}, by {self.backend}"
