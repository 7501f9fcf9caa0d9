"""What can be done to a module: one pass a file, found by name in `passes.registry`."""

from passes.base import Context, Pass, PassResult, Precision
from passes.cast_precision import CastPrecision
from passes.channels_last import ChannelsLast
from passes.fold_conv_bias import FoldConvBias
from passes.fold_conv_bn import FoldConvBn
from passes.insert_checkpoints import InsertCheckpoints
from passes.jit_fusion import JitFusion
from passes.merge_linears import MergeLinears
from passes.pad_channels import PadChannels
from passes.program.changes import Change, Skip
from passes.program.graph_pass import GraphPass
from passes.program.graph_rewriting import GraphRewriter
from passes.program.module_pass import ModulePass
from passes.program.module_rewriting import ModuleRewriter
from passes.program.tensor_pass import TensorPass
from passes.program.tensor_rewriting import TensorRewriter
from passes.simplify import Simplify
from passes.sync_batch_norm import SyncBatchNorm
from passes.torch_compile import TorchCompile

__all__ = [
    "CastPrecision",
    "Change",
    "ChannelsLast",
    "Context",
    "FoldConvBias",
    "FoldConvBn",
    "GraphPass",
    "GraphRewriter",
    "InsertCheckpoints",
    "JitFusion",
    "MergeLinears",
    "ModulePass",
    "ModuleRewriter",
    "PadChannels",
    "Pass",
    "PassResult",
    "Precision",
    "Simplify",
    "Skip",
    "SyncBatchNorm",
    "TensorPass",
    "TensorRewriter",
    "TorchCompile",
]
