"""The passes of this package, and the presets of each mode."""

from __future__ import annotations

from passes.base import Pass
from passes.cast_precision import CastPrecision
from passes.channels_last import ChannelsLast
from passes.fold_conv_bias import FoldConvBias
from passes.fold_conv_bn import FoldConvBn
from passes.insert_checkpoints import InsertCheckpoints
from passes.jit_fusion import JitFusion
from passes.merge_linears import MergeLinears
from passes.pad_channels import PadChannels
from passes.simplify import Simplify
from passes.sync_batch_norm import SyncBatchNorm
from passes.torch_compile import TorchCompile

BUILT_IN: tuple[type[Pass], ...] = (
    FoldConvBias,
    FoldConvBn,
    ChannelsLast,
    Simplify,
    MergeLinears,
    PadChannels,
    JitFusion,
    CastPrecision,
    SyncBatchNorm,
    InsertCheckpoints,
    TorchCompile,
)

# Passes that are exact, support export and need no compile time.
PRESETS: dict[str, tuple[str, ...]] = {
    "inference": (FoldConvBias.name, FoldConvBn.name, ChannelsLast.name),
    "training": (FoldConvBias.name,),
}
