"""A forward that keeps for its backward pass what its plan says, and recomputes the rest there.

`torch.utils.checkpoint` runs a part of the forward a second time. Here only single calls of torch functions run again.
While the forward runs, a function mode records a `Node` for each call whose results the plan drops: the function, its
arguments (other nodes, or kept tensors) and its ambient state. Hooks on saved tensors give autograd a `Slot` of the
node instead of the dropped tensor. When the backward pass unpacks the slot, the node runs, after those that it depends
on. As a result:

- The forward is the module's own code and runs once, including hooks, data-dependent branches, loops, state and keyword
  arguments.
- The same functions run again on the same values, with the same autocast and random numbers, so the results are
  bit-identical.
- A BatchNorm that runs again gets temporary running statistics; the real ones are updated once.
- A SyncBatchNorm runs again as any BatchNorm in one process. In several it doesn't, because it would communicate once
  more: there it makes other calls than the plan has, and the plan continues after them.
- Any set of calls may be dropped. A matmul whose result is kept isn't run again for its dropped argument.

A forward that leaves its plan keeps everything from there on, as without a plan; `Tape.missed` names the first missing
call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from passes.checkpointing.ambient import DRAWING, Ambient
from passes.checkpointing.calls import (
    UNCOUNTED,
    UNWATCHED,
    has_no_versions,
    is_repeatable,
    may_draw,
    moved_statistics,
    name_of,
)
from passes.checkpointing.plan import Plan, Step
from passes.checkpointing.recompute import Dropped, Kept, Node, Scratch, Slot, fill
from passes.checkpointing.sharding import Units
from passes.checkpointing.tensors import (
    CONTAINERS,
    View,
    fills_its_memory,
    is_plain,
    mapped,
    tensors_in,
    tensors_of_call,
    view_of,
)
from passes.torch_private import (
    active_transforms,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
)

_RECORDED = (Tensor, *CONTAINERS)


class _Result(NamedTuple):
    """A dropped result, for as long as its storage lives."""

    node: Node
    number: int
    version: int
    dtype: torch.dtype
    reference: weakref.ref[Any]


# What autograd holds instead of a saved tensor: a kept tensor and its version; or the slot of a dropped result, with
# the view if it is another one than that of the result. While the call of a dropped result runs, this is open: then it
# is a list of the tensor, its version and the identity of its storage. (Every saved tensor of a step passes here. An
# object with named fields takes ten times as long.)
_Packed = tuple[Tensor, int] | tuple[Slot, View | None] | list[Any]


def _unpack(held: _Packed) -> Tensor:
    first: Any = held[0]
    second: Any = held[1]
    if isinstance(first, Slot):
        value = fill(first)
        view: View | None = second
        return value if view is None else value.as_strided(*view)
    tensor: Tensor = first
    if tensor._version != second:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a {tensor.dtype} tensor of shape {list(tensor.shape)} is at version {tensor._version}; "
            f"expected version {second} instead"
        )
    return tensor


class Tape(TorchFunctionMode):
    """The function mode in which one forward runs under a plan."""

    def __init__(self, plan: Plan, units: Units | None = None) -> None:
        super().__init__()
        self._units = units
        self._plan = plan
        self._next = 0
        # Keyed by the identity of their storage.
        self._results: dict[int, _Result] = {}
        self._outer: Any = None
        # What the current call has saved, in order: None for a result that is dropped already. None as a whole if the
        # call's results are kept.
        self._saved: list[list[Any] | None] | None = None

    def __enter__(self) -> Tape:
        self._outer = top_saved_tensors_hooks()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        # The tensors that autograd saved hold everything that is still needed.
        self._results.clear()

    @property
    def missed(self) -> str | None:
        """The first call of the plan that wasn't made; None if all were made."""
        number = self._after_synchronised()
        return None if number == len(self._plan.names) else f"{self._plan.names[number]} (number {number})"

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        step = None if name in UNCOUNTED or UNWATCHED.on else self._step(name)
        # Inside hooks that the model itself sets (its own checkpoints), the saved tensors belong to these hooks. The
        # transforms of torch.func allow no hooks.
        if step is None or top_saved_tensors_hooks() != self._outer or active_transforms() is not None:
            return func(*args, **kwargs)
        inputs = tensors_of_call(args, kwargs)
        if has_no_versions(inputs):
            return func(*args, **kwargs)
        if step.random or may_draw(name):
            # One thread draws at a time.
            with DRAWING:
                return self._call(step, name, func, args, kwargs, inputs, random=True)
        return self._call(step, name, func, args, kwargs, inputs, random=False)

    # ----------------------------------------------------------------------------------- the plan

    def _step(self, name: str) -> Step | None:
        """The plan's step for a call; None if the plan expects another call, for which it keeps waiting."""
        plan, number = self._plan, self._next
        if number in plan.synchronised:
            number = self._after_synchronised(name)
        if number == len(plan.names) or plan.names[number] != name:
            return None
        if number > self._next and not torch.is_grad_enabled():
            # The call is made inside the autograd function by which a SyncBatchNorm communicates.
            return None
        self._next = number + 1
        return plan.steps[number]

    def _after_synchronised(self, name: str = "") -> int:
        """The number of the next call, skipping those of layers that may synchronise up to one of this name."""
        number = self._next
        while number in self._plan.synchronised and self._plan.names[number] != name:
            number += 1
        return number

    # ---------------------------------------------------------------------------------- the calls

    # Every call of a step comes through here. A context manager in Python takes a microsecond or two, so there is none.

    def _call(
        self,
        step: Step,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[Tensor],
        *,
        random: bool,
    ) -> Any:
        if (step.recomputed or step.internals) and is_repeatable(name, args, kwargs):
            return self._dropped(step, name, func, args, kwargs, inputs, random)
        # Its results are kept; the arguments that it saves may be dropped.
        versions = [tensor._version for tensor in inputs]
        push_saved_tensors_hooks(self._pack, _unpack)
        try:
            result = func(*args, **kwargs)
        finally:
            pop_saved_tensors_hooks()
        self._forget_written(inputs, versions)
        return result

    def _dropped(
        self,
        step: Step,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[Tensor],
        random: bool,
    ) -> Any:
        """Make a call whose results or internal tensors are recomputed."""
        versions = [tensor._version for tensor in inputs]
        # Record the arguments before the call, which may write to one of them.
        arguments, options, sources = self._recorded(name, func, args, kwargs)
        ambient = Ambient(func, inputs, kwargs, random=random)
        node = Node(self._next - 1, name, func, step.region, arguments, options, sources, ambient)
        saved: list[list[Any] | None] = []
        self._saved = saved
        push_saved_tensors_hooks(self._pack, _unpack)
        try:
            result = func(*args, **kwargs)
        finally:
            pop_saved_tensors_hooks()
            self._saved = None
        if written := self._forget_written(inputs, versions):
            # An in-place call can run again from the value that it overwrote, if that value is recomputed first.
            is_first = bool(args) and result is args[0] and len(written) == 1 and written[0] is result
            node.writes = is_first and isinstance(arguments[0], Dropped)
            if not node.writes:
                return result
        memories = {one.untyped_storage()._cdata for one in inputs if one.layout is torch.strided}
        if step.recomputed:
            self._register(node, args, memories, result)
        self._drop(node, step, memories, saved)
        return result

    def _forget_written(self, inputs: Sequence[Tensor], versions: Sequence[int]) -> list[Tensor]:
        """Forget the results that a call overwrote, so that nothing keeps their nodes; returns the overwritten arguments."""
        if [tensor._version for tensor in inputs] == versions:
            return []
        written = [tensor for tensor, before in zip(inputs, versions, strict=True) if tensor._version != before]
        for tensor in written:
            if tensor.layout is torch.strided:
                self._results.pop(tensor.untyped_storage()._cdata, None)
        return written

    def _recorded(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Dropped, ...]]:
        """The arguments of a call, with records in place of tensors, and the records of the dropped ones."""
        # A norm that updates its running statistics computes with those of its batch. The update doesn't change a
        # version.
        moved = {id(tensor) for tensor in moved_statistics(name, func, args, kwargs)}
        # A tensor that is given twice is one argument, because attention checks whether its query is its key.
        records: dict[int, Any] = {}
        arguments = tuple(
            [self._record(records, moved, value) if isinstance(value, _RECORDED) else value for value in args]
        )
        options = {key: self._record(records, moved, value) for key, value in kwargs.items()} if kwargs else {}
        return arguments, options, tuple([one for one in records.values() if type(one) is Dropped])

    def _record(self, records: dict[int, Any], moved: set[int], value: Any) -> Any:
        if not isinstance(value, Tensor):
            return mapped(value, partial(self._record, records, moved)) if isinstance(value, CONTAINERS) else value
        key = id(value)
        if key not in records:
            records[key] = Scratch(value) if key in moved else self._record_of_tensor(value)
        return records[key]

    def _record_of_tensor(self, tensor: Tensor) -> Dropped | Kept:
        if (found := self._result(tensor)) is not None:
            view = found.node.place_of(tensor, found.number)
            return Dropped(found.node, found.number, view, tensor.requires_grad)
        return Kept(tensor, self._units.home(tensor) if self._units is not None else None)

    # -------------------------------------------------------------------------------- the tensors

    def _result(self, tensor: Tensor) -> _Result | None:
        """The dropped result in whose storage a tensor lies, if the storage hasn't been written to since."""
        if tensor.layout is not torch.strided:
            return None
        found = self._results.get(tensor.untyped_storage()._cdata)
        if found is None or found.version != tensor._version or found.dtype is not tensor.dtype:
            return None
        return found if is_plain(tensor) else None

    def _register(self, node: Node, args: tuple[Any, ...], memories: set[int], result: Any) -> None:
        results = self._results
        for number, tensor in enumerate((result,) if isinstance(result, Tensor) else tensors_in(result)):
            if not is_plain(tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            # A view of an argument is identified by the argument.
            is_new = key not in memories or (node.writes and tensor is args[0])
            if not is_new or not fills_its_memory(tensor):
                continue
            node.views[number] = view_of(tensor)
            # Remove the entry when the storage is freed: another storage may get its address, and the node needn't be
            # kept alive.
            reference = weakref.ref(storage, partial(_forget, results, key))
            results[key] = _Result(node, number, tensor._version, tensor.dtype, reference)

    def _pack(self, tensor: Tensor) -> _Packed:
        is_strided = tensor.layout is torch.strided
        key = tensor.untyped_storage()._cdata if is_strided else 0
        found = self._results.get(key)
        if found is not None and found.version == tensor._version and found.dtype is tensor.dtype and is_plain(tensor):
            if self._saved is not None:
                self._saved.append(None)
            return _dropped(found, tensor)
        # Detach results: a result holds the tensors that autograd saved for it, so this would be a reference cycle.
        kept = tensor if tensor.grad_fn is None else tensor.detach()
        if self._saved is None:
            return kept, tensor._version
        packed = [kept, tensor._version, key]
        self._saved.append(packed)
        return packed

    def _drop(self, node: Node, step: Step, memories: set[int], saved: Sequence[list[Any] | None]) -> None:
        """Replace the saved tensors that weren't known before the call: its results and its internal tensors."""
        for place, packed in enumerate(saved):
            if packed is None or (packed[2] in memories and not node.writes):
                continue
            tensor = packed[0]
            if (found := self._result(tensor)) is not None:
                packed[:] = _dropped(found, tensor)
            elif place in step.internals and packed[2] not in memories and is_plain(tensor):
                number = -1 - place
                node.views[number] = view_of(tensor)
                packed[:] = node.slot(number), None


def _dropped(result: _Result, tensor: Tensor) -> tuple[Slot, View | None]:
    """The slot of a result, and the view of a tensor in its storage if it is another one."""
    return result.node.slot(result.number), result.node.place_of(tensor, result.number)


def _forget(results: dict[int, _Result], key: int, _: Any) -> None:
    results.pop(key, None)
