"""Base classes of the callables that a pass installs as `forward` in a module's `__dict__`."""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.nn.modules import module as _modules
from torch.nn.utils import parametrize

from passes.graph.edits import AttributeEdit, in_place
from passes.torch_private import compiled_module_types


class InstanceForward:
    """Base of the callables that replace one module's `forward`; copied and pickled with the module."""

    # Whether a call of the module counts as one operation, so that no graph shows its inside.
    is_atom = False
    owner: nn.Module

    def _class_forward(self, *args: Any, **kwargs: Any) -> Any:
        cls = type(self.owner)
        forward = cls.forward
        if not isinstance(forward, types.FunctionType):
            # A descriptor that returns a function for the instance.
            return inspect.getattr_static(cls, "forward").__get__(self.owner, cls)(*args, **kwargs)
        return forward(self.owner, *args, **kwargs)

    @property
    def __code__(self) -> types.CodeType:
        # torch.export reads the code of the root's forward to name the inputs. The class attribute may be a descriptor
        # without code, which returns a function for the instance.
        forward = inspect.getattr_static(type(self.owner), "forward").__get__(self.owner, type(self.owner))
        code: types.CodeType = inspect.unwrap(forward).__code__
        return code

    def _class_signature(self) -> inspect.Signature:
        cls = type(self.owner)
        return inspect.signature(inspect.getattr_static(cls, "forward").__get__(self.owner, cls))


def is_atom(module: nn.Module) -> bool:
    """Whether a call of the module counts as one operation: a torch.nn layer, or a forward that isn't in Python."""
    forward = module.__dict__.get("forward")
    if isinstance(module, torch.jit.ScriptModule):
        return True
    if isinstance(forward, InstanceForward) and forward.is_atom:
        return True
    if isinstance(module, nn.Sequential | fx.GraphModule) or "forward" in module.__dict__:
        return False
    home = getattr(type(module).forward, "__module__", None) or ""
    return home.startswith(("torch.nn.", "torch.ao.nn."))


class AroundForward(InstanceForward):
    """Base of the forwards that wrap a module's forward, compute the same, and convert its inputs or outputs.

    A subclass sets `owner` and `inner` in `__init__`, and calls `self._inner_forward(*args, **kwargs)` in `__call__`.
    Install it by `model.set_attribute(module, "forward", Wrapper(module, module.__dict__.get("forward")))`. Unlike a
    closure, it is copied and pickled with the module.
    """

    inner: Any  # the forward in the module's `__dict__` before this one; None for the forward of its class
    computes_in: torch.dtype | None = None  # the half precision of everything inside; None if this doesn't set it
    # Whether it watches the single operations of a training step, so that the forward must run as it was written there
    watches_training: bool = False

    def _inner_forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._class_forward if self.inner is None else self.inner
        return forward(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return self._class_signature() if self.inner is None else inspect.signature(self.inner)


_Around = TypeVar("_Around", bound=AroundForward)


def standing_around(module: nn.Module, kind: type[_Around]) -> _Around | None:
    """The outermost wrapper of the given class around the module's forward; None if there is none."""
    return next((one for one in _forwards_around(module) if isinstance(one, kind)), None)


def _forwards_around(module: nn.Module) -> Iterator[AroundForward]:
    installed = module.__dict__.get("forward")
    while isinstance(installed, AroundForward):
        yield installed
        installed = installed.inner


def dtype_inside(root: nn.Module) -> torch.dtype | None:
    """The half precision that a pass has set for the whole model; None if there is none."""
    return next((one.computes_in for one in _forwards_around(root) if one.computes_in is not None), None)


def inner_forward(module: nn.Module) -> Any:
    """The forward in the module's `__dict__`, inside of any `AroundForward`; None for the forward of its class."""
    installed = module.__dict__.get("forward")
    while isinstance(installed, AroundForward):
        installed = installed.inner
    return installed


def bound_forward(forward: Any) -> types.MethodType | None:
    """Turn an `InstanceForward` into a bound method, which torch.compile can share between equal modules.

    torch.compile guards a callable object by its identity, so code compiled for one module would not fit any other. It
    compares functions by their code. Returns None for any other forward.
    """
    if not isinstance(forward, InstanceForward):
        return None
    run = type(forward).__call__
    function = types.FunctionType(run.__code__, run.__globals__, run.__name__, run.__defaults__, run.__closure__)
    function.__kwdefaults__ = run.__kwdefaults__
    signature = inspect.Signature.from_callable(forward)  # type: ignore[arg-type]
    owner = inspect.Parameter("_self", inspect.Parameter.POSITIONAL_ONLY)
    function.__dict__["__signature__"] = signature.replace(parameters=[owner, *signature.parameters.values()])
    return types.MethodType(function, forward)


def unbound_forward(forward: Any) -> Any:
    """Reverse `bound_forward`; anything else is returned as is."""
    if type(forward) is not types.MethodType or not isinstance(forward.__self__, InstanceForward):
        return forward
    return forward.__self__


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs anything besides its forward."""
    own = module.__dict__
    return bool(
        own.get("_forward_hooks")
        or own.get("_forward_pre_hooks")
        or own.get("_backward_hooks")
        or own.get("_backward_pre_hooks")
    )


def has_global_hooks() -> bool:
    """Whether hooks for all modules are registered, by `torch.nn.modules.module.register_module_*_hook`."""
    # This is a hot path: it runs at every call of a rewritten model.
    return bool(
        _modules._global_forward_hooks
        or _modules._global_forward_pre_hooks
        or _modules._global_backward_hooks
        or _modules._global_backward_pre_hooks
    )


def is_parametrized(module: nn.Module) -> bool:
    """Whether `torch.nn.utils.parametrize` computes a parameter of the module from others at every access."""
    return parametrize.is_parametrized(module)


Around = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _WatchedForward(AroundForward):
    """The wrapped forward of an intercepted module; calls from other threads are not intercepted."""

    def __init__(self, owner: nn.Module, inner: Any, around: Around, thread: int) -> None:
        self.owner = owner
        self.inner = inner
        self.is_atom = is_atom(owner)
        self._around = around
        self._thread = thread

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return self._inner_forward(*args, **kwargs)
        return self._around(self.owner, self._inner_forward, args, kwargs)


@contextmanager
def intercepted_calls(
    root: nn.Module, around: Around, besides: Iterable[nn.Module] = (), *, leave: Collection[int] = ()
) -> Iterator[None]:
    """In the block, run `around(module, forward, args, kwargs)` instead of the forward of each module, in this thread.

    Args:
        root: the tree; all its modules are intercepted.
        around: the replacement. It may call `forward(*args, **kwargs)`, the module's own forward. The module's hooks
            run around the replacement.
        besides: further modules that `root` calls but doesn't register.
        leave: the ids of modules that aren't intercepted.
    """
    thread = threading.get_ident()
    modules = {id(module): module for module in (*root.modules(), *besides)}
    with in_place(
        [
            AttributeEdit(module, "forward", _WatchedForward(module, _forward_of(module), around, thread))
            for key, module in modules.items()
            if key not in leave
        ]
    ):
        yield


def _forward_of(module: nn.Module) -> Any:
    """The module's current forward; None for the forward of its class.

    The result of `torch.compile(module)` runs the original module instead, because compiled code makes no module calls
    that can be intercepted.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return module.forward
    if is_compiled(module):
        return module._modules["_orig_mod"]
    return module.__dict__.get("forward")


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` made the module from another one."""
    return isinstance(module, compiled_module_types())
