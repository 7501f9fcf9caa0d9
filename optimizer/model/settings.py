"""Run foreign code and restore the process: random state, numeric settings, one thread at a time, memory."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import pickle
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, ParamSpec, TypeVar

import numpy
import torch
from torch import nn

from optimizer.model.working_copy import reachable_modules
from passes.torch_capture import compiler_silenced
from passes.torch_private import AnyBatchNorm

# Numeric settings, random state and the patches of a recorded run belong to the process, so threads that measure or
# optimize take turns.
one_at_a_time = threading.RLock()
# torch's layers with a fused implementation for inference.
_WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Random = tuple[torch.Tensor, list[torch.Tensor], Any, Any]
# Whether gradients are recorded; and by kind of device, whether autocast is on, and its dtype.
_Modes = tuple[bool, list[tuple[str, bool, torch.dtype]]]


def in_turn(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let only one thread at a time call the function, and show each warning of a model once per call of it."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with one_at_a_time, _each_warning_once(), compiler_silenced():
            return function(*args, **kwargs)

    return call


@contextmanager
def _each_warning_once() -> Iterator[None]:
    """Show each warning once, at the end: a model runs many times, and Python forgets what it has shown."""
    seen: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as seen:
            yield
    finally:
        different = {(str(each.message), each.category, each.filename, each.lineno): each for each in seen}
        for each in different.values():
            # A captured graph repeats the warnings of the lines that it was captured from.
            if not each.filename.startswith("<eval_with_key>"):
                warnings.showwarning(each.message, each.category, each.filename, each.lineno, each.file, each.line)


if hasattr(os, "register_at_fork"):
    # A child process inherits the settings and patches of another thread's turn, and no thread that restores them. So a
    # fork waits until that turn ends. The forking thread's own turn doesn't block it, and goes on in the child.
    os.register_at_fork(
        before=one_at_a_time.acquire, after_in_parent=one_at_a_time.release, after_in_child=one_at_a_time.release
    )


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leave inference mode for the block.

    Unlike inference tensors, tensors made inside have version counters and can become part of an autograd graph.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def seed_torch(seed: int) -> None:
    """Seed torch on the CPU, and on GPUs if CUDA is in use.

    `torch.manual_seed` would also give this seed, instead of the user's own, to CUDA at its first use.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def random_state(seed: int | None = None) -> Iterator[Callable[[], bool]]:
    """Restore the random state of torch (on the CPU, and on GPUs in use), numpy and Python after the block.

    Inside, all generators start from `seed`, if it is given. The yielded function tells whether any number was drawn
    since.
    """
    state = _random_state()
    try:
        if seed is not None:
            seed_torch(seed)
            random.seed(seed)
            numpy.random.seed(seed % (1 << 32))
        before = _fingerprint()
        yield lambda: _fingerprint() != before
    finally:
        _set_random_state(state)


class OwnState:
    """The random state and torch's modes of code that runs in steps, such as a generator, apart from those of its callers.

    A generator that stops inside `with torch.autocast(…)` leaves it in force for its caller, and two that draw numbers in
    turn disturb each other. Own are whether gradients are recorded, inference mode, and autocast.

    Args:
        device: of which autocast is kept apart, besides the CPU's.
        like: begin with the random state that this one began with; None for the present one.
    """

    def __init__(self, device: torch.device, like: OwnState | None = None) -> None:
        self._kinds = sorted({"cpu", device.type})
        self._first: _Random = _random_state() if like is None else like._first
        self._random, self._modes = self._first, self._now()
        self._callers = ExitStack()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step in the state in which the last one ended, and restore the caller's."""
        state, modes, inference = _random_state(), self._now(), torch.is_inference_mode_enabled()
        self._callers.close()
        _set_random_state(self._random)
        self._set(self._modes)
        try:
            yield
        finally:
            self._random, self._modes = _random_state(), self._now()
            _set_random_state(state)
            if torch.is_inference_mode_enabled() != inference:
                self._callers.enter_context(torch.inference_mode(inference))
            self._set(modes)

    def _now(self) -> _Modes:
        casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in self._kinds]
        return torch.is_grad_enabled(), casts

    def _set(self, modes: _Modes) -> None:
        grad, casts = modes
        torch.set_grad_enabled(grad)
        for kind, is_enabled, dtype in casts:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)


def _set_random_state(state: _Random) -> None:
    cpu, on_gpus, of_numpy, of_python = state
    torch.set_rng_state(cpu)
    torch.cuda.set_rng_state_all(on_gpus)
    numpy.random.set_state(of_numpy)
    random.setstate(of_python)


def _random_state() -> _Random:
    # Reading the random state of CUDA would initialize it.
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), on_gpus, numpy.random.get_state(), random.getstate()


