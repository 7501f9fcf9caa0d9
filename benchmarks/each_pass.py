"""Measure what each pass does to a model, alone and all together: latency, kernels, bytes of weights, peak memory.

    python benchmarks/each_pass.py --json build/each_pass.json --markdown build/each_pass.md

`optimize` makes and verifies every result. The results, the eager model and torch.compile of it are called in turn, so
that a temporary slowdown of the machine affects all of them.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from contenders import Run, calling, error_against, sentence_of
from latency import time_cells
from measure import Spread, caption, command, latencies_of, prepared, ratios, refuse_unknown
from models import PASS_SUBJECTS, Plain, Subject, subject
from table import Table, mebibytes, write
from torch import nn

from optimize_export.runtime import usable_cpus
from optimizer import optimize, report_of
from optimizer.tuning.benchmark import PeakMemory

# The ways without this project; they have no passes.
EAGER, COMPILE = "eager", "torch.compile"
# The exact passes: those of the preset, and more.
_EXACT = ("fold-conv-bias", "fold-conv-bn", "channels-last", "simplify", "merge-linears")
WAYS: dict[str, tuple[str, ...]] = {
    COMPILE: (),
    "fold-conv-bias": ("fold-conv-bias",),
    "fold-conv-bn": ("fold-conv-bn",),
    "channels-last": ("channels-last",),
    "simplify": ("simplify",),
    "merge-linears": ("merge-linears",),
    "merge-linears, forced": ("merge-linears:force=true",),
    "pad-channels": ("pad-channels",),
    "jit-fusion": ("jit-fusion",),
    "cast-precision": ("cast-precision",),
    "cast-precision, weights": ("cast-precision:how=weights",),
    "torch-compile": ("torch-compile",),
    "torch-compile, frozen": ("torch-compile:freezing=true",),
    "all exact": _EXACT,
    "all exact, jit-fusion": (*_EXACT, "jit-fusion"),
    "all exact, torch-compile": (*_EXACT, "torch-compile"),
    "all exact, cast-precision, torch-compile": (*_EXACT, "cast-precision", "torch-compile"),
}
_HALVES = ("bfloat16", "float16")
# The duration of one measurement in one round; shorter calls are repeated.
_SECONDS_OF_A_FIGURE = 0.1
# Operations that allocate, alias or inspect memory, and run no kernel.
_NO_KERNELS = frozenset({
    "empty", "empty_like", "empty_permuted", "empty_strided", "is_nonzero", "item", "lift_fresh", "new_empty",
    "new_empty_strided", "resize_", "resolve_conj", "resolve_neg", "result_type", "set_", "unsafe_chunk", "unsafe_split",
    "unsafe_split_with_sizes", "_local_scalar_dense",
})  # fmt: skip


@dataclass(frozen=True)
class Made:
    """One way to run the model on one batch.

    Attributes:
        run: returns the outputs as flat tensors; None if this way isn't available.
        statuses: the status of each pass, in order.
        module: the module whose parameters are counted.
        seconds: the time to make it, including the first two calls.
        reason: the error that made it unavailable; otherwise "".
    """

    name: str
    run: Run | None
    statuses: tuple[str, ...] = ()
    module: nn.Module | None = None
    seconds: float = 0.0
    reason: str = ""


def make(name: str, asked: Subject, inputs: tuple[torch.Tensor, ...], ways: dict[str, tuple[str, ...]]) -> Made:
    """Make the way of that name, and call it twice."""
    torch._dynamo.reset()
    started = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module, statuses = _module(name, asked, inputs, ways)
            run = calling(Plain(module), inputs)
            run()
            run()
    except Exception as error:  # noqa: BLE001 - any error means that this way is unavailable; the row says so
        return Made(name, None, seconds=time.perf_counter() - started, reason=sentence_of(error))
    return Made(name, run, statuses, module, time.perf_counter() - started)


def _module(
    name: str, asked: Subject, inputs: tuple[torch.Tensor, ...], ways: dict[str, tuple[str, ...]]
) -> tuple[nn.Module, tuple[str, ...]]:
    if name == EAGER:
        return asked.model, ()
    if name == COMPILE:
        return torch.compile(asked.model), ()  # type: ignore[return-value]
    fast = optimize(asked.model, list(ways[name]), example_inputs=inputs)
    return fast, tuple(record.status for record in report_of(fast).passes)


def kernels_of(run: Run, device: str) -> int:
    """The number of kernels that one call launches; on a CPU, the number of operations that compute something."""
    activity = torch.profiler.ProfilerActivity
    kinds = [activity.CPU, activity.CUDA] if device == "cuda" else [activity.CPU]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=kinds) as profile:
            run()
    events = profile.events()
    if device == "cuda":
        on_device = torch.autograd.DeviceType.CUDA
        return sum(event.device_type == on_device and "Memcpy" not in event.name for event in events)
    return sum(_kernels_in(event) for event in events if event.cpu_parent is None)


def _kernels_in(event: Any) -> int:
    """The number of operations with their own kernel in an event, including the event itself."""
    if "cpp_fused" in event.name:
        return 1
    name = event.name.removeprefix("aten::")
    if name != event.name:
        if name in _NO_KERNELS or _is_view(name):
            return 0
        if not _is_composed(name):
            return 1
    return sum(map(_kernels_in, event.cpu_children))


@functools.cache
def _is_view(name: str) -> bool:
    return any(
        value.alias_info is not None and not value.alias_info.is_write
        for operation in _operations(name)
        for value in operation._schema.returns
    ) and not _is_composed(name)


@functools.cache
def _is_composed(name: str) -> bool:
    """Whether the operation only calls other operations, which are events below it."""
    key = "CompositeImplicitAutograd"
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(each.name(), key) for each in _operations(name))


def _operations(name: str) -> list[Any]:
    packet = getattr(torch.ops.aten, name, None)
    found = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    # Overloads on plain numbers belong to TorchScript and have no kernels.
    return [each for each in found if torch._C._dispatch_has_kernel(each.name())]


def peak_of(run: Run, device: str) -> int:
    """The peak memory of one call, in bytes above the level before it."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with PeakMemory() as memory:
        run()
    return memory.bytes


