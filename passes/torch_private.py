"""Every private name of torch that the passes use, each with the reason and the versions it was seen in.

If a name is missing, importing this file or calling the function that uses it raises an ImportError or AttributeError
that names it. `tests/passes/test_torch_private.py` tests that the names do what the passes need.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
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


def settings_of_now() -> Any:
    """torch's settings that torch.compile guards in every call; `check()` tells whether they are the same now.

    Gradients, autocast, default dtype, threads, deterministic algorithms and torch function. Seen in 2.13.
    """
    return importlib.import_module("torch._C._dynamo.guards").GlobalStateGuard()


def compiler_of_now() -> Any:
    """The backend that will receive the graph that is being captured."""
    translator = importlib.import_module("torch._dynamo.symbolic_convert").InstructionTranslator
    return translator.current_tx().output.compiler_fn


def top_saved_tensors_hooks() -> Any:
    """The innermost hooks on saved tensors; None if there are none."""
    return _top_hooks(False)


# What `torch.autograd.graph.saved_tensors_hooks` calls. Its context manager takes longer than many calls. Seen in 2.11
# to 2.13.
push_saved_tensors_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_saved_tensors_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


def has_composed_modules() -> bool:
    """Whether a function such as `fully_shard` or `replicate` was applied to any module that still exists.

    torch keeps a list of them. Without that list, it is assumed. Seen in 2.11 to 2.13.
    """
    state = sys.modules.get("torch.distributed._composable_state")
    return state is not None and bool(getattr(state, "_module_state_mapping", True))


def active_function_modes() -> list[Any]:
    """The active function modes, the innermost last; torch has no public name for them. Seen in 2.13."""
    return torch.overrides._get_current_function_mode_stack()


def is_in_forward_mode() -> bool:
    """Whether forward-mode gradients are being computed; `torch.autograd.forward_ad` can't tell. Seen in 2.13."""
    return torch.autograd.forward_ad._current_level >= 0


# The attribute for a module's call that `Module.compile()` sets; torch leaves it out of copies and pickles. Seen in 2.13.
COMPILED_CALL = "_compiled_call_impl"


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


def schema_of(function: Any) -> Any:
    """The schema of an operator in a `TorchDispatchMode`; None for a higher-order operator, which has none.

    The schema says which arguments the operator writes to. Seen in torch 2.13.
    """
    return getattr(function, "_schema", None)
