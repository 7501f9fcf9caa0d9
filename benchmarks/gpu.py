"""Measure on a GPU whether this project pays, compared with what a user would write by hand.

    python benchmarks/gpu.py --seconds-left 570 --markdown build/gpu.md

A machine with a GPU may be lent for ten minutes only. So each row is appended to a file of JSON lines at once (--json),
cheap rows come first, and a run goes on where the last one on such a machine was cut. Every contender is timed in turn
with its base (mostly eager) in the same run, and all ratios are over that. `--device cpu --small` runs the same code on
small models without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from contenders import BUDGET, EAGER, EXACT, Made, Run, calling, sentence_of
from deployments import ACCURACY, Deployments
from file_runs import OnnxRun, size_of
from fusion import ByHand
from latency import measure_batch
from measure import caption, command, positive, prepared, refuse_unknown, synchronize
from models import Plain, Subject, bring_to_life
from table import Table, seconds, write
from torch import nn

from optimize_export.gpu_settings import GpuSettings
from optimize_export.runtime import usable_cpus
from optimizer import optimize, report_of
from passes.cast_precision import fast_dtypes

# Half precision is float16, with convolutions in channels_last. max-autotune also records CUDA graphs.
_MODES = {"compile": None, "compile-reduce-overhead": "reduce-overhead", "compile-max-autotune": "max-autotune"}
EXACT_PEERS = (EAGER, *_MODES, "onnx", "onnx-graph")
PEERS = (
    *EXACT_PEERS, "eager-tf32", "eager-half", "onnx-tf32", "onnx-half", "onnx-half-graph",
    *(f"{name}-{precision}" for name in _MODES for precision in ("tf32", "half")),
)  # fmt: skip
BEST_PEER = "compile-max-autotune-half"
_SHORT = {f"{EXACT}-short": "exact", f"{BUDGET}-short": ACCURACY}
OURS = (EXACT, BUDGET, *_SHORT)
# Casts that are advised, with the memory format of convolutions.
_CASTS = {
    "eager-half": (torch.half, torch.channels_last),
    "channels-last": (torch.float32, torch.channels_last),
    "half": (torch.half, torch.contiguous_format),
    "half-channels-last": (torch.half, torch.channels_last),
    "bfloat16": (torch.bfloat16, torch.contiguous_format),
}
_CUDNN = "cudnn-benchmark"
_PASSES = {
    "padded": "pad-channels:force=true",
    "half-padded": "pad-channels:force=true",
    "jit-fusion-torchscript": "jit-fusion:backend=torchscript",
    "jit-fusion-inductor": "jit-fusion:backend=inductor",
}
# All others have eager.
_BASES = {"half-channels-last": "half", "half-padded": "half"}

# A family and a head of transformers, the options of its configuration, and those that make it small.
_FEW = {"depths": [1] * 4, "hidden_sizes": [16, 32, 32, 64]}
_MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "resnet50": ("ResNet", "ForImageClassification", {}, _FEW),
    "vit_base": ("ViT", "ForImageClassification", {}, {"num_hidden_layers": 1, "image_size": 64}),
    "efficientnet_b0": (
        "EfficientNet", "ForImageClassification",
        {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280},
        {"kernel_sizes": [3, 5], "in_channels": [32, 16], "out_channels": [16, 24], "depthwise_padding": [],
         "strides": [1, 2], "num_block_repeats": [1, 1], "expand_ratios": [1, 6]},
    ),
    "convnext_tiny": ("ConvNext", "ForImageClassification", {"layer_scale_init_value": 0.3}, _FEW),
    "bert_base": ("Bert", "Model", {}, {"num_hidden_layers": 1}),
    "gpt2": ("GPT2", "Model", {"use_cache": False}, {"n_layer": 1}),
}  # fmt: skip
_ODD, _POINTWISE = "odd_linear", "pointwise"
# The models and contenders of each table.
TABLES = {
    "Latency": (tuple(_MODELS), (*PEERS, *OURS)),
    "Run settings": (tuple(_MODELS), (_CUDNN, "eager-tf32", *(name for name in _CASTS if name != "eager-half"))),
    "Run settings: odd sizes": ((_ODD,), (EAGER, "padded", "half", "half-padded")),
    "Pointwise": ((_POINTWISE,), (EAGER, "jit-fusion-torchscript", "jit-fusion-inductor", "compile", "copy")),
}
NAMES = tuple(dict.fromkeys(name for _, names in TABLES.values() for name in names))

# The seconds that a contender may take before it was measured on any case, by its first words. Cheap ones come first.
_COSTS = {
    "compile-max-autotune": 300, "compile-reduce-overhead": 40, "compile": 45, "onnx": 30,
    "ours-exact-short": 110, "ours-budget-short": 110, "ours": 240, "eager": 3, "": 6,
}  # fmt: skip
# These two, which compute much and launch much, come before contenders of the others that cost more than an eighth.
_HEADLINES, _EARLIER = ("resnet50/32", "vit_base/1"), 8
_SECONDS_OF_A_FIGURE = 0.03

# The process of a first answer. It prints the seconds since its parent started it.
_FIRST_ANSWER = """
import sys, time, torch
from optimize_export import load
bundle, inputs, device, started = sys.argv[1:]
run = load(bundle, device=device)
run(*torch.load(inputs, map_location=device))
if device == "cuda":
    torch.cuda.synchronize()
