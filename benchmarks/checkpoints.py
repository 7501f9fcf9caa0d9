"""Measure training in less memory: what `insert-checkpoints` keeps and recomputes, compared with what a user would do.

    python benchmarks/checkpoints.py --json build/checkpoints.json --markdown build/checkpoints.md

The kept bytes and the recomputed FLOPs are counted on fake tensors, and are the same on every machine. Real steps are
measured, too: their seconds, and the bytes that the allocator gave out.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from contenders import sentence_of
from measure import Spread, Stopwatch, caption, command, latency_of, prepared, ratios, refuse_unknown, synchronize
from table import Table, mebibytes, seconds, write
from torch import Tensor, nn
from torch.profiler import ProfilerActivity
from torch.utils.checkpoint import checkpoint

from optimize_export.runtime import usable_cpus
from optimizer.model.working_copy import working_copy
from optimizer.tuning.benchmark import PeakMemory
from passes import InsertCheckpoints
from passes.base import Context, ModelTree
from passes.checkpointing.fake import faked
from passes.checkpointing.live_bytes import LiveBytes
from passes.checkpointing.profile import loss_of, measure, profile, there_before
from passes.checkpointing.solve import Solver

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from goal_steps import GOALS, STEPS, TrainingStep, llama70b, step_of

EAGER = "eager"
BLOCKS = "blocks"
SEGMENTS = "segments"
HALF = "ours-0.5"
THIRD = "ours-0.33"
LOWEST = "ours-min"
UNIFORM = "ours-uniform"
COMPILE = "compile-0.5"

LABELS = {
    EAGER: "eager",
    BLOCKS: "checkpoint, each block",
    SEGMENTS: "checkpoint, √n runs of blocks",
    HALF: "insert-checkpoints, 0.5",
    THIRD: "insert-checkpoints, 0.33",
    LOWEST: "insert-checkpoints, min",
    UNIFORM: "insert-checkpoints, 0.5, uniform",
    COMPILE: "torch.compile, activation_memory_budget=0.5",
}
PASSES = {
    HALF: InsertCheckpoints(0.5),
    THIRD: InsertCheckpoints(0.33),
    LOWEST: InsertCheckpoints("min"),
    UNIFORM: InsertCheckpoints(0.5, "uniform"),
}
# Goals: the share of the forward's FLOPs that may be recomputed, as the mean over the five models in `GOALS`.
GOAL = {HALF: 0.10, THIRD: 0.30}
# For the model of 70 billion parameters: its budgets, and the goals for time and memory.
LARGE_BUDGETS = (0.5, 0.25, 0.1)
LARGE_SECONDS, LARGE_GIB = 60, 3


@dataclass(frozen=True)
class Way:
    """One way to run the training step of a model.

    Attributes:
        name: a key of `LABELS`.
        model: None if this way isn't available.
        reason: the error that made it unavailable; otherwise "".
        seconds: the time to make the model; for torch.compile including its first step.
    """

    name: str
    model: nn.Module | None
    reason: str = ""
    seconds: float = 0.0


class Ways:
    """Makes the ways to run one step. All train the same parameters."""

    def __init__(self, step: TrainingStep, device: str) -> None:
        self._model = step.model.to(device)
        self._step = step
        self.kwargs = on_device(step.kwargs, device)
        self._device = device
        self._makers: dict[str, Callable[[], nn.Module]] = {
            EAGER: self._copy,
            BLOCKS: self._blocks,
            SEGMENTS: self._segments,
            COMPILE: self._compiled,
            **{name: lambda item=item: self._planned(item) for name, item in PASSES.items()},
        }

    def way(self, name: str) -> Way:
        """Make the way of that name. Its seconds don't include the first step, except for torch.compile."""
        started = time.perf_counter()
        try:
            model = self._makers[name]()
            taken = time.perf_counter() - started
            if name == COMPILE:
                with _compiling(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    run(model, self.kwargs)
                taken = time.perf_counter() - started
        except Exception as error:  # noqa: BLE001 - any error means that this way is unavailable; a sentence says so
            return Way(name, None, sentence_of(error))
        return Way(name, model, "", taken)

    def _copy(self) -> nn.Module:
        return working_copy(self._model, "training").root

    def _planned(self, item: InsertCheckpoints) -> nn.Module:
        root = self._copy()

        @contextmanager
        def apart() -> Iterator[Any]:
            yield (), self.kwargs

        # Run the pass alone. It needs no graph, and `optimize` would also compare the result with the original.
        context = Context("training", torch.device(self._device), (((), self.kwargs),), apart=apart)
        item.run(ModelTree(root), context)
        return root

    def _blocks(self) -> nn.Module:
        root = self._copy()
        if getattr(root, "supports_gradient_checkpointing", False):
            root.gradient_checkpointing_enable({"use_reentrant": False})
            return root
        return self._in_runs(root, lambda blocks, _: blocks)

    def _segments(self) -> nn.Module:
        if not self._step.is_chain:
            raise ValueError("its blocks pass on more than one tensor, so several can't be checkpointed as one by hand")
        # About √n segments over all rows together.
        return self._in_runs(self._copy(), lambda blocks, count: max(1, round(blocks / count**0.5)))

    def _in_runs(self, root: nn.Module, runs_of: Callable[[int, int], int]) -> nn.Module:
        rows = {path: list(root.get_submodule(path).children()) for path in self._step.rows}
        count = sum(len(blocks) for blocks in rows.values())
        for path, blocks in rows.items():
            runs = runs_of(len(blocks), count)
            ends = [round(number * len(blocks) / runs) for number in range(runs + 1)]
            parts = [Checkpointed(blocks[start:end]) for start, end in pairwise(ends)]
            home, _, name = path.rpartition(".")
            setattr(root.get_submodule(home), name, nn.ModuleList(parts))
        return root

    def _compiled(self) -> nn.Module:
        return torch.compile(self._copy())


class Checkpointed(nn.Module):
    """Runs several blocks under one `torch.utils.checkpoint`."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self._run, *args, use_reentrant=False, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        for block in self.blocks[:-1]:
            args = (block(*args, **kwargs), *args[1:])
        return self.blocks[-1](*args, **kwargs)


@contextmanager
def _compiling() -> Iterator[None]:
    import torch._functorch.config as config

    with config.patch(activation_memory_budget=0.5):
        yield


def on_device(kwargs: Mapping[str, Any], device: str) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in kwargs.items()}


def run(model: nn.Module, kwargs: dict[str, Any]) -> Tensor:
    """Run one step. When the backward pass starts, only the loss is held, not the model's output."""
    loss = loss_of(model(**kwargs))
    loss.backward()
    return loss.detach()


# ------------------------------------------------------------------------------------------- counts


def counted(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, int]:
    """Run a step on fake tensors; count its peak bytes, and the FLOPs of its forward and of the whole step."""
    with faked(model, (), kwargs) as (_, fakes), LiveBytes(without=there_before(model, (), fakes)) as live:
        loss = loss_of(model(**fakes))
        forward = live.flops
        loss.backward()
        del loss
    return {"peak_bytes": live.peak, "forward_flops": forward, "step_flops": live.flops}


# --------------------------------------------------------------------------------------- real steps


class RealSteps:
    """Runs real steps of one model in several ways. Gradients exist and are added to, as from the second step on."""

    def __init__(self, model: nn.Module, kwargs: dict[str, Any], device: str) -> None:
        self._parameters = list(model.parameters())
        self._buffers = list(model.buffers())
        self._before = [buffer.clone() for buffer in self._buffers]
        self._kwargs = kwargs
        self._device = device
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._truth = self._seen(model)

    def _seen(self, model: nn.Module) -> dict[str, str]:
        """Run a step, from the same state at every call, and return digests of its loss, gradients and buffers.

        A digest takes no memory, unlike a copy.
        """
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(before)
        for parameter in self._parameters:
            parameter.grad.zero_()
        torch.manual_seed(1)
        loss = run(model, self._kwargs)
        gradients = [parameter.grad for parameter in self._parameters]
        return {"loss": _digest([loss]), "gradients": _digest(gradients), "buffers": _digest(self._buffers)}

    def differences(self, model: nn.Module) -> list[str]:
        """Which of loss, gradients and buffers aren't equal to the bit to those of an eager step."""
        return [name for name, digest in self._seen(model).items() if digest != self._truth[name]]

    def seconds(self, model: nn.Module) -> float:
        return latency_of(lambda: run(model, self._kwargs), 1, self._device)

    def allocated(self, model: nn.Module) -> int:
        """The peak of the allocator in a step, in bytes above its level before.

        Temporary memory of kernels is included.
        """
        synchronize(self._device)
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run(model, self._kwargs)
            return torch.cuda.max_memory_allocated() - before
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            run(model, self._kwargs)
        events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
        live = peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            live += event.nbytes()
            peak = max(peak, live)
        return peak


def _digest(tensors: Sequence[Tensor]) -> str:
    found = hashlib.blake2b()
    for tensor in tensors:
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def measure_model(name: str, names: Sequence[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all ways of one model."""
    step = step_of(name, arguments.scale)
    ways = Ways(step, arguments.device)
    made = []
    for each in names:
        print(f"{time.strftime('%H:%M:%S')}  {name}: {LABELS[each]} …", file=sys.stderr)
        made.append(ways.way(each))
    models = {way.name: way.model for way in made if way.model is not None}
    counts = {each: counted(model, ways.kwargs) for each, model in models.items() if each != COMPILE}
    steps = RealSteps(step.model, ways.kwargs, arguments.device)
    figures: dict[str, dict[str, Any]] = {
        each: {"differences": steps.differences(model), "allocated_bytes": steps.allocated(model)}
        for each, model in models.items()
    }
    for each, allocated in on_gpu(name, models, arguments).items():
        figures[each]["gpu_allocated_bytes"] = allocated
    taken: dict[str, list[float]] = {each: [] for each in models}
    order = list(models)
    for number in range(arguments.rounds):
        random.Random(number).shuffle(order)
        for each in order:
            taken[each].append(steps.seconds(models[each]))
    for each, values in taken.items():
        if values:
            figures[each]["seconds"] = {**Spread.of(values).to_json(), "values": values}
            figures[each]["to_eager"] = ratios(values, taken[EAGER]).to_json()
    return {"model": name, "ways": [_result(way, counts, figures.get(way.name, {})) for way in made]}


def on_gpu(name: str, names: Iterable[str], arguments: argparse.Namespace) -> dict[str, int]:
    """The peak of the allocator in a step of each way on a GPU, in addition to that on the CPU.

    Empty if there is no GPU, or if the benchmark runs on it anyway.
    """
    if arguments.device == "cuda" or not torch.cuda.is_available():
        return {}
    step = step_of(name, arguments.scale)
    ways = Ways(step, "cuda")
    made = [way for way in map(ways.way, names) if way.model is not None]
    steps = RealSteps(step.model, ways.kwargs, "cuda")
    return {way.name: steps.allocated(way.model) for way in made}


def _result(way: Way, counts: Mapping[str, dict[str, int]], figures: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {"name": way.name, "unavailable": way.reason or None, "plan_seconds": way.seconds}
    if way.name in counts:
        eager, own = counts[EAGER], counts[way.name]
        result |= {
            "peak_bytes": own["peak_bytes"],
            "peak_share": own["peak_bytes"] / eager["peak_bytes"],
            "recomputed_share": (own["step_flops"] - eager["step_flops"]) / eager["forward_flops"],
        }
    return result | figures


# -------------------------------------------------------------------------------------------- goals


def means(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The mean recomputed share at each budget, if the pass has met the budget on all models in `GOALS`."""
    found = {}
    for name in GOAL:
        shares = [
            way["recomputed_share"]
            for result in results
            if result["model"] in GOALS
            for way in result["ways"]
            if way["name"] == name and way["unavailable"] is None
        ]
        if len(shares) == len(GOALS):
            found[name] = sum(shares) / len(shares)
    return found


def misses(results: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each goal that is missed, and for each budget that is exceeded."""
    found = [
        f"{LABELS[name]}: {100 * mean:.1f} % of the forward are computed again; the goal is {100 * GOAL[name]:.0f} %."
        for name, mean in means(results).items()
        if mean > GOAL[name]
    ]
    for result in results:
        for way in result["ways"]:
            item = PASSES.get(way["name"])
            if item is None or item.memory_budget == "min" or way["unavailable"] is not None:
                continue
            if way["peak_share"] > item.memory_budget:
                share = f"{100 * way['peak_share']:.2f} %"
                found.append(f"{result['model']}, {LABELS[way['name']]}: the peak is {share} of eager's.")
    return found


# ------------------------------------------------------------------------------------------- tables


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    headings = [
        "model", "way", "peak", "of eager's", "computed again", "allocated", "of eager's", "on a GPU", "not the same",
        "plan", "step", "to eager", "quartiles",
    ]  # fmt: skip
    table = Table("Training steps in less memory", headings, left=2)
    absent = []
    for result in results:
        eager = next(way for way in result["ways"] if way["name"] == EAGER)
        for way in result["ways"]:
            row = [result["model"], LABELS[way["name"]]]
            if way["unavailable"] is not None:
                table.add(*row, "–", *[""] * (len(headings) - 3))
                absent.append(f"{row[0]}, {row[1]}: {way['unavailable']}")
            else:
                table.add(*row, *_count_cells(way, eager), *_time_cells(way))
    table.caption.append(
        "*peak*, *computed again*: the most bytes alive in a step, without parameters, gradients, buffers and inputs, and"
        " the FLOPs computed again as a share of the forward's: counted, the same on every machine. *allocated*: the peak"
        " of what the allocator gave out in a real step, which has what kernels take for the time of a call in it. *on a"
        " GPU*: the same there; not run where torch finds none. *not the same*: what isn't that of an eager step to the bit, of loss, gradients and buffers. *plan*: seconds of the"
        " pass, or of compiling. *to eager*: the time of a step over that of eager, taken within each round; medians with"
        " quartiles."
    )
    for name, mean in means(results).items():
        verdict = "met" if mean <= GOAL[name] else "missed"
        table.caption.append(
            f"{LABELS[name]}: on the mean over {', '.join(GOALS)} {100 * mean:.1f} % of the forward's FLOPs are computed"
            f" again; the goal is {100 * GOAL[name]:.0f} %, which is {verdict}."
        )
    table.caption += absent
    return table


def _count_cells(way: Mapping[str, Any], eager: Mapping[str, Any]) -> list[str]:
    cells = ["", "", ""]
    if "peak_bytes" in way:
        again = f"{100 * way['recomputed_share']:.1f} %"
        cells = [mebibytes(way["peak_bytes"]), f"{100 * way['peak_share']:.1f} %", again]
    share = f"{100 * way['allocated_bytes'] / eager['allocated_bytes']:.1f} %"
    gpu = mebibytes(way["gpu_allocated_bytes"]) if "gpu_allocated_bytes" in way else "not run"
    return [*cells, mebibytes(way["allocated_bytes"]), share, gpu, ", ".join(way["differences"])]


def _time_cells(way: Mapping[str, Any]) -> list[str]:
    if "seconds" not in way:
        return [""] * 4
    ratio = way["to_eager"]
    planned = seconds(way["plan_seconds"]) if way["name"] in (*PASSES, COMPILE) else ""
    quartiles = f"{ratio['low']:.2f} – {ratio['high']:.2f}"
    return [planned, seconds(way["seconds"]["median"]), f"{ratio['median']:.2f}×", quartiles]


# ----------------------------------------------------------------------- a model of 70 billion parameters


def measure_large() -> dict[str, Any]:
    """Measure what it takes to plan a step of a model that no machine of this size could train."""
    watch, peak = Stopwatch(time.process_time), PeakMemory()
    plans = []
    started = time.perf_counter()
    with peak:
        with watch("build"):
            step = llama70b()
        with faked(step.model, (), step.kwargs) as (_, fakes):
            with watch("profile"):
                found = profile(step.model, (), fakes)
            solver = Solver(found)
            for budget in LARGE_BUDGETS:
                with watch(f"plan for {budget}"):
                    choice = solver.solve(int(budget * found.peak))
                if choice is None:
                    continue
                with watch(f"check of the plan for {budget}"):
                    own = measure(step.model, (), fakes, choice.plan(found))
                plans.append(
                    {
                        "budget": budget,
                        "peak_bytes": own.peak,
                        "peak_share": own.peak / found.peak,
                        "recomputed_share": (own.flops - found.step_flops) / found.flops,
                    }
                )
    return {
        "parameters": sum(parameter.numel() for parameter in step.model.parameters()),
        "calls": len(found.calls),
        "eager_peak_bytes": found.peak,
        "resident_bytes": peak.bytes,
        "wall_seconds": time.perf_counter() - started,
        "seconds": watch.seconds,
        "plans": plans,
    }


def seconds_of_large(large: Mapping[str, Any]) -> float:
    """The CPU seconds to profile, to plan for the first budget, and to check that plan."""
    taken, budget = large["seconds"], LARGE_BUDGETS[0]
    return sum(taken[name] for name in ("profile", f"plan for {budget}", f"check of the plan for {budget}"))


def large_table(large: Mapping[str, Any]) -> Table:
    headings = ["budget", "peak", "of eager's", "computed again", "plan", "check"]
    table = Table("A plan for a model of 70 billion parameters", headings)
    taken = large["seconds"]
    for plan in large["plans"]:
        budget = plan["budget"]
        table.add(
            f"{budget:g}",
            f"{plan['peak_bytes'] / 2**30:.1f} GiB",
            f"{100 * plan['peak_share']:.1f} %",
            f"{100 * plan['recomputed_share']:.1f} %",
            seconds(taken[f"plan for {budget}"]),
            seconds(taken[f"check of the plan for {budget}"]),
        )
    table.caption.append(
        f"{large['parameters'] / 1e9:.1f} billion parameters, {large['calls']:,} calls, of which an eager step keeps"
        f" {large['eager_peak_bytes'] / 2**30:.1f} GiB: built in {seconds(taken['build'])}, profiled in"
        f" {seconds(taken['profile'])}, both budgets behind the first one from what the first has found; resident memory"
        f" grows by {mebibytes(large['resident_bytes'])}. Profile, first plan and check together take"
        f" {seconds(seconds_of_large(large))}, of one core; the goals are {LARGE_SECONDS} s and {LARGE_GIB} GiB. All times of this table are of the"
        f" processor; the whole took {seconds(large['wall_seconds'])} by the clock."
    )
    return table


def main() -> int:
    parser = command(__doc__, device=True, threads=usable_cpus(), scale=True, check=True)
    parser.add_argument("--models", default=",".join(STEPS), help="names, by commas; none for an empty text")
    parser.add_argument("--ways", default=",".join(each for each in LABELS if each != COMPILE), help="names, by commas")
    parser.add_argument("--compile", default="", help=f"models, by commas, that are measured with {COMPILE} too")
    parser.add_argument("--rounds", type=int, default=7, help="figures per way; 0 for no times (default: %(default)s)")
    parser.add_argument("--llama70b", action="store_true", help="plan a step of 70 billion parameters too (a minute)")
    arguments = parser.parse_args()
    models = [name for name in arguments.models.split(",") if name]
    compiled = [name for name in arguments.compile.split(",") if name]
    refuse_unknown(parser, "model", (*models, *compiled), STEPS)
    names = [EAGER, *(name for name in arguments.ways.split(",") if name != EAGER)]
    refuse_unknown(parser, "way", names, LABELS)
    where = prepared(parser, arguments)

    settings = {"models": models, "ways": names, "compile": compiled}
    settings |= {key: getattr(arguments, key) for key in ("rounds", "scale", "device")}
    results: list[dict[str, Any]] = []
    data: dict[str, Any] = {"benchmark": "checkpoints", "environment": where, "settings": settings, "results": results}
    tables: list[Table] = []
    for name in models:
        own = [*names, COMPILE] if name in compiled and COMPILE not in names else names
        results.append(measure_model(name, own, arguments))
        # Write after each model, so that an interrupted run keeps its results.
        tables = [table_of(results)]
        tables[0].caption.append(caption(where))
        write(tables, data, arguments.json, arguments.markdown)
    data["goals"] = {"recomputed_share": GOAL, "means": means(results), "missed": misses(results)}
    if arguments.llama70b:
        print(f"{time.strftime('%H:%M:%S')}  a model of 70 billion parameters …", file=sys.stderr)
        data["large"] = measure_large()
        tables.append(large_table(data["large"]))
    write(tables, data, arguments.json, arguments.markdown)
    for table in tables:
        table.show()
    for sentence in data["goals"]["missed"]:
        print(sentence, file=sys.stderr)
    return 1 if arguments.check and data["goals"]["missed"] else 0


if __name__ == "__main__":
    # Use a separate cache, so that a second run compiles everything again.
    with tempfile.TemporaryDirectory(prefix="inductor-") as cache:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        sys.exit(main())
