"""Write ONNX files."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

# Bytes of weights from which they are saved as external data. Protobuf can't hold more than 2 GiB, and long before that
# its readers keep three copies of a file. External data is read tensor by tensor.
EXTERNAL_DATA_FROM = 2**25


def save(model: ir.Model, path: Path) -> tuple[Path, ...]:
    """Write `model` to `path`, large weights to `<path>.data`; return the files.

    The shapes of weights are removed from `model`, also from its list of shapes in the file. The weights themselves
    hold them, and tools change a weight without that list: `onnxruntime.quantization` transposes the weight of a Gemm
    and then fails, since the list still has the old shape.
    """
    size = 0
    for graph in model.graphs():
        for value in graph.initializers.values():
            size += 0 if value.const_value is None else value.const_value.nbytes
            if not value.is_graph_input():
                value.shape = value.type = None
    if size < EXTERNAL_DATA_FROM:
        ir.save(model, path)
        return (path,)
    weights = path.with_name(f"{path.name}.data")
    ir.save(model, path, external_data=weights.name)
    return (path, weights)
