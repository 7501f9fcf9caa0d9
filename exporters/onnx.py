"""ONNX: a file for onnxruntime and every other ONNX runtime.

Three routes, in order: torch's exporter, the same without its optimizer, and the old exporter based on TorchScript. A
file is accepted if the ONNX checker passes, its open dims are those that change in the model, and onnxruntime
reproduces the model's values at every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import onnx
import onnx_ir as ir
import torch
import torch.onnx
from google.protobuf.message import DecodeError
from onnx_ir.passes.common import NameFixPass

from exporters.base import Artifact, Exporter, ExportRequest, Limit, LoadedArtifact, TensorSpec, clones
from exporters.errors import MetadataError, RouteRefused, UnknownOpset
from exporters.evidence import Evidence, gather
from exporters.exported_program import Condition, conditions_of_program, named_dims, shared_program
from exporters.isolation import refusing, silent
from exporters.onnx_session import LoadedOnnx, OnnxValues, on_cpu, session_for_proof
from exporters.places import FileValues, Program
from exporters.proof import prove_file
from exporters.routes import Route, first_right
from exporters.torch_private import with_kept_onnx_registry, without_onnx_log
from exporters.trace_conditions import watched

# Operators whose number of output rows depends on the data. Equal sizes at all calls don't prove that the size is
# constant.
_DATA_DEPENDENT = frozenset({"NonZero", "Unique", "Compress", "NonMaxSuppression"})

# From this opset on, the value of a Pad is an input; before, it is an attribute.
_WITH_VALUE = 11

# The first IR version that supports functions.
_IR_WITH_FUNCTIONS = 8

# Bytes of weights from which they are saved as external data. Protobuf can't hold more than 2 GiB, and long before that
# its readers keep three copies of a file. External data is read tensor by tensor.
EXTERNAL_DATA_FROM = 2**25

# Not a public API. If a version of torch has it elsewhere, its exporters themselves report what they can't write.
limits: Any = getattr(torch.onnx, "_constants", None)

Captured = tuple[ir.Model, Sequence[Condition], Program | None]
"""The model in the file, the conditions on the batch, and the program it was made from, where there is one."""


class OnnxExporter(Exporter):
    """The exporter to `model.onnx`, with large weights in `model.onnx.data` next to it."""

    name: ClassVar[str] = "onnx"
    file_name: ClassVar[str] = "model.onnx"

    def export(self, request: ExportRequest, directory: Path) -> Artifact:
        evidence = gather(request)
        programs: dict[str, Program | None] = {}
        limits: list[Limit] = []
        captures: dict[str, Callable[[Path], Captured]] = {
            "dynamo": lambda _: by_dynamo(evidence, request.opset, optimize=True),
            "dynamo-unoptimized": lambda _: by_dynamo(evidence, request.opset, optimize=False),
            "torchscript": lambda folder: by_torchscript(evidence, request.opset, folder),
        }

        def write(name: str, folder: Path) -> tuple[Path, ...]:
            limits.clear()
            _refuse_what_no_runtime_gives(evidence)
            with evidence.undisturbed(), refusing(), silent():
                model, conditions, programs[name] = captures[name](folder)
                _strip(model)
                keep_pads(model)
                _name_open_dims(model, evidence)
                model.metadata_props.update(evidence.metadata)
                if request.opset is not None:
                    model.ir_version = min(model.ir_version, _oldest_ir(model, request.opset))
            with refusing("the file can't be written"):
                files = save(model, folder / self.file_name)
            _check_header(onnx.load(files[0], load_external_data=False), request.opset, evidence)
            with refusing("the ONNX checker rejects the file"), silent():
                onnx.checker.check_model(str(files[0]), full_check=True)
            prove_file(evidence, session_for_proof(files[0]), files, conditions, limits)
            return files

        def known(artifact: Artifact) -> Artifact:
            header = onnx.load(artifact.path, load_external_data=False)
            graph = header.graph
            return replace(
                artifact,
                # An open dim may be an expression such as "2*batch".
                inputs=_with_dims(evidence.input_specs, graph.input),
                outputs=_with_dims(evidence.output_specs, graph.output),
                opset=_opset(header),
                program=programs[artifact.route],
                limits=tuple(limits),
                values=self.values,
                unoptimized=self.load_unoptimized,
            )

        routes = [Route(name, partial(write, name)) for name in captures]
        return first_right(self, request, evidence, routes, directory, known)

    @staticmethod
    def load(path: Path, device: str) -> LoadedArtifact:
        return LoadedOnnx(path, torch.device(device))

    @staticmethod
    def load_unoptimized(path: Path, device: str) -> LoadedArtifact:
        """Load the file with onnxruntime's graph optimizations off."""
        if device == "cpu":
            return on_cpu(path, optimize=False)
        return LoadedOnnx(path, torch.device(device), optimize=False)

    @staticmethod
    def read_metadata(path: Path) -> Mapping[str, str]:
        try:
            header = onnx.load(path, load_external_data=False)
        except DecodeError as error:
            raise MetadataError(f"The metadata of {path.name} can't be read: it isn't an ONNX file.") from error
        return {entry.key: entry.value for entry in header.metadata_props}

    @staticmethod
    def values(path: Path, device: str, names: Collection[str] | None) -> FileValues:
        """Load the file so that it returns the values with these names; None means all."""
        return OnnxValues(path, torch.device(device), names)


