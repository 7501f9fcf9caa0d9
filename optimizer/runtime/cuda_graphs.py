"""Record the kernels of a call once for each shape of the inputs, and replay them as one launch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

_Shapes = tuple[tuple[torch.Size, torch.dtype], ...]
# Each graph keeps the memory of all its tensors. Calls of further shapes run without one.
_MOST_GRAPHS = 16
# torch captures one graph at a time in a process.
_capturing = threading.Lock()


class Graphed:
    """Runs a function of tensors on the GPU by CUDA graphs.

    A graph reads and writes fixed memory, so calls wait for each other, in whatever streams they are. The inputs are
    copied in, the outputs out.

    Args:
        run: the function; it must launch the same kernels at each call of the same shapes, and not wait for the GPU.
    """

    def __init__(self, run: Callable[..., tuple[torch.Tensor, ...]]) -> None:
        self._run = run
        self._graphs: dict[_Shapes, tuple[torch.cuda.CUDAGraph, list[torch.Tensor], tuple[torch.Tensor, ...]]] = {}
        self._lock = threading.Lock()
        self._copied_out = torch.cuda.Event()

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        with self._lock:
            if shapes not in self._graphs:
                if len(self._graphs) == _MOST_GRAPHS:
                    return self._run(*tensors)
                self._graphs[shapes] = self._recorded(tensors)
            graph, inputs, outputs = self._graphs[shapes]
            self._copied_out.wait()
            for static, given in zip(inputs, tensors, strict=True):
                static.copy_(given, non_blocking=True)
            graph.replay()
            copies = tuple(output.clone() for output in outputs)
            self._copied_out.record()
            return copies

    def _recorded(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # A later call outside of inference mode couldn't write to inputs made inside it. The outer stream context
        # restores the caller's stream even if the capture fails.
        with _capturing, torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(stream):
            inputs = [tensor.clone() for tensor in tensors]
            # Libraries allocate their workspaces, and TorchScript optimizes, in the first calls.
            for _ in range(3):
                self._run(*inputs)
            graph = torch.cuda.CUDAGraph()
            # Other threads may allocate memory meanwhile.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                outputs = self._run(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        return graph, inputs, tuple(outputs)
