"""Rules on a training step: its checkpoints, its DataLoader and its optimizer. They need a training step that ran."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from optimizer.diagnosis.evidence import Evidence, Line, Seen
from optimizer.diagnosis.rule import rule
from optimizer.showing import percent_text
from passes.graph.recording import Node, operation_name

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
    for line, _ in _by_line(_steps(evidence), "loader"):
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
