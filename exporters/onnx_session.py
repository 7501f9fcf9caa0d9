"""Run an onnxruntime session on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import torch

from exporters.errors import ProviderFallback
from exporters.onnx_runtime import ort

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"


def run_session(
    session: ort.InferenceSession, target: torch.device, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Run a session; the outputs are on `target`, in the session's order. Inputs may be on any device.

    Raises:
        ValueError: the number of tensors or the dtype of one doesn't match the file.
    """
    inputs = [(node.name, _element_type(node.type)) for node in session.get_inputs()]
    outputs = [(node.name, node.type == "tensor(bool)") for node in session.get_outputs()]
    if len(tensors) != len(inputs):
        raise ValueError(f"The file takes {len(inputs)} tensors, not {len(tensors)}.")
    place = (target.type, target.index)
    # Bind by address: this supports every dtype (numpy has no bfloat16) and copies nothing.
    held = [tensor.detach().to(target).contiguous() for tensor in tensors]
    binding = session.io_binding()
    for (name, element_type), tensor in zip(inputs, held, strict=True):
        if (given := _ELEMENT_TYPES.get(tensor.dtype)) != element_type:
            wanted = onnx.TensorProto.DataType.Name(element_type).lower()
            raise ValueError(f"Input `{name}` of the file is {wanted}, but got {tensor.dtype} ({given}).")
        binding.bind_input(name, *place, element_type, list(tensor.shape), tensor.data_ptr())
    for name, _ in outputs:
        binding.bind_output(name, *place)
    if target.type == "cuda":
        # onnxruntime uses its own stream, so the inputs must be complete before it starts.
        torch.cuda.current_stream(target).synchronize()
    session.run_with_iobinding(binding)
    values = (torch.utils.dlpack.from_dlpack(value).clone() for value in binding.get_outputs())
    return tuple(
        value.view(torch.bool) if is_bool and value.dtype != torch.bool else value
        for value, (_, is_bool) in zip(values, outputs, strict=True)
    )


_ELEMENT_TYPES = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float64: onnx.TensorProto.DOUBLE,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.int8: onnx.TensorProto.INT8,
    torch.int16: onnx.TensorProto.INT16,
    torch.int32: onnx.TensorProto.INT32,
    torch.int64: onnx.TensorProto.INT64,
    torch.uint8: onnx.TensorProto.UINT8,
    torch.uint16: onnx.TensorProto.UINT16,
    torch.uint32: onnx.TensorProto.UINT32,
    torch.uint64: onnx.TensorProto.UINT64,
    torch.bool: onnx.TensorProto.BOOL,
}


def _element_type(text: str) -> int:
    """The ONNX element type for a type name of onnxruntime, such as "tensor(float)"."""
    name = text.removeprefix("tensor(").removesuffix(")").upper()
    return int(onnx.TensorProto.DataType.Value(name))


def providers_for(device: torch.device) -> list[Any]:
    """The execution providers of a session on the device, with their options.

    Raises:
        ProviderFallback: there is no such provider.
    """
    if device.type == "cpu":
        return [CPU]
    if device.type != "cuda":
        raise ProviderFallback(f"ONNX files run on the CPU or with CUDA, not on {device.type!r}.")
    if CUDA not in ort.get_available_providers():
        raise ProviderFallback(
            f"onnxruntime {ort.__version__} has no CUDA provider; install one with `pip install onnxruntime-gpu`."
        )
    # TF32 rounds the factors of float32 products to 10 bits of mantissa; results must match the model's.
    return [(CUDA, {"device_id": str(device.index), "use_tf32": "0"}), CPU]
