"""Profile one training step, as the input for a plan: the tensors that each call makes, saves and releases."""

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
from passes.torch_private import HigherOrder, active_transforms, top_saved_tensors_hooks, without_torch_function


class NoProfile(Exception):
    """A step can't be profiled; the message is a clause with the reason."""


@dataclass(slots=True)
class Value:
    """The content of one storage, from one write to the next. A later write makes another value.

    Attributes:
        size: in bytes.
        call: the index of the call that made it.
        numbers: its numbers at that call in a plan. Results count from 0 up, tensors that the call saves internally
            from -1 down. Empty for a value that is neither: a plan can't drop it.
        python: the index of the last call during which something other than autograd holds it.
        until: the position in `Profile.order` at which the last holder releases it; `len(order)` if it outlives the
            step, -1 if it doesn't outlive the forward.
        held: whether something other than autograd's saved tensors holds it beyond the forward.
        savers: the indices of the calls whose backward pass needs it, each once, in order.
        keepable: whether it is never overwritten.
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
    """One call of a torch function.

    Attributes:
        name: the name of the function.
        path: the path of the module whose forward makes the call.
        flops: the FLOPs of its matmuls, convolutions and attention.
        cost: its time, as `passes.checkpointing.cost` estimates it.
        inner: the bytes that it needs while it runs, in addition to those that were alive before.
        alone: the same if none of its internally saved tensors is kept.
        early: the same until it has saved the last of its internal tensors. If none of its results is needed, a
            recomputation stops there.
        args: the values that it takes.
        makes: the values that it makes and that outlive it.
        kept_because: why it can't be recomputed, as a clause; "" if it can: from the same arguments it gives the same
            results, without side effects.
        random: whether it draws random numbers.
        writes: whether it writes to its first argument and returns it.
        spare: the bytes of the temporary tensors that replace running statistics in a recomputation.
        synchronised: whether a SyncBatchNorm makes it. In several processes the layer communicates instead, so the call
            isn't recomputed, and the tensors that it saves are kept, as in the autograd function that communicates.
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
    kept_because: str = ""
    random: bool = False
    writes: bool = False
    spare: int = 0
    synchronised: bool = False

    @property
    def repeatable(self) -> bool:
        """Whether it can be recomputed."""
        return not self.kept_because

    def keep(self, why: str) -> None:
        """Don't recompute it, for a reason; the first reason stays."""
        self.kept_because = self.kept_because or why


@dataclass(slots=True)
class Position:
    """A period of the backward pass: the turn of one call, up to the turn of the next one.

    Attributes:
        call: the index of the call whose turn it is.
        incoming: the bytes of gradients at the beginning.
        needs: the values that the backward pass reads, in order.
        releases: the values that are released, in order.
        extras: the maximum number of bytes that the backward pass itself holds: until the first release, then until the
            second, and so on.
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
        calls: the calls of the forward, in order.
        values: the values that the calls make, in the order of creation.
        order: the backward pass; the first position is that of the loss.
        peak: the maximum number of bytes alive in the step, without parameters, their gradients, buffers and inputs.
        flops, step_flops: the FLOPs of the forward, and of forward and backward pass.
    """

    calls: list[Call] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    order: list[Position] = field(default_factory=list)
    peak: int = 0
    flops: int = 0
    step_flops: int = 0


