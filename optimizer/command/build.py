"""`build`: the models of a config, each built in its own process.

The config is `[tool.optimize-export]` in pyproject.toml, or the file of `--config`.

    [tool.optimize-export]
    formats = ["onnx"]                      # a default for all models

    [tool.optimize-export.models.resnet]
    model = "nets/resnet.py:build"
    input = ["2x3x224x224"]

The values are those of the command's options. An option on the command line takes precedence.
"""

import difflib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import click

from optimize_export.errors import UsageError, failure_document
from optimize_export.manifest import read_text_bytes
from optimize_export.shadowing import ROOT
from optimizer.options import NO_BENCH, BuildOptions

Document = dict[str, Any]
_TOOL, _NAME = "optimize-export", re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_DEFAULT = Path("pyproject.toml")
# If these are given for all models, each model has its own folder inside of them.
FOLDERS = {"debug_dir", "profile_dir"}


@dataclass(frozen=True)
class Config:
    """The models of a config file."""

    path: Path
    models: dict[str, dict[str, Any]]
    """For each model by its name, the values of its options by the names of the command's parameters."""
    resources: dict[str, dict[str, float]]
    """For each model by its name, the amounts that it needs of a machine with `--on`, such as 1 GPU."""

    def names(self) -> str:
        return ", ".join(self.models) or "none"

    def named(self, name: str) -> dict[str, Any]:
        """The options of one model; raise `UsageError` if there is none of that name."""
        if name in self.models:
            return self.models[name]
        raise UsageError(f"{self.path} has no model {name}; its models are: {self.names()}.")

    def folders(self) -> list[str]:
        """The folders that the builds of all models write."""
        return [values[key] for values in self.models.values() for key in ("output", *FOLDERS) if key in values]

    def refuse_shared_outputs(self, outputs: Mapping[str, Path]) -> None:
        """Raise `UsageError` if two models have the same folder, or one inside the other's."""
        places = {name: path.resolve() for name, path in outputs.items()}
        for (one, output), (other, place) in itertools.combinations(places.items(), 2):
            if output.is_relative_to(place) or place.is_relative_to(output):
                same = f"the same output, {os.path.relpath(output)}"
                where = same if output == place else "outputs inside each other"
                raise UsageError(f"{self.path}: the models {one} and {other} have {where}: give one of them another.")

    @contextmanager
    def blamed(self, name: str) -> Iterator[None]:
        """Name the file and the model in errors about its options."""
        try:
            yield
        except UsageError as error:
            raise UsageError(f"{self.path}, model {name}: {error}") from error


def read_config(path: Path | None, options: Mapping[str, click.Option]) -> Config:
    """Read a config, by default pyproject.toml; raise `UsageError` for the first mistake in it.

    `options` are those that a model may have, by their long names.
    """
    path = _DEFAULT if path is None else path
    try:
        table: Any = tomllib.loads(read_text_bytes(path, follow=True).decode("utf-8"))
    except OSError as error:
        raise UsageError(f"The config {path} can't be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"The config {path} is not valid TOML: {error}.") from error
    where, table = _own_part(path, table)
    table = _table(path, where, table)
    models = _table(path, f"{where}.models".lstrip("."), table.get("models", {}))
    own_keys = {key: value for key, value in table.items() if key != "models"}
    common = _resources(path, where, own_keys)
    defaults, found, resources = _values(path, options, where, own_keys), {}, {}
    for name, own in models.items():
        inside = f"{where}.models.{name}".lstrip(".")
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{path}: {name!r} is not a name for a model; use letters, digits, - and _, and start without -."
            )
        own = dict(_table(path, inside, own))
        asked = _resources(path, inside, own)
        resources[name] = (common if asked is None else asked) or {}
        found[name] = {
            "output": f"dist/{name}",
            **{key: f"{value}/{name}" if key in FOLDERS else value for key, value in defaults.items()},
            **_values(path, options, inside, own),
        }
        if "model" not in found[name]:
            raise UsageError(f'{path}: [{inside}] has no model; add one, such as model = "net.py:build".')
    return Config(path, found, resources)


def _own_part(path: Path, document: dict[str, Any]) -> tuple[str, Any]:
    """The table with this program's options, and its name: `tool.optimize-export`, or "" for the whole document."""
    tools = _table(path, "tool", document.get("tool", {}))
    if path.name == _DEFAULT.name or _TOOL in tools:
        return f"tool.{_TOOL}", tools.get(_TOOL, {})
    return "", {key: value for key, value in document.items() if key != "tool"}


