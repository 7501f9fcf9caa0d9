"""Count the operations that a call runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def computed(name: str, model: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """How often the second call without gradients runs an operation of ATen."""
    with torch.no_grad():
        model(*args, **kwargs)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
            model(*args, **kwargs)
    return sum(event.name == f"aten::{name}" for event in found.events())
