"""The guards of a program that torch.export captured: comparisons of the sizes of its inputs, as text.

They are read here by a small language of our own, so that none of them can do anything but compare sizes: whole
numbers, `L['x'].size()[0]`, `len(L['x'].size())`, arithmetic, `max` and `min`, comparisons, `and`, `or` and `not`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"max": max, "min": min}

# Sizes are squared and cubed; a number with a large exponent would only keep a reader busy.
_LARGEST_EXPONENT = 8


class UnreadableGuard(ValueError):
    """A guard says something that the language here doesn't have; the message is a clause."""


def guard_holds(guard: str, sizes: Mapping[str, Sequence[int]]) -> bool:
    """Whether a guard holds for inputs of these sizes, by the names of the parameters.

    Raises:
        UnreadableGuard: it can't be read.
        ArithmeticError: it has no value for such sizes (a division by zero).
    """
    return bool(_value(_parsed(guard), sizes))


def _parsed(guard: str) -> ast.expr:
    try:
        return ast.parse(guard, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableGuard(f"`{guard[:80]}` is no comparison of sizes") from error


def _value(node: ast.expr, sizes: Mapping[str, Sequence[int]]) -> Any:
    match node:
        case ast.Constant(value=value) if type(value) in (bool, int):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, sizes)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, sizes)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))) if (
            0 <= power <= _LARGEST_EXPONENT
        ):
            return _value(left, sizes) ** power
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left, sizes), _value(right, sizes))
        case ast.BoolOp(op=op, values=values):
            # All of them are read, whatever the first says.
            answers = [_value(value, sizes) for value in values]
            return all(answers) if isinstance(op, ast.And) else any(answers)
        case ast.Compare():
            return _compared(node, sizes)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS and arguments:
            return _FUNCTIONS[name](*(_value(argument, sizes) for argument in arguments))
        case ast.Call(func=ast.Name(id="len"), args=[shape], keywords=[]) if (name := _input_of(shape)) in sizes:
            return len(sizes[name])
        case ast.Subscript(value=shape, slice=ast.Constant(value=int(dim))) if (name := _input_of(shape)) in sizes:
            if 0 <= dim < len(sizes[name]):
                return sizes[name][dim]
    raise UnreadableGuard(f"`{ast.unparse(node)[:80]}` is no comparison of sizes")


def _input_of(node: ast.expr) -> str:
    """`x` for `L['x'].size()`; empty for anything else."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value=str(name))), attr="size"),
            args=[],
            keywords=[],
        ):  # fmt: skip
            return name
    return ""


def _compared(node: ast.Compare, sizes: Mapping[str, Sequence[int]]) -> bool:
    values = [_value(part, sizes) for part in (node.left, *node.comparators)]
    answers = []
    for op, left, right in zip(node.ops, values, values[1:], strict=False):
        if type(op) not in _COMPARISONS:
            raise UnreadableGuard(f"`{ast.unparse(node)[:80]}` is no comparison of sizes")
        answers.append(_COMPARISONS[type(op)](left, right))
    return all(answers)
