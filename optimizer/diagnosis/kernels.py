"""Rules on layers whose sizes, biases or memory formats cost time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod

import torch
import torch.nn.functional as F

from exporters.places import paths_of
from optimize_export.wording import listed
from optimizer.diagnosis.evidence import Evidence, Seen, elements_of
from optimizer.diagnosis.findings import rule
from optimizer.showing import percent_text, seconds_text
from passes.graph.effects import kind_of_operator
from passes.graph.layers import Layer, Pair, RecordedLayers, convolution_arguments
from passes.graph.layouts import CONTIGUOUS, LAST
from passes.graph.recording import Node, Recording, call_of, operation_name, shape_of, tensor_of, users_of
from passes.pad_channels import BALANCE, IMAGE_CHANNELS

# Tensor cores are fastest with multiples of this number of channels, which are 16 bytes in half precision (NVIDIA,
# Matrix Multiplication Background User's Guide, "Tensor Core Requirements").
_MULTIPLE = 8
# The least share of the model's multiplications for a layer whose sizes matter.
_LEAST_WORK = 0.01
_PRODUCTS = frozenset({"addmm", "baddbmm", "bmm", "matmul", "mm", "rmatmul"})
_HALVES = (torch.float16, torch.bfloat16)


@rule("warning")
def bias_before_norm(evidence: Evidence) -> Iterator[Seen]:
    """A convolution or linear layer has a bias that the following BatchNorm subtracts again."""
    layers = RecordedLayers(evidence.recording.graph)
    norms = filter(None, map(layers.batch_norm_at, evidence.calls))
    pairs = [*filter(None, map(layers.pair_before, norms))]
    followed = {pair.layer.node for pair in pairs if _takes_channels_alone(pair)}
    found = {
        pair.layer.node: pair.layer
        for pair in pairs
        # The layer may also run without a BatchNorm.
        if (bias := tensor_of(pair.layer.bias)) is not None and followed.issuperset(evidence.recording.uses(bias))
    }
    for line, group in evidence.by_line(found):
        count = sum(found[node].channels for node in group)
        yield evidence.seen(
            line,
            group,
            "a layer before a BatchNorm has a bias, which the mean of the BatchNorm absorbs",
            f"it has {count:,} useless parameters, and their gradients in training",
            "make the layer with bias=False, or use the pass fold-conv-bias",
        )


@rule("warning")
def scale_computed(evidence: Evidence) -> Iterator[Seen]:
    """A layer's channels are scaled by numbers that forward computes from parameters and buffers, as in FrozenBatchNorm."""
    layers = RecordedLayers(evidence.recording.graph)
    found = {
        node: numbers
        for node in evidence.calls
        if (scale := layers.scale_at(node)) is not None
        and any(map(_computes, numbers := layers.computing(scale.numbers)))
        and layers.pair_before(scale) is not None
    }
    for line, group in evidence.by_line(found):
        nodes = {each for node in group for each in (node, *found[node])}
        yield evidence.seen(
            line,
            group,
            "a layer's output is scaled by channel with numbers that each call computes from parameters and buffers",
            f"the product and the numbers take {percent_text(evidence.share(nodes))} of the time",
            "use the pass fold-conv-bn, which folds them into the layer; without it, use nn.BatchNorm2d in eval mode with "
            "the same numbers, or compute them once and keep them in a buffer",
        )


@rule("note")
def weight_computed(evidence: Evidence) -> Iterator[Seen]:
    """Forward computes the weight of a layer from parameters, as weight_norm and spectral_norm do.

    Not reported with a training step, which needs it.
    """
    layers = RecordedLayers(evidence.recording.graph)
    found: dict[Node, list[Node]] = {}
    for node in evidence.calls if evidence.step is None else ():
        calls = layers.computing((convolution_arguments(node) or {}).get("weight"))
        if any(map(_computes, calls)):
            found[node] = calls
    for line, group in evidence.by_line(found):
        nodes = {each for node in group for each in found[node]}
        yield evidence.seen(
            line,
            group,
            "each call computes the weight of a layer from parameters",
            f"that takes {percent_text(evidence.share(nodes))} of the time",
            "for inference, compute it once, for weight_norm and the like by torch.nn.utils.parametrize.remove_parametrizations or "
            "remove_weight_norm; exported files hold the weights that these compute",
        )


