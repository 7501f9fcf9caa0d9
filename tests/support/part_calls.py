"""Call the parts of a result by hand, each with the arguments that it had in a run of the whole model."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from random_modules import modules_of
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from optimizer import check_parity

# Relative differences below this need no other judge: a few roundings.
_NEAR = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
# The path, the positional and the keyword arguments of one call.
PartCall = tuple[str, tuple[Any, ...], dict[str, Any]]
# Makes a module, the same at every call.
Make = Callable[[], nn.Module]


def calls_in_a_run(make: Make, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[PartCall]:
    """The first call of every part in a run of the model."""
    twin = make().eval()
    found: dict[str, PartCall] = {}

    def remember(path: str) -> Any:
        def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            found.setdefault(path, (path, *_cloned((given, named))))

        return hook

    for path, module in list(modules_of(twin))[1:]:
        module.register_forward_pre_hook(remember(path), prepend=True, with_kwargs=True)
    with torch.no_grad():
        twin(*_cloned(args), **_cloned(kwargs))
    return list(found.values())


def check_parts(original: Make, fast: Make, calls: list[PartCall]) -> None:
    """Check that every part of the result returns what the original's part returns.

    Each call is the first one of its model, or follows calls that changed nothing in it.

    Args:
        original, fast: make the original and the result, or copies.
        calls: the calls of the parts, in the order of a run.

    Raises:
        AssertionError: a part returns something else.
    """
    mine, theirs = _Parts(lambda: original().eval()), _Parts(fast)
    for call in calls:
        if not are_near(mine.answer(call), theirs.answer(call)):
            _judge(original, fast, call)


class _Parts:
    """The parts of a model, which are called by hand. The model is made anew after a call that changed it."""

    def __init__(self, make: Make) -> None:
        self.make = make
        self.renew()

    def renew(self) -> None:
        """Make the model."""
        self.parts = dict(modules_of(self.make()))
        self.held, self.versions = self.state()

    def answer(self, call: PartCall) -> Any:
        """The output of the part."""
        if not self.is_as_made():
            self.renew()
        path, args, kwargs = call
        assert path in self.parts, f"the result has no part {path}"
        with torch.no_grad():
            return self.parts[path](*_cloned(args), **_cloned(kwargs))

    def is_as_made(self) -> bool:
        """Whether every module holds the same objects as when it was made, and no tensor was written to."""
        held, versions = self.state()
        return versions == self.versions and len(held) == len(self.held) and all(map(operator.is_, held, self.held))

    def state(self) -> tuple[list[Any], list[int]]:
        """The attributes of the modules with their contents, and the version of each tensor."""
        held: list[Any] = []
        for module in self.parts.values():
            for value in module.__dict__.values():
                held.append(value)
                if isinstance(value, dict):
                    held += (*value, *value.values())
                elif isinstance(value, list | tuple | set):
                    held += value
        return held, [value._version for value in held if isinstance(value, Tensor)]


def _judge(original: Make, fast: Make, call: PartCall) -> None:
    path, args, kwargs = call
    mine, theirs = (dict(modules_of(root))[path] for root in (original().eval(), fast()))
    sizes = (len(args[0]),) if args else ()
    report = check_parity(mine, theirs, args, example_kwargs=kwargs, batch_sizes=sizes or (2,), draws=1)
    assert report.ok, f"the part {path}, called by hand, gives something else: {report.reason}"


def are_near(wanted: Any, got: Any) -> bool:
    """Whether two outputs differ by a few roundings at most; memory alignment may change the order of a sum."""
    mine, theirs = list(_leaves(wanted)), list(_leaves(got))
    return len(mine) == len(theirs) and all(_is_near(*pair) for pair in zip(mine, theirs, strict=True))


def _is_near(wanted: Any, got: Any) -> bool:
    if not isinstance(wanted, Tensor) or not isinstance(got, Tensor):
        return bool(wanted == got)
    if wanted.shape != got.shape or wanted.dtype != got.dtype or not wanted.numel():
        return wanted.shape == got.shape and wanted.dtype == got.dtype
    wide = wanted.double()
    difference = (wide - got.double()).abs().max().item()
    return difference <= _NEAR.get(wanted.dtype, 0.0) * wide.abs().max().item()


def _leaves(value: Any) -> Iterator[Any]:
    for leaf in pytree.tree_leaves(value):
        if dataclasses.is_dataclass(type(leaf)):
            yield from _leaves([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        else:
            yield leaf


def _cloned(value: Any) -> Any:
    if dataclasses.is_dataclass(type(value)):
        return dataclasses.replace(
            value, **{f.name: _cloned(getattr(value, f.name)) for f in dataclasses.fields(value)}
        )
    return pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else _cloned(leaf) if _is_object(leaf) else leaf, value
    )


def _is_object(leaf: Any) -> bool:
    return dataclasses.is_dataclass(type(leaf))
