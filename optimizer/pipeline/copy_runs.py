"""Runs of the working copy on the example calls, for passes and for checks."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from optimize_export.wording import first_line
from optimizer.model import Call, Mode, clone, eager_only, pinned_settings, private_state, random_state, seed_torch
from passes.base import Context
from passes.graph.trial import try_on_graphs

Way = Callable[[], AbstractContextManager[Any]]


class CopyRuns:
    """Runs the working copy itself, because passes know its modules by identity; each run leaves no trace.

    Attributes:
        root: the working copy.
        calls: the example calls.
    """

    def __init__(
        self,
        root: nn.Module,
        calls: Sequence[Call] = (),
        seeds: Sequence[int] = (),
        written: frozenset[str] = frozenset(),
    ) -> None:
        self.calls = list(calls)
        self.root = root
        self._seeds: Mapping[int, int] = dict(enumerate(seeds))
        self._written = written

    def context(self, mode: Mode, device: torch.device) -> Context:
        """The context of passes: the example calls, and ways to run the copy on them."""
        calls = tuple((call.args, call.kwargs) for call in self.calls)
        if not calls:
            return Context(mode, device, calls)
        return Context(
            mode,
            device,
            calls,
            run_inside=self.run_inside,
            run_compiled=self._run_compiled,
            try_on_graphs=try_on_graphs,
            apart=self._apart,
        )

    def run_inside(self, watch: AbstractContextManager[Any], number: int = 0) -> str | None:
        """Run one call inside `watch`; return the error as text, or None if it runs."""
        call = fresh(self.calls[number])
        try:
            with self._quiet(self._seeds.get(number, 0)), watch:
                self.root(*call.args, **call.kwargs)
        except Exception as error:  # noqa: BLE001 - a run of foreign code under watch may raise anything
            return f"{type(error).__name__}: {first_line(error)}"
        return None

    def _run_compiled(self, watch: AbstractContextManager[Any]) -> str | None:
        """As `Context.run_compiled`."""
        try:
            with self._quiet(eager=False), watch:
                for number, call in enumerate(self.calls):
                    copied = fresh(call)
                    seed_torch(number)
                    self.root(*copied.args, **copied.kwargs)
        except Exception as error:  # noqa: BLE001 - a compiler may raise anything on foreign code
            return f"{type(error).__name__}: {first_line(error)}"
        return None

    def seconds(self, ways: Sequence[Way], rounds: int) -> list[float]:
        """The seconds of the first example call in each way: the shortest of some rounds, in turn.

        Args:
            ways: each makes a context around the calls.
        """
        shortest = [math.inf] * len(ways)
        with self._quiet(eager=False):
            for _ in range(rounds):
                for place, way in enumerate(ways):
                    call = fresh(self.calls[0])
                    with way():
                        started = time.perf_counter()
                        self.root(*call.args, **call.kwargs)
                        if torch.cuda.is_initialized():
                            torch.cuda.synchronize()
                        seconds = time.perf_counter() - started
                    shortest[place] = min(shortest[place], seconds)
        return shortest

    @contextmanager
    def _apart(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """As `Context.apart`."""
        call = fresh(self.calls[0])
        parameters = list(self.root.parameters())
        gradients = [parameter.grad for parameter in parameters]
        try:
            with self._quiet(), torch.enable_grad():
                for parameter in parameters:
                    parameter.grad = None
                yield call.args, call.kwargs
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    @contextmanager
    def _quiet(self, seed: int = 0, *, eager: bool = True) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(random_state(seed))
            stack.enter_context(pinned_settings())
            stack.enter_context(eager_only() if eager else nullcontext())
            stack.enter_context(torch.no_grad())
            stack.enter_context(self._private_state())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            yield

    def _private_state(self) -> AbstractContextManager[None]:
        own = {name for name, _ in self.root.named_parameters(remove_duplicate=False)}
        return private_state(self.root, self._written & own)


def fresh(call: Call) -> Call:
    """A copy of the call, because a forward may write to its inputs."""
    args, kwargs = clone((call.args, call.kwargs))
    return Call(args, kwargs)