print(time.time() - float(started))
"""

Row = dict[str, Any]


class Unit(NamedTuple):
    """What one row measures."""

    model: str
    batch: int
    contender: str

    @property
    def case(self) -> str:
        return f"{self.model}/{self.batch}"

    @property
    def cost(self) -> float:
        return next(cost for start, cost in _COSTS.items() if self.contender.startswith(start))


def units_of(small: bool) -> list[Unit]:
    """All units, in the order in which they are measured: max-autotune last."""
    batches: dict[str, tuple[int, ...]] = dict.fromkeys(_MODELS, (2,) if small else (1, 32))
    batches |= {_ODD: (64,) if small else (4096,), _POINTWISE: tuple(10**n for n in range(5, 7 if small else 9))}
    units = [
        Unit(model, batch, name)
        for title, (models, names) in TABLES.items()
        for model in models
        for batch in (batches[model][-1:] if title == "Run settings" else batches[model])
        for name in names
    ]

    def place(unit: Unit) -> tuple[bool, float]:
        is_last = unit.contender.startswith("compile-max-autotune")
        return is_last, unit.cost / (_EARLIER if unit.case in _HEADLINES else 1)

    return sorted(dict.fromkeys(units), key=place)


def subject_of(name: str, small: bool) -> Subject:
    """The model with drawn weights and its own BatchNorm statistics, and its inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == _POINTWISE:
            return Subject(name, ByHand().eval(), _drawn())
        if name == _ODD:
            layers = nn.Sequential(nn.Linear(1001, 3999), nn.GELU(), nn.Linear(3999, 999))
            return Subject(name, bring_to_life(layers), _drawn(1001))
        import transformers

        family, head, options, fewer = _MODELS[name]
        config = getattr(transformers, f"{family}Config")(**options, **(fewer if small else {}))
        model = getattr(transformers, f"{family}{head}")(config)
        if name == "efficientnet_b0":
            # Its window is larger than the map, which OpenVINO refuses and torch.compile computes for seconds.
            model.efficientnet.pooler = nn.AdaptiveAvgPool2d(1)
    if hasattr(config, "vocab_size"):
        tokens = _drawn(32 if small else 128, below=config.vocab_size)
        return Subject(name, bring_to_life(model), tokens, transformer=True)
    side = 64 if small else 224
    return Subject(name, bring_to_life(model, *_drawn(3, side, side)(4)), _drawn(3, side, side), name == "vit_base")


