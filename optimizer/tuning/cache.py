"""Keep the results of tuning by content, so that the same files aren't tuned twice on one machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
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
from optimizer.tuning.benchmark import Benchmark, recommendation
from optimizer.tuning.candidates import Bench
from optimizer.tuning.lossy import Lossy, is_lossy

_DATE = r"\d{4}-\d\d-\d\d \d\d:\d\d UTC"
# What the choice depends on, besides the files and the machine.
_DISTRIBUTIONS = ("optimize-export", "torch", "onnxruntime", "onnxruntime-gpu", "openvino")


@dataclass(frozen=True)
class Choices:
    """A route that was chosen earlier."""

    path: Path
    """The manifest, or the file of the cache."""
    route: Route
    recipe: Recipe | None = None
    """How its file is made, if it is a quantized one."""


def cache_file(bench: Bench, lossy: Lossy | None) -> Path:
    """The file for the results of tuning these files, with these inputs and this budget, on this machine.

    It is below $XDG_CACHE_HOME, or below ~/.cache without that variable.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    calls = () if lossy is None else (*lossy.calibration.used, *lossy.calibration.held_out)
    named = {f"{number:06}.{index}": t for number, call in enumerate(calls) for index, t in enumerate(call)}
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
        "calibration": None if lossy is None else weights_hash(named),
    }
    digest = hashlib.sha256(json.dumps(plain(content), sort_keys=True).encode()).hexdigest()
    return Path(home, "optimize-export", "tune", f"{digest}.json")


def read_kept(path: Path, bench: Bench, lossy: Lossy | None) -> tuple[Choices, Benchmark] | None:
    """The result that a file keeps, and the choice that it recommends.

    Returns:
        None if there is no such file, it is broken, it recommends a route that this export couldn't have timed, or its
        tuning took less time than this one may take.
    """
    try:
        data = read_json(path, follow=True)
        check_benchmark(data["benchmark"])
        found, recipe, date = Benchmark.from_json(data["benchmark"]), data["quantization"], data["date"]
        if data["seconds"] < bench.job.tune_seconds or not re.fullmatch(_DATE, date):
            return None
        timed = (figure for figure in found.figures if figure.seconds is not None and figure.dropped is None)
        name, route = next((each.name, each.route) for each in timed if each.route and each.route == found.recommended)
        # The format is one of the files'.
        bench.files.entry(exported_format(route.format))
        if is_lossy(route) and lossy is None:
            return None
        made = Recipe.from_json(recipe, route.format) if route.format in QUANTIZED else None
        note = f"these are times of {date}; delete {path} to tune again"
        reason = recommendation(found.figures, name)
        return Choices(path, route, made), replace(found, reason=reason, notes=(*found.notes, note))
    except (OSError, ValueError, KeyError, TypeError, StopIteration, BundleError):
        return None


def keep(path: Path, found: Benchmark, recipe: Mapping[str, Any] | None, seconds: float) -> str | None:
    """Write a result to its file.

    Returns:
        A note if the file can't be written; None if it was.
    """
    data: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
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
