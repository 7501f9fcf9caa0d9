"""A forward that keeps what its plan says, and computes the rest again when the backward pass asks for it.

`torch.utils.checkpoint` runs a part of the forward anew with autograd on, and pairs what is saved then with what was saved
before by its order. Here nothing is run anew but single calls of torch functions. While the forward runs, each call whose
result isn't kept leaves a `Node`: the function, its arguments (other nodes, or tensors that are kept) and the state that it
depends on. What autograd saves of such a result is a `Slot` of its node; in the backward pass the slot computes the node, and
those that it needs. So

- the forward is the module's own code, as it stands: hooks, branches on data, loops, state, keyword arguments and everything
  else that Python does there happens once;
- what is computed again are the same functions on the same numbers, in the same state of autocast and of the generators of
  random numbers: the results are equal bit by bit;
- a BatchNorm that is computed again is given no running statistics: they move once;
- a SyncBatchNorm isn't computed again, which would ask the other processes once more. Where it synchronises, an autograd
  function does its work, and other calls come than the one that is planned for: the plan goes on behind them;
- any set of calls may be chosen. A matmul whose result is kept isn't run again for its argument that isn't.

A forward that takes another way than its plan keeps everything from there on, as it would without one: `Tape.missed` tells.
"""

from __future__ import annotations

import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from passes.checkpointing.beside import BESIDE
from passes.checkpointing.plan import Plan, Step
from passes.checkpointing.sharding import Gathered, Units
from passes.checkpointing.tensors import View, fills_its_memory, is_plain, leaves, mapped, tensors_in
from passes.graph.calls import moved_statistics, name_of

push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
transforms = torch._C._functorch.peek_interpreter_stack
# Questions about a tensor, and hooks on it, are no calls that a plan counts: whoever watches a forward asks them too.
UNCOUNTED = frozenset(
    {
        "__get__", "__set__", "__delete__", "__len__", "__hash__", "__repr__", "__format__", "data_ptr", "device", "dim", "dim_order",
        "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "is_nonzero", "is_same_size",
        "is_set_to", "is_signed", "is_storage", "is_tensor", "nbytes", "ndimension", "nelement", "numel",
        "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size", "storage",
        "storage_offset", "storage_type", "stride", "untyped_storage", "_set_grad_enabled", "is_grad_enabled",
    }
)  # fmt: skip
# What doesn't follow from the values of its arguments.
_OF_THE_GRAPH = frozenset({"grad", "backward", "jacobian", "hessian"})
# What writes, beside its result, to what no version tells of: to running statistics, or to a tensor that was saved empty.
_WRITES_BESIDE = frozenset(
    {
        "native_batch_norm", "_batch_norm_impl_index", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats",
        "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts", "rrelu", "rrelu_", "rrelu_with_noise",
        "rrelu_with_noise_",
    }
)  # fmt: skip
# What draws random numbers or not, as its arguments say: it may have drawn none in the step that was planned for. Besides
# these, all kinds of dropout.
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_DRAWS_WHERE_ASKED = _RECURRENT | {"multi_head_attention_forward", "scaled_dot_product_attention"}


def may_draw(name: str) -> bool:
    """Whether a call of a torch function of that name draws random numbers for some arguments and not for others."""
    return name in _DRAWS_WHERE_ASKED or "dropout" in name


