"""Example inputs at any batch size, in any number of draws.

A check on one input alone proves little. A loop over the batch that a trace unrolled, or a branch on a value, only
shows at another batch size or on other data. From the user's one call, this module makes more:

- Each tensor whose dim 0 equals that of the first tensor gets the new batch size there. Where open dims are declared,
  each dim with the name of the batch gets it.
- Floats are drawn from the distribution of the observed values, so mean, spread, sign and range stay.
- Integers, booleans and float masks (infinite or huge values, or at most two different ones) keep the observed rows,
  permuted and repeated. One permutation applies to the whole call, so rows that belong together stay together.
- Sparse tensors keep their rows in the same way, so they stay as sparse.

Other dims that are declared open (`optimizer.model.dynamic`) get other sizes in the same way. Floats are drawn in the
new shape. Tensors that keep their rows keep their slices, permuted and repeated by one permutation for all dims of the
same size.

Everything follows from (seed, batch size, draw, sizes). The global random state is neither used nor changed.
"""

import copy
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from optimize_export.errors import LoadError, UsageError
from optimize_export.structure import clone, first_difference, leaves_of, rebuild
from optimize_export.wording import a_type, described, quote
from optimizer.model.dynamic import OpenDims, Sizes
from optimizer.model.settings import random_state
from optimizer.model.working_copy import Mode
from passes.graph.layouts import has_strides

FurtherInputs = Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
ExampleInputs = tuple[Any, ...] | torch.Tensor | Callable[[int, torch.Generator], Any] | None

_FUNCTION_BATCH = 2
# Maximum number of observed values that describe a distribution; more don't describe it better.
_QUANTILES = 1 << 16
_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr)


