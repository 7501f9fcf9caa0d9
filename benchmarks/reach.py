"""Count how many foldable pairs of a convolution and a BatchNorm are folded, in architectures of transformers or timm.

    python benchmarks/reach.py --json build/reach.json --markdown build/reach.md
    python benchmarks/reach.py --models timm

Whether a pair is foldable is determined without the passes, from one eager run of the original. For comparison, the
table shows what `fuse` of torch.fx folds.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from foldable import foldable_pairs
from measure import caption, command, environment, refuse_unknown
from table import Table, publish
from torch import fx, nn
from torch.fx.experimental.optimization import fuse
from torch.nn.modules.batchnorm import _BatchNorm

from optimizer import optimize

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from architectures import NORMED, ZOO, member
from real_models import REAL_MODELS
from timm_models import TIMM, timm_member

# The share of foldable pairs that must be folded.
GOAL = 0.99

FOLD = "fold-conv-bn"
_SHOWN = 160

# If two collections have a model of the same name, `made` takes the smaller one, in `REAL_MODELS`.
NAMES = tuple(dict.fromkeys((*REAL_MODELS, *ZOO, *NORMED)))
LIBRARIES = {"transformers": NAMES, "timm": TIMM}


def made(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Make a model in eval, and the arguments of one call."""
    if name in REAL_MODELS:
        return REAL_MODELS[name]()
    model, kwargs = timm_member(name) if name in TIMM else member(name)
    return model, (), kwargs


def measure(name: str) -> dict[str, Any] | None:
    """Count the pairs of one model; None if it has no BatchNorm."""
    model, args, kwargs = made(name)
    held = sum(isinstance(module, _BatchNorm) for module in model.modules())
    if not held:
        return None
    pairs = {pair.norm: pair for pair in foldable_pairs(model, args, kwargs)}
    fast = optimize(model, [FOLD], example_inputs=args or None, example_kwargs=kwargs or None)
    (record,) = fast.report.passes
    places = {_norm_at(place.where) for place in record.changes} if record.status == "applied" else set()
    skips = {_norm_at(place.where): place.text for place in record.skips}
    missed = [
        {
            "norm": pair.norm,
            "layer": pair.layer,
            "way": list(pair.way),
            "reason": record.reason or skips.get(norm, "the two aren't recognised as a pair"),
        }
        for norm, pair in pairs.items()
        if norm not in places
    ]
    return {
        "model": name,
        "norms": held,
        "foldable": len(pairs),
        "folded": len(pairs) - len(missed),
        # Pairs that are folded, but not foldable by this count.
        "beyond": sorted(places - set(pairs)),
        "verified": fast.report.verified,
        "status": record.status,
        "missed": missed,
        "fuse": fused(name),
    }


def _norm_at(where: str) -> str:
    """The path of the module that holds the statistics.

    timm's BatchNorms call the function in their own forward, so the report's place ends with the name of the function.
    """
    return where.removesuffix(" (batch_norm)")


def fused(name: str) -> dict[str, Any]:
    """The number of BatchNorms that `fuse` folds, and the error if it fails."""
    # Use another copy, because a failed trace may leave its proxies in the model.
    model, _, _ = made(name)
    try:
        before = fx.symbolic_trace(model)
        after = fuse(model)
    except Exception as error:  # noqa: BLE001 - any error is the result of the peer
        return {"folded": 0, "reason": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {"folded": _norms_called(before) - _norms_called(after), "reason": ""}


def _norms_called(model: nn.Module) -> int:
    assert isinstance(model, fx.GraphModule)
    called = [model.get_submodule(str(node.target)) for node in model.graph.nodes if node.op == "call_module"]
    return sum(isinstance(module, _BatchNorm) for module in called)


def totals(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The sums over all models."""
    foldable, folded = (sum(result[key] for result in results) for key in ("foldable", "folded"))
    return {
        "norms": sum(result["norms"] for result in results),
        "foldable": foldable,
        "folded": folded,
        "share": folded / foldable if foldable else 1.0,
        "fuse": sum(result["fuse"]["folded"] for result in results),
    }


def reach_table(results: Sequence[dict[str, Any]], total: dict[str, Any]) -> Table:
    headings = ["model", "BatchNorms", "foldable", "folded", "share", "fuse", "why fuse has none"]
    table = Table("Foldable pairs that are folded", headings)
    for result in results:
        share = f"{100 * result['folded'] / result['foldable']:.0f} %" if result["foldable"] else ""
        counts = (str(result[key]) for key in ("norms", "foldable", "folded"))
        peer = result["fuse"]
        table.add(result["model"], *counts, share, str(peer["folded"]), _short(peer["reason"]))
    counts = (str(total[key]) for key in ("norms", "foldable", "folded"))
    table.add("all", *counts, f"{100 * total['share']:.1f} %", str(total["fuse"]), "")
    for result in results:
        if result["beyond"]:
            table.caption.append(f"{result['model']}: folded without being counted: {', '.join(result['beyond'])}.")
        if result["foldable"] and result["status"] in ("rolled-back", "failed"):
            table.caption.append(f"{result['model']}: {result['status']}.")
    return table


def missed_table(results: Sequence[dict[str, Any]]) -> Table:
    table = Table("Foldable pairs that are not folded", ["model", "pairs", "for example", "in between", "why"], left=5)
    for result in results:
        # Group by the reason without the paths, so that each kind gets one row.
        kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for miss in result["missed"]:
            kinds.setdefault((miss["reason"].replace(miss["layer"], "…"), *miss["way"]), []).append(miss)
        for misses in kinds.values():
            first = misses[0]
            table.add(result["model"], str(len(misses)), first["norm"], ", ".join(first["way"]), first["reason"])
    return table


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def main() -> int:
    # Small models would run as written, where their graphs are slower.
    os.environ["OPTIMIZE_EXPORT_NO_BENCH"] = "1"
    parser = command(__doc__, check=True)
    parser.add_argument("--models", help="names separated by commas, or a library: transformers (the default) or timm")
    arguments = parser.parse_args()
    asked = arguments.models or "transformers"
    names = list(LIBRARIES.get(asked, asked.split(",")))
    refuse_unknown(parser, "model", names, (*NAMES, *TIMM))
    torch.set_num_threads(arguments.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    where = environment(arguments.threads)

    results = []
    for name in names:
        print(f"{name} …", file=sys.stderr)
        result = measure(name)
        if result is not None:
            results.append(result)
    total = totals(results)
    tables = [reach_table(results, total)]
    if any(result["missed"] for result in results):
        tables.append(missed_table(results))
    met = total["share"] >= GOAL
    tables[-1].caption.append(
        f"{total['folded']} of {total['foldable']} foldable pairs are folded; the goal is {100 * GOAL:.0f} %,"
        f" which is {'met' if met else 'missed'}."
    )
    tables[-1].caption.append(caption(where))
    data = {"benchmark": "reach", "environment": where, "goal": GOAL, "total": total, "models": results}
    publish(tables, data, arguments.json, arguments.markdown)
    return 1 if arguments.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
