"""A tuned training step for people: the rows of its table, the code to paste, its TOML and its page.

training.toml    the recommended choices, which `optimize(model, choices="training.toml", mode="training")` reads
training.json    everything that was measured
report.html      the same for people
"""

from __future__ import annotations

import json
import os
import statistics
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from optimize_export.errors import UsageError
from optimize_export.manifest import describe_program, replace_file, to_json_text
from optimize_export.wording import listed
from optimizer.bundle import new_folder
from optimizer.options import check_new_folder
from optimizer.showing import fragment, memory_plot, number_text, page, seconds_text, size_text
from optimizer.training.setup import AS_IT_IS, COMPILES, OPTIMIZERS, PRECISIONS, Setup

if TYPE_CHECKING:
    from optimizer.training.results import Candidate, TrainingTuning

TOML, JSON, PAGE = "training.toml", "training.json", "report.html"
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}

# The name of the last row, if it combines others.
RECOMMENDED = "recommended"

# The table -----------------------------------------------------------------------------------------------------------

_COLOURS = {
    "original": "soft",
    "bit-identical": "good",
    "within rounding": "good",
    "declared difference": "warn",
    "refused": "bad",
    "not proven": "soft",
}
TABLE_COLUMNS = ("training step", "a step", "rows/s", "times as fast", "peak", "numbers", "note")


def table_rows(tuning: TrainingTuning) -> list[tuple[str, ...]]:
    """The texts of the table, one row for each candidate."""
    return [_row(each, seconds) for each, seconds in zip(tuning.candidates, step_seconds(tuning), strict=True)]


def step_seconds(tuning: TrainingTuning) -> list[float | None]:
    """The seconds of a step of each candidate, as if all had been timed together; None for those without a time.

    Each was timed in turn with the step as it is, at another moment, and the machine may have been busier at one of them.
    So the time of the step as it is is the median over all these moments, and the others' follow from their speed-ups.
    """
    first, *others = tuning.candidates
    pairs = [_pair(each) for each in others]
    base = None
    if first.latency is not None:
        base = statistics.median([first.latency.median, *(own * gain for own, gain in filter(None, pairs))])
    found = [base]
    for each, pair in zip(others, pairs, strict=True):
        seconds = each.latency.median if each.latency else None
        if base is not None and pair is not None:
            seconds = base / pair[1]
        elif base and seconds and each.speedup and each.setup.batch_size and first.samples and first.latency:
            # At another size, the rows a second are compared.
            rows = first.samples * first.latency.median
            seconds = base / each.speedup.median * each.setup.batch_size / rows
        found.append(seconds)
    return found


def _pair(each: Candidate) -> tuple[float, float] | None:
    """The seconds and the speed-up of a candidate that was timed in turn with the step as it is, on the same batch."""
    loads = (each.setup.workers is not None or each.setup.pin_memory) and each.name != RECOMMENDED
    if each.latency is None or each.speedup is None or each.setup.batch_size is not None or loads:
        return None
    return each.latency.median, each.speedup.median


def _row(each: Candidate, seconds: float | None) -> tuple[str, ...]:
    gain, samples = each.speedup, each.samples
    if samples is not None and each.latency is not None and seconds is not None:
        samples *= each.latency.median / seconds
    return (
        f"{each.name}{' *' * each.taken}",
        "" if seconds is None else seconds_text(seconds),
        "" if samples is None else f"{samples:,.0f}" if samples >= 100 else f"{samples:.3g}",
        "" if gain is None else f"{gain.median:.2f} ({gain.low:.2f} to {gain.high:.2f})",
        "" if each.peak is None else size_text(each.peak),
        standing_text(each),
        each.note,
    )


def standing_text(each: Candidate) -> str:
    """How a candidate's losses and gradients stand to the original's, with the figures that were measured."""
    found = each.differences
    times = [found[name] for name in ("loss_times", "gradient_times") if name in found]
    told = [f"{number_text(max(times))} times the noise"] if times else []
    if each.standing == "declared difference":
        told = [f"loss {number_text(found['loss_error'])}"] if "loss_error" in found else []
        told += [f"cosine {found['gradient_cosine']:.6f}"] if "gradient_cosine" in found else []
    if "loss_change" in found:
        told.append(f"loss after the steps {100 * found['loss_change']:+.2g} %")
        told.append(f"between seeds {100 * found.get('loss_spread', 0.0):.2g} %")
    return f"{each.standing} ({', '.join(told)})" if told else each.standing


