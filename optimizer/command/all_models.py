"""`build`: build the models of a config side by side, each in its own process."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from threading import Event
from typing import Any

from optimize_export.errors import failure_document
from optimize_export.shadowing import ROOT
from optimizer.options import NO_BENCH, BuildOptions

Document = dict[str, Any]


def builds(options: BuildOptions, tell: Callable[[str], object]) -> Generator[tuple[str, Document, str]]:
    """Run the builds, and yield the name, the JSON document and the log of each when it ends.

    `tell` gets each name when its build starts. If the caller stops early, the running builds are terminated.
    """
    running, stopped = list[subprocess.Popen[bytes]](), Event()
    # Builds side by side disturb each other's times.
    environment = os.environ if options.jobs == 1 else {**os.environ, NO_BENCH: "1"}

    def build(name: str, arguments: list[str]) -> tuple[Document, str]:
        tell(name)
        started = time.perf_counter()
        # Without -P, Python would find modules next to the file before all others.
        command = [sys.executable, "-P", str(ROOT / "_optimize_export_start.py"), *arguments]
        # Not pipes: a process that the user's code leaves running keeps those open.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, env=environment)
            running.append(process)
            if stopped.is_set():
                process.terminate()
            code = process.wait()
            texts = []
            for file in (out, log):
                file.seek(0)
                texts.append(file.read().decode("utf-8", "replace"))
        seconds = round(time.perf_counter() - started, 3)
        return {**_document(texts[0], code), "seconds": seconds}, texts[1]

    with ThreadPoolExecutor(options.jobs) as pool:
        found = {pool.submit(build, *each): each[0] for each in options.commands.items()}
        try:
            for each in as_completed(found):
                yield found[each], *each.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            stopped.set()
            for process in running:
                process.terminate()


def _document(out: str, code: int) -> Document:
    try:
        document = json.loads(out)
    except ValueError:
        document = {}
    if code < 0 or not isinstance(document, dict) or "ok" not in document:
        ended = f"was killed by signal {-code}" if code < 0 else "ended without a result"
        code = 128 - code if code < 0 else code or 1
        document = failure_document(code, "Killed" if code > 128 else "Defect", f"The build {ended}.")
    return {**document, "exit_code": code}


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
