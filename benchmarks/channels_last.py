"""Measure what the channels_last memory format gains or costs per model, compared with what a user would do by hand.

    python benchmarks/channels_last.py --json build/channels_last.json --markdown build/channels_last.md

All contenders have their BatchNorms folded, so they differ only in the memory format. The table also counts the
convolutions with channels_last weights, the places where a feature map loses the format, and the elements that are
copied only to change the format. These counts are the same on every machine.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from contenders import Run, Workshop, calling
from latency import measure_batch, time_cells
from measure import caption, command, prepared, refuse_unknown
from models import MAP_SUBJECTS, Plain, Subject, subject
from table import Table, write
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.profiler import ProfilerActivity, profile

from optimize_export.runtime import usable_cpus
from optimizer import optimize, report_of
from passes.graph.layouts import CHANNELS_LAST_FORMATS, is_channels_last

FOLD = "fold"
OURS = "ours"
USER = "user"

LABELS = {
    FOLD: "folded",
    OURS: "folded, channels-last",
    USER: "folded, model.to(memory_format=…)",
}
_FOLDS = ["fold-conv-bias", "fold-conv-bn"]


class FormatWorkshop(Workshop):
    """Makes the contenders for one model: all folded, in different memory formats.

    Attributes:
        models: the module of each contender of the last batch.
    """

    def __init__(self, asked: Subject, folder: Path, device: str, threads: int) -> None:
        super().__init__(asked, folder, device, threads)
        self.models: dict[str, nn.Module] = {}
        self.makers = {FOLD: self._fold, OURS: self._ours, USER: self._user}

    def _run(self, name: str, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Run:
        self.models[name] = model
        return calling(Plain(model), inputs)

    def _folded(self) -> nn.Module:
        return self._once(FOLD, lambda: optimize(self._model, _FOLDS, example_inputs=self.inputs(2)))

    def _fold(self, inputs: tuple[torch.Tensor, ...]) -> Run:
        return self._run(FOLD, self._folded(), inputs)

    def _ours(self, inputs: tuple[torch.Tensor, ...]) -> Run:
        # Optimize for each batch size: the size of the maps determines which layers are worth converting.
        return self._run(OURS, optimize(self._model, [*_FOLDS, "channels-last"], example_inputs=inputs), inputs)

    def _user(self, inputs: tuple[torch.Tensor, ...]) -> Run:
        memory_format = CHANNELS_LAST_FORMATS[inputs[0].dim()]
        model = deepcopy(self._folded()).to(memory_format=memory_format)
        return self._run(USER, model, tuple(tensor.contiguous(memory_format=memory_format) for tensor in inputs))

    def counts(self, name: str, batch: int) -> dict[str, Any]:
        """Count the layouts that one run of the contender shows."""
        model, inputs = self.models[name], self.inputs(batch)
        if name == USER:
            inputs = tuple(tensor.contiguous(memory_format=CHANNELS_LAST_FORMATS[tensor.dim()]) for tensor in inputs)
        records = (
            [record for record in report_of(model).passes if record.name == "channels-last"] if name == OURS else []
        )
        made = [change.text for record in records for change in record.changes]
        convolutions = [module for module in model.modules() if isinstance(module, _ConvNd)]
        return {
            "convolutions": len(convolutions),
            "channels_last": sum(map(_is_last, convolutions)) + sum(text.startswith("weight in") for text in made),
            "kept_contiguous": made.count("kept in contiguous format"),
            "lost": [remark.where for record in records for remark in record.remarks],
            "moved": _moved(model, inputs),
        }


def _moved(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> int:
    """The number of elements of feature maps that the second call copies, which it does only to change the format."""
    with torch.no_grad():
        model(*inputs)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as found:
            model(*inputs)
    shapes = [event.input_shapes[0] for event in found.events() if event.name == "aten::copy_"]
    return sum(math.prod(shape) for shape in shapes if len(shape) in CHANNELS_LAST_FORMATS)


def _is_last(module: _ConvNd) -> bool:
    return module.weight.dim() in CHANNELS_LAST_FORMATS and is_channels_last(module.weight)


def measure_model(name: str, batches: Sequence[int], rounds: int, scale: float, device: str, threads: int) -> Any:
    """Measure one model: one result per batch size."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        workshop = FormatWorkshop(subject(name, scale), Path(folder), device, threads)
        for batch in batches:
            print(f"{time.strftime('%H:%M:%S')}  {name}, batch {batch} …", file=sys.stderr)
            contenders = measure_batch(workshop, batch, list(LABELS), rounds, device, base=FOLD)
            for contender in contenders:
                if contender["unavailable"] is None:
                    contender["counts"] = workshop.counts(contender["name"], batch)
            results.append({"model": name, "batch": batch, "contenders": contenders})
    return results


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    headings = [
        "model", "batch", "contender", "latency", "quartiles", "speed-up", "quartiles", "by processor", "error", "in channels_last",
        "kept contiguous", "lost", "moved",
    ]  # fmt: skip
    table = Table("channels_last", headings, left=3)
    absent = []
    for result in results:
        for contender in result["contenders"]:
            row = [result["model"], str(result["batch"]), LABELS[contender["name"]]]
            if contender["unavailable"] is not None:
                table.add(*row, "–", *[""] * (len(headings) - 4))
                absent.append(f"{row[0]}, batch {row[1]}, {row[2]}: {contender['unavailable']}")
                continue
            counts = contender["counts"]
            weights = f"{counts['channels_last']} of {counts['convolutions']}"
            kept, lost, moved = counts["kept_contiguous"], len(counts["lost"]), f"{counts['moved']:,}"
            table.add(*row, *time_cells(contender), weights, str(kept), str(lost), moved)
    table.caption.append(
        "Speed-up is the time of the folded model over that of the contender, taken within each round; medians with"
        " quartiles. *lost*: places where a map comes out of an operation in another format, as the pass reports them;"
        " *moved*: elements of maps that torch copies in one call, which it does to change their format."
    )
    table.caption += absent
    return table


def main() -> int:
    parser = command(
        __doc__, models=",".join(MAP_SUBJECTS), batch=[1, 8], rounds=11, device=True, threads=usable_cpus(), scale=True
    )
    arguments = parser.parse_args()
    models = arguments.models.split(",")
    refuse_unknown(parser, "model", models, MAP_SUBJECTS)
    where = prepared(parser, arguments)
    settings = {"models": models, **{key: getattr(arguments, key) for key in ("batch", "rounds", "scale", "device")}}
    results: list[dict[str, Any]] = []
    data = {"benchmark": "channels_last", "environment": where, "settings": settings, "results": results}
    for name in models:
        results += measure_model(
            name, arguments.batch, arguments.rounds, arguments.scale, arguments.device, arguments.threads
        )
        # Write after each model, so that an interrupted run keeps its results.
        table = table_of(results)
        table.caption.append(caption(where))
        write([table], data, arguments.json, arguments.markdown)
    table.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
