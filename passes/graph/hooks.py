"""Find out whether a module call runs more than its forward, and whether reading a parameter computes it."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as _modules
from torch.nn.utils import parametrize


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
