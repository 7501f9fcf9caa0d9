"""Run the original at every call and keep its outputs."""

from __future__ import annotations

import copy
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from exporters.places import place_of_error
from optimize_export.errors import LoadError, UsageError
from optimize_export.wording import error_summary
from optimizer.model import (
    Call,
    Runs,
    Samples,
    Sizes,
    Source,
    Taken,
    eager_only,
    leaves_of,
    named_tensors,
    refuse_arrays,
)
from optimizer.parity.observe import Observation, RecordedRuns, input_names, observe
from optimizer.parity.orders import RowOrder
from optimizer.parity.results import Measurement
from optimizer.parity.ties import Tie, aligned
from passes.graph.memory import same_values

logger = logging.getLogger(__name__)

CallKey = tuple[int | None, int]
"""Batch size and draw."""


@dataclass
class OriginalCall:
    """One call of the original."""

    batch_size: int | None
    draw: int
    seed: int
    """The seed of the random numbers in this call."""
    call: Call | None
    """The inputs; None if the samples make them again."""
    own: Observation
    """The outputs in the original's own dtypes."""
    truth: Observation
    """The outputs in float64; the same as `own` until the call is measured."""
    names: Sequence[str] = ()
    """The names of the input tensors."""
    label: str = ""
    """Words for the call, in place of batch size and draw."""
    measured: bool = False
    """Whether the call was also run in float64 and with perturbed weights."""
    recorded: bool = False
    """Whether `own` comes from a recorded run, for which torch may choose other kernels."""
    unstable: dict[str, torch.Tensor] = field(default_factory=dict)
    """Bool tensors by output name: the elements that the original itself changes within its noise."""
    sizes: Sizes = ()
    """The sizes of open dims other than the batch, where they differ from the given call."""
    ties: Sequence[Tie] = ()
    """The equal scores; the rows of the outputs that they put in order are compared as sets."""
    excluded: dict[str, torch.Tensor] = field(default_factory=dict)
    """Bool tensors by output name: the elements that a tie chooses among others; not compared."""
    excluded_by: tuple[str, ...] = ()
    """The operations that met the ties of `excluded`."""
    knows_ties: bool = False
    """Whether `ties`, `excluded` and `excluded_by` are known."""
    orders: Sequence[RowOrder] = ()
    """For a lossy candidate: the outputs whose rows may be in another order than here, by the rule of `RowOrder`."""

    def aligned(self, values: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The outputs of another run, where equal scores decide as in this one."""
        for order in self.orders:
            values = order.aligned(self.truth.values, values)
        # The rows of an order with scores are matched, those with equal scores too.
        matched = {name for order in self.orders if order.scores is not None for name in order.names}
        ties = [tie for tie in self.ties if matched.isdisjoint(tie.names)]
        return aligned(ties, self.excluded, self.own.values, values) if ties or self.excluded else values

    def undecided(self, name: str) -> torch.Tensor:
        """A mask of the elements of an output that equal scores choose or put in order."""
        own = self.own.values[name]
        mask = self.excluded.get(name, torch.zeros(own.shape, dtype=torch.bool))
        for tie in self.ties:
            if name in tie.names:
                mask = mask | tie.spread(tie.groups != 0, own)
        return mask

    @property
    def key(self) -> CallKey:
        return self.batch_size, self.draw

    @property
    def where(self) -> str:
        """The call in words: "batch size 3, draw 1"."""
        if self.label:
            return self.label
        batch = "" if self.batch_size is None else f"batch size {self.batch_size}, "
        return f"{batch}{_spelled(self.sizes)}draw {self.draw}"


class Original:
    """The original, its outputs at each call, and the calls at which it raises."""

    def __init__(
        self,
        target: Callable[..., Any],
        mode: str,
        seed: int,
        *,
        samples: Samples | None = None,
        recorded: RecordedRuns | None = None,
    ) -> None:
        self.target = target
        self.runs = Runs(target, in_eval=mode == "inference")
        # Records the first run of each call for the passes; None for plain runs.
        self.recorded = recorded
        self.mode = mode
        self.seed = seed
        self.samples = samples
        # Batch sizes and draws of the user's own further inputs, which are never left out.
        self.asked = frozenset(() if samples is None else samples.further)
        # The calls that succeeded.
        self.calls: list[OriginalCall] = []
        # Whether a second run of the first call was compared with the first run.
        self.ran_twice = False
        self.notes: list[str] = []
        self.failures: list[tuple[str, Exception]] = []
        # The first error and its place in the source, by the names of the open dims that had another size; () for the
        # batch.
        self.why: dict[tuple[str, ...], str] = {}
        # Whether two successive calls have different inputs in the rows that they share. If not, outputs may be
        # constant although they depend on the inputs.
        self.inputs_vary = False
        self.device = "cpu"
        self._sources = _sources_of(target)
        self._dropped: set[int | None] = set()
        # The sizes of open dims at which it ran.
        self.taken = Taken(None, {})
        self._previous_inputs: list[torch.Tensor] | None = None

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        sizes = (one.batch_size for one in self.calls if one.batch_size is not None and not one.sizes)
        return tuple(dict.fromkeys(sizes))

    def with_gradients(self, draw: int) -> bool:
        """Whether a backward pass belongs to this draw."""
        # There are as many gradients as weights, so one draw per batch size has enough numbers.
        return self.mode == "training" and draw == 0

    def seed_of(self, batch_size: int | None, draw: int, sizes: Sizes = ()) -> int:
        return mixed_seed(self.seed, batch_size or 0, draw, *(size for _, size in sizes))

    def inputs_of(self, one: OriginalCall) -> Call:
        if one.call is not None:
            return one.call
        assert self.samples is not None
        return self.samples.at(one.batch_size, one.draw, one.sizes)

    def run_at(self, keys: Sequence[CallKey]) -> None:
        """Run the original at these batch sizes and draws, unless it already ran there; put the calls in this order."""
        assert self.samples is not None
        for batch_size, draw in keys:
            if not any(one.key == (batch_size, draw) and not one.sizes for one in self.calls):
                self.run(batch_size, draw, self.samples.at(batch_size, draw))
        order = {key: number for number, key in enumerate(keys)}
        self.calls.sort(key=lambda one: order.get(one.key, -1))

    def run(
        self,
        batch_size: int | None,
        draw: int,
        call: Call,
        *,
        label: str = "",
        sizes: Sizes = (),
        seed: int | None = None,
    ) -> bool:
        """Run the original once and keep its outputs; return False if it raises here or raised at this batch size.

        The `seed` is that of this batch size, draw and sizes by default. Without samples, the inputs are kept too.
        """
        if batch_size in self._dropped and (batch_size, draw) not in self.asked:
            return False
        seed = self.seed_of(batch_size, draw, sizes) if seed is None else seed
        self.device = _device_of(self.target, call)
        names = input_names(self.target, call)
        is_first = not self.calls and not self.failures
        own = None if sizes else self._recorded_run(batch_size, draw, call, seed, names, is_first=is_first)
        is_recorded = own is not None
        if own is None:
            if is_first:
                self._find_written(call, seed, self.with_gradients(draw), names)
                if self.recorded is not None:
                    self.recorded.runs.written = self.runs.written
            own = self._plain_run(batch_size, draw, call, seed, names, sizes)
        if own is None:
            return False
        kept = call if self.samples is None else None
        self.calls.append(
            OriginalCall(batch_size, draw, seed, kept, own, own, names, label, recorded=is_recorded, sizes=sizes)
        )
        self._note_inputs(call)
        return True

    def check(self) -> None:
        """Raise if no call succeeded.

        Raises:
            LoadError: the original raises at every call.
            UsageError: there is no call.
        """
        if self.calls:
            return
        if not self.failures:
            raise UsageError("Nothing to compare: there is no call to make.")
        where, error = self.failures[0]
        raise LoadError(f"The model raises on the example inputs ({where}): {error_summary(error)}") from error

    def notes_on_failures(self) -> list[str]:
        """A note on the sizes that are left out because the original raises there."""
        if not self.failures:
            return []
        sizes = ", ".join(where for where, _ in self.failures)
        why = "; ".join(dict.fromkeys(each.partition(": ")[2] for each in self.why.values()))
        return [f"Left out, as the model itself doesn't take them: {sizes} ({why})"]

    def confirm_recorded(self) -> None:
        """Compare a recorded run with a plain one; if they differ, replace all recorded runs with plain ones.

        Some modules of torch choose other kernels while a mode is active: a TransformerEncoder zeroes padding with one
        kernel and not with the other.
        """
        recorded = [one for one in self.calls if one.recorded]
        if not recorded or self.confirm(recorded[0]):
            return
        for one in recorded:
            own = self._plain_run(one.batch_size, one.draw, self.inputs_of(one), one.seed, one.names, ())
            if own is not None:
                one.own, one.truth, one.recorded = own, own, False

    def confirm(self, one: OriginalCall) -> bool:
        """Whether another plain run returns the same numbers."""
        try:
            with without_warnings():
                seen = self.run_again(one)
        except Exception as error:  # noqa: BLE001 - the original is foreign code; the next run tells what it raises
            logger.debug("the original raises where it didn't before: %s", error)
            return False
        own = one.own
        if seen.structure != own.structure or seen.values.keys() != own.values.keys():
            return False
        if not all(same_values(value, seen.values[name]) for name, value in own.values.items()):
            return False
        if one.recorded:
            self.ran_twice = True
            for other in self.calls:
                other.recorded = False
        return True

    def run_again(self, one: OriginalCall) -> Observation:
        """The outputs of another plain run."""
        with self.runs.fresh() as module:
            training = self.with_gradients(one.draw)
            return observe(module, self.inputs_of(one), seed=one.seed, training=training, names=one.names)

    def twin(self) -> Original:
        """A copy that can run further calls, and whose unstable elements can change separately."""
        twin = copy.copy(self)
        twin.calls = [replace(one, unstable={k: v.clone() for k, v in one.unstable.items()}) for one in self.calls]
        twin.notes, twin.failures = list(self.notes), list(self.failures)
        twin.why, twin._dropped = dict(self.why), set(self._dropped)
        return twin

    def has_run_only(self, keys: Sequence[CallKey]) -> bool:
        """Whether the original ran only at these calls."""
        return (
            {one.key for one in self.calls} <= set(keys)
            and self._dropped <= {size for size, _ in keys}
            and not any(one.sizes for one in self.calls)
        )

    def is_unmodified(self) -> bool:
        """Whether none of its tensors was replaced or written to since the first run."""
        now = _sources_of(self.target)
        pairs = zip(self._sources, now, strict=False)
        same = len(now) == len(self._sources) and all(old.tensor is new.tensor for old, new in pairs)
        return same and all(source.unchanged for source in self._sources)

    def forget_runs(self) -> None:
        """Drop the references to the working copy, to the last inputs, and to the frames of errors."""
        self.recorded = self._previous_inputs = None
        for _, error in self.failures:
            error.__traceback__ = None

    def blank(self, settings: dict[str, str], draws: int) -> Measurement:
        """A measurement without outputs: which calls ran, and how."""
        return Measurement(
            outputs=(),
            problems=(),
            notes=tuple(self.notes),
            reference="none",
            reference_reason="",
            mode="inference" if self.mode == "region" else self.mode,
            device=self.device,
            batch_sizes=self.batch_sizes,
            draws=draws,
            seed=self.seed,
            settings=settings,
        )

    def _recorded_run(
        self, batch_size: int | None, draw: int, call: Call, seed: int, names: Sequence[str], *, is_first: bool
    ) -> Observation | None:
        """The outputs of a recorded run; None if the call can't be recorded."""
        if self.recorded is None or batch_size in self._dropped:
            return None
        with without_warnings():
            own = self.recorded.run(batch_size, draw, call, seed=seed, names=names, is_first=is_first)
        if is_first and own is not None:
            self.runs.written = self.recorded.runs.written
            self._note_written()
        return own

    def _find_written(self, call: Call, seed: int, training: bool, names: Sequence[str]) -> None:
        """Find the parameters that forward writes to, in a run that stops before each first write.

        Copying all parameters instead would double their memory.
        """
        if not isinstance(self.target, nn.Module):
            return
        with eager_only(), without_warnings():
            try:
                self.runs.first(lambda module: observe(module, call, seed=seed, training=training, names=names))
            except LoadError:
                raise
            except Exception as error:  # noqa: BLE001 - the original is foreign code; the plain run records what it raises
                logger.debug("the watched run raised: %s", error)
        self._note_written()

    def _note_written(self) -> None:
        if self.runs.written:
            written = ", ".join(sorted(self.runs.written))
            self.notes.append(f"The model writes to its own parameters in forward: {written}.")

    def _plain_run(
        self, batch_size: int | None, draw: int, call: Call, seed: int, names: Sequence[str], sizes: Sizes
    ) -> Observation | None:
        ran: Callable[..., Any] = self.target
        try:
            with self.runs.fresh() as ran:
                return observe(ran, call, seed=seed, training=self.with_gradients(draw), names=names)
        except LoadError:
            raise  # its message is already a sentence of this program
        except Exception as error:  # noqa: BLE001 - the original is foreign code; a size at which it raises is left out
            # The frames of the traceback refer to the modules of the copy.
            place = place_of_error(error, ran)
            why = f"{error_summary(error)}, at {place}" if place else error_summary(error)
            refuse_arrays(call, why, error)
            self._leave_out(batch_size, draw, sizes, error, why)
            return None

    def _leave_out(self, batch_size: int | None, draw: int, sizes: Sizes, error: Exception, why: str) -> None:
        where = "" if batch_size is None else f"batch size {batch_size}"
        if sizes:
            rows = f"{where}, " if where and batch_size != self.taken.batch else ""
            where = f"{rows}{_spelled(sizes)}".removesuffix(", ")
        self.why.setdefault(tuple(name for name, _ in sizes), f"{where or 'the given inputs'}: {why}")
        if sizes:
            self.failures.append((where, error))
            return
        if (batch_size, draw) in self.asked:
            where = f"batch size {batch_size}, draw {draw}"
            raise LoadError(f"The model raises on further inputs ({where}): {error_summary(error)}.") from error
        self._dropped.add(batch_size)
        self.calls = [one for one in self.calls if one.batch_size != batch_size or one.key in self.asked]
        self.failures.append((where or "the given inputs", error))

    def _note_inputs(self, call: Call) -> None:
        tensors = [tensor for _, tensor in leaves_of((call.args, call.kwargs)).tensors()]
        previous, self._previous_inputs = self._previous_inputs, tensors
        self.inputs_vary |= previous is not None and _vary(previous, tensors)


def _vary(previous: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
    if len(previous) != len(tensors):
        return False
    pairs = [shared_rows(a, b) for a, b in zip(previous, tensors, strict=True)]
    return any(pair is not None and not same_values(*pair) for pair in pairs)


def shared_rows(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The rows that two tensors of different batch sizes have in common; None if their other dims differ."""
    if a.shape == b.shape:
        return a, b
    if a.layout is not torch.strided or a.dim() == 0 or b.dim() == 0 or a.shape[1:] != b.shape[1:]:
        return None
    rows = min(len(a), len(b))
    return a[:rows], b[:rows]


def same_inputs(a: Call, b: Call) -> bool:
    first, second = (leaves_of((call.args, call.kwargs)) for call in (a, b))
    if first.structure != second.structure:
        return False
    pairs = zip(first.tensors(), second.tensors(), strict=True)
    return all(same_values(one, other) for (_, one), (_, other) in pairs)


def mixed_seed(*numbers: int) -> int:
    """One seed from several numbers; similar numbers give very different seeds."""
    seed = 0
    for number in numbers:
        seed = (seed * 1000003 + number + 0x9E3779B9) % (1 << 62)
    return seed


@contextmanager
def without_warnings() -> Iterator[None]:
    """Ignore warnings, so that further runs don't repeat those of the first one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _sources_of(target: object) -> list[Source]:
    return [Source.of(*named) for named in named_tensors(target)] if isinstance(target, nn.Module) else []


def _device_of(target: Any, call: Call) -> str:
    parameters = target.parameters() if isinstance(target, nn.Module) else ()
    inputs = (tensor for _, tensor in leaves_of((call.args, call.kwargs)).tensors())
    return next((str(tensor.device) for tensor in itertools.chain(parameters, inputs)), "cpu")


def _spelled(sizes: Sizes) -> str:
    return "".join(f"{name} {size}, " for name, size in sizes)