def by_dynamo(evidence: Evidence, opset: int | None, *, optimize: bool) -> Captured:
    # These only name the dims: they are open in the capture.
    names = tuple(named_dims(spec) or None for spec in evidence.input_specs)
    with with_kept_onnx_registry():
        program = torch.onnx.export(
            shared_program(evidence),
            opset_version=opset,
            dynamo=True,
            dynamic_shapes=names if any(names) else None,
            custom_translation_table={
                torch.ops.aten.scaled_dot_product_attention.default: _attention,
                torch.ops.aten._is_all_true.default: _all_true,
                torch.ops.aten.as_strided.default: _as_strided,
            },
            optimize=optimize,
            verbose=False,
        )
    if program is None or program.exported_program is None:
        raise RouteRefused("torch.onnx.export returned no program")
    exported = program.exported_program
    renamed = _name_ends(program.model, evidence.adapter.input_names, evidence.adapter.output_names)
    known = Program.of(exported, evidence.adapter.model, renamed)
    return program.model, conditions_of_program(exported, evidence), known


def _name_ends(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> dict[str, str]:
    """Name the inputs and outputs of a file, and rename the values inside that have one of these names.

    torch's exporter renames only the ends, although it names the values inside after operations: `mean`, `relu`. Return
    the new names by torch's names.
    """
    graph = model.graph
    seen = {*graph.inputs, *graph.initializers.values()}
    for index, value in enumerate(graph.outputs):
        # A value with another name of its own, such as an input that is returned, gets the second one from a node.
        # onnx_ir's OutputFixPass leaves out weights that are returned.
        if value in seen:
            copy = ir.Value(name=f"{value.name}_output_{index}", type=value.type, shape=value.shape)
            graph.append(ir.Node("", "Identity", [value], outputs=[copy]))
            graph.outputs[index] = copy
        seen.add(graph.outputs[index])
    ends = (*graph.inputs, *graph.outputs)
    values = dict.fromkeys((*ends, *(value for node in graph for value in node.outputs)))
    before = {value: value.name for value in values}
    for value, name in zip(ends, (*inputs, *outputs), strict=True):
        value.name = name
    NameFixPass()(model)
    return {name: value.name for value, name in before.items() if name and name != value.name}


def by_torchscript(evidence: Evidence, opset: int | None, folder: Path) -> Captured:
    adapter = evidence.adapter
    axes = {spec.name: named_dims(spec) for spec in (*evidence.input_specs, *evidence.output_specs)}
    # Export to a file: above 2 GiB this exporter writes the weights next to it. The folder is removed after the export.
    raw = folder / "raw"
    raw.mkdir()
    # By default the exporter switches a module in training mode to eval.
    mode: dict[str, Any] = {"training": torch.onnx.TrainingMode.PRESERVE} if adapter.training else {}
    with without_onnx_log(), watched(evidence) as conditions:
        torch.onnx.export(
            adapter,
            clones(evidence.inputs[0]),
            str(raw / "model.onnx"),
            input_names=list(adapter.input_names),
            output_names=list(adapter.output_names),
            opset_version=opset,
            dynamo=False,
            dynamic_axes={name: dims for name, dims in axes.items() if dims},
            verbose=False,
            **mode,
        )
    return ir.load(raw / "model.onnx"), conditions(), None


def _refuse_what_no_runtime_gives(evidence: Evidence) -> None:
    for side, specs in (("input", evidence.input_specs), ("output", evidence.output_specs)):
        for spec in specs:
            if spec.dtype.startswith("complex"):
                raise RouteRefused(
                    f"{side} `{spec.name}` is {spec.dtype}, which ONNX runtimes don't support: use its real and "
                    "imaginary parts in the model, as torch.view_as_real returns them, or export to torchscript or "
                    "pt2"
                )
    if evidence.draws:
        raise RouteRefused(
            f"the model draws random numbers at {evidence.draws}, and an ONNX runtime draws different ones: make "
            "them an input, or export to torchscript or pt2, which draw the same as torch"
        )


def _strip(model: ir.Model) -> None:
    """Remove details of the build machine and of the model's source, and name every node."""
    # onnx_ir's ClearMetadataAndDocStringPass leaves those of the model and of values.
    graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    nodes = [node for graph in graphs for node in graph.all_nodes()]
    values = [value for owner in (*graphs, *nodes) for value in (*owner.inputs, *owner.outputs) if value is not None]
    for each in (model, *graphs, *nodes, *values, *model.graph.initializers.values()):
        each.doc_string = None
        each.metadata_props.clear()
    NameFixPass()(model)


def _name_open_dims(model: ir.Model, evidence: Evidence) -> None:
    """Set the output dims to the sizes and names seen in the model. These are only labels; the values prove them.

    The old exporter loses sizes and invents names for them. A fixed dim that must be open stays fixed: it reveals a
    batch that was baked in.
    """
    data_dependent = any(node.op_type in _DATA_DEPENDENT for node in model.graph.all_nodes())
    symbols = {size for spec in evidence.input_specs for size in spec.shape if isinstance(size, str)}
    for value, spec in zip(model.graph.outputs, evidence.output_specs, strict=True):
        shape = value.shape
        if shape is None or len(shape) != len(spec.shape):
            value.shape = ir.Shape(spec.shape)
            continue
        dims: list[int | str] = []
        for dim, (found, size) in enumerate(zip(shape, spec.shape, strict=True)):
            if isinstance(found, int):
                dims.append(found)
            elif size in symbols or (isinstance(size, int) and not data_dependent):
                dims.append(size)
            else:
                dims.append(found.value or f"{spec.name}_dim_{dim}")
        value.shape = ir.Shape(dims)


def _oldest_ir(model: ir.Model, opset: int) -> int:
    """The lowest IR version that supports the opset and the model's functions.

    A runtime that knows no newer opset can't read a newer IR version.
    """
    oldest = int(onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)]))
    return max(oldest, _IR_WITH_FUNCTIONS) if model.functions else oldest


