"""The names for writing a `ModulePass`, which changes how modules store tensors and run. `passes` exports them too."""

from passes.program.arithmetic import exact
from passes.program.backend import names_of_graph_passes
from passes.program.edits import AttributeEdit, Edit, TensorEdit, in_place
from passes.program.forwards import AroundForward, inner_forward, is_atom
from passes.program.hooks import is_parametrized
from passes.program.matching import batch_norm_arguments, convolution_arguments, is_stock
from passes.program.memory_formats import CHANNELS_LAST_FORMATS, is_channels_last
from passes.program.model_tree import ModelTree, paths_matching, training_flags
from passes.program.module_pass import ModulePass
from passes.program.module_rewriting import ModuleChange, ModuleRewriter
from passes.program.recording import Node, Run, Runs, call_of, shape_of, tensor_of
from passes.program.tensors import TensorRef

__all__ = [
    "CHANNELS_LAST_FORMATS",
    "AroundForward",
    "AttributeEdit",
    "Edit",
    "ModelTree",
    "ModuleChange",
    "ModulePass",
    "ModuleRewriter",
    "Node",
    "Run",
    "Runs",
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
    "is_stock",
    "names_of_graph_passes",
    "paths_matching",
    "shape_of",
    "tensor_of",
    "training_flags",
]
