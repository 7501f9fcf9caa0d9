"""Load the model and run it once on its example inputs, before all other work."""

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from optimize_export.errors import LoadError
from optimize_export.wording import described, listed, type_name
from optimizer.command.errors import errors_of_user_code
from optimizer.command.input_files import misfit
from optimizer.command.loading import Loaded, load
from optimizer.command.up_to_date import inputs_of, opened_files
from optimizer.model import Call, Runs, called, eager_only, leaves_of, random_state
from optimizer.options import LOAD_STAGE, ExportOptions
from optimizer.report import Progress, ProgressFunction


def load_and_run(options: ExportOptions, progress: ProgressFunction) -> Loaded:
    """Load the model with its weights and inputs, run it once, and record what the bundle is built from.

    The paths in the options are absolute.
    """
    progress(Progress(LOAD_STAGE, 0, 2, options.model))
    inputs, before, started = inputs_of(options), dict(sys.modules), time.time()
    with opened_files() as opened:
        loaded = load(
            options.model,
            name=options.name,
            inputs=options.inputs,
            input_files=options.input_files,
            weights=options.weights,
            calibration=options.calibration,
            calibrates=not options.budget.is_exact,
            seed=options.seed,
        )
        progress(Progress(LOAD_STAGE, 1, 2, f"{loaded.source} runs on its inputs"))
        check_runs(loaded, seed=options.seed)
    loaded.build = inputs.record(before, opened.data(), started)
    progress(Progress(LOAD_STAGE, 2, 2, loaded.source))
    return loaded


def check_runs(loaded: Loaded, *, seed: int = 0) -> None:
    """Run a copy of the model once on each call of its inputs, in eval mode and without gradients.

    The random state of torch, numpy and Python is restored. Lazy modules get their parameters here and keep them.
    """
    model = loaded.model
    device = next((tensor.device for tensor in _tensors_of(model)), None)
    samples = loaded.samples(seed, device)
    call = samples.given
    with random_state(), eager_only():
        if any(is_lazy(tensor) for tensor in _tensors_of(model)):
            _initialize(loaded, call)
            loaded.notes += ("Lazy modules got their parameters from a run on the example inputs.",)
        runs = Runs(model, in_eval=True)
        outputs = runs.first(lambda module: _run(loaded, module, call))
        for batch_size, draw in samples.further:
            further = samples.at(batch_size, draw)
            runs.first(partial(_run, loaded, call=further))
    leaves = leaves_of(outputs).values
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        what = type_name(leaves[0]) if leaves else type_name(outputs)
        raise LoadError(
            f"forward of {loaded.source} returned {what} instead of tensors; it must return tensors, also in "
            "tuples, lists, dicts or dataclasses."
        )


def _initialize(loaded: Loaded, call: Call) -> None:
    """Run the model itself in eval mode, because lazy modules take their shapes from their first inputs."""
    flags = [(module, module.training) for module in loaded.model.modules()]
    try:
        _run(loaded, loaded.model.eval(), call)
    finally:
        for module, training in flags:
            module.training = training


def _run(loaded: Loaded, model: Callable[..., Any], call: Call) -> Any:
    tensors = leaves_of((call.args, call.kwargs)).tensors()
    shapes = listed([described(tensor) for _, tensor in tensors])
    try:
        with torch.no_grad(), errors_of_user_code(f"{loaded.source} failed on its inputs ({shapes})", loaded.folder):
            return called(model, call)
    except LoadError as error:
        why = misfit(loaded.model, call) if isinstance(error.__cause__, TypeError) else None
        if why is None:
            raise
        raise LoadError(f"The inputs don't fit forward of {loaded.source}: {why}.") from error.__cause__


def _tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
