"""Run foreign code and leave everything as it was: modules, random state, numeric settings."""

import copy
import functools
import io
import os
import pickle
import random
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from optimizer.written_parameters import kept_values
from passes.graph.side_effects import REGISTRIES, holds_no_module
from passes.graph.snapshot import Snapshot
from passes.graph.storage import kind_of, same_values, write_values

# The numeric settings, the random state and the patches of a recorded run are the process's: two threads that measure or
# optimize take turns.
one_at_a_time = threading.RLock()
# Seconds that a fork waits for another thread's turn to end.
_LONGEST_WAIT = 600.0

_P = ParamSpec("_P")
_R = TypeVar("_R")


def in_turn(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, called by one thread at a time."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with one_at_a_time:
            return function(*args, **kwargs)

    return call


class _Fork(threading.local):
    """Forks between two turns.

    A child process has the settings and patches of another thread's turn, the flags and buffers of the module that is run in
    it, and no thread that puts them back. So a fork waits, but for the thread's own turn, which goes on in the child. After
    the longest wait it goes on all the same, as the turn may be waiting for the fork: the child can then take turns of its
    own, and patches let its threads through, but settings stay as they are.
    """

    has_turn = False

    def before(self) -> None:
        self.has_turn = one_at_a_time.acquire(timeout=_LONGEST_WAIT)

    def after(self) -> None:
        if self.has_turn:
            one_at_a_time.release()

    def after_in_child(self) -> None:
        if not self.has_turn:
            one_at_a_time._at_fork_reinit()  # type: ignore[attr-defined]
        self.after()


_fork = _Fork()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_fork.before, after_in_parent=_fork.after, after_in_child=_fork.after_in_child)


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """What is made inside counts the writes to it and goes on to a graph of gradients, as it couldn't in that mode."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def seed_torch(seed: int) -> None:
    """Seed torch on the CPU and on the devices in use.

    `torch.manual_seed` also has every other device take the seed when it is used first, in the place of the user's own.
    """
    torch.default_generator.manual_seed(seed)
    for device in _started():
        device.seed(seed)


class _Random(NamedTuple):
    """How the random state of one kind of device is read, put back and seeded."""

    state: Callable[[], Any]
    put_back: Callable[[Any], None]
    seed: Callable[[int], Any]


def _started() -> list[_Random]:
    """Of the kinds of devices in use: to read or seed the random state of another one would start it."""
    kinds = [kind for kind in (torch.cuda, torch.xpu) if kind.is_available() and kind.is_initialized()]
    found = [_Random(kind.get_rng_state_all, kind.set_rng_state_all, kind.manual_seed_all) for kind in kinds]
    if torch.backends.mps.is_available():
        found.append(_Random(torch.mps.get_rng_state, torch.mps.set_rng_state, torch.mps.manual_seed))
    return found


@contextmanager
def random_state(seed: int | None = None) -> Iterator[Callable[[], bool]]:
    """Keep the random state of torch, on the CPU and on devices in use, of numpy and of Python.

    Inside, all of them start from `seed`. What is given tells whether any number was drawn since.
    """
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    cpu_state = torch.get_rng_state()
    states = [(device, device.state()) for device in _started()]
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    python_state = random.getstate()
    try:
        if seed is not None:
            seed_torch(seed)
            random.seed(seed)
            if numpy_random is not None:
                numpy_random.seed(seed % (1 << 32))
        before = _fingerprint()
        yield lambda: _fingerprint() != before
    finally:
        torch.set_rng_state(cpu_state)
        for device, state in states:
            device.put_back(state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)
        random.setstate(python_state)


def _fingerprint() -> tuple[Any, ...]:
    """The state of all generators, to be compared."""
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    kept = [torch.get_rng_state(), *(device.state() for device in _started())]
    states = [state.numpy().tobytes() for one in kept for state in (one if isinstance(one, list) else [one])]
    numpy_state = None if numpy_random is None else pickle.dumps(numpy_random.get_state())
    return (*states, numpy_state, random.getstate())


@contextmanager
def pinned_settings() -> Iterator[dict[str, str]]:
    """float32 means float32: TF32 and bfloat16 matrix products off, the fused attention layers of `nn` off; all restored.

    The fused layers (`torch.backends.mha`) leave zeros at padded positions where the plain ones leave numbers, and no
    export holds them: both sides of a comparison run the plain ones. Nor does a SyncBatchNorm wait for other processes.
    Yields what was pinned, for the record.
    """
    with ExitStack() as stack:
        apart = {"sync_batch_norm": "this process alone"} if stack.enter_context(unsynchronised()) else {}
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        _pin_float32(stack)
        yield {"float32_precision": "ieee", "torch_tf32": _tf32(), "mha_fastpath": "off", **apart}


def _tf32() -> str:
    """Whether torch may take float32 products in TF32 now: "on" or "off"."""
    backends = torch.backends
    try:
        used = backends.cuda.matmul.allow_tf32 or backends.cudnn.allow_tf32
    except RuntimeError:
        used = any(node.fp32_precision == "tf32" for node in _float32_nodes())
    return "on" if used else "off"


def _float32_nodes() -> list[Any]:
    """Where torch keeps `fp32_precision`."""
    backends = torch.backends
    owners: list[tuple[Any, tuple[str, ...]]] = [
        (backends.cuda, ("matmul",)),
        (backends.cudnn, ("conv", "rnn")),
        (backends.mkldnn, ("matmul", "conv", "rnn")),
    ]
    return [getattr(owner, part) for owner, parts in owners for part in parts]


def _pin_float32(stack: ExitStack) -> None:
    backends = torch.backends
    try:
        matmul, cudnn = backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:
        # torch refuses to answer by these names once the settings were made by `fp32_precision`.
        for node in _float32_nodes():
            stack.callback(setattr, node, "fp32_precision", node.fp32_precision)
            node.fp32_precision = "ieee"
        return
    stack.callback(setattr, backends.cudnn, "allow_tf32", cudnn)
    stack.callback(setattr, backends.cuda.matmul, "allow_tf32", matmul)
    stack.callback(torch.set_float32_matmul_precision, precision)
    torch.set_float32_matmul_precision("highest")
    backends.cuda.matmul.allow_tf32 = False
    backends.cudnn.allow_tf32 = False


@contextmanager
def unsynchronised() -> Iterator[bool]:
    """Inside, a SyncBatchNorm takes the statistics of this process' batch, also where there is a process group.

    With one it would wait for processes that may have nothing to measure, take in batches that nobody here knows, and raise
    on a CPU. Yields whether there is one. The forward is replaced for all threads: the backward pass of a GPU has one of its
    own, in which checkpoints run the forward again.
    """
    _apart.enter()
    try:
        yield torch.distributed.is_available() and torch.distributed.is_initialized()
    finally:
        _apart.leave()


class _Apart:
    """Whether no SyncBatchNorm synchronises: from the first that asks for it to the last that is done, in any thread."""

    def __init__(self) -> None:
        self.on = False
        self._count = 0
        self._lock = threading.Lock()
        self._forward = nn.SyncBatchNorm.forward

    def enter(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1:
                self.on, self._forward = True, nn.SyncBatchNorm.forward
                nn.SyncBatchNorm.forward = _forward_apart  # type: ignore[method-assign]

    def leave(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                self.on = False
                nn.SyncBatchNorm.forward = self._forward  # type: ignore[method-assign]


_apart = _Apart()
_synchronised_forward = nn.SyncBatchNorm.forward


# Who asks whose code a forward is finds torch's.
@functools.wraps(nn.SyncBatchNorm.forward)
def _forward_apart(self: nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:
    """Stands in `nn.SyncBatchNorm` as its `forward`."""
    # What torch.compile makes of this holds for as long as the flag is set. Of the forward itself it keeps for good whether
    # there was a process group when it was compiled, and code that was compiled for a comparison is called later, too.
    if not _apart.on:
        return _synchronised_forward(self, input)
    # That of every BatchNorm: what the forward itself comes to where there is nothing to synchronise.
    return _BatchNorm.forward(self, input)


@contextmanager
def eager_only() -> Iterator[None]:
    """Inside, compiled functions run as they were written: function modes don't reach into compiled code."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def evaluated(target: Any) -> Iterator[None]:
    """All modules of `target` in eval, each one's own flag restored afterwards; nothing for other callables."""
    # A frozen TorchScript module has no such flag.
    flags = [(module, module.training) for module in modules_of(target) if hasattr(module, "training")]
    try:
        if flags:
            target.eval()
        yield
    finally:
        for module, training in flags:
            # Not `.train()`: a module may have overridden it, and it would reach the children.
            module.training = training


