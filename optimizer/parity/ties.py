"""The order among equal scores, which the original doesn't decide.

`topk`, `sort`, `argmax` and NMS may order equal scores in any way, and runtimes do. The original is run with ties broken
in two ways, which shows the outputs that follow this order. Where their rows only change places within a tie, they are
compared as a set: the rows of all such outputs are matched together, so that boxes stay with their labels. Where a tie
decides which rows are chosen (not all of its members fit into the k of a `topk`), they aren't compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optimize_export.elementwise import unit
from passes.torch_private import schema_of

Values = Mapping[str, torch.Tensor]
"""Outputs by name."""

# The label of a tie whose members aren't all among the first k.
_EXCLUDED = -1
# Matching the rows of a tie takes quadratic time, so larger ones aren't compared.
_LARGEST = 4096
# Two runs round differently by at most this number of units of the largest value.
_ROUNDING = 64


@dataclass(frozen=True)
class Tie:
    """Outputs whose rows are in the order of one list of scores."""

    by: str
    """The name of the operation that met the tie."""
    groups: torch.Tensor
    """(*outer, K), the same positive number at all positions that share a score; 0 at those with a score of their own,
    and -1 where the tie isn't compared."""
    dim: int
    """The dim of the K rows in the outputs; the dims around it are the outer ones."""
    names: tuple[str, ...] = ()
    """The names of the outputs."""

    def fits(self, value: torch.Tensor) -> bool:
        """Whether an output has these rows."""
        shape = self.groups.movedim(-1, self.dim).shape
        return value.shape[: len(shape)] == shape and not value.is_complex()

    def spread(self, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """A mask of positions in `groups` as one of elements of an output."""
        mask = mask.movedim(-1, self.dim)
        return mask.reshape(*mask.shape, *[1] * (value.dim() - mask.dim())).expand(value.shape)

    def aligned(self, own: Values, values: Values) -> dict[str, torch.Tensor]:
        """The outputs of another run, with the rows of each tie in the order of those of `own`."""
        scales = {name: _largest(own[name]) or 1.0 for name in self.names}
        ours, theirs = (
            torch.cat([self._rows(each[name]).double().nan_to_num() / scales[name] for name in self.names], -1)
            for each in (own, values)
        )
        count = self.groups.shape[-1]
        places = torch.arange(count).repeat(len(ours), 1)
        for number, labels in enumerate(self.groups.reshape(-1, count)):
            for label in labels[labels > 0].unique():
                here = (labels == label).nonzero().flatten()
                places[number, here] = here[_matched(ours[number, here], theirs[number, here])]
        found = {}
        for name in self.names:
            rows = self._rows(values[name])
            moved = rows.gather(1, places[..., None].expand_as(rows))
            shape = (*self.groups.shape, *values[name].shape[self.groups.dim() :])
            found[name] = moved.reshape(shape).movedim(self.groups.dim() - 1, self.dim)
        return found

    def _rows(self, value: torch.Tensor) -> torch.Tensor:
        """(outer, K, elements)"""
        shape = self.groups.shape
        rows = value.movedim(self.dim, len(shape) - 1)
        return rows.reshape(math.prod(shape[:-1]), shape[-1], math.prod(rows.shape[len(shape) :]))


def _matched(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """For each row of `ours`, the nearest row of `theirs` that no earlier row has taken; both are (rows, elements)."""
    order = torch.arange(len(ours))
    if torch.equal(ours, theirs):
        return order
    taken = torch.zeros(len(ours), dtype=torch.bool)
    for number, row in enumerate(ours):
        distance = (theirs - row).abs().amax(-1)
        best = distance.masked_fill(taken, math.inf).argmin()
        order[number], taken[best] = best, True
    return order


def aligned(ties: Sequence[Tie], excluded: Values, own: Values, values: Values) -> Values:
    """The outputs of another run, where equal scores decide as in this one.

    Args:
        excluded: masks of the elements that are taken from `own`.
    """
    comparable = {
        name
        for name, value in values.items()
        if name in own and (value.shape, value.is_floating_point()) == (own[name].shape, own[name].is_floating_point())
    }
    found = dict(values)
    for tie in ties:
        if comparable.issuperset(tie.names):
            found |= tie.aligned(own, found)
    for name in comparable & excluded.keys():
        found[name] = torch.where(excluded[name], own[name].to(found[name].dtype), found[name])
    return found


def find_ties(
    own: Values, first: Values, last: Values, met: Sequence[Tie]
) -> tuple[list[Tie], dict[str, torch.Tensor]]:
    """The ties whose outputs are compared as sets, and masks of the elements of outputs that can't be compared.

    Args:
        first, last: the outputs where the first of several equal scores wins, or the last one.
        met: the ties that the operations met.
    """
    same = [name for name in own if all(name in run and run[name].shape == own[name].shape for run in (first, last))]
    changed = {
        name: mask
        for name in same
        if bool((mask := differs(last[name], first[name]) | differs(own[name], first[name])).any())
    }
    ties, excluded = [], {}
    for tie in met:
        named = [name for name in changed if tie.fits(own[name])]
        alone = [name for name in named if _explains(replace(tie, names=(name,)), own, first, last)]
        if alone and _explains(whole := replace(tie, names=tuple(alone)), own, first, last):
            ties.append(whole)
            for name in alone:
                del changed[name]
                if bool((mask := whole.spread(whole.groups == _EXCLUDED, own[name])).any()):
                    excluded[name] = mask
    return ties, excluded | changed


def _explains(tie: Tie, own: Values, first: Values, last: Values) -> bool:
    """Whether the outputs of all runs differ only within the ties."""
    for other in (first, last):
        for name, value in tie.aligned(own, other).items():
            if bool((differs(value, own[name]) & ~tie.spread(tie.groups == _EXCLUDED, value)).any()):
                return False
    return True


def differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A mask of the elements of two outputs of one shape that differ by more than rounding."""
    if not a.is_floating_point():
        return a != b
    return ~torch.isclose(a, b, rtol=0.0, atol=_ROUNDING * unit(a.dtype) * _largest(b), equal_nan=True)


def _largest(value: torch.Tensor) -> float:
    sizes = value.double().abs()
    sizes = sizes[sizes.isfinite()]
    return float(sizes.max()) if sizes.numel() else 0.0


class BrokenTies(TorchDispatchMode):
    """Breaks ties between equal scores by their place: the first one wins, or the last one."""

    supports_higher_order_operators = True

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        # Whether an operation chose or ordered elements by scores. A higher-order operator, such as the one of
        # `torch.cond`, may have done so.
        self.chooses = False
        # The ties that operations met.
        self.met: list[Tie] = []
        self._last = last

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if (schema := schema_of(func)) is None:
            self.chooses = True
            return func(*args, **given)
        name = func.name().partition("::")[2].partition(".")[0]
        choose = _CHOOSING.get(name)
        if choose is None or self._decides_itself(given) or schema.is_mutable:
            return func(*args, **given)
        self.chooses = True
        arguments = [argument.name for argument in schema.arguments]
        return getattr(self, choose)(name, func, {**dict(zip(arguments, args, strict=False)), **given})

    def _decides_itself(self, given: Mapping[str, Any]) -> bool:
        """Whether an operation with these arguments decides ties, as a stable sort does."""
        return bool(given.get("stable"))

    def _order(self, name: str, scores: torch.Tensor, dim: int, *, descending: bool, first: int) -> torch.Tensor:
        """The indices of the `first` best scores along a dim."""
        ordered = (scores.flip(dim) if self._last else scores).sort(dim=dim, descending=descending, stable=True)
        indices = ordered.indices.narrow(dim, 0, first)
        best = ordered.values.movedim(dim, -1)[..., : first + 1]
        equal = best[..., 1:] == best[..., :-1]
        if bool(equal.any()):
            groups = torch.nn.functional.pad((~equal).cumsum(-1) + 1, (1, 0), value=1)
            shared = torch.nn.functional.pad(equal, (0, 1)) | torch.nn.functional.pad(equal, (1, 0))
            groups = groups.where(shared, 0)
            if best.shape[-1] > first:
                is_cut = (groups == groups[..., -1:]) & shared[..., -1:]
                groups = groups.masked_fill(is_cut, _EXCLUDED)[..., :first]
            if groups.shape[-1] > _LARGEST:
                sizes = torch.zeros_like(groups).scatter_add(-1, groups.clamp(min=0), torch.ones_like(groups))
                is_large = sizes.gather(-1, groups.clamp(min=0)) > _LARGEST
                groups = groups.masked_fill(is_large & (groups > 0), _EXCLUDED)
            self.met.append(Tie(name, groups.cpu(), dim % scores.dim()))
        return scores.shape[dim] - 1 - indices if self._last else indices

    def _sorted(self, name: str, func: Any, given: dict[str, Any]) -> Any:
        scores, dim = given["self"], given.get("dim", -1)
        if not scores.dim() or not scores.numel() or scores.dtype == torch.bool:
            return func(**given)
        descending = given.get("largest", given.get("descending", name == "topk"))
        order = self._order(name, scores, dim, descending=descending, first=given.get("k", scores.shape[dim]))
        return scores.gather(dim, order), order

    def _extreme(self, name: str, func: Any, given: dict[str, Any]) -> Any:
        scores, dim = given["self"], given.get("dim")
        is_arg = name.startswith("arg")
        # Without a dim, `max` returns no index.
        if not scores.dim() or not scores.numel() or scores.dtype == torch.bool or (dim is None and not is_arg):
            return func(**given)
        flat = scores.reshape(-1) if dim is None else scores
        order = self._order(name, flat, dim or 0, descending="max" in name, first=1)
        if given.get("keepdim", False):
            order = order.reshape((1,) * scores.dim()) if dim is None else order
            return order if is_arg else (scores.gather(dim, order), order)
        indices = order.squeeze(dim or 0)
        return indices if is_arg else (scores.gather(dim, order).squeeze(dim), indices)

    def _suppressed(self, name: str, func: Any, given: dict[str, Any]) -> Any:
        scores = given["scores"]
        if not len(scores):
            return func(**given)
        self._order(name, scores, 0, descending=True, first=len(scores))
        if not self._last:
            return func(**given)
        turned = {key: value.flip(0) if isinstance(value, torch.Tensor) else value for key, value in given.items()}
        return len(scores) - 1 - func(**turned)


# By operator, the method that computes it.
_CHOOSING = {
    "topk": "_sorted",
    "sort": "_sorted",
    "max": "_extreme",
    "min": "_extreme",
    "argmax": "_extreme",
    "argmin": "_extreme",
    "nms": "_suppressed",
}
