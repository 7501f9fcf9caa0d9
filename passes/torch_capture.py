"""torch.compile's front end, by its private names: capture a function, and read what a capture assumes.

If a name is missing, the call that uses it raises an ImportError or AttributeError that names it. All were seen in 2.13.
`tests/passes/test_torch_private.py` tests that they do what the passes need.
"""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

# The maximum number of captures per code object, as in torch.compile; further kinds of calls run eagerly.
MOST_CAPTURES = 8

Capture = Callable[[fx.GraphModule, Sequence[Any], nn.Module | None], Callable[..., Any]]


class _Capturing(threading.local):
    """The module whose forward this thread is capturing, to which locations in graphs are relative, and its code."""

    module: nn.Module | None = None
    code: Any = None


_capturing = _Capturing()


@contextmanager
def compiler_silenced() -> Iterator[None]:
    """Drop the warnings of torch's compiler: they are about how it captures, and name files of torch and of this program.

    torch logs under a logger of its own level, which other settings (TORCH_LOGS) leave as they are. Seen in 2.13.
    """
    logger = logging.getLogger("torch")
    silenced = logger.level == logging.WARNING
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.(_dynamo|_functorch|_inductor|_higher_order_ops|fx)\b")
        if silenced:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            if silenced:
                logger.setLevel(logging.WARNING)


# The names of a captured function's variables with their values, to the tensors and dims that are open.
OpenDims = Callable[[Mapping[str, Any]], Sequence[tuple[torch.Tensor, int]]]


def captured_call(
    entry: Callable[..., Any],
    capture: Capture,
    *,
    whole: bool = False,
    open_dims: OpenDims | None = None,
) -> CapturedCall:
    """Capture a function with torch.compile's front end; `capture` gets each graph, and returns the callable to run.

    Args:
        open_dims: the dims whose sizes vary between calls; the first graph is made for all sizes from 2 on, if the
            function allows that.
        whole: capture the function as one graph; a call raises any error of the front end.

    This differs from `torch.compile(entry, backend=…)`, which has the same front end, in these points:
    - Numbers among attributes are constants of the graph, and a hook that is set on a module later is noticed. The
      settings for this hold only while a graph is captured (`torch._dynamo.config`, which is per thread).
    - Recurrent layers, such as LSTM, don't break the graph.
    - Calls don't mark for the profiler what torch.compile itself does in them, which takes microseconds.
    - If there are too many kinds of calls, or the front end raises, the call runs eagerly without a warning.
    - `capture` also gets the module whose forward is being captured.

    Raises:
        RuntimeError: torch.compile doesn't run on this platform.
    """
    import torch._dynamo

    # Weakly, as torch stores it with the code.
    captured: weakref.WeakSet[Any] = weakref.WeakSet()

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        captured.add(_capturing.code)
        return capture(graph, inputs, _capturing.module)

    context = torch._dynamo.optimize(backend, nopython=whole)
    if not isinstance(context, torch._dynamo.eval_frame.OptimizeContext):
        raise RuntimeError("torch.compile is switched off by TORCHDYNAMO_DISABLE")
    context.callback = front_end = _FrontEnd(
        context.callback, entry.__code__, captured, whole=whole, open_dims=open_dims
    )
    # torch keeps every backend in order to reset it, and so everything that the backend refers to.
    torch._dynamo.eval_frame.cached_backends.pop(id(backend), None)
    call = CapturedCall(context(entry), front_end)
    weakref.finalize(call, _forget_captures, entry.__code__).atexit = False
    return call


def _forget_captures(code: Any) -> None:
    """Free torch's captures of a code object.

    They are stored with the code object and keep it alive. The garbage collector can't find this cycle.
    """
    from torch._C._dynamo.eval_frame import reset_code
    from torch._dynamo.utils import guard_failures

    reset_code(code)
    # torch stores the reasons for recompilations by code object, and never drops them.
    guard_failures.pop(code, None)


class CapturedCall:
    """A function that runs by its captured graphs."""

    def __init__(self, compiled: Callable[..., Any], front_end: _FrontEnd) -> None:
        self.run = compiled
        self._front_end = front_end

    @property
    def is_split(self) -> bool:
        """Whether torch captured graphs of further functions than the given one, as it does after a graph break."""
        return self._front_end.is_split

    @property
    def error(self) -> Exception | None:
        """The last error because of which torch captured nothing; None if there was none."""
        return self._front_end.error


