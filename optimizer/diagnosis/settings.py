"""Rules on the settings of torch for a GPU; on a CPU they see nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from optimizer.diagnosis.evidence import Evidence, Line, Seen
from optimizer.diagnosis.rule import rule
from optimizer.showing import seconds_text
from passes.graph.matching import convolution_at
from passes.graph.recording import shape_of

# The least speed-up of the forward for which a setting is reported.
_LEAST_GAIN = 1.05
_AMPERE = (8, 0)


@rule("note")
def cudnn_benchmark(evidence: Evidence) -> Iterator[Seen]:
    """On a GPU, `torch.backends.cudnn.benchmark` is off, and the convolutions are at least 5 % faster with it."""
    if evidence.device.type == "cuda" and not torch.backends.cudnn.benchmark and _has_convolutions(evidence):
        yield from _told(
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
    if is_on or not _is_float32(evidence):
        return
    yield from _told(
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
        yield from _told(
            evidence,
            torch.backends.cudnn,
            "deterministic",
            "cudnn.deterministic is on",
            "set torch.backends.cudnn.deterministic = False, if results may differ in the last bits from run to run",
        )


def _told(evidence: Evidence, owner: object, name: str, reason: str, remedy: str) -> Iterator[Seen]:
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


def _has_convolutions(evidence: Evidence) -> bool:
    return any((layer := convolution_at(node)) is not None and layer.dims for node in evidence.calls)


def _is_float32(evidence: Evidence) -> bool:
    shapes = (shape_of(node) for node in evidence.calls if convolution_at(node) is not None)
    return any(shape is not None and shape.dtype is torch.float32 for shape in shapes)
