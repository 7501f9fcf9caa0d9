"""The base class of tensor passes, which change weights and keep the model's own forward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from passes.base import Context, Pass, PassResult, rows_of
from passes.program.changes import Skip
from passes.program.edits import taken_back
from passes.program.model_tree import ModelTree, training_flags
from passes.program.recording import Run
from passes.program.replay import Replay
from passes.program.runs import is_under_autocast, recorded_runs
from passes.program.tensor_rewriting import TensorChange, TensorRewriter


class TensorPass(Pass):
    """A pass that changes parameters and buffers of the working copy.

    `rewrite` finds the candidates in recorded runs of the example inputs, and changes or skips each. Seals guard the
    changed tensors in branches that no run took. Each change is checked on the values of a run. Without example inputs,
    the pass changes nothing.
    """

    @abstractmethod
    def rewrite(self, model: TensorRewriter, context: Context) -> None:
        """Find the candidates, and change or skip each."""

    def would_apply(self, tree: ModelTree, context: Context) -> bool:
        """See `Pass.would_apply`. Runs the example inputs."""
        result = self.run(tree, replace(context, judge=None))
        result.rewriter.roll_back()
        return bool(result.changes)

    def run(self, tree: ModelTree, context: Context) -> PassResult:
        """Record the example calls, rewrite the pairs found there, and check each change on real activations."""
        recorded = recorded_runs(tree, context)
        runs = () if recorded is None else recorded.runs
        writer = TensorRewriter(tree, context.mode, {run.recording: run.when for run in runs}, context.left_alone)
        if recorded is None:
            writer.skips.append(Skip("", "it needs a run: add example inputs"))
        elif recorded.failure:
            writer.skips.append(Skip("", recorded.failure))
        elif is_under_autocast(tree):
            reason = (
                "optimize() was called under autocast, which changes the dtypes of the computation: call it "
                "outside autocast"
            )
            writer.skips.append(Skip("", reason))
        else:
            try:
                self.rewrite(writer, context)
                writer.finish()
                checked = tuple(_checked(tree, context, writer, runs))
                if writer.changes:
                    tree.refresh(weights_alone=True)
                tree.made.update({id(parameter): parameter for parameter in writer.made})
                return _result(writer, checked)
            except BaseException:
                writer.roll_back()
                raise
        return _result(writer, ())


def _result(writer: TensorRewriter, checked: Sequence[tuple[Any, Any]]) -> PassResult:
    return PassResult(tuple(writer.changes), tuple(writer.skips), writer, checked=tuple(checked))


def _checked(
    tree: ModelTree, context: Context, writer: TensorRewriter, runs: Sequence[Run]
) -> list[tuple[TensorChange, Any]]:
    """Compare each pair with and without its change, in the run with the smallest batch that reaches it."""
    judge, run_inside = context.judge, context.run_inside
    if judge is None or run_inside is None:
        return []
    found: list[tuple[TensorChange, Any]] = []
    left = dict(enumerate(writer.changes))

    def compare(number: int, old: Callable[..., Any], new: Callable[..., Any], values: tuple[Any, ...]) -> None:
        found.append((writer.changes[number], judge(old, new, values)))

    for run in sorted(runs, key=lambda run: rows_of(context.example_calls[run.number])):
        shown = {n: change.rewritten[run.recording] for n, change in left.items() if run.recording in change.rewritten}
        if not shown:
            continue
        replay = Replay(tree.root, tree.modules, run.recording, shown, compare, in_eval_too=context.mode == "training")
        with taken_back(writer.edits), training_flags(tree.root, run.flag):
            failure = run_inside(replay, run.number)
        if failure is not None:
            raise RuntimeError(f"the run that checks its changes raises ({failure})")
        left = {number: change for number, change in left.items() if number not in shown}
    compared = {id(change) for change, _ in found}
    missing = next((change for change in writer.changes if id(change) not in compared), None)
    if missing is not None:
        raise RuntimeError(f"a second run of the model takes a different path at {missing.where or 'the root'}")
    return found
