"""The source follows the architecture: which packages may import which others, and other rules of structure."""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import exporters
import optimize_export
import optimizer
import optimizer.command.engine
import passes
from passes import graph_interface, module_interface

PACKAGES = {
    module.__name__: Path(module.__file__ or "").parent for module in (optimize_export, optimizer, passes, exporters)
}
FILES = [path for folder in PACKAGES.values() for path in sorted(folder.rglob("*.py"))]
# Functions that may import our packages, so that the package and the command load without torch and rich, or a file without
# any of them: on a machine of a Ray cluster.
LATE = {
    "optimize_export/__init__.py": set(),
    "optimizer/__init__.py": {"__getattr__"},
    "optimizer/command/build.py": {"builds"},
    "optimizer/command/cli.py": {"_torch_side"},
    "optimizer/command/output.py": {"print_tables"},
    "optimizer/command/ray_builder.py": {"build", "compared"},
}


def name_of(path: Path) -> str:
    folder = next(folder for folder in PACKAGES.values() if path.is_relative_to(folder))
    return str(path.relative_to(folder.parent))


TREES = {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def imports_in(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            module = node.module or ""
            yield from ((f"{module}.{alias.name}", node) for alias in node.names)


def late_imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (function, imported name) for each import of our packages inside a function."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from ((function.name, name) for name, _ in imports_in(function) if name.split(".")[0] in PACKAGES)


def all_imports() -> Iterator[tuple[str, str, ast.stmt]]:
    """Yield (file, imported name, statement) for each import in the project."""
    for file, tree in TREES.items():
        yield from ((file, name, node) for name, node in imports_in(tree))


def test_arrows() -> None:
    wrong = []
    for file, name, node in all_imports():
        mine, home = file.split("/")[0], name.split(".")[0]
        allowed = set(PACKAGES) if mine == "optimizer" else {mine, "optimize_export"}
        late = node.col_offset and file in LATE
        if home in PACKAGES and home not in allowed and not late:
            wrong.append(f"{file}:{node.lineno} imports {name}")
    assert wrong == []


def test_our_packages_are_imported_at_import_time() -> None:
    """An import inside a function may find a user's own module instead."""
    found = {file: {function for function, _ in late_imports(tree)} for file, tree in TREES.items()}
    assert {file: late for file, functions in found.items() if (late := functions - LATE.get(file, set()))} == {}


# The files for private names of torch: one of each package, and one that drives the front end of torch.compile.
PRIVATE = (*(f"{package}/torch_private.py" for package in PACKAGES), "passes/torch_capture.py")
# Where a package may be imported: its telemetry is off there, or nothing else needs it.
ONLY_IN = {
    "torch.fx": ("passes/graph/", "passes/fusion/", *PRIVATE),
    "onnxruntime": ("optimize_export/onnx_runtime.py",),
    "openvino": (),
}


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_package_is_imported_in_its_place_alone(package: str) -> None:
    wrong = [
        f"{file}:{node.lineno}"
        for file, name, node in all_imports()
        if f"{name}.".startswith(f"{package}.") and not file.startswith(ONLY_IN[package] or ("-",))
    ]
    assert wrong == []


def test_libraries_of_models_are_imported_only_for_a_model_of_theirs() -> None:
    wrong = [
        f"{file}:{node.lineno}"
        for file, name, node in all_imports()
        if not node.col_offset and name.split(".")[0] in {"timm", "torchvision", "transformers", "PIL"}
    ]
    assert wrong == []


def test_only_the_command_prints() -> None:
    printing = {
        file
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert printing == {"optimizer/command/output.py"}


# The sub-packages of `optimizer`: each may import those before it. `api.py` is between the last two.
FLOORS = (
    "showing",
    "model",
    "parity",
    "accuracy",
    "bundle",
    "faults",
    "profiling",
    "diagnosis",
    "pipeline",
    "exporting",
    "tuning",
    "training",
    "comparing",
    "command",
)
INSIDE = {file: tree for file, tree in TREES.items() if file.startswith("optimizer/")}


def floor_of(name: str) -> int:
    """The floor of a module of `optimizer`; -1 for a module at its root."""
    parts = name.replace("/", ".").split(".")
    return FLOORS.index(parts[1]) if len(parts) > 2 and parts[1] in FLOORS else -1


def test_a_floor_of_the_optimizer_knows_those_below_it_by_their_public_names() -> None:
    for file, tree in INSIDE.items():
        mine = floor_of(file.removesuffix(".py"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("optimizer."):
                continue
            package, place = node.module.split(".")[1], f"{file}:{node.lineno} imports {node.module}"
            if package not in FLOORS or FLOORS.index(package) == mine:
                continue
            assert mine < 0 or FLOORS.index(package) < mine, place
            if mine >= 0 or package != "command":
                assert node.module == f"optimizer.{package}", place
                assert {alias.name for alias in node.names} <= set(sys.modules[node.module].__all__), place


# Files that look at frames, to name a line in a message.
NAMING_LINES = {
    "optimizer/faults/locating.py",
    "optimizer/parity/orders.py",
    "optimizer/diagnosis/evidence.py",
    "exporters/eager_runs.py",
    "exporters/tracing.py",
}
# Packages of torch with private names, which its documentation tells people to use.
DOCUMENTED = ("torch.utils._pytree", "torch.utils._python_dispatch")


def dotted(node: ast.expr) -> str:
    """The dotted name that an expression spells, such as "torch._C.Node"; "" for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    inside = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inside}.{node.attr}" if inside else ""  # type: ignore[attr-defined]


def tricks_in(tree: ast.AST) -> Iterator[str]:
    """Yield how code reads or changes what isn't ours: bytecode, the heap, frames, attributes of Python and torch."""
    for name, _ in imports_in(tree):
        if name.split(".")[0] == "dis":
            yield "reads bytecode"
    for node in ast.walk(tree):
        name = dotted(node) if isinstance(node, ast.Attribute) else ""
        if name.endswith((".get_referrers", ".get_objects", ".get_referents")):
            yield "sweeps the heap"
        if name.endswith((".currentframe", "._getframe", "._current_frames")) or name.startswith("inspect.stack"):
            yield "looks at frames"
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        if any(dotted(target).startswith(("builtins.", "math.", "nn.Module.", "torch.nn.")) for target in targets):
            yield "changes what isn't ours"


def test_nobody_reads_or_changes_the_code_of_others() -> None:
    allowed = {file: {"looks at frames"} for file in NAMING_LINES}
    found = {file: set(tricks_in(tree)) - allowed.get(file, set()) for file, tree in TREES.items()}
    assert {file: tricks for file, tricks in found.items() if tricks} == {}


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield the private names of torch that are used."""
    found = [name for name, _ in imports_in(tree)]
    found += [dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for name in found:
        first, *rest = name.split(".")
        private = any(part.startswith("_") and not part.startswith("__") for part in rest)
        if first == "torch" and private and not name.startswith((*DOCUMENTED, "torch.ops.")):
            yield name


def test_private_names_of_torch_stand_in_one_file_of_each_package() -> None:
    found = {file for file, tree in TREES.items() if any(private_names(tree))}
    assert found <= {*PRIVATE}


def test_the_readers_of_tricks_find_them() -> None:
    tree = ast.parse("import dis\nimport gc, sys\ngc.get_objects()\nsys._getframe()\nnn.Module.__call__ = 1\n")
    assert list(tricks_in(tree)) == ["reads bytecode", "changes what isn't ours", "sweeps the heap", "looks at frames"]
    tree = ast.parse("f(*args); f(**kwargs); func(*args, **kwargs); self.model(*call.args, **call.kwargs)")
    assert list(calls_of_models(tree)) == ["func", "self.model"]
    tree = ast.parse("import torch._C\nfrom torch.utils import _pytree\ntorch._C.f()\ntorch.ops.aten._f\n")
    assert set(private_names(tree)) == {"torch._C", "torch._C.f"}


def test_the_readers_find_what_they_look_for() -> None:
    tree = ast.parse(
        "import torch.fx\nfrom torch import fx\ndef f():\n    from passes import base\n    import exporters.base\n"
    )
    assert [name for name, _ in imports_in(tree)][:2] == ["torch.fx", "torch.fx"]
    assert list(late_imports(tree)) == [("f", "passes.base"), ("f", "exporters.base")]
    assert set(TREES) >= {"optimizer/command/cli.py", "passes/graph/recording.py", "exporters/onnx.py"}
    with pytest.raises(AssertionError, match="relative"):
        list(imports_in(ast.parse("from . import base")))


# What calls a model with the arguments of a user's call. `called` and `observe` call the module that `Runs` yields: a
# copy in the right mode, whose run leaves no trace. Everything else goes through these two, or calls such a module.
CALLERS = {
    "optimizer/model/runs.py": {"module"},
    # `module` is called inside a call by `observe`.
    "optimizer/parity/observe.py": {"target", "module"},
    "optimizer/faults/locating.py": {"self.model"},
    # The module that `Runs` yields, timed without the copies of its inputs.
    "optimizer/profiling/operations.py": {"module"},
    # A torch call of a recording, once more.
    "optimizer/diagnosis/evidence.py": {"target"},
    # The working copy.
    "optimizer/pipeline/transactions.py": {"self.root"},
    # The result itself, for the user, whose own calls must find its graphs.
    "optimizer/pipeline/results.py": {"self.owner"},
}
# An intercepted function, which somebody is calling already, and what isn't called at all.
INTERCEPTED = {"func", "function", "forward", "call", "composed", "signature.bind"}


def calls_of_models(tree: ast.AST) -> Iterator[str]:
    """Yield what is called with both positional and keyword arguments of unknown number, as a user's model is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            positional = any(isinstance(argument, ast.Starred) for argument in node.args)
            if positional and any(keyword.arg is None for keyword in node.keywords):
                yield dotted(node.func)


def test_the_model_is_called_in_one_place() -> None:
    """Elsewhere, use called() of optimizer.model, or Reference.run()."""
    found = {file: set(calls_of_models(tree)) - INTERCEPTED for file, tree in INSIDE.items()}
    assert {file: more for file, calls in found.items() if (more := calls - CALLERS.get(file, set()))} == {}


# Modules in `passes` that aren't passes.
KINDS = (graph_interface, module_interface)
SHARED = {
    "__init__",
    "base",
    "errors",
    "registry",
    "torch_capture",
    "torch_private",
    *(kind.__name__.partition(".")[2] for kind in KINDS),
}
PASS_FILES = [path for path in sorted(PACKAGES["passes"].glob("*.py")) if path.stem not in SHARED]
# Imports of passes besides the interface of their kind: their own sub-packages, and the private names of torch.
OWN = {
    "cast_precision": ("passes.casting", "passes.torch_private"),
    "channels_last": ("passes.graph.layouts", "passes.torch_private"),
    "jit_fusion": ("passes.fusion", "passes.compiling", "passes.torch_private"),
    "sync_batch_norm": ("passes.torch_private",),
    "insert_checkpoints": ("passes.checkpointing",),
    # It compiles the graphs that the graph passes return.
    "torch_compile": ("passes.compiling", "passes.graph", "passes.torch_private"),
}


def imported_by_a_pass(tree: ast.AST, own: tuple[str, ...]) -> Iterator[str]:
    """Yield the project's names that a pass imports from outside the interface for authors of passes."""
    for name, _ in imports_in(tree):
        home = name.rpartition(".")[0]
        if name.split(".")[0] not in PACKAGES or home in {kind.__name__ for kind in KINDS} or name in COMMON:
            continue
        if not any(f"{name}.".startswith(f"{package}.") for package in own) or name.rpartition(".")[2] in INTERFACE:
            yield name


# Names that all kinds of passes use.
COMMON = {
    *(f"passes.base.{name}" for name in ("Change", "Context", "Pass", "PassResult", "Precision", "Skip")),
    "passes.errors.RequirementNotMet",
}
INTERFACE = {name for kind in KINDS for name in kind.__all__} | {name.rpartition(".")[2] for name in COMMON}


def test_a_pass_is_written_with_the_interface() -> None:
    found = {path.name: list(imported_by_a_pass(TREES[name_of(path)], OWN.get(path.stem, ()))) for path in PASS_FILES}
    assert {name: outside for name, outside in found.items() if outside} == {}


def test_the_reader_of_the_imports_of_a_pass_finds_them() -> None:
    tree = ast.parse(
        "import torch\nimport passes.base\nfrom passes import Pass\nfrom passes.graph_interface import Node\n"
        "from passes.fusion.kernels import Backend\nfrom passes.fusionless import Backend\n"
        "from passes.graph.captured import name_of\nfrom passes.graph.edits import in_place\n"
    )
    outside = ["passes.base", "passes.Pass", "passes.fusionless.Backend", "passes.graph.captured.name_of"]
    assert list(imported_by_a_pass(tree, ("passes.fusion",))) == [*outside, "passes.graph.edits.in_place"]
    # Names of the interface must come from it, even in passes that may import more.
    found = imported_by_a_pass(tree, ("passes.fusion", "passes.graph"))
    assert list(found) == [*outside[:3], "passes.graph.edits.in_place"]


def documented(tree: ast.Module) -> Iterator[str]:
    """Yield the top-level names of a module with a docstring: in a class or function, or below an assignment."""
    for statement, below in itertools.zip_longest(tree.body, tree.body[1:]):
        if isinstance(statement, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(statement):
            yield statement.name
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if is_text and isinstance(target := targets[0], ast.Name):
            yield target.id


def test_the_interface_is_public_and_documented() -> None:
    assert set(passes.__all__) >= INTERFACE
    homes: dict[str, set[str]] = {}
    for kind in KINDS:
        tree = ast.parse((PACKAGES["passes"] / f"{kind.__name__.partition('.')[2]}.py").read_text(encoding="utf-8"))
        names = [name for name, _ in imports_in(tree)]
        assert sorted(name.rpartition(".")[2] for name in names) == sorted(kind.__all__)
        for name in names:
            homes.setdefault(name.rpartition(".")[0], set()).add(name.rpartition(".")[2])
    for name in COMMON:
        homes.setdefault(name.rpartition(".")[0], set()).add(name.rpartition(".")[2])
    for module, names_there in homes.items():
        known = set(documented(ast.parse(Path(sys.modules[module].__file__ or "").read_text(encoding="utf-8"))))
        assert names_there <= known, module
        assert all(getattr(passes, name) is getattr(sys.modules[module], name) for name in names_there)


def test_all_that_the_passes_use_is_in_the_interface_and_no_more() -> None:
    used = {
        name.rpartition(".")[2]
        for path in PASS_FILES
        for name, _ in imports_in(ast.parse(path.read_text(encoding="utf-8")))
        if name.rpartition(".")[0] in {kind.__name__ for kind in KINDS} or name in COMMON
    }
    # A record that a pass may read and needn't create, and the base class of wrappers, which are in passes/casting/.
    assert INTERFACE - used == {"Change", "AroundForward"}
