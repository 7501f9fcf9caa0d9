"""Outputs whose rows are in the order of scores, as boxes after a `topk`; lossy candidates may order close scores otherwise.

The original is run with the order of one operation turned around: the outputs that turn with it follow this order. For a
lossy candidate, the rows of such outputs are matched before they are compared:

- Original and candidate must both be sorted by their own scores, which are a column of an output.
- The candidate's error of the scores is the largest difference of the two sorted lists. Sorting hides a part of it: in
  simulated detectors, rows whose own scores had errors e were apart by up to 2.7 times this difference.
- Two scores are equal if they differ by at most `_EQUAL` times this error, in the original. Only rows with equal scores
  may change places, all outputs together, one to one.

No wrong file passes by that. Each row of the original is compared with a row of its own, so a row that is missing or
comes twice shows. Where the scores are exact, no row moves. Where they aren't, a row moves only as far as the scores'
error explains, and its scores and everything else are compared at its new place, by the budget. A list that can't be
matched so, as where a row with another score was chosen, is compared by place.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from exporters.places import paths_of, users_line
from optimizer.parity.ties import BrokenTies, Values, differs

# In units of the candidate's error of the scores.
_EQUAL = 4.0
# A table of all pairs of rows takes quadratic memory.
_LARGEST = 2048
# The number of operations that are turned around, one run each, from the last one on.
_TURNED = 8


@dataclass(frozen=True)
class RowOrder:
    """Outputs whose rows are in the order of one list of scores."""

    by: str
    """The operation, with its place: "topk in module `head` (net.py:17)"."""
    dim: int
    """The dim of the rows in the outputs; the dims before it are those of the lists of scores."""
    names: tuple[str, ...]
    """The names of the outputs."""
    scores: str | None = None
    """The output that has the scores; None if none has."""
    column: int = 0
    """The index of the scores among the elements of a row there."""
    descending: bool = True
    unjudged: tuple[str, ...] = ()
    """Those of `names` that a top-1 agreement doesn't judge: floats that aren't only the scores."""

    def renamed(self, names: Mapping[str, str]) -> RowOrder:
        """The same for outputs with other names."""
        scores = None if self.scores is None else names[self.scores]
        own, unjudged = (tuple(names[name] for name in each) for each in (self.names, self.unjudged))
        return replace(self, names=own, scores=scores, unjudged=unjudged)

    def has_other_rows(self, own: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether another run's output differs in the number of rows, and in nothing else of its shape and dtype."""
        shapes = [(*each.shape[: self.dim], *each.shape[self.dim + 1 :]) for each in (own, value)]
        return own.dtype == value.dtype and own.dim() == value.dim() and shapes[0] == shapes[1]

    def scores_in(self, value: torch.Tensor) -> torch.Tensor:
        """The scores in the output that has them, shape (lists, rows)."""
        return _rows_of(value, self.dim)[..., self.column]

    def aligned(self, own: Values, values: Values) -> Values:
        """The outputs of another run, with the rows in the order of those of `own` as far as equal scores allow it."""
        if self.scores is None or any(
            name not in values
            or own[name].shape != values[name].shape
            or own[name].is_floating_point() != values[name].is_floating_point()
            for name in self.names
        ):
            return values
        ours, theirs = (self.scores_in(each[self.scores]).double() for each in (own, values))
        lists, count = ours.shape
        if not (0 < count <= _LARGEST and lists and self._is_sorted(ours) and self._is_sorted(theirs)):
            return values
        equal = _EQUAL * float((theirs - ours).abs().max())
        places = torch.arange(count).repeat(lists, 1)
        for number, scores in enumerate(ours):
            is_allowed = (scores[:, None] - scores).abs() <= equal
            distances = self._distances(own, values, number).masked_fill(~is_allowed, torch.inf)
            places[number] = _matched(distances, places[number])
        found = dict(values)
        for name in self.names:
            rows = _rows_of(values[name], self.dim)
            found[name] = rows.gather(1, places[..., None].expand_as(rows)).reshape(values[name].shape)
        return found

    def _is_sorted(self, scores: torch.Tensor) -> bool:
        steps = scores.diff()
        return bool(((steps <= 0) if self.descending else (steps >= 0)).all())

    def _distances(self, own: Values, values: Values, number: int) -> torch.Tensor:
        """Between each row of a list of `own` and each of the other run's, shape (rows, rows).

        The largest difference of a number, in units of its column's largest size; 2 more where integers differ.
        """
        found = torch.zeros((), dtype=torch.float64)
        for name in self.names:
            whole, other = (_rows_of(each[name], self.dim) for each in (own, values))
            ours, theirs = (each[number].double().nan_to_num() for each in (whole, other))
            if own[name].is_floating_point():
                scale = ours.abs().amax(0).clamp(min=torch.finfo(torch.float32).tiny)
                found = torch.maximum(found, torch.cdist(ours / scale, theirs / scale, p=torch.inf))
            else:
                found = found + 2.0 * (torch.cdist(ours, theirs, p=torch.inf) > 0)
        return found


