"""Keep the results of tuning by content, so that the same files aren't tuned twice on one machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from exporters.onnx_quantization import Recipe
from exporters.registry import QUANTIZED, exported_format
from optimize_export.errors import BundleError
from optimize_export.manifest import check_benchmark, file_digest, plain, read_json, to_json_text, version_of
from optimize_export.runtime import Route
from optimizer.bundle import describe_device, weights_hash
from optimizer.tuning.bench import Bench
from optimizer.tuning.benchmark import Benchmark, Figure, recommendation
from optimizer.tuning.files import candidate_name
from optimizer.tuning.lossy import Lossy, is_lossy, quantized_path

_DATE = r"\d{4}-\d\d-\d\d \d\d:\d\d UTC"
# What the choice depends on, besides the files and the machine.
_DISTRIBUTIONS = ("optimize-export", "torch", "onnxruntime", "onnxruntime-gpu", "openvino")


@dataclass(frozen=True)
class Kept:
    """A result that was kept."""

    path: Path
    date: str
    """The date in ISO 8601."""
    found: Benchmark
    recipe: Recipe | None
    """How the recommended file is made, if it is a quantized one."""

    @property
    def note(self) -> str:
        return f"these are times of {self.date}; delete {self.path} to tune again"


def cache_file(bench: Bench, lossy: Lossy | None) -> Path:
    """The file for the results of tuning these files, with these inputs and this budget, on this machine.

    It is below $XDG_CACHE_HOME, or below ~/.cache without that variable.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    content = {
        "files": {
            entry["format"]: [file_digest(bench.files.folder / path) for path in entry["files"]]
            for entry in bench.files.entries
        },
        "batch_sizes": bench.batch_sizes,
        "inputs": [[str(tensor.dtype), list(tensor.shape)] for tensor in bench.files.inputs],
        "device": describe_device(bench.job.target),
        "threads": torch.get_num_threads(),
        "versions": {name: version_of(name) for name in _DISTRIBUTIONS},
        # In which lossy candidates are judged.
        "mode": bench.measured.reference.blank.mode,
        "budget": str(bench.job.budget),
        "finite_inputs": bench.job.finite_inputs,
        "calibration": None if lossy is None else _digest((*lossy.calibration.used, *lossy.calibration.held_out)),
    }
    digest = hashlib.sha256(json.dumps(plain(content), sort_keys=True).encode()).hexdigest()
    return Path(home, "optimize-export", "tune", f"{digest}.json")


def _digest(calls: Iterable[tuple[torch.Tensor, ...]]) -> str:
    named = {f"{number:06}.{index}": t for number, call in enumerate(calls) for index, t in enumerate(call)}
    return weights_hash(named)


def read_kept(path: Path, bench: Bench, lossy: Lossy | None) -> Kept | None:
    """The result that a file keeps.

    Anyone who can write to the cache may have changed it, so a choice that this export couldn't have made counts as none.

    Returns:
        None if there is no such file, it is broken, it isn't about these files, or its tuning took less time than this
        one may take.
    """
    try:
        data = read_json(path, follow=True)
        check_benchmark(data["benchmark"])
        found, recipe, date = Benchmark.from_json(data["benchmark"]), data["quantization"], data["date"]
        if data["seconds"] < bench.job.tune_seconds or not re.fullmatch(_DATE, date):
            return None
        recommended = _recommended(found, bench, lossy)
        if recommended is None or recommended.route is None:
            return None
        format = recommended.route.format
        made = Recipe.from_json(recipe, format) if format in QUANTIZED else None
        return Kept(path, date, replace(found, reason=recommendation(found.figures, recommended.name)), made)
    except (OSError, ValueError, KeyError, TypeError, BundleError):
        return None


def _recommended(found: Benchmark, bench: Bench, lossy: Lossy | None) -> Figure | None:
    """The figure of the recommended route; None if this export couldn't have measured it or another figure."""
    routes = [figure.route for figure in found.figures if figure.route is not None]
    formats = {entry["format"] for entry in bench.files.entries}
    if any(exported_format(route.format) not in formats or (is_lossy(route) and lossy is None) for route in routes):
        return None
    if any(figure.route and figure.name != _name(bench, figure.route) for figure in found.figures):
        return None
    if (found.batch_sizes, found.threads) != (bench.batch_sizes, torch.get_num_threads()):
        return None
    timed = (figure for figure in found.figures if figure.seconds is not None and figure.dropped is None)
    return next((figure for figure in timed if figure.route == found.recommended), None)


def _name(bench: Bench, route: Route) -> str:
    path = Path(bench.files.entry(exported_format(route.format))["path"])
    return candidate_name(quantized_path(path, route.format) if route.format in QUANTIZED else path, route)


def keep(path: Path, found: Benchmark, recipe: Mapping[str, Any] | None, seconds: float) -> str | None:
    """Write a result to its file.

    Returns:
        A note if the file can't be written; None if it was.
    """
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    data: dict[str, Any] = {
        "date": date,
        "seconds": seconds,
        "quantization": recipe,
        "benchmark": found.to_json(),
    }
    new = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new.open("x", encoding="utf-8") as file:
            file.write(to_json_text(data))
        os.replace(new, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        return f"the result of the tuning isn't kept: {path.parent} can't be written ({error.strerror or error})"
    return None
