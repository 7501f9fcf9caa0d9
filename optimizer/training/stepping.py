"""Training steps that can be run: a copy of the model, the user's loss, and the optimizer, as a `Setup` says.

The caller's model and optimizer are never run: each step has a copy of the weights and of the optimizer's state.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from exporters.places import line_of_error
from optimize_export.errors import LoadError, OptimizeExportError, UsageError
from optimize_export.wording import a_type, error_summary, listed
from optimizer.model import (
    clone,
    eager_only,
    leaves_of,
    loss_from,
    named_tensors,
    optimizer_over,
    place_of_loss,
    random_state,
    rebuild,
    refuse_other_parameters,
    working_copy,
)
from optimizer.pipeline import optimize_model, report_of
from optimizer.report import no_progress
from optimizer.torch_private import compile_budget
from optimizer.training.setup import AS_IT_IS, Setup
from optimizer.tuning import PeakMemory
from passes.checkpointing.live_bytes import LiveBytes
from passes.compiling.blocks import repeated_blocks
from passes.errors import PassesError
from passes.graph.memory import same_values

Step = Callable[[nn.Module, Any], Any]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Passes whose kernels a count of single operators doesn't see.
_FUSING = ("jit-fusion",)


class Unavailable(Exception):
    """A setup can't be run here; the message is the reason, a sentence."""


# ------------------------------------------------------------------------------------------------------------ batches


