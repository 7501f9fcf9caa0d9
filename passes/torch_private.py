"""Every private name of torch that the passes use, each with the reason and the versions it was seen in.

Where a name is missing, importing this file raises an ImportError or AttributeError that names it.
`tests/passes/test_torch_private.py` sees that the names do what they are used for.
"""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._C import (
    # Torch's own way to run without `__torch_function__`: of subclasses, and of modes too. In its docs on extending torch,
    # and without a public name. Seen in 2.13.
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    # Whether torch.jit.trace is running: `torch.jit.is_tracing` asks the same after a check for scripts. Seen in 2.13.
    _is_tracing,
)
from torch._subclasses import FakeTensor  # What torch.export computes with. Seen in 2.13.
from torch.amp.autocast_mode import (
    _enter_autocast,
)  # What captured graphs call to enter an autocast, with its arguments. Seen in 2.13.
from torch.nn.modules.batchnorm import (
    # The base of torch's BatchNorms, SyncBatchNorm among them. Seen in 2.13.
    _BatchNorm,
    # That of these and the InstanceNorms. Seen in 2.13.
    _NormBase,
)
from torch.nn.modules.conv import _ConvNd  # The base of torch's convolutions. Seen in 2.13.
from torch.nn.modules.instancenorm import _InstanceNorm  # The base of torch's InstanceNorms. Seen in 2.13.
from torch.utils._device import (
    # A device that is the default for a block is a function mode, which changes no results. Seen in 2.13.
    DeviceContext,
    # The functions that create a tensor on the default device. Seen in 2.13.
    _device_constructors,
)

without_torch_function = DisableTorchFunction
without_subclasses = DisableTorchFunctionSubclass
is_tracing = _is_tracing
# The callback of torch.compile that looks at each frame of this thread: None outside of compiled calls, and False where
# only what is compiled already is to run. Seen in 2.13.
frame_callback: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
enter_autocast = _enter_autocast
AnyBatchNorm = _BatchNorm
AnyConvolution = _ConvNd
AnyInstanceNorm = _InstanceNorm
AnyNorm = _NormBase
# A tensor of another class over the same numbers, which in public is made through a dispatch that takes longer. Seen in 2.13.
make_subclass: Any = torch.Tensor._make_subclass

# torch.autograd.graph can set and disable hooks on saved tensors, but not tell whether there are any. Seen in 2.13.
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
saved_tensors_hooks_enabled: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
# The innermost transform of torch.func that runs (vmap, grad), which allows no hooks on saved tensors. Seen in 2.13.
active_transforms: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
DefaultDevice = DeviceContext
device_constructors = _device_constructors
# Flags that choose among kernels which round differently, and may hold in a part of a forward only (`sdpa_kernel`). The
# public functions can't set each of them without a context manager. Seen in 2.13.
KERNEL_SWITCHES: tuple[tuple[Callable[[], bool], Callable[[bool], object]], ...] = (
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
)

# What code finds that reads the memory of a sealed tensor, as a scripted function does: no numbers, in a dtype that next to
# no operation takes. Torch deprecates these dtypes for quantizing. Seen in 2.13.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    with torch.inference_mode():
        NOTHING = torch.empty(0, dtype=torch.quint4x2)


# Tensors that have shapes and no numbers, with the devices that they stand for. In torch's docs. Seen in 2.13.
FakeTensorMode = torch._subclasses.FakeTensorMode
# An operation of torch under one of its names, with an overload or without. In torch's docs on custom ones. Seen in 2.13.
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
# The `__torch_function__` of classes that have none of their own, Parameter among them. Seen in 2.13.
no_torch_function = torch._C._disabled_torch_function_impl


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a transform of torch.func made the tensor, which stands for many then. Seen in 2.13."""
    functorch = torch._C._functorch
    return bool(functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def beneath_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a transform of torch.func wrapped, which has the memory; any other tensor as it is. Seen in 2.13."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def sources_of(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each fake tensor among these, and the real one that it was made from; without those that were computed.

    Torch makes one fake tensor of each real one, and remembers under the same number which they are. Seen in 2.13.
    """
    fakes: list[Any] = list(filter(is_fake, tensors))
    sources: dict[int, torch.Tensor] = {}
    for converter in {fake.fake_mode.fake_tensor_converter.meta_converter for fake in fakes}:
        for real, number in converter.describer.lookup_tensor.items():
            sources[id(converter.tensor_memo.get(number))] = real
    return [(fake, sources[id(fake)]) for fake in fakes if id(fake) in sources]


def break_graph(reason: str) -> None:
    """End the graph that torch captures here: an export fails with the reason. Seen in 2.13."""
    torch._dynamo.graph_break(msg=reason)


def is_fake(tensor: Any) -> bool:
    """Whether the value is a tensor without numbers, with which torch.export runs a forward. Seen in 2.13."""
    return isinstance(tensor, FakeTensor)


