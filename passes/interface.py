"""What a pass is written with: all names that the built-in passes use, and all that a pass of your own needs.

A pass is a `GraphPass`, which rewrites captured graphs; a `TensorPass`, which changes weights; a `ModulePass`, which
changes how modules hold their tensors and how they run; or a `Pass`, which wraps the call of the whole model. Each gets a
rewriter that finds, judges and changes places: `GraphRewriter`, `TensorRewriter`, `ModuleRewriter`. The other names are
the things that these give and take, and functions on them. All are in `passes` too: `from passes import GraphPass`.
"""

from passes.base import Context, Pass, PassResult, Precision
from passes.errors import RequirementNotMet
from passes.program.arithmetic import are_finite, exact, float64, scale_of
from passes.program.changes import Change, Skip
from passes.program.edits import AttributeEdit, Edit, TensorEdit, in_place
from passes.program.effects import Memory
from passes.program.forwards import AroundForward, inner_forward, is_atom
from passes.program.graph_pass import GraphPass
from passes.program.graph_rewriting import GraphRewriter, Node
from passes.program.hooks import is_parametrized
from passes.program.matching import (
    Affine,
    BatchNorm,
    ChannelScale,
    Convolution,
    Pair,
    batch_norm_arguments,
    convolution_arguments,
    is_stock,
)
from passes.program.memory_formats import CHANNELS_LAST_FORMATS, is_channels_last
from passes.program.model_tree import ModelTree, paths_matching, training_flags
from passes.program.module_pass import ModulePass
from passes.program.module_rewriting import ModuleChange, ModuleRewriter
from passes.program.moved_bias import mean_without
from passes.program.recording import Run, Runs, call_of, shape_of, tensor_of
from passes.program.tensor_pass import TensorPass
from passes.program.tensor_rewriting import TensorRewriter
from passes.program.tensors import TensorRef
from passes.program.weights import like_old

__all__ = [
    "CHANNELS_LAST_FORMATS",
    "Affine",
    "AroundForward",
    "AttributeEdit",
    "BatchNorm",
    "Change",
    "ChannelScale",
    "Context",
    "Convolution",
    "Edit",
    "GraphPass",
    "GraphRewriter",
    "Memory",
    "ModelTree",
    "ModuleChange",
    "ModulePass",
    "ModuleRewriter",
    "Node",
    "Pair",
    "Pass",
    "PassResult",
    "Precision",
    "RequirementNotMet",
    "Run",
    "Runs",
    "Skip",
    "TensorEdit",
    "TensorPass",
    "TensorRef",
    "TensorRewriter",
    "are_finite",
    "batch_norm_arguments",
    "call_of",
    "convolution_arguments",
    "exact",
    "float64",
    "in_place",
    "inner_forward",
    "is_atom",
    "is_channels_last",
    "is_parametrized",
    "is_stock",
    "like_old",
    "mean_without",
    "paths_matching",
    "scale_of",
    "shape_of",
    "tensor_of",
    "training_flags",
]
