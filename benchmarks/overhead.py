"""Measure what `optimize` itself costs: time by number of operations, and memory compared with the size of the model.

    python benchmarks/overhead.py --json build/overhead.json --markdown build/overhead.md

For comparison, torch's counterparts run in the same rounds: `torch.fx.symbolic_trace`, and `fuse` of torch.fx.
"""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import (
    Spread,
    Stopwatch,
    caption,
    command,
    interleaved,
    latencies_of,
    numbers,
    positive,
    prepared,
    ratios,
    refuse_unknown,
    seconds_of,
)
from memory import CASES
from synthetic import OPERATIONS, SHAPES, example_of_graph, graph_of, pairs_folded_by_hand, pairs_of
from table import Table, mebibytes, publish, seconds
from torch import nn
from torch.fx.experimental.optimization import fuse

from optimizer import optimize, report_of
from optimizer.model.settings import rare_collection
from optimizer.model.working_copy import working_copy
from passes import (
    CastPrecision,
    GraphPass,
    JitFusion,
    MergeLinears,
    ModulePass,
    PadChannels,
    Pass,
    PassResult,
    Simplify,
)
from passes.base import Context, ModelTree
from passes.graph.trial import try_on_graphs
from passes.registry import make_passes

# Goal: at most this ratio of the time per operation at the largest size to that at the smallest.
LINEAR = 1.5
# Goal: at most this cost of a folded pair per call, in seconds, above that of a pair folded by hand.
COST_OF_A_PAIR = 2e-6
# Goal: at most this ratio of the live peak of `optimize`, minus that of one forward of the model, to the bytes of the
# result's new tensors. The excess is a copy of one weight that differs by one ulp, some of its rows in float64, and the
# recordings.
HELD_ONCE = 1.05

# By default, glibc keeps freed blocks of up to 32 MiB for later requests, which they may not fit. With this fixed
# threshold it returns all larger blocks to the system at once. Other allocators ignore the variable.
_GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}

# The passes outside the preset that are measured. They run one after another, after those of the preset.
BY_NAME: tuple[Pass, ...] = (
    Simplify(),
    MergeLinears(force=True),
    PadChannels(force=True),
    JitFusion(),
    CastPrecision(how="weights"),
)

TRACE = "symbolic_trace"
COPY = "working copy"
PASSES = "all passes"
WHOLE = "optimize()"
FUSE = "fuse"
EAGER, OURS, BY_HAND = "as written", "folded by optimize()", "folded by hand"


def run_of(item: Pass, tree: ModelTree) -> PassResult:
    """Run a pass as `optimize` does with example inputs. A pass that needs a run of the model gets one."""
    x = example_of_graph()
    context = Context("inference", torch.device("cpu"), (((x,), {}),))

    def run_compiled(watch: AbstractContextManager[Any]) -> None:
        with watch, torch.no_grad():
            tree.root(x)

    def run_inside(watch: AbstractContextManager[Any], number: int = 0) -> None:
        with torch.compiler.set_stance("force_eager"):
            run_compiled(watch)

    if isinstance(item, GraphPass):
        context = replace(context, run_compiled=run_compiled, try_on_graphs=try_on_graphs)
    if isinstance(item, ModulePass):
        context = replace(context, run_inside=run_inside)
    return item.run(tree, context)


def steps_of(model: nn.Module) -> dict[str, float]:
    """The seconds of each step of `optimize`, one after the other.

    The passes have example inputs, so they do all that they can.
    """
    gc.collect()
    watch = Stopwatch()
    # As in `optimize`.
    with rare_collection():
        with watch(COPY):
            root = working_copy(model).root
        tree = ModelTree(root)
        for item in make_passes(None, "inference"):
            with watch(PASSES), watch(item.name):
                run_of(item, tree)
        for item in BY_NAME:
            with watch(item.name):
                run_of(item, tree)
    return watch.seconds