def follows_from_its_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of a torch function of that name gives the same for the same arguments, and states that are kept."""
    if name in _OF_THE_GRAPH or name in _WRITES_BESIDE:
        return False
    given = (*args, *kwargs.values())
    if name in _RECURRENT and any(isinstance(item, float) and item > 0 for item in given):
        # On a GPU their dropout has a state of its own.
        return not any(tensor.is_cuda for tensor in tensors_in(given))
    # A generator of the user's own has a state that isn't kept.
    return not any(isinstance(item, torch.Generator) for item in given)


def counts_no_versions(given: Sequence[Tensor]) -> bool:
    """Whether a call takes or makes tensors of inference mode: nobody can tell whether these are written to."""
    return torch.is_inference_mode_enabled() or any(tensor.is_inference() for tensor in given)


class Slot:
    """One result of a node, as autograd holds it. While any holds it, the tensor stays once it was computed."""

    __slots__ = ("__weakref__", "node", "number", "value")

    def __init__(self, node: Node, number: int) -> None:
        self.node = node
        # Results count from 0 up, what the call saves by itself from -1 down.
        self.number = number
        self.value: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Later:
    """An argument that is computed again."""

    node: Node
    number: int
    view: View
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class _Kept:
    """An argument that is kept, at the version that it had."""

    tensor: Tensor
    version: int
    requires_grad: bool
    # Who gathers it, if it is a parameter that is sharded between forward and backward pass.
    unit: nn.Module | None


@dataclass(frozen=True, slots=True)
class _Unused:
    """An argument that is written to, and that nothing is computed from: another tensor does."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Saved(NamedTuple):
    """What autograd holds of a result that is computed again."""

    slot: Slot
    view: View


class _Plain(NamedTuple):
    """What autograd holds of a tensor that is kept."""

    tensor: Tensor
    version: int


class Node:
    """A call that is computed again."""

    __slots__ = (
        "__weakref__",
        "arguments",
        "function",
        "index",
        "name",
        "options",
        "region",
        "slots",
        "state",
        "views",
        "writes",
    )

    state: _State

    def __init__(self, index: int, name: str, function: Callable[..., Any], region: tuple[int, ...]) -> None:
        self.index = index
        self.name = name
        self.function = function
        self.region = region
        self.arguments: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}
        # Whether the call writes to its first argument and returns it.
        self.writes = False
        # For each result, what it looks like in its memory.
        self.views: dict[int, View] = {}
        self.slots: dict[int, weakref.ref[Slot]] = {}

    def slot(self, number: int) -> Slot:
        known = self.slots.get(number)
        slot = known() if known is not None else None
        if slot is None:
            slot = Slot(self, number)
            self.slots[number] = weakref.ref(slot)
        return slot

    def alive(self) -> dict[int, Slot]:
        found = {number: reference() for number, reference in self.slots.items()}
        return {number: slot for number, slot in found.items() if slot is not None}

    def lacking(self) -> dict[int, Slot]:
        return {number: slot for number, slot in self.alive().items() if slot.value is None}

    def needs(self) -> list[_Later]:
        found = {id(leaf): leaf for leaf in leaves((self.arguments, self.options)) if isinstance(leaf, _Later)}
        return list(found.values())


class Tape(TorchFunctionMode):
    """The mode that one forward runs in, under a plan."""

    def __init__(self, plan: Plan, units: Units | None = None) -> None:
        super().__init__()
        self.units = units
        self._plan = plan
        self._next = 0
        self._results: dict[int, _Result] = {}
        self._outer: Any = None

    def __enter__(self) -> Tape:
        self._outer = top_hooks(False)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        # What is still needed is held by what autograd saved.
        self._results.clear()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        step = None if name in UNCOUNTED or BESIDE.on else self._step(name)
        # Inside of hooks that the model itself set (its own checkpoints) what is saved is theirs; the transforms of
        # torch.func allow no hooks.
        if step is None or top_hooks(False) != self._outer or transforms() is not None:
            return func(*args, **kwargs)
        inputs = tensors_in((args, kwargs))
        if counts_no_versions(inputs):
            return func(*args, **kwargs)
        return _Call(self, step, name, func, args, kwargs, inputs).run()

    def _step(self, name: str) -> Step | None:
        number = self._behind_synchronised(name)
        # A call beside the plan (of somebody who watches) is let through, and the plan waits for the call that it expects.
        if number == len(self._plan.names) or self._plan.names[number] != name:
            return None
        if number > self._next and _is_synchronising():
            return None
        self._next = number + 1
        return self._plan.steps[number]

    def _behind_synchronised(self, name: str = "") -> int:
        """The number of the call that comes next, behind those of layers that synchronise, up to one of this name."""
        number = self._next
        while number in self._plan.synchronised and self._plan.names[number] != name:
            number += 1
        return number

    @property
    def missed(self) -> str | None:
        """The first call of the plan that didn't come; None where all came."""
        number = self._behind_synchronised()
        return None if number == len(self._plan.names) else f"{self._plan.names[number]} (number {number})"

    def result(self, tensor: Tensor) -> _Result | None:
        """What this tensor lies in the memory of, if that is a result that is computed again, and still what it was."""
        if not is_plain(tensor):
            return None
        found = self._results.get(tensor.untyped_storage()._cdata)
        if found is None or found.version != tensor._version or found.dtype is not tensor.dtype:
            return None
        return found

    def register(self, node: Node, number: int, tensor: Tensor) -> None:
        storage, results = tensor.untyped_storage(), self._results
        node.views[number] = View.of(tensor)
        key = storage._cdata
        # With the memory goes what is known of it: no other tensor is found under the same name, and the node goes, with the
        # arguments that it holds, unless its result is needed again.
        reference = weakref.ref(storage, lambda _: results.pop(key, None))
        results[key] = _Result(node, number, tensor._version, tensor.dtype, reference)

    def forget(self, tensor: Tensor) -> None:
        """A tensor was written to: what it held before is needed by nobody through it, nor what that was made from."""
        if tensor.layout is torch.strided:
            self._results.pop(tensor.untyped_storage()._cdata, None)


