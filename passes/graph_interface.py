"""The names for writing a `GraphPass`, which rewrites the graphs of torch.compile. `passes` exports them too."""

from passes.base import ModelTree
from passes.graph.effects import Memory
from passes.graph.graph_pass import Example, GraphPass, GraphRewriter, Node
from passes.graph.layers import (
    Affine,
    BatchNorm,
    ChannelScale,
    Layer,
    Layers,
    Pair,
    RecordedLayers,
    exact,
    float64,
    why_not_finite,
)
from passes.graph.layouts import CHANNELS_LAST_FORMATS, is_channels_last, layout_of
from passes.graph.recording import Recording, operation_name

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
    "RecordedLayers",
    "Recording",
    "exact",
    "float64",
    "is_channels_last",
    "layout_of",
    "operation_name",
    "why_not_finite",
]