@dataclass(frozen=True)
class Call:
    """One call of a model."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    # The name of the file that it was read from, for messages; "" if there is none.
    file: str = field(default="", compare=False, repr=False)

    def copied(self) -> "Call":
        """A copy of the call, because a forward may write to its inputs."""
        return Call(*clone((self.args, self.kwargs)))


class Samples:
    """Example inputs at any batch size and draw.

    Args:
        example_inputs: a tuple of the positional arguments, a single tensor, or a function
            `f(batch_size, generator) -> tuple`.
        example_kwargs: the keyword arguments. Like the positional ones, they may be nested in any way.
        further_inputs: more calls of the user, each a pair (args, kwargs) that differs from the first only in its rows.
            They replace the next draws at their batch sizes.

    Raises:
        UsageError: the example inputs are none of the above, or contain a tensor that is nested, has no values, has an
            unsupported layout, or is quantized per channel.
        LoadError: the function raises.
    """

    given: Call  # the user's own call; for a function, its call at batch size 2, draw 0
    # The size of dim 0 of the first tensor with dims, or of the dims that are declared as the batch; None without one.
    batch_size: int | None
    dynamic: bool  # False if no other batch size can be made
    sizes: dict[str, int]  # the given size of each open dim except the batch, by name; empty before `opened`

    def __init__(
        self,
        example_inputs: ExampleInputs,
        example_kwargs: dict[str, Any] | None = None,
        *,
        further_inputs: FurtherInputs = (),
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        if example_kwargs is not None and not isinstance(example_kwargs, dict):
            raise UsageError(
                f"example_kwargs must be a dict of the model's keyword arguments, not {a_type(example_kwargs)}."
            )
        self.seed = seed
        self.device = None if device is None else torch.device(device)
        self.sizes = {}
        self._open: dict[int, Mapping[int, str]] = {}
        self._batch = ""
        self._kwargs = dict(example_kwargs or {})
        self._function: Callable[[int, torch.Generator], Any] | None = None
        if callable(example_inputs) and not isinstance(example_inputs, torch.Tensor | tuple):
            self._function = example_inputs
            self.given = self._from_function(_FUNCTION_BATCH, 0)
        else:
            self.given = self._placed(Call(_positional(example_inputs, "example_inputs"), self._kwargs))
        self.batch_size = _batch_size(self.given)
        if self.batch_size == 0:
            raise UsageError("The example inputs have a batch of no rows: use at least one row.")
        self.dynamic = self._function is not None or bool(self.batch_size)
        self._further_inputs = tuple(further_inputs)

    @property
    def further(self) -> tuple[tuple[int | None, int], ...]:
        """The batch size and draw of each further call."""
        return tuple(self._own)

    @property
    def row_dims(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor of a call, the dims that have the batch size."""
        return tuple(itertools.starmap(self._row_dims, enumerate(_tensors(self.given))))

    @property
    def first(self) -> torch.Tensor | None:
        """The first tensor with dims; its dim 0 is the batch."""
        return next((tensor for tensor in _tensors(self.given) if tensor.dim() > 0), None)

    def opened(self, dims: OpenDims, inputs: Mapping[str, torch.Tensor]) -> "Samples":
        """Return the same samples with open dims of these inputs, the tensors of `given` by name."""
        tensors = _tensors(self.given)
        places = {id(tensor): number for number, tensor in enumerate(tensors)}
        opened = self._twin()
        opened.sizes = dict(dims.given)
        opened.batch_size, opened._batch = dims.rows, dims.batch
        opened._open = {places[id(inputs[name])]: declared for name, declared in dims.of.items()}
        opened.dynamic = self.dynamic and any(opened.row_dims)
        return opened

    def as_given(self) -> "Samples":
        """The same samples without the user's function and further calls: all are drawn from the given call."""
        given = self._twin()
        given._function, given._further_inputs = None, ()
        given.dynamic = bool(self.batch_size)
        return given

    def with_open_batch_only(self) -> "Samples":
        """The same samples without open dims other than the batch."""
        batch = self._twin()
        batch.sizes = {}
        batch._open = {
            number: {dim: name for dim, name in dims.items() if name == self._batch}
            for number, dims in self._open.items()
        }
        return batch

    def at(self, batch_size: int | None = None, draw: int = 0, sizes: Sizes = ()) -> Call:
        """The call of this batch size and draw; draw 0 at the given batch size is the user's own data.

        Args:
            sizes: sizes of open dims except the batch; dims that aren't named keep their given size.
        """
        other = {name: size for name, size in sizes if size != self.sizes[name]}
        call = self._at(batch_size, draw)
        return self._resized(call, other, self._generator(batch_size, draw, other)) if other else call

    def _at(self, batch_size: int | None, draw: int) -> Call:
        if batch_size is None:
            batch_size = _FUNCTION_BATCH if self._function is not None else self.batch_size
        return self._own.get((batch_size, draw)) or self._made(batch_size, draw)

    def _made(self, batch_size: int | None, draw: int) -> Call:
        """The call of this batch size and draw, if no further call takes its place."""
        if batch_size is not None and batch_size < 1 and batch_size != self.batch_size:
            raise UsageError(f"A batch size must be at least 1, not {batch_size}.")
        if self._function is not None:
            return self._from_function(_FUNCTION_BATCH if batch_size is None else batch_size, draw)
        if batch_size != self.batch_size and not self.dynamic:
            raise UsageError(
                f"A batch of {batch_size} can't be made from the example inputs: none of their tensors has a batch "
                "dimension."
            )
        if batch_size is None or self.batch_size is None or (draw == 0 and batch_size == self.batch_size):
            # Without rows, every draw is the given call.
            return self.given
        return self._redraw(self.given, self.batch_size, batch_size, draw)

    @property
    def elements_of_a_row(self) -> int:
        """The number of elements in one row of the largest input with rows."""
        pairs = zip(_tensors(self.given), self.row_dims, strict=True)
        return max((tensor.numel() // max(1, self.batch_size or 0) for tensor, dims in pairs if dims), default=0)

    def to(self, device: torch.device | str) -> "Samples":
        """The same samples on another device, with equal values."""
        there = self._twin()
        there.device = torch.device(device)
        there.given = there._placed(self.given)
        return there

    def _twin(self) -> "Samples":
        twin = copy.copy(self)
        # Which further calls fit depends on the open dims.
        twin.__dict__.pop("_own", None)
        return twin

    @functools.cached_property
    def _own(self) -> dict[tuple[int | None, int], Call]:
        """The further calls by the batch size and draw in whose place they are."""
        own: dict[tuple[int | None, int], Call] = {}
        for number, item in enumerate(self._further_inputs, 1):
            size, call = self._further_call(number, item)
            # The example inputs are draw 0 of their batch size.
            taken = {(self.batch_size, 0), *own}
            own[size, next(draw for draw in itertools.count() if (size, draw) not in taken)] = call
        return own

    def _further_call(self, number: int, item: Any) -> tuple[int | None, Call]:
        which = f"The further inputs {number}"
        pair = isinstance(item, tuple) and len(item) == 2
        if not pair or not isinstance(item[0], tuple) or not isinstance(item[1], dict):
            raise UsageError(f"{which} must be a pair of a tuple and a dict, such as ((x,), {{}}), not {a_type(item)}.")
        call = self._placed(Call(*item))
        size = self._size_of(call)
        if size == 0:
            raise UsageError(f"{which} have a batch of no rows: use at least one row.")
        if size != self.batch_size and (size is None or self.batch_size is None):
            raise UsageError(f"{which} have {_rows_of(size)}, but the example inputs {_rows_of(self.batch_size)}.")
        if misfit := _other_than_rows(self._made(size, 0), call):
            raise UsageError(f"{which} differ from the example inputs in more than the number of rows: {misfit}.")
        return size, call

    def _size_of(self, call: Call) -> int | None:
        """The batch size of a call with the structure of the first."""
        for number, tensor in enumerate(_tensors(call)):
            for dim, name in self._open.get(number, {}).items():
                if name == self._batch and dim < tensor.dim():
                    return tensor.shape[dim]
        return _batch_size(call)

    def _from_function(self, batch_size: int, draw: int) -> Call:
        assert self._function is not None
        generator = self._generator(batch_size, draw)
        # A function that ignores its generator draws from the global ones, so these are seeded meanwhile.
        with random_state(generator.initial_seed()):
            made = _ask(self._function, batch_size, generator)
        if isinstance(made, Call):
            return self._placed(Call(made.args, {**self._kwargs, **made.kwargs}))
        args = _positional(made, "the function given as example_inputs")
        return self._placed(Call(args, self._resized_kwargs(args, batch_size, draw)))

    def _resized_kwargs(self, args: tuple[Any, ...], batch_size: int, draw: int) -> dict[str, Any]:
        kwargs_rows = _batch_size(Call((), self._kwargs))
        rows = _batch_size(Call(args, {}))
        if not kwargs_rows or rows is None or kwargs_rows == rows:
            return self._kwargs
        before = len(_tensors(Call(args)))
        return self._redraw(Call((), self._kwargs), kwargs_rows, batch_size, draw, before).kwargs

    def _redraw(self, call: Call, observed: int, batch_size: int, draw: int, before: int = 0) -> Call:
        """Draw other rows.

        Args:
            observed: the batch size of the call.
            before: the number of tensors that come before those of the call.
        """
        generator = self._generator(batch_size, draw)
        rows = _rows(observed, batch_size, generator)
        taken_of: dict[int, dict[int, torch.Tensor]] = {}
        for number, tensor in enumerate(_tensors(call), before):
            taken = dict.fromkeys(self._row_dims(number, tensor, observed), rows)
            if number in self._open and 0 not in taken:
                # A dim 0 that isn't open keeps its size.
                kept = _rows(observed, observed, generator)
                if tensor.shape[:1] == (observed,):
                    taken[0] = kept
            taken_of[id(tensor)] = taken
        return _redrawn_call(call, taken_of, generator)

    def _row_dims(self, number: int, tensor: torch.Tensor, observed: int | None = None) -> tuple[int, ...]:
        """The dims of a tensor that have the batch size of its call, by default the given one."""
        if number in self._open:
            return tuple(dim for dim, name in self._open[number].items() if name == self._batch)
        return (0,) if tensor.shape[:1] == (observed or self.batch_size,) else ()

    def _resized(self, call: Call, sizes: Mapping[str, int], generator: torch.Generator) -> Call:
        """The call with other sizes of its open dims."""
        slices = {name: _rows(self.sizes[name], size, generator) for name, size in sizes.items()}
        taken_of: dict[int, dict[int, torch.Tensor]] = {}
        for number, tensor in enumerate(_tensors(call)):
            dims = {dim: name for dim, name in self._open.get(number, {}).items() if name in sizes}
            for dim, name in dims.items():
                if tensor.shape[dim] != self.sizes[name]:
                    raise UsageError(
                        f"The function given as example_inputs returns {name} with size {tensor.shape[dim]} at one "
                        f"batch size and {self.sizes[name]} at another: only the number of rows may change."
                    )
            taken_of[id(tensor)] = {dim: slices[name] for dim, name in dims.items()}
        return _redrawn_call(call, taken_of, generator)

    def _placed(self, call: Call) -> Call:
        _refuse_unusable(call)
        if self.device is None:
            return call
        device = self.device
        there = rebuild(
            (call.args, call.kwargs), lambda tensor: tensor.detach().to(device).requires_grad_(tensor.requires_grad)
        )
        return Call(*there)

    def _generator(self, batch_size: int | None, draw: int, sizes: Mapping[str, int] | None = None) -> torch.Generator:
        others = "".join(f"/{name}={size}" for name, size in (sizes or {}).items())
        digest = hashlib.sha256(f"{self.seed}/{batch_size}/{draw}{others}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _ask(function: Callable[[int, torch.Generator], Any], batch_size: int, generator: torch.Generator) -> Any:
    try:
        return function(batch_size, generator)
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(
            f"The function given as example_inputs raises at batch size {batch_size}: {quote(error, with_type=True)}."
        ) from error


def _rows_of(batch_size: int | None) -> str:
    return "no rows" if batch_size is None else f"{batch_size} rows"


def _other_than_rows(expected: Call, call: Call) -> str | None:
    """The first difference between two calls of the same batch size, except for the values of tensors."""
    wanted_args, args = (leaves_of(one.args).structure for one in (expected, call))
    wanted_kwargs, kwargs = (leaves_of(one.kwargs).structure for one in (expected, call))
    if difference := first_difference(wanted_args, args, "positional") or first_difference(wanted_kwargs, kwargs):
        return difference
    for (name, wanted), (_, tensor) in zip(_named_tensors(expected), _named_tensors(call), strict=True):
        if (wanted.dtype, wanted.shape) != (tensor.dtype, tensor.shape):
            return f"{name} is {described(tensor)}, but should be {described(wanted)}"
    return None


def _named_tensors(call: Call) -> tuple[tuple[str, torch.Tensor], ...]:
    return (*leaves_of(call.args, "argument").tensors(), *leaves_of(call.kwargs).tensors())


def _positional(inputs: Any, what: str) -> tuple[Any, ...]:
    if inputs is None:
        return ()
    if isinstance(inputs, torch.Tensor):
        return (inputs,)
    if isinstance(inputs, tuple):
        return inputs
    hint = {dict: "; use example_kwargs for a dict", numpy.ndarray: ", which torch.from_numpy converts"}
    raise UsageError(
        f"{what} must be a tuple with one item per positional argument, such as (x,), not {a_type(inputs)}"
        f"{hint.get(type(inputs), '')}."
    )


def _refuse_unusable(call: Call) -> None:
    for name, tensor in _named_tensors(call):
        layout = str(tensor.layout).removeprefix("torch.")
        kinds = {
            "a nested tensor": tensor.is_nested,
            "a tensor without values (device meta)": tensor.is_meta,
            f"a tensor in the layout {layout}": tensor.layout not in _LAYOUTS,
            "a tensor that is quantized per channel": tensor.is_quantized and not has_strides(tensor),
        }
        if kind := next((kind for kind, is_it in kinds.items() if is_it), None):
            raise UsageError(
                f"The example inputs contain {kind}, {name}, from which no other rows can be made: pass a dense tensor."
            )


def _batch_size(call: Call) -> int | None:
    return next((tensor.shape[0] for tensor in _tensors(call) if tensor.dim() > 0), None)


def _tensors(call: Call) -> list[torch.Tensor]:
    return [tensor for _, tensor in leaves_of((call.args, call.kwargs)).tensors()]


def _rows(observed: int, batch_size: int, generator: torch.Generator) -> torch.Tensor:
    """The observed row for each row of the new batch; each one is used once before any is repeated."""
    rounds = -(-batch_size // observed)
    return torch.cat([torch.randperm(observed, generator=generator) for _ in range(rounds)])[:batch_size]


def _redrawn_call(call: Call, taken_of: Mapping[int, Mapping[int, torch.Tensor]], generator: torch.Generator) -> Call:
    """The call with other tensors of the same kind; `taken_of` has the slices for `_redrawn` by the tensor's id."""

    def redraw(tensor: torch.Tensor) -> torch.Tensor:
        taken = taken_of[id(tensor)]
        return _redrawn(tensor, taken, generator).requires_grad_(tensor.requires_grad) if taken else tensor

    return Call(*rebuild((call.args, call.kwargs), redraw))


def _redrawn(tensor: torch.Tensor, slices: Mapping[int, torch.Tensor], generator: torch.Generator) -> torch.Tensor:
    """Draw another tensor of the same kind; `slices` has the observed slice at each position of some dims."""
    source = tensor.detach()
    if source.layout is not torch.strided or keeps_values(source):
        return _selected(source, slices)
    if source.is_complex():
        parts = [_redrawn(part, slices, generator) for part in (source.real, source.imag)]
        return torch.complex(*parts).to(source.dtype)
    observed, _ = source.to("cpu", torch.float64).flatten().sort()
    if len(observed) > _QUANTILES:
        observed = observed[torch.linspace(0, len(observed) - 1, _QUANTILES, dtype=torch.float64).long()]
    shape = [len(slices[dim]) if dim in slices else size for dim, size in enumerate(source.shape)]
    place = torch.rand(shape, generator=generator, dtype=torch.float64) * (len(observed) - 1)
    below = place.long().clamp_(max=len(observed) - 2)
    drawn = torch.lerp(observed[below], observed[below + 1], place - below)
    return _in_layout_of(source, drawn.to(source.device, source.dtype))


def _selected(source: torch.Tensor, slices: Mapping[int, torch.Tensor]) -> torch.Tensor:
    cut = source if source.layout is torch.strided else source.to_sparse_coo()
    for dim, taken in slices.items():
        cut = cut.index_select(dim, taken.to(cut.device))
    return cut if cut.layout is source.layout else cut.to_sparse(layout=source.layout)


def _in_layout_of(source: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    if source.dim() == 4 and source.is_contiguous(memory_format=torch.channels_last) and not source.is_contiguous():
        return drawn.contiguous(memory_format=torch.channels_last)
    return drawn


def keeps_values(source: torch.Tensor) -> bool:
    """Whether the values carry information that random numbers wouldn't: tokens, flags, masks."""
    if source.layout is not torch.strided or source.is_complex():
        return False
    return not source.is_floating_point() or _is_mask(source.detach())


def _is_mask(source: torch.Tensor) -> bool:
    """Whether the values are constant, two-valued, or contain stand-ins for infinity."""
    if source.numel() < 2:
        return True
    values = source.to("cpu", torch.float64)
    if not torch.isfinite(values).all() or values.abs().max() > torch.finfo(source.dtype).max / 16:
        return True
    low, high = values.min(), values.max()
    return bool(((values == low) | (values == high)).all()) and source.numel() > 2


# Maximum number of other sizes to check for a dim, as far as the original accepts them.
ENOUGH = 4


def ladder(given: int) -> tuple[int, ...]:
    """Other sizes than the given one, the most informative first.

    Some models accept no larger sizes, or only multiples.
    """
    sizes = (given + 1, 1, 2 * given, given // 2, 3 * given // 2, given - 1, 3 * given, 4 * given)
    return tuple(size for size in dict.fromkeys(sizes) if size > 0 and size != given)


@dataclass
class Taken:
    """The sizes at which the original ran."""

    # The batch size of the calls in which another size changes.
    batch: int | None
    # The given size of each name.
    given: Mapping[str, int]
    # For each name, the other sizes at which the original ran.
    alone: dict[str, list[int]] = field(default_factory=dict)
    # Batch size and sizes of the calls in which all sizes grow by equal steps.
    together: list[tuple[int | None, Sizes]] = field(default_factory=list)

    def base(self, name: str) -> int:
        """The size to trace at: the given one, or a larger one if that is 1, which every tracer treats specially."""
        larger = [size for size in self.alone.get(name, ()) if size > 1]
        return self.given[name] if self.given[name] > 1 or not larger else min(larger)

    def others(self, name: str) -> list[int]:
        """Sizes other than the base: at most two above 1, which show how the other sizes behave, and 1."""
        sizes = sorted({self.given[name], *self.alone.get(name, ())} - {self.base(name)})
        larger = [size for size in sizes if size > 1]
        return larger[:2] + ([1] if 1 in sizes else [])

    def bases(self) -> Sizes:
        return tuple((name, self.base(name)) for name in self.given)

    def steps(self, batch: int | None, batches: Iterable[int]) -> tuple[int, dict[str, int]]:
        """The growth of the batch and of each other size in one step; 0 if no larger size is known to work."""
        step = _step(batch, batches) if batch is not None else 0
        return step, {name: _step(self.base(name), self.alone.get(name, ())) for name in self.given}


def _step(base: int, others: Iterable[int]) -> int:
    return min((size - base for size in others if size > base), default=0)


def two_batch_sizes(samples: Samples, mode: Mode, asked: Sequence[int] | None) -> list[int] | None:
    """The batch size of the example inputs and a second one; None if the batch can't change.

    Args:
        asked: the user's batch sizes; the first that is neither 1 nor the given size is used.
    """
    given = samples.batch_size
    if not samples.dynamic or given is None:
        return None
    # Many models treat a batch of 1 specially. In training, 2 rows are special too: a BatchNorm over them gives plus
    # and minus one, and gradients that are mostly rounding error.
    default = given + 1 if mode == "training" else 2 if given != 2 else 3
    return [given, next((size for size in asked or () if size > 1 and size != given), default)]
