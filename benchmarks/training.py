"""Measure whether tuning a training step pays, compared with the settings that a user would choose by hand.

    python benchmarks/training.py --device cuda --json build/training.jsonl --markdown build/training.md

Every way to run the step is timed in turn with eager in the same run, and all ratios are over that. Each row is appended
to the file of JSON lines at once, and a run goes on where the last one was cut. `--small` has small models, for a CPU.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from contenders import sentence_of
from gpu import Rows
from measure import caption, command, latencies_of, positive, prepared, ratios, refuse_unknown, synchronize
from models import bring_to_life
from table import Table, mebibytes, seconds, write
from torch import nn
from torch.nn import functional as F

from optimize_export.runtime import usable_cpus
from optimizer import tune_training
from optimizer.training import Setup
from optimizer.training.stepping import RunnableStep, TrainingJob, check_optimizer, made_step

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import torchvision_operators

EAGER, BUDGET, OURS = "eager", "memory-budget", "ours"
# The parts of a setup that are taken as they are. All ways have float32 weights and AdamW with its defaults.
PEERS: dict[str, Setup] = {
    EAGER: Setup(),
    "channels-last": Setup(channels_last=True),
    "bf16": Setup(precision="bf16"),
    "fp16": Setup(precision="fp16"),
    "compile": Setup(compile="whole"),
    # precision="bf16-mixed": https://lightning.ai/docs/pytorch/stable/common/precision_intermediate.html, and
    # torch.compile: https://lightning.ai/docs/pytorch/stable/advanced/compile.html
    "lightning": Setup(precision="bf16", compile="whole"),
    # ChannelsLast(): https://docs.mosaicml.com/projects/composer/en/stable/method_cards/channels_last.html, and of the
    # Trainer compile_config={} and precision, which is "amp_fp16" by default on a GPU, and only "fp32" on a CPU:
    # https://docs.mosaicml.com/projects/composer/en/stable/api_reference/generated/composer.Trainer.html
    # Its other methods change the model, the data or the schedule, and aren't settings: BlurPool, Low Precision
    # LayerNorm, progressive resizing, and so on.
    "composer": Setup(precision="fp16", channels_last=True, compile="whole"),
    # activation_memory_budget=0.5 of torch._functorch.config, which recomputes in the backward pass:
    # https://pytorch.org/blog/activation-checkpointing-techniques/
    BUDGET: Setup(compile="whole"),
}
WAYS = (*PEERS, OURS)
_KEPT_SHARE = 0.5

# Our choice has at least this share of the speed of the best peer on each case, the geometric mean of our gains over any
# one peer is at least the second, and tuning takes at most this many times its seconds.
LEAST_OF_BEST, LEAST_MEAN, MOST_TUNING = 0.97, 1.05, 1.2
_SECONDS_OF_A_FIGURE = 0.03
# An alarm can be lost in a destructor of Python; then it comes again.
_SECONDS_TO_NEXT_ALARM = 5.0

Row = dict[str, Any]
Step = Callable[[nn.Module, Any], torch.Tensor]


# ---------------------------------------------------------------------------------------------------------------- cases


class Case(NamedTuple):
    """The name in timm or transformers, the options that make it small, and whether most of it convolves."""

    name: str
    smaller: dict[str, Any]
    convolves: bool = False


CASES = {
    "resnet50": Case("resnet50", {"layers": (1, 1, 1, 1), "channels": (16, 32, 64, 64)}, True),
    # Its layer scales start at 1e-6, which would hide all blocks.
    "convnext_tiny": Case("convnext_tiny", {"depths": (1, 1, 1, 1), "dims": (16, 32, 32, 64)}, True),
    "vit_small": Case("vit_small_patch16_224", {"depth": 1, "img_size": 64}),
    "bert_base": Case(
        "Bert", {"num_hidden_layers": 1, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 1000}
    ),
    "gpt2": Case(
        "GPT2", {"n_layer": 1, "n_embd": 256, "n_head": 4, "vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0}
    ),
}


def made_case(name: str, small: bool) -> tuple[nn.Module, Step, Any]:
    """The model in train mode with drawn weights, its step, and a batch; the same at every call."""
    case = CASES[name]
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name in ("bert_base", "gpt2"):
            import transformers

            head = "ForMaskedLM" if name == "bert_base" else "LMHeadModel"
            config = getattr(transformers, f"{case.name}Config")(**(case.smaller if small else {}))
            model = bring_to_life(getattr(transformers, f"{case.name}{head}")(config))
            ids = torch.randint(0, config.vocab_size, (4, 64) if small else (8, 512), generator=generator)
            return model.train(), text_step, {"input_ids": ids, "labels": ids}
        torchvision_operators.declare()
        import timm

        options = {"ls_init_value": 0.3} if name == "convnext_tiny" else {}
        model = timm.create_model(case.name, **options, **(case.smaller if small else {}))
        side, rows = (64, 8) if small else (224, 64)
        images = torch.randn(rows, 3, side, side, generator=generator)
        return bring_to_life(model, images[:4]).train(), image_step, (images, torch.arange(rows) * 7 % 1000)


def image_step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def text_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


# --------------------------------------------------------------------------------------------------------- measurements


def setup_of(way: str, case: str, device: str) -> Setup:
    """The settings of a peer on a case.

    Raises:
        RuntimeError: it makes no sense there, or is the same as another.
    """
    convolves, on_gpu, setup = CASES[case].convolves, device == "cuda", PEERS[way]
    if way == "composer":
        setup = Setup(precision="fp16" if on_gpu else "as-is", channels_last=convolves, compile="whole")
        if setup == PEERS["compile"]:
            raise RuntimeError("its settings are those of compile here")
    elif setup.channels_last and not convolves:
        raise RuntimeError("little of it convolves")
    if setup.precision == "fp16" and not on_gpu:
        raise RuntimeError("float16 with a GradScaler needs a GPU")
    return setup


class CaseRuns:
    """Makes and measures the ways to run the step of one case."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name, self.arguments, self.device = name, arguments, arguments.device
        model, step, batch = made_case(name, arguments.small)
        model.to(self.device)
        placed = [tensor.to(self.device) for tensor in (batch.values() if isinstance(batch, dict) else batch)]
        batch = dict(zip(batch, placed, strict=True)) if isinstance(batch, dict) else tuple(placed)
        self.job = TrainingJob(model, step, check_optimizer(model, None), batch, torch.device(self.device))

    def peer(self, way: str) -> Row:
        """The row of a peer, without its place."""
        setup = setup_of(way, self.name, self.device)
        started = time.perf_counter()
        made = self._made(way, setup)
        took = time.perf_counter() - started
        return {"setup": setup.to_json(), "set_up_seconds": took, **self._timed({way: made})[way]}

    def ours(self, best: str) -> Row:
        """The row of the tuned choice, timed in turn with the best peer, too, unless it has the same settings."""
        import torch._inductor.utils as inductor

        job = self.job
        # What the compiler made for the peers isn't there for users who tune.
        with inductor.fresh_cache():
            tuned = tune_training(
                job.model, job.step, job.batch, tune_seconds=self.arguments.tune_seconds, device=self.device
            )
        torch._dynamo.reset()
        setup = tuned.recommended
        standing = next(each.standing for each in tuned.candidates if each.setup == setup)
        steps = {OURS: made_step(job, setup)}
        if is_other := best == BUDGET or setup != setup_of(best, self.name, self.device):
            steps[best] = self._made(best, setup_of(best, self.name, self.device))
        found = self._timed(steps)
        over = ratios(found[best]["seconds"], found[OURS]["seconds"]).to_json() if is_other else None
        untried = [each.name for each in tuned.candidates if each.note.startswith("Not tried")]
        return {
            "setup": setup.to_json(),
            "set_up_seconds": tuned.seconds,
            **found[OURS],
            "best": best,
            "over_best": over,
            "standing": standing,
            "tuning": {"seconds": tuned.seconds, "allowed": self.arguments.tune_seconds, "untried": untried},
        }

    def _made(self, way: str, setup: Setup) -> RunnableStep:
        import torch._functorch.config as functorch

        # The first step compiles both passes.
        with functorch.patch(activation_memory_budget=_KEPT_SHARE) if way == BUDGET else nullcontext():
            return made_step(self.job, setup)

    def _timed(self, steps: dict[str, RunnableStep]) -> dict[str, Row]:
        steps = {EAGER: made_step(self.job, Setup())} | steps
        found, _ = latencies_of(steps, self.arguments.rounds, _SECONDS_OF_A_FIGURE, self.device)
        base = found[EAGER]
        return {
            way: {"seconds": own, "base_seconds": base, "gain": ratios(base, own).to_json(), "peak": steps[way].peak()}
            for way, own in found.items()
        }