def counts_of(model: nn.Module) -> dict[str, Any]:
    """The numbers of operations, and of changes by each pass; the same on every machine."""
    root = working_copy(model).root
    tree = ModelTree(root)
    passes = (*make_passes(None, "inference"), *BY_NAME)
    changes = {item.name: len(run_of(item, tree).changes) for item in passes}
    traced = torch.fx.symbolic_trace(model).graph.nodes
    return {
        "operations": sum(node.op.startswith("call_") for node in traced),
        "changes": changes,
        "changes_of_optimize": {
            item.name: len(item.changes)
            for item in report_of(optimize(model, example_inputs=(example_of_graph(),))).passes
        },
    }


def measure_graph(shape: str, operations: int, rounds: int) -> dict[str, Any]:
    """Measure all contenders on one graph."""
    model = graph_of(shape, operations)
    contenders: dict[str, Callable[[], dict[str, float]]] = {
        TRACE: lambda: {TRACE: seconds_of(lambda: torch.fx.symbolic_trace(model))},
        "steps": lambda: steps_of(model),
        WHOLE: lambda: {WHOLE: seconds_of(lambda: optimize(model, example_inputs=(example_of_graph(),)))},
        FUSE: lambda: {FUSE: seconds_of(lambda: fuse(model))},
    }
    figures = interleaved(contenders, rounds)
    return {
        "shape": shape,
        **counts_of(model),
        "seconds": {name: {**Spread.of(values).to_json(), "values": values} for name, values in figures.items()},
        "to_symbolic_trace": {name: ratios(values, figures[TRACE]).to_json() for name, values in figures.items()},
    }


def measure_pairs(count: int, rounds: int) -> dict[str, Any]:
    """The seconds per pair, in one call of a model that consists of pairs of a convolution and a BatchNorm."""
    model, x = pairs_of(count), example_of_graph()
    folded = optimize(model, ["fold-conv-bn"], example_inputs=(x,))
    contenders = {EAGER: model, OURS: folded, BY_HAND: pairs_folded_by_hand(model), FUSE: fuse(model)}
    with torch.no_grad():
        figures, _ = latencies_of({name: partial(each, x) for name, each in contenders.items()}, rounds, 0.05, "cpu")
    each = {name: [value / count for value in values] for name, values in figures.items()}
    over = [ours - hand for ours, hand in zip(each[OURS], each[BY_HAND], strict=True)]
    return {
        "pairs": count,
        "folded": len(report_of(folded).passes[0].changes),
        "seconds": {name: Spread.of(values).to_json() for name, values in each.items()},
        "over_by_hand": Spread.of(over).to_json(),
    }


def growth(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The growth of each step's time from the smallest graph to the largest.

    "exponent" is the e in time ~ operations ** e; "per_operation" is the factor by which one operation becomes slower.
    """
    first, last = results[0], results[-1]
    size = last["operations"] / first["operations"]
    found = {}
    for name, figure in last["seconds"].items():
        time = figure["median"] / first["seconds"][name]["median"]
        found[name] = {"exponent": math.log(time) / math.log(size), "per_operation": time / size}
    return found


def measure_memory(mebibytes: int, cases: Sequence[str]) -> list[dict[str, Any]]:
    """Measure each case twice: as in a user's process, and with an allocator that returns freed tensors at once."""
    results = []
    for case in cases:
        result = _memory_of(mebibytes, case, {})
        live = _memory_of(mebibytes, case, _GIVES_BACK)
        results.append({**result, "live_peak_bytes": live["peak_bytes"]})
    return results


def _memory_of(mebibytes: int, case: str, settings: dict[str, str]) -> dict[str, Any]:
    # Use a process for each case, because the peak is that of a process.
    command = [sys.executable, str(Path(__file__).with_name("memory.py")), str(mebibytes), case]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **settings})
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def time_table(results: Sequence[dict[str, Any]]) -> Table:
    names = list(results[0]["seconds"])
    order = [TRACE, FUSE, COPY, *(n for n in names if n not in (TRACE, FUSE, COPY, PASSES, WHOLE))]
    order += [PASSES, WHOLE]
    table = Table("Time by number of operations", ["graph", "operations", *order], left=1)
    for result in results:
        cells = []
        for name in order:
            ratio = "" if name == TRACE else f" ({result['to_symbolic_trace'][name]['median']:.2f}×)"
            cells.append(f"{seconds(result['seconds'][name]['median'])}{ratio}")
        table.add(result["shape"], f"{result['operations']:,}", *cells)
    table.caption.append("In brackets: against symbolic_trace in the same round; all figures are medians.")
    return table