def _check_header(header: onnx.ModelProto, opset: int | None, evidence: Evidence) -> None:
    """Refuse a file with another opset than requested, or whose open dims aren't those that change in the model.

    torch silently keeps its own opset where it can't convert the model to the requested one.
    """
    if opset is not None and (written := _opset(header)) != opset:
        raise RouteRefused(f"torch's exporter writes opset {written} instead of {opset}")
    for side, values, specs in (
        ("input", header.graph.input, evidence.input_specs),
        ("output", header.graph.output, evidence.output_specs),
    ):
        names = [value.name for value in values]
        if names != [spec.name for spec in specs]:
            raise RouteRefused(f"the file's {side}s are {', '.join(names)}")
        for own, spec in zip(_with_dims(specs, values), specs, strict=True):
            if len(own.shape) != len(spec.shape):
                raise RouteRefused(f"{side} `{spec.name}` has {len(own.shape)} dims instead of {len(spec.shape)}")
            for dim, (found, expected) in enumerate(zip(own.shape, spec.shape, strict=True)):
                if isinstance(expected, str) and isinstance(found, int):
                    raise RouteRefused(f"dim {dim} of {side} `{spec.name}` is fixed to {found}, but must be open")
                if isinstance(expected, int) and isinstance(found, int) and found != expected:
                    raise RouteRefused(f"dim {dim} of {side} `{spec.name}` is {found} instead of {expected}")