@rule("note")
def channels_not_multiple_of_8(evidence: Evidence) -> Iterator[Seen]:
    """A layer with at least 1 % of the model's multiplications has channels that aren't a multiple of 8.

    Grouped convolutions, those on pooled maps, the channels of images, and layers so small that memory limits their
    speed are left out. So are linear layers in half precision on a GPU that aren't faster with multiples.
    """
    layers, work, total = _working_layers(evidence.recording)
    uneven = {node: sizes for node in layers if (sizes := _uneven(layers[node]))}
    for line, group in evidence.by_line(uneven):
        sizes = sorted({size for node in group for size in uneven[node]})
        gain = _gain(evidence, layers[max(group, key=work.__getitem__)])
        if gain is None:
            continue
        yield evidence.seen(
            line,
            group,
            f"layers have {listed([str(size) for size in sizes])} channels, not a multiple of {_MULTIPLE}",
            f"{gain}; they have "
            f"{percent_text(sum(work[node] for node in group) / total)} of the model's multiplications",
            "choose multiples in the model, or use the pass pad-channels",
        )


@rule("note")
def rows_not_multiple_of_8(evidence: Evidence) -> Iterator[Seen]:
    """The training step calls a linear layer with at least 1 % of its multiplications on rows that aren't a multiple of 8.

    The number of rows is the batch size, times the length of sequences.
    """
    layers, work, total = _working_layers(evidence.step.recording if evidence.step else Recording())
    uneven = {node: rows for node, layer in layers.items() if _is_large(layer) and (rows := _rows(layer)) % _MULTIPLE}
    if uneven:
        node = max(uneven, key=work.__getitem__)
        # The step runs the model itself, and not the copy.
        paths = paths_of(evidence.model)
        owners = (id(call_of(each).module) for each in uneven)
        yield Seen(
            tuple(dict.fromkeys(paths[owner] for owner in owners if owner in paths)),
            node.meta["line"],
            f"linear layers of the training step multiply {uneven[node]:,} rows, not a multiple of {_MULTIPLE}",
            "tensor cores in half precision are slower with them; they have "
            f"{percent_text(sum(work[each] for each in uneven) / total)} of the step's multiplications",
            f"choose a batch size that is a multiple of {_MULTIPLE}",
        )


@rule("warning")
def layout_flip(evidence: Evidence) -> Iterator[Seen]:
    """In a model in channels_last, an operation returns a contiguous map, and a later convolution converts it back."""
    convolutions = [node for node in evidence.calls if convolution_arguments(node) and operation_name(node) != "linear"]
    dims = {len(shape.sizes) for node in convolutions if (shape := shape_of(node)) is not None}
    # By call whose value was in channels_last before: the call that made a contiguous map of it, if one did.
    lost: dict[Node, Node | None] = {}
    converted: dict[Node, int] = {}
    for node in evidence.calls:
        sources, shape = node.all_input_nodes, shape_of(node)
        layout = None if shape is None or len(shape.sizes) not in dims else node.meta["layout"]
        makers = [maker for source in sources if (maker := lost.get(source)) is not None]
        if layout == LAST and node in convolutions and makers:
            converted[makers[0]] = converted.get(makers[0], 0) + sum(
                elements_of(each) for each in sources if each in lost
            )
        elif layout in (None, CONTIGUOUS) and any(each in lost or each.meta.get("layout") == LAST for each in sources):
            lost[node] = makers[0] if makers else node if layout == CONTIGUOUS else None
    for line, group in evidence.by_line(converted):
        yield evidence.seen(
            line,
            group,
            f"{' and '.join(dict.fromkeys(map(operation_name, group)))} returns a contiguous map in a model in channels_last",
            f"{sum(map(elements_of, group)):,} elements lose the format, and convolutions convert "
            f"{sum(converted[node] for node in group):,} back",
            "use an operation that keeps the format",
        )


