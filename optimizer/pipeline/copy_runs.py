"""Runs of the working copy on the example calls: for passes, for checks, and to see whether rewritten graphs pay."""

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
from optimizer.options import is_to_be_timed
from passes.base import Context
from passes.graph.backend import GraphCall, compilation_of, without_graph_call
from passes.graph.trial import try_on_graphs
from passes.torch_private import COMPILED_CALL

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


# What the graphs of a model with slower calls cost doesn't count: of one graph, and of several, in seconds.
_SLOWEST, _SLOWEST_SPLIT = 5e-3, 0.1
_ROUNDS = 9
# A result may be slower by this factor, which is the noise of such a measurement.
_NOISE = 1.05


def run_as_written_if_faster(root: nn.Module, runs: CopyRuns) -> str:
    """Let a result run as written if it is slower by its rewritten graphs, which stay for files; return a note or "".

    At every call, torch.compile checks its guards, and each graph its derived tensors: some 30 microseconds for a small
    model, in each of its graphs. Such a model may lose more than its passes gain. Nothing is timed where the environment variable OPTIMIZE_EXPORT_NO_BENCH is set.
    """
    call = root.__dict__.get(COMPILED_CALL)
    if not isinstance(call, GraphCall) or not runs.calls or not is_to_be_timed(None):
        # Without a run, or under another compiler.
        return ""
    is_split = compilation_of(call).compiled.is_split

    def as_written() -> AbstractContextManager[Any]:
        return without_graph_call(root)

    if runs.seconds([as_written], 1)[0] > (_SLOWEST_SPLIT if is_split else _SLOWEST):
        return ""
    written, rewritten = runs.seconds([as_written, nullcontext], _ROUNDS)
    if rewritten <= _NOISE * written:
        return ""
    call.is_for_files = True
    times = f"{1e3 * written:.2f} ms instead of {1e3 * rewritten:.2f} ms by the rewritten graph"
    note = f"calls of the result run as written, which takes {times}"
    if is_split:
        return f"{note}s; files hold its changes if torch.export traces the forward as one graph"
    return f"{note}; files hold the rewritten graph"
