"""Find the guards of the judge of a fold in its syntax trees, each with the edit that removes it.

A guard is a place where the judge refuses. What counts as one follows from what the function promises to return:

- `_why_not…` returns a sentence or None: each sentence that it returns is a guard, and so is each part of an `or`
  chain.
- A predicate returns a bool, and `LETS_PASS` says which answer lets the judge go on: each way to the other answer is a
  guard.
- A matcher returns an object or None: each `return None` except the last statement is a guard, and so is each condition
  of a permission.
- In all functions: each `raise`.

If the condition of a refusal is an `or` chain, each of its parts is a guard. The same holds for each part of an `and`
chain that permits something.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

# The files of the judge of a fold.
FILES = (
    "passes/fold_conv_bn.py",
    "passes/fold_conv_bias.py",
    "passes/graph/layers.py",
)
# The answer of each predicate that lets the judge go on.
LETS_PASS = {
    "is_constant": True, "_is_pure": True, "_is_computed_from_constants": True, "_is_move": True, "_is_partial_autocast": False, "_are_by_channel": True,
    "_reads_zeros": False, "_reads_shape": True,
}  # fmt: skip
# Functions in these files that judge no fold.
OTHER_WORK = {
    "is_for": "tells whether a graph is worth a capture",
    "shifts_only": "tells whether the weight stays as it is",
}


@dataclass(frozen=True)
class Guard:
    """One way in which the judge refuses."""

    file: str  # its path in the repository
    line: int  # the line on which it starts
    function: str  # the innermost function or class around it
    text: str  # its sentence, or its code
    start: int  # the bytes from `start` to `end` of the file are replaced by `code` to remove it
    end: int
    code: str
    refuses_at: int  # a line that runs in each test in which it refuses

    @property
    def name(self) -> str:
        """The name of the guard, which stays the same when lines move."""
        return f"{self.file}: {self.function}: {self.text}"


def guards_in(root: Path, file: str) -> list[Guard]:
    """The guards of one file, in the order of its lines. Guards with the same name get numbers.

    Raises:
        ValueError: a predicate isn't in `LETS_PASS`.
    """
    found = list(_Reader(file, (root / file).read_bytes()).guards())
    names = [guard.name for guard in found]
    if twice := {name for name in names if names.count(name) > 1}:
        numbers = [1 + names[:place].count(name) for place, name in enumerate(names)]
        found = [
            replace(guard, text=f"{guard.text} ({number})") if guard.name in twice else guard
            for guard, number in zip(found, numbers, strict=True)
        ]
    return found


def without(source: bytes, guard: Guard) -> bytes:
    """The source without this guard."""
    return source[: guard.start] + guard.code.encode() + source[guard.end :]


class _Reader:
    """Reads one file."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file = file
        self.source = source
        self.tree = ast.parse(source)
        # The offset of each line. The syntax tree counts columns in bytes.
        self.lines = [0]
        for line in source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def guards(self) -> Iterator[Guard]:
        found = [guard for function in _functions(self.tree) for guard in self._of_function(function)]
        yield from sorted(found, key=lambda guard: (guard.line, guard.start))

    def _of_function(self, function: ast.FunctionDef) -> Iterator[Guard]:
        if function.name in OTHER_WORK:
            return
        returned = "" if function.returns is None else ast.unparse(function.returns)
        if function.name.lstrip("_").startswith("why_not"):
            yield from self._of_reasons(function)
        elif returned == "bool":
            yield from self._of_predicate(function)
        elif returned.endswith("| None") and returned != "str | None":
            yield from self._of_matcher(function)
        yield from self._of_statements(function)

    def _of_reasons(self, function: ast.FunctionDef) -> Iterator[Guard]:
        for statement, condition in _returns(function):
            value = statement.value
            if _is_constant(value, None):
                yield from self._permitted(function, condition)
            elif isinstance(value, ast.BoolOp) and isinstance(value.op, ast.Or):
                for part in value.values:
                    yield self._guard(function, part, "None")
            else:
                yield from self._refused(function, statement, condition)

    def _of_predicate(self, function: ast.FunctionDef) -> Iterator[Guard]:
        if function.name not in LETS_PASS:
            raise ValueError(f"{self.file}: {function.name} is a predicate: say in LETS_PASS which answer lets pass")
        passing = LETS_PASS[function.name]
        for statement, condition in _returns(function):
            value = statement.value
            assert value is not None
            if _is_constant(value, passing):
                yield from self._permitted(function, condition)
                continue
            if _is_constant(value, not passing) and statement is not function.body[-1]:
                yield from self._refused(function, statement, condition)
                continue
            if condition is not None and isinstance(condition.test, ast.BoolOp):
                yield from self._permitted(function, condition)
            for part in _parts(value, ast.And if passing else ast.Or):
                yield self._guard(function, part, str(passing))

    def _of_matcher(self, function: ast.FunctionDef) -> Iterator[Guard]:
        for statement, condition in _returns(function):
            value = statement.value
            if _is_constant(value, None):
                if statement is not function.body[-1]:
                    yield from self._refused(function, statement, condition)
            elif isinstance(value, ast.IfExp) and _is_constant(value.orelse, None):
                for part in _parts(value.test, ast.And):
                    yield self._guard(function, part, "True")
            elif isinstance(value, ast.IfExp) and _is_constant(value.body, None):
                for part in _parts(value.test, ast.Or):
                    yield self._guard(function, part, "False")
            else:
                yield from self._permitted(function, condition)

    def _of_statements(self, function: ast.FunctionDef) -> Iterator[Guard]:
        for statement, condition in _statements(function):
            if isinstance(statement, ast.Raise):
                yield from self._refused(function, statement, condition)

    def _refused(self, function: ast.FunctionDef, statement: ast.stmt, condition: ast.If | None) -> Iterator[Guard]:
        """The guard of a statement that refuses; one for each part of its condition if that is an `or` chain."""
        parts = [] if condition is None else _parts(condition.test, ast.Or)
        if len(parts) < 2:
            text = _sentence(statement) or self._said(statement, condition)
            yield self._guard(function, statement, "pass", text=text)
            return
        for part in parts:
            yield self._guard(function, part, "False", refuses_at=statement.lineno)

    def _permitted(self, function: ast.FunctionDef, condition: ast.If | None) -> Iterator[Guard]:
        """The guards of a permission: one for each part of its condition if that is an `and` chain."""
        parts = [] if condition is None else _parts(condition.test, ast.And)
        if condition is not None and len(parts) > 1:
            for part in parts:
                yield self._guard(function, part, "True")

    def _guard(
        self, function: ast.FunctionDef, node: ast.expr | ast.stmt, code: str, *, text: str = "", refuses_at: int = 0
    ) -> Guard:
        start, end = self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)
        if code in ("True", "False") and any(isinstance(each, ast.NamedExpr) for each in ast.walk(node)):
            # Keep the assignment expression, because later code uses the name that it binds.
            code = f"(({self.source[start:end].decode()}) {'or' if code == 'True' else 'and'} {code})"
        said = text or " ".join(ast.unparse(node).split())
        return Guard(self.file, node.lineno, function.name, said, start, end, code, refuses_at or node.lineno)

    def _said(self, statement: ast.stmt, condition: ast.If | None) -> str:
        code = " ".join(ast.unparse(statement).split())
        return code if condition is None else f"if {' '.join(ast.unparse(condition.test).split())}: {code}"

    def _offset(self, line: int | None, column: int | None) -> int:
        assert line is not None
        assert column is not None
        return self.lines[line - 1] + column