def _takes_channels_alone(pair: Pair) -> bool:
    """Whether nothing but the BatchNorm reads the layer's output, and its channels are those of the layer."""
    channels = pair.channels
    is_alone = all(len(users_of(node)) == 1 for node in pair.way[:-1])
    return is_alone and channels is not None and channels.dim == 1


def _computes(node: Node) -> bool:
    """Whether a call computes a tensor, and doesn't only return a view or a cast."""
    return kind_of_operator(operation_name(node)) == "computes"


def _working_layers(recording: Recording) -> tuple[dict[Node, Layer], dict[Node, int], int]:
    """The layers with a share of the multiplications that matters, the multiplications of each, and those of all calls."""
    nodes, known = recording.nodes(), RecordedLayers(recording.graph)
    layers = {node: layer for node in nodes if (layer := known.layer_at(node)) is not None}
    work = {node: _multiplications(layer) for node, layer in layers.items()}
    total = sum(work.values()) + sum(map(_multiplications_of_product, nodes))
    return {node: layer for node, layer in layers.items() if work[node] >= _LEAST_WORK * total}, work, total


def _rows(layer: Layer) -> int:
    """The number of rows that a linear layer multiplies; 0 for a convolution, and for a number that isn't known."""
    source = shape_of(layer.input)
    return 0 if layer.dims or source is None else prod(source.sizes[:-1])


def _multiplications(layer: Layer) -> int:
    made = shape_of(layer.input if layer.transposed else layer.node)
    # The input may be one of several tensors that one call returned.
    return 0 if made is None else prod(made.sizes) * prod(layer.weight_shape[1:])


def _multiplications_of_product(node: Node) -> int:
    """The multiplications of a product of matrices that isn't a layer; 0 for any other call."""
    made, sources = shape_of(node), node.all_input_nodes
    if operation_name(node) not in _PRODUCTS or made is None or len(sources) < 2:
        return 0
    first = shape_of(sources[-2])
    return 0 if first is None or not first.sizes else prod(made.sizes) * first.sizes[-1]


def _is_large(layer: Layer) -> bool:
    """Whether multiplications limit the speed of a layer, and not memory."""
    given, made = layer.input_channels, layer.channels
    return prod(layer.weight_shape[2:]) * given * made >= BALANCE * (given + made)


def _uneven(layer: Layer) -> list[int]:
    """The numbers of input and output channels that aren't multiples."""
    shape = shape_of(layer.node)
    assert shape is not None
    given, made = layer.input_channels, layer.channels
    if layer.dims and prod(shape.sizes[-layer.dims :]) == 1:
        # A gate on pooled maps reads more numbers than it multiplies.
        return []
    if layer.groups > 1 or not _is_large(layer):
        return []
    is_image = layer.dims > 0 and given <= IMAGE_CHANNELS
    return [size for size in (made, *(() if is_image else (given,))) if size % _MULTIPLE]


def _gain(evidence: Evidence, layer: Layer) -> str | None:
    """The time of a linear layer with its own sizes and with multiples, measured on a GPU; None without a gain."""
    ref, source = tensor_of(layer.weight), shape_of(layer.input)
    weight = None if ref is None else ref.value
    if evidence.device.type != "cuda" or layer.dims or weight is None or weight.dtype not in _HALVES or source is None:
        return "tensor cores in half precision are slower with them"
    padded = [-(-size // _MULTIPLE) * _MULTIPLE for size in weight.shape]
    runs = [
        partial(F.linear, weight.new_ones(*source.sizes[:-1], given), weight.new_ones(out, given))
        for out, given in (tuple(weight.shape), padded)
    ]
    seconds = evidence.fastest(*runs)
    if seconds[1] >= seconds[0]:
        return None
    return (
        f"here the largest takes {seconds_text(seconds[0])}, with {padded[1]} input and {padded[0]} output channels "
        f"{seconds_text(seconds[1])}"
    )
