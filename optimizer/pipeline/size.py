"""The size of a model, and the share of it that the example calls reach."""

from __future__ import annotations

from torch.nn.parameter import is_lazy

from optimizer.report import CoverageRecord, Size
from passes.base import Context
from passes.program.model_tree import ModelTree
from passes.program.recording import Node, Recorder, Recording, shape_of, tensor_of
from passes.program.runs import recorded_runs


def size_of(tree: ModelTree, context: Context, recording: Recording | None = None) -> Size:
    """The parameters, bytes and operations of the model; None operations where no run shows them.

    Args:
        recording: of a run of the model; without it, and without a recording that passes read, the model is run.
    """
    parameters = [parameter for parameter in tree.root.parameters() if not is_lazy(parameter)]
    return Size(
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        _operations(tree, context, recording),
    )


def _operations(tree: ModelTree, context: Context, recording: Recording | None) -> int | None:
    if tree.runs is not None and tree.runs.runs:
        recording = tree.runs.runs[0].recording
    elif recording is None:
        recorder = Recorder(tree.root, tree.modules)
        if context.run_each is None or context.run_each(recorder, 0) is not None:
            return None
        recording = recorder.recording
    return sum(map(_computes, recording.nodes()))


def _computes(node: Node) -> bool:
    """Whether a recorded node is a call that computes, and reads no property such as `x.shape` or `x.grad_fn`."""
    is_call = node.op == "call_function" and not node.meta["asks"]
    return is_call and not (getattr(node.target, "__name__", "") == "__get__" and shape_of(node) is None)


def coverage_record(tree: ModelTree, context: Context) -> CoverageRecord:
    """The share of modules with parameters that the example calls reach."""
    owners = [module for module in tree.modules() if any(p is not None for p in module._parameters.values())]
    recorded = recorded_runs(tree, context)
    if recorded is None:
        return CoverageRecord(0, len(owners))
    nodes = (node for run in recorded.runs for node in run.recording.nodes())
    read = {id(ref.value) for node in nodes if (ref := tensor_of(node)) is not None}
    unreached = [module for module in owners if not any(id(p) in read for p in module._parameters.values())]
    return CoverageRecord(len(owners) - len(unreached), len(owners), tuple(map(tree.path, unreached)))


def record_runs(tree: ModelTree, context: Context) -> str:
    """Record runs of the model where none are known; the reason why they can't be recorded, or ""."""
    recorded = recorded_runs(tree, context)
    return "" if recorded is None else recorded.failure
