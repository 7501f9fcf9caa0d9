"""Measure what jit-fusion gains over eager for five pointwise operations in one kernel, by number of elements.

    python benchmarks/fusion.py --json build/fusion.json --markdown build/fusion.md

The operations are x · 0.5 · (1 + erf(x / 1.41421)). They are compared with torch.compile of the same function, and with
a copy of the same bytes. No kernel that reads and writes these bytes once can be faster than the copy.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from measure import Spread, caption, command, latencies_of, numbers, prepared, ratios
from table import Table, publish, seconds
from torch import nn

from optimize_export.runtime import usable_cpus
from optimizer import optimize, report_of

EAGER, OURS, COMPILE, COPY = "eager", "jit-fusion", "torch.compile", "copy of the same bytes"
# The duration of one measurement in one round; shorter calls are repeated.
_SECONDS_OF_A_FIGURE = 0.05
# The largest number of elements that the pass gets; the comparison needs many times their memory.
_MOST_GIVEN = 10**7
# Goals on a GPU: on tensors that don't fit in its caches at least this many times as fast as eager, and at least this
# share of the bandwidth of a copy; of any size hardly slower than eager.
GOALS = {"speed_up": 4.0, "of_copy": 0.85}
LEAST_SPEED_UP = 0.98


class ByHand(nn.Module):
    """GELU, operation by operation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 * (1 + torch.erf(x / 1.41421))


def measure(elements: int, rounds: int, device: str, dtype: torch.dtype, *, busy: bool) -> dict[str, Any]:
    """Measure all contenders on one tensor, interleaved.

    Args:
        busy: whether to measure the processor's time, which other processes change less than the latency.
    """
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    # As in a model, at two batch sizes. The pass times its kernel on these elements.
    given = x[: min(elements, _MOST_GIVEN)].reshape(2, -1)
    fast = optimize(ByHand().eval().to(device), ["jit-fusion"], example_inputs=(given,))
    (record,) = report_of(fast).passes
    detail: Any = record.detail
    eager = ByHand().eval()
    torch._dynamo.mark_dynamic(x, 0)
    compiled, target = torch.compile(eager), torch.empty_like(x)
    runs: dict[str, Callable[[], Any]] = {
        EAGER: lambda: eager(x),
        OURS: lambda: fast(x),
        COMPILE: lambda: compiled(x),
        COPY: lambda: target.copy_(x),
    }
    with torch.no_grad():
        for run in runs.values():
            run()
            run()
        used: dict[str, list[float]] = {}
        figures, _ = latencies_of(runs, rounds, _SECONDS_OF_A_FIGURE, device, used)
        figures = {name: used[name] for name in runs} if busy else figures
        error = (fast(x).double() - ByHand()(x.double())).abs().max().item()
    return {
        "elements": elements,
        # None if the pass left the operations as they were, which `notes` explains, or notes of the report
        "kernels": None if detail is None else [detail.kernels_before, len(detail.units)],
        "notes": [*(skip.text for skip in record.skips), *report_of(fast).notes],
        "error": error,
        "ways": {name: {**Spread.of(values).to_json(), "values": values} for name, values in figures.items()},
        "speed_up": {name: ratios(figures[EAGER], values).to_json() for name, values in figures.items()},
        "of_copy": {name: ratios(figures[COPY], values).to_json() for name, values in figures.items()},
    }


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    table = Table("Fusion", ["elements", "way", "latency", "quartiles", "speed-up", "quartiles", "of a copy"], left=2)
    for result in results:
        for name, spread in result["ways"].items():
            gain, part = result["speed_up"][name], result["of_copy"][name]
            table.add(
                f"{result['elements']:,}",
                name,
                seconds(spread["median"]),
                f"{seconds(spread['low'])} – {seconds(spread['high'])}",
                f"{gain['median']:.2f}×",
                f"{gain['low']:.2f} – {gain['high']:.2f}",
                f"{100 * part['median']:.0f} %",
            )
    table.caption.append(
        "Speed-up is the time of eager over that of the way, of a copy that of the copy, within each round."
    )
    return table


def misses(results: Sequence[dict[str, Any]], device: str) -> list[str]:
    """A sentence for each goal that is missed. The goals are for a GPU."""
    found = []
    for result in results if device == "cuda" else ():
        for figure, goal in GOALS.items() if result["elements"] >= 10**7 else [("speed_up", LEAST_SPEED_UP)]:
            got = result[figure][OURS]["median"]
            if got < goal:
                found.append(f"{result['elements']:,} elements: {figure} is {got:.2f}; the goal is {goal:g}")
    return found


def main() -> int:
    parser = command(__doc__, rounds=11, device=True, threads=usable_cpus(), check=True)
    parser.add_argument("--elements", type=numbers, default=[10**n for n in range(3, 9)], help="default: 10^3 to 10^8")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    where = prepared(parser, arguments)
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    busy = arguments.device == "cpu" and arguments.threads == 1
    results = [measure(count, arguments.rounds, arguments.device, dtype, busy=busy) for count in arguments.elements]
    table = table_of(results)
    if busy:
        table.caption.append("The times are those of the processor.")
    table.caption.append(caption(where))
    missed = misses(results, arguments.device)
    settings = {"rounds": arguments.rounds, "device": arguments.device, "dtype": arguments.dtype}
    data = {"benchmark": "fusion", "environment": where, "settings": settings, "results": results, "missed": missed}
    publish([table], data, arguments.json, arguments.markdown)
    for sentence in missed:
        print(sentence, file=sys.stderr)
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="inductor-") as cache:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        sys.exit(main())
