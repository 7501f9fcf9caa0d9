"""What `tune_training` tries: the choices that may pay for a model on its device, and the points of the curve of memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from optimizer.training.setup import Setup
from optimizer.training.stepping import TrainingJob
from passes.cast_precision import fast_dtypes
from passes.compiling.blocks import repeated_blocks
from passes.torch_private import AnyBatchNorm

# What compiling takes, in seconds: before the first kernel, for each kind of layer, and for each layer. Equal layers share
# their kernels. On two cores, torch 2.13 took 28 s for 28 layers of 10 kinds, and 39 and 53 s for 57 layers of 25 kinds.
# On an H200, it compiled the forward of a BERT-base (153 layers of 10 kinds) in 20 s.
_COMPILER_START = 12.0
_KIND_ON_CPU, _LAYER_ON_CPU = 1.5, 0.15
_KIND_ON_GPU, _LAYER_ON_GPU = 1.0, 0.05
# What planning checkpoints takes, in seconds: at least, and for each layer.
_PLANNER_START, _LAYER_OF_PLAN = 3.0, 0.2
CHECKPOINTS, FUSION = "insert-checkpoints", "jit-fusion"
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)
# The points of the curve: budgets of insert-checkpoints, and shares of what torch's compiler keeps.
_BUDGETS = ("0.7", "min", "0.5", "0.35", "0.85")
_SHARES_OF_TORCH = (0.5, 0.25, 0.75)


@dataclass(frozen=True)
class Choice:
    """Something to try: its name in the table, its setup, and about how long it takes to make it run, in seconds."""

    name: str
    setup: Setup
    seconds: float = 0.0

    @property
    def compiles(self) -> bool:
        """Whether it makes kernels, which takes long: it is tried on top of the others that pay, and not alone."""
        return bool(self.setup.compile) or self.name == FUSION


def choices_for(job: TrainingJob) -> Iterator[Choice]:
    """What may pay for this model on this device, what most often gains most first, and what takes long to make last."""
    on_gpu = job.device.type == "cuda"
    modules = list(job.model.modules())
    convolves = any(isinstance(each, _CONVOLUTIONS) for each in modules)
    lower: list[Choice] = []
    if any(one.dtype is torch.float32 for one in job.model.parameters()):
        if on_gpu and torch.cuda.get_device_capability(job.device) >= (8, 0) and not _uses_tf32():
            lower.append(Choice("TF32", Setup(precision="tf32")))
        lower.append(Choice("bf16 autocast", Setup(precision="bf16")))
        if on_gpu:
            lower.append(Choice("fp16 autocast", Setup(precision="fp16")))
    is_fast = bool(fast_dtypes(job.device))
    yield from lower if is_fast else ()
    group = job.optimizer.param_groups[0]
    if not group.get("fused"):
        yield Choice("fused optimizer", Setup(optimizer="fused"))
    # On a GPU, that is torch's default.
    if "foreach" in group and not group["foreach"] and not (on_gpu and group["foreach"] is None):
        yield Choice("foreach optimizer", Setup(optimizer="foreach"))
    yield Choice("gradients zeroed in place", Setup(set_to_none=False))
    if any(isinstance(each, nn.Conv2d | nn.ConvTranspose2d) for each in modules):
        yield Choice("channels_last", Setup(channels_last=True))
    if on_gpu and convolves and not torch.backends.cudnn.benchmark:
        yield Choice("cudnn.benchmark", Setup(cudnn_benchmark=True))
    yield from () if is_fast else lower
    if convolves and any(isinstance(each, AnyBatchNorm) for each in modules):
        yield Choice("fold-conv-bias", Setup(passes=("fold-conv-bias",)), 3.0)
    yield Choice(CHECKPOINTS, Setup(passes=("insert-checkpoints:memory_budget=0.5",)), _seconds_to_plan(job))
    if groups := repeated_blocks(job.model):
        blocks = [group[0][1] for group in groups]
        yield Choice("torch.compile of blocks", Setup(compile="blocks"), _seconds_to_compile(blocks, on_gpu=on_gpu))
    whole = _seconds_to_compile([job.model], on_gpu=on_gpu)
    yield Choice("torch.compile", Setup(compile="whole"), whole)
    yield Choice(FUSION, Setup(passes=("jit-fusion",)), whole)


def _seconds_to_plan(job: TrainingJob) -> float:
    return _PLANNER_START + _LAYER_OF_PLAN * len(_layers_of([job.model]))


def _seconds_to_compile(modules: Iterable[nn.Module], *, on_gpu: bool) -> float:
    layers = _layers_of(modules)
    kinds = {(type(each), *(one.shape for one in each.parameters(recurse=False))) for each in layers}
    kind, layer = (_KIND_ON_GPU, _LAYER_ON_GPU) if on_gpu else (_KIND_ON_CPU, _LAYER_ON_CPU)
    return _COMPILER_START + kind * len(kinds) + layer * len(layers)


def _layers_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return [each for module in modules for each in module.modules() if not any(each.children())]


def _uses_tf32() -> bool:
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:
        # torch refuses to read it after the user has set `fp32_precision`.
        return True


def conflict(one: Setup, other: Setup) -> bool:
    """Whether two setups can't be combined: they choose the same thing in two ways, or passes and a compiler."""
    default = Setup()
    for name in ("precision", "compile", "optimizer"):
        values = getattr(one, name), getattr(other, name)
        if getattr(default, name) not in values and values[0] != values[1]:
            return True
    return any(each.compile and another.passes for each, another in ((one, other), (other, one)))


def curve_points(job: TrainingJob, planned: float | None) -> Iterator[Choice]:
    """Ways to run the step in less memory: our checkpoints, uniform ones, and torch's own budget; the most telling first.

    Args:
        planned: the seconds that planning checkpoints took; None if that isn't known.
    """
    planned = _seconds_to_plan(job) if planned is None else planned
    for budget in _BUDGETS:
        told = "lowest peak" if budget == "min" else f"{float(budget):.0%} of the peak"
        for name, more in (("checkpoints", ""), ("uniform checkpoints", ":strategy=uniform")):
            setup = Setup(passes=(f"insert-checkpoints:memory_budget={budget}{more}",))
            # Each is planned twice: to be timed, and to be proven.
            yield Choice(f"{name}, {told}", setup, 1.5 * planned)
    compiled = _seconds_to_compile([job.model], on_gpu=job.device.type == "cuda")
    for share in _SHARES_OF_TORCH:
        setup = Setup(compile="whole", compile_budget=share)
        yield Choice(f"torch.compile, its budget at {share:.0%}", setup, compiled)