def _opset(header: onnx.ModelProto) -> int | None:
    return next((entry.version for entry in header.opset_import if entry.domain in ("", "ai.onnx")), None)


def _with_dims(specs: Sequence[TensorSpec], values: Sequence[onnx.ValueInfoProto]) -> tuple[TensorSpec, ...]:
    """The signature in the file."""
    dims = [
        [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in value.type.tensor_type.shape.dim]
        for value in values
    ]
    return tuple(replace(spec, shape=tuple(shape)) for spec, shape in zip(specs, dims, strict=True))


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


def refuse_opset(opset: object, formats: Sequence[str]) -> None:
    """Raise UnknownOpset if no file can be written with that opset, or if none of the formats has an opset."""
    if opset is None:
        return
    if not isinstance(opset, int) or isinstance(opset, bool):
        raise UnknownOpset(f"The opset must be a whole number, not {opset!r}.")
    if "onnx" not in formats:
        raise UnknownOpset(
            f"opset applies to ONNX files only, but the formats are {', '.join(formats)}: add onnx, or leave out opset."
        )
    known = opsets()
    if opset not in known:
        raise UnknownOpset(
            f"Opset {opset} isn't available here: torch's exporters write opsets {known[0]} to {known[-1]}."
        )


def opsets() -> range:
    """The opsets that torch's exporters write."""
    # Below the base opset, the weights are inputs of the file.
    newest = getattr(limits, "ONNX_MAX_OPSET", onnx.defs.onnx_opset_version())
    return range(getattr(limits, "ONNX_BASE_OPSET", 9), newest + 1)


# ------------------------------------------- operators that torch translates wrongly, or that onnxruntime fuses wrongly


def _all_true(x: Any) -> Any:
    """Whether a bool tensor is all true, as a bool of shape (): the condition in `torch._check_tensor_all`."""
    from onnxscript import opset18 as op

    return op.Cast(op.ReduceMin(op.Cast(x, to=ir.DataType.INT32), keepdims=0), to=ir.DataType.BOOL)


def _as_strided(x: Any, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None) -> Any:
    """A view of a tensor's storage; the tensor itself if the view has its sizes in row-major order.

    torch captures an average over whole channels-last images as a mean and such a view. torch's translation gathers the
    elements by indices from a Range over the batch. With a Range over an open size, OpenVINO 2026.4 drops the bias of
    the first quantized convolution.

    Where a size is open, `size` and `stride` hold values in the file instead of ints.
    """
    from onnxscript import opset18 as op
    from onnxscript.function_libs.torch_lib.ops.core import aten_as_strided

    offset = 0 if storage_offset is None else storage_offset
    if isinstance(offset, int) and offset == 0 and _is_whole(x, size, stride):
        return op.Identity(x)
    return aten_as_strided(x, size, stride, offset)


