"""Evaluate the guards of a program captured by torch.export: comparisons of its input sizes, as Python source."""

from __future__ import annotations

import ast
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


# What a declared relation consists of: `load` reads it without the rights of Python source.
_IN_RELATIONS = (
    *(ast.Expression, ast.Compare, ast.BinOp, ast.UnaryOp, ast.Name, ast.Load),
    *(ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Pow, ast.USub),
    *(ast.Lt, ast.LtE, ast.Gt, ast.GtE),
)
_LARGEST_EXPONENT = 8


def can_be_declared(relation: str) -> bool:
    """Whether a relation compares sums and products of sizes and whole numbers, which `load` can evaluate."""
    try:
        return all(map(_can_be_declared, ast.walk(ast.parse(relation, mode="eval"))))
    except SyntaxError:
        return False


def _can_be_declared(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Mod | ast.Pow):
        right = node.right.value if isinstance(node.right, ast.Constant) else 0
        if type(right) is not int or right < 1:
            return False
        return not isinstance(node.op, ast.Pow) or (isinstance(node.left, ast.Name) and right <= _LARGEST_EXPONENT)
    return isinstance(node, _IN_RELATIONS)


def relation_holds(relation: str, sizes: Mapping[str, int]) -> bool:
    """Whether a relation that can be declared holds at these sizes, by name."""
    return bool(eval(relation, {"__builtins__": {}}, dict(sizes)))