def pairs_table(result: dict[str, Any]) -> Table:
    table = Table("A call of a folded pair", ["", "per pair", "quartiles"], left=1)
    for name, figure in result["seconds"].items():
        table.add(name, seconds(figure["median"]), f"{seconds(figure['low'])} – {seconds(figure['high'])}")
    over, side = result["over_by_hand"], example_of_graph().shape[-1]
    table.caption.append(
        f"{result['pairs']} pairs of a convolution and a BatchNorm on maps of {side} × {side}."
        " By hand: torch's fuse_conv_bn_eval for each pair, with an nn.Identity in the"
        f" BatchNorm's place; fuse (of torch.fx) leaves the call out. A folded pair costs {seconds(over['median'])}"
        f" ({seconds(over['low'])} – {seconds(over['high'])}) more than one that is folded by hand; the goal is at most"
        f" {seconds(COST_OF_A_PAIR)}."
    )
    return table


def growth_table(growths: dict[str, dict[str, dict[str, float]]]) -> Table:
    names = list(next(iter(growths.values())))
    table = Table("Growth from the smallest graph to the largest", ["step", *(f"{shape}" for shape in growths)])
    for name in names:
        cells = [f"{g[name]['per_operation']:.2f} (exponent {g[name]['exponent']:.2f})" for g in growths.values()]
        table.add(name, *cells)
    table.caption.append(f"How much dearer one operation gets: 1 is linear, the goal is at most {LINEAR}.")
    return table


def memory_table(results: Sequence[dict[str, Any]]) -> Table:
    headings = [
        "",
        "model",
        "peak",
        "of the model",
        "live peak",
        "of the model",
        "new tensors",
        "their bytes",
        "beyond a forward, of these",
    ]
    table = Table("Memory", headings)
    for r in results:
        cells = [mebibytes(r["model_bytes"])]
        for peak in (r["peak_bytes"], r["live_peak_bytes"]):
            cells += [mebibytes(peak), f"{100 * peak / r['model_bytes']:.0f} %"]
        beyond = beyond_forward(r, results)
        share = "" if beyond is None else f"{100 * beyond:.1f} %"
        table.add(r["case"], *cells, str(r["new_tensors"]), mebibytes(r["new_bytes"]), share)
    table.caption.append(
        "Peaks are above the loaded model; the live one leaves out what the allocator keeps of freed tensors. New tensors"
        " are those of the result that the model doesn't hold. The last column is the live peak, less that of one forward of"
        f" the model, against their bytes: 100 % is what can't be less, the goal is at most {100 * HELD_ONCE:g} %."
    )
    if not all(r["peak_exact"] for r in results):
        table.caption.append("This system keeps the highest mark of a process: a rise below an earlier one isn't seen.")
    return table


def beyond_forward(result: dict[str, Any], results: Sequence[dict[str, Any]]) -> float | None:
    """The live peak of a case, minus that of a forward if it was measured, divided by the bytes of its new tensors.

    None if there are no new tensors.
    """
    forward = next((other["live_peak_bytes"] for other in results if other["case"] == "forward"), 0)
    return (result["live_peak_bytes"] - forward) / result["new_bytes"] if result["new_bytes"] else None