def _is_whole(x: Any, size: Sequence[Any], stride: Sequence[Any]) -> bool:
    """Whether a view has the sizes of `x` in row-major order. Open sizes are assumed to be equal, which the proof checks."""
    if x.shape is None or len(x.shape) != len(size):
        return False
    expected: int | None = 1
    for own, length, step in reversed(list(zip(x.shape, size, stride, strict=True))):
        if isinstance(own, int) != isinstance(length, int) or (isinstance(own, int) and own != length):
            return False
        if own == 1:
            continue
        if not isinstance(step, int) or step != expected:
            return False
        # Strides of dims before an open one would be open too.
        expected = expected * length if isinstance(length, int) else None
    return True


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention that returns zeros for a query that can attend to no key, such as a padded position.

    For such a query, torch's translation returns the mean of all values if the mask is bool, and NaN if it is -inf, but
    `torch.nn.functional.scaled_dot_product_attention` returns zeros. Torch's also swaps the last dims of the keys by their
    sizes at each call, in five nodes that a GPU leaves to the CPU.

    The shapes are (batch, heads, queries, width) of the query and (batch, heads, keys, width) of key and value. The mask
    is bool or float, broadcastable to (batch, heads, queries, keys).
    """
    # The import is slow, and only captures with this operator need it.
    from onnxscript import opset18 as op
    from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention

    width = None if query.shape is None else query.shape[-1]
    if dropout_p or is_causal or enable_gqa or key.shape is None or not isinstance(width, int):
        output = aten_scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    else:
        # As torch does: both factors are scaled, which overflows later than scaling their product.
        root = math.sqrt(1 / math.sqrt(width) if scale is None else scale)
        last = len(key.shape) - 1
        turned = op.Mul(op.Transpose(key, perm=[*range(last - 1), last, last - 1]), root)
        scores = op.MatMul(op.Mul(query, root), turned)
        if attn_mask is not None:
            added = attn_mask
            if attn_mask.dtype == ir.DataType.BOOL:
                lowest = op.Constant(value_float=float("-inf"))
                added = op.CastLike(op.Where(attn_mask, op.Constant(value_float=0.0), lowest), query)
            scores = op.Add(scores, added)
        output = op.MatMul(op.Softmax(scores, axis=-1), value)
    if attn_mask is None:
        return output
    allowed = attn_mask
    if attn_mask.dtype != ir.DataType.BOOL:
        allowed = op.Greater(op.Cast(attn_mask, to=ir.DataType.FLOAT), op.Constant(value_float=float("-inf")))
    # A sum, not a maximum: onnxruntime's symbolic shape inference can't infer the shape of a ReduceMax.
    some_key = op.Cast(op.ReduceSum(op.Cast(allowed, to=ir.DataType.INT32), [-1]), to=ir.DataType.BOOL)
    return op.Where(some_key, output, op.CastLike(op.Constant(value_float=0.0), output))


def keep_pads(model: ir.Model) -> None:
    """Leave the value zero out of each Pad before a MaxPool, so that onnxruntime doesn't fuse the two.

    onnxruntime turns a Pad with zeros into the padding of the following MaxPool, which pads with minus infinity. This
    changes the maximum of a window whose values are all negative. It doesn't fuse a Pad whose value has an empty name.
    Such a Pad has the same results, because zero is the default.

    Raises:
        RouteRefused: in this opset the value is an attribute, or it isn't a constant.
    """
    opset = model.opset_imports.get("") or 0
    for node in model.graph.all_nodes():
        if node.op_type != "Pad" or all(use.node.op_type != "MaxPool" for use in node.outputs[0].uses()):
            continue
        if node.attributes.get_string("mode", "constant") != "constant" or node.attributes.get_float("value", 0.0):
            continue
        value = node.inputs[2] if len(node.inputs) > 2 else None
        number = None if value is None else ir.convenience.get_const_tensor(value)
        if value is not None and number is None:
            raise RouteRefused(
                "onnxruntime treats zero padding before a maximum as minus infinity, and its value isn't known"
            )
        if opset < _WITH_VALUE:
            raise RouteRefused(
                f"onnxruntime treats zero padding before a maximum as minus infinity in opset {opset}: use {_WITH_VALUE} "
                "or later"
            )
        if number is None or not number.numpy().any():
            node.resize_inputs(max(3, len(node.inputs)))
            node.replace_input_with(2, None)
