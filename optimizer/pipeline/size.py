"""The size of a model, the share of it that the example calls reach, and its operations."""

from __future__ import annotations

from torch.nn.parameter import is_lazy

from optimizer.report import CoverageRecord, Size
from passes.base import Context
from passes.graph.model_tree import ModelTree
from passes.graph.recording import call_of, operation_name, tensor_of
from passes.graph.runs import recorded_runs


def size_of(tree: ModelTree) -> Size:
    """The parameters of the model and their bytes."""
    parameters = [parameter for parameter in tree.root.parameters() if not is_lazy(parameter)]
    return Size(
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.numel() * parameter.element_size() for parameter in parameters),
    )


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


def recorded_operations(tree: ModelTree, context: Context) -> tuple[tuple[str, str], ...]:
    """The path of the module and the name of each operation of the first recorded run, in order."""
    recorded = recorded_runs(tree, context)
    nodes = recorded.runs[0].recording.nodes() if recorded is not None and recorded.runs else []
    calls = [node for node in nodes if node.op == "call_function" and not node.meta["asks"]]
    return tuple((tree.path(call_of(node).module), operation_name(node)) for node in calls)


def record_runs(tree: ModelTree, context: Context) -> str:
    """Record runs of the model if there are none yet; return the reason if that fails, otherwise ""."""
    recorded = recorded_runs(tree, context)
    return "" if recorded is None else recorded.failure