def misses(
    growths: dict[str, dict[str, dict[str, float]]],
    memory: Sequence[dict[str, Any]] = (),
    pairs: dict[str, Any] | None = None,
) -> list[str]:
    """A sentence for each goal that is missed."""
    found = []
    if pairs is not None and pairs["over_by_hand"]["median"] > COST_OF_A_PAIR:
        found.append(
            f"a folded pair costs {seconds(pairs['over_by_hand']['median'])} per call over one that is folded by hand; the"
            f" goal is {seconds(COST_OF_A_PAIR)}"
        )
    for shape, grown in growths.items():
        found += [
            f"{shape}: one operation of {name} gets {grown[name]['per_operation']:.2f} times as dear from the smallest"
            f" graph to the largest; the goal is {LINEAR:g}"
            for name in (PASSES, *(item.name for item in BY_NAME if item.name in grown), WHOLE)
            if grown[name]["per_operation"] > LINEAR
        ]
    for result in memory:
        beyond = beyond_forward(result, memory)
        if beyond is not None and beyond > HELD_ONCE:
            found.append(
                f"{result['case']}: the live peak beyond a forward is {100 * beyond:.1f} % of the new tensors; the goal is"
                f" {100 * HELD_ONCE:g} %"
            )
        if beyond is None and result["case"].startswith("optimize"):
            found.append(f"{result['case']}: nothing was folded, and the peak is that of something else")
    return found


def main() -> int:
    parser = command(__doc__, check=True)
    parser.add_argument("--nodes", type=numbers, default=[100, 300, 900], help="operations of the synthetic graphs")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="some of: %(default)s")
    parser.add_argument("--repeat", type=positive, default=5, help="rounds")
    parser.add_argument("--pairs", type=int, default=100, help="folded pairs to measure a call of; 0 for none")
    parser.add_argument("--memory-mb", type=int, default=1024, help="MiB of weights to measure memory with; 0 for none")
    parser.add_argument(
        "--memory-cases", default=",".join(CASES), help="what to measure memory of (default: %(default)s)"
    )
    arguments = parser.parse_args()
    shapes = arguments.shapes.split(",")
    refuse_unknown(parser, "shape", shapes, SHAPES)
    cases = arguments.memory_cases.split(",")
    refuse_unknown(parser, "case", cases, CASES)
    where = prepared(parser, arguments)
    sizes = sorted(set(arguments.nodes))

    # Run once over a small graph first: imports and set-up at the first use belong to no contender.
    for shape in shapes:
        measure_graph(shape, 10 * OPERATIONS, 1)
    # Freeze these objects: the garbage collector's walk over them belongs to no contender either. It still walks over
    # the objects that contenders make.
    gc.collect()
    gc.freeze()
    results, growths = [], {}
    for shape in shapes:
        of_shape = []
        for size in sizes:
            print(f"{shape}, {size} operations …", file=sys.stderr)
            of_shape.append(measure_graph(shape, size, arguments.repeat))
        results += of_shape
        if len(of_shape) > 1:
            growths[shape] = growth(of_shape)
    pairs = measure_pairs(arguments.pairs, 5 * arguments.repeat) if arguments.pairs else None
    memory = measure_memory(arguments.memory_mb, cases) if arguments.memory_mb else []

    tables = [time_table(results)]
    tables += [growth_table(growths)] if growths else []
    tables += [pairs_table(pairs)] if pairs else []
    tables += [memory_table(memory)] if memory else []
    missed = misses(growths, memory, pairs)
    tables[-1].caption += missed or ["All goals are met."]
    tables[-1].caption.append(caption(where))
    data = {
        "benchmark": "overhead",
        "environment": where,
        "settings": {"nodes": sizes, "shapes": shapes, "repeat": arguments.repeat, "memory_mb": arguments.memory_mb},
        "goals": {
            "per_operation": LINEAR,
            "seconds_of_a_pair_over_by_hand": COST_OF_A_PAIR,
            "live_peak_to_new_tensors": HELD_ONCE,
            "missed": missed,
        },
        "graphs": results,
        "growth": growths,
        "pairs": pairs,
        "memory": memory,
    }
    publish(tables, data, arguments.json, arguments.markdown)
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
