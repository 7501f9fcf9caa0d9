"""The evidence that rules read: the recorded torch calls of one run, each with its line, its time and its device."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from torch.utils import _pytree as pytree

from exporters.places import is_users
from passes.base import ModelTree
from passes.graph.layouts import layout_of
from passes.graph.recording import Node, Recorder, Recording, call_of, operation_name, shape_of, shape_of_each

_TORCH = Path(torch.__file__).parent
# Functions of torch that a call may be inside of, by the names that rules use.
INSIDE = {
    "CheckpointFunction.forward": "checkpoint",
    "Optimizer.zero_grad": "zero_grad",
    "Module.zero_grad": "zero_grad",
    "_SingleProcessDataLoaderIter._next_data": "loader",
    # torch's assertions on tensors, which torch.compile captures.
    "_check_tensor_all_with": "check",
}
# The least time of a measurement in seconds, and its number of runs.
_LONG, _RUNS = 0.1, 7
# Bytes of a copy to the GPU for which pinned memory matters.
_LARGE = 2**16

PlainTensors = Mapping[int, tuple[str, torch.Tensor]]
"""By `id`: tensors that a model holds and doesn't register, each with its path."""


class Line(NamedTuple):
    """A line of source; "" and 0 if it is unknown."""

    file: str = ""
    line: int = 0


class LineRecorder(Recorder):
    """A recorder that also keeps what a diagnosis needs of each call, in the `meta` of its node.

    - "line": the innermost line outside of torch.
    - "inside": by the names in `INSIDE`, the line that called the function.
    - "seconds": the time of the call; on a GPU until its kernels have ended; 0 for the call of a scripted module.
    - "device": of the tensor that it returned.
    - "answer": the type of a result without tensors; None for other results.
    - "layout": of a feature map that it returned, as `layout_of` names it; None for other results.
    - "pageable": whether it copies much memory that isn't pinned to the GPU.
    - "loose": whether the call reads a parameter that no module registers.
    - "escapes", "returned": whether its value is alive after the run, and whether the root returned it.

    The node of a tensor that no recorded call made has "attribute", its path if it is a plain attribute of a module,
    else None, and "of_array": whether it is another one whose memory torch didn't allocate, as that of a NumPy array.

    Args:
        module, modules: as for `Recorder`.
        attributes: the path of each such tensor by its `id`.
    """

    def __init__(
        self,
        module: nn.Module,
        modules: Callable[[], Iterable[nn.Module]],
        attributes: PlainTensors = MappingProxyType({}),
    ) -> None:
        super().__init__(module, modules)
        self._attributes = attributes

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        started = _now()
        # Without a GPU, `.cuda()` would raise and hide all other findings.
        is_impossible = func is torch.Tensor.cuda and not torch.cuda.is_available()
        result = args[0] if is_impossible else func(*args, **kwargs)
        seconds = _now() - started
        node = self._add(func, args, kwargs, result)
        if node is not None:
            node.meta["seconds"] = seconds
        return result

    def _add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Node | None:
        # The recorder adds the calls of scripted modules itself: they have neither a time nor a result.
        node = super()._add(func, args, kwargs, result)
        if node is None:
            return None
        line, inside = _lines_of(sys._getframe(1))
        device = result.device if isinstance(result, torch.Tensor) else None
        answer = None if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)) else type(result)
        node.meta.update(line=line, inside=inside, seconds=0.0, device=device, answer=answer)
        node.meta["layout"] = layout_of(result)
        node.meta["pageable"] = _is_pageable_copy(args, result)
        node.meta["loose"] = any(
            isinstance(leaf, nn.Parameter) and id(leaf) not in self._places
            for leaf in pytree.tree_leaves((args, kwargs))
        )
        return node

    def _argument(self, leaf: Any) -> Any:
        node = super()._argument(leaf)
        if isinstance(node, Node) and node.op == "placeholder":
            path, _ = self._attributes.get(id(leaf), (None, None))
            # torch.from_numpy and torch.Tensor(array) are no recorded calls.
            node.meta.update(attribute=path, of_array=path is None and _is_over_other_memory(leaf))
        return node

    def _finish(self) -> None:
        super()._finish()
        leaves = [leaf for leaf in pytree.tree_leaves(self._output) if isinstance(leaf, torch.Tensor)]
        returned = set(map(id, leaves))
        # Free the tensors that only reference cycles keep alive, such as those of an exception.
        gc.collect()
        for key, (held, nodes) in self._values.items():
            if held() is not None:
                for node in nodes:
                    node.meta.update(escapes=True, returned=key in returned)


