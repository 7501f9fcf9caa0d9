"""The names for writing a `GraphPass`, which rewrites the graphs of torch.compile. `passes` exports them too."""

from passes.examples import Example
from passes.program.arithmetic import exact, float64, why_not_finite
from passes.program.effects import Memory
from passes.program.graph_pass import GraphPass
from passes.program.graph_rewriting import GraphRewriter, Node
from passes.program.layers import Affine, BatchNorm, ChannelScale, Layer, Layers, Pair
from passes.program.memory_formats import CHANNELS_LAST_FORMATS, is_channels_last, layout_of
from passes.program.model_tree import ModelTree
from passes.program.recording import Recording, operation_name

__all__ = [
    "CHANNELS_LAST_FORMATS",
    "Affine",
    "BatchNorm",
    "ChannelScale",
    "Example",
    "GraphPass",
    "GraphRewriter",
    "Layer",
    "Layers",
    "Memory",
    "ModelTree",
    "Node",
    "Pair",
    "Recording",
    "exact",
    "float64",
    "is_channels_last",
    "layout_of",
    "operation_name",
    "why_not_finite",
]