class OutOfTimeError(BaseException):
    """A way took longer than its limit. No part of torch or of this project handles it as an error of the way."""


@contextmanager
def limited(most: float) -> Iterator[None]:
    """Raise OutOfTimeError in the block after that many seconds."""

    def stop(*_: object) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, most, _SECONDS_TO_NEXT_ALARM)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure(runs: CaseRuns, way: str, rows: Sequence[Row]) -> Row:
    """The row of a way, without its place; where it can't be measured, the reason."""
    limit = runs.arguments.limit + (2 * runs.arguments.tune_seconds if way == OURS else 0)
    torch._dynamo.reset()
    try:
        with limited(limit), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = runs.ours(best_peer(rows) or EAGER) if way == OURS else runs.peer(way)
        return {"unavailable": None, **row}
    except OutOfTimeError:
        return {"unavailable": f"it didn't finish within {limit} s"}
    except Exception as error:  # noqa: BLE001 - any error means that this way is unavailable; the row says so
        return {"unavailable": sentence_of(error)}


def seconds_for(way: str, arguments: argparse.Namespace) -> float:
    """What a way may take before it was measured on any case."""
    if way == OURS:
        return MOST_TUNING * arguments.tune_seconds + 120
    return 90 if PEERS[way].compile else 30


def best_peer(rows: Sequence[Row]) -> str | None:
    """The name of the fastest peer among the rows of a case."""
    found = [(row["gain"]["median"], row["contender"]) for row in rows if not row["unavailable"]]
    return max((each for each in found if each[1] != OURS), default=(0.0, None))[1]


