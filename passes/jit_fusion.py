"""Fuse pointwise operations, which compute each element separately, into single kernels."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from passes.base import Context, PassResult
from passes.compiling.compiler import missing_compiler
from passes.errors import RequirementNotMet
from passes.fusion.fused import FusedUnit, KernelTrial
from passes.fusion.kernels import Backend
from passes.fusion.pointwise import pointwise_groups
from passes.graph_interface import GraphPass, GraphRewriter, ModelTree
from passes.torch_private import torchscript_fuses

# TorchScript's fuser profiles the first runs of a function before it generates kernels.
_WARMING_RUNS = 2


@dataclass(frozen=True)
class JitFusion(GraphPass):
    """Run each group of pointwise operations as one kernel.

        a = x * 0.5; b = x / 1.414; c = erf(b); d = c + 1; y = a * d   ->   y = mul_div_erf_add_mul(x)

    A group is as large as possible: an operation joins it if its value is used only inside the group. Casts, sums and
    products with parameters, and activations of torch.nn are fused too. Operations that draw random numbers aren't. A
    group is left alone if one of its values or inputs may be written to. In float16 and bfloat16, intermediate values
    stay in registers and aren't rounded. Otherwise results are the same up to rounding error.

    If a forward is traced, exported, or compiled as a whole, its fused groups run as the operations that they were made of. So
    a fused model exports as before, and the pass can be anywhere in the order before torch-compile and
    insert-checkpoints. On a CPU, calls whose inputs all have fewer than 2^17 elements run the operations too. No tensor
    of the module is changed. Each kernel is compared once with its operations, at any size, and in training with its
    gradients. A kernel with wrong results isn't used. Nor is one that is no faster than its operations on the example
    inputs, so give inputs of the sizes of your calls. Nothing is timed where OPTIMIZE_EXPORT_NO_BENCH is set.

    Does not handle: code that torch.compile can't capture; reductions and matrix products; in-place operations; a
    backward pass after a write to an input of a unit, if the single operations save only their outputs for it.

    Attributes:
        backend: the compiler of the kernels. "inductor" needs a C++ compiler and Python's headers on a CPU, and
            triton on a GPU. "torchscript" needs a build of torch with TorchScript's fuser, such as one for CUDA;
            its kernels are compiled on the example inputs. "auto" is inductor if it is available, otherwise
            torchscript.
    """

    name: ClassVar[str] = "jit-fusion"
    # Files contain the single operations; the runtime of a file does its own fusion.
    in_files: ClassVar[bool] = False

    backend: Literal["auto", "torchscript", "inductor"] = "auto"

    def check(self, context: Context) -> None:
        """Check that the backend can generate kernels for the device.

        Raises:
            RequirementNotMet: it can't.
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
        """Fuse the groups in every captured graph, and check each kernel once."""
        result = super().run(tree, context)
        if not result.changes or context.run_compiled is None:
            return result
        trial = KernelTrial(training=context.mode == "training", timed=context.may_time)
        context.run_compiled(trial)
        if trial.refused:
            # Leaving out some kernels doesn't change the others.
            result.rewriter.roll_back()
            return self.run(tree, replace(context, left_alone={**context.left_alone, **trial.refused}))
        backend = self._backend(context.device)
        if backend == "torchscript":
            for _ in range(_WARMING_RUNS):
                context.run_compiled(nullcontext())
        units = tuple((place.where, unit.name, unit.operations) for place, unit in trial.units.items())
        return replace(result, detail=FusionRecord(backend, units))

    def rewrite(self, graph: GraphRewriter, context: Context) -> None:
        """Fuse each group, for the backend of the device."""
        backend, memory = self._backend(context.device), graph.memory()
        # From the last group to the first, so that the inputs of each group aren't replaced yet.
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
    """The kernels that a run of the pass made."""

    backend: str  # the compiler of the kernels
    # (path of the module, name of the unit, number of operations in it) for each kernel
    units: tuple[tuple[str, str, int], ...]

    @property
    def kernels_before(self) -> int:
        """The number of kernels that the operations run without the pass."""
        return sum(operations for *_, operations in self.units)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON-serializable data."""
        return {
            "backend": self.backend,
            "kernels_before": self.kernels_before,
            "kernels_after": len(self.units),
            "units": [{"where": w, "name": name, "operations": count} for w, name, count in self.units],
        }

    def __str__(self) -> str:
        return f"  {self.kernels_before} pointwise kernels -> {len(self.units)}, by {self.backend}"
