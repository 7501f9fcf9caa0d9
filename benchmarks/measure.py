"""Interleaved rounds, medians with quartiles, the peak memory of a process, and the environment of a measurement."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from optimize_export.manifest import version_of
from optimize_export.runtime import processor, usable_cpus
from optimize_export.runtime.cpus import settle

_PACKAGES = (
    "torch", "transformers", "timm", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "openvino",
    "optimize-export",
)  # fmt: skip


@dataclass(frozen=True)
class Spread:
    """The median of some values, with their quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def to_json(self) -> dict[str, float]:
        return {"median": self.median, "low": self.low, "high": self.high}


def ratios(values: Sequence[float], to: Sequence[float]) -> Spread:
    """The ratio of two contenders, taken within each round, because a slow round slows both."""
    return Spread.of([value / other for value, other in zip(values, to, strict=True)])


def interleaved(contenders: Mapping[str, Callable[[], dict[str, float]]], rounds: int) -> dict[str, list[float]]:
    """Call every contender once in each round, in random order; return the values by name, one for each round."""
    figures: dict[str, list[float]] = {}
    names = list(contenders)
    for number in range(rounds):
        random.Random(number).shuffle(names)
        for name in names:
            for figure, value in contenders[name]().items():
                figures.setdefault(figure, []).append(value)
    return figures


def command(
    description: str | None,
    *,
    models: str | None = None,
    batch: int | list[int] | None = None,
    rounds: int | None = None,
    device: bool = False,
    threads: int | list[int] = 1,
    scale: bool = False,
    check: bool = False,
) -> argparse.ArgumentParser:
    """A parser with the options that benchmarks share. Those that are None or False are left out.

    Args:
        models: the default of --models, names by commas.
        batch, threads: the defaults of --batch and --threads, which take several numbers if these are lists.
        device: whether the GPU can be chosen; without it, `device` is "cpu".
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if models is not None:
        parser.add_argument("--models", default=models, help="names, by commas (default: %(default)s)")
    if batch is not None:
        parser.add_argument("--batch", default=batch, help="rows of the inputs (default: %(default)s)", **_type(batch))
    if rounds is not None:
        parser.add_argument("--rounds", type=positive, default=rounds, help="values per figure (default: %(default)s)")
    if device:
        parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.set_defaults(device="cpu")
    parser.add_argument("--threads", default=threads, help="of the runtimes (default: %(default)s)", **_type(threads))
    if scale:
        parser.add_argument("--scale", type=float, default=1.0, help="of image sides and text lengths, to try it out")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    if check:
        parser.add_argument("--check", action="store_true", help="exit with 1 where a goal is missed")
    return parser


def _type(default: int | list[int]) -> dict[str, Any]:
    return {"type": numbers if isinstance(default, list) else positive}


def prepared(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> dict[str, Any]:
    """Set up torch for the arguments `device` and `threads`, without TF32, and return the environment."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU that torch finds")
    torch.set_num_threads(arguments.threads)
    # onnxruntime's provider has it off, too: see contenders.py.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    return environment(arguments.threads, arguments.device)


class Stopwatch:
    """Adds up the seconds of each named step, with a clock of `time`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = self._clock()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - started


def seconds_of(call: Callable[[], Any]) -> float:
    """The seconds of one call, after a garbage collection."""
    gc.collect()
    started = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - started
    del result
    return seconds


def synchronize(device: str) -> None:
    """Wait until the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def latency_of(
    call: Callable[[], Any], repeats: int, device: str, clock: Callable[[], float] = time.perf_counter
) -> float:
    """The seconds of one call, as the mean over `repeats` calls, including the device's work, with a clock of `time`."""
    (seconds,) = _seconds_by(call, repeats, device, [clock])
    return seconds


def _seconds_by(
    call: Callable[[], Any], repeats: int, device: str, clocks: Sequence[Callable[[], float]]
) -> list[float]:
    synchronize(device)
    settle()
    if repeats > 1:
        # Measure short calls warm: the previous contender has left its own data in the caches.
        call()
    synchronize(device)
    started = [clock() for clock in clocks]
    for _ in range(repeats):
        call()
    synchronize(device)
    return [(clock() - start) / repeats for clock, start in zip(clocks, started, strict=True)]


def repeats_for(call: Callable[[], Any], seconds: float, device: str) -> int:
    """The number of calls that take about that many seconds."""
    return max(1, round(seconds / max(latency_of(call, 1, device), 1e-7)))


def latencies_of(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    seconds: float,
    device: str,
    busy: dict[str, list[float]] | None = None,
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Measure the seconds of one call of each contender in each round, in random order.

    Args:
        seconds: the duration of one measurement in one round; shorter calls are repeated.
        busy: gets the processor seconds of the same calls.

    Returns:
        The seconds of each contender, one value for each round, and the number of calls behind each value.
    """
    repeats = {name: repeats_for(run, seconds, device) for name, run in runs.items()}
    figures: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for name in order:
            wall, used = _seconds_by(runs[name], repeats[name], device, [time.perf_counter, time.process_time])
            figures[name].append(wall)
            if busy is not None:
                busy.setdefault(name, []).append(used)
    return figures, repeats


@contextlib.contextmanager
def on_cpus(count: int) -> Iterator[None]:
    """Restrict this thread, and the processes that it starts, to some of its CPUs; all of them where that's impossible.

    Not every runtime has an option for its number of threads everywhere, but most count the CPUs they may use.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def environment(threads: int, device: str = "cpu") -> dict[str, Any]:
    """The machine and the software of a measurement."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": processor(),
        "cpus": usable_cpus(),
        "load_before": round(os.getloadavg()[0], 2),
        "threads": threads,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := version_of(name)) is not None},
    }


def caption(environment: Mapping[str, Any]) -> str:
    """The environment in one line, for the caption of a table."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    where = environment["cpu"] if environment["device"] == "cpu" else environment["device"]
    return (
        f"{where}, {environment['cpus']} CPUs, {environment['threads']} thread(s), load {environment['load_before']} at"
        f" the start; Python {environment['python']}, {versions}; {environment['date']}"
    )


def numbers(text: str) -> list[int]:
    """Parse an option such as `1,8`: whole numbers of 1 or more."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 1,8") from None
    if min(values) < 1:
        raise argparse.ArgumentTypeError("each number is 1 or more")
    return values


def positive(text: str) -> int:
    """Parse an option that is one whole number of 1 or more."""
    values = numbers(text)
    if len(values) != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is more than one number")
    return values[0]


def refuse_unknown(
    parser: argparse.ArgumentParser, what: str, names: Iterable[str], known: Collection[str], *, separator: str = ", "
) -> None:
    """End the program with an error if an option names something unknown, for example a model."""
    for name in names:
        if name not in known:
            parser.error(f"there is no {what} {name!r}: use {separator.join(known)}")