def rows_of(batch: Any) -> int:
    """The number of rows of a batch: dim 0 of all its tensors with dims; 0 if they differ or there are none."""
    sizes = {tensor.shape[0] for _, tensor in leaves_of(batch).tensors() if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 else 0


def with_rows(batch: Any, start: int, stop: int) -> Any:
    """The rows from `start` to `stop` of a batch that has rows; beyond its end they repeat from its start."""
    rows = rows_of(batch)

    def taken(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim():
            return tensor
        if stop <= rows:
            return tensor[start:stop]
        return tensor[torch.arange(start, stop, device=tensor.device) % rows]

    return rebuild(batch, taken)


# ---------------------------------------------------------------------------------------------- the user's step, checked


@dataclass(frozen=True)
class TrainingJob:
    """The user's step, with its model and optimizer."""

    model: nn.Module
    """The caller's, or its copy on another device."""
    step: Step
    optimizer: torch.optim.Optimizer
    batch: Any
    """The first batch, on `device`."""
    device: torch.device
    is_part: bool = False
    """Whether `batch` is a part of the user's, on which the step runs."""

    @cached_property
    def rows(self) -> int:
        return rows_of(self.batch)

    @cached_property
    def can_be_cut(self) -> bool:
        """Whether the step runs on fewer rows than the user's batch has, too."""
        if self.is_part:
            return True
        if self.rows < 2:
            return False
        try:
            with random_state(0):
                loss_of(self.step, self.copied_model(), with_rows(self.batch, 0, -(-self.rows // 2)))
        except OptimizeExportError:
            return False
        return True

    @cached_property
    def model_call(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments with which the step calls the model first; None if it only calls methods or parts of it."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        model = self.copied_model()
        model.register_forward_pre_hook(lambda _, args, kwargs: calls.append(clone((args, kwargs))), with_kwargs=True)
        with random_state(0):
            loss_of(self.step, model, self.batch)
        return calls[0] if calls else None

    @property
    def example(self) -> tuple[str, ...]:
        """The arguments of `optimize` that have this call: "example_inputs", "example_kwargs" or both."""
        args, kwargs = self.model_call or ((), {})
        return ("example_inputs",) * bool(args) + ("example_kwargs",) * bool(kwargs)

    @cached_property
    def loss_place(self) -> str:
        """Where the loss is in the result of the step; see `place_of_loss`."""
        with random_state(0):
            return place_of_loss(result_of(self.step, self.copied_model(), self.batch))

    def finish(self) -> None:
        """Wait until the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def copied_model(self) -> nn.Module:
        """A copy of the model with its own weights."""
        made = working_copy(self.model, check_functions=False)
        made.own_parameters([name for name, _ in made.root.named_parameters(remove_duplicate=False)])
        return made.root

    def copied_optimizer(self, model: nn.Module, setup: Setup) -> torch.optim.Optimizer:
        """A copy of the optimizer over the parameters of a copy of the model.

        Raises:
            Unavailable: the optimizer has no such implementation.
        """
        return with_implementation(optimizer_over(self.optimizer, self.model, model), setup)


def with_implementation(optimizer: torch.optim.Optimizer, setup: Setup) -> torch.optim.Optimizer:
    """The optimizer with the implementation of the setup, and its state where that needs it.

    Raises:
        Unavailable: the optimizer has no such implementation.
    """
    state = optimizer.state_dict()
    if setup.optimizer != AS_IT_IS:
        if setup.optimizer not in optimizer.defaults:
            raise Unavailable(f"{type(optimizer).__name__} has no {setup.optimizer} implementation.")
        for group in state["param_groups"]:
            group |= {name: name == setup.optimizer for name in ("foreach", "fused") if name in group}
    optimizer.load_state_dict(state)
    return optimizer


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer | MakeOptimizer | None) -> torch.optim.Optimizer:
    """The optimizer of the user, or AdamW with its defaults.

    Raises:
        UsageError: it isn't one, needs a closure, or updates parameters that aren't the model's.
    """
    if not any(one.requires_grad for one in model.parameters()):
        raise UsageError("No parameter of the model requires a gradient, so there is nothing to train.")
    if optimizer is None:
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    elif not isinstance(optimizer, torch.optim.Optimizer) and callable(optimizer):
        optimizer = optimizer(model.parameters())
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer must be a torch.optim.Optimizer or a function that makes one, not {a_type(optimizer)}."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{type(optimizer).__name__} calls the step itself, as often as it likes, through a closure: tuning measures "
            "single steps, so use another optimizer for it."
        )
    refuse_other_parameters(optimizer, model)
    return optimizer


def check_step(job: TrainingJob, caller: nn.Module) -> list[str]:
    """Run the step once, and return notes on what it doesn't train.

    Args:
        caller: the caller's own model, which a step must not change either.

    Raises:
        LoadError: the step raises, or a function holds modules of the model, so that a copy would train those.
        UsageError: it returns no loss, trains by itself, or doesn't use the model that it is given; or the loss or its
            gradients carry no signal.
    """
    # Only for its check of functions.
    working_copy(caller, "training")
    model = job.copied_model()
    kept = [_Snapshot(caller), _Snapshot(model)]
    try:
        with random_state(0):
            loss = loss_of(job.step, model, job.batch)
        for each in kept:
            each.check()
        loss.backward()
    finally:
        kept[0].restore()
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    unused = [name for name, one in trained.items() if one.grad is None]
    if len(unused) == len(trained):
        raise UsageError(
            "The loss depends on no parameter of the model that the training step is given: use its argument `model`, not a "
            "global."
        )
    if not loss.isfinite():
        raise UsageError(f"The loss of the training step is {loss.item()}, so nothing could be compared.")
    gradients = (one.grad for one in trained.values() if one.grad is not None)
    if not any(bool(each.abs().sum()) for each in gradients):
        raise UsageError("All gradients of the training step are zero, so nothing could be compared.")
    notes = []
    if unused:
        notes.append(f"The loss doesn't depend on {listed(unused)}.")
    if frozen := sum(not one.requires_grad for one in model.parameters()):
        notes.append(f"{frozen} parameter{'s are' if frozen > 1 else ' is'} frozen.")
    if not model.training:
        notes.append("The model is in eval mode, and is measured so: call model.train() first if that isn't meant.")
    return notes


def loss_of(step: Step, model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a step, on a copy of the batch, because a step may write to it."""
    return loss_from(result_of(step, model, batch))


def result_of(step: Step, model: nn.Module, batch: Any) -> Any:
    try:
        with torch.enable_grad():
            return step(model, clone(batch))
    except OptimizeExportError:
        raise
    except Exception as error:  # the step is foreign code
        raise LoadError(f"The training step {raises(error)}.") from error


def raises(error: Exception) -> str:
    """The end of a sentence about foreign code that raised: "raises at net.py:5: ValueError: …"."""
    at = f" at {line}" if (line := line_of_error(error)) else ""
    return f"raises{at}: {error_summary(error)}"


class _Snapshot:
    """The tensors and gradients of a model before a step."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = [(one, one.detach().clone()) for _, one in named_tensors(model)]
        self._parameters = dict(model.named_parameters())
        self._gradients = [
            (one, one.grad, None if one.grad is None else one.grad.clone()) for one in model.parameters()
        ]

    def check(self) -> None:
        """Raise `UsageError` if the step changed weights or gradients."""
        does = "must only compute the loss of `model` on `batch`: backward and the optimizer are run around it"
        changed = {id(one) for one, value in self._tensors if not same_values(one.detach(), value)}
        if written := [name for name, one in self._parameters.items() if id(one) in changed]:
            raise UsageError(f"The training step changes {listed(written)} itself, but it {does}.")
        if any(one.grad is not before or _differs(before, value) for one, before, value in self._gradients):
            raise UsageError(f"The training step runs backward itself, but it {does}.")

    def restore(self) -> None:
        with torch.no_grad():
            for one, value in self._tensors:
                if not same_values(one.detach(), value):
                    one.copy_(value)
            for one, before, kept in self._gradients:
                one.grad = before
                if before is not None and kept is not None and _differs(before, kept):
                    before.copy_(kept)


def _differs(gradient: torch.Tensor | None, value: torch.Tensor | None) -> bool:
    return gradient is not None and value is not None and not same_values(gradient, value)


# -------------------------------------------------------------------------------------------------- the step of a setup


class _Shared:
    """Holds the user's step, which copies of a module share."""

    def __init__(self, step: Step) -> None:
        self.step = step

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self


class StepModule(nn.Module):
    """The loss of each of several batches, as the setup computes it: the mean over its parts, if it accumulates."""

    def __init__(self, job: TrainingJob, model: nn.Module, setup: Setup) -> None:
        super().__init__()
        self.model = model
        self.setup = setup
        self.device = job.device
        # Of the losses that `forward` returns, as a GradScaler scales them; a power of two.
        self.scale = 1.0
        self._shared = _Shared(job.step)
        # Not `train()`, which would reach the model's own modules, some of which may be in another mode.
        self.training = model.training

    def forward(self, *batches: Any) -> tuple[torch.Tensor, ...]:
        return tuple(torch.stack(list(self.losses(batch))).sum() * self.scale for batch in batches)

    def losses(self, batch: Any) -> Iterator[torch.Tensor]:
        """The share in the loss of each part of a batch, in turn."""
        rows = rows_of(batch)
        ends = [number * rows // self.setup.accumulate for number in range(self.setup.accumulate + 1)]
        for start, end in itertools.pairwise(ends):
            whole = self.setup.accumulate == 1
            part = batch if whole else with_rows(batch, start, end)
            if self.setup.channels_last:
                part = rebuild(part, _as_images)
            with self._autocast():
                loss = loss_from(self._shared.step(self.model, part))
            yield loss if whole else loss * ((end - start) / rows)

    def _autocast(self) -> Any:
        dtype = _DTYPES.get(self.setup.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)


def _as_images(tensor: torch.Tensor) -> torch.Tensor:
    is_image = tensor.dim() == 4 and tensor.is_floating_point()
    return tensor.contiguous(memory_format=torch.channels_last) if is_image else tensor


def made_model(job: TrainingJob, setup: Setup, *, own_draws: bool = False) -> nn.Module:
    """A copy of the model as a setup runs it.

    Args:
        own_draws: whether compiled code draws the random numbers that the model itself draws, which is slower.

    Raises:
        Unavailable: a pass of it does nothing here, or isn't possible.
    """
    model = job.copied_model()
    if setup.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if setup.passes:
        model = _with_passes(job, model, setup.passes)
    options = {"fallback_random": True} if own_draws else None
    if setup.compile == "whole":
        model.compile(options=options)
    elif setup.compile:
        blocks = blocks_of(model)
        if not blocks:
            raise Unavailable("The model has no repeated blocks.")
        for block in blocks.values():
            block.compile(options=options)
    return model


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of a model, by their paths."""
    return dict(itertools.chain.from_iterable(repeated_blocks(model)))


def _with_passes(job: TrainingJob, model: nn.Module, passes: tuple[str, ...]) -> nn.Module:
    if job.model_call is None:
        raise Unavailable("The step calls methods or parts of the model, and not itself, which passes don't reach.")
    args, kwargs = job.model_call
    try:
        result = optimize_model(
            model,
            list(passes),
            example_inputs=args,
            example_kwargs=kwargs,
            further_inputs=(),
            mode="training",
            device=None,
            strict=False,
            batch_sizes=None,
            seed=0,
            progress=no_progress,
        )
    except (PassesError, OptimizeExportError) as error:
        raise Unavailable(str(error)) from error
    for record in report_of(result).passes:
        if record.status != "applied":
            reason = record.reason or next((skip.text for skip in record.skips), "it finds nothing to change")
            raise Unavailable(f"{record.name} is {record.status}: {reason.rstrip('.')}.")
    return result


@contextmanager
def settings_of(setup: Setup) -> Iterator[None]:
    """The global settings of a setup; those of torch are restored afterwards."""
    with ExitStack() as stack:
        if setup.precision == "tf32":
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            stack.callback(setattr, torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = True
        if setup.cudnn_benchmark:
            stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            torch.backends.cudnn.benchmark = True
        if setup.compile_budget != 1:
            # Compiling happens in the first calls.
            stack.enter_context(compile_budget(setup.compile_budget))
        yield


class RunnableStep:
    """A whole training step of a setup: zero_grad, forward, backward, optimizer."""

    def __init__(self, job: TrainingJob, setup: Setup, model: nn.Module, batch: Any, *, learns: bool = False) -> None:
        """Make the copy of the optimizer.

        Args:
            batch: the rows of one optimizer step.
            learns: whether the weights change. They don't in a step that is timed, so that every round has the same
                numbers: the learning rate is 0.
        """
        self.job, self.setup, self._given = job, setup, batch
        self.batch = clone(batch)
        self.module = StepModule(job, model, setup)
        self.optimizer = job.copied_optimizer(model, setup)
        self.scaler = torch.amp.GradScaler(job.device.type) if setup.precision == "fp16" else None
        if not learns:
            for group in self.optimizer.param_groups:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group.get("lr"), torch.Tensor) else 0.0

    def __call__(self, batch: Any = None) -> torch.Tensor:
        if any(tensor._version for _, tensor in leaves_of(self.batch).tensors()):
            # The step wrote to it.
            self.batch = clone(self._given)
        self.optimizer.zero_grad(set_to_none=self.setup.set_to_none)
        total = torch.zeros((), device=self.job.device)
        with settings_of(self.setup):
            for loss in self.module.losses(self.batch if batch is None else batch):
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                total += loss.detach()
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
        return total

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay from step to step: parameters, buffers, gradients, and the optimizer's state."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._kept())

    def _kept(self) -> list[torch.Tensor]:
        held = [tensor for _, tensor in named_tensors(self.module)]
        held += [one.grad for one in self.module.parameters() if one.grad is not None]
        held += [
            leaf for state in self.optimizer.state.values() for leaf in state.values() if isinstance(leaf, torch.Tensor)
        ]
        return held

    def peak(self) -> int | None:
        """Bytes at the peak of a step beyond `kept_bytes` and the batch; None where the system doesn't tell."""
        self()
        # Gradients that stay aren't counted.
        kept, self.setup = self.setup, _keeping_gradients(self.setup)
        try:
            if self.job.device.type == "cuda":
                self.job.finish()
                before = torch.cuda.memory_allocated(self.job.device)
                torch.cuda.reset_peak_memory_stats(self.job.device)
                self()
                self.job.finish()
                return torch.cuda.max_memory_allocated(self.job.device) - before
            if self.setup.compile or any(each.partition(":")[0] in _FUSING for each in self.setup.passes):
                with PeakMemory() as peak:
                    self()
                return peak.bytes if peak.exact else None
            batch = [tensor for _, tensor in leaves_of(self.batch).tensors()]
            with eager_only(), LiveBytes(without=[*self._kept(), *batch]) as live:
                self()
            return live.peak
        finally:
            self.setup = kept


def _keeping_gradients(setup: Setup) -> Setup:
    return Setup.from_json({**setup.to_json(), "set_to_none": False})


def made_step(job: TrainingJob, setup: Setup, batch: Any = None) -> RunnableStep:
    """The step of a setup, which was run once.

    Raises:
        Unavailable: it isn't possible here; the message has the error that it raised.
    """
    try:
        with settings_of(setup):
            step = RunnableStep(job, setup, made_model(job, setup), job.batch if batch is None else batch)
        step()
        job.finish()
    except Unavailable:
        raise
    except Exception as error:  # torch's implementations refuse many inputs, each in its own way
        raise Unavailable(f"It raises {error_summary(error)}.") from error
    return step
