"""The models of a config: `[tool.optimize-export]` in pyproject.toml, or the file of `--config`.

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
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from optimize_export.errors import UsageError
from optimize_export.manifest import read_text_bytes

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

    def names(self) -> str:
        return ", ".join(self.models) or "none"

    def named(self, name: str) -> dict[str, Any]:
        """The options of one model; raise `UsageError` if there is none of that name."""
        if name in self.models:
            return self.models[name]
        raise UsageError(f"{self.path} has no model {name}; its models are: {self.names()}.")

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
    defaults, found = _values(path, options, where, own_keys), {}
    for name, own in models.items():
        inside = f"{where}.models.{name}".lstrip(".")
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{path}: {name!r} is not a name for a model; use letters, digits, - and _, and start without -."
            )
        found[name] = {
            "output": f"dist/{name}",
            **{key: f"{value}/{name}" if key in FOLDERS else value for key, value in defaults.items()},
            **_values(path, options, inside, _table(path, inside, own)),
        }
        if "model" not in found[name]:
            raise UsageError(f'{path}: [{inside}] has no model; add one, such as model = "net.py:build".')
    return Config(path, found)


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