def _table(path: Path, where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{path}: {where} is {_shown(value)}; it must be a table, such as [{where}].")
    return value


def _resources(path: Path, where: str, table: dict[str, Any]) -> dict[str, float] | None:
    """Take `resources` out of a table; above 1, Ray accepts whole amounts only."""
    found = table.pop("resources", None)
    amounts: list[Any] = [*found.values()] if isinstance(found, dict) else [None]
    if found is None or all(
        type(each) in (int, float) and (0 < each < 1 or each == abs(each) // 1) for each in amounts
    ):
        return found
    place = f"in [{where}]" if where else "at the top level"
    raise UsageError(
        f"{path}: resources {place} is {_shown(found)}; it must be a table of amounts, such as {{GPU = 1, CPU = 8}}: whole "
        "numbers, or fractions below 1."
    )


def _values(path: Path, options: Mapping[str, click.Option], where: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a table by the names of the command's parameters."""
    place, known = f"in [{where}]" if where else "at the top level", ["model", *options]
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.7)
            hint = f"did you mean {near[0]}?" if near else "the keys are model and the options of an export."
            raise UsageError(f"{path}: there is no option {key} (= {_shown(value)}) {place}; {hint}")
        option = options.get(name)
        parameter = "model" if option is None else option.name or ""
        if parameter in found:
            raise UsageError(f"{path}: {key} is {place} twice, with - and with _.")
        try:
            found[parameter] = _converted(option, value)
        except TypeError as error:
            raise UsageError(f"{path}: {key} {place} is {_shown(value)}; it must be {error}.") from error
    return found


def _converted(option: click.Option | None, value: Any) -> Any:
    """The value as the command line would give it; raise `TypeError` that says what it must be."""
    if option is not None and option.is_flag:
        if not isinstance(value, bool):
            raise TypeError("true or false")
        return value
    if option is None and not isinstance(value, str):
        raise TypeError("a text")
    listed = option is not None and (option.multiple or option.metavar == "LIST")
    parts = value if listed and isinstance(value, list) else [value]
    if any(isinstance(part, bool) or not isinstance(part, str | int | float) for part in parts):
        raise TypeError("a text, a number or a list of them" if listed else "a text or a number")
    texts = tuple(map(str, parts))
    if option is not None and isinstance(option.type, click.Choice) and texts[0] not in option.type.choices:
        raise TypeError(f"one of {', '.join(option.type.choices)}")
    return texts if option is not None and option.multiple else ",".join(texts)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


# The builds -----------------------------------------------------------------------------------------------------------


def builds(options: BuildOptions, tell: Callable[[str], object]) -> Generator[tuple[str, Document, str]]:
    """Run the builds, and yield the name, the JSON document and the log of each when it ends.

    `tell` gets each name when its build starts. If the caller stops early, the running builds are terminated.
    """
    if options.on is not None:
        from optimizer.command.ray_builds import builds_on_ray

        yield from builds_on_ray(options, tell)
        return
    processes = Processes()
    # Builds side by side disturb each other's times.
    environment = os.environ if options.jobs == 1 else {**os.environ, NO_BENCH: "1"}

    def build(name: str) -> tuple[Document, str]:
        tell(name)
        started = time.perf_counter()
        out, code, log = processes.run(command_line(options.commands[name]), environment)
        return {**document_of(out, code), "seconds": round(time.perf_counter() - started, 3)}, log

    yield from side_by_side(build, options.commands, options.jobs, processes.stop)


def side_by_side(
    build: Callable[[str], tuple[Document, str]], names: Iterable[str], jobs: int, stop: Callable[[], object]
) -> Generator[tuple[str, Document, str]]:
    """Call `build` in threads, and yield the results as they come; `stop` ends the running builds when the caller leaves."""
    with ThreadPoolExecutor(jobs) as pool:
        found = {pool.submit(build, name): name for name in names}
        try:
            for each in as_completed(found):
                yield found[each], *each.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            stop()


def command_line(arguments: Iterable[str]) -> list[str]:
    # Without -P, Python would find modules next to the file before all others.
    return [sys.executable, "-P", str(ROOT / "_optimize_export_start.py"), *arguments]


class Processes:
    """The processes of builds, which end together."""

    def __init__(self) -> None:
        self._running, self._stopped = list[subprocess.Popen[bytes]](), Event()

    def run(
        self, command: list[str], environment: Mapping[str, str], folder: Path | None = None
    ) -> tuple[str, int, str]:
        """Run a command, and return what it writes to stdout, its exit code and what it writes to stderr."""
        # Not pipes: a process that the user's code leaves running keeps those open.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, env=environment)
            self._running.append(process)
            if self._stopped.is_set():
                process.terminate()
            code = process.wait()
            texts = []
            for file in (out, log):
                file.seek(0)
                texts.append(file.read().decode("utf-8", "replace"))
        return texts[0], code, texts[1]

    def stop(self) -> None:
        """Terminate the running processes, and wait until they have ended."""
        self._stopped.set()
        for process in self._running:
            process.terminate()
        for process in self._running:
            process.wait()


def document_of(out: str, code: int) -> Document:
    """The JSON document that a build wrote to stdout, or one that says how the build ended."""
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
