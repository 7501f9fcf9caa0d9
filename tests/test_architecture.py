"""Which part of the house may know which: read from the imports, and held."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import exporters
import optimizer
import passes

PACKAGES = {module.__name__: Path(module.__file__ or "").parent for module in (optimizer, passes, exporters)}
FILES = [path for folder in PACKAGES.values() for path in sorted(folder.rglob("*.py"))]
# What may be imported inside of a function, so that the package and the command are there before torch and rich are.
LATE = {
    "optimizer/__init__.py": {"__getattr__"},
    "optimizer/cli.py": {"_torch_side", "_print_tables"},
}


def name_of(path: Path) -> str:
    folder = next(folder for folder in PACKAGES.values() if path.is_relative_to(folder))
    return str(path.relative_to(folder.parent))


def imports_in(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            module = node.module or ""
            yield from ((f"{module}.{alias.name}", node) for alias in node.names)


def late_imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(function, imported name) of the imports of our packages inside of functions."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from ((function.name, name) for name, _ in imports_in(function) if name.split(".")[0] in PACKAGES)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_arrows(path: Path) -> None:
    mine = name_of(path).split("/")[0]
    allowed = {"optimizer": set(PACKAGES), "passes": {"passes"}, "exporters": {"exporters"}}[mine]
    for name, node in imports_in(ast.parse(path.read_text(encoding="utf-8"))):
        home = name.split(".")[0]
        assert home not in PACKAGES or home in allowed, f"{name_of(path)}:{node.lineno} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_our_packages_are_imported_at_import_time(path: Path) -> None:
    found = {function for function, _ in late_imports(ast.parse(path.read_text(encoding="utf-8")))}
    assert found <= LATE.get(name_of(path), set()), (
        f"{name_of(path)} imports inside of {sorted(found)}: a user's own module may be found instead"
    )


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_the_packages_of_graphs_know_fx(path: Path) -> None:
    if name_of(path).startswith(("passes/graph/", "passes/program/")) or name_of(path) == "passes/torch_private.py":
        return
    for name, node in imports_in(ast.parse(path.read_text(encoding="utf-8"))):
        assert not name.startswith("torch.fx"), f"{name_of(path)}:{node.lineno} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_onnxruntime_is_imported_with_its_telemetry_off(path: Path) -> None:
    if name_of(path) == "exporters/onnx_runtime.py":
        return
    for name, node in imports_in(ast.parse(path.read_text(encoding="utf-8"))):
        assert name.split(".")[0] != "onnxruntime", f"{name_of(path)}:{node.lineno} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_the_command_prints(path: Path) -> None:
    if name_of(path) == "optimizer/cli.py":
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name = node.func if isinstance(node, ast.Call) else None
        assert not (isinstance(name, ast.Name) and name.id == "print"), f"{name_of(path)} prints"


def test_the_readers_find_what_they_look_for() -> None:
    tree = ast.parse(
        "import torch.fx\nfrom torch import fx\ndef f():\n    from passes import base\n    import exporters.base\n"
    )
    assert [name for name, _ in imports_in(tree)][:2] == ["torch.fx", "torch.fx"]
    assert list(late_imports(tree)) == [("f", "passes.base"), ("f", "exporters.base")]
    assert {name_of(path) for path in FILES} >= {"optimizer/cli.py", "passes/graph/rewriter.py", "exporters/onnx.py"}
    with pytest.raises(AssertionError, match="relative"):
        list(imports_in(ast.parse("from . import base")))


def test_every_file_of_a_pass_holds_its_pass() -> None:
    """A pass is named three ways that derive from each other; what is in `passes` beside them is named here."""
    shared = {"__init__", "base", "errors", "folding", "registry", "torch_private"}
    for path in PACKAGES["passes"].glob("*.py"):
        if path.stem in shared:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        wanted = "".join(part.capitalize() for part in path.stem.split("_"))
        assert wanted in classes, f"{path.name} has no class {wanted}"
        names = [
            node.value.value
            for node in classes[wanted].body
            if isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id == "name"
            and isinstance(node.value, ast.Constant)
        ]
        assert names == [path.stem.replace("_", "-")]
