"""What can be done to a module: one pass a file, found by name in `passes.registry`; and what passes are written with."""

from passes import interface
from passes.cast_precision import CastPrecision
from passes.channels_last import ChannelsLast
from passes.fold_conv_bias import FoldConvBias
from passes.fold_conv_bn import FoldConvBn
from passes.insert_checkpoints import InsertCheckpoints
from passes.interface import *  # noqa: F403 - their one list is there
from passes.jit_fusion import JitFusion
from passes.merge_linears import MergeLinears
from passes.pad_channels import PadChannels
from passes.simplify import Simplify
from passes.sync_batch_norm import SyncBatchNorm
from passes.torch_compile import TorchCompile

__all__ = [
    "CastPrecision",
    "ChannelsLast",
    "FoldConvBias",
    "FoldConvBn",
    "InsertCheckpoints",
    "JitFusion",
    "MergeLinears",
    "PadChannels",
    "Simplify",
    "SyncBatchNorm",
    "TorchCompile",
]
__all__ += interface.__all__
