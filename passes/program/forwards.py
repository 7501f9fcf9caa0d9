"""The base of the callables that stand in a module's `__dict__` as its `forward`, where the class' own goes on working."""

from __future__ import annotations

import inspect
import types
from typing import Any

from torch import nn


class InstanceForward:
    """Base of the callables that stand in a module's `__dict__` as its `forward`; copied and pickled with the module."""

    # Whether a call of the module is one operation, which no graph looks into.
    is_atom = False
    owner: nn.Module

    def _class_forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.owner).forward(self.owner, *args, **kwargs)

    @property
    def __code__(self) -> types.CodeType:
        # torch.export asks the forward of the root for it, to name its inputs.
        return class_code(self.owner)

    def _class_signature(self) -> inspect.Signature:
        return inspect.signature(types.MethodType(type(self.owner).forward, self.owner))


def class_code(module: nn.Module) -> types.CodeType:
    """The code of the forward that the module's class defines."""
    # What stands there may be a descriptor that has no code, and gives a function for the instance.
    forward = inspect.getattr_static(type(module), "forward").__get__(module, type(module))
    code: types.CodeType = inspect.unwrap(forward).__code__
    return code