class _FrontEnd:
    """The function that torch calls for a frame for which no captured graph is valid."""

    def __init__(
        self,
        callback: Any,
        entry: Any,
        captured: Collection[Any],
        *,
        whole: bool,
        open_dims: OpenDims | None,
    ) -> None:
        # torch follows this attribute to the backend.
        self._torchdynamo_orig_backend = callback
        self._whole = whole
        # Weakly: torch stores this object with the code.
        self._entry = weakref.ref(entry)
        self._open_dims = open_dims
        # Weak keys: torch stores its captures of a frame, including this object, with the frame's code, and the garbage
        # collector doesn't find such cycles.
        self._captures: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._with_graphs = captured
        # The last error of the front end, for messages.
        self.error: Exception | None = None

    @property
    def is_split(self) -> bool:
        return any(code is not self._entry() for code in self._with_graphs)

    def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
        from torch._dynamo import config
        from torch._dynamo.types import (  # type: ignore[attr-defined]
            ConvertFrameReturn,
            FrameAction,
            FrameExecStrategy,
        )

        count = self._captures[frame.f_code] = self._captures.get(frame.f_code, 0) + 1
        if count > MOST_CAPTURES:
            only_known = FrameExecStrategy(FrameAction.RUN_ONLY, FrameAction.RUN_ONLY)
            return ConvertFrameReturn(only_known, apply_to_code=False)
        _adapt_front_end()
        around, _capturing.module = _capturing.module, _module_of(frame.f_locals)
        code_around, _capturing.code = _capturing.code, frame.f_code
        is_entry = frame.f_code is self._entry()
        open_dims = self._open_dims(frame.f_locals) if is_entry and self._open_dims is not None else ()
        try:
            with (
                compiler_silenced(),
                _marked_open(open_dims),
                config.patch(
                    specialize_float=True,
                    skip_nnmodule_hook_guards=False,
                    recompile_limit=8 * MOST_CAPTURES,
                    allow_rnn=True,
                    record_runtime_overhead=False,
                ),
            ):
                return self._torchdynamo_orig_backend(frame, cache_entry, frame_state)
        except Exception as error:
            # The front end may raise anything on third-party code, which then runs eagerly.
            self.error = error
            if self._whole:
                raise
            return ConvertFrameReturn(FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP), apply_to_code=False)
        finally:
            _capturing.module, _capturing.code = around, code_around


def _adapt_front_end() -> None:
    """Change what the front end does in our captures; others of torch.compile stay as they are. Seen in 2.13.

    A draw from a `random.Random` breaks the graph, because a captured graph repeats its first draw in every call. And
    guards aren't timed: torch does that for its logs, and flushes the processor's caches before, which takes 30 ms per
    graph.
    """
    from torch._dynamo import guards
    from torch._dynamo.variables.misc import RandomVariable

    supported: Any = getattr(RandomVariable, "is_supported_random_obj", None)
    timed: Any = getattr(guards, "profile_guard_manager", None)
    if supported is not None and not hasattr(supported, "asks_first"):
        RandomVariable.is_supported_random_obj = staticmethod(_in_others(supported, False))  # type: ignore[method-assign]
    if timed is not None and not hasattr(timed, "asks_first"):
        guards.profile_guard_manager = _in_others(timed, 0.0)  # type: ignore[attr-defined]


def _in_others(function: Callable[..., Any], ours: Any) -> Any:
    """A function that returns `ours` in our captures, and calls the given one in those of others."""

    def asked(*given: Any) -> Any:
        return function(*given) if _capturing.code is None else ours

    asked.asks_first = True  # type: ignore[attr-defined]
    return asked


@contextmanager
def _marked_open(dims: Sequence[tuple[torch.Tensor, int]]) -> Iterator[None]:
    """Mark dims for the captures of the block, which may still specialize them; later calls need no marks.

    torch writes the marks on the tensors, and the guards of a capture accept tensors without them. Seen in 2.13.
    """
    import torch._dynamo

    marks = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")
    own = [(tensor, dim) for tensor, dim in dims if not any(hasattr(tensor, mark) for mark in marks)]
    try:
        for tensor, dim in own:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
        yield
    finally:
        for tensor, _ in own:
            for mark in marks:
                tensor.__dict__.pop(mark, None)


def _module_of(names: Any) -> nn.Module | None:
    found = names.get("module", names.get("self"))
    return found if isinstance(found, nn.Module) else None


# A dynamic dim: the name of an argument of the captured function that is a list of tensors, the index of the tensor,
# and the dim.
Dim = tuple[str, int, int]


