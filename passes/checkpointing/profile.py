"""What one training step makes, saves and lets go of, call by call: what a plan is made from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from passes.checkpointing.calls import UNCOUNTED, has_no_versions, is_repeatable, moved_statistics, name_of
from passes.checkpointing.fake import homes_of
from passes.checkpointing.live_bytes import LiveBytes
from passes.checkpointing.plan import Plan
from passes.checkpointing.tape import Tape
from passes.checkpointing.tensors import fills_its_memory, is_plain, tensors_in, version_of
from passes.torch_private import active_transforms, top_saved_tensors_hooks, without_torch_function


class NoProfile(Exception):
    """A step can't be profiled; the message is a clause that says why."""


@dataclass(slots=True)
class Value:
    """A tensor's memory, as the forward left it after its last write. One that is written to again is another value.

    Attributes:
        size: bytes.
        call: the call that made it.
        numbers: what a plan calls it there: results count from 0 up, what the call saves of its own from -1 down; empty for
            what is neither, and stays whatever a plan says.
        python: the last call in whose time something but autograd holds it.
        until: when the last that holds it lets go of it, as a position in `Profile.order`; -1 for what doesn't outlive the
            forward.
        held: something but autograd's saved tensors holds it beyond the forward.
        savers: the calls whose backward pass needs it, each once, in order.
        keepable: it is never written over.
    """

    size: int
    call: int
    numbers: tuple[int, ...]
    python: int = -1
    until: int = -1
    held: bool = False
    savers: tuple[int, ...] = ()
    keepable: bool = True


@dataclass(slots=True)
class Call:
    """A call of a torch function.

    Attributes:
        name: the function's.
        path: of the module whose forward makes it.
        flops: of its matmuls, convolutions and attention.
        cost: its time, as `passes.checkpointing.cost` estimates it.
        inner: the bytes that it takes while it runs, on top of what was alive before.
        alone: the same where nothing that it saves of its own is kept.
        early: the same up to where it has saved the last of its own: there it stops where no result of it is asked for.
        args: the values that it takes.
        makes: the values that it makes and that outlive it.
        repeatable: computed again from the same arguments, it gives the same, and no other call would notice.
        random: it draws random numbers.
        writes: it writes to its first argument, and gives that back.
        spare: bytes of the tensors that it gets in place of running statistics when it is computed again.
        synchronised: it is the call of a SyncBatchNorm, in whose place other processes may be asked: it isn't made again, and
            what it saves stays, as in the autograd function that does so.
    """

    name: str
    path: str
    flops: int = 0
    cost: int = 0
    inner: int = 0
    alone: int = 0
    early: int = 0
    args: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    repeatable: bool = True
    random: bool = False
    writes: bool = False
    spare: int = 0
    synchronised: bool = False


@dataclass(slots=True)
class Position:
    """A moment of the backward pass: one call's turn, up to the next one's.

    Attributes:
        call: whose turn it is.
        incoming: bytes of gradients when it begins.
        needs: the values that are asked for, in order.
        releases: the values that are let go of, in order.
        extras: the most bytes of what the backward pass makes: until the first of them is, the second, and so on.
    """

    call: int
    incoming: int = 0
    needs: list[int] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    extras: list[int] = field(default_factory=list)


@dataclass
class Profile:
    """One training step.

    Attributes:
        calls: of the forward, in order.
        values: what they make, in the order in which it is made.
        order: the backward pass. It begins with the loss.
        peak: the most bytes alive in the step, but for parameters, their gradients, buffers and inputs.
        flops: of the forward. step_flops: of forward and backward pass.
    """

    calls: list[Call] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    order: list[Position] = field(default_factory=list)
    peak: int = 0
    flops: int = 0
    step_flops: int = 0


