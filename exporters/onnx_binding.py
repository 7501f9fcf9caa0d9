"""Run an onnxruntime session on torch tensors by their addresses: on any device, in any dtype, without copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exporters.onnx_runtime import ort


def run_session(
    session: ort.InferenceSession, target: torch.device, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Run a session; the outputs are on `target`, in the session's order. Inputs may be on any device.

    Raises:
        ValueError: the number of tensors or the dtype of one doesn't match the file.
    """
    inputs = [(node.name, node.type.removeprefix("tensor(").removesuffix(")")) for node in session.get_inputs()]
    outputs = [(node.name, node.type == "tensor(bool)") for node in session.get_outputs()]
    if len(tensors) != len(inputs):
        raise ValueError(f"The file takes {len(inputs)} tensors, not {len(tensors)}.")
    place = (target.type, target.index)
    # Bind by address: this supports every dtype (numpy has no bfloat16) and copies nothing.
    held = [tensor.detach().to(target).contiguous() for tensor in tensors]
    binding = session.io_binding()
    for (name, wanted), tensor in zip(inputs, held, strict=True):
        given, element_type = _ELEMENT_TYPES.get(tensor.dtype, ("", 0))
        if given != wanted:
            raise ValueError(f"Input `{name}` of the file is {wanted}, but got {tensor.dtype}.")
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
