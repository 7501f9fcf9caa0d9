"""The global generators of random numbers, kept and put back."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


def random_state() -> tuple[Any, ...]:
    """The states of the global generators of torch (CPU), Python and numpy."""
    return torch.random.get_rng_state(), random.getstate(), numpy.random.get_state()


def set_random_state(state: tuple[Any, ...]) -> None:
    """Put the generators back."""
    torch.random.set_rng_state(state[0])
    random.setstate(state[1])
    numpy.random.set_state(state[2])