@contextmanager
def kept_state(target: Any, written: Iterable[str] = ()) -> Iterator[None]:
    """Buffers, tensors among the attributes, and the attributes themselves are afterwards what they were before.

    So are the containers, objects, arrays and random generators among the attributes (`passes.graph.snapshot`), and the
    tensors in them: those that were written to in place get their values back in place. This reaches the modules in lists and
    other plain containers too. Iterators among the attributes stay where they are: a copy runs in their place. `written`
    names the parameters that the forward is known to write to, which are kept too (`optimizer.written_parameters` finds
    them); no other is copied. Nothing for callables that are no modules.
    """
    modules = reachable_modules(target) if isinstance(target, nn.Module) else []
    scripted = [module for module in modules if isinstance(module, torch.jit.ScriptModule)]
    snapshot = Snapshot(*(module for module in modules if not isinstance(module, torch.jit.ScriptModule)))
    buffers = {id(tensor): tensor for module in scripted for tensor in module.buffers(recurse=False)}
    found = {**buffers, **snapshot.own, **snapshot.nested}
    tensors = [_TensorState(tensor) for tensor in found.values() if not is_lazy(tensor)]
    try:
        with held_iterators(modules), kept_values(target, written):
            yield
    finally:
        snapshot.restore()
        for tensor in tensors:
            tensor.restore()


