"""Relations of sizes, such as `4096*batch <= 2147483648`: the limits that a manifest declares and `load` checks.

They come from untrusted files, so they are evaluated without `eval`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

# Larger relations and exponents are no limits of a model, but an attempt to keep the reader busy.
_LONGEST, _LARGEST_EXPONENT = 10_000, 8

_OPERATIONS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class Relation:
    """A comparison of sums and products of sizes and whole numbers; any other text is a ValueError."""

    def __init__(self, text: str) -> None:
        self._text = text
        try:
            found = ast.parse(text[: _LONGEST + 1], mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            found = None
        if len(text) > _LONGEST or not isinstance(found, ast.Compare) or not all(map(_is_known, ast.walk(found))):
            raise ValueError(f"{text[:80]!r} isn't a comparison of sizes")
        self._compared = found
        # The names of the sizes.
        self.names = tuple(dict.fromkeys(node.id for node in ast.walk(found) if isinstance(node, ast.Name)))

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether it holds at these sizes, by name; a relation of other sizes holds."""
        if any(name not in sizes for name in self.names):
            return True
        values = [_value(each, sizes) for each in (self._compared.left, *self._compared.comparators)]
        pairs = zip(values, self._compared.ops, values[1:], strict=False)
        return all(_OPERATIONS[type(compare)](left, right) for left, compare, right in pairs)

    def __str__(self) -> str:
        return f"`{self._text}`"


def can_be_declared(text: str) -> bool:
    """Whether a text is a relation."""
    try:
        Relation(text)
    except ValueError:
        return False
    return True


def _is_known(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Mod | ast.Pow):
        right = node.right.value if isinstance(node.right, ast.Constant) else 0
        if type(right) is not int or right < 1:
            return False
        return not isinstance(node.op, ast.Pow) or (isinstance(node.left, ast.Name) and right <= _LARGEST_EXPONENT)
    return isinstance(node, (ast.Compare, ast.BinOp, ast.UnaryOp, ast.USub, ast.Name, ast.Load, *_OPERATIONS))


def _value(node: ast.expr, sizes: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant):
        return int(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.UnaryOp):
        return -_value(node.operand, sizes)
    assert isinstance(node, ast.BinOp)
    return int(_OPERATIONS[type(node.op)](_value(node.left, sizes), _value(node.right, sizes)))
