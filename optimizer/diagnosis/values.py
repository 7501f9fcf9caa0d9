"""Rules on values: which leave the device, are made on the wrong one, or grow to float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import torch

from optimize_export.wording import listed
from optimizer.diagnosis.evidence import Evidence, Seen, elements_of, escapes, has_array, is_moved_to_host, names_device
from optimizer.diagnosis.findings import rule
from optimizer.showing import percent_text
from passes.graph.recording import Node, operation_name, shape_of, users_of

_WAITS = "on a GPU the CPU waits here until all kernels before it have ended, and torch.compile breaks its graph if it comes here"
_FROM_HOST = "on a GPU every call copies it again, and waits for the copy"
# Types of answers that hold values of a tensor; a bool decides something.
_NUMBERS = (int, float, complex, list, str, numpy.ndarray)
# These write the values of a tensor, but on meta tensors, which have none, they work too.
_TEXTS = ("repr", "format")
_MOVES = ("to", "cuda", "type_as")


@rule("warning")
def value_read(evidence: Evidence) -> Iterator[Seen]:
    """Forward moves values to the CPU: `.item()`, `.tolist()`, `.numpy()`, `.cpu()`, `.to("cpu")`, `int(tensor)`, or a tensor in a text."""
    return evidence.seen_at_lines(
        [node for node in evidence.calls if _reads(evidence, node)],
        "values of the device move to Python or to the CPU, by {names}",
        _WAITS,
        "keep it a tensor, or compute it outside of forward",
    )


@rule("warning")
def data_dependent_branch(evidence: Evidence) -> Iterator[Seen]:
    """Python decides by the values of a tensor: `if mask.any()`, `while`, `assert`, `and`, `torch.equal`."""
    answers = [node for node in evidence.calls if node.meta["answer"] is bool and "check" not in node.meta["inside"]]
    return evidence.seen_at_lines(
        [node for node in answers if _is_of_device(evidence, node)],
        "Python decides by the values of a tensor",
        _WAITS,
        "use torch.where or torch.cond, or decide outside of forward",
    )


@rule("warning")
def fixed_device(evidence: Evidence) -> Iterator[Seen]:
    """Forward moves a tensor with `.cuda()`."""
    return evidence.seen_at_lines(
        [node for node in evidence.calls if operation_name(node) == "cuda"],
        "`.cuda()` moves a tensor to the current GPU",
        "the model doesn't run on a CPU, nor on another GPU than the current one, and each call copies",
        "move the inputs before the call, make constants with register_buffer, or pass device=x.device",
    )


@rule("warning")
def tensor_from_array(evidence: Evidence) -> Iterator[Seen]:
    """Forward makes a tensor of a NumPy array: `torch.tensor(array)`, `torch.from_numpy(array)`, `x.new_tensor(array)`."""
    # What is still alive after the run wasn't made for it, such as an input.
    made = [node for node in evidence.recording.nodes() if node.meta.get("of_array") and not escapes(node)]
    unseen = {user for node in made for user in node.users}
    return evidence.seen_at_lines(
        [node for node in evidence.calls if node in unseen or _is_of_array(node)],
        "forward makes a tensor of a NumPy array",
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
        if _is_moved(evidence, node)
        and isinstance(source := node.args[0], Node)
        and source in evidence.on_host
        and not arrays & _sources_of(source)
    ]
    return evidence.seen_at_lines(
        nodes,
        "a tensor is made on the CPU and then moved to the device",
        _FROM_HOST,
        "pass device=x.device where it is made, or make it once with register_buffer",
    )


@rule("warning")
def unregistered_tensor(evidence: Evidence) -> Iterator[Seen]:
    """Forward uses a tensor that is a plain attribute of a module, or in a plain list or dict of it.

    Those of one number are left out: they work on every device. So are those that the model moves itself, in its own
    `_apply` or once in forward; a copy is moved to find out.
    """
    places = [node for node in evidence.recording.nodes() if node.meta.get("attribute") in evidence.unmoved]
    used = {user: place for place in places for user in users_of(place) if elements_of(place) > 1}
    for line, group in evidence.by_line(node for node in evidence.calls if node in used):
        paths = dict.fromkeys(used[node].meta["attribute"] for node in group)
        moved = all(_is_moved(evidence, node) for node in group)
        yield evidence.seen(
            line,
            group,
            f"{listed([f'`{path}`' for path in paths])} is a tensor that the model doesn't register",
            _FROM_HOST
            if moved
            else "`.to()` doesn't move it, so on another device forward raises, unless it makes the tensor again",
            "make it with register_buffer(name, tensor, persistent=False)",
        )


@rule("warning")
def float64_leak(evidence: Evidence) -> Iterator[Seen]:
    """A float64 tensor meets one of a lower precision, and the result is float64, which nobody asked for by a cast."""
    doubles = [node for node in evidence.calls if (shape := shape_of(node)) and shape.dtype is torch.float64]
    return evidence.seen_at_lines(
        filter(_promotes, doubles),
        "a float64 tensor meets one of a lower precision in {names}, so the result is float64",
        f"float64 takes twice the memory, and on most GPUs many times as long; here float64 takes "
        f"{percent_text(evidence.share(doubles))} of the time",
        "make the float64 tensor with dtype=x.dtype",
    )


def _reads(evidence: Evidence, node: Node) -> bool:
    if is_moved_to_host(node):
        return _is_of_device(evidence, node)
    answer = node.meta["answer"]
    is_number = isinstance(answer, type) and issubclass(answer, _NUMBERS) and answer is not bool
    # Addresses and versions aren't values.
    is_value = operation_name(node) not in ("data_ptr", "_version", "hash", "len")
    return is_number and is_value and _is_of_device(evidence, node)


def _is_of_device(evidence: Evidence, node: Node) -> bool:
    """Whether a call without a tensor as its result needs values of the device."""
    sources = node.all_input_nodes
    asks = node.meta["asks"] and operation_name(node) not in _TEXTS
    return not asks and any(source not in evidence.on_host for source in sources)


def _is_moved(evidence: Evidence, node: Node) -> bool:
    """Whether a call moves a tensor to the device of the model."""
    like = (source for source in node.all_input_nodes[1:] if source not in evidence.on_host)
    is_named = names_device(node) or any(like)
    return operation_name(node) in _MOVES and is_named and node not in evidence.on_host


def _is_of_array(node: Node) -> bool:
    is_made = not node.all_input_nodes or operation_name(node) == "new_tensor"
    return shape_of(node) is not None and is_made and has_array(node)


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