def _is_synchronising() -> bool:
    """Whether it is a SyncBatchNorm that makes the call just now, while it asks the other processes."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _SYNCHRONISING:
        frame = frame.f_back
    return frame is not None


_SYNCHRONISING = torch.nn.modules._functions.SyncBatchNorm.forward.__code__


class _Result(NamedTuple):
    node: Node
    number: int
    version: int
    dtype: torch.dtype
    reference: weakref.ref[Any]


class _Call:
    """One call that the plan says something about."""

    def __init__(
        self,
        tape: Tape,
        step: Step,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[Tensor],
    ) -> None:
        self.tape = tape
        self.step = step
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.inputs = inputs
        self.moved = moved_statistics(func, args, kwargs)
        # A tensor that is given twice is one argument: attention looks whether its query is its key.
        self.captured: dict[int, _Later | _Kept | _Unused] = {}
        self.is_random = step.random or may_draw(name)
        self.node: Node | None = None
        if (step.recomputed or step.internals) and follows_from_its_arguments(name, args, kwargs):
            self.node = Node(tape._next - 1, name, func, step.region)
        self.waiting: list[_Waiting] = []
        self.saved = 0

    def run(self) -> Any:
        with _DRAWING if self.is_random else nullcontext():
            return self._run()

    def _run(self) -> Any:
        versions = [tensor._version for tensor in self.inputs]
        if self.node is not None:
            # Before the call, which may write to an argument.
            self.node.arguments, self.node.options = self._captured(self.args), self._captured(self.kwargs)
            self.node.state = _State(self.func, self.inputs, self.kwargs, random=self.is_random)
        push_hooks(self._pack, _unpack)
        try:
            result = self.func(*self.args, **self.kwargs)
        finally:
            pop_hooks()
        written = [tensor for tensor, before in zip(self.inputs, versions, strict=True) if tensor._version != before]
        for tensor in written:
            self.tape.forget(tensor)
        if self.node is not None and self._is_repeatable(self.node, written, result):
            if self.step.recomputed:
                self._register(self.node, result)
        else:
            self.node = None
        for waiting in self.waiting:
            waiting.settle(self)
        # Autograd keeps the hooks, and with them this call, for as long as what was saved under them.
        self.args, self.kwargs, self.inputs, self.moved, self.waiting, self.node = (), {}, [], [], [], None
        self.captured = {}
        return result

    def _is_repeatable(self, node: Node, written: Sequence[Tensor], result: Any) -> bool:
        """Whether the node gives the same again. It is changed where it has to be so that it does."""
        if not written:
            return True
        # What is written to is computed again first. One that is kept isn't what it was any more.
        is_first = bool(self.args) and result is self.args[0] and len(written) == 1 and written[0] is result
        node.writes = is_first and isinstance(node.arguments[0], _Later)
        return node.writes

    def _register(self, node: Node, result: Any) -> None:
        for number, tensor in enumerate(tensors_in(result)):
            # A view of an argument is known by the argument.
            is_new = self.is_own(tensor) or (node.writes and tensor is self.args[0])
            if is_new and fills_its_memory(tensor):
                self.tape.register(node, number, tensor)

    def is_own(self, tensor: Tensor) -> bool:
        """Whether the call made this tensor, which is none of its arguments."""
        given = (one.untyped_storage()._cdata for one in self.inputs if is_plain(one))
        return is_plain(tensor) and tensor.untyped_storage()._cdata not in given

    def _captured(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return mapped(value, self._captured)
        if id(value) not in self.captured:
            self.captured[id(value)] = self._captured_tensor(value)
        return self.captured[id(value)]

    def _captured_tensor(self, value: Tensor) -> _Later | _Kept | _Unused:
        # A norm that moves its running statistics computes from those of its batch alone. No version tells of the move.
        if any(value is moved for moved in self.moved):
            return _Unused(tuple(value.shape), value.dtype, value.device)
        if (found := self.tape.result(value)) is not None:
            return _Later(found.node, found.number, View.of(value), value.requires_grad)
        units = self.tape.units
        unit = units.home(value) if units is not None else None
        return _Kept(_held(value), value._version, value.requires_grad, unit)

    def _pack(self, tensor: Tensor) -> Any:
        number = self.saved
        self.saved += 1
        if (found := self.tape.result(tensor)) is not None:
            return _Saved(found.node.slot(found.number), View.of(tensor))
        held = _Plain(tensor.detach(), tensor._version)
        if self.node is None:
            return held
        waiting = _Waiting(held, number)
        self.waiting.append(waiting)
        return waiting


class _Waiting:
    """What a call saved that isn't known before it: a result of its own, or what it made inside."""

    __slots__ = ("held", "number")

    def __init__(self, held: _Plain, number: int) -> None:
        self.held: _Plain | _Saved = held
        self.number = number

    def settle(self, call: _Call) -> None:
        assert isinstance(self.held, _Plain)
        tensor = self.held.tensor
        if (found := call.tape.result(tensor)) is not None:
            self.held = _Saved(found.node.slot(found.number), View.of(tensor))
        elif call.node is not None and self.number in call.step.internals and call.is_own(tensor):
            node, number = call.node, -1 - self.number
            node.views[number] = View.of(tensor)
            self.held = _Saved(node.slot(number), View.of(tensor))


