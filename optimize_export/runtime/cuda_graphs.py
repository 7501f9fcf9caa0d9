"""Record the kernels of a call once for each shape of the inputs, and replay them as one launch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import torch

from optimize_export.wording import first_line

logger = logging.getLogger(__name__)

# A function that replays a graph, its inputs and its outputs.
_Graph = tuple[Callable[[], None], list[torch.Tensor], tuple[torch.Tensor, ...]]
_Shapes = tuple[tuple[torch.Size, torch.dtype], ...]
# Calls of further shapes run without a graph.
_MOST_GRAPHS = 16
# The share of the GPU's memory that graphs leave free; each keeps its inputs, its outputs and its kernels.
_LEFT_FREE = 0.1
# torch captures one graph at a time in a process.
_capturing = threading.Lock()


class CaptureFailed(Exception):
    """A call can't be recorded, although it runs; the message is the reason."""


class Graphed:
    """Runs a function of tensors on the GPU by CUDA graphs.

    A graph reads and writes fixed memory, so calls wait for each other, in whatever streams they are. The inputs are
    copied in, the outputs out. Shapes that can't be recorded run without a graph, as further shapes do once there are
    many graphs or little memory.

    `run` must launch the same kernels at each call of the same shapes, and not wait for the GPU. One thread at a time
    calls it. `record` makes a graph for inputs of the given shapes, and returns a function that replays it and the
    tensors that it reads and writes, or raises `CaptureFailed`; by default torch makes it.
    """

    def __init__(
        self,
        run: Callable[..., tuple[torch.Tensor, ...]],
        record: Callable[[Sequence[torch.Tensor]], _Graph] | None = None,
    ) -> None:
        self.why_none = ""  # why the first shape that has no graph can't have one; "" if all can
        self._run = run
        self._record = self._recorded if record is None else record
        self._graphs: dict[_Shapes, _Graph | None] = {}
        self._largest = 0  # the most bytes of the GPU's memory that a graph took
        self._lock = threading.Lock()
        self._copied_out = torch.cuda.Event()
        # All graphs take their memory from one pool. By torch's rule for that, they must be replayed in the order of their
        # captures, because a graph overwrites what another has left in the pool. Here any order is right. Calls wait
        # for each other, and nothing in the pool outlives a call: the inputs are outside of it, the outputs are copied
        # out before the next replay, and a graph computes all other values before it reads them. Captures that share a
        # pool must share a stream.
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        with self._lock:
            if shapes not in self._graphs and len(self._graphs) < _MOST_GRAPHS:
                self._graphs[shapes] = self._graph_of(tensors)
            graph = self._graphs.get(shapes)
            if graph is None:
                return self._run(*tensors)
            replay, inputs, outputs = graph
            self._copied_out.wait()
            for static, given in zip(inputs, tensors, strict=True):
                # From pinned memory, a copy doesn't wait for the GPU.
                static.copy_(given if given.is_cuda else given.pin_memory(), non_blocking=True)
            replay()
            copies = tuple(output.clone() for output in outputs)
            self._copied_out.record()
            return copies

    def _graph_of(self, tensors: Sequence[torch.Tensor]) -> _Graph | None:
        """Record a graph; None if it can't be recorded, or would leave too little memory.

        Raises:
            Exception: an error of the function itself.
        """
        free, total = _memory()
        if free - self._largest < _LEFT_FREE * total:
            self._tell(f"only {free / 2**30:.1f} GiB of the GPU's memory are free")
            return None
        try:
            # A later call outside of inference mode couldn't write to inputs made inside it.
            with _capturing, torch.inference_mode(False), torch.no_grad():
                graph = self._record(tensors)
        except CaptureFailed as error:
            self._tell(str(error))
            return None
        self._largest = max(self._largest, free - _memory()[0])
        return graph

    def _tell(self, reason: str) -> None:
        """Say once why calls of a shape have no graph."""
        if not self.why_none:
            self.why_none = reason
            logger.warning("calls of some shapes run without a CUDA graph: %s", reason)

    def _recorded(self, tensors: Sequence[torch.Tensor]) -> _Graph:
        self._stream.wait_stream(torch.cuda.current_stream())
        # This restores the caller's stream even if the capture fails.
        with torch.cuda.stream(self._stream):
            inputs = [tensor.clone() for tensor in tensors]
            # Libraries allocate their workspaces, and TorchScript optimizes, in the first calls. Errors of the function
            # are raised here, so one that only the capture raises is its own.
            for _ in range(3):
                self._run(*inputs)
            graph = torch.cuda.CUDAGraph()
            failed: RuntimeError | None = None
            try:
                # Other threads may allocate memory and run kernels meanwhile.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    try:
                        outputs = self._run(*inputs)
                    except RuntimeError as error:
                        failed = error
                        raise
            except RuntimeError as error:
                # The pool is in the state in which the capture ended.
                self._pool = torch.cuda.graph_pool_handle()
                # The end of a failed capture raises as well, and says less than the operation that failed.
                raise CaptureFailed(first_line(failed or error)) from error
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay, inputs, tuple(outputs)


def _memory() -> tuple[int, int]:
    """The bytes of the GPU that are free, or that torch keeps for later and returns before a capture; and all bytes."""
    free, total = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated(), total
