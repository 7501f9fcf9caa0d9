"""A tensor pass: it changes parameters and buffers by what recorded runs show, and the model's own forward goes on running."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from passes.base import Context, Pass, PassResult
from passes.graph.edits import taken_back
from passes.graph.program import Program
from passes.graph.rewriter import Skip
from passes.program.model_tree import ModelTree
from passes.program.recording import Recorder, Recording
from passes.program.replay import Replay
from passes.program.tensor_rewriting import TensorChange, TensorRewriter


class TensorPass(Pass):
    """A pass that changes parameters and buffers of the working copy.

    `rewrite` finds the places in recorded runs of the example inputs, skips or changes each. What it changes is guarded by
    seals, in branches too that no run took, and checked on the values of a run. Without example inputs nothing is known of
    the model, and it is left as it is.
    """

    @abstractmethod
    def rewrite(self, model: TensorRewriter, context: Context) -> None:
        """Find the places, skip or change each."""

    def would_apply(self, program: Program, context: Context) -> bool:
        """As `Pass.would_apply`; the examples are run for it."""
        result = self.run(program, replace(context, judge=None))
        result.rewriter.roll_back()
        return bool(result.changes)

    def run(self, program: Program, context: Context) -> PassResult:
        """Record the example calls, rewrite what they show, and check each change on the values that flow there."""
        tree = ModelTree(program.root, program.unregistered)
        runs, skip = _recorded(tree, context)
        recordings = {run.recording: _WHEN[run.flag] for run in runs}
        writer = TensorRewriter(tree, context.mode, recordings, context.left_alone)
        if skip is not None:
            writer.skips.append(skip)
        elif _is_under_autocast(tree):
            reason = (
                "optimize() was called under autocast, which changes what is computed in which dtype: call it outside"
            )
            writer.skips.append(Skip("", reason))
        else:
            try:
                self.rewrite(writer, context)
                writer.finish()
                checked = tuple(_checked(tree, context, writer, runs))
                program.refresh()
                program.made.update({id(parameter): parameter for parameter in writer.made})
                return _result(writer, checked)
            except BaseException:
                writer.roll_back()
                program.refresh()
                raise
        return _result(writer, ())


def _result(writer: TensorRewriter, checked: Sequence[tuple[Any, Any]]) -> PassResult:
    return PassResult(tuple(writer.changes), tuple(writer.skips), writer, checked=tuple(checked))  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Run:
    """One recorded run: of which example call, and with which training flag; None for the flags as they are."""

    number: int
    flag: bool | None
    recording: Recording


_WHEN = {None: "", False: "in eval", True: "in training"}


def _recorded(tree: ModelTree, context: Context) -> tuple[list[_Run], Skip | None]:
    """A run of each example call; in training in each state that all flags may be set to as well."""
    if context.run_each is None:
        return [], Skip("", "nothing is known of it without a run: give example inputs")
    runs: list[_Run] = []
    for flag in _states(tree.root, context.mode):
        for number in range(len(context.example_calls)):
            recorder = Recorder(tree.root, tree.modules)
            with _flags(tree.root, flag):
                failure = context.run_each(recorder, number)
            if failure is not None:
                return runs, Skip("", " ".join(filter(None, ("it can't be recorded", _WHEN[flag], f"({failure})"))))
            runs.append(_Run(number, flag, recorder.recording))
    return runs, None


def _states(root: nn.Module, mode: str) -> list[bool | None]:
    if mode != "training":
        return [None]
    flags = {module.training for module in root.modules() if hasattr(module, "training")}
    return [None, *(flag for flag in (False, True) if flag not in flags or len(flags) > 1)]


@contextmanager
def _flags(root: nn.Module, flag: bool | None) -> Iterator[None]:
    """All modules in training or in eval, whatever `.train()` of their classes does; None leaves them."""
    before = [(module, module.__dict__["training"]) for module in root.modules() if "training" in module.__dict__]
    try:
        for module, own in before:
            module.__dict__["training"] = own if flag is None else flag
        yield
    finally:
        for module, own in before:
            module.__dict__["training"] = own


def _checked(
    tree: ModelTree, context: Context, writer: TensorRewriter, runs: Sequence[_Run]
) -> list[tuple[TensorChange, Any]]:
    """Each change with what was found where its pair is computed with it and without it, in the run of the fewest rows."""
    judge, run_each = context.judge, context.run_each
    if judge is None or run_each is None:
        return []
    found: list[tuple[TensorChange, Any]] = []
    left = dict(enumerate(writer.changes))

    def compare(number: int, old: Callable[..., Any], new: Callable[..., Any], values: tuple[Any, ...]) -> None:
        found.append((writer.changes[number], judge(old, new, values)))

    for run in sorted(runs, key=lambda run: _rows(context.example_calls[run.number])):
        shown = {n: change.rewritten[run.recording] for n, change in left.items() if run.recording in change.rewritten}
        if not shown:
            continue
        replay = Replay(tree.root, tree.modules, run.recording, shown, compare, in_eval_too=context.mode == "training")
        with taken_back(writer.edits), _flags(tree.root, run.flag):
            failure = run_each(replay, run.number)
        if failure is not None:
            raise RuntimeError(f"the run in which its changes are checked raises ({failure})")
        left = {number: change for number, change in left.items() if number not in shown}
    compared = {id(change) for change, _ in found}
    missing = next((change for change in writer.changes if id(change) not in compared), None)
    if missing is not None:
        raise RuntimeError(f"a second run of the model goes another way at {missing.where or 'the root'}")
    return found


def _rows(call: tuple[tuple[Any, ...], dict[str, Any]]) -> int:
    args, kwargs = call
    tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return next((len(tensor) for tensor in tensors if tensor.dim()), 0)


def _is_under_autocast(tree: ModelTree) -> bool:
    devices = {parameter.device.type for parameter in tree.root.parameters()}
    return any(torch.amp.is_autocast_available(one) and torch.is_autocast_enabled(one) for one in devices)
