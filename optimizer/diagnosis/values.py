"""Rules on values: which leave the device, are made on the wrong one, or grow to float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy
import torch

from optimizer.diagnosis.evidence import Evidence, Seen, has_array, names_device
from optimizer.diagnosis.rule import rule
from optimizer.showing import percent_text
from passes.program.recording import Node, operation_name, shape_of

_WAITS = "on a GPU the CPU waits here until all kernels before it have ended, and torch.compile breaks its graph if it comes here"
_FROM_HOST = "on a GPU every call copies it again, and waits for the copy"
# Types of answers that hold values of a tensor; a bool decides something.
_NUMBERS = (int, float, complex, list, str, numpy.ndarray)


@rule("warning")
def value_read(evidence: Evidence) -> Iterator[Seen]:
    """Forward moves values to the CPU: `.item()`, `.tolist()`, `.numpy()`, `.cpu()`, `int(tensor)`, or a tensor in a text."""
    nodes = [node for node in evidence.calls if _reads(evidence, node)]
    for line, group in evidence.by_line(nodes):
        yield evidence.seen(
            line,
            group,
            f"{_names(group)} moves values of the device to Python or to the CPU",
            _WAITS,
            "keep it a tensor, or compute it outside of forward",
        )


@rule("warning")
def data_dependent_branch(evidence: Evidence) -> Iterator[Seen]:
    """Python decides by the values of a tensor: `if mask.any()`, `while`, `assert`, `and`, `torch.equal`."""
    answers = [node for node in evidence.calls if node.meta["answer"] is bool and "check" not in node.meta["inside"]]
    nodes = [node for node in answers if _is_of_device(evidence, node)]
    for line, group in evidence.by_line(nodes):
        yield evidence.seen(
            line,
            group,
            "Python decides by the values of a tensor",
            _WAITS,
            "use torch.where or torch.cond, or decide outside of forward",
        )


@rule("warning")
def fixed_device(evidence: Evidence) -> Iterator[Seen]:
    """Forward moves a tensor with `.cuda()`."""
    nodes = [node for node in evidence.calls if operation_name(node) == "cuda"]
    for line, group in evidence.by_line(nodes):
        yield evidence.seen(
            line,
            group,
            "`.cuda()` moves a tensor to the first GPU",
            "the model runs on no CPU and on no other GPU, and each call copies",
            "move the inputs before the call, make constants with register_buffer, or pass device=x.device",
        )


@rule("warning")
def tensor_from_array(evidence: Evidence) -> Iterator[Seen]:
    """Forward makes a tensor of a NumPy array: `torch.tensor(array)`, `torch.from_numpy(array)`."""
    for line, group in evidence.by_line(filter(_is_of_array, evidence.calls)):
        yield evidence.seen(
            line,
            group,
            f"{_names(group)} makes a tensor of a NumPy array in forward",
            _FROM_HOST,
            "make it once in __init__ with register_buffer",
        )


@rule("warning")
def moved_from_host(evidence: Evidence) -> Iterator[Seen]:
    """Forward makes a tensor on the CPU and moves it to the device: `torch.arange(n).to(x.device)`."""
    arrays = {node for node in evidence.calls if _is_of_array(node)}
    nodes = [
        node
        for node in evidence.calls
        if operation_name(node) in ("to", "cuda")
        and names_device(node)
        and node not in evidence.on_host
        and isinstance(source := node.args[0], Node)
        and source in evidence.on_host
        and not arrays & _sources_of(source)
    ]
    for line, group in evidence.by_line(nodes):
        yield evidence.seen(
            line,
            group,
            "a tensor is made on the CPU and then moved to the device",
            _FROM_HOST,
            "pass device=x.device where it is made, or make it once with register_buffer",
        )


@rule("warning")
def float64_leak(evidence: Evidence) -> Iterator[Seen]:
    """A float64 tensor meets one of a lower precision, and the result is float64, which nobody asked for by a cast."""
    doubles = [node for node in evidence.calls if (shape := shape_of(node)) and shape.dtype is torch.float64]
    share = evidence.share(doubles)
    for line, group in evidence.by_line(filter(_promotes, doubles)):
        yield evidence.seen(
            line,
            group,
            f"{_names(group)} joins a float64 tensor with one of a lower precision, so the result is float64",
            f"float64 takes twice the memory, and on most GPUs many times as long; here float64 takes "
            f"{percent_text(share)} of the time",
            "make the float64 tensor with dtype=x.dtype",
        )


def _reads(evidence: Evidence, node: Node) -> bool:
    if operation_name(node) == "cpu":
        return _is_of_device(evidence, node)
    answer = node.meta["answer"]
    is_number = isinstance(answer, type) and issubclass(answer, _NUMBERS) and answer is not bool
    # Addresses and versions aren't values.
    is_value = operation_name(node) not in ("data_ptr", "_version", "hash", "len")
    return is_number and is_value and _is_of_device(evidence, node)


def _is_of_device(evidence: Evidence, node: Node) -> bool:
    """Whether a call without a tensor as its result needs values of the device."""
    sources = node.all_input_nodes
    return not node.meta["asks"] and any(source not in evidence.on_host for source in sources)


def _is_of_array(node: Node) -> bool:
    return shape_of(node) is not None and not node.all_input_nodes and has_array(node)


def _sources_of(node: Node) -> set[Node]:
    found, waiting = set[Node](), [node]
    while waiting:
        if (each := waiting.pop()) not in found:
            found.add(each)
            waiting += each.all_input_nodes
    return found


def _promotes(node: Node) -> bool:
    shapes = [shape_of(source) for source in node.all_input_nodes]
    dtypes = {shape.dtype for shape in shapes if shape is not None and shape.sizes and shape.dtype.is_floating_point}
    return len(dtypes) > 1 and torch.float64 in dtypes and operation_name(node) not in ("to", "type_as", "copy_")


def _names(nodes: Sequence[Node]) -> str:
    """The operations, as code: "`cpu` and `item`"."""
    return " and ".join(f"`{name}`" for name in Counter(map(operation_name, nodes)))