def bytes_of(module: nn.Module) -> int:
    """The bytes of all parameters and buffers; shared memory counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(module)}
    return sum(storages.values())


def _tensors(module: nn.Module) -> Sequence[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def measure_batch(
    asked: Subject, batch: int, ways: dict[str, tuple[str, ...]], rounds: int, device: str
) -> list[dict[str, Any]]:
    """Measure all ways at one batch size, interleaved."""
    inputs = tuple(tensor.to(device) for tensor in asked.inputs(batch))
    truth = calling(Plain(asked.model), inputs)()
    made = [make(name, asked, inputs, ways) for name in (EAGER, *ways)]
    runs = {each.name: each.run for each in made if each.run is not None}
    errors = {name: error_against(run(), [t.double() for t in truth]) for name, run in runs.items()}
    processor: dict[str, list[float]] = {}
    figures, _ = latencies_of(runs, rounds, _SECONDS_OF_A_FIGURE, device, processor)
    return [_result(each, figures, processor, errors, device) for each in made]


def _result(
    made: Made,
    figures: dict[str, list[float]],
    processor: dict[str, list[float]],
    errors: dict[str, float],
    device: str,
) -> dict[str, Any]:
    result = {"name": made.name, "statuses": list(made.statuses), "set_up_seconds": made.seconds}
    if made.run is None or made.module is None:
        return {**result, "unavailable": made.reason}
    values, error = figures[made.name], errors[made.name]
    return {
        **result,
        "unavailable": None,
        "seconds": {**Spread.of(values).to_json(), "values": values},
        "speed_up": ratios(figures[EAGER], values).to_json(),
        "processor_speed_up": ratios(processor[EAGER], processor[made.name]).to_json() if EAGER in processor else None,
        "error": error if math.isfinite(error) else None,
        "kernels": kernels_of(made.run, device),
        "weight_bytes": bytes_of(made.module),
        "peak_bytes": peak_of(made.run, device),
    }


def table_of(data: dict[str, Any]) -> Table:
    headings = [
        "model", "batch", "passes", "did", "latency", "quartiles", "speed-up", "quartiles", "by processor", "error",
        "kernels", "weights", "peak",
    ]  # fmt: skip
    table = Table("Passes", headings, left=4)
    for result in data["results"]:
        for each in result["ways"]:
            row = [result["model"], str(result["batch"]), each["name"], _did(each["statuses"])]
            if each["unavailable"] is not None:
                table.add(*row, "–", *[""] * 8)
                table.caption.append(f"{row[0]}, batch {row[1]}, {row[2]}: {each['unavailable']}")
                continue
            sizes = [mebibytes(each["weight_bytes"]), mebibytes(each["peak_bytes"])]
            table.add(*row, *time_cells(each), str(each["kernels"]), *sizes)
    table.caption.append(
        "Speed-up is the time of eager over that of the way, taken within each round; medians with quartiles; by processor,"
        " the same of the processor time. The error is"
        " the largest difference from eager, over the output's largest value. Peak is what one call takes beside the weights."
    )
    table.caption += map(caption, [data["environment"], *data["resumed"]])
    return table


def _did(statuses: Sequence[str]) -> str:
    """The status of a single pass; of several passes, how many did something, and any other status."""
    if len(statuses) < 2:
        return "".join(statuses)
    other = sorted({status for status in statuses if status not in ("applied", "unchanged")})
    return ", ".join([f"{statuses.count('applied')} of {len(statuses)} applied", *other])


def main() -> int:
    parser = command(
        __doc__, models=",".join(PASS_SUBJECTS), batch=[1, 8], rounds=9, device=True, threads=usable_cpus(), scale=True
    )
    parser.add_argument("--dtype", choices=_HALVES, help="cast the models beforehand, so that all ways compute in it")
    parser.add_argument("--ways", help="names, by semicolons (default: all)")
    parser.add_argument("--resume", action="store_true", help="go on where the run that wrote --json was interrupted")
    arguments = parser.parse_args()
    models = arguments.models.split(",")
    refuse_unknown(parser, "model", models, PASS_SUBJECTS)
    names = list(WAYS) if arguments.ways is None else [name.strip() for name in arguments.ways.split(";")]
    refuse_unknown(parser, "way", names, WAYS, separator="; ")
    where = prepared(parser, arguments)
    settings = {
        "models": models,
        "ways": {name: list(WAYS[name]) for name in names},
        "batch": arguments.batch,
        "rounds": arguments.rounds,
        "scale": arguments.scale,
        "device": arguments.device,
        "dtype": arguments.dtype or "float32",
    }
    results: list[dict[str, Any]] = []
    data = {"benchmark": "each_pass", "environment": where, "resumed": [], "settings": settings, "results": results}
    if arguments.resume:
        data = _resumed(parser, arguments.json, data)
        results = data["results"]
    done = {(result["model"], result["batch"]) for result in results}
    for name in models:
        left = [batch for batch in arguments.batch if (name, batch) not in done]
        if not left:
            continue
        asked = _cast(subject(name, arguments.scale), arguments.device, arguments.dtype)
        for batch in left:
            print(f"{time.strftime('%H:%M:%S')}  {name}, batch {batch} …", file=sys.stderr)
            ways = {each: WAYS[each] for each in names}
            measured = measure_batch(asked, batch, ways, arguments.rounds, arguments.device)
            results.append({"model": name, "batch": batch, "ways": measured})
            # Write after each batch size, so that an interrupted run keeps its results.
            write([table_of(data)], data, arguments.json, arguments.markdown)
    table_of(data).show()
    return 0


def _resumed(parser: argparse.ArgumentParser, path: Path | None, data: dict[str, Any]) -> dict[str, Any]:
    """The results of an interrupted run, if it had the same settings and ran on a machine like this one."""
    if path is None or not path.exists():
        parser.error("--resume goes on with the figures of --json, and there are none")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if found["settings"] != data["settings"]:
        parser.error(f"--resume: {path} has the figures of a run with other options")
    then, now = found["environment"], data["environment"]
    other = [key for key in then if key not in ("date", "load_before") and then[key] != now[key]]
    if other:
        parser.error(f"--resume: the figures in {path} were measured with another {other[0]}: measure all of them anew")
    found["resumed"] = [*found.get("resumed", ()), now]
    return found


def _cast(asked: Subject, device: str, dtype: str | None) -> Subject:
    model = asked.model.to(device)
    if dtype is None:
        return Subject(asked.name, model, asked.inputs)
    half: torch.dtype = getattr(torch, dtype)

    def inputs(batch: int) -> tuple[torch.Tensor, ...]:
        return tuple(t.to(half) if t.is_floating_point() else t for t in asked.inputs(batch))

    return Subject(asked.name, model.to(half), inputs)


if __name__ == "__main__":
    # Use a separate cache, so that a second run compiles everything again. Show compiled kernels in profiles.
    with tempfile.TemporaryDirectory(prefix="inductor-") as cache:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        torch._inductor.config.cpp.enable_kernel_profile = True
        sys.exit(main())
