"""Count what a person reads to follow one call: the project's files, functions and lines that it enters.

    python benchmarks/house.py --json build/house.json --markdown build/house.md

A model of three layers goes through `optimize` with the preset, and through `export` to ONNX, each under
`sys.setprofile`. Code that runs while a file is imported doesn't count. Two more tables show the lines of the product by
folder, and the files that exactly one other file imports: each of them is a jump for its reader.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from table import Table, publish
from torch import nn

from optimizer import export, optimize

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("optimize_export", "passes", "exporters", "optimizer")
# The largest number of files that a call may enter.
GOALS = {"optimize, preset": 45, "export, ONNX": 70}


@dataclass
class Trace:
    """What one call entered.

    Attributes:
        functions: the code of each function that ran.
        changes: the number of entries into another file than that of the entry before.
    """

    functions: set[CodeType] = field(default_factory=set)
    changes: int = 0
    _last: str = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # Only functions have the flag: neither modules nor the bodies of classes.
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and is_ours(code.co_filename):
            self.functions.add(code)
            self.changes += code.co_filename != self._last
            self._last = code.co_filename

    @property
    def files(self) -> list[str]:
        return sorted({name_of(Path(code.co_filename)) for code in self.functions})


def is_ours(file: str) -> bool:
    return file.endswith(".py") and file.startswith(tuple(f"{ROOT / package}/" for package in PACKAGES))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@contextmanager
def traced() -> Iterator[Trace]:
    """Trace the calls of all threads that start inside."""
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def three_layers() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    return model, torch.randn(2, 3, 16, 16)


def traced_calls() -> list[dict[str, Any]]:
    """Trace both calls of users."""
    model, inputs = three_layers()
    with traced() as optimizing:
        optimize(model, example_inputs=inputs)
    with tempfile.TemporaryDirectory() as folder, traced() as exporting:
        export(model, inputs, output=Path(folder, "bundle"), formats=["onnx"])
    return [
        {
            "call": call,
            "files": trace.files,
            "lines": sum(lines_of(ROOT / file) for file in trace.files),
            "functions": len(trace.functions),
            "changes": trace.changes,
            "goal": GOALS[call],
        }
        for call, trace in zip(GOALS, (optimizing, exporting), strict=True)
    ]


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def product() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def by_folder(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The number of files and lines of each folder, without its sub-folders."""
    folders: dict[str, list[int]] = {}
    for path in files:
        folders.setdefault(name_of(path.parent), []).append(lines_of(path))
    return [{"folder": name, "files": len(each), "lines": sum(each)} for name, each in folders.items()]


def with_one_importer(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The files that exactly one other file imports; a package's `__init__` counts like any other."""
    modules = {name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in files}
    importers: dict[Path, set[Path]] = {path: set() for path in files}
    for path in files:
        for name in imported_names(ast.parse(path.read_text(encoding="utf-8"))):
            # The name of a module, or of something in it.
            found = modules.get(name) or modules.get(name.rpartition(".")[0])
            if found is not None and found != path:
                importers[found].add(path)
    return [
        {"file": name_of(path), "lines": lines_of(path), "importer": name_of(next(iter(found)))}
        for path, found in importers.items()
        if len(found) == 1 and path.name != "__init__.py"
    ]


def imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def tables_of(data: dict[str, Any]) -> list[Table]:
    calls = Table("What one call enters", ["call", "files", "at most", "their lines", "functions", "changes of file"])
    for call in data["calls"]:
        calls.add(
            call["call"],
            str(len(call["files"])),
            str(call["goal"]),
            *(f"{call[key]:,}" for key in ("lines", "functions", "changes")),
        )
    calls.caption.append(
        "A model of three layers. Changes of file: entries of a function in another file than the last."
    )
    folders = Table("Lines by folder", ["folder", "files", "lines"])
    for folder in data["folders"]:
        folders.add(folder["folder"], str(folder["files"]), f"{folder['lines']:,}")
    files, lines = (sum(folder[key] for folder in data["folders"]) for key in ("files", "lines"))
    folders.add("all", str(files), f"{lines:,}")
    single = Table("Files with one importer", ["file", "importer", "lines"], left=2)
    for file in data["with_one_importer"]:
        single.add(file["file"], file["importer"], f"{file['lines']:,}")
    total = sum(file["lines"] for file in data["with_one_importer"])
    single.caption.append(f"{len(single.rows)} files with {total:,} lines.")
    return [calls, folders, single]


def files_table(calls: Sequence[dict[str, Any]]) -> Table:
    """The files that each call enters."""
    table = Table("Files entered", ["file", *(call["call"] for call in calls), "lines"])
    for file in sorted({file for call in calls for file in call["files"]}):
        table.add(file, *("x" if file in call["files"] else "" for call in calls), str(lines_of(ROOT / file)))
    return table


def misses(calls: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each call that enters more files than it may."""
    return [
        f"{call['call']} enters {len(call['files'])} files: at most {call['goal']}"
        for call in calls
        if len(call["files"]) > call["goal"]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="print the files that each call enters, too")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a call enters more files than it may")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    arguments = parser.parse_args()
    files = product()
    data: dict[str, Any] = {
        "benchmark": "house",
        "calls": traced_calls(),
        "folders": by_folder(files),
        "with_one_importer": with_one_importer(files),
    }
    publish(tables_of(data), data, arguments.json, arguments.markdown)
    if arguments.files:
        files_table(data["calls"]).show()
    missed = misses(data["calls"])
    for sentence in missed:
        print(sentence, file=sys.stderr)
    return 1 if arguments.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