def _rows_of(value: torch.Tensor, dim: int) -> torch.Tensor:
    """An output with its rows along a dim, shape (lists, rows, elements)."""
    shape = value.shape
    return value.reshape(math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :]))


def _matched(distances: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """For each row, the column that it is matched with: the closest pair first, one to one; `places` if that is as close.

    Args:
        distances: (rows, rows); infinite where a pair isn't allowed. The diagonal is allowed.
    """
    left, found = distances.clone(), torch.full_like(places, -1)
    while bool(left.isfinite().any()):
        # The closest pair of all is the closest one of its row and of its column. So are others, which are taken too.
        nearest, of = left.min(1).indices, left.min(0).indices
        pairs = (of[nearest] == places) & left.amin(1).isfinite()
        found[pairs] = nearest[pairs]
        left[pairs] = torch.inf
        left[:, nearest[pairs]] = torch.inf
    alone = found < 0
    is_free = torch.ones_like(alone)
    is_free[found[~alone]] = False
    found[alone] = places[is_free]
    by_match, by_place = (float(distances[places, each].sum()) for each in (found, places))
    return found if by_match < by_place else places


@dataclass(frozen=True)
class Orders:
    """The choices that an original makes by scores, and the outputs that they reach."""

    rows: tuple[RowOrder, ...] = ()
    chosen: Mapping[str, str] = field(default_factory=dict)
    """By the name of an output, the last operation that its numbers depend on, with its place."""


@dataclass(frozen=True)
class _Choice:
    """One call of an operation that orders or chooses by scores."""

    by: str
    scores: torch.Tensor
    """The chosen scores in their order, on the CPU, shape (…, chosen) if `dim` is the last dim."""
    dim: int
    descending: bool

    def counts(self, outputs: Values) -> list[int]:
        """The numbers of first rows of this order that an output may consist of; all if there is no such output."""
        *lists, most = self.scores.movedim(self.dim, -1).shape
        if self.dim != self.scores.dim() - 1:
            return [most]
        fitting = [value for value in outputs.values() if list(value.shape[:-1])[: self.dim] == lists]
        counts = {value.shape[self.dim] for value in fitting if value.dim() > self.dim}
        return sorted(count for count in counts if 2 <= count <= most) or [most]

    def orders(self, count: int, own: torch.Tensor, turned: torch.Tensor) -> bool:
        """Whether the rows of an output are the first ones of this order, given a run in which these are turned around."""
        if own.shape[: self.dim + 1] != (*self.scores.shape[:-1], count) or own.is_complex():
            return False
        return own.shape == turned.shape and not bool(differs(turned, own.flip(self.dim)).any())

    def with_scores(self, order: RowOrder, count: int, own: Values) -> RowOrder:
        """The order, with the output that has the scores themselves, or what was sorted in their place: -scores."""
        scores = self.scores.narrow(self.dim, 0, count).reshape(-1, count)
        # Among equal scores, a column could have them by chance.
        if not scores.is_floating_point() or not bool((scores != scores[:, :1]).any()):
            return order
        for name in order.names:
            if own[name].is_floating_point():
                rows = _rows_of(own[name], self.dim)
                for column, sign in itertools.product(range(rows.shape[-1]), (1, -1)):
                    if not bool(differs(rows[..., column], sign * scores.to(rows.dtype)).any()):
                        descending = self.descending == (sign == 1)
                        return replace(order, scores=name, column=column, descending=descending)
        return order


class _Turned(BrokenTies):
    """Turns around the first rows of one operation that orders by scores, and notes all such operations."""

    def __init__(self, module: Any, turned: int | None = None, count: int = 1) -> None:
        super().__init__(last=False)
        self.choices: list[_Choice] = []
        self._paths = paths_of(module) if isinstance(module, nn.Module) else {}
        self._turned, self._count = turned, count

    def _decides_itself(self, given: Mapping[str, Any]) -> bool:
        return False

    def _order(self, name: str, scores: torch.Tensor, dim: int, *, descending: bool, first: int) -> torch.Tensor:
        ordered = scores.sort(dim=dim, descending=descending, stable=True)
        indices = ordered.indices.narrow(dim, 0, first)
        is_turned = self._note(name, ordered.values.narrow(dim, 0, first), dim % scores.dim(), descending=descending)
        if not is_turned:
            return indices
        if first == 1:
            return ordered.indices.narrow(dim, scores.shape[dim] - 1, 1)
        return self._turn(indices, dim)

    def _suppressed(self, name: str, func: Any, given: dict[str, Any]) -> Any:
        kept = func(**given)
        is_turned = self._note(name, given["scores"][kept], 0, descending=True)
        return self._turn(kept, 0) if is_turned else kept

    def _note(self, name: str, values: torch.Tensor, dim: int, *, descending: bool) -> bool:
        """Note an operation; return whether it is the one to turn around."""
        place = users_line(sys._getframe(), self._paths)
        self.choices.append(_Choice(f"{name}{place}", values.cpu(), dim, descending))
        return len(self.choices) - 1 == self._turned

    def _turn(self, indices: torch.Tensor, dim: int) -> torch.Tensor:
        rest = indices.shape[dim] - self._count
        return torch.cat([indices.narrow(dim, 0, self._count).flip(dim), indices.narrow(dim, self._count, rest)], dim)


def find_orders(run: Callable[[Callable[[Any], AbstractContextManager[Any]]], Values]) -> Orders:
    """Find the outputs that the original chooses or orders by scores.

    Args:
        run: runs one call of the original in a mode, which is made for the copy that is run, and returns its outputs.
    """
    modes: list[_Turned] = []

    def outputs(*turned: int) -> Values:
        def mode(module: Any) -> _Turned:
            modes.append(_Turned(module, *turned))
            return modes[-1]

        return run(mode)

    own = outputs()
    rows: list[RowOrder] = []
    chosen: dict[str, str] = {}
    for number, choice in list(enumerate(modes[0].choices))[: -_TURNED - 1 : -1]:
        for count in choice.counts(own):
            seen = outputs(number, count)
            changed = [
                name
                for name in own.keys() & seen.keys()
                if own[name].shape != seen[name].shape or bool(differs(own[name], seen[name]).any())
            ]
            chosen = {**dict.fromkeys(changed, choice.by), **chosen}
            known = {name for order in rows for name in order.names}
            names = [name for name in own if name in changed and name not in known]
            following = tuple(name for name in names if choice.orders(count, own[name], seen[name]))
            if following and count > 1:
                order = choice.with_scores(RowOrder(choice.by, choice.dim, following), count, own)
                rows.append(replace(order, unjudged=_unjudged(order, own)))
    return Orders(tuple(rows), chosen)


def _unjudged(order: RowOrder, own: Values) -> tuple[str, ...]:
    def is_scores(name: str) -> bool:
        return name == order.scores and own[name].numel() == order.scores_in(own[name]).numel()

    return tuple(name for name in order.names if own[name].is_floating_point() and not is_scores(name))
