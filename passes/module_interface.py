"""The names for writing a `ModulePass`, which changes how modules store tensors and run. `passes` exports them too."""

from passes.base import Edit, ModelTree, TensorRef, paths_matching
from passes.graph.backend import names_of_graph_passes
from passes.graph.edits import AttributeEdit, TensorEdit, in_place
from passes.graph.forwards import AroundForward, inner_forward, is_atom, is_parametrized
from passes.graph.layers import batch_norm_arguments, convolution_arguments, exact
from passes.graph.layouts import CHANNELS_LAST_FORMATS, is_channels_last
from passes.graph.module_pass import ModulePass, ModuleRewriter
from passes.graph.recording import Node, call_of, shape_of, tensor_of

__all__ = [
    "CHANNELS_LAST_FORMATS",
    "AroundForward",
    "AttributeEdit",
    "Edit",
    "ModelTree",
    "ModulePass",
    "ModuleRewriter",
    "Node",
    "TensorEdit",
    "TensorRef",
    "batch_norm_arguments",
    "call_of",
    "convolution_arguments",
    "exact",
    "in_place",
    "inner_forward",
    "is_atom",
    "is_channels_last",
    "is_parametrized",
    "names_of_graph_passes",
    "paths_matching",
    "shape_of",
    "tensor_of",
]