# ----------------------------------------------------------------------------------------------------- goals and tables


def goals_of(rows: Sequence[Row]) -> list[Row]:
    """The goals, judged by the rows that are there. A goal without figures isn't met."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row["case"], {})
        if not row["unavailable"]:
            cases[row["case"]][row["contender"]] = row
    behind = []
    for name, found in cases.items():
        share = _share_of_best(found)
        if share is None or share < LEAST_OF_BEST:
            figure = "not measured" if share is None else f"{share:.2f}× {best_peer(list(found.values()))}"
            behind.append(f"{name}: {figure}")
    means: dict[str, float] = {}
    for peer in PEERS:
        gains = [_gain_over(found[OURS], found[peer]) for found in cases.values() if {OURS, peer} <= {*found}]
        means |= {peer: statistics.geometric_mean(gains)} if gains else {}
    tunings = {name: found[OURS]["tuning"] for name, found in cases.items() if OURS in found}
    over = {name: each["seconds"] / each["allowed"] for name, each in tunings.items()}
    judged = {
        f"at least {LEAST_OF_BEST} of the best peer on each case": (
            "; ".join([f"{len(cases) - len(behind)} of {len(cases)}", *behind]),
            bool(cases) and not behind,
        ),
        f"overall at least {LEAST_MEAN} times any single peer": (
            "; ".join(f"{mean:.2f}× {peer}" for peer, mean in sorted(means.items(), key=lambda item: item[1])),
            bool(means) and min(means.values()) >= LEAST_MEAN,
        ),
        f"tuning within {MOST_TUNING} times its seconds": (
            "; ".join(f"{name}: {share:.2f}" for name, share in over.items()),
            bool(over) and max(over.values()) <= MOST_TUNING,
        ),
    }
    return [{"goal": goal, "measured": found or "not measured", "met": met} for goal, (found, met) in judged.items()]


def _share_of_best(found: dict[str, Row]) -> float | None:
    """The speed of our choice as a share of the best peer's, from rounds in which both ran."""
    if OURS not in found or (best := best_peer(list(found.values()))) is None:
        return None
    ours = found[OURS]
    # A later run can change which peer is the best.
    is_timed = ours["best"] == best and ours["over_best"] is not None
    return float(ours["over_best"]["median"]) if is_timed else _gain_over(ours, found[best])


def _gain_over(ours: Row, peer: Row) -> float:
    """How many times as fast our choice is as a peer; 1 if both have the same settings, whatever the noise."""
    if ours["setup"] == peer["setup"] and peer["contender"] != BUDGET:
        return 1.0
    return float(ours["gain"]["median"] / peer["gain"]["median"])


def cells_of(row: Row) -> tuple[str, ...]:
    """A row in words, under the headings of the table."""
    if row["unavailable"]:
        return row["case"], row["contender"], "–", *[""] * 4, row["unavailable"]
    gain, peak = row["gain"], "not told" if row["peak"] is None else mebibytes(row["peak"])
    chosen = {key: each for key, each in row["setup"].items() if each != Setup().to_json()[key]}
    words = ", ".join(f"{key}={' + '.join(each) if isinstance(each, list) else each}" for key, each in chosen.items())
    note = ""
    if row["contender"] == OURS:
        beside = "its settings" if row["over_best"] is None else f"{row['over_best']['median']:.2f}×"
        note = f"{words or 'as it is'} ({row['standing']}); {beside} of the best peer, {row['best']}"
        if untried := row["tuning"]["untried"]:
            note += f"; no time to try {', '.join(untried)}"
    times, made = seconds(statistics.median(row["seconds"])), seconds(row["set_up_seconds"])
    quartiles = f"{gain['low']:.2f} – {gain['high']:.2f}"
    return row["case"], row["contender"], times, f"{gain['median']:.2f}×", quartiles, peak, made, note or words