def profile(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Profile:
    """Run two steps of `root`, and see what they make, save and let go of.

    A step holds nothing but the loss of `loss_of` once the forward is over, as `model(**batch).loss.backward()` does.

    The tensors may be fake ones. The runs change what any run of the module would.

    Raises:
        NoProfile: no gradient can be asked for, or the forward makes other calls at its second run.
    """
    forgetful = _Forgetting(root)
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    with forgetful.watching(args, kwargs):
        outputs = forgetful.run(args, kwargs)
        loss = loss_of(outputs)
        del outputs
        forgetful.is_over = True
        del loss
    # What a forward leaves out at random, it leaves out in both.
    random.setstate(python_state)
    torch.set_rng_state(torch_state)
    whole = _Remembering(root)
    with whole.watching(args, kwargs):
        outputs = whole.run(args, kwargs)
        if whole.names != forgetful.names:
            raise NoProfile("its forward doesn't make the same calls each time that it runs")
        loss = loss_of(outputs)
        del outputs
        whole.turn_back()
        loss.backward()
        del loss
        whole.finish()
    whole.add_deaths(forgetful.deaths)
    for call, taken in zip(whole.profile.calls, forgetful.taken, strict=True):
        call.alone = taken
    return whole.profile


def loss_of(outputs: Any) -> Tensor:
    """The loss of a step: the scalars of the outputs where there are any, as a model gives that computes its loss itself;
    else half the mean square of all of them.

    Raises:
        NoProfile: nothing in the outputs needs a gradient.
    """
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not tensors:
        raise NoProfile("nothing that it returns needs a gradient")
    if scalars := [tensor for tensor in tensors if tensor.dim() == 0]:
        return torch.stack([scalar.float() for scalar in scalars]).sum()
    return torch.stack([tensor.abs().float().square().mean() / 2 for tensor in tensors]).sum()


def measure(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan) -> Measured:
    """Run a step of `root` under a plan.

    The tensors may be fake ones. The run changes what any run of the module would.

    Raises:
        NoProfile: the forward doesn't make the calls that the plan is for.
    """
    with LiveBytes(without=there_before(root, args, kwargs)) as live:
        with Tape(plan) as tape:
            outputs = root(*args, **kwargs)
        if tape.missed is not None:
            raise NoProfile("its forward doesn't make the same calls each time that it runs")
        loss = loss_of(outputs)
        del outputs
        loss.backward()
        del loss
    return Measured(live.peak, live.flops)


@dataclass(frozen=True)
class Measured:
    """What a step took: the most bytes alive, and the FLOPs of forward and backward pass."""

    peak: int
    flops: int


class _Watch(TorchFunctionMode):
    """Counts the calls of a forward, as a tape does."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.root = root
        self.bytes = LiveBytes()
        self.names: list[str] = []
        self._calling: list[tuple[str, nn.Module]] = [("", root)]
        self._outer: Any = None

    @contextmanager
    def watching(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Count bytes; what is there before isn't counted."""
        self.bytes = LiveBytes(without=there_before(self.root, args, kwargs))
        self.bytes.when_made, self.bytes.when_gone = self.made, self.gone
        with self.bytes:
            yield
        self.bytes.when_made = self.bytes.when_gone = None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outputs of the forward."""
        with ExitStack() as stack:
            stack.enter_context(self._following())
            stack.enter_context(saved_tensors_hooks(self.pack_outside, self.unpack))
            self._outer = top_saved_tensors_hooks()
            stack.enter_context(self)
            try:
                return self.root(*args, **kwargs)
            except RuntimeError as error:
                if "saved tensor hooks" not in str(error):
                    raise
                raise NoProfile("it takes gradients by torch.func, which lets nobody see what is saved") from error

    @contextmanager
    def _following(self) -> Iterator[None]:
        """Follow, by hooks, which module's forward runs."""
        handles = []
        for path, module in self.root.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                # It takes no hooks, and makes no calls that a function mode sees.
                continue

            def enter(module: nn.Module, args: Any, path: str = path) -> None:
                self._calling.append((path, module))

            def leave(module: nn.Module, args: Any, result: Any) -> None:
                self._calling.pop()

            handles += [
                module.register_forward_pre_hook(enter, prepend=True),
                module.register_forward_hook(leave, always_call=True),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name in UNCOUNTED:
            return func(*args, **kwargs)
        self.names.append(name)
        return self.call(func, args, kwargs)

    def made(self, number: int) -> None:
        """Memory is made."""

    def gone(self, number: int) -> None:
        """Memory is let go of."""

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call."""
        raise NotImplementedError

    def pack_outside(self, tensor: Tensor) -> Any:
        """Autograd saves a tensor between two calls, as the autograd function of a user does."""
        raise NotImplementedError

    def unpack(self, held: Any) -> Tensor:
        """Autograd asks for a tensor that it has saved."""
        raise NotImplementedError


class _Forgetting(_Watch):
    """Saves nothing of the forward for the backward pass: what still lives is held by somebody else."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__(root)
        # For each memory that dies before the backward pass: the last call that was made then.
        self.deaths: dict[int, int] = {}
        # For each call the bytes that it takes while it runs.
        self.taken: list[int] = []
        self.is_over = False

    def gone(self, number: int) -> None:
        if not self.is_over:
            self.deaths[number] = len(self.names) - 1

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.bytes.restart()
        before = self.bytes.live
        result = func(*args, **kwargs)
        self.taken.append(self.bytes.peak - before)
        return result

    def pack_outside(self, tensor: Tensor) -> Any:
        return None

    def unpack(self, held: Any) -> Tensor:
        raise AssertionError("nothing goes backward here")


@dataclass(slots=True)
class _Held:
    """A tensor that autograd saved: in which call, in which memory, and of which value."""

    tensor: Tensor
    call: int
    number: int | None
    # The most bytes that the call had taken by then.
    inner: int = 0
    value: int | None = None


class _Remembering(_Watch):
    """Runs a whole step."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__(root)
        self.profile = Profile()
        self._alive: set[int] = set()
        self._new: list[int] = []
        self._peak = 0
        self._before = 0
        # Values by the number of their memory and the version of the tensor; the last one of each memory.
        self._by_version: dict[tuple[int, int], int] = {}
        self._latest: dict[int, int] = {}
        self._saves: list[_Held] = []
        self._fixed: set[int] = set()
        # What calls took that isn't counted, at the version that it had.
        self._others: list[tuple[int, Tensor, int]] = []
        self._is_backward = False
        self._forward_bytes = 0

    # ------------------------------------------------------------------------------------- forward

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = self.names[-1]
        index = len(self.profile.calls)
        self._see_made_between(index - 1)
        given = tensors_in((args, kwargs))
        moved = moved_statistics(name, func, args, kwargs)
        path, module = self._calling[-1]
        synchronised = isinstance(module, nn.SyncBatchNorm) and module.training and name == "batch_norm"
        call = Call(name, path, spare=sum(tensor.nbytes for tensor in moved), synchronised=synchronised)
        self.profile.calls.append(call)
        inputs = [tensor for tensor in given if not any(tensor is one for one in moved)]
        # Inside of hooks that the model itself set what is saved is theirs; the transforms of torch.func allow no hooks.
        mine = top_saved_tensors_hooks() == self._outer and active_transforms() is None and not has_no_versions(given)
        call.repeatable = mine and not synchronised and is_repeatable(name, args, kwargs)
        call.args = tuple(
            dict.fromkeys(value for tensor in inputs if (value := self._value(index, tensor)) is not None)
        )
        versions = [version_of(tensor) for tensor in given]
        result = self._watched(call, func, args, kwargs, mine=mine)
        written = [tensor for tensor, before in zip(given, versions, strict=True) if version_of(tensor) != before]
        self._see_written(call, index, args, written, result)
        self._see_made(call, index, result)
        return result

    def _watched(
        self, call: Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, mine: bool
    ) -> Any:
        """Make the call, and see what it costs and, where that is `mine` to see, what it saves."""
        live, self._saves = self.bytes, []
        self._peak = max(self._peak, live.peak)
        live.restart()
        self._before, flops, cost = live.live, live.flops, live.cost
        live.is_random = live.is_foreign = False
        with saved_tensors_hooks(self._pack_inside, self.unpack) if mine else nullcontext():
            result = func(*args, **kwargs)
        call.inner = live.peak - self._before
        # Each call takes a little.
        call.flops, call.cost = live.flops - flops, live.cost - cost + 1
        call.random = live.is_random
        call.repeatable &= not live.is_foreign
        return result

    def _value(self, index: int, tensor: Tensor) -> int | None:
        """The value that a tensor is before this call; None for what isn't counted."""
        number = self.bytes.number_of(tensor)
        if number is None:
            self._others.append((index, tensor, version_of(tensor)))
            return None
        value = self._by_version.get((number, version_of(tensor))) if is_plain(tensor) else None
        if value is None:
            # Known by nobody under this version: it is kept as it is.
            value = self._latest.get(number)
            if value is not None:
                self._fixed.add(value)
        return value

    def _see_written(
        self, call: Call, index: int, args: tuple[Any, ...], written: Sequence[Tensor], result: Any
    ) -> None:
        if not written:
            return
        first = args[0] if args else None
        call.writes = len(written) == 1 and written[0] is first and result is first
        call.repeatable &= call.writes and self.bytes.number_of(written[0]) is not None
        for tensor in written:
            number = self.bytes.number_of(tensor)
            if number is None:
                continue
            if (before := self._latest.get(number)) is not None:
                self.profile.values[before].keepable = False
                self.profile.values[before].python = index - 1
            self._add(call, index, number, version_of(tensor), (0,) if call.writes else ())

    def _see_made(self, call: Call, index: int, result: Any) -> None:
        results = tensors_in(result)
        names: dict[int, list[int]] = {}
        version: dict[int, int] = {}
        whole: set[int] = set()
        for place, tensor in enumerate(results):
            number = self.bytes.number_of(tensor)
            if number is not None:
                names.setdefault(number, []).append(place)
                version[number] = version_of(tensor)
                whole |= {number} if is_plain(tensor) and fills_its_memory(tensor) else set()
        packs: dict[int, list[int]] = {}
        taken: dict[int, int] = {}
        for place, held in enumerate(self._saves):
            if held.number is not None:
                packs.setdefault(held.number, []).append(-1 - place)
                taken[held.number] = held.inner
        for number in self._take_new():
            numbers = names.get(number) or packs.get(number, [])
            self._add(call, index, number, version.get(number, 0), tuple(numbers))
            if number not in names:
                call.early = max(call.early, taken.get(number, 0))
            # A result that is but a part of its memory isn't found again in it.
            call.repeatable &= number in whole or number not in names
        for held in self._saves:
            if held.number is not None and (value := self._latest.get(held.number)) is not None:
                held.value = value
                self._save(value, index)
                # Saved as another kind of tensor, or by an autograd function, it isn't found again.
                self._fixed |= set() if is_plain(held.tensor) and not call.synchronised else {value}
        self._saves = []

    def _save(self, value: int, index: int) -> None:
        if index not in self.profile.values[value].savers:
            self.profile.values[value].savers += (index,)

    def _see_made_between(self, index: int) -> None:
        """What was made between two calls stays where it is."""
        for number in self._take_new():
            if index >= 0:
                self._add(self.profile.calls[index], index, number, 0, ())

    def _take_new(self) -> list[int]:
        """The memory that was made since this was asked last and is still there."""
        new, self._new = [number for number in self._new if number in self._alive], []
        return new

    def _add(self, call: Call, index: int, number: int, version: int, numbers: tuple[int, ...]) -> None:
        value = len(self.profile.values)
        self.profile.values.append(Value(self.bytes.sizes[number], index, numbers))
        self._by_version[number, version] = value
        self._latest[number] = value
        call.makes += (value,)

    def _pack_inside(self, tensor: Tensor) -> _Held:
        index, taken = len(self.profile.calls) - 1, self.bytes.peak - self._before
        held = _Held(tensor.detach(), index, self.bytes.number_of(tensor), taken)
        self._saves.append(held)
        return held

    def pack_outside(self, tensor: Tensor) -> _Held:
        # What is saved before the first call is needed when that one's turn is over.
        index, number = max(0, len(self.profile.calls) - 1), self.bytes.number_of(tensor)
        if number is not None and (value := self._latest.get(number)) is not None:
            # It is kept as it is, whatever a plan says.
            self._fixed.add(value)
            self._save(value, index)
        # This isn't one of the forward's own calls.
        with without_torch_function():
            return _Held(tensor.detach(), index, number)

    def made(self, number: int) -> None:
        self._alive.add(number)
        if self._is_backward:
            self._see_extra()
        else:
            self._new.append(number)

    def gone(self, number: int) -> None:
        self._alive.discard(number)
        if self._is_backward and (value := self._latest.get(number)) is not None:
            self._forward_bytes -= self.bytes.sizes[number]
            position = self.profile.order[-1]
            position.releases.append(value)
            position.extras.append(self.bytes.live - self._forward_bytes)
            self.profile.values[value].until = len(self.profile.order) - 1

    # ------------------------------------------------------------------------------------ backward

    def turn_back(self) -> None:
        """The loss is computed: what comes now is the backward pass."""
        live = self.bytes
        self._peak = max(self._peak, live.peak)
        self.profile.flops = sum(call.flops for call in self.profile.calls)
        self._is_backward = True
        self._forward_bytes = sum(live.sizes[number] for number in self._alive if number in self._latest)
        extra = live.live - self._forward_bytes
        self.profile.order.append(Position(len(self.profile.calls), extra, extras=[extra]))
        for index, tensor, version in self._others:
            if version_of(tensor) != version:
                # What it was computed from is no more.
                self.profile.calls[index].repeatable = False
        self._others.clear()
        live.restart()

    def unpack(self, held: _Held) -> Tensor:
        order = self.profile.order
        if order[-1].call != held.call:
            extra = self.bytes.live - self._forward_bytes
            order.append(Position(held.call, extra, extras=[extra]))
        if held.value is not None:
            order[-1].needs.append(held.value)
        return held.tensor

    def _see_extra(self) -> None:
        position = self.profile.order[-1]
        position.extras[-1] = max(position.extras[-1], self.bytes.live - self._forward_bytes)

    def finish(self) -> None:
        """The step is over."""
        profile = self.profile
        profile.peak = max(self._peak, self.bytes.peak)
        profile.step_flops = self.bytes.flops
        for number in self._alive:
            if (value := self._latest.get(number)) is not None:
                profile.values[value].until = len(profile.order)
        for value in self._fixed:
            profile.calls[profile.values[value].call].repeatable = False

    def add_deaths(self, deaths: dict[int, int]) -> None:
        """Say of each value how long something but autograd holds it."""
        for number, value in self._latest.items():
            item = self.profile.values[value]
            item.python = max(deaths.get(number, len(self.profile.calls)), item.call)
            item.held = number not in deaths and item.until >= 0
        for item in self.profile.values:
            if not item.savers and not item.held:
                item.until = -1


def there_before(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a step of a module doesn't make: parameters, their gradients, buffers, inputs."""
    found = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    for module in root.modules():
        found.extend(value for home in homes_of(module) for value in home.values() if isinstance(value, Tensor))
    return found + [tensor.grad for tensor in found if tensor.grad is not None]
