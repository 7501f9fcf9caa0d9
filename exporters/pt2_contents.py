"""What a `.pt2` file may hold to be loaded: tensors as bytes, and a graph of operators.

`torch.export.load` unpickles weights, constants, objects and example inputs where an archive says so, loads native code
that lies in it, and makes Python source of names, sizes and guards. All of that is looked at here first, so that a file of
a stranger can only compute. What its operators do is up to them: they are those that are registered in the process.
"""

from __future__ import annotations

import ast
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from exporters.errors import UnsafeFile
from exporters.guards import UnreadableGuard, refuse_unreadable

_RECORDS = re.compile(
    r"data/weights/(weight_\d+|model_weights_config\.json)"
    r"|data/constants/(tensor_\d+|model_constants_config\.json)"
    r"|models/model\.json|data/sample_inputs/model\.pt|extra/metadata\.json"
    r"|archive_format|archive_version|byteorder|\.data/(version|serialization_id)"
)
_PAYLOAD = re.compile(r"(weight|tensor)_\d+")

# Arguments of a subgraph have no name.
_NAME = re.compile(r"([A-Za-z_]\w*)?")
_PATH = re.compile(r"[\w.@-]*")
_TARGET = re.compile(
    r"torch\.ops\.\w+\.\w+(\.\w+)?"
    r"|_operator\.(getitem|add|sub|mul|truediv|floordiv|mod|pow|neg|pos|abs|eq|ne|lt|le|gt|ge|and_|or_|not_)"
    r"|torch\.sym_\w+|torch\._sym_\w+|torch\.fx\.experimental\.symbolic_shapes\.cast_symbool_to_symint_guardless"
    r"|math\.(ceil|floor|sqrt|trunc)"
)
# What sizes are made of: Symbol('s77', integer=True), and functions of sympy and torch (FloorDiv, Max).
_SYMBOL = re.compile(r"[a-z]{1,3}\d+|[A-Z]\w*|int_oo|zoo|nan")
_EXPRESSION = (
    ast.Expression, ast.Constant, ast.Name, ast.Call, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare,
    ast.keyword, ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip
_CONTAINERS = frozenset({None, "builtins.tuple", "builtins.list", "builtins.dict"})


def refuse_unsafe(path: Path) -> None:
    """Raise UnsafeFile for an archive that would bring anything to run but operators.

    Raises:
        UnsafeFile: it is no `.pt2` archive, or holds what only its maker can vouch for.
        OSError: it can't be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _refuse_unsafe(path.name, archive)
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UnsafeFile(f"{path.name} is no program that torch.export saved: {error}.") from error


def _refuse_unsafe(file: str, archive: zipfile.ZipFile) -> None:
    names = archive.namelist()
    root = names[0].partition("/")[0] if names else ""
    records = [name.removeprefix(f"{root}/") for name in names]
    for record in records:
        if not _RECORDS.fullmatch(record):
            raise UnsafeFile(f"{file} holds {record}, which isn't loaded from a stranger: it may run code.")
    if len(set(records)) != len(records):
        raise UnsafeFile(f"{file} holds two records of one name.")
    for kind in ("weights", "constants"):
        config = json.loads(archive.read(f"{root}/data/{kind}/model_{kind}_config.json"))
        for name, payload in config["config"].items():
            if payload["use_pickle"] is not False or not _PAYLOAD.fullmatch(payload["path_name"]):
                raise UnsafeFile(f"{file} holds `{name}` as a pickle, which runs code when it is loaded.")
    _refuse_pickled_examples(file, archive.read(f"{root}/data/sample_inputs/model.pt"))
    model = json.loads(archive.read(f"{root}/models/model.json"))
    arguments = [call["signature"]["forward_arg_names"] for call in model["graph_module"]["module_call_graph"][:1]]
    names_of_inputs = arguments[0] if arguments and arguments[0] else []
    for key, text in _texts(model):
        check = _CHECKS.get(key, _is_path)
        if not (_is_guard(text, names_of_inputs) if key == "guards_code" else check(text)):
            raise UnsafeFile(
                f"{file} holds {text[:80]!r} as {key}, which isn't loaded from a stranger: it may run code."
            )


def _refuse_pickled_examples(file: str, data: bytes) -> None:
    if not data:
        return
    try:
        torch.load(io.BytesIO(data), weights_only=True)
    # Whatever it raises: torch.export.load would go on to unpickle anything.
    except Exception as error:
        raise UnsafeFile(f"{file} holds example inputs that aren't plain tensors, which may run code.") from error


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text in the model with what it stands for: the innermost key, or "key" for a key of a dict itself."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield "key", name
            yield from _texts(item, name if key != "metadata" else key)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key)


def _is_path(text: str) -> bool:
    return _PATH.fullmatch(text) is not None


def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def _is_target(text: str) -> bool:
    return _TARGET.fullmatch(text) is not None


def _is_expression(text: str) -> bool:
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except SyntaxError:
        return False
    return all(
        isinstance(node, _EXPRESSION)
        and not (isinstance(node, ast.Name) and not _SYMBOL.fullmatch(node.id))
        and not (isinstance(node, ast.Call) and not isinstance(node.func, ast.Name))
        and not (isinstance(node, ast.Constant) and not _is_constant(node.value))
        for node in nodes
    )


def _is_constant(value: Any) -> bool:
    return _SYMBOL.fullmatch(value) is not None if isinstance(value, str) else type(value) in (bool, int, float)


def _is_guard(text: str, names: list[str]) -> bool:
    try:
        refuse_unreadable(text, names)
    except UnreadableGuard:
        return False
    return True


def _is_structure(text: str) -> bool:
    """Whether a structure of arguments or outputs is made of plain containers."""
    return all(kind in _CONTAINERS for kind in _types(json.loads(text)))


def _types(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        if "type" in value:
            yield value["type"]
        for item in value.values():
            yield from _types(item)
    elif isinstance(value, list):
        for item in value:
            yield from _types(item)


def _anything(text: str) -> bool:
    return True


_CHECKS: dict[str, Callable[[str], bool]] = {
    "target": _is_target,
    "name": _is_name,
    "as_name": _is_name,
    "forward_arg_names": _is_name,
    "expr_str": _is_expression,
    "in_spec": _is_structure,
    "out_spec": _is_structure,
    # Arguments of operators, and what is only told of nodes.
    "as_string": _anything,
    "as_strings": _anything,
    "metadata": _anything,
    "torch_version": _anything,
}