def mark_open(tensor: torch.Tensor, dim: int) -> None:
    """Make the next capture of a function that takes the tensor valid for other sizes of the dim.

    Marked dims get separate symbols even if their sizes are equal, unlike with `dynamic=True`. Seen in 2.13.
    """
    import torch._dynamo

    torch._dynamo.mark_dynamic(tensor, dim)


def dim_of(node: fx.Node) -> Dim | None:
    """The dim whose size a placeholder holds; None for other placeholders.

    Call it while the graph is captured. Afterwards torch drops the source of a placeholder (`meta["grapharg"]`, seen in
    2.13).
    """
    return _dim_at(node.meta["grapharg"].source)


def is_held(node: fx.Node) -> bool:
    """Whether a placeholder's value is a global, or is reachable from the argument `module` of the captured function.

    Other values are created at each call, such as a random number from Python. Call it while the graph is captured.
    """
    return str(node.meta["grapharg"].source.name).startswith(("L['module']", "G["))


def _dim_at(source: Any) -> Dim | None:
    from torch._dynamo.source import GetItemSource, LocalSource, TensorProperty, TensorPropertySource

    if not isinstance(source, TensorPropertySource) or source.prop is not TensorProperty.SIZE:
        return None
    tensor = source.base
    if not isinstance(tensor, GetItemSource) or not isinstance(tensor.base, LocalSource) or source.idx is None:
        return None
    return tensor.base.local_name, tensor.index, source.idx


def shape_environment() -> Any:
    """torch's record of dynamic sizes. Get it in a capture; it is complete after the captured call. Seen in 2.13."""
    fake_mode = torch._guards.TracingContext.get().fake_mode
    assert fake_mode is not None
    return fake_mode.shape_env


class SizeConditions:
    """The conditions on dynamic sizes under which a capture is valid.

    They come from the branches that Python and torch's functions took. Those on which torch chooses a kernel for the
    example of a convolution's output aren't conditions: the output has the same shape, and the call chooses again.

    Args:
        environment: the shape environment of the capture; conditions that are added to it later don't count.
    """

    def __init__(self, environment: Any) -> None:
        found = ((symbol, _dim_at(sources[0])) for symbol, sources in environment.var_to_sources.items())
        self._dims = {symbol: dim for symbol, dim in found if dim is not None}
        self._least = {symbol: int(environment.var_to_range[symbol].lower) for symbol in self._dims}
        self._conditions = [guard.expr for guard in environment.guards if not _is_of_kernel(guard)]

    @property
    def are_of_dims(self) -> bool:
        """Whether all conditions are on sizes of the captured function's arguments."""
        return all(self._dims.keys() >= condition.free_symbols for condition in self._conditions)

    def hold(self, size: Callable[[Dim], Any]) -> bool:
        """Whether the graph is valid for these sizes, which may be traced numbers."""
        from torch.utils._sympy.interp import sympy_interp
        from torch.utils._sympy.reference import PythonReferenceAnalysis

        found = ((symbol, size(dim)) for symbol, dim in self._dims.items())
        # A traced number is a tensor, which the interpreter of conditions doesn't take.
        sizes = {symbol: int(value) if isinstance(value, torch.Tensor) else value for symbol, value in found}
        return all(value >= self._least[symbol] for symbol, value in sizes.items()) and all(
            sympy_interp(PythonReferenceAnalysis, sizes, condition) for condition in self._conditions
        )


def _is_of_kernel(guard: Any) -> bool:
    """Whether `torch._C._select_conv_backend` asked for the size, which is a batch of 16 or more. Seen in 2.13."""
    frame = getattr(getattr(guard, "sloc", None), "framework_loc", None)
    name, file = getattr(frame, "name", ""), getattr(frame, "filename", "")
    return name == "conv" and Path(file).name == "fake_impls.py"


def as_captured(graph: fx.GraphModule, origin: fx.GraphModule) -> fx.GraphModule:
    """Give a rewritten graph the notes that compilers read of the captured one; its further inputs are static.

    They tell which inputs keep their memory between calls, so that CUDA graphs don't copy them. Seen in 2.13.
    """
    graph.meta.update(origin.meta)
    graph.__dict__["_param_name_to_source"] = getattr(origin, "_param_name_to_source", {})
    sources = {node.name: getattr(node, "_dynamo_source", None) for node in origin.graph.find_nodes(op="placeholder")}
    for node in graph.graph.find_nodes(op="placeholder"):
        node._dynamo_source = sources.get(node.name)
        if node.name not in sources:
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    return graph