@contextmanager
def held_iterators(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, each iterator among the attributes of the modules is a copy, so that the attribute itself isn't moved.

    So is one in the dicts and lists among them. Where there is no copy, as of a generator, something stands in its place
    that raises when it is asked for an item.
    """
    places = list(_iterators_in(modules))
    try:
        for home, key, value, where in places:
            home[key] = _stand_in(value, where)
        yield
    finally:
        for home, key, value, _ in places:
            # A list may have become shorter: who keeps the state puts that back.
            if isinstance(home, dict) or key < len(home):
                home[key] = value


def _iterators_in(modules: Iterable[nn.Module]) -> Iterator[tuple[Any, Any, Any, str]]:
    """The iterators, each with the dict or list that it stands in, under which key, and a name for the place."""
    seen: dict[int, int] = {}
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            continue
        attributes = vars(module)
        for name, value in attributes.items():
            if _moves(value):
                yield attributes, name, value, f"attribute {name!r} of {type(module).__name__}"
            elif type(value) in _HOMES and value and name not in REGISTRIES:
                for home, key, item in _nested_iterators(value, seen, depth=4):
                    yield home, key, item, f"{key!r} in attribute {name!r} of {type(module).__name__}"


# A class of the user's may do anything when an item is set.
_HOMES = frozenset({dict, list, OrderedDict, defaultdict})


def _nested_iterators(home: Any, seen: dict[int, int], depth: int) -> Iterator[tuple[Any, Any, Any]]:
    # Modules may share a container.
    if depth <= seen.get(id(home), 0):
        return
    is_new = id(home) not in seen
    seen[id(home)] = depth
    for key, item in enumerate(home) if type(home) is list else home.items():
        if holds_no_module(item):
            continue
        if type(item) in _HOMES:
            yield from _nested_iterators(item, seen, depth - 1)
        elif is_new and _moves(item):
            yield home, key, item


def _stand_in(iterator: Any, where: str) -> Any:
    copied = _copied(iterator)
    return _Unmovable(iterator, where) if copied is None else copied


class _Unmovable(Iterator[Any]):
    """Stands for an iterator that can't be copied."""

    def __init__(self, iterator: Any, where: str) -> None:
        self._where = f"{where} is a {type(iterator).__name__}"

    def __next__(self) -> Any:
        raise RuntimeError(
            f"{self._where}: the forward takes items from it, and it couldn't be put back to where it was; hold a list and "
            "an index instead"
        )


def _moves(value: Any) -> bool:
    """Whether asking a value for its next item changes it; files are no state of a model."""
    return hasattr(type(value), "__next__") and not isinstance(value, io.IOBase | nn.Module | torch.Tensor)


def _copied(iterator: Any) -> Any:
    """An iterator that gives the same items from here on, over the same objects; None where there can be none."""
    try:
        if type(iterator).__module__ in ("builtins", "itertools"):
            make, arguments, *state = iterator.__reduce__()
            result = make(*_all_copied(arguments))
            if state and state[0] is not None:
                result.__setstate__(_all_copied(state[0]))
            return result
        result = copy.copy(iterator)
        for name, value in getattr(result, "__dict__", {}).items():
            vars(result)[name] = _all_copied(value)
    except (TypeError, NotImplementedError, AttributeError):
        return None
    return result


def _all_copied(value: Any) -> Any:
    """The value with copies of the iterators in it, and of the list that one remembers its items in."""
    if isinstance(value, tuple):
        return tuple(_all_copied(item) for item in value) if type(value) is tuple else value
    if type(value) is list:
        return list(value)
    if not _moves(value):
        return value
    copied = _copied(value)
    if copied is None:
        raise TypeError(f"a {type(value).__name__} can't be copied")
    return copied


def reachable_modules(model: nn.Module) -> list[nn.Module]:
    """All modules of the tree, then those that stand in attributes and plain containers of one, and their trees."""
    return list(dict.fromkeys([*model.modules(), *(module for _, module in unregistered_modules(model))]))


def unregistered_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that stand in attributes and plain containers alone, and their trees, each with its path.

    The path is how code would reach it: `layers[0].conv`. A module that stands in several places comes as often.
    """
    registered = dict.fromkeys(model.modules())
    paths: dict[nn.Module, str] = {}
    found: list[tuple[str, nn.Module]] = []
    waiting = list(registered)
    looked_at = set[nn.Module]()
    held: dict[int, list[tuple[str, nn.Module]]] = {}
    while waiting:
        module = waiting.pop()
        if isinstance(module, torch.jit.ScriptModule) or module in looked_at:
            continue
        looked_at.add(module)
        for name, value in module.__dict__.items():
            if holds_no_module(value) or name in REGISTRIES:
                continue
            if (inside := held.get(id(value))) is None:
                inside = held[id(value)] = list(_modules_in(value, "", depth=3))
            if inside and not paths:
                # Most models hold none: their paths needn't be known.
                paths = {module: path for path, module in model.named_modules()}
            for place, top in inside:
                path = f"{paths[module]}.{name}{place}".lstrip(".")
                new = [item for item in top.named_modules(prefix=path) if item[1] not in registered]
                found += new
                waiting += (inner for _, inner in new)
                for inner_path, inner in new:
                    paths.setdefault(inner, inner_path)
    return found


def _modules_in(value: Any, path: str, depth: int) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield path, value
    elif depth and isinstance(value, dict | list | tuple | set):
        keys, items = (value, value.values()) if isinstance(value, dict) else (range(len(value)), value)
        for key, item in zip(keys, items, strict=False):
            if not holds_no_module(item):
                yield from _modules_in(item, f"{path}[{key!r}]", depth - 1)


def modules_of(target: Any) -> list[nn.Module]:
    return list(target.modules()) if isinstance(target, nn.Module) else []


class _TensorState:
    """The values of one tensor; they are written back only if they were written to, so that no version moves idly."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = None if tensor.is_inference() else tensor._version
        self.values = tensor.detach().clone()

    def restore(self) -> None:
        if self._unchanged():
            return
        guard: Callable[[], Any] = torch.inference_mode if self.version is None else torch.no_grad
        with guard():
            if kind_of(self.tensor) is None and self.tensor.shape != self.values.shape:
                self.tensor.resize_(self.values.shape)
            write_values(self.tensor, self.values)

    def _unchanged(self) -> bool:
        # The version alone won't do: batch_norm writes its running statistics without moving it.
        is_counted = self.version is not None and self.tensor._version != self.version
        return not is_counted and same_values(self.tensor, self.values)