def _drawn(*sizes: int, below: int | None = None) -> Callable[[int], tuple[torch.Tensor, ...]]:
    def draw(batch: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        if below is not None:
            return (torch.randint(0, below, (batch, *sizes), generator=generator),)
        return (torch.randn(batch, *sizes, generator=generator),)

    return draw


class _Cast(nn.Module):
    """A model cast by hand, with the casts of its inputs. The outputs keep the dtype."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, memory_format: torch.memory_format) -> None:
        super().__init__()
        self._dtype, self._format = dtype, memory_format
        self.model = Plain(deepcopy(model)).to(dtype=dtype, memory_format=memory_format)  # type: ignore[call-overload]
        self.eval()

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.model(*map(self._cast, inputs))

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        cast = tensor.to(self._dtype) if tensor.is_floating_point() else tensor
        return cast.contiguous(memory_format=self._format) if tensor.dim() == 4 else cast


class GpuWorkshop(Deployments):
    """Makes all contenders for one model. Ours are tuned for `tune_seconds`, and the short ones for `short_seconds`."""

    def __init__(
        self, subject: Subject, folder: Path, device: str, threads: int, tune_seconds: float, short_seconds: float
    ) -> None:
        super().__init__(subject, folder, device, threads, tune_seconds)
        for name, mode in _MODES.items():
            for suffix in ("", "-tf32", "-half"):
                self.makers[name + suffix] = partial(self._in_mode, mode, suffix == "-half")
        for name, cast in _CASTS.items():
            self.makers[name] = partial(self._by_hand, *cast)
        for name, accuracy in _SHORT.items():
            self.makers[name] = partial(self._tuned, name=name, accuracy=accuracy, tune_seconds=short_seconds)
        for name, item in _PASSES.items():
            self.makers[name] = partial(self._passed, item, "half" in name)
        for name in ("onnx-graph", "onnx-half", "onnx-half-graph"):
            self.makers[name] = partial(self._onnx, "half" in name, "graph" in name)
        # A copy computes nothing that could be compared.
        self.makers |= {_CUDNN: self.makers[EAGER], "copy": partial(calling, lambda x: (x.clone(),)[:0])}

    def inputs(self, batch: int) -> tuple[torch.Tensor, ...]:
        return self._once(f"inputs_{batch}", lambda: super(GpuWorkshop, self).inputs(batch))

    def truth(self, batch: int) -> tuple[torch.Tensor, ...]:
        return self._once(f"truth_{batch}", lambda: super(GpuWorkshop, self).truth(batch))

    def first_answer(self, name: str, batch: int) -> float:
        """The seconds of a new process until it has imported `load`, loaded the bundle of a contender and called it."""
        bundle, given = self._folder / f"{name}_{batch}", self._folder / "inputs.pt"
        torch.save(tuple(tensor.cpu() for tensor in self.inputs(batch)), given)
        command = [sys.executable, "-c", _FIRST_ANSWER, str(bundle), str(given), self._device, str(time.time())]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode:
            raise RuntimeError(f"in a new process: {done.stderr.strip().splitlines()[-1:]}")
        return float(done.stdout.split()[-1])

    def _settings(self, name: str) -> GpuSettings:
        needs_gpu = name == _CUDNN or "graph" in name or "reduce-overhead" in name
        if needs_gpu and self._device != "cuda":
            raise RuntimeError(f"{'cuDNN' if name == _CUDNN else 'a CUDA graph'} needs a GPU")
        return GpuSettings(matmul=False, cudnn=False, benchmark=True) if name == _CUDNN else super()._settings(name)

    def _in_mode(self, mode: str | None, half: bool, inputs: tuple[torch.Tensor, ...]) -> Run:
        model = _Cast(self._model, *_CASTS["eager-half"]) if half else self._plain
        run = calling(torch.compile(model, mode=mode), inputs)
        # The first call compiles, and the second records.
        run()
        run()
        return run

    def _by_hand(self, dtype: torch.dtype, form: torch.memory_format, inputs: tuple[torch.Tensor, ...]) -> Run:
        if dtype is torch.bfloat16 and "bfloat16" not in fast_dtypes(torch.device(self._device)):
            raise RuntimeError("this processor has no instructions for bfloat16")
        return calling(_Cast(self._model, dtype, form), inputs)

    def _onnx(self, half: bool, graph: bool, inputs: tuple[torch.Tensor, ...]) -> Made:
        cast = _Cast(self._model, *_CASTS["half"]) if half else None
        path = self._plain_file(inputs, "half" if half else "plain", cast)
        return Made(OnnxRun(path, inputs, self._device, self._threads, cuda_graph=graph), size_of(path))

    def _passed(self, item: str, half: bool, inputs: tuple[torch.Tensor, ...]) -> Run:
        model = _Cast(self._model, *_CASTS["half"]) if half else self._model
        # Verify on few elements and at two batch sizes, as in a model.
        examples = inputs if inputs[0].dim() > 1 else (inputs[0][: 1 << 16].reshape(2, -1),)
        fast = optimize(model, [item], example_inputs=examples)
        (record,) = report_of(fast).passes
        if record.status != "applied":
            raise RuntimeError(f"{record.name} is {record.status}")
        run = calling(Plain(fast), inputs)
        run()
        return run


class Rows:
    """The rows of this machine in a file of JSON lines, to which new ones are appended.

    A line `where` names the machine, versions and settings of the lines after it. A line `started` without a row after it
    is that of a run that was cut there.

    Attributes:
        found: the rows by case and contender.
        starts: how often each was started, by case and contender.
    """

    def __init__(self, path: Path, where: Mapping[str, Any]) -> None:
        self._path, self.found = path, dict[tuple[str, str], Row]()
        self.starts: Counter[tuple[str, str]] = Counter()
        path.parent.mkdir(parents=True, exist_ok=True)
        last = None
        for entry in map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.is_file() else ()):
            if "where" in entry:
                last = entry["where"]
            elif last == where and "started" in entry:
                self.starts[tuple(entry["started"])] += 1
            elif last == where and "case" in entry:
                self.found[entry["case"], entry["contender"]] = entry
        if last != where:
            self.append({"where": where})

    def append(self, entry: Mapping[str, Any]) -> None:
        # In one write, so that no line is cut.
        with self._path.open("ab", buffering=0) as file:
            file.write(f"{json.dumps(entry, allow_nan=False)}\n".encode())


def measure(workshop: GpuWorkshop, unit: Unit, rounds: int, device: str) -> Row:
    """Make a contender, time it in turn with its base, and return the row without its place."""
    base = _BASES.get(unit.contender, EAGER)
    try:
        names = list(dict.fromkeys((base, unit.contender)))
        found = measure_batch(workshop, unit.batch, names, rounds, device, base, _SECONDS_OF_A_FIGURE)
        if absent := next((each for each in found if each["unavailable"]), None):
            of_base = f"{base}: " if absent["name"] != unit.contender else ""
            return {"unavailable": of_base + absent["unavailable"]}
        (times, own), last = [found[place]["seconds"]["values"] for place in (0, -1)], found[-1]
        gain = statistics.median(times) / statistics.median(own)
        row = {"unavailable": None, "base": base, "seconds": own, "base_seconds": times, "gain": gain}
        row |= {key: last[key] for key in ("error", "cosine", "set_up_seconds", "choice", "tuning")}
        if unit.contender in OURS:
            row["first_answer_seconds"] = workshop.first_answer(unit.contender, unit.batch)
        return row
    except Exception as error:  # noqa: BLE001 - any error means that this way is unavailable; the row says so
        return {"unavailable": sentence_of(error)}


_HEADINGS = ("case", "contender", "latency", "gain", "over", "cosine", "set-up", "first answer", "choice, or why not")


def cells_of(row: Row) -> tuple[str, ...]:
    """A row in words, under `_HEADINGS`."""
    if row["unavailable"]:
        return row["case"], row["contender"], "–", *[""] * 5, row["unavailable"]
    cosine = "" if row["cosine"] is None else f"{row['cosine']:.7f}"
    first = seconds(row["first_answer_seconds"]) if "first_answer_seconds" in row else ""
    times, made = seconds(statistics.median(row["seconds"])), seconds(row["set_up_seconds"])
    return row["case"], row["contender"], times, f"{row['gain']:.2f}×", row["base"], cosine, made, first, row["choice"]


def tables_of(rows: Sequence[Row]) -> list[Table]:
    """All tables, and the goals in the last one."""
    tables = []
    models = [model for models, _ in TABLES.values() for model in models]
    ordered = sorted(rows, key=lambda row: (models.index(row["model"]), row["batch"], NAMES.index(row["contender"])))
    for title, (own, names) in TABLES.items():
        tables.append(Table(title, _HEADINGS, left=2))
        for row in ordered:
            if row["model"] in own and row["contender"] in names:
                tables[-1].add(*cells_of(row))
    tables[0].caption.append(
        "The gain is the median time of the base over that of the contender, timed in turn. The set-up includes the first"
        " calls. Compilers use again what they compiled for earlier rows of the same run."
    )
    goals = Table("Goals", ["goal", "measured", "met"], left=2, caption=["Judged by the rows that are there."])
    for goal in goals_of(rows):
        goals.add(goal["goal"], goal["measured"], "yes" if goal["met"] else "no")
    return [*tables, goals]


def goals_of(rows: Sequence[Row]) -> list[Row]:
    """The goals, judged by the rows that are there. A goal without figures isn't met."""
    models, names = TABLES["Latency"]
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["model"] in models and row["contender"] in names:
            found = cases.setdefault(row["case"], {})
            found |= {} if row["unavailable"] else {row["contender"]: row}
    firsts = [row["first_answer_seconds"] for row in rows if "first_answer_seconds" in row]
    shown = f"at most {max(firsts):.1f} s, of {len(firsts)} bundles" if firsts else "not measured"
    found = {
        "exact: at least 0.97 of the best exact peer on each case": _never_behind(cases, EXACT, EXACT_PEERS),
        f"accuracy {ACCURACY}: at least 0.97 of the best peer on each case": _never_behind(cases, BUDGET, PEERS),
        f"accuracy {ACCURACY}: overall at least 1.0 times {BEST_PEER}, and 1.1 times any other peer": _ahead(cases),
        "the first answer of `load` in a new process within 10 s": (shown, bool(firsts) and max(firsts) <= 10),
    }
    return [{"goal": goal, "measured": measured, "met": met} for goal, (measured, met) in found.items()]


def _never_behind(cases: Mapping[str, Mapping[str, Row]], ours: str, peers: Sequence[str]) -> tuple[str, bool]:
    """Compare ours with the fastest peer of the budget's accuracy, on each case."""
    behind = []
    for case, rows in cases.items():
        gains = {name: row["gain"] for name, row in rows.items() if (row["cosine"] or 0) >= ACCURACY}
        gain, best = max(((gains[name], name) for name in peers if name in gains), default=(0.0, ""))
        if ours not in gains or not best:
            behind.append(f"{case}: {'no peer' if ours in gains else 'not measured'} with that accuracy")
        elif gains[ours] < 0.97 * gain:
            behind.append(f"{case}: {gains[ours] / gain:.2f}× {best}")
    return "; ".join([f"{len(cases) - len(behind)} of {len(cases)}", *behind]), bool(cases) and not behind


def _ahead(cases: Mapping[str, Mapping[str, Row]]) -> tuple[str, bool]:
    """The geometric mean of the gains over each peer, over the cases in which both are available."""
    gains = {}
    for peer in PEERS:
        if found := [rows[BUDGET]["gain"] / rows[peer]["gain"] for rows in cases.values() if {BUDGET, peer} <= {*rows}]:
            gains[peer] = statistics.geometric_mean(found)
    met = BEST_PEER in gains and all(gain >= (1.0 if peer == BEST_PEER else 1.1) for peer, gain in gains.items())
    shown = [f"{gain:.2f}× {peer}" for peer, gain in sorted(gains.items(), key=lambda item: item[1])]
    return "; ".join(shown) or "not measured", met


def main() -> int:
    parser = command(__doc__, rounds=15, device=True, threads=usable_cpus(), check=True)
    parser.set_defaults(device="cuda", json=Path("benchmarks/results/gpu_by_hand.jsonl"))
    parser.add_argument("--cases", help="models, or cases such as resnet50/32, by commas (default: all)")
    parser.add_argument("--contenders", default=",".join(NAMES), help="names, by commas (default: all)")
    parser.add_argument("--seconds-left", type=positive, help="start nothing that may not end within this time")
    parser.add_argument("--tune-seconds", type=positive, default=120, help="of a tuned export (default: %(default)s)")
    parser.add_argument("--short-seconds", type=positive, default=25, help="of a short one (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="small models, to try it out")
    arguments = parser.parse_args()
    deadline = time.monotonic() + (arguments.seconds_left or float("inf"))
    units, names = units_of(arguments.small), arguments.contenders.split(",")
    known = dict.fromkeys(name for unit in units for name in (unit.model, unit.case))
    cases = arguments.cases.split(",") if arguments.cases else list(known)
    refuse_unknown(parser, "case", cases, known)
    refuse_unknown(parser, "contender", names, NAMES)
    where = prepared(parser, arguments)
    settings = {key: getattr(arguments, key) for key in ("small", "rounds", "tune_seconds", "short_seconds", "threads")}
    rows = Rows(arguments.json, {key: where[key] for key in ("cpu", "cpus", "device", "python", "versions")} | settings)
    asked = [unit for unit in units if unit.contender in names and {unit.model, unit.case} & {*cases}]
    _measure_all(arguments, asked, rows, deadline)
    tables = tables_of(list(rows.found.values()))
    tables[-1].caption.append(caption(where))
    for table in tables:
        table.show()
    write(tables, {}, None, arguments.markdown)
    return int(arguments.check and not all(goal["met"] for goal in goals_of(list(rows.found.values()))))


def _measure_all(arguments: argparse.Namespace, units: Sequence[Unit], rows: Rows, deadline: float) -> None:
    workshops: dict[str, GpuWorkshop] = {}
    for unit in units:
        place = unit.case, unit.contender
        if place in rows.found:
            continue
        started = time.monotonic()
        earlier = [row["took"] for (_, contender), row in rows.found.items() if contender == unit.contender]
        if rows.starts[place] >= 2:
            row = {"unavailable": f"{rows.starts[place]} runs ended while this was measured"}
        elif started + max(earlier, default=unit.cost) > deadline:
            print(f"{unit.case} {unit.contender}: not started, because the time may not suffice", flush=True)
            continue
        else:
            rows.append({"started": place})
            if unit.model not in workshops:
                folder = Path(tempfile.mkdtemp(prefix=f"{unit.model}-", dir=os.environ["TORCHINDUCTOR_CACHE_DIR"]))
                given = arguments.device, arguments.threads, arguments.tune_seconds, arguments.short_seconds
                workshops[unit.model] = GpuWorkshop(subject_of(unit.model, arguments.small), folder, *given)
            row = measure(workshops[unit.model], unit, arguments.rounds, arguments.device)
        row = {"case": unit.case, **unit._asdict(), **row, "took": time.monotonic() - started}
        rows.found[place] = row
        rows.append(row)
        print(time.strftime("%H:%M:%S"), *filter(None, cells_of(row)), sep="  ", flush=True)
        gc.collect()
        # An error that leaves the GPU unusable ends the run here; the next run goes on after this row.
        synchronize(arguments.device)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="inductor-") as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        sys.exit(main())