def recommendation(tuning: TrainingTuning) -> str:
    """A sentence about the recommended combination."""
    if tuning.recommended == Setup():
        return "recommended: the step as it is; nothing that was tried pays here"
    first, best = tuning.candidates[0], tuning.candidates[-1]
    taken = [each.name for each in tuning.candidates if each.taken and each.name != RECOMMENDED] or [best.name]
    told = [] if best.speedup is None else [f"{best.speedup} as the step as it is"]
    peaks = ["" if each.peak is None else size_text(each.peak) for each in (best, first)]
    if all(peaks) and peaks[0] != peaks[1]:
        told.append(f"peak {peaks[0]} instead of {peaks[1]}")
    return f"recommended: {' + '.join(taken)}: {', '.join([*told, standing_text(best)])}"


def lines(tuning: TrainingTuning) -> Iterator[str]:
    """The table, the recommendation, the notes and the code, for a terminal of any width."""
    table = [TABLE_COLUMNS, *table_rows(tuning)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
    yield from ("", recommendation(tuning), *(f"note: {note}" for note in tuning.notes), "", tuning.code.rstrip())


# The choices in words and as code ------------------------------------------------------------------------------------


def sentences(setup: Setup) -> list[str]:
    """What a training loop does for a setup, besides the passes; one clause for each choice."""
    parts = f" in {setup.accumulate} parts whose gradients are added" if setup.accumulate > 1 else ""
    told = {
        "set `torch.set_float32_matmul_precision('high')` for products in TF32": setup.precision == "tf32",
        f"run the step under `torch.autocast` with {_DTYPES.get(setup.precision)}": setup.precision in _DTYPES,
        "scale the loss with `torch.amp.GradScaler`": setup.precision == "fp16",
        "convert the model and its images to `torch.channels_last`": setup.channels_last,
        "compile the model with `model.compile()`": setup.compile == "whole",
        "compile each repeated block with its `.compile()`": setup.compile == "blocks",
        f"set `torch._functorch.config.activation_memory_budget = {setup.compile_budget}`": setup.compile_budget != 1,
        f"pass `{setup.optimizer}=True` to the optimizer": setup.optimizer != AS_IT_IS,
        "call `zero_grad(set_to_none=False)`": not setup.set_to_none,
        "set `torch.backends.cudnn.benchmark = True`": setup.cudnn_benchmark,
        f"pass `num_workers={setup.workers}` to the DataLoader": setup.workers is not None,
        "pass `pin_memory=True` to the DataLoader, and copy with `non_blocking=True`": setup.pin_memory,
        f"train with {setup.batch_size} rows a step{parts}": setup.batch_size is not None,
        f"run each batch{parts}": setup.batch_size is None and setup.accumulate > 1,
    }
    return [clause for clause, is_chosen in told.items() if is_chosen]


def left_to_the_loop(setup: Setup, source: str) -> list[str]:
    """The sentence on the choices of a file or a call that `optimize` doesn't make; empty if it makes all."""
    told = "; ".join(sentences(setup))
    return [f"The choices of {source} that your training loop makes: {told}."] if told else []


def code_of(tuning: TrainingTuning, device: str) -> str:
    """The recommended training loop, to paste, for "cpu" or "cuda"; a comment in it has the names that it reads."""
    setup, is_torchs = tuning.recommended, hasattr(torch.optim, tuning.optimizer)
    loads = setup.batch_size is not None or setup.accumulate > 1 or setup.workers is not None or setup.pin_memory
    yours = ["model", "training_step", "dataset" if loads else "loader", *["optimizer"] * (not is_torchs)]
    if setup.passes:
        yours.append(f"{' and '.join(tuning.example)} (the arguments of one call of the model)")
    places = setup.channels_last or device != "cpu"
    parts = [
        _block(
            [
                "import torch",
                *["import torch._functorch.config"] * (setup.compile_budget != 1),
                *["from torch.utils._pytree import tree_map"] * places,
                *["from torch.utils.data import DataLoader"] * loads,
                *["", "from optimize_export import optimize"] * bool(setup.passes),
                "",
                f"# Yours: {', '.join(yours)}.",
            ]
        ),
        _settings(setup, device),
        _model(setup, device, tuning.example, tuning.blocks),
        _optimizer(setup, tuning.optimizer if is_torchs else ""),
        _loader(setup, (setup.batch_size or tuning.batch) // setup.accumulate) if loads else "",
        _placed(setup, device) if places else "",
        _loop(setup, tuning.loss, places=places),
    ]
    return "\n".join(part for part in parts if part)


def _settings(setup: Setup, device: str) -> str:
    tf32 = ['torch.set_float32_matmul_precision("high")  # TF32', "torch.backends.cudnn.allow_tf32 = True"]
    told = tf32 if setup.precision == "tf32" else []
    told += ["torch.backends.cudnn.benchmark = True"] * setup.cudnn_benchmark
    budget = f"torch._functorch.config.activation_memory_budget = {setup.compile_budget}"
    told += [budget] * (setup.compile_budget != 1)
    if setup.precision in _DTYPES:
        told.append(f'autocast = torch.autocast("{device}", {_DTYPES[setup.precision]})')
    told += [f'scaler = torch.amp.GradScaler("{device}")'] * (setup.precision == "fp16")
    return _block(told)


def _model(setup: Setup, device: str, example: Sequence[str], blocks: Sequence[str]) -> str:
    told = [] if device == "cpu" else [f'model.to("{device}")']
    told += ["model.to(memory_format=torch.channels_last)"] * setup.channels_last
    if setup.passes:
        given = ", ".join(f"{name}={name}" for name in example)
        told.append(f'model = optimize(model, {json.dumps(list(setup.passes))}, mode="training", {given})')
    told += ["model.compile()"] * (setup.compile == "whole")
    if setup.compile == "blocks":
        paths = ", ".join(map(json.dumps, blocks))
        told += [
            "blocks = [",
            *textwrap.wrap(paths, 100, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False),
            "]",
            "for path in blocks:",
            "    model.get_submodule(path).compile()",
        ]
    return _block(told)


def _optimizer(setup: Setup, name: str) -> str:
    how = f", {setup.optimizer}=True" if setup.optimizer != AS_IT_IS else ""
    if name:
        return _block([f"optimizer = torch.optim.{name}(model.parameters(){how})  # with your own arguments"])
    return _block([f"# Make your optimizer with {setup.optimizer}=True."] * bool(how))


def _loader(setup: Setup, size: int) -> str:
    given = [f"batch_size={size}"] * bool(size)
    if setup.workers is not None:
        given += [f"num_workers={setup.workers}", *["persistent_workers=True"] * (setup.workers > 0)]
    given += ["pin_memory=True"] * setup.pin_memory
    return _block([f"loader = DataLoader(dataset, {', '.join(given)})  # with your own arguments"])


def _placed(setup: Setup, device: str) -> str:
    is_image = "value.ndim == 4 and value.is_floating_point()"
    images = f"value.to(memory_format=torch.channels_last) if {is_image} else value"
    copied = f'value = value.to("{device}"{", non_blocking=True" * setup.pin_memory})'
    told = ["def placed(value):", "    if not isinstance(value, torch.Tensor):", "        return value"]
    told += [f"    {copied}"] * (device != "cpu")
    told += [f"    return {images if setup.channels_last else 'value'}"]
    return _block(told)


def _loop(setup: Setup, loss: str, *, places: bool) -> str:
    several = setup.accumulate > 1
    told = ["for number, batch in enumerate(loader, 1):" if several else "for batch in loader:"]
    told += ["    batch = tree_map(placed, batch)"] * places
    under, indent = setup.precision in _DTYPES, "    " * (setup.precision in _DTYPES)
    told += ["    with autocast:"] * under
    told.append(f"{indent}    loss = training_step(model, batch){loss}{f' / {setup.accumulate}' * several}")
    scales = setup.precision == "fp16"
    told.append(f"    {'scaler.scale(loss)' if scales else 'loss'}.backward()")
    update = ["scaler.step(optimizer)", "scaler.update()"] if scales else ["optimizer.step()"]
    update.append(f"optimizer.zero_grad({'' if setup.set_to_none else 'set_to_none=False'})")
    told += [f"    if number % {setup.accumulate} == 0:"] * several
    told += [f"    {'    ' * several}{line}" for line in update]
    return "\n".join(told) + "\n"


def _block(told: Sequence[str]) -> str:
    return "\n".join([*told, ""]) if told else ""


# TOML ----------------------------------------------------------------------------------------------------------------


def to_toml(tuning: TrainingTuning) -> str:
    """The recommended setup; `read_setup` reads it."""
    made = {"model": tuning.model, "device": tuning.device, "torch": torch.__version__, "by": _version()}
    written = {name: value for name, value in tuning.recommended.to_json().items() if value is not None}
    told = [f"# {line}" for line in (recommendation(tuning), *sentences(tuning.recommended))]
    for title, table in (("made", made), ("setup", written)):
        # JSON's texts, numbers, booleans and lists are TOML's too.
        told += [
            "",
            f"[{title}]",
            *(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in table.items()),
        ]
    return "\n".join(told).replace("\x7f", "\\u007f") + "\n"


def read_setup(path: str | Path) -> Setup:
    """The setup of a training.toml, or of the folder that has one.

    Raises:
        UsageError: there is no such file, it isn't such a TOML, or another version made it with settings unknown here.
    """
    path = Path(os.path.expanduser(path))
    path = path / TOML if path.is_dir() else path
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        why = "doesn't exist" if isinstance(error, FileNotFoundError) else f"can't be read: {error.strerror}"
        raise UsageError(f"{path} {why}; `choices` is the {TOML} that tune-training wrote.") from error
    except ValueError as error:
        raise UsageError(f"{path} isn't a {TOML}: it isn't valid TOML ({error}).") from error
    given = found.get("setup")
    if not isinstance(given, dict):
        raise UsageError(f"{path} isn't a {TOML}: it has no table [setup]; name the file that tune-training wrote.")
    made = found.get("made")
    by = made.get("by", "another version") if isinstance(made, dict) else "another version"
    known = {each.name: each.default for each in fields(Setup)}
    if unknown := [name for name in given if name not in known]:
        raise UsageError(
            f"{path} was made by {by}, and {_version()} has no setting {listed(unknown)}: run tune-training again."
        )
    if wrong := [name for name, value in given.items() if not _fits(name, value, known[name])]:
        value = json.dumps(given[wrong[0]], default=str)
        raise UsageError(f"{path}: {wrong[0]} can't be {value}; it was made by {by}: run tune-training again.")
    return Setup.from_json(given)


def _fits(name: str, value: object, default: object) -> bool:
    choices = {"precision": PRECISIONS, "optimizer": OPTIMIZERS, "compile": COMPILES}
    if name in choices:
        return value in choices[name]
    if name == "passes":
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1
    return isinstance(value, int) and not isinstance(value, bool) and value >= (0 if name == "workers" else 1)


def _version() -> str:
    program = describe_program()
    return f"{program['name']} {program['version']}"


# Files and pages -----------------------------------------------------------------------------------------------------


def save(tuning: TrainingTuning, path: str | Path) -> None:
    """Write report.html, training.toml and training.json into a new folder; or the one with the suffix of the path.

    Raises:
        UsageError: there is something at the path already.
        BundleError: the folder can't be written.
    """
    target = Path(os.path.expanduser(path))
    texts = {PAGE: _page(tuning), TOML: to_toml(tuning), JSON: to_json_text(tuning.to_json())}
    check_new_folder(target, "the result")
    if (text := {Path(name).suffix: text for name, text in texts.items()}.get(target.suffix)) is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, text.encode("utf-8"))
        return
    with new_folder(target.absolute()) as folder:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")


def to_html(tuning: TrainingTuning) -> str:
    """The result for a notebook."""
    return fragment("training", **_facts(tuning))


def _page(tuning: TrainingTuning) -> str:
    return page("page", part="training.html.jinja", title=f"{tuning.model}: its training step", **_facts(tuning))


def _facts(tuning: TrainingTuning) -> Mapping[str, Any]:
    seconds = step_seconds(tuning)
    every = list(zip(tuning.candidates, seconds, strict=True))
    # Points of the plot have the numbers of these rows: at the batch that was given, and not refused.
    drawn = [each for each in every if each[1] is not None and each[0].setup.batch_size is None]
    figures = [
        [
            {"name": each.name, "seconds": time, "memory": each.peak, "dropped": each.note}
            for each, time in drawn
            if (each.standing == "refused") is is_refused
        ]
        for is_refused in (False, True)
    ]
    numbers = {each["name"]: number for number, each in enumerate(figures[0], 1)}
    best = tuning.candidates[0 if tuning.recommended == Setup() else -1]
    cells = table_rows(tuning)
    return {
        "tuning": tuning,
        "best": best,
        "standing": standing_text(best),
        "told": recommendation(tuning),
        "code": tuning.code,
        "columns": TABLE_COLUMNS,
        "shown": [
            {"number": numbers.get(each.name, ""), "cells": row, "each": each, "seconds": time}
            for row, (each, time) in zip(cells, every, strict=True)
        ],
        "longest": max((time for time in seconds if time), default=None),
        "drawn": memory_plot(*figures, of="a step"),
        "colour": _COLOURS,
    }