def _fingerprint() -> tuple[Any, ...]:
    """The state of all generators, for comparison."""
    cpu, on_gpus, of_numpy, of_python = _random_state()
    return (*(state.numpy().tobytes() for state in (cpu, *on_gpus)), pickle.dumps(of_numpy), of_python)


@contextmanager
def pinned_settings() -> Iterator[dict[str, str]]:
    """Turn off TF32, bfloat16 matrix products and the fused attention layers of `nn`, and restore the settings.

    So float32 means float32. The fused layers (`torch.backends.mha`) leave zeros at padded positions where the plain
    layers leave numbers, and no export contains them. So both sides of a comparison run the plain layers. A
    SyncBatchNorm doesn't wait for other processes.

    Yields:
        The pinned settings, for the record.
    """
    with ExitStack() as stack:
        apart = {"sync_batch_norm": "this process alone"} if stack.enter_context(unsynchronised()) else {}
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        _pin_float32(stack)
        stack.enter_context(warnings.catch_warnings())
        # Inductor recommends TF32 to whoever compiles without it.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
        # Of compiled code whose outputs are constants or views; the comparison shows whether they are right.
        warnings.filterwarnings("ignore", "The CUDA Graph is empty", UserWarning)
        yield {"float32_precision": "ieee", "torch_tf32": _tf32(), "mha_fastpath": "off", **apart}


def has_fast_path(target: object) -> bool:
    """Whether torch's fast path for attention, which `pinned_settings` turns off, is on, and a module may take it."""
    modules = reachable_modules(target) if isinstance(target, nn.Module) else []
    return torch.backends.mha.get_fastpath_enabled() and any(isinstance(each, _WITH_FAST_PATH) for each in modules)


def _tf32() -> str:
    """Whether torch may currently compute float32 products in TF32: "on" or "off"."""
    backends = torch.backends
    try:
        used = backends.cuda.matmul.allow_tf32 or backends.cudnn.allow_tf32
    except RuntimeError:
        used = any(node.fp32_precision == "tf32" for node in _float32_nodes())
    return "on" if used else "off"


def _float32_nodes() -> list[Any]:
    """The objects in which torch keeps `fp32_precision`."""
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
        # torch refuses to read these attributes after the settings were made through `fp32_precision`.
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
    """Let SyncBatchNorm use the statistics of this process's batch, even if there is a process group.

    With a process group it would wait for processes that may have nothing to measure, include batches that this process
    doesn't know, and raise on a CPU. The forward is replaced for all threads: on a GPU the backward pass has its own
    thread, in which checkpoints run the forward again. Only the thread whose turn it is may do so.

    Yields:
        Whether there is a process group.
    """
    global _is_apart
    before = _is_apart, nn.SyncBatchNorm.forward
    _is_apart, nn.SyncBatchNorm.forward = True, _forward_apart  # type: ignore[method-assign]
    try:
        yield torch.distributed.is_available() and torch.distributed.is_initialized()
    finally:
        _is_apart, nn.SyncBatchNorm.forward = before  # type: ignore[method-assign]


_is_apart = False
_synchronised_forward = nn.SyncBatchNorm.forward


# With `wraps`, code that checks which module a forward comes from finds torch.
@functools.wraps(nn.SyncBatchNorm.forward)
def _forward_apart(self: nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:
    # torch.compile guards on this flag. It has no guard on the process group, whose existence the original forward
    # checks once, and code that was compiled for a comparison is also called later.
    if not _is_apart:
        return _synchronised_forward(self, input)
    # The forward of the other BatchNorms; SyncBatchNorm computes the same if there is nothing to synchronize.
    return AnyBatchNorm.forward(self, input)


# Allocations between two collections of the youngest generation. Python's default is 700 (2,000 from 3.13 on).
_RARELY = 100_000


@contextmanager
def rare_collection() -> Iterator[None]:
    """Collect cyclic garbage rarely inside the block.

    A graph consists of many small objects that stay alive. Each collection visits them and frees nothing, so that the
    cost of one operation grows with the size of the graph. Rare collections still bound the memory. A collector that
    the caller turned off stays off.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < _RARELY:
        # The collector is off, or another thread is inside the block and restores the threshold.
        yield
        return
    gc.set_threshold(_RARELY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def release_memory() -> None:
    """Return freed memory that the C library keeps to the operating system.

    After many tensors of different sizes, glibc keeps freed memory in gaps between blocks in use: 200 MB after the
    proof of a ResNet-50. A runtime that loads a file next would need its own memory in addition.
    """
    if sys.platform == "linux":
        # Other C libraries have no such function, and a statically linked Python has no library to ask.
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)
