"""Run an onnxruntime session on torch tensors by their addresses: on any device, in any dtype, without copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from optimize_export.onnx_runtime import ort, without_graph
from optimize_export.runtime.cuda_graphs import CaptureFailed
from optimize_export.wording import first_line


class BoundSession:
    """A session, called on torch tensors. The outputs are on its device `target`, in the session's order.

    `graphs`: whether the session has the provider's option `enable_cuda_graph`.
    """

    def __init__(self, session: ort.InferenceSession, target: torch.device, *, graphs: bool = False) -> None:
        self._session = session
        self._target = target
        self._place = (target.type, target.index or 0)
        self._inputs = [
            (node.name, node.type.removeprefix("tensor(").removesuffix(")")) for node in session.get_inputs()
        ]
        self._outputs = [(node.name, node.type == "tensor(bool)") for node in session.get_outputs()]
        self._options = without_graph() if graphs else None
        self._numbers = itertools.count()

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the session; the inputs may be on any device. ValueError if their number or a dtype doesn't match the file."""
        held = self._on_target(tensors)
        binding = self._with_inputs(held)
        for name, _ in self._outputs:
            binding.bind_output(name, *self._place)
        self._run(binding, self._options)
        values = (torch.utils.dlpack.from_dlpack(value).clone() for value in binding.get_outputs())
        return tuple(
            value.view(torch.bool) if is_bool and value.dtype != torch.bool else value
            for value, (_, is_bool) in zip(values, self._outputs, strict=True)
        )

    def recorded(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[Callable[[], None], list[torch.Tensor], tuple[torch.Tensor, ...]]:
        """Record a CUDA graph for inputs of these shapes: a function that replays it, and its inputs and outputs.

        Raises:
            CaptureFailed: the file runs on these inputs, but can't be recorded.
        """
        inputs = [tensor.clone() for tensor in self._on_target(tensors)]
        # The sizes of the outputs are known after a run.
        outputs = self(*inputs)
        binding = self._with_inputs(inputs)
        for (name, _), tensor in zip(self._outputs, outputs, strict=True):
            _, element_type = _ELEMENT_TYPES[tensor.dtype]
            binding.bind_output(name, *self._place, element_type, list(tensor.shape), tensor.data_ptr())
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(next(self._numbers)))
        # onnxruntime records in the first run of each thread, and replays in its later ones.
        try:
            self._run(binding, options)
        # The file has just run on these inputs. onnxruntime's errors have no class in common.
        except Exception as error:
            raise CaptureFailed(first_line(error)) from error
        return lambda: self._run(binding, options), inputs, outputs

    def _on_target(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if len(tensors) != len(self._inputs):
            raise ValueError(f"The file takes {len(self._inputs)} tensors, not {len(tensors)}.")
        # onnxruntime reads the memory, which doesn't hold the values of a lazily negated tensor.
        return [_moved(tensor.detach().resolve_neg(), self._target).contiguous() for tensor in tensors]

    def _with_inputs(self, held: Sequence[torch.Tensor]) -> Any:
        # Bind by address: this supports every dtype (numpy has no bfloat16) and copies nothing.
        binding = self._session.io_binding()
        for (name, wanted), tensor in zip(self._inputs, held, strict=True):
            given, element_type = _ELEMENT_TYPES.get(tensor.dtype, ("", 0))
            if given != wanted:
                raise ValueError(f"Input `{name}` of the file is {wanted}, but got {tensor.dtype}.")
            binding.bind_input(name, *self._place, element_type, list(tensor.shape), tensor.data_ptr())
        return binding

    def _run(self, binding: Any, options: ort.RunOptions | None) -> None:
        if self._target.type == "cuda":
            # onnxruntime uses its own stream, so the inputs must be complete before it starts.
            torch.cuda.current_stream(self._target).synchronize()
        self._session.run_with_iobinding(binding, options)


def _moved(tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
    """The tensor on the target. From pinned memory, a copy to the GPU doesn't wait for it."""
    if tensor.is_cuda or target.type != "cuda":
        return tensor.to(target)
    return tensor.pin_memory().to(target, non_blocking=True)


# The names of dtypes in onnxruntime, and their numbers in ONNX files (`onnx.TensorProto.DataType`). A machine that only
# runs files needn't have the onnx package.
_ELEMENT_TYPES = {
    torch.float32: ("float", 1),
    torch.uint8: ("uint8", 2),
    torch.int8: ("int8", 3),
    torch.uint16: ("uint16", 4),
    torch.int16: ("int16", 5),
    torch.int32: ("int32", 6),
    torch.int64: ("int64", 7),
    torch.bool: ("bool", 9),
    torch.float16: ("float16", 10),
    torch.float64: ("double", 11),
    torch.uint32: ("uint32", 12),
    torch.uint64: ("uint64", 13),
    torch.bfloat16: ("bfloat16", 16),
}
