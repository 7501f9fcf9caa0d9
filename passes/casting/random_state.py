"""Save and restore the global random number generators."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


def random_state() -> tuple[Any, ...]:
    """The states of the global generators of torch (CPU), Python and NumPy."""
    return torch.random.get_rng_state(), random.getstate(), numpy.random.get_state()


def set_random_state(state: tuple[Any, ...]) -> None:
    """Restore the generators to states from `random_state`."""
    torch.random.set_rng_state(state[0])
    random.setstate(state[1])
    numpy.random.set_state(state[2])