def _functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def _statements(function: ast.FunctionDef) -> Iterator[tuple[ast.stmt, ast.If | None]]:
    """The statements of a function, without those of inner functions, each with the `if` directly around it."""
    waiting: list[tuple[ast.stmt, ast.If | None]] = [(statement, None) for statement in function.body]
    while waiting:
        statement, condition = waiting.pop(0)
        yield statement, condition
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        for name in ("body", "orelse", "handlers", "finalbody"):
            inner = isinstance(statement, ast.If) and name == "body"
            for child in getattr(statement, name, []):
                bodies = child.body if isinstance(child, ast.ExceptHandler) else [child]
                waiting += [(each, statement if inner else None) for each in bodies]


def _returns(function: ast.FunctionDef) -> list[tuple[ast.Return, ast.If | None]]:
    return [(each, condition) for each, condition in _statements(function) if isinstance(each, ast.Return)]


def _parts(test: ast.expr, operator: type[ast.boolop]) -> list[ast.expr]:
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, operator) else [test]


def _is_constant(node: ast.expr | None, value: object) -> bool:
    return (node is None and value is None) or (isinstance(node, ast.Constant) and node.value is value)


def _sentence(statement: ast.stmt) -> str | None:
    """The code of the sentence that a statement returns; None if it returns no sentence."""
    value = statement.value if isinstance(statement, ast.Return) else None
    says = value is not None and any(isinstance(getattr(each, "value", None), str) for each in ast.walk(value))
    return " ".join(ast.unparse(value).split()) if value is not None and says else None