# One thread at a time: the generators belong to all. What was drawn has to be what comes after the state that was kept.
_DRAWING = threading.RLock()


def _free_in_child() -> None:
    # The thread that draws doesn't exist in a process that another one forked.
    if not _DRAWING._is_owned():  # type: ignore[attr-defined]
        _DRAWING._at_fork_reinit()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_in_child)


class _State:
    """What a call that is made just now depends on beside its arguments."""

    __slots__ = ("autocast", "device", "dtype", "gradients", "kernels", "random")

    def __init__(
        self, func: Callable[..., Any], tensors: Sequence[Tensor], options: dict[str, Any], *, random: bool
    ) -> None:
        self.dtype = torch.get_default_dtype()
        # Where a function that makes a tensor makes it, unless it is told.
        self.device = torch.get_default_device() if func in _device_constructors() else None
        devices = {tensor.device for tensor in tensors}
        if random and self.device is not None:
            devices.add(_with_index(torch.device(options.get("device") or self.device)))
        kinds = sorted({"cpu", *(device.type for device in devices if torch.amp.is_autocast_available(device.type))})
        self.autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self.gradients = torch.is_grad_enabled()
        self.kernels = _chosen_kernels()
        self.random = _random_states(devices) if random else ()

    @contextmanager
    def again(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(_DRAWING if self.random else nullcontext())
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            if self.device is not None and self.device != torch.get_default_device():
                stack.enter_context(self.device)
            for kind, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            now = _random_states({device for device, _ in self.random}) if self.random else ()
            kernels, dtype = _chosen_kernels(), torch.get_default_dtype()
            try:
                _choose_kernels(self.kernels)
                _choose_dtype(self.dtype)
                _set_random_states(self.random)
                yield
            finally:
                _set_random_states(now)
                _choose_dtype(dtype)
                _choose_kernels(kernels)


# What chooses among kernels that don't round alike, and may hold in a part of the forward only (`sdpa_kernel`).
_CHOICES: tuple[tuple[Callable[[], bool], Callable[[bool], object]], ...] = (
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
)


def _chosen_kernels() -> tuple[bool, ...]:
    return tuple(get() for get, _ in _CHOICES)


def _choose_kernels(chosen: tuple[bool, ...]) -> None:
    for (get, choose), value in zip(_CHOICES, chosen, strict=True):
        if get() != value:
            choose(value)


def _choose_dtype(dtype: torch.dtype) -> None:
    if torch.get_default_dtype() is not dtype:
        torch.set_default_dtype(dtype)


def _with_index(device: torch.device) -> torch.device:
    if device.type in _WITHOUT_GENERATOR or device.index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


_WITHOUT_GENERATOR = ("cpu", "meta")


def _random_states(devices: set[torch.device]) -> tuple[tuple[torch.device, Tensor], ...]:
    cpu = (torch.device("cpu"), torch.get_rng_state())
    others = sorted((device for device in devices if device.type not in _WITHOUT_GENERATOR), key=str)
    return (cpu, *((device, torch.get_device_module(device).get_rng_state(device)) for device in others))


def _set_random_states(states: tuple[tuple[torch.device, Tensor], ...]) -> None:
    for device, state in states:
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


class _Enough(Exception):
    """All that was asked of a call has been saved: its kernel needn't run."""


def _unpack(held: Any) -> Tensor:
    if isinstance(held, _Waiting):
        held = held.held
    if isinstance(held, _Plain):
        if held.tensor._version != held.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a {held.tensor.dtype} tensor of shape {list(held.tensor.shape)} is at version {held.tensor._version}; "
                f"expected version {held.version} instead"
            )
        return held.tensor
    slot: Slot = held.slot
    with BESIDE.entered():
        if slot.value is None:
            _compute(slot)
        assert slot.value is not None
        return held.view.on(slot.value)


