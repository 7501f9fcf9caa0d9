"""Rules on settings: those of torch for a GPU, and those of a training step, which needs one that ran.

On a CPU, the rules for a GPU see nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.utils.data import DataLoader

from optimizer.diagnosis.evidence import Evidence, Line, Seen
from optimizer.diagnosis.findings import rule
from optimizer.showing import percent_text, seconds_text
from passes.graph.layers import convolution_arguments
from passes.graph.recording import Node, operation_name, shape_of

# ------------------------------------------------------------------------------------------------------- torch on a GPU

# The least speed-up of the forward for which a setting is reported.
_LEAST_GAIN = 1.05
_AMPERE = (8, 0)


@rule("note")
def cudnn_benchmark(evidence: Evidence) -> Iterator[Seen]:
    """On a GPU, `torch.backends.cudnn.benchmark` is off, and the convolutions are at least 5 % faster with it."""
    has_convolutions = any(convolution_arguments(node) and operation_name(node) != "linear" for node in evidence.calls)
    if evidence.device.type == "cuda" and not torch.backends.cudnn.benchmark and has_convolutions:
        yield from _compare_setting(
            evidence,
            torch.backends.cudnn,
            "benchmark",
            "cudnn.benchmark is off",
            "set torch.backends.cudnn.benchmark = True, if the sizes of the inputs seldom change",
        )


@rule("note")
def tf32_off(evidence: Evidence) -> Iterator[Seen]:
    """On a GPU with TF32, float32 products don't use it, and the forward is at least 5 % faster with it."""
    if evidence.device.type != "cuda" or torch.cuda.get_device_capability(evidence.device) < _AMPERE:
        return
    try:
        is_on = torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:
        # torch refuses to read it after the user has set `fp32_precision`.
        return
    shapes = (shape_of(node) for node in evidence.calls if convolution_arguments(node))
    if is_on or not any(shape is not None and shape.dtype is torch.float32 for shape in shapes):
        return
    yield from _compare_setting(
        evidence,
        torch.backends.cuda.matmul,
        "allow_tf32",
        "float32 products don't use TF32",
        'call torch.set_float32_matmul_precision("high"), if 11 significant bits are enough',
    )


@rule("note")
def deterministic(evidence: Evidence) -> Iterator[Seen]:
    """On a GPU, deterministic algorithms are on, and the forward is at least 5 % faster without them."""
    if evidence.device.type == "cuda" and torch.backends.cudnn.deterministic:
        yield from _compare_setting(
            evidence,
            torch.backends.cudnn,
            "deterministic",
            "cudnn.deterministic is on",
            "set torch.backends.cudnn.deterministic = False, if results may differ in the last bits from run to run",
        )


def _compare_setting(evidence: Evidence, owner: object, name: str, reason: str, remedy: str) -> Iterator[Seen]:
    """The gain of changing a setting; nothing if it is too small."""
    kept = getattr(owner, name)
    (before,) = evidence.fastest(evidence.forward)
    try:
        setattr(owner, name, not kept)
        (after,) = evidence.fastest(evidence.forward)
    finally:
        setattr(owner, name, kept)
    if before >= _LEAST_GAIN * after:
        effect = f"the forward takes {seconds_text(before)}, and {seconds_text(after)} with the other setting"
        yield Seen(("",), Line(), reason, effect, remedy)


# ---------------------------------------------------------------------------------------------------- the training step

# The least share of a step spent waiting for a DataLoader that is reported.
_LEAST_WAIT = 0.05


@rule("warning")
def reentrant_checkpoint(evidence: Evidence) -> Iterator[Seen]:
    """A checkpoint is made with `use_reentrant=True`, in the forward or in the training step."""
    forward = set(evidence.calls)
    for line, group in _by_line((*evidence.calls, *_steps(evidence)), "checkpoint"):
        modules = tuple(dict.fromkeys(evidence.path(node) for node in group if node in forward))
        yield Seen(
            modules,
            line,
            "a checkpoint is reentrant",
            "it takes no keyword arguments, ignores nested outputs, fails under torch.autograd.grad, and recomputes all of "
            "its part",
            "call checkpoint(…, use_reentrant=False), or use the pass insert-checkpoints",
        )


@rule("warning")
def loader_without_workers(evidence: Evidence) -> Iterator[Seen]:
    """The training step waits at least 5 % of its time for a DataLoader without workers."""
    if evidence.step is None or evidence.step.waiting < _LEAST_WAIT:
        return
    lines = [line for line, _ in _by_line(_steps(evidence), "loader")]
    if isinstance(loader := evidence.step.loader, DataLoader):
        # Our own line drew from it.
        lines = [Line()] * (loader.num_workers == 0)
    for line in lines:
        yield Seen(
            (),
            line,
            "the DataLoader has no workers",
            f"the step waits {percent_text(evidence.step.waiting)} of its time for the data",
            "pass num_workers, and on a GPU pin_memory=True",
        )


@rule("warning")
def pageable_copy(evidence: Evidence) -> Iterator[Seen]:
    """On a GPU, the training step copies a batch from memory that isn't pinned."""
    for node in _steps(evidence):
        if node.meta["pageable"]:
            yield Seen(
                (),
                node.meta["line"],
                "a batch is copied to the GPU from memory that isn't pinned",
                "the CPU waits for the copy",
                "pass pin_memory=True to the DataLoader, and copy with non_blocking=True",
            )


@rule("warning")
def gradients_zeroed(evidence: Evidence) -> Iterator[Seen]:
    """The training step calls `zero_grad(set_to_none=False)`."""
    zeroed = [node for node in _steps(evidence) if operation_name(node) in ("zero_", "_foreach_zero_")]
    for line, group in _by_line(zeroed, "zero_grad"):
        yield Seen(
            (),
            line,
            "zero_grad keeps the gradients and fills them with zeros",
            f"it writes {len(group)} gradients, keeps their memory in the forward, and makes the backward pass add to "
            "them",
            "leave out set_to_none=False",
        )


def _steps(evidence: Evidence) -> list[Node]:
    return [] if evidence.step is None else evidence.step.calls


def _by_line(nodes: Iterable[Node], inside: str) -> Iterator[tuple[Line, list[Node]]]:
    """Group the calls inside of a function of torch by the lines that call it."""
    groups: dict[Line, list[Node]] = {}
    for node in nodes:
        if (line := node.meta["inside"].get(inside)) is not None:
            groups.setdefault(line, []).append(node)
    yield from groups.items()
