"""Run foreign code and leave the process as it was: random state, numeric settings, and whose turn it is."""

import functools
import os
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

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