def _compute(wanted: Slot) -> None:
    """Fill a slot, and on the way those of its region and the regions around it that it needs, if they are still held.

    What it needs of other regions is computed for the time only, and computed again when its own turn comes.
    """
    order, uses = _needed(wanted)
    values = _Values(uses)
    try:
        for node in order:
            slots = node.lacking() if node.region == wanted.node.region[: len(node.region)] else {}
            found = _run(node, set(slots), values)
            values.gathered.called()
            for number, tensor in found.items():
                if (slot := slots.get(number)) is not None:
                    slot.value = tensor
                else:
                    values.keep(node, number, tensor)
    finally:
        values.gathered.over()


def _needed(wanted: Slot) -> tuple[list[Node], dict[tuple[int, int], int]]:
    """The nodes to compute, in the order of the forward, and how often each result is an argument there."""
    found: dict[int, Node] = {}
    uses: dict[tuple[int, int], int] = {}
    stack = [wanted.node]
    while stack:
        node = stack.pop()
        if id(node) in found:
            continue
        found[id(node)] = node
        for later in node.needs():
            slot = later.node.alive().get(later.number)
            if slot is None or slot.value is None:
                key = (id(later.node), later.number)
                uses[key] = uses.get(key, 0) + 1
                stack.append(later.node)
    return sorted(found.values(), key=lambda node: node.index), uses


