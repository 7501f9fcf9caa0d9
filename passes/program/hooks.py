"""Whether calling a module runs more than its forward, and reading its parameters more than a look."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as _modules
from torch.nn.utils import parametrize


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs anything beside its forward."""
    own = module.__dict__
    return bool(
        own.get("_forward_hooks")
        or own.get("_forward_pre_hooks")
        or own.get("_backward_hooks")
        or own.get("_backward_pre_hooks")
    )


def has_global_hooks() -> bool:
    """Whether every call of every module runs hooks: those of `torch.nn.modules.module.register_module_*_hook`."""
    # Asked at every call of many graphs.
    return bool(
        _modules._global_forward_hooks
        or _modules._global_forward_pre_hooks
        or _modules._global_backward_hooks
        or _modules._global_backward_pre_hooks
    )


def is_parametrized(module: nn.Module) -> bool:
    """Whether some parameter of the module is computed from others at every access."""
    return "parametrizations" in module._modules and parametrize.is_parametrized(module)