_HEADINGS = ("case", "way", "step", "times as fast", "quartiles", "peak", "set-up", "settings, or why not")
_CAPTION = (
    "*times as fast*: as eager, timed in turn; the median over the rounds of the ratio within a round. *peak*: bytes of a"
    " step beyond weights, gradients and optimizer state: on a GPU the allocator's; on a CPU counted for eager steps, and"
    " the growth of the process for compiled ones, which has the memory that kernels take, too. *set-up*: with the first"
    " step; of ours, all of the tuning, which starts without what the compiler made for the peers."
)


def tables_of(rows: Sequence[Row]) -> list[Table]:
    steps, goals = Table("Training steps", _HEADINGS, left=2), Table("Goals", ["goal", "measured", "met"], left=2)
    for row in sorted(rows, key=lambda row: ([*CASES].index(row["case"]), WAYS.index(row["contender"]))):
        steps.add(*cells_of(row))
    steps.caption.append(_CAPTION)
    for goal in goals_of(rows):
        goals.add(goal["goal"], goal["measured"], "yes" if goal["met"] else "no")
    goals.caption.append("Judged by the rows that are there.")
    return [steps, goals]


def main() -> int:
    parser = command(__doc__, rounds=15, device=True, threads=usable_cpus(), check=True)
    parser.set_defaults(json=Path("benchmarks/results/training.jsonl"))
    parser.add_argument("--cases", default=",".join(CASES), help="names, by commas (default: %(default)s)")
    parser.add_argument("--ways", default=",".join(WAYS), help="names, by commas (default: %(default)s)")
    parser.add_argument("--seconds-left", type=positive, help="start nothing that may not end within this time")
    parser.add_argument("--tune-seconds", type=positive, default=180, help="of tuning (default: %(default)s)")
    parser.add_argument("--limit", type=positive, default=600, help="seconds of a way (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="small models and batches")
    arguments = parser.parse_args()
    deadline = time.monotonic() + (arguments.seconds_left or float("inf"))
    cases, ways = arguments.cases.split(","), arguments.ways.split(",")
    refuse_unknown(parser, "case", cases, CASES)
    refuse_unknown(parser, "way", ways, WAYS)
    where = prepared(parser, arguments)
    settings = {key: getattr(arguments, key) for key in ("small", "rounds", "tune_seconds", "limit", "threads")}
    rows = Rows(arguments.json, {key: where[key] for key in ("cpu", "cpus", "device", "python", "versions")} | settings)
    places = [(case, way) for case in cases for way in WAYS if way in ways and (case, way) not in rows.found]
    runs: CaseRuns | None = None
    for case, way in places:
        started = time.monotonic()
        earlier = [row["took"] for (_, other), row in rows.found.items() if other == way]
        if started + max(earlier, default=seconds_for(way, arguments)) > deadline:
            print(f"{case} {way}: not started, because the time may not suffice", flush=True)
            continue
        if rows.starts[case, way] >= 2:
            row = {"unavailable": f"{rows.starts[case, way]} runs ended while this was measured"}
        else:
            rows.append({"started": (case, way)})
            if runs is None or runs.name != case:
                runs = CaseRuns(case, arguments)
            row = measure(runs, way, [row for (name, _), row in rows.found.items() if name == case])
        row = rows.found[case, way] = {"case": case, "contender": way, **row, "took": time.monotonic() - started}
        rows.append(row)
        print(time.strftime("%H:%M:%S"), *filter(None, cells_of(row)), sep="  ", flush=True)
        gc.collect()
        # An error that leaves the GPU unusable ends the run here; the next run goes on after this row.
        synchronize(arguments.device)
    found = list(rows.found.values())
    goals = goals_of(found)
    rows.append({"goals": goals})
    tables = tables_of(found)
    tables[-1].caption.append(caption(where))
    for table in tables:
        table.show()
    write(tables, {}, None, arguments.markdown)
    return int(arguments.check and not all(goal["met"] for goal in goals))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="inductor-") as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        sys.exit(main())
