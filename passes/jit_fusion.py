"""Runs of operations that compute each element by itself, as one kernel each."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from passes.base import Context, PassResult
from passes.compiling.compiler import missing_compiler
from passes.errors import RequirementNotMet
from passes.fusion.fused import FusedUnit
from passes.fusion.kernel_trial import KernelTrial
from passes.fusion.kernels import Backend
from passes.fusion.pointwise import pointwise_groups
from passes.graph_interface import GraphPass, GraphRewriter, ModelTree
from passes.torch_private import torchscript_fuses

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
    CPU. No tensor of the module is touched. Each kernel is run once beside its operations, whatever the size, in training
    with its gradients; one that computes otherwise isn't used.

    Does not handle: what torch.compile can't capture; reductions, products of matrices; operations in place; a backward pass after a write to what a unit was given, where its operations keep only what they gave.

    Attributes:
        backend: what makes the kernels: "inductor", which needs a compiler; "torchscript", whose fuser is in builds of torch
            for CUDA, and which is warmed up on the example inputs; or "auto", the first of them that is there.
    """

    name: ClassVar[str] = "jit-fusion"
    # Files hold the operations that kernels are made of: what runs a file fuses for itself.
    in_files: ClassVar[bool] = False

    backend: Literal["auto", "torchscript", "inductor"] = "auto"

    def check(self, context: Context) -> None:
        """See that something can make kernels for the device.

        Raises:
            RequirementNotMet: the backend can't.
        """
        super().check(context)
        self._backend(context.device)

    def _backend(self, device: torch.device) -> Backend:
        fuses, missing = torchscript_fuses(device), missing_compiler(device)
        no_fuser = f"this build of torch has no TorchScript fuser for {device.type}"
        if self.backend == "torchscript" and not fuses:
            raise RequirementNotMet(
                f"jit-fusion:backend=torchscript isn't available here: {no_fuser}; use backend=inductor, or leave "
                "it out."
            )
        if self.backend == "inductor" and missing:
            raise RequirementNotMet(f"jit-fusion:backend=inductor isn't available here: {missing}.")
        if self.backend == "auto" and missing and not fuses:
            raise RequirementNotMet(f"jit-fusion isn't available here: {no_fuser}, and {missing}.")
        if self.backend == "auto":
            return "torchscript" if missing else "inductor"
        return self.backend

    def run(self, tree: ModelTree, context: Context) -> PassResult:
        """Fuse in every captured graph, and try each kernel once."""
        result = super().run(tree, context)
        if not result.changes or context.run_compiled is None:
            return result
        trial = KernelTrial(training=context.mode == "training")
        context.run_compiled(trial)
        if trial.wrong:
            # The others are the same without these.
            result.rewriter.roll_back()
            return self.run(tree, replace(context, left_alone={**context.left_alone, **trial.wrong}))
        backend = self._backend(context.device)
        if backend == "torchscript":
            for _ in range(_WARMING_RUNS):
                context.run_compiled(nullcontext())
        units = tuple((place.where, unit.name, unit.operations) for place, unit in trial.units.items())
        return replace(result, detail=FusionRecord(backend, units))

    def rewrite(self, graph: GraphRewriter, context: Context) -> None:
        """Fuse by what there is for the device."""
        backend, memory = self._backend(context.device), graph.memory()
        # The last ones first: what they are given then stands there still.
        for group in reversed(list(pointwise_groups(graph.nodes, graph.settings()))):
            *_, last = group.nodes
            if memory.may_be_written((*group.nodes, *group.inputs)):
                graph.skip(
                    last,
                    f"{graph.name_of(last)}, a value that it is computed from, or an input of it may be written to",
                )
                continue
            unit = FusedUnit.of(group, backend)
            with graph.change(last, f"{unit.name}: {unit.operations} kernels become one") as change:
                unit.place = change.place
                graph.replace_call(last, unit, group.inputs)


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
