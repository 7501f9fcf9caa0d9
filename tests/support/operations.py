"""Count the operations that a call runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def computed(name: str, model: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """How often the second call runs an operation of ATen; without gradients, unless an argument requires them."""
    with torch.set_grad_enabled(any(getattr(each, "requires_grad", False) for each in args)):
        model(*args, **kwargs)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
            model(*args, **kwargs)
    return sum(event.name == f"aten::{name}" for event in found.events())