class _Values:
    """Results that no slot holds, until the last node that needs them has them."""

    def __init__(self, uses: dict[tuple[int, int], int]) -> None:
        self._uses = uses
        self._tensors: dict[tuple[int, int], Tensor] = {}
        self.gathered = Gathered()

    def needs(self, node: Node, number: int) -> bool:
        return self._uses.get((id(node), number), 0) > 0

    def keep(self, node: Node, number: int, tensor: Tensor) -> None:
        if self.needs(node, number):
            self._tensors[id(node), number] = tensor

    def take(self, later: _Later) -> Tensor:
        slot = later.node.alive().get(later.number)
        if slot is not None and slot.value is not None:
            return slot.value
        key = (id(later.node), later.number)
        self._uses[key] -= 1
        return self._tensors[key] if self._uses[key] else self._tensors.pop(key)


class _Arguments:
    """The arguments of a node as tensors, each with the gradient flag that it had."""

    def __init__(self, node: Node, values: _Values) -> None:
        self._node = node
        self._values = values
        self._tensors: dict[int, Tensor] = {}

    def given(self, item: Any) -> Any:
        if not isinstance(item, _Later | _Kept | _Unused):
            return mapped(item, self.given)
        if id(item) not in self._tensors:
            self._tensors[id(item)] = self._tensor(item)
        return self._tensors[id(item)]

    def _tensor(self, item: _Later | _Kept | _Unused) -> Tensor:
        if isinstance(item, _Later):
            return _alike(item.view.on(self._values.take(item)), item.requires_grad)
        if isinstance(item, _Kept):
            self._values.gathered.gather(item.tensor, item.unit)
            if item.tensor._version != item.version:
                raise RuntimeError(
                    f"a tensor of shape {list(item.tensor.shape)} that {self._node.name} is computed again from in the "
                    "backward pass has been modified by an inplace operation since the forward"
                )
            return _alike(item.tensor, item.requires_grad)
        return torch.zeros(item.shape, dtype=item.dtype, device=item.device)


def _run(node: Node, numbers: set[int], values: _Values) -> dict[int, Tensor]:
    """Compute a node: its results by their numbers, and those of what it saves itself that are asked for."""
    inner = {number for number in numbers if number < 0}
    outer = {number for number in node.views if number >= 0 and (number in numbers or values.needs(node, number))}
    arguments = _Arguments(node, values)
    args, kwargs = arguments.given(node.arguments), arguments.given(node.options)
    inside = _Inside(inner, may_stop=not outer)
    # The kernel of a call may be another one where no gradient is asked for: so it is asked for, and nothing is saved.
    push_hooks(inside.pack, _never)
    try:
        with node.state.again():
            if node.writes:
                args = (args[0].clone(), *args[1:])
            result = node.function(*args, **kwargs)
            got = {number: tensor.detach() for number, tensor in enumerate(tensors_in(result)) if number in outer}
    except _Enough:
        got = {}
    finally:
        pop_hooks()
    got |= inside.found
    for number, tensor in got.items():
        if View.of(tensor) != node.views[number]:
            raise RuntimeError(
                f"{node.name} gave another layout when it was computed again in the backward pass: "
                f"{View.of(tensor)} and not {node.views[number]}"
            )
    return got


class _Inside:
    """Takes what a call saves for its backward pass, where that is asked for, and lets go of the rest."""

    def __init__(self, wanted: set[int], *, may_stop: bool) -> None:
        self.found: dict[int, Tensor] = {}
        self._wanted = wanted
        self._may_stop = may_stop
        self._saved = 0

    def pack(self, tensor: Tensor) -> None:
        self._saved += 1
        if -self._saved in self._wanted:
            self.found[-self._saved] = tensor.detach()
            if self._may_stop and len(self.found) == len(self._wanted):
                raise _Enough


def _never(held: Any) -> Tensor:
    raise AssertionError("no gradient goes through what is computed again")


def _held(tensor: Tensor) -> Tensor:
    # A parameter is held as it is: what shards it swaps the memory beneath.
    return tensor if tensor.is_leaf else tensor.detach()


def _alike(tensor: Tensor, requires_grad: bool) -> Tensor:
    return tensor.detach().requires_grad_(requires_grad)
