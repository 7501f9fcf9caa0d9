"""Record the kernels of a call once for each shape of the inputs, and replay them as one launch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

# A function that replays a graph, its inputs and its outputs.
_Graph = tuple[Callable[[], None], list[torch.Tensor], tuple[torch.Tensor, ...]]
_Shapes = tuple[tuple[torch.Size, torch.dtype], ...]
# Each graph keeps the memory of all its tensors. Calls of further shapes run without one.
_MOST_GRAPHS = 16
# torch captures one graph at a time in a process.
_capturing = threading.Lock()


class Graphed:
    """Runs a function of tensors on the GPU by CUDA graphs.

    A graph reads and writes fixed memory, so calls wait for each other, in whatever streams they are. The inputs are
    copied in, the outputs out.

    `run` must launch the same kernels at each call of the same shapes, and not wait for the GPU. `record` makes a graph
    for inputs of the given shapes, and returns a function that replays it and the tensors that it reads and writes; by
    default torch makes it.
    """

    def __init__(
        self,
        run: Callable[..., tuple[torch.Tensor, ...]],
        record: Callable[[Sequence[torch.Tensor]], _Graph] | None = None,
    ) -> None:
        self._run = run
        self._record = self._recorded if record is None else record
        self._graphs: dict[_Shapes, _Graph] = {}
        self._lock = threading.Lock()
        self._copied_out = torch.cuda.Event()

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        with self._lock:
            if shapes not in self._graphs:
                if len(self._graphs) == _MOST_GRAPHS:
                    return self._run(*tensors)
                # A later call outside of inference mode couldn't write to inputs made inside it.
                with _capturing, torch.inference_mode(False), torch.no_grad():
                    self._graphs[shapes] = self._record(tensors)
            replay, inputs, outputs = self._graphs[shapes]
            self._copied_out.wait()
            for static, given in zip(inputs, tensors, strict=True):
                static.copy_(given, non_blocking=True)
            replay()
            copies = tuple(output.clone() for output in outputs)
            self._copied_out.record()
            return copies

    def _recorded(self, tensors: Sequence[torch.Tensor]) -> _Graph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # This restores the caller's stream even if the capture fails.
        with torch.cuda.stream(stream):
            inputs = [tensor.clone() for tensor in tensors]
            # Libraries allocate their workspaces, and TorchScript optimizes, in the first calls.
            for _ in range(3):
                self._run(*inputs)
            graph = torch.cuda.CUDAGraph()
            # Other threads may allocate memory meanwhile.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                outputs = self._run(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        return graph.replay, inputs, tuple(outputs)
