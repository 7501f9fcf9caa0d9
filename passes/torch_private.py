"""Every private name of torch that the passes use, each with the reason and the versions it was seen in.

If a name is missing, importing this file or calling the function that uses it raises an ImportError or AttributeError
that names it. `tests/passes/test_torch_private.py` tests that the names do what the passes need.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._C import (
    # torch's way to disable `__torch_function__`: the first for subclasses and modes, the second for subclasses only.
    # In torch's docs on extending torch, but without a public name. Seen in 2.13.
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    # Whether torch.jit.trace is running. `torch.jit.is_tracing` checks for scripting first. Seen in 2.13.
    _is_tracing,
)
from torch._ops import HigherOrderOperator  # The operators behind `torch.cond` and `while_loop`. Seen in 2.13.
from torch._subclasses import FakeTensor  # The tensors with which torch.export runs a forward. Seen in 2.13.
from torch.amp.autocast_mode import (
    _enter_autocast,
)  # Captured graphs call it to enter an autocast, with the arguments of the autocast. Seen in 2.13.
from torch.nn.modules.batchnorm import (
    # The base class of torch's BatchNorms, including SyncBatchNorm. Seen in 2.13.
    _BatchNorm,
    # The base class of the BatchNorms and InstanceNorms. Seen in 2.13.
    _NormBase,
)
from torch.nn.modules.conv import _ConvNd  # The base class of torch's convolutions. Seen in 2.13.
from torch.nn.modules.instancenorm import _InstanceNorm  # The base class of torch's InstanceNorms. Seen in 2.13.
from torch.utils._device import (
    # The function mode that sets the default device for a block; it changes no results. Seen in 2.13.
    DeviceContext,
    # The functions that create a tensor on the default device. Seen in 2.13.
    _device_constructors,
)

without_torch_function = DisableTorchFunction
without_subclasses = DisableTorchFunctionSubclass
is_tracing = _is_tracing
enter_autocast = _enter_autocast
HigherOrder = HigherOrderOperator
AnyBatchNorm = _BatchNorm
AnyConvolution = _ConvNd
AnyInstanceNorm = _InstanceNorm
AnyNorm = _NormBase
# torch.autograd.graph can set and disable hooks on saved tensors, but can't tell whether there are any. Seen in 2.13.
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
saved_tensors_hooks_enabled: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
# The innermost active transform of torch.func (vmap, grad). Transforms allow no hooks on saved tensors. Seen in 2.13.
active_transforms: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
DefaultDevice = DeviceContext
device_constructors = _device_constructors
# Flags that choose among kernels with different rounding. They may apply to only a part of a forward (`sdpa_kernel`).
# The public functions can't set each of them without a context manager. Seen in 2.13.
KERNEL_SWITCHES: tuple[tuple[Callable[[], bool], Callable[[bool], object]], ...] = (
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
)

# Makes tensors that have shapes, dtypes and devices but no data. In torch's docs. Seen in 2.13.
FakeTensorMode = torch._subclasses.FakeTensorMode
# One overload of a torch operator, and all overloads of one name. In torch's docs on custom operators. Seen in 2.13.
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
# The modules with the Python functions of operators. Seen in 2.13.
FUNCTIONS = (torch, torch._C._nn)
# The `__torch_function__` of tensor classes that don't define their own, such as Parameter. Seen in 2.13.
no_torch_function = torch._C._disabled_torch_function_impl


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a transform of torch.func made the tensor; `vmap` makes tensors that represent a batch. Seen in 2.13."""
    functorch = torch._C._functorch
    return bool(functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def beneath_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """Unwrap a tensor from the transforms of torch.func, down to the one that has the memory. Seen in 2.13."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


# Whether torch leaves `__torch_function__` on while it runs a graph, although the graph contains what it did. Fixed in 2.12.
DISPATCHES_AGAIN = torch.__version__ < "2.12"


def forget_sources(fakes: Iterable[Any]) -> None:
    """Drop torch's weak references to the real tensors that fake ones were made from, after a capture is complete.

    `torch.utils.swap_tensors`, by which `Module.to` may move parameters, refuses tensors with weak references. Seen in
    2.13.
    """
    for converter in {fake.fake_mode.fake_tensor_converter.meta_converter for fake in fakes if is_fake(fake)}:
        converter.describer.lookup_tensor.clear()


def is_fake(tensor: Any) -> bool:
    """Whether the value is a tensor without data, with which torch.export runs a forward. Seen in 2.13."""
    return isinstance(tensor, FakeTensor)


def share_storage(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both tensors lie in one storage; torch checks this without accessing their pointers. Seen in 2.13."""
    return bool(torch._C._is_alias_of(tensor, other))  # type: ignore[attr-defined]


def convolution_kernel(input: torch.Tensor, weight: torch.Tensor, **settings: Any) -> str:
    """The name of the kernel that torch selects for a convolution: "Mkldnn". It has no public query. Seen in 2.13."""
    backend = torch._C._select_conv_backend(input, weight, bias=None, bias_sizes=None, **settings)
    name: str = backend.name
    return name


def hint_of(size: int | torch.SymInt) -> int | None:
    """A size of a captured graph in the call that it was captured for; None if it depends on values.

    torch documents no way to read it without a condition on the graph. Seen in 2.11 to 2.13.
    """
    hint = size if isinstance(size, int) else size.node.hint
    return hint if isinstance(hint, int) else None


def has_kernel(name: str) -> bool:
    """Whether torch can run an operator such as "aten::relu"; some operators have only a schema. Seen in 2.13."""
    return bool(torch._C._dispatch_has_kernel(name))


@contextmanager
def without_tracing() -> Iterator[None]:
    """Hide the operations of the block from torch.jit.trace. Seen in 2.13."""
    tracer: Any = torch._C
    state = tracer._get_tracing_state()
    tracer._set_tracing_state(None)
    try:
        yield
    finally:
        tracer._set_tracing_state(state)


def torchscript_fuses(device: torch.device) -> bool:
    """Whether this build of torch has a TorchScript fuser for the device. Seen in 2.13."""
    if device.type == "cuda":
        return bool(torch._C._jit_texpr_fuser_enabled() and torch._C._jit_can_fuse_on_gpu())
    return device.type == "cpu" and bool(torch._C._llvm_enabled() and torch._C._jit_can_fuse_on_cpu())


# The compiler takes seconds to load, so only code that compiles loads it. Seen in 2.13.


def load_inductor() -> None:
    """Load inductor, torch's own compiler."""
    importlib.import_module("torch._inductor.compile_fx")


def compiled_module_types() -> tuple[type, ...]:
    """The class of the modules that `torch.compile(module)` returns; empty if the compiler isn't loaded."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return () if compiler is None else (compiler.OptimizedModule,)


def graph_break() -> type[Exception]:
    """The exception that torch.compile raises if `fullgraph=True` isn't possible."""
    failure: type[Exception] = importlib.import_module("torch._dynamo.exc").Unsupported
    return failure


def compiler_failures() -> tuple[type[Exception], ...]:
    """The exceptions that torch.compile raises if it makes no code.

    The reasons are too many kinds of calls, unsupported code, or a failure of the C++ or Triton compiler.
    """
    dynamo, inductor = (importlib.import_module(f"torch._{name}.exc") for name in ("dynamo", "inductor"))
    return dynamo.FailOnRecompileLimitHit, dynamo.Unsupported, inductor.InductorError


def compiler_named(name: str) -> Callable[..., Any]:
    """The function to which `torch.compile(backend=name)` passes graphs."""
    found: Callable[..., Any] = importlib.import_module("torch._dynamo").lookup_backend(name)
    return found


def options_of_mode(mode: str, *, dynamic: bool | None) -> dict[str, Any]:
    """The inductor options of a torch.compile mode; `torch.compile` accepts no mode together with a backend."""
    options: dict[str, Any] = importlib.import_module("torch._inductor").list_mode_options(mode, dynamic)
    return options


def inductor_settings(**settings: Any) -> Any:
    """Return a context manager that sets inductor options for the process."""
    return importlib.import_module("torch._inductor.config").patch(**settings)


def compiler_of_now() -> Any:
    """The backend that will receive the graph that is being captured."""
    translator = importlib.import_module("torch._dynamo.symbolic_convert").InstructionTranslator
    return translator.current_tx().output.compiler_fn


def top_saved_tensors_hooks() -> Any:
    """The innermost hooks on saved tensors; None if there are none."""
    return _top_hooks(False)


def active_function_modes() -> list[Any]:
    """The active function modes, the innermost last; torch has no public name for them. Seen in 2.13."""
    return torch.overrides._get_current_function_mode_stack()


def is_in_forward_mode() -> bool:
    """Whether forward-mode gradients are being computed; `torch.autograd.forward_ad` can't tell. Seen in 2.13."""
    return torch.autograd.forward_ad._current_level >= 0


# torch.compile's front end, which captures graphs. Seen in 2.13.
# The attribute for a module's call that `Module.compile()` sets; torch leaves it out of copies and pickles.
COMPILED_CALL = "_compiled_call_impl"

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
        around, _capturing.module = _capturing.module, _module_of(frame.f_locals)
        code_around, _capturing.code = _capturing.code, frame.f_code
        is_entry = frame.f_code is self._entry()
        open_dims = self._open_dims(frame.f_locals) if is_entry and self._open_dims is not None else ()
        try:
            with (
                compiler_silenced(),
                _marked_open(open_dims),
                _drawing_outside(),
                config.patch(specialize_float=True, skip_nnmodule_hook_guards=False, recompile_limit=8 * MOST_CAPTURES),
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


_drawing = threading.local()


@contextmanager
def _drawing_outside() -> Iterator[None]:
    """Break the graph at draws from a `random.Random`: a captured graph repeats its first draw in every call.

    Seen in 2.13. Other captures of torch.compile stay as they are.
    """
    from torch._dynamo.variables.misc import RandomVariable

    supported: Any = getattr(RandomVariable, "is_supported_random_obj", None)
    if supported is not None and not hasattr(supported, "asks_first"):

        def is_supported(value: Any) -> bool:
            return not getattr(_drawing, "outside", False) and bool(supported(value))

        is_supported.asks_first = True  # type: ignore[attr-defined]
        RandomVariable.is_supported_random_obj = staticmethod(is_supported)  # type: ignore[method-assign, assignment]
    before, _drawing.outside = getattr(_drawing, "outside", False), True
    try:
        yield
    finally:
        _drawing.outside = before


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


def is_watched() -> bool:
    """Whether something intercepts the single operations of this thread: a tracer, a mode of torch, or a transform.

    Rewritten graphs aren't used then, so that it sees the operations of the forward itself.
    """
    return bool(
        torch.compiler.is_compiling()
        or _is_tracing()
        or torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or fx._symbolic_trace.is_fx_symbolic_tracing()
    )


def is_capturing_cuda() -> bool:
    """Whether a CUDA graph is recording the kernels of this thread. Values that are cached already are not recorded."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def has_autocast() -> bool:
    """Whether autocast is on for any device."""
    return bool(torch._C._is_any_autocast_enabled())


def module_id_of(key: str) -> int | None:
    """The `id` of the module in a key of a node's `nn_module_stack`; None for other kinds of keys.

    torch writes "140116442086288" for the first call of a module, and "140116442086288@1" for the second.
    """
    number, _, _ = key.partition("@")
    return int(number) if number.isdecimal() else None
