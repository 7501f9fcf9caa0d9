"""The private names of torch that passes use, each with the reason; all were seen in torch 2.13.

`tests/passes/test_torch_private.py` sees that each of them is there and does what it is used for.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

# The slot of a module's call that `Module.compile()` sets; torch leaves it out of copies and pickles.
COMPILED_CALL = "_compiled_call_impl"

# A code object is captured at most so many times, as torch.compile does by default; further kinds of calls run eagerly.
MOST_CAPTURES = 8

Capture = Callable[[fx.GraphModule, Sequence[Any], nn.Module | None], Callable[..., Any]]


class _Capturing(threading.local):
    """The module whose forward is being captured by this thread: graphs say where they are relative to that."""

    module: nn.Module | None = None


_capturing = _Capturing()


def captured_call(entry: Callable[..., Any], capture: Capture) -> CapturedCall:
    """The function as torch.compile captures it: each graph goes to `capture`, which gives the callable to run.

    Beside `torch.compile(entry, backend=…)`, whose front end this is:
    - numbers among attributes are constants of the graph, and a hook that is set later on a module is seen, by settings
      that hold while a graph is captured (`torch._dynamo.config`, whose values are the thread's own);
    - calls of too many kinds run eagerly without a warning, and so does what the front end raises on;
    - graphs are told the module whose forward they are of.

    Raises:
        RuntimeError: torch.compile doesn't run on this platform.
    """
    import torch._dynamo

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return capture(graph, inputs, _capturing.module)

    context = torch._dynamo.optimize(backend)
    if not isinstance(context, torch._dynamo.eval_frame.OptimizeContext):
        raise RuntimeError("torch.compile is switched off by TORCHDYNAMO_DISABLE")
    context.callback = front_end = _FrontEnd(context.callback)
    # Torch keeps every backend to reset it, and with it all that it refers to.
    torch._dynamo.eval_frame.cached_backends.pop(id(backend), None)
    return CapturedCall(context(entry), front_end)


class CapturedCall:
    """A function by its captured graphs."""

    def __init__(self, compiled: Callable[..., Any], front_end: _FrontEnd) -> None:
        self.run = compiled
        self._front_end = front_end

    @property
    def error(self) -> Exception | None:
        """What torch raised last where it captured nothing."""
        return self._front_end.error


class _FrontEnd:
    """What torch calls for a frame that no captured graph holds for."""

    def __init__(self, callback: Any) -> None:
        # Torch follows this name to the backend.
        self._torchdynamo_orig_backend = callback
        self._captures: Counter[Any] = Counter()
        # What the front end raised last, for messages.
        self.error: Exception | None = None

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        from torch._dynamo import config
        from torch._dynamo.types import (  # type: ignore[attr-defined]
            ConvertFrameReturn,
            FrameAction,
            FrameExecStrategy,
        )

        self._captures[frame.f_code] += 1
        if self._captures[frame.f_code] > MOST_CAPTURES:
            only_known = FrameExecStrategy(FrameAction.RUN_ONLY, FrameAction.RUN_ONLY)
            return ConvertFrameReturn(only_known, apply_to_code=False)
        around, _capturing.module = _capturing.module, _module_of(frame.f_locals)
        try:
            with config.patch(
                specialize_float=True, skip_nnmodule_hook_guards=False, recompile_limit=8 * MOST_CAPTURES
            ):
                return self._torchdynamo_orig_backend(frame, cache_entry, frame_state)
        except Exception as error:  # noqa: BLE001 - the front end may raise anything on foreign code, which runs eagerly then
            self.error = error
            return ConvertFrameReturn(FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP), apply_to_code=False)
        finally:
            _capturing.module = around


def _module_of(names: Any) -> nn.Module | None:
    found = names.get("module", names.get("self"))
    return found if isinstance(found, nn.Module) else None


def is_watched() -> bool:
    """Whether something looks at the single operations of this thread: a tracer, a mode of torch, or a transform.

    Graphs that stand in for forwards give way to these, which then see the operations of the forward itself.
    """
    return bool(
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or fx._symbolic_trace.is_fx_symbolic_tracing()
    )


def is_capturing_cuda() -> bool:
    """Whether a CUDA graph records the kernels of this thread: what is kept from one call to the next isn't in it."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def has_autocast() -> bool:
    """Whether an autocast is on, for any device."""
    return bool(torch._C._is_any_autocast_enabled())


def module_id_of(key: str) -> int | None:
    """The identity of the module that a key of a node's `nn_module_stack` stands for; None for another kind of key.

    Torch writes "140116442086288", and "140116442086288@1" for the second call of it.
    """
    number, _, _ = key.partition("@")
    return int(number) if number.isdecimal() else None


__all__ = [
    "COMPILED_CALL",
    "MOST_CAPTURES",
    "captured_call",
    "has_autocast",
    "is_capturing_cuda",
    "is_watched",
    "module_id_of",
]