def escapes(node: Node) -> bool:
    return bool(node.meta.get("escapes"))


def is_returned(node: Node) -> bool:
    return bool(node.meta.get("returned"))


def plain_tensors(model: nn.Module) -> PlainTensors:
    """The tensors that are plain attributes of modules, or in plain lists or dicts there, with their paths, by `id`.

    The model doesn't register them. Parameters are left out. A tensor in the result keeps its `id`, even if forward
    replaces the attribute.
    """
    return {
        id(tensor): (f"{path}.{name}" if path else name, tensor)
        for path, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules")
        for tensor in _leaves_of(value)
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, nn.Parameter)
    }


def _leaves_of(value: object) -> list[Any]:
    try:
        return pytree.tree_leaves(value)
    except RecursionError:
        # A list that contains itself.
        return []


def _is_over_other_memory(tensor: torch.Tensor) -> bool:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return False
    try:
        return not tensor.untyped_storage().resizable()
    except (RuntimeError, NotImplementedError):
        # Inside of torch.vmap, a tensor has no storage.
        return False


def _seconds_of(run: Callable[[], object]) -> float:
    started = _now()
    run()
    return _now() - started


def _is_pageable_copy(args: tuple[Any, ...], result: Any) -> bool:
    source = args[0] if args else None
    if not (isinstance(source, torch.Tensor) and isinstance(result, torch.Tensor) and result.is_cuda):
        return False
    return source.device.type == "cpu" and source.nbytes >= _LARGE and not source.is_pinned()


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


# Paths take long to compare, and a run has few files.
_is_users = lru_cache(maxsize=None)(is_users)


def _lines_of(frame: FrameType | None) -> tuple[Line, dict[str, Line]]:
    found, inside, entered = Line(), dict[str, Line](), list[str]()
    while frame is not None:
        code = frame.f_code
        if _is_users(code.co_filename):
            line = Line(code.co_filename, frame.f_lineno)
            found = found if found.file else line
            inside |= dict.fromkeys(entered, line)
            entered.clear()
        elif (name := INSIDE.get(code.co_qualname)) is not None and Path(code.co_filename).is_relative_to(_TORCH):
            entered.append(name)
        frame = frame.f_back
    return found, inside


@dataclass(frozen=True)
class Seen:
    """A finding of one rule at one line; the fields are those of `Finding`, with the file and the line in one."""

    modules: tuple[str, ...]
    place: Line
    reason: str
    effect: str
    remedy: str


@dataclass(frozen=True)
class Step:
    """A training step."""

    recording: Recording
    waiting: float
    """The share of its time that it waited for a DataLoader, from 0 to 1."""
    loader: object = None
    """The loader that the batches of the step were drawn from; None if the step draws them itself."""

    @cached_property
    def calls(self) -> list[Node]:
        """The torch calls of the step, in the order of execution."""
        return [node for node in self.recording.nodes() if node.op == "call_function"]