def share_storage(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both lie in one storage, which torch tells without a pointer to it. Seen in 2.13."""
    return bool(torch._C._is_alias_of(tensor, other))  # type: ignore[attr-defined]


def convolution_kernel(input: torch.Tensor, weight: torch.Tensor, **settings: Any) -> str:
    """The name of the kernel that torch takes for a convolution, which nothing public tells: "Mkldnn". Seen in 2.13."""
    backend = torch._C._select_conv_backend(input, weight, bias=None, bias_sizes=None, **settings)
    name: str = backend.name
    return name


def has_kernel(name: str) -> bool:
    """Whether torch can run an operation, "aten::relu", beside having its schema. Seen in 2.13."""
    return bool(torch._C._dispatch_has_kernel(name))


@contextmanager
def without_tracing() -> Iterator[None]:
    """torch.jit.trace sees nothing of the block. Seen in 2.13."""
    tracer: Any = torch._C
    state = tracer._get_tracing_state()
    tracer._set_tracing_state(None)
    try:
        yield
    finally:
        tracer._set_tracing_state(state)


def torchscript_fuses(device: torch.device) -> bool:
    """Whether this build of torch has a fuser of TorchScript for the device. Seen in 2.13."""
    if device.type == "cuda":
        return bool(torch._C._jit_texpr_fuser_enabled() and torch._C._jit_can_fuse_on_gpu())
    return device.type == "cpu" and bool(torch._C._llvm_enabled() and torch._C._jit_can_fuse_on_cpu())


# The compiler, which takes seconds to load: only what compiles does so. Seen in 2.13.


def load_inductor() -> None:
    """Load torch's own compiler."""
    importlib.import_module("torch._inductor.compile_fx")


def compiled_module_types() -> tuple[type, ...]:
    """The class of what `torch.compile(module)` gives; none where nobody has loaded the compiler."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return () if compiler is None else (compiler.OptimizedModule,)


def graph_break() -> type[Exception]:
    """What is raised where `fullgraph=True` can't be had."""
    failure: type[Exception] = importlib.import_module("torch._dynamo.exc").Unsupported
    return failure


def compiler_failures() -> tuple[type[Exception], ...]:
    """What is raised where no code is made: for one kind of call too many, of what it doesn't know, or as the compiler of C++
    or of triton fails."""
    dynamo, inductor = (importlib.import_module(f"torch._{name}.exc") for name in ("dynamo", "inductor"))
    return dynamo.FailOnRecompileLimitHit, dynamo.Unsupported, inductor.InductorError


def compiler_named(name: str) -> Callable[..., Any]:
    """What `torch.compile(backend=name)` gives graphs to."""
    found: Callable[..., Any] = importlib.import_module("torch._dynamo").lookup_backend(name)
    return found


def options_of_mode(mode: str, *, dynamic: bool | None) -> dict[str, Any]:
    """The settings of inductor that a mode of torch.compile stands for; `torch.compile` takes no mode beside a backend."""
    options: dict[str, Any] = importlib.import_module("torch._inductor").list_mode_options(mode, dynamic)
    return options


def inductor_settings(**settings: Any) -> Any:
    """A context with other settings of inductor for the process."""
    return importlib.import_module("torch._inductor.config").patch(**settings)


def compiler_of_now() -> Any:
    """What the graph is given to that is being captured."""
    translator = importlib.import_module("torch._dynamo.symbolic_convert").InstructionTranslator
    return translator.current_tx().output.compiler_fn


def top_saved_tensors_hooks() -> Any:
    """The innermost hooks on saved tensors that are set; None where there are none."""
    return _top_hooks(False)


def active_function_modes() -> list[Any]:
    """The function modes that are active, the innermost last; torch has no public name for it. Seen in 2.13."""
    return torch.overrides._get_current_function_mode_stack()


def is_in_forward_mode() -> bool:
    """Whether gradients are asked for in forward mode, which `torch.autograd.forward_ad` doesn't tell. Seen in 2.13."""
    return torch.autograd.forward_ad._current_level >= 0


# What captures graphs: torch.compile's front end. Seen in 2.13.
# The slot of a module's call that `Module.compile()` sets; torch leaves it out of copies and pickles.
COMPILED_CALL = "_compiled_call_impl"

# A code object is captured at most so many times, as torch.compile does by default; further kinds of calls run eagerly.
MOST_CAPTURES = 8

Capture = Callable[[fx.GraphModule, Sequence[Any], nn.Module | None], Callable[..., Any]]


class _Capturing(threading.local):
    """The module whose forward is being captured by this thread: graphs say where they are relative to that."""

    module: nn.Module | None = None


_capturing = _Capturing()


def captured_call(entry: Callable[..., Any], capture: Capture, *, whole: bool = False) -> CapturedCall:
    """The function as torch.compile captures it: each graph goes to `capture`, which gives the callable to run.

    Args:
        whole: capture the function as one graph; a call raises what the front end raises.

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

    context = torch._dynamo.optimize(backend, nopython=whole)
    if not isinstance(context, torch._dynamo.eval_frame.OptimizeContext):
        raise RuntimeError("torch.compile is switched off by TORCHDYNAMO_DISABLE")
    context.callback = front_end = _FrontEnd(context.callback, whole=whole)
    # Torch keeps every backend to reset it, and with it all that it refers to.
    torch._dynamo.eval_frame.cached_backends.pop(id(backend), None)
    call = CapturedCall(context(entry), front_end)
    weakref.finalize(call, _forget_captures, entry.__code__).atexit = False
    return call


def _forget_captures(code: Any) -> None:
    """Free what torch captured of a code: it hangs on the code, which it keeps alive, where no search for cycles looks."""
    from torch._C._dynamo.eval_frame import reset_code
    from torch._dynamo.utils import guard_failures

    reset_code(code)
    # Why it was captured anew is kept by code, for good.
    guard_failures.pop(code, None)


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

    def __init__(self, callback: Any, *, whole: bool) -> None:
        # Torch follows this name to the backend.
        self._torchdynamo_orig_backend = callback
        self._whole = whole
        # Weakly: torch hangs what it captured of a frame on its code, this object too, where no search for cycles looks.
        self._captures: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # What the front end raised last, for messages.
        self.error: Exception | None = None

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
        try:
            with config.patch(
                specialize_float=True, skip_nnmodule_hook_guards=False, recompile_limit=8 * MOST_CAPTURES
            ):
                return self._torchdynamo_orig_backend(frame, cache_entry, frame_state)
        except Exception as error:
            # The front end may raise anything on foreign code, which runs eagerly then.
            self.error = error
            if self._whole:
                raise
            return ConvertFrameReturn(FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP), apply_to_code=False)
        finally:
            _capturing.module = around


def _module_of(names: Any) -> nn.Module | None:
    found = names.get("module", names.get("self"))
    return found if isinstance(found, nn.Module) else None


# One open dim: the argument of the captured function that is a list of tensors, the number of the tensor, and the dim.
Dim = tuple[str, int, int]


def mark_open(tensor: torch.Tensor, dim: int) -> None:
    """Have the next capture of a function that takes the tensor hold for other sizes of the dim.

    Equal sizes of dims that are marked get symbols of their own, as they don't with `dynamic=True`. Seen in 2.13.
    """
    import torch._dynamo

    torch._dynamo.mark_dynamic(tensor, dim)


def dim_of(node: fx.Node) -> Dim | None:
    """The dim whose size a placeholder stands for; None for one that stands for anything else.

    Asked while the graph is captured: torch drops the source of a placeholder then (`meta["grapharg"]`, seen in 2.13).
    """
    return _dim_at(node.meta["grapharg"].source)


def is_held(node: fx.Node) -> bool:
    """Whether the value of a placeholder is reached from the argument `module` of the captured function, or is a global.

    Any other is made at each call, as a random number of Python's is. Asked while the graph is captured.
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
    """What torch notes of open sizes: asked while a graph is captured, complete once the captured function ran. Seen in 2.13."""
    fake_mode = torch._guards.TracingContext.get().fake_mode
    assert fake_mode is not None
    return fake_mode.shape_env


class SizeConditions:
    """What a capture assumes of the open sizes: the branches that Python and torch's kernels took by them.

    Args:
        environment: of the capture; what is noted there later doesn't count.
    """

    def __init__(self, environment: Any) -> None:
        found = ((symbol, _dim_at(sources[0])) for symbol, sources in environment.var_to_sources.items())
        self._dims = {symbol: dim for symbol, dim in found if dim is not None}
        self._least = {symbol: int(environment.var_to_range[symbol].lower) for symbol in self._dims}
        self._conditions = [guard.expr for guard in environment.guards]

    @property
    def are_of_dims(self) -> bool:
        """Whether they are of sizes of the captured function's arguments alone."""
        return all(self._dims.keys() >= condition.free_symbols for condition in self._conditions)

    def hold(self, size: Callable[[Dim], Any]) -> bool:
        """Whether the graph is right for these sizes, which may be numbers that are traced."""
        from torch.utils._sympy.interp import sympy_interp
        from torch.utils._sympy.reference import PythonReferenceAnalysis

        sizes = {symbol: size(dim) for symbol, dim in self._dims.items()}
        return all(value >= self._least[symbol] for symbol, value in sizes.items()) and all(
            sympy_interp(PythonReferenceAnalysis, sizes, condition) for condition in self._conditions
        )


def is_watched() -> bool:
    """Whether something looks at the single operations of this thread: a tracer, a mode of torch, or a transform.

    Graphs that stand in for forwards give way to these, which then see the operations of the forward itself.
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