def profile(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Profile:
    """Profile a training step of `root` by running two steps.

    After the forward, a step holds nothing but the loss of `loss_of`, as in `model(**batch).loss.backward()`. The
    tensors may be fake. The runs have the side effects of any run of the module.

    Raises:
        NoProfile: no output needs a gradient, the forward makes other calls in its second run, or it uses torch.func.
    """
    forgetful = _Forgetting(root)
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    with forgetful.watching(args, kwargs):
        outputs = forgetful.run(args, kwargs)
        loss = loss_of(outputs)
        del outputs
        forgetful.is_over = True
        del loss
    # Restore the random state, so that both forwards skip the same calls if they skip some at random.
    random.setstate(python_state)
    torch.set_rng_state(torch_state)
    whole = _Remembering(root)
    with whole.watching(args, kwargs):
        outputs = whole.run(args, kwargs)
        if whole.names != forgetful.names:
            raise NoProfile("its forward doesn't make the same calls in every run")
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
    """Compute the loss of a step from the outputs that need a gradient.

    If there are scalars, as from a model that computes its loss itself, the loss is their sum. Otherwise it is the sum
    of half the mean square of each output.

    Raises:
        NoProfile: no output needs a gradient.
    """
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not tensors:
        raise NoProfile("none of its outputs needs a gradient")
    if scalars := [tensor for tensor in tensors if tensor.dim() == 0]:
        return torch.stack([scalar.float() for scalar in scalars]).sum()
    return torch.stack([tensor.abs().float().square().mean() / 2 for tensor in tensors]).sum()


def measure(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan) -> Measured:
    """Run a step of `root` under a plan, and measure it.

    The tensors may be fake. The run has the side effects of any run of the module.

    Raises:
        NoProfile: the forward doesn't make the calls of the plan.
    """
    with LiveBytes(without=there_before(root, args, kwargs)) as live:
        with Tape(plan) as tape:
            outputs = root(*args, **kwargs)
        if tape.missed is not None:
            raise NoProfile("its forward doesn't make the same calls in every run")
        loss = loss_of(outputs)
        del outputs
        loss.backward()
        del loss
    return Measured(live.peak, live.flops)


@dataclass(frozen=True)
class Measured:
    """The measurements of a step: the maximum number of bytes alive, and the FLOPs of forward and backward pass."""

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
        """Count bytes in the block, without those of tensors that exist before it."""
        self.bytes = LiveBytes(without=there_before(self.root, args, kwargs))
        self.bytes.when_made, self.bytes.when_gone = self.made, self.gone
        with self.bytes:
            yield
        self.bytes.when_made = self.bytes.when_gone = None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward, and return its outputs."""
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
                raise NoProfile("it computes gradients with torch.func, which hides the saved tensors") from error

    @contextmanager
    def _following(self) -> Iterator[None]:
        """Follow by hooks which module's forward is running."""
        handles = []
        for path, module in self.root.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                # A scripted module takes no hooks, and its calls are invisible to a function mode.
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
        if isinstance(func, HigherOrder):
            path, module = self._calling[-1]
            where = f" in `{path}` ({type(module).__name__})" if path else ""
            raise NoProfile(
                f"its forward calls torch's `{name}`{where}, and the pass can't see what such an operator keeps for the backward "
                "pass: leave the pass out, or call `torch.utils.checkpoint.checkpoint` on other modules yourself"
            )
        self.names.append(name)
        return self.call(func, args, kwargs)

    def made(self, number: int) -> None:
        """Handle a new storage."""

    def gone(self, number: int) -> None:
        """Handle a storage that is freed."""

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call."""
        raise NotImplementedError

    def pack_outside(self, tensor: Tensor) -> Any:
        """Handle a tensor that autograd saves between two calls, such as in a user's autograd function."""
        raise NotImplementedError

    def unpack(self, held: Any) -> Tensor:
        """Return a saved tensor to autograd."""
        raise NotImplementedError


class _Forgetting(_Watch):
    """Saves nothing of the forward for the backward pass, so a storage that is still alive has another holder."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__(root)
        # For each storage that is freed before the backward pass, the last call that was made by then.
        self.deaths: dict[int, int] = {}
        # For each call, the bytes that it needs while it runs.
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
        raise AssertionError("there is no backward pass here")


@dataclass(slots=True)
class _Held:
    """A tensor that autograd saved, with its call, the number of its storage, and its value."""

    tensor: Tensor
    call: int
    number: int | None
    # The maximum number of bytes that the call had needed by then.
    inner: int = 0
    value: int | None = None


class _Remembering(_Watch):
    """Runs a whole step, and records its profile."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__(root)
        self.profile = Profile()
        self._alive: set[int] = set()
        self._new: list[int] = []
        self._peak = 0
        self._before = 0
        # The values by the number of their storage and the version of the tensor, and the latest value of each storage.
        self._by_version: dict[tuple[int, int], int] = {}
        self._latest: dict[int, int] = {}
        self._saves: list[_Held] = []
        # The values that a plan can't drop, each with the reason.
        self._fixed: dict[int, str] = {}
        # Arguments whose storage isn't counted: the call, the tensor, and its version at the call.
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
        layer = module if isinstance(module, nn.SyncBatchNorm) and name == "batch_norm" else None
        synchronised = layer is not None and layer.training
        call = Call(name, path, spare=sum(tensor.nbytes for tensor in moved), synchronised=synchronised)
        self.profile.calls.append(call)
        inputs = [tensor for tensor in given if not any(tensor is one for one in moved)]
        # Inside hooks that the model itself sets, the saved tensors belong to these hooks. The transforms of torch.func
        # allow no hooks.
        mine = top_saved_tensors_hooks() == self._outer and active_transforms() is None and not has_no_versions(given)
        communicates = layer is not None and layer.training and _is_in_several_processes(layer)
        if communicates:
            call.keep("a SyncBatchNorm communicates with other processes")
        elif not mine:
            call.keep("the model's own hooks on saved tensors, torch.func or inference mode are active around it")
        elif not is_repeatable(name, args, kwargs):
            call.keep("its results depend on more than its arguments")
        call.args = tuple(
            dict.fromkeys(value for tensor in inputs if (value := self._value(index, tensor)) is not None)
        )
        versions = [version_of(tensor) for tensor in given]
        result = self._watched(call, func, args, kwargs, mine=mine)
        written = [tensor for tensor, before in zip(given, versions, strict=True) if version_of(tensor) != before]
        self._see_written(call, index, args, written, result)
        self._see_made(call, index, result, communicates=communicates)
        return result

    def _watched(
        self, call: Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, mine: bool
    ) -> Any:
        """Make the call and measure its cost; if `mine`, also record the tensors that it saves."""
        live, self._saves = self.bytes, []
        self._peak = max(self._peak, live.peak)
        live.restart()
        self._before, flops, cost = live.live, live.flops, live.cost
        live.is_random = live.is_foreign = False
        with saved_tensors_hooks(self._pack_inside, self.unpack) if mine else nullcontext():
            result = func(*args, **kwargs)
        call.inner = live.peak - self._before
        # Every call takes a little time, even a view.
        call.flops, call.cost = live.flops - flops, live.cost - cost + 1
        call.random = live.is_random
        if live.is_foreign:
            call.keep("it isn't an operator of torch")
        return result

    def _value(self, index: int, tensor: Tensor) -> int | None:
        """The value of a tensor before this call; None if its storage isn't counted."""
        number = self.bytes.number_of(tensor)
        if number is None:
            self._others.append((index, tensor, version_of(tensor)))
            return None
        value = self._by_version.get((number, version_of(tensor))) if is_plain(tensor) else None
        if value is None:
            # No value is known for this version. The latest value of the storage must then be kept.
            value = self._latest.get(number)
            if value is not None:
                self._fixed.setdefault(value, "another kind of tensor shares its memory")
        return value

    def _see_written(
        self, call: Call, index: int, args: tuple[Any, ...], written: Sequence[Tensor], result: Any
    ) -> None:
        if not written:
            return
        first = args[0] if args else None
        call.writes = len(written) == 1 and written[0] is first and result is first
        if not call.writes or self.bytes.number_of(written[0]) is None:
            call.keep("it writes to other tensors than its first argument")
        for tensor in written:
            number = self.bytes.number_of(tensor)
            if number is None:
                continue
            if (before := self._latest.get(number)) is not None:
                self.profile.values[before].keepable = False
                self.profile.values[before].python = index - 1
            self._add(call, index, number, version_of(tensor), (0,) if call.writes else ())

    def _see_made(self, call: Call, index: int, result: Any, *, communicates: bool) -> None:
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
            # A result that is only a part of its storage can't be found again after a recomputation.
            if number in names and number not in whole:
                call.keep("its result is a part of a larger tensor")
        for held in self._saves:
            if held.number is not None and (value := self._latest.get(held.number)) is not None:
                held.value = value
                self._save(value, index)
                # A tensor that is saved as another kind of tensor, or by an autograd function, can't be found again
                # either.
                if communicates or not is_plain(held.tensor):
                    self._fixed.setdefault(value, call.kept_because or "it is saved as another kind of tensor")
        self._saves = []

    def _save(self, value: int, index: int) -> None:
        if index not in self.profile.values[value].savers:
            self.profile.values[value].savers += (index,)

    def _see_made_between(self, index: int) -> None:
        """Record the values that were made between two calls; a plan can't drop them."""
        for number in self._take_new():
            if index >= 0:
                self._add(self.profile.calls[index], index, number, 0, ())

    def _take_new(self) -> list[int]:
        """The storages that were made since the last request and are still alive."""
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
        # A tensor that is saved before the first call is needed after the turn of that call.
        index, number = max(0, len(self.profile.calls) - 1), self.bytes.number_of(tensor)
        if number is not None and (value := self._latest.get(number)) is not None:
            self._fixed.setdefault(
                value, "a custom autograd function, or a checkpoint of the model itself, saves its result"
            )
            self._save(value, index)
        # Hide this operation, which is not a call of the forward.
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
        """Start the backward pass, after the loss was computed."""
        live = self.bytes
        self._peak = max(self._peak, live.peak)
        self.profile.flops = sum(call.flops for call in self.profile.calls)
        self._is_backward = True
        self._forward_bytes = sum(live.sizes[number] for number in self._alive if number in self._latest)
        extra = live.live - self._forward_bytes
        self.profile.order.append(Position(len(self.profile.calls), extra, extras=[extra]))
        for index, tensor, version in self._others:
            if version_of(tensor) != version:
                # An argument was overwritten, so the call can't be recomputed.
                self.profile.calls[index].keep("an argument is overwritten later")
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
        """Complete the profile after the step."""
        profile = self.profile
        profile.peak = max(self._peak, self.bytes.peak)
        profile.step_flops = self.bytes.flops
        for number in self._alive:
            if (value := self._latest.get(number)) is not None:
                profile.values[value].until = len(profile.order)
        for value, why in self._fixed.items():
            profile.calls[profile.values[value].call].keep(why)

    def add_deaths(self, deaths: dict[int, int]) -> None:
        """Set for each value how long something other than autograd holds it."""
        for number, value in self._latest.items():
            item = self.profile.values[value]
            item.python = max(deaths.get(number, len(self.profile.calls)), item.call)
            item.held = number not in deaths and item.until >= 0
        for item in self.profile.values:
            if not item.savers and not item.held:
                item.until = -1


def _is_in_several_processes(module: nn.SyncBatchNorm) -> bool:
    is_in_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    return is_in_group and torch.distributed.get_world_size(module.process_group) > 1


def there_before(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that exist before a step of a module: parameters, their gradients, buffers, inputs."""
    found = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    for module in root.modules():
        found.extend(value for home in homes_of(module) for value in home.values() if isinstance(value, Tensor))
    return found + [tensor.grad for tensor in found if tensor.grad is not None]
