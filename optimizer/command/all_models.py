"""`build`: build the models of a config side by side, each in its own process."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from optimize_export.errors import failure_document
from optimizer.command.user_code import ROOT
from optimizer.options import NO_BENCH, BuildOptions

Document = dict[str, Any]
_POLL_SECONDS = 0.05


@dataclass
class _Build:
    """A running command, with its output in temporary files."""

    arguments: list[str]
    alone: bool
    """Whether no other build runs meanwhile. Otherwise the files aren't timed, since builds disturb each other."""
    started: float = field(default_factory=time.perf_counter)
    out: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    log: IO[bytes] = field(default_factory=tempfile.TemporaryFile)

    def __post_init__(self) -> None:
        # Without -P, Python would find modules next to the file before all others.
        command = [sys.executable, "-P", str(ROOT / "_optimize_export_start.py"), *self.arguments]
        environment = os.environ if self.alone else {**os.environ, NO_BENCH: "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self.out, stderr=self.log, env=environment
        )

    def result(self) -> tuple[Document, str]:
        """The JSON document, and what was written to stderr; closes the temporary files."""
        texts = []
        for file in (self.out, self.log):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
            file.close()
        seconds = round(time.perf_counter() - self.started, 3)
        code = self.process.returncode
        try:
            document = json.loads(texts[0])
        except ValueError:
            document = {}
        if code < 0 or not isinstance(document, dict) or "ok" not in document:
            ended = f"was killed by signal {-code}" if code < 0 else "ended without a result"
            code = 128 - code if code < 0 else code or 1
            document = failure_document(code, "Killed" if code > 128 else "Defect", f"The build {ended}.")
        return {**document, "exit_code": code, "seconds": seconds}, texts[1]


def builds(options: BuildOptions, tell: Callable[[str], object]) -> Generator[tuple[str, Document, str]]:
    """Run the builds, and yield the name, the JSON document and the log of each when it ends.

    `tell` gets each name when its build starts. If the caller stops early, the running builds are terminated.
    """
    waiting, running = list(options.commands.items()), dict[str, _Build]()
    try:
        while waiting or running:
            while waiting and len(running) < options.jobs:
                name, arguments = waiting.pop(0)
                tell(name)
                running[name] = _Build(arguments, alone=options.jobs == 1)
            ended = [name for name, build in running.items() if build.process.poll() is not None]
            for name in ended:
                yield name, *running.pop(name).result()
            if not ended:
                time.sleep(_POLL_SECONDS)
    finally:
        for build in running.values():
            build.process.terminate()
        for build in running.values():
            build.process.wait()


def joined(documents: Mapping[str, Document], order: Mapping[str, Any]) -> Document:
    """One JSON document for all builds; its exit code is the highest."""
    code = max((document["exit_code"] for document in documents.values()), default=0)
    return {
        "ok": code == 0,
        "exit_code": code,
        "models": {name: documents[name] for name in order if name in documents},
    }


def summary(document: Document) -> list[str]:
    """A table with one line per model."""
    rows = [("model", "result", "time", "bundle or error")]
    for name, each in document["models"].items():
        result = "up to date" if each.get("up_to_date") else f"exit {each['exit_code']}" if each["exit_code"] else "ok"
        text = each["error"]["message"] if "error" in each else each.get("bundle", "")
        rows.append((name, result, f"{each['seconds']:.1f} s", text))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]) for row in rows
    ]
