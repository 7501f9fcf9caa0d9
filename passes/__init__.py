"""The passes, one per file, and the names for writing new ones. `passes.registry` looks passes up by name.

A `GraphPass` rewrites captured graphs. A `ModulePass` changes how modules hold their tensors and how they run. A plain
`Pass` wraps the call of the whole model. The first two get a rewriter, which finds, checks and changes candidates. A
file for each of them lists the names for writing it: `graph_interface` and `module_interface`.
"""

from passes import graph_interface, module_interface
from passes.base import Change, Context, Pass, PassResult, Precision, Skip
from passes.cast_precision import CastPrecision
from passes.channels_last import ChannelsLast
from passes.errors import RequirementNotMet
from passes.fold_conv_bias import FoldConvBias
from passes.fold_conv_bn import FoldConvBn
from passes.graph_interface import *  # noqa: F403 - both files define `__all__`
from passes.insert_checkpoints import InsertCheckpoints
from passes.jit_fusion import JitFusion
from passes.merge_linears import MergeLinears
from passes.module_interface import *  # noqa: F403
from passes.pad_channels import PadChannels
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
    "InsertCheckpoints",
    "JitFusion",
    "MergeLinears",
    "PadChannels",
    "Pass",
    "PassResult",
    "Precision",
    "RequirementNotMet",
    "Simplify",
    "Skip",
    "SyncBatchNorm",
    "TorchCompile",
]
__all__ += graph_interface.__all__
__all__ += module_interface.__all__
