"""Evaluate the guards of a program captured by torch.export: comparisons of its input sizes, as Python source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class UnreadableGuard(ValueError):
    """A guard compares something other than input sizes; the message is a clause."""


@dataclass(frozen=True)
class _Sized:
    """Placeholder for an input in a guard."""

    shape: Sequence[int]

    def size(self) -> Sequence[int]:
        return self.shape


class _Torch:
    """The functions of torch in guards, as they are for numbers: `int(n / 4)` is `trunc(sym_float(n) / 4)`."""

    sym_float, sym_int, sym_max, sym_min = float, int, max, min


def guard_holds(guard: str, sizes: Mapping[str, Sequence[int]]) -> bool:
    """Whether a guard holds for inputs of these sizes, by parameter name.

    The guard comes from torch, or from a file that can run any code when it is loaded, so it is passed to `eval`.

    Raises:
        UnreadableGuard: it reads something other than sizes.
        ArithmeticError: it is undefined at these sizes (a division by zero).
    """
    names = {
        "L": {name: _Sized(shape) for name, shape in sizes.items()},
        **{"len": len, "max": max, "min": min, "math": math, "torch": _Torch},
    }
    try:
        return bool(eval(guard, {"__builtins__": {}, **names}))
    except ArithmeticError:
        raise
    except Exception as error:
        raise UnreadableGuard(f"`{guard[:80]}` is not a comparison of sizes") from error