@dataclass(frozen=True)
class Evidence:
    """The evidence that rules read."""

    model: nn.Module
    """The user's model; it is never run."""
    tree: ModelTree
    """The copy that ran, in eval mode."""
    recording: Recording
    """The torch calls of its second run."""
    device: torch.device
    step: Step | None = None
    """A training step; None without one."""
    unmoved: frozenset[str] = frozenset()
    """The paths of tensors that the model doesn't register, and that stay behind when it moves."""
    forward: Callable[[], object] = field(default=lambda: None)
    """Runs the copy once more, to time other settings."""

    @cached_property
    def calls(self) -> list[Node]:
        """The torch calls of the forward, in the order of execution."""
        return [node for node in self.recording.nodes() if node.op == "call_function"]

    @cached_property
    def seconds(self) -> float:
        return sum(node.meta["seconds"] for node in self.calls)

    def share(self, nodes: Iterable[Node]) -> float:
        """The share of the forward's time that these calls take, from 0 to 1."""
        return sum(node.meta["seconds"] for node in nodes) / self.seconds if self.seconds else 0.0

    def path(self, node: Node) -> str:
        return self.tree.path(call_of(node).module)

    def by_line(self, nodes: Iterable[Node]) -> Iterator[tuple[Line, list[Node]]]:
        """Group calls by their lines, in the order of execution."""
        groups: dict[Line, list[Node]] = {}
        for node in nodes:
            groups.setdefault(node.meta["line"], []).append(node)
        yield from groups.items()

    def seen(self, line: Line, nodes: Iterable[Node], reason: str, effect: str, remedy: str) -> Seen:
        """What a rule saw at a line, in the modules that made these calls."""
        return Seen(tuple(dict.fromkeys(map(self.path, nodes))), line, reason, effect, remedy)

    def seen_at_lines(self, nodes: Iterable[Node], reason: str, effect: str, remedy: str) -> Iterator[Seen]:
        """What a rule saw at each line of these calls; "{names}" in the reason stands for their operations."""
        for line, group in self.by_line(nodes):
            names = " and ".join(f"`{name}`" for name in dict.fromkeys(map(operation_name, group)))
            yield self.seen(line, group, reason.replace("{names}", names), effect, remedy)

    @cached_property
    def on_host(self) -> set[Node]:
        """The calls whose values are on the CPU, wherever the model is: made without a device, from nothing else.

        On a GPU, the devices of the values tell.
        """
        found: set[Node] = set()
        for node in self.calls:
            if self.device.type == "cuda":
                is_there = node.meta["device"] is not None and node.meta["device"].type == "cpu"
            else:
                sources = node.all_input_nodes
                is_there = (
                    operation_name(node) == "numpy"
                    or is_moved_to_host(node)
                    or (all(source in found for source in sources) and not names_device(node))
                )
            if is_there:
                found.add(node)
        return found

    @cached_property
    def constant(self) -> set[Node]:
        """The nodes whose values depend on parameters and buffers alone."""
        found: set[Node] = set()
        for node in self.recording.nodes():
            sources = node.all_input_nodes
            if node.op == "get_attr" or (sources and all(source in found for source in sources)):
                found.add(node)
        return found

    def fastest(self, *runs: Callable[[], object]) -> list[float]:
        """The seconds of the fastest of a few calls of each function; the functions take turns."""
        times: list[list[float]] = []
        with torch.no_grad():
            for run in runs:
                run()
            started = time.perf_counter()
            while len(times) < _RUNS or time.perf_counter() - started < _LONG:
                times.append([_seconds_of(run) for run in runs])
        return [min(each) for each in zip(*times, strict=True)]

    def draw(self, node: Node) -> torch.Tensor:
        """Random numbers in the shape and dtype of a recorded tensor, or of each tensor that a call returned."""
        shape = shape_of_each(node)
        assert shape is not None
        return torch.randn(shape.sizes, device=self.device).to(shape.dtype)


def elements_of(node: Node) -> int:
    """The number of elements of a recorded tensor; 0 if the value isn't one tensor."""
    shape = shape_of(node)
    return 0 if shape is None else prod(shape.sizes)


def inputs_of(nodes: Sequence[Node]) -> list[Node]:
    """The nodes outside of a sequence whose values it reads, in the order of their first use."""
    inside = set(nodes)
    return list(dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside))


def replay(nodes: Sequence[Node], inputs: Mapping[Node, Any]) -> torch.Tensor:
    """Compute recorded calls again, on other inputs; the result is that of the last one."""
    values = dict(inputs)
    for node in nodes:
        target: Any = node.target
        args, kwargs = pytree.tree_map_only(Node, values.__getitem__, (tuple(node.args), dict(node.kwargs)))
        values[node] = target(*args, **kwargs)
    result: torch.Tensor = values[nodes[-1]]
    return result


def is_moved_to_host(node: Node) -> bool:
    """Whether a call moves a tensor to the CPU, wherever the model is: `.cpu()` or `.to("cpu")`."""
    return operation_name(node) == "cpu" or (
        operation_name(node) == "to" and "cpu" in (*node.args[1:], node.kwargs.get("device"))
    )


def names_device(node: Node) -> bool:
    """Whether the arguments of a call name a device. A tensor as an argument doesn't count."""
    leaves = pytree.tree_leaves((node.args[1:] if operation_name(node) in ("to", "cuda") else (), node.kwargs))
    return operation_name(node) == "cuda" or any(
        isinstance(leaf, torch.device) or (isinstance(leaf, str) and _is_device(leaf)) for leaf in leaves
    )


def _is_device(text: str) -> bool:
    with suppress(RuntimeError):
        return bool(torch.device(text).type)
    return False


def has_array(node: Node) -> bool:
    return any(isinstance(leaf, numpy.ndarray | numpy.generic) for leaf in pytree.tree_leaves((node.args, node.kwargs)))
